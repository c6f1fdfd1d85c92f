"""What docs/memory.md says in sentences of the GPU is what the result files hold; its table and the
sentence on shapes are held by test_tables.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from docskit import PAGES, ROOT

MEMORY = " ".join(PAGES["docs/memory.md"].split())
RESULTS = ROOT / "assets" / "results"


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """The rows by name."""
    found = json.loads((RESULTS / "performance-queue.json").read_text(encoding="utf-8"))["rows"]
    return {row["row"]: row for row in found}


def peak(row: dict[str, Any]) -> tuple[int, int]:
    """Return the largest peak of a row, which is training's, and its estimate."""
    memory = row["result"]["memory"]
    assert memory["train"]["measured"] == max(one["measured"] for one in memory.values())
    return memory["train"]["measured"], memory["train"]["estimate"]


def test_estimates_hold(rows: dict[str, Any]) -> None:
    assert "the peaks are within 1 % of them for Stable Diffusion 3.5 and FLUX" in MEMORY
    assert "and within 4 % for Wan" in MEMORY
    most = {"sd3": 0.01, "flux": 0.01, "wan": 0.04}
    for name, row in rows.items():
        if name == "nccl" or "failed" in row:
            continue
        measured, guess = peak(row)
        assert abs(measured / guess - 1) < most[name.split()[0]], name


def test_adapters_in_float32_cost_what_is_said(rows: dict[str, Any]) -> None:
    names = ("sd3 native, written-out norms, before", "sd3 native, float32 adapters")
    now, before = (rows[name]["result"] for name in names)
    longer = [100 * (before["seconds"][k] / now["seconds"][k] - 1) for k in ("rollout", "train")]
    more = (peak({"result": before})[0] - peak({"result": now})[0]) / 2**30
    said = f"took {longer[0]:.0f} % longer in sampling and {longer[1]:.0f} % in training, and"
    assert f"{said} {more:.1f} GiB more" in MEMORY
    for row in rows.values():
        if "result" in row:
            assert row["result"]["environment"]["gpus"] == ["NVIDIA H200"]


def test_what_failed_and_what_was_right(rows: dict[str, Any]) -> None:
    assert "cuDNN's attention fails in FLUX's backward pass" in MEMORY
    cudnn = rows["flux native, which then was cuDNN's"]
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in cudnn["failed"]
    assert rows["flux native"]["result"]["runtime"]["attention"] == "native"
    assert rows["flux _native_flash"]["result"]["mfu"]["rollout"] > 0.3
    assert rows["nccl"]["result"]["right"]
    assert "NCCL added up rightly" in " ".join(PAGES["docs/distributed.md"].split())
