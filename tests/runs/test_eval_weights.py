"""Which weights are evaluated: those that the config names, for as long as it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from toykit import toy
from trainkit import trainer_for, unchanged, weights_of

from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.toy import LinearFlow
from flowrl.runs.evaluate import eval_weights, evaluate, sample_grid_prompts
from flowrl.runs.folder import read_prompts
from flowrl.runs.report.page import html_report
from flowrl.runs.train import train
from flowrl.training.trainer import Trainer


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


class Small(LinearFlow):
    """A model that makes small images only."""

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        if max(height, width) > 16:
            raise ModelError("height and width may be at most 16 pixels here")
        return super().latent_shape(height, width)


LARGE = ["eval.height=32", "eval.width=24"]


def test_images_are_trained_small_and_judged_large(tmp_path: Path) -> None:
    """Evaluations and grids have the size of `eval`, training that of `image`."""
    trainer = trainer_for(tmp_path, *LARGE)
    setting = evaluate(trainer.model, trainer.config, trainer=trainer)["setting"]
    assert (setting["height"], setting["width"]) == (32, 24)
    assert sample_grid_prompts(trainer)[1].shape[-2:] == (32, 24)
    trained = trainer.sample(trainer.rows())
    assert trained.x.shape[1:] == trainer.model.latent_shape(16, 16)
    # and a whole run with its grids and its report
    train(toy(tmp_path, *LARGE, "train.iterations=2"), tmp_path / "run", quiet=True)
    assert read_prompts(tmp_path / "run")[1] == (32, 24)
    assert "samples" in html_report(tmp_path / "run")


def test_a_size_that_the_model_cannot_make_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval.height.*Small cannot make images of 32 x 24"):
        Trainer(toy(tmp_path, *LARGE), model=Small())
    noise = ["likelihood={fn: prior}", "plan={fn: ode, steps: 4}"]
    with pytest.raises(ConfigError, match="learns noise of one size"):
        Trainer(toy(tmp_path, *LARGE, *noise))
