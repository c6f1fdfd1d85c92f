"""Noise levels of flow-matching schedulers: those that diffusers' pipelines sample, with every
setting of the scheduler's file."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps

from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.adapter import check_scheduler, pipeline_sigmas

STEPS = (2, 3, 5, 10, 28, 50, 61, 200)
TOKENS = 1024
CPU = torch.device("cpu")
DYNAMIC = {"use_dynamic_shifting": True}
FLAGS: list[dict[str, Any]] = [
    {},
    {"shift": 3.0},
    {"shift": 3.0, "num_train_timesteps": 500},
    DYNAMIC,
    DYNAMIC | {"time_shift_type": "linear"},
    DYNAMIC | {"base_shift": 0.3, "max_shift": 0.9, "max_image_seq_len": 8192},
    DYNAMIC | {"shift_terminal": 0.02},
    {"shift": 3.0, "shift_terminal": 0.1},
    {"shift": 3.0, "use_karras_sigmas": True},
    {"shift": 3.0, "use_exponential_sigmas": True},
    {"shift": 3.0, "use_beta_sigmas": True},
]


def mu_of(scheduler: Any) -> float:
    """Return the shift as the pipelines work it out."""
    config = scheduler.config
    ends = (config.base_image_seq_len, config.max_image_seq_len)
    return float(calculate_shift(TOKENS, *ends, config.base_shift, config.max_shift))


def ours(scheduler: Any, steps: int, even: bool) -> torch.Tensor:
    """Return the grid of an adapter whose pipeline spreads the steps evenly, or does not."""
    levels: Any = (lambda n: np.linspace(1.0, 1 / n, n)) if even else None
    mu = mu_of(scheduler)
    return pipeline_sigmas(
        scheduler, steps, tokens=TOKENS, device=CPU, levels=levels, mu=lambda *_: mu
    )


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_every_flag_is_followed(flags: dict[str, Any], even: bool) -> None:
    """Against what the pipelines call, to the bit; a last level of 0 is the scheduler's own."""
    scheduler = FlowMatchEulerDiscreteScheduler(**flags)
    plain = FlowMatchEulerDiscreteScheduler()
    for steps in STEPS:
        theirs, mu = copy.deepcopy(scheduler), mu_of(scheduler)
        more = {"mu": mu} if scheduler.config.use_dynamic_shifting else {}
        sigmas = np.linspace(1.0, 1 / steps, steps) if even else None
        retrieve_timesteps(theirs, None if even else steps, CPU, sigmas=sigmas, **more)
        grid = ours(scheduler, steps, even)
        assert torch.equal(grid, theirs.sigmas) and len(grid) == steps + 1
        assert bool((grid.diff() < 0).all()) and grid[-1] == 0
        # and it is a setting that does something
        if flags and steps > 2:
            assert not torch.equal(grid, ours(plain, steps, even))


@pytest.mark.parametrize("flag", ["invert_sigmas", "stochastic_sampling"])
def test_what_is_no_euler_step_is_refused_by_name(flag: str) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**{flag: True})
    with pytest.raises(ModelError, match=flag):
        check_scheduler(SimpleNamespace(scheduler=scheduler), "model")


def test_steps_without_length_are_refused() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(use_exponential_sigmas=True)
    scheduler.sigma_min = scheduler.sigma_max = 1.0
    with pytest.raises(ConfigError, match="of 5 steps the model's scheduler makes some without"):
        ours(scheduler, 5, False)


def test_every_setting_is_looked_at() -> None:
    """A setting that a release of diffusers adds has to be tried above, or refused."""
    known = {name for flags in FLAGS for name in flags} | {"invert_sigmas", "stochastic_sampling"}
    known |= {"self", "base_image_seq_len"}
    settings = inspect.signature(FlowMatchEulerDiscreteScheduler.__init__).parameters.keys()
    assert settings <= known
