"""A run that goes back to an earlier checkpoint, with a reward that is trained along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from toykit import apprentice, toy

from flowrl.runs.monitors.watch import go_back
from flowrl.training.checkpoint import checkpoint_folder
from flowrl.training.trainer import Trainer


def test_its_rounds_go_on_with_the_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learned is the checkpoint's. Its count is not, else its turns and the policy's, which
    follow from the iteration, would fall apart after an odd number of iterations."""
    trainer = Trainer(toy(tmp_path, "rewards.fan={fn: toykit.apprentice, every: 2}"))
    fan: Any = trainer.reward_set.learned_rewards()["fan"]
    before = float(fan.taste)
    trainer.save(checkpoint_folder(tmp_path, 0))
    trainer.step()
    fan.rounds = 1
    assert float(fan.taste) > before
    load = apprentice.load_state_dict

    def with_count(self: Any, state: dict[str, Tensor]) -> None:
        load(self, state)
        self.rounds = 0

    monkeypatch.setattr(apprentice, "load_state_dict", with_count)
    assert go_back(trainer, tmp_path, [{"iteration": 0, "score": "red", "red": 1.0}]) == 0
    assert (float(fan.taste), fan.rounds, trainer.iteration) == (before, 1, 1)
