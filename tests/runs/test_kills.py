"""Runs that are killed, or whose disks fail, end as if nobody had disturbed them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import warm
from toykit import toy
from trainkit import put

from flowrl.core.errors import ProcessLost
from flowrl.core.processes import World
from flowrl.runs.milestones import Checkpoints
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]


def told(script: str, out: Path) -> dict[str, Any]:
    """Run a script, which compares every byte that does not hold a time -> its result file."""
    code, said = warm.run([str(ROOT / script), "--out", str(out)], out.with_suffix(".log"))
    assert code == 0, said
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.integration
def test_killed_runs_end_like_undisturbed_ones(tmp_path: Path) -> None:
    """Two moments of a run of one process and one of a run of two; the script reads every
    checkpoint after each kill."""
    found = told("tests/kits/killruns.py", tmp_path / "kills.json")
    assert found["by_processes"] == {"1": 2, "2": 1}
    assert found["checkpoints_unreadable"] == found["runs_that_differ"] == 0


def test_a_checkpoint_that_is_being_deleted_has_no_name_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill in the middle of a deletion: what is left is not taken for a checkpoint, and goes with
    the next ones."""
    for iteration in (1, 2):
        checkpoint.save(checkpoint.checkpoint_folder(tmp_path, iteration), {}, {})

    def killed(folder: Path) -> None:
        (folder / "state.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flowrl.training.checkpoint.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.prune(tmp_path, 1)
    assert [folder.name for folder in checkpoint.checkpoint_folders(tmp_path)] == ["000002"]
    checkpoint.prune(tmp_path, 1)
    assert [item.name for item in (tmp_path / "checkpoints").iterdir()] == ["000002"]


def test_a_process_whose_other_one_died_says_only_what_it_knows(tmp_path: Path) -> None:
    """Process 0 writes: without it nothing is saved, and the newest checkpoint is named."""
    trainer = Trainer(toy(tmp_path))
    checkpoints = Checkpoints(trainer, tmp_path / "run", None)
    put(trainer, world=World(1, 2))
    lost = ProcessLost("process 0 is gone")
    assert checkpoints.after(lost) == "process 0 says what there is to go on from"
    put(trainer, world=World())
    checkpoints.save()
    put(trainer, world=World(1, 2))
    trainer.state.iteration = 1
    said = checkpoints.after(lost)
    assert "000000 is whole; go on with: flowrl train --resume" in said and "saved" not in said


@pytest.mark.integration
def test_faults_do_no_harm(tmp_path: Path) -> None:
    """Three moments of the disk, and every other fault."""
    found = told("tests/kits/diskruns.py", tmp_path / "disks.json")
    kinds = {row["fault"].split()[0] for row in found["rows"]}
    assert {"ENOSPC", "EROFS", "EIO", "torn", "altered", "lost", "swapped", "clock"} <= kinds
    assert found["did_harm"] == 0
