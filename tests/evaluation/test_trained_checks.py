"""Trained runs on further lists, beside the base model: by hand, on models whose images are
known."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from circlekit import CIRCLE, Painter, circles
from scriptkit import module_of

from flowrl.core.errors import ConfigError


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    return module_of("results/demonstration", "trained_checks")


class _Better(Painter):
    """Red circles, all of them whole."""

    def decode(self, x0: torch.Tensor) -> torch.Tensor:
        return circles(*[(0, 32, 32)] * len(x0))


def test_the_command_by_hand(
    checks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base model has 4 of 6 images right, as every third is cut off; one run has all, the other
    has as many as the base: 2/3, and (1 + 2/3) / 2 = 5/6 after training, a gain of 1/6."""
    (tmp_path / "one.jsonl").write_text(json.dumps(CIRCLE) + "\n")
    lists = {
        "hard": str(tmp_path / "one.jsonl"),
        "out of distribution": str(tmp_path / "one.jsonl"),
    }
    runs = [tmp_path / "good", tmp_path / "idle"]
    monkeypatch.setattr(checks, "LISTS", lists)
    seeds = [{"seed": 0}, {"seed": 1}]
    monkeypatch.setattr(checks, "described", lambda *_: {"config": "shapes-awm", "runs": seeds})
    monkeypatch.setattr(checks, "chosen_checkpoint", lambda run: run)
    opened = []

    def model(self: Any, setting: Any) -> Any:
        opened.append((Path(setting.target).name, setting.guidance, setting.steps, setting.seed))
        return _Better() if "good" in setting.target else Painter()

    monkeypatch.setattr(checks.Bench, "model", model)
    words = [*map(str, runs), "--per-task", "6", "--work", str(tmp_path / "work")]
    out = tmp_path / "out.json"
    monkeypatch.setattr("sys.argv", ["trained_checks.py", *words, "--out", str(out)])
    checks.main()
    result = json.loads(out.read_text())
    found = result["lists"]["hard"]
    assert found["base"]["mean"] == pytest.approx(2 / 3) and found["base"]["images"] == 6
    assert found["rl"]["mean"] == pytest.approx(5 / 6) and found["rl"]["images"] == 12
    for run, base in checks.GAINS:
        gain = found[f"{run}_minus_{base}"]
        assert gain["mean"] == gain["tasks"]["single_object"]["mean"] == pytest.approx(1 / 6)
    # one noise for all; guidance and steps as the demonstration found them
    plain, guided = (1.0, 10, 260_023), (2.5, 40, 260_023)
    assert opened[:2] == [("shapes-sd3", *plain), ("shapes-sd3", 5.0, 40, 260_023)]
    assert opened[2:6] == [("good", *plain), ("good", *guided), ("idle", *plain), ("idle", *guided)]
    # what was measured is kept
    opened.clear()
    checks.main()
    assert not opened


def test_settings_are_those_that_the_demonstration_found(checks: ModuleType) -> None:
    root = Path(__file__).resolve().parents[2]
    found = json.loads((root / "assets/results/demonstration.json").read_text())
    for key, setting in {**checks.OF_BASE, **checks.OF_RUNS}.items():
        assert (found[key]["guidance"], found[key]["steps"]) == setting, key


@pytest.mark.integration
def test_which_runs_are_taken(checks: ModuleType, tmp_path: Path) -> None:
    """The checkpoint that is judged is named; runs of one seed are refused."""
    source = Path(__file__).resolve().parents[2] / "configs/shapes/awm.yaml"
    for name, seed in (("a", 0), ("b", 1), ("c", 1)):
        (tmp_path / name).mkdir()
        text = source.read_text().replace("seed: 0", f"seed: {seed}")
        (tmp_path / name / "config.yaml").write_text(text)
    places = [tmp_path / "checkpoints/000027"] * 2
    found = checks.described([tmp_path / "a", tmp_path / "b"], places)
    assert found["config"] == "shapes-awm"
    said = [(run["seed"], run["iteration"], run["of"]) for run in found["runs"]]
    assert said == [(0, 27, 63), (1, 27, 63)]
    with pytest.raises(ConfigError, match=r"each of another seed, got .*b \(shapes-awm, seed 1\)"):
        checks.described([tmp_path / "b", tmp_path / "c"], places)
    with pytest.raises(ConfigError, match="expected a run folder with config.yaml"):
        checks.described([tmp_path], places[:1])
