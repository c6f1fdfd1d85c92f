"""A made-up run: its logs, its summary and its samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gridkit import plain

from flowrl.core.errors import FlowRLError, RunError
from flowrl.evaluation.image_grids import save_strip
from flowrl.runs.view import apart


def evaluated(iteration: int, mean: float, **tasks: float) -> dict[str, Any]:
    """Make up a row of eval.jsonl."""
    scores = {}
    for name, m in tasks.items():
        scores[name] = {"mean": m, "interval": [m - 0.05, m + 0.05], "images": 24}
    interval = [mean - 0.02, mean + 0.02]
    head = {"iteration": iteration, "score": "strict", "strict": mean, "interval": interval}
    return {**head, "tasks": scores}


# the ticks of an axis, as many digits as their distance needs
TICKS: list[tuple[list[float], str]] = [
    ([0, 0.5, 1], "0 0.5 1.0"),
    ([0.995, 1, 1.005], "0.995 1.000 1.005"),
    ([20000, 20001, 20002], "20000 20001 20002"),
    ([0, 1e-5, 2e-5], "0 1e-5 2e-5"),
    ([1e-5, 1.005e-5, 1.01e-5], "1.000e-5 1.005e-5 1.010e-5"),
    ([100000, 150000, 200000], "1.0e5 1.5e5 2.0e5"),
    ([-0.2, 0, 0.2], "-0.2 0 0.2"),
]

BEFORE = evaluated(0, 0.4, colors=0.5, position=0.3)
AFTER = evaluated(40, 0.7, colors=0.9, position=0.5)


def lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder: Path, *, iterations: int = 45, shift: float = 0.0, samples: int = 3) -> Path:
    """Make up a run: its logs, its summary and the strips of its grid."""
    strips = folder / "samples"
    strips.mkdir(parents=True)
    (folder / "config.yaml").write_text("seed: 0\nnote: '<script>alert(1)</script> & co'\n")
    timing = {"rollout": 2.0, "update": 1.0, "total": 3.5, "images_per_s": 9}
    metrics = []
    for i in range(iterations):
        kl = 1e-5 if i else None
        reward = i / 100 + shift
        metrics.append({"iteration": i, "reward": reward, "approx_kl": kl, "grad_norm": 0.5})
    lines(folder / "metrics.jsonl", metrics)
    lines(folder / "timing.jsonl", [{"iteration": i, **timing} for i in range(iterations)])
    lines(folder / "eval.jsonl", [BEFORE, AFTER])
    summary = {"before": BEFORE, "after": AFTER, "device": "<cpu>"}
    (folder / "summary.json").write_text(json.dumps(summary))
    for i in range(0, 20 * samples, 20):
        save_strip(plain((i, 250, 1), (i, 250, 2)), strips / f"{i:06d}.png")
    record = {"prompts": ["a", "b"], "height": 8, "width": 8}
    (strips / "prompts.json").write_text(json.dumps(record))
    return folder


def answer_here(patch: pytest.MonkeyPatch) -> None:
    """Let the pages' statistics be worked out in this process, by the same functions."""

    def answer(question: dict[str, Any]) -> Any:
        asked = json.loads(json.dumps(question))
        try:
            found = apart._verdict(**asked) if "run" in asked else apart._strengths(**asked)
        except FlowRLError as error:
            raise RunError(str(error)) from error
        return json.loads(json.dumps(found))

    patch.setattr(apart, "_asked", answer)
