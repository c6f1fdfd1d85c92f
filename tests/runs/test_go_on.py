"""What a message says to go on with, and what a run that goes on may not change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toykit import toy

from flowrl.config.from_program import with_rewards
from flowrl.core.errors import CheckpointError, RunError
from flowrl.runs.milestones import Checkpoints
from flowrl.training import checks
from flowrl.training.optimizer_state import check_settings
from flowrl.training.trainer import Trainer


def test_a_command_or_the_call_with_the_functions(tmp_path: Path) -> None:
    trainer, run = Trainer(toy(tmp_path)), tmp_path / "my run"
    checkpoints = Checkpoints(trainer, run, None)
    assert f"flowrl train --resume '{run}'" in checkpoints.how_to_go_on()
    handed = with_rewards(trainer.config, {"b": lambda batch: torch.zeros(len(batch.images))})
    trainer.config = replace(handed, plugins=("toykit",))
    assert checkpoints.how_to_go_on() == (
        f"flowrl.train(flowrl.load_config('{run}/config.yaml', plugins=['toykit']), '{run}', "
        "rewards={'b': ...}, resume=True)"
    )


def test_latents_that_broke_before_anything_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no earlier checkpoint in iteration 0."""
    monkeypatch.setattr(checks, "_prompt", lambda *_: "P")
    tree = SimpleNamespace(step=torch.tensor([1]))
    ro: Any = SimpleNamespace(x=torch.full((1, 2), torch.nan), tree=tree, sigmas=torch.zeros(3))
    with pytest.raises(RunError, match="nothing was trained yet: use a wider model.dtype"):
        checks.check_latents(ro, ["P"], 0)
    with pytest.raises(RunError, match="go on from an earlier checkpoint with a lower"):
        checks.check_latents(ro, ["P"], 1)


def test_other_settings_of_the_optimizer_are_refused(tmp_path: Path) -> None:
    """Before a weight is changed; the learning rate may be another."""
    trainer = Trainer(toy(tmp_path))
    trainer.save(tmp_path / "saved")
    Trainer(toy(tmp_path, "optimizer.lr=0.5")).load(tmp_path / "saved")
    other = Trainer(toy(tmp_path, "optimizer.betas=[0.5, 0.6]"))
    said = r"optimizer\.betas: the config says \[0.5, 0.6\], .* trained with \[0.9, 0.999\]"
    with pytest.raises(CheckpointError, match=said):
        other.load(tmp_path / "saved")
    check_settings({"eps": 1e-8, "own": 3}, {"groups": [{"eps": 1e-8, "lr": 1.0}]})
