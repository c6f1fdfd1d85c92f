"""Which weights are evaluated: those that the config names, for as long as it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainkit import trainer_for, unchanged, weights_of

from flowrl.runs.evaluate import eval_weights


@pytest.mark.parametrize("name", ["ema", "current"])
def test_evaluations_take_the_weights_that_the_config_names(tmp_path: Path, name: str) -> None:
    """And hand the current ones back; how the average moves is tests/training's."""
    trainer = trainer_for(tmp_path, "train.ema=0.5", f"eval.weights={name}", "train.updates=1")
    trainer.step()
    current = weights_of(trainer)
    with trainer.weights.using("ema"):
        averaged = weights_of(trainer)
        assert not unchanged(trainer, current)
    with eval_weights(trainer):
        assert unchanged(trainer, current if name == "current" else averaged)
    assert unchanged(trainer, current)
