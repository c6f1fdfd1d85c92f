"""Published steps with noise beside our transitions: log-probs and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from gaps import Gaps, all_steps
from torch import Tensor

from flowrl.algorithms.transitions import dance_sde, ddim, flow_sde, linear_sde
from flowrl.core.noise_path import flow_from_vp, linear_grid, velocity_from_eps, vp_from_flow


def flow_grpo_step(code: dict[str, Any]) -> Gaps:
    """Flow-GRPO's step at all noisy steps of ten, as Stable Diffusion 3 has them."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)

    def theirs(k: int, x: Tensor, v: Tensor, to: Tensor) -> Tensor:
        time = scheduler.timesteps[k].expand(len(x))
        return code["sde_step_with_logprob"](scheduler, v, time, x, 0.7, prev_sample=to)[1]

    return all_steps(theirs, flow_sde, scheduler.sigmas, steps=9, scale=0.7)


def dance_grpo_step(code: dict[str, Any]) -> Gaps:
    """DanceGRPO's step at all steps but the last of 16, on its grid for FLUX."""
    sigmas = linear_grid(16, 3.0)

    def theirs(k: int, x: Tensor, v: Tensor, to: Tensor) -> Tensor:
        return code["flux_step"](v, x, 0.3, sigmas, k, to, True, True)[2]

    return all_steps(theirs, dance_sde, sigmas, steps=15, scale=0.3)


def flash_grpo_step(code: dict[str, Any]) -> Gaps:
    """Flash-GRPO's step at the first ten of twenty, on UniPC's grid for Wan. Its own video latents
    have five dimensions."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    scheduler.set_timesteps(20)

    def theirs(k: int, x: Tensor, v: Tensor, to: Tensor) -> Tensor:
        time = scheduler.timesteps[k].expand(len(x))
        x, v, to = x[:, :, None], v[:, :, None], to[:, :, None]
        return code["sde_step_with_logprob"](scheduler, v, time, x, prev_sample=to)[1]

    sigmas = scheduler.sigmas
    return all_steps(theirs, linear_sde, sigmas, steps=10, scale=float(sigmas[1]))


def mix_grpo_step(code: dict[str, Any]) -> Gaps:
    """MixGRPO's step by Flow-GRPO's rule, at all noisy steps of 25, on its grid for FLUX. The first
    level is 1, where both take the second one's std."""
    sigmas = linear_grid(25, 3.0)

    def theirs(k: int, x: Tensor, v: Tensor, to: Tensor) -> Tensor:
        return code["flow_grpo_step"](v, x, 0.7, sigmas, k, to)[2]

    return all_steps(theirs, flow_sde, sigmas, steps=24, scale=0.7)


def ddpo_step(code: dict[str, Any]) -> Gaps:
    """DDPO's step at all of 50 steps of Stable Diffusion's schedule, with eta 1. Ours is taken on
    the flow path, whose densities differ by a factor that no policy changes."""
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip
    scheduler.set_timesteps(50)
    # the levels of its timesteps, and of timestep 0 where its last step ends
    bar = scheduler.alphas_cumprod[[*scheduler.timesteps, 0]]
    sigmas = flow_from_vp(bar, bar.sqrt(), (1 - bar).sqrt())[1]

    def theirs(k: int, x: Tensor, v: Tensor, to: Tensor) -> Tensor:
        one, after = (sigma.expand(len(x)) for sigma in (sigmas[k], sigmas[k + 1]))
        noise, time = _noise_of(x, v, one), scheduler.timesteps[k].expand(len(x))
        x, to = vp_from_flow(x, one), vp_from_flow(to, after)
        step = code["ddim_step_with_logprob"]
        found: Tensor = step(scheduler, noise, time, x, eta=1.0, prev_sample=to)[1]
        return found - torch.hypot(1 - after, after).log()  # of alpha + s where the step ends

    return all_steps(theirs, ddim, sigmas, steps=50, scale=1.0)


def _noise_of(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Return the prediction of the noise that has this velocity."""
    noise = x + (1 - sigma.view(-1, 1, 1, 1)) * v
    torch.testing.assert_close(velocity_from_eps(x, noise, sigma), v, rtol=1e-4, atol=1e-4)
    return noise
