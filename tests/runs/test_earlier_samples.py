"""A run that goes on with other samples, or after its end; and drafts of runs below a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toykit import toy

from flowrl.runs.folder import SUMMARY
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration
SHORT = ("train.iterations=1", "samples.every=1", "eval.images=1", "train.prompts=1")
LONGER = (*SHORT, "train.iterations=2")


def strips(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.glob("0*.png"))


@pytest.mark.parametrize("change", ["samples.seed=99", "samples.prompts=2", "eval.height=8"])
def test_only_samples_that_were_drawn_alike_stand_side_by_side(
    tmp_path: Path, change: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(toy(tmp_path, *SHORT, "samples.prompts=1"), run, quiet=True)
    before = json.loads((run / "samples" / "prompts.json").read_text())
    assert before["seed"] == 7 and len(before["prompts"]) == 1
    changes = ["samples.prompts=1", change, *(["eval.width=8"] if "height" in change else [])]
    train(toy(tmp_path, *LONGER, *changes), run, resume="auto")
    aside = run / "samples-earlier"
    assert f"they are in {aside}" in capfd.readouterr().err
    assert strips(aside) == ["000000.png", "000001.png"]
    assert json.loads((aside / "prompts.json").read_text()) == before
    assert strips(run / "samples") == ["000001.png", "000002.png"]
    assert (run / "grid.png").exists() and (run / "report.html").exists()


def test_samples_of_the_same_prompts_and_noise_stay(tmp_path: Path) -> None:
    """Also where the file does not say the seed of the noise."""
    run = tmp_path / "run"
    train(toy(tmp_path, *SHORT), run, quiet=True)
    file = run / "samples" / "prompts.json"
    about = json.loads(file.read_text())
    file.write_text(json.dumps({key: about[key] for key in about if key != "seed"}))
    train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)
    assert strips(run / "samples") == ["000000.png", "000001.png", "000002.png"]
    assert not (run / "samples-earlier").exists() and json.loads(file.read_text()) == about


def test_a_run_that_trains_longer_has_no_end_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train(toy(tmp_path, *SHORT), run, quiet=True)
    step, seen = Trainer.step, []

    def stepping(self: Trainer) -> dict[str, float]:
        seen.append((run / SUMMARY).exists())
        return step(self)

    monkeypatch.setattr(Trainer, "step", stepping)
    train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)
    assert seen == [False] and json.loads((run / SUMMARY).read_text())["iterations"] == 2
    # one that is at its end keeps it
    train(toy(tmp_path, *LONGER), run, resume="auto", quiet=True)
    assert (run / SUMMARY).exists() and len(seen) == 1


def test_what_runs_below_the_folder_are_writing_stays(tmp_path: Path) -> None:
    """A new run in the folder that holds other runs, one of which writes a checkpoint."""
    draft = tmp_path / "live" / "checkpoints" / "000020.tmp-4242-0a1b2c3d"
    mine = tmp_path / "samples" / "000001.png.tmp-4242-0a1b2c3d"
    for path in (draft, mine):
        path.mkdir(parents=True)
    train(toy(tmp_path / "toy", *SHORT), tmp_path, quiet=True)
    assert draft.exists()
    # its own are deleted when it goes on
    mine.mkdir(exist_ok=True)
    train(toy(tmp_path / "toy", *LONGER), tmp_path, resume="auto", quiet=True)
    assert draft.exists() and not mine.exists()
