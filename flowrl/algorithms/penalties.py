"""Penalties that keep the policy near a reference, unreduced: one value per decision."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.noise_path import wide
from flowrl.core.types import LossInput


@needs("ref", "zero_advantage")
def transition_kl(data: LossInput, *, divide_by: Literal["std", "g"] = "std") -> Tensor:
    """Penalise the distance of the transition means to those under the weights from before
    training: ``mean((mean - ref_mean)^2) / (2 w^2)`` [B], over dimensions.

    divide_by "std": ``w = std``, the exact KL of the two Gaussians per latent dimension
    (Flow-GRPO's paper). divide_by "g": ``w = g = std / sqrt(delta)``, which is the exact KL times
    delta = sigma - sigma_next [B].

    **Differs:** Flow-GRPO's later SD3 code leaves the step size out of the variance; that is "g".
    Published coefficients belong to one of the two (0.004 with "std" became 0.04 with "g"). Its CPS
    code has "std".

    Raises: ConfigError for another `divide_by`.
    """
    if divide_by not in ("std", "g"):
        raise ConfigError(f'transition_kl: divide_by must be "std" or "g", got {divide_by!r}')
    gap = (data.now.mean - data.under["ref"].mean.detach()).square().flatten(1).mean(1)
    exact = gap / (2 * data.now.std.square())
    return exact if divide_by == "std" else exact * (data.batch.sigma - data.batch.sigma_next)


@needs("ref", "zero_advantage")
def velocity_kl(data: LossInput) -> Tensor:
    """Penalise the distance of the velocity to that of the weights from before training:
    ``mean((v - v_ref)^2)`` [B], over dimensions.

    UniGRPO (2603.23500), its code: all steps count alike, where the exact KL of a transition counts
    late, nearly noiseless steps hundreds of times more.

    Raises: ConfigError for a likelihood without a velocity.
    """
    v, ref = _velocities("velocity_kl", data)
    return (v - ref).square().mean(1)


@needs("ref", "zero_advantage")
def norm_guard(data: LossInput) -> Tensor:
    """Penalise a velocity that is longer than that of the weights from before training:
    ``relu(|v| / |v_ref| - 1)^2`` [B].

    NormGuard (2606.27771): forward-process and preference losses make velocities 5 to 15 % longer.
    Reconstruction: the power and the division by the reference's length are ours.

    Raises: ConfigError for a likelihood without a velocity.
    """
    v, ref = _velocities("norm_guard", data)
    return (v.norm(dim=1) / ref.norm(dim=1) - 1).relu().square()


def _velocities(who: str, data: LossInput) -> tuple[Tensor, Tensor]:
    """Return the velocity now and that of the reference, both [B, D]."""
    v, ref = data.now.v, data.under["ref"].v
    if v is None or ref is None:
        raise ConfigError(f"{who}: needs a likelihood that evaluates a velocity; this one does not")
    return wide(v).flatten(1), wide(ref).detach().flatten(1)
