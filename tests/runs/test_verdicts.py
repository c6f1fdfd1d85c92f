"""Samples that were judged: who says so, where it is kept, how the grids of a run and of a
comparison show it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toykit
from comparekit import SMALL, plan, tick
from gridkit import plain

from flowrl.cli.main import main
from flowrl.core.errors import RewardError, RunError
from flowrl.core.prompts import PromptSet
from flowrl.evaluation.image_grids import RIGHT, WRONG, load_strip, save_strip
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.runs import evaluate as evaluate_module
from flowrl.runs.compare.compare import run_comparison, sample_grid
from flowrl.runs.evaluate import verdicts
from flowrl.runs.folder import read_verdicts, strip_file
from flowrl.runs.report.samples import run_grid
from rewards.shapes import shapes


def trainer(records: list[dict[str, Any]], reward: Any) -> Any:
    """Make what `verdicts` reads of a trainer; all records are on the grid, in their order."""
    config = SimpleNamespace(headline="score", samples=SimpleNamespace(prompts=len(records)))
    texts = [record["prompt"] for record in records]
    held_out = PromptSet(texts, records, "", "")
    return SimpleNamespace(config=config, test_set=held_out, rewards={"score": reward})


def test_a_reward_that_says_right_or_wrong_judges_the_samples() -> None:
    """Rendered scenes of their own prompts are right, and wrong under each other's."""
    records = [{**all_records()["colors"][i], "tag": "colors"} for i in (0, 30)]
    images = render(scenes_for(records, np.random.default_rng(0)))
    strict = trainer(records, shapes(mode="strict"))
    assert verdicts(strict, images) == [True, True]
    assert verdicts(strict, images.flip(0)) == [False, False]
    assert verdicts(trainer(records, shapes(mode="graded")), images) == []
    silent = trainer(records, lambda batch: torch.tensor([1.0, math.nan]))
    silent.rewards["score"].says_right = True
    assert verdicts(silent, images) == [True, None]


def test_the_grid_frames_what_was_judged(tmp_path: Path) -> None:
    for iteration in (0, 20):
        save_strip(plain((0, 0, 255), (0, 0, 255)), tmp_path / f"samples/{iteration:06d}.png")
    record = {"prompts": ["a", "b"], "height": 8, "width": 8}
    (tmp_path / "samples/prompts.json").write_text(json.dumps(record))
    file = tmp_path / "samples/verdicts.json"

    def frames() -> list[bool]:
        pixels = np.asarray(run_grid(tmp_path))
        return [bool((pixels == color).all(-1).any()) for color in (RIGHT, WRONG)]

    assert frames() == [False, False]
    file.write_text(json.dumps({"0": [None, False], "20": [None, None]}))
    assert frames() == [False, True]
    file.write_text(json.dumps({"20": [True, False]}))
    assert frames() == [True, True]
    assert main(["grid", str(tmp_path), "--json", f"{tmp_path}/g.json"]) == 0
    said = json.loads((tmp_path / "g.json").read_text())
    assert (said["iterations"], said["right"]) == ([0, 20], {"20": [True, False]})
    file.write_text(json.dumps({"20": ["yes", False]}))
    with pytest.raises(RunError, match="verdicts.json: expected"):
        run_grid(tmp_path)


@pytest.mark.integration
@pytest.mark.parametrize("judges", [True, False])
def test_a_run_ends_with_what_the_frames_mean(
    home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    judges: bool,
) -> None:
    monkeypatch.setattr(toykit.reddish, "says_right", judges, raising=False)
    words = ["train", f"{home}/toy.yaml", "--run", f"{tmp_path}/run", "train.iterations=1"]
    words += ["rewards.strict={fn: toykit.reddish, weight: 0}", "eval.score=strict"]
    assert main([*words, "--plugin", "toykit"]) == 0
    assert ("a green frame marks a right image" in capsys.readouterr().err) == judges


@pytest.mark.integration
def test_the_grid_of_a_comparison_frames_what_was_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Frames are green where the image is more red than green, as `reddish` says, else red."""
    tick(monkeypatch)

    def frames(folder: Path) -> list[bool]:
        what = plan(folder, overrides=(*SMALL, "model.seed=1"))
        pixels = np.asarray(sample_grid(run_comparison(what, quiet=True), what.runs))
        return [bool((pixels == color).all(-1).any()) for color in (RIGHT, WRONG)]

    assert frames(tmp_path / "silent") == [False, False]  # it does not say that it is a verdict
    monkeypatch.setattr(toykit.reddish, "says_right", True, raising=False)
    seen, found = frames(tmp_path / "judged"), []
    for name in ("base", "toy-a/seed0"):
        run = tmp_path / "judged/runs" / name
        (last, right), *_ = sorted(read_verdicts(run).items(), reverse=True)
        images = load_strip(strip_file(run, last), len(right))
        assert right == [bool(one[0].mean() > one[1].mean()) for one in images]
        found += right
    assert seen == [True in found, False in found] and True in found
    # a checker that fails costs the frames alone, and says so
    monkeypatch.setattr(evaluate_module, "ask", failing)
    assert frames(tmp_path / "failing") == [False, False]
    assert "the samples are not judged: no answer" in capsys.readouterr().err


def failing(*_: Any) -> None:
    raise RewardError("no answer")
