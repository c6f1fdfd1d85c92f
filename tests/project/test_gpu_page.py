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
    assert rows["nccl"]["result"]["right"] and "NCCL added up rightly" in MEMORY
    # "less of the device than we want (half of its peak in sampling, .45 in training)"
    shares = [row["result"].get("mfu") or {} for row in rows.values() if "result" in row]
    assert all(one["rollout"] < 0.5 and one["train"] < 0.45 for one in shares if one)


def test_where_the_time_goes(rows: dict[str, Any]) -> None:
    found = rows["sd3 large"]["result"]["kernels"]
    sampling, training = found["rollout"], found["train"]
    busy = [round(100 * one["busy"]) for one in (sampling, training)]
    assert f"it was busy for {busy[0]} % of sampling and {busy[1]} % of training." in MEMORY
    shares = {name: group["seconds"] for name, group in sampling["groups"].items()}
    shares = {name: round(100 * s / sampling["seconds"]) for name, s in shares.items()}
    said = (
        f"Matrix products are {shares['products']} % of that sampling, attention "
        f"{shares['attention']} %, what is done element by element {shares['element by element']} "
        f"%, copies {shares['copies']} % and norms {shares['norms']} %."
    )
    assert said in MEMORY
    # in each of 10 calls q and k of 24 blocks, of image and text, and of 13 second attentions
    norm = next(one for one in sampling["longest"] if "layer_norm" in one["name"])
    assert norm["calls"] == 10 * (24 * 4 + 13 * 2)
    share = round(100 * norm["seconds"] / sampling["seconds"])
    assert f"it is still {share} % of that sampling" in MEMORY
    # 32 images of 1,024 tokens and texts of 333, 1,536 numbers in bfloat16, read and written, at
    # 4.3 TB/s, what a copy reached on such a card
    tokens = 1024 * (24 * 2 + 13 * 2) + 333 * 24 * 2
    least = 10 * 32 * tokens * 1536 * 2 * 2 / 4.3e12
    assert 9 < norm["seconds"] / least < 12 and "some ten times what" in MEMORY


def test_norms_in_one_kernel(rows: dict[str, Any]) -> None:
    one, out, before = (
        rows[f"sd3 large{more}"]["result"]
        for more in ("", ", written-out norms", ", written-out norms, before")
    )
    peaks = [f"{peak({'result': row})[0] / 2**30:.1f}" for row in (one, before)]
    assert f"the peak is {peaks[0]} in place of {peaks[1]} GiB" in MEMORY
    less = [less_time(one, before, phase) for phase in ("rollout", "train")]
    assert f"sampling takes {less[0]} % less time and training {less[1]} %." in MEMORY
    few = [rows[f"sd3 native{more}"]["result"] for more in ("", ", written-out norms, before")]
    less = [less_time(few[0], few[1], phase) for phase in ("rollout", "train")]
    assert f"it is {less[0]} % less and {-less[1]} % more" in MEMORY
    assert one["environment"] == out["environment"]
    others = [row["seconds"]["decode"] + row["seconds"]["reward"] for row in (one, out)]
    assert others[1] > 5 * others[0]  # "several times as long"


def less_time(now: dict[str, Any], before: dict[str, Any], phase: str) -> int:
    """Return by how many percent a phase is shorter."""
    return round(100 * (1 - now["seconds"][phase] / before["seconds"][phase]))
