"""Training schedules on the flow path: levels, grids, the way back to timesteps, and what networks
predict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler
from tiny import EULER, NOISE
from torch import Tensor

from flowrl.algorithms.transitions import euler
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.noise_path import flow_from_vp
from flowrl.models.unet import Schedule, ddim_scheduler

CPU = torch.device("cpu")


def schedule(**changes: Any) -> Schedule:
    scheduler = DDIMScheduler(**(NOISE | {"clip_sample": False} | changes))
    return Schedule(ddim_scheduler(scheduler, "model", None), CPU)


def levels() -> np.ndarray:
    """Return sigma [1000] of Stable Diffusion, in numpy float64 from its published betas."""
    beta = np.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    bar = np.cumprod(1 - beta)
    alpha, s = np.sqrt(bar), np.sqrt(1 - bar)
    return s / (alpha + s)


def test_levels_are_those_of_the_published_betas() -> None:
    table = schedule().sigma
    # the scheduler multiplies in float32
    np.testing.assert_allclose(table.numpy(), levels(), rtol=0, atol=2e-6)
    assert table.dtype == torch.float32
    assert (float(table[0]), float(table[-1])) == pytest.approx((0.028341, 0.935958), abs=1e-6)


TRAILING = {"timestep_spacing": "trailing"}
ONE = {"set_alpha_to_one": True}


@pytest.mark.parametrize(
    ("changes", "steps", "timesteps", "end"),
    [  # the formulas of 2305.08891 table 2
        ({}, 4, [751, 501, 251, 1], 0),
        (ONE | {"steps_offset": 0}, 3, [666, 333, 0], None),
        (TRAILING, 4, [999, 749, 499, 249], 0),
        (TRAILING | ONE, 7, [999, 856, 713, 570, 428, 285, 142], None),
    ],
)
def test_grid_is_that_of_the_timesteps(
    changes: dict[str, Any], steps: int, timesteps: list[int], end: int | None
) -> None:
    grid, table = schedule(**changes).grid(steps), levels()
    expected = [*table[timesteps], 0.0 if end is None else table[end]]
    assert grid.dtype == torch.float32
    np.testing.assert_allclose(grid.numpy(), expected, rtol=0, atol=2e-6)


def test_the_ends_of_a_grid() -> None:
    v = {"rescale_betas_zero_snr": True, "prediction_type": "v_prediction"}
    zero = schedule(**TRAILING, **v)  # zero terminal SNR starts at one
    assert zero.grid(5)[0] == 1 and zero.sigma[998] < 1
    with pytest.raises(ConfigError, match="steps: expected 1 to 1000"):
        schedule().grid(1001)


def test_every_level_finds_its_timestep() -> None:
    model = schedule()
    t = torch.arange(1000)
    next_to = torch.nextafter(model.sigma, torch.tensor(2.0))
    for sigma in (model.sigma, next_to, model.sigma.double(), model.sigma - 5e-7):
        found, known = model.timesteps(sigma)
        assert torch.equal(found, t) and bool(known.all())
    between = (model.sigma[1:] + model.sigma[:-1]) / 2
    for wrong in (model.sigma + 1e-5, between, torch.tensor([0.0, 1.0, torch.nan])):
        assert not bool(model.timesteps(wrong)[1].any())


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_velocity_is_the_noise_minus_the_data(prediction: str) -> None:
    """From x0 and eps: what a perfect network says of x_vp = alpha x0 + s eps, by the definitions
    of 2202.00512."""
    model = schedule(prediction_type=prediction)
    torch.manual_seed(0)
    x0, eps = torch.randn(2, 6, 3, dtype=torch.float64)
    degrees = torch.tensor([1.0, 20, 45, 70, 86, 90], dtype=torch.float64).deg2rad()
    if prediction == "epsilon":  # where alpha is 0, noise says nothing of the data
        x0, eps, degrees = x0[:-1], eps[:-1], degrees[:-1]
    alpha, s = degrees.cos(), degrees.sin()
    x_vp = alpha[:, None] * x0 + s[:, None] * eps
    out = eps if prediction == "epsilon" else alpha[:, None] * eps - s[:, None] * x0
    x, sigma = flow_from_vp(x_vp, alpha, s)
    torch.testing.assert_close(model.velocity(x, out, sigma), eps - x0)


def rescaled(model: Schedule, x_vp: Tensor, t: int) -> Tensor:
    """Return x of x_vp at timestep t, or at the final alpha for t < 0; alpha and s straight from
    the scheduler."""
    scheduler = model._scheduler
    bar = scheduler.alphas_cumprod[t] if t >= 0 else scheduler.final_alpha_cumprod
    return x_vp / (bar.sqrt() + (1 - bar).sqrt())


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("one", [True, False])
def test_the_euler_step_is_ddims(prediction: str, one: bool) -> None:
    """DDIMScheduler.step with eta 0 on the same network output, for every step of a grid."""
    model = schedule(prediction_type=prediction, set_alpha_to_one=one)
    scheduler, grid = model._scheduler, model.grid(20)
    scheduler.set_timesteps(20)
    torch.manual_seed(0)
    for k, t in enumerate(scheduler.timesteps.tolist()):
        x_vp, out = torch.randn(2, 2, 4, 8, 8)
        expected = rescaled(model, scheduler.step(out, t, x_vp).prev_sample, t - 50)
        x, sigma = rescaled(model, x_vp, t), grid[k].expand(2)
        got = euler(x, model.velocity(x, out, sigma), sigma, grid[k + 1].expand(2))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_schedulers_of_other_classes_become_ddims() -> None:
    """DDIMScheduler's own default would clip latents at 1; other files do not speak of it."""
    leading = EulerDiscreteScheduler(**EULER, timestep_spacing="leading")
    for scheduler in (leading, DDPMScheduler(**EULER)):
        assert ddim_scheduler(scheduler, "model", None).config.clip_sample is False
    linspace = EulerDiscreteScheduler(**EULER, timestep_spacing="linspace")
    assert ddim_scheduler(linspace, "model", "trailing").config.timestep_spacing == "trailing"
    laplace = DDIMScheduler(**NOISE, clip_sample=False)
    laplace.register_to_config(beta_schedule="laplace")
    for scheduler, message in (
        (DDPMScheduler(**EULER, clip_sample=True), "clip_sample and thresholding must be false"),
        (linspace, "timestep_spacing 'linspace'"),
        (laplace, "model: scheduler/scheduler_config.json: laplace is not implemented"),
    ):
        with pytest.raises(ModelError, match=message):
            ddim_scheduler(scheduler, "model", None)
