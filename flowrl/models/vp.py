"""Training schedules of networks that predict noise on a variance-preserving path, seen from the
flow path.

Such a network knows ``x_vp = alpha_t x0 + s_t eps`` at whole timesteps t. On the flow path that is
the noise level ``sigma_t = s_t / (alpha_t + s_t)``, and the DDIM step between two timesteps is the
Euler step between their levels.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import DDIMScheduler
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.noise_path import flow_from_vp, per_sample, velocity_from_eps, vp_from_flow

# Each keeps the training schedule in settings that DDIMScheduler reads; those with a noise scale of
# their own (EDM) or made for distilled networks (LCM) are left out.
SCHEDULERS = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)
SPACINGS = ("leading", "trailing")
TOLERANCE = (
    1e-6  # a few roundings of float32; the levels of Stable Diffusion lie 2.6e-4 and more apart
)


class Schedule:
    """Noise levels by timestep, and the way back."""

    def __init__(self, scheduler: DDIMScheduler, device: torch.device) -> None:
        """Tabulate a checked scheduler (see `ddim_scheduler`). Raise ModelError if its levels do
        not rise with t."""
        self._scheduler = scheduler
        self.predicts_noise = scheduler.config.prediction_type == "epsilon"
        # flow levels of the timesteps [T], in double precision, since some lie close together
        bar = scheduler.alphas_cumprod.double()
        sigma = flow_from_vp(bar, bar.sqrt(), (1 - bar).sqrt())[1]
        gap = float(sigma.diff().min())
        if gap < 4 * TOLERANCE:
            raise ModelError(
                "scheduler: noise must rise with every training timestep, but one step adds only "
                f"{gap:g}"
            )
        # the levels, and the middles between them, by which a level finds its timestep again
        self.sigma = sigma.float().to(device)  # [T]
        self._between = ((sigma[1:] + sigma[:-1]) / 2).float().to(device)  # [T-1]
        # where the last step ends: 0, or the level of timestep 0
        final = scheduler.final_alpha_cumprod.double()[None]
        self.end = (
            flow_from_vp(final, final.sqrt(), (1 - final).sqrt())[1].float().to(device)
        )  # [1]

    def grid(self, steps: int) -> Tensor:
        """Return the levels [steps+1] of the scheduler's own timesteps, then of its final alpha.

        The last is 0 with ``set_alpha_to_one``, else the level of timestep 0 (0.028 for Stable
        Diffusion). **Differs:** diffusers' DDIM steps from t to ``t - T // steps``. With spacing
        ``trailing`` and a number of steps that does not divide T this is not the timestep at which
        the network is asked next; here it always is. Raise ConfigError if the schedule has not so
        many timesteps.
        """
        scheduler = copy.deepcopy(self._scheduler)  # set_timesteps writes into it
        total = len(self.sigma)
        if not 1 <= steps <= total:
            raise ConfigError(
                f"steps: expected 1 to {total}, the timesteps that the model was trained on, got "
                f"{steps}"
            )
        # diffusers spaces the timesteps; an offset can push the first one out of the table
        scheduler.set_timesteps(steps)
        first = int(scheduler.timesteps[0])
        if first >= total:
            raise ConfigError(
                f"steps: with {steps} of them the scheduler (steps_offset "
                f"{scheduler.config.steps_offset}) starts at"
                f" timestep {first}, but the model knows none above {total - 1}; take fewer"
            )
        return torch.cat([self.sigma[scheduler.timesteps.to(self.sigma.device)], self.end])

    def timesteps(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Return each level's timestep, int64 [B], and whether it is that timestep's level, bool
        [B]."""
        sigma = sigma.to(self.sigma).contiguous()
        t = torch.searchsorted(self._between, sigma)
        return t, (self.sigma[t] - sigma).abs() <= TOLERANCE

    def velocity(self, x: Tensor, out: Tensor, sigma: Tensor) -> Tensor:
        """Turn the network's output [B, *] at the flow latent x [B, *], sigma [B], into ``v = eps -
        x0`` [B, *].

        For v prediction, out = alpha eps - s x0; with x = x_vp / (alpha + s) this is
        ``v = (alpha + s) (out + (s - alpha) x)``, also where alpha = 0.
        """
        if self.predicts_noise:
            return velocity_from_eps(x, out, sigma)
        root = per_sample(torch.hypot(1 - sigma, sigma), x)  # 1 / (alpha + s)
        return (out + (2 * per_sample(sigma, x) - 1) / root * x) / root

    def final(self, x: Tensor) -> Tensor:
        """Return what the pipeline decodes: x [B, *] of the grid's last level in
        variance-preserving coordinates."""
        return vp_from_flow(x, self.end.to(x))


def ddim_scheduler(scheduler: Any, path: str, spacing: str | None) -> DDIMScheduler:
    """Return the DDIM scheduler with a pipeline scheduler's settings and, if given, another
    ``spacing``.

    Raise ModelError where flowrl cannot follow the settings.
    """
    # whichever scheduler the folder has, its noise levels are kept and its solver is replaced
    changes: dict[str, Any] = {} if spacing is None else {"timestep_spacing": spacing}
    chosen = set(scheduler.config) - set(scheduler.config.get("_use_default_values", ()))
    if "clip_sample" not in chosen:
        changes["clip_sample"] = (
            False  # the default of DDIMScheduler is made for pixels, not for latents
        )
    where = f"{path}: scheduler/scheduler_config.json"
    try:
        ddim = DDIMScheduler.from_config(scheduler.config, **changes)
    except NotImplementedError as error:
        raise ModelError(f"{where}: {error}") from error
    # settings under which DDIM is no Euler step on the flow path
    config = ddim.config
    if config.prediction_type not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"{where}: expected prediction_type 'epsilon' or 'v_prediction', got "
            f"{config.prediction_type!r}"
        )
    if config.rescale_betas_zero_snr and config.prediction_type == "epsilon":
        raise ModelError(
            f"{where}: rescale_betas_zero_snr needs prediction_type 'v_prediction', got 'epsilon': "
            "where there is no"
            " signal left, a prediction of the noise says nothing about the image. Correct "
            "whichever is wrong"
        )
    if config.timestep_spacing not in SPACINGS:
        raise ModelError(
            f"{where}: timestep_spacing {config.timestep_spacing!r}: DDIM does not land on its own "
            "timesteps there;"
            " set spacing to 'leading' or 'trailing'"
        )
    if config.clip_sample or config.thresholding:
        raise ModelError(
            f"{where}: clip_sample and thresholding must be false, latents are not within [-1, 1]"
        )
    return ddim
