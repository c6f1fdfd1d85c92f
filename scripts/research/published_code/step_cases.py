"""Published steps with noise beside our transitions: log-probs and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from gaps import Gaps, step_gaps, worst
from torch import Tensor

from flowrl.algorithms.transitions import dance_sde, ddim, flow_sde, linear_sde
from flowrl.core.noise_path import flow_from_vp, linear_grid, velocity_from_eps, vp_from_flow


def flow_grpo_step(code: dict[str, Any]) -> Gaps:
    """Flow-GRPO's step at all noisy steps of ten, as Stable Diffusion 3 has them."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sigmas, gaps = scheduler.sigmas, []
    for k in range(9):
        one, after, scale = (torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], 0.7))

        def theirs(x: Tensor, v: Tensor, to: Tensor, k: int = k) -> Tensor:
            time = scheduler.timesteps[k].expand(5)
            return code["sde_step_with_logprob"](scheduler, v, time, x, 0.7, prev_sample=to)[1]

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, scale)) -> Any:
            return flow_sde(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def dance_grpo_step(code: dict[str, Any]) -> Gaps:
    """DanceGRPO's step at all steps but the last of 16, on its grid for FLUX."""
    sigmas, gaps = linear_grid(16, 3.0), []
    for k in range(15):
        one, after, scale = (torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], 0.3))

        def theirs(x: Tensor, v: Tensor, to: Tensor, k: int = k) -> Tensor:
            return code["flux_step"](v, x, 0.3, sigmas, k, to, True, True)[2]

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, scale)) -> Any:
            return dance_sde(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def flash_grpo_step(code: dict[str, Any]) -> Gaps:
    """Flash-GRPO's step at the first ten of twenty, on UniPC's grid for Wan. Its own video latents
    have five dimensions."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    scheduler.set_timesteps(20)
    sigmas, gaps = scheduler.sigmas, []
    first = float(sigmas[1])
    for k in range(10):
        one, after, scale = (torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], first))

        def theirs(x: Tensor, v: Tensor, to: Tensor, k: int = k) -> Tensor:
            time = scheduler.timesteps[k].expand(5)
            x, v, to = x[:, :, None], v[:, :, None], to[:, :, None]
            return code["sde_step_with_logprob"](scheduler, v, time, x, prev_sample=to)[1]

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, scale)) -> Any:
            return linear_sde(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def mix_grpo_step(code: dict[str, Any]) -> Gaps:
    """MixGRPO's step by Flow-GRPO's rule, at all noisy steps of 25, on its grid for FLUX. The first
    level is 1, where both take the second one's std."""
    sigmas, gaps = linear_grid(25, 3.0), []
    for k in range(24):
        one, after, scale = (torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], 0.7))

        def theirs(x: Tensor, v: Tensor, to: Tensor, k: int = k) -> Tensor:
            return code["flow_grpo_step"](v, x, 0.7, sigmas, k, to)[2]

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, scale)) -> Any:
            return flow_sde(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def ddpo_step(code: dict[str, Any]) -> Gaps:
    """DDPO's step at all of 50 steps of Stable Diffusion's schedule, with eta 1. Ours is taken on
    the flow path, whose densities differ by a factor that no policy changes."""
    scheduler = DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip
    scheduler.set_timesteps(50)
    bar, full, gaps = scheduler.alphas_cumprod, torch.ones(5), []
    for k, time in enumerate(scheduler.timesteps):
        levels = bar[time], bar[max(int(time) - 20, 0)]
        ends = [flow_from_vp(a[None], a.sqrt()[None], (1 - a).sqrt()[None])[1] for a in levels]
        one, after = (end.expand(5) for end in ends)
        factor = -torch.hypot(1 - ends[1], ends[1]).log()  # of alpha + s at the next level

        def theirs(
            x: Tensor, v: Tensor, to: Tensor, at: Any = (time, one, after, factor)
        ) -> Tensor:
            time, one, after, factor = at
            noise = _noise_of(x, v, one)
            states = vp_from_flow(x, one), vp_from_flow(to, after)
            step = code["ddim_step_with_logprob"]
            found = step(
                scheduler, noise, time.expand(5), states[0], eta=1.0, prev_sample=states[1]
            )[1]
            return found + factor

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, full)) -> Any:
            return ddim(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def _noise_of(x: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    """Return the prediction of the noise that has this velocity."""
    noise = x + (1 - sigma.view(-1, 1, 1, 1)) * v
    torch.testing.assert_close(velocity_from_eps(x, noise, sigma), v, rtol=1e-4, atol=1e-4)
    return noise
