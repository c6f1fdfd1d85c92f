"""Pipelines that predict noise or v by their own call (test_pipeline_referee.py compares
them with the adapters of their kind)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tinypipelines import TINY, save, tiny_pipeline

from flowrl.core.errors import ModelError
from flowrl.models.pipeline import from_pipeline, pipeline

SIZE = (64, 64)


def test_no_time_in_between_is_asked() -> None:
    model: Any = from_pipeline(
        tiny_pipeline("PixArtSigmaPipeline"), **TINY["PixArtSigmaPipeline"].options
    )
    x, grid = torch.zeros(2, *model.latent_shape(*SIZE)), model.sigmas(4, *SIZE)
    assert model.discrete_levels and 0.9 < float(grid[0]) < 1
    known = model.encode(["a red cube", "a blue ball"])
    assert model.velocity(x, grid[:2], known).isfinite().all()
    with pytest.raises(ModelError, match="expected noise levels of its 1000 training timesteps"):
        model.velocity(x, grid[:2] + 1e-4, known)


def test_the_shifted_schedule_of_cogview_stays() -> None:
    """Its levels are far above those of the same betas without the shift, and reach 1."""
    made = tiny_pipeline("CogView3PlusPipeline")
    model: Any = from_pipeline(made, **TINY["CogView3PlusPipeline"].options)
    bar = made.scheduler.alphas_cumprod.double()
    levels = (1 - bar).sqrt() / ((1 - bar).sqrt() + bar.sqrt())
    times = torch.tensor([999, 749, 499, 249])
    got = model.sigmas(4, *SIZE)[:-1].double()
    torch.testing.assert_close(got, levels[times], rtol=1e-5, atol=1e-6)
    assert float(got[0]) == 1.0
    assert type(made.scheduler).__name__ == "CogVideoXDDIMScheduler"  # the user's is as it was


@pytest.mark.parametrize("name", ["PixArtSigmaPipeline", "CogView3PlusPipeline"])
def test_a_folder_passes_the_fence_at_any_number_of_steps(name: str, tmp_path: Path) -> None:
    """Its file says `linspace` or `trailing`, and 6 does not divide a thousand."""
    model: Any = pipeline(path=str(save(name, tmp_path / "model")), **TINY[name].options)
    found = model.pass_fence(6, *SIZE)
    assert {check.name: check.figure for check in found.checks}["velocity"] == 0.0
