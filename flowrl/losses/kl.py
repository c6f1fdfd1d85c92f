"""Penalties that keep the policy near a reference, unreduced: one value per decision."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.types import Eval


def transition_kl(
    eval: Eval, ref_eval: Eval, *, divide_by: Literal["std", "g"] = "std", delta: Tensor | None = None
) -> Tensor:
    """Penalise the distance of the transition means: ``mean((mean - ref_mean)^2) / (2 w^2)`` [B], over dimensions.

    divide_by "std": ``w = std``, the exact KL of the two Gaussians per latent dimension (Flow-GRPO's paper).
    divide_by "g": ``w = g = std / sqrt(delta)``, which is the exact KL times delta = sigma - sigma_next [B].

    **Differs:** Flow-GRPO's later SD3 code leaves the step size out of the variance; that is "g". Published
    coefficients belong to one of the two (0.004 with "std" became 0.04 with "g"). Its CPS code has "std".

    Raises: ConfigError for another `divide_by`, or "g" without delta.
    """
    if divide_by not in ("std", "g"):
        raise ConfigError(f'transition_kl: divide_by must be "std" or "g", got {divide_by!r}')
    gap = (eval.mean - ref_eval.mean.detach()).square().flatten(1).mean(1)
    exact = gap / (2 * eval.std.square())
    if divide_by == "std":
        return exact
    if delta is None:
        raise ConfigError('transition_kl: divide_by "g" needs delta = sigma - sigma_next [B]')
    return exact * delta
