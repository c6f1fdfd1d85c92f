"""Penalties that keep the policy near a reference, or near data, unreduced: one value per
decision."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.algorithms.losses._common import check_transition
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.noise_path import length_ratio, per_sample, wide
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

    Raises: ConfigError for another `divide_by`, or a likelihood without a std.
    """
    return _transition_gap(data, "ref", divide_by)


@needs("slow", "zero_advantage")
def transition_kl_slow(data: LossInput, *, divide_by: Literal["std", "g"] = "std") -> Tensor:
    """Penalise the distance of the transition means to those of the slow copy, ``mean((mean -
    slow_mean)^2) / (2 w^2)`` [B]: `transition_kl` with another reference.

    GARDO (2512.24138), with aggregate `gardo` and `slow: {fn: reset}`, `every` 16 times
    train.updates: weight 0.04 (OCR), 0.07 (GenEval), 0.01 (FLUX). Those belong to its code's KL,
    which leaves the step size out of the variance: divide_by "g".

    Raises: ConfigError for another `divide_by`, or a likelihood without a std.
    """
    return _transition_gap(data, "slow", divide_by)


def _transition_gap(data: LossInput, name: str, divide_by: str) -> Tensor:
    """Return the distance of the means to those under other weights, over twice the variance."""
    if divide_by not in ("std", "g"):
        raise ConfigError(f'transition_kl: divide_by must be "std" or "g", got {divide_by!r}')
    check_transition("transition_kl", data)
    gap = (data.now.mean - data.under[name].mean.detach()).square().flatten(1).mean(1)
    exact = gap / (2 * data.now.std.square())
    return exact if divide_by == "std" else exact * (data.batch.sigma - data.batch.sigma_next)


@needs("ref", "zero_advantage")
def early_mean_gap(data: LossInput, *, steps: int) -> Tensor:
    """Penalise the distance of the transition means to those of the base weights at the first
    `steps` denoising steps, ``mean((mean - ref_mean)^2)`` [B], and nothing after.

    DiverseGRPO (2512.21514). Reconstruction: how many steps, and its weight, were not found.

    Raises: ConfigError for steps < 1, or a likelihood without a std.
    """
    if steps < 1:
        raise ConfigError(f"early_mean_gap: expected steps >= 1, got {steps}")
    check_transition("early_mean_gap", data)
    gap = (data.now.mean - data.under["ref"].mean.detach()).square().flatten(1).mean(1)
    return gap * (data.batch.step < steps)


@needs("ref", "zero_advantage")
def velocity_kl(data: LossInput) -> Tensor:
    """Penalise the distance of the velocity to that of the base weights, ``mean((v - v_ref)^2)``
    [B], at the states that are trained.

    The regulariser of DiffusionNFT (2509.16117) and AWM (2509.25050), whose forward likelihood has
    no transition. Up to a weight of the noise level it is the KL of the two forward bounds. UniGRPO
    (2603.23500) takes it with draws: all steps count alike, where the exact KL of a transition
    counts late, nearly noiseless steps hundreds of times more.

    Raises: ConfigError for a likelihood without a velocity.
    """
    return _velocity_gap(data, "ref")


@needs("ref", "slow", "zero_advantage")
def velocity_kl_both(data: LossInput, *, ref: float, slow: float) -> Tensor:
    """Penalise the distance of the velocity to those of the base weights and of the slow copy,
    ``ref mean((v - v_ref)^2) + slow mean((v - v_slow)^2)`` [B].

    AWM (2509.25050), code: ref 1e-3 (GenEval), 3e-3 (OCR), 1e-4 (PickScore), slow 1, the copy with
    `slow: {fn: ramp, slope: 0.001, limit: 0.3}`; so `beta` is 1.

    Raises: ConfigError for a negative weight, or a likelihood without a velocity.
    """
    if ref < 0 or slow < 0:
        raise ConfigError(f"velocity_kl_both: expected weights of at least 0, got {ref=}, {slow=}")
    return ref * _velocity_gap(data, "ref") + slow * _velocity_gap(data, "slow")


@needs("ref", "zero_advantage")
def velocity_kl_by_advantage(
    data: LossInput, *, least: float = 1e-3, max_advantage: float = 5.0
) -> Tensor:
    """Penalise the distance to the base velocity more for better images,
    ``(least + q (1 - least)) mean((v - v_ref)^2)`` [B].

    ``q = clip(A / (2 max_advantage) + 1/2, 0, 1)``: bad images may leave the base model. CRD
    (2603.14128), as in Flow-Factory: beta 0.1, least 1e-4 / beta, the base model guided by 4.5
    and the policy not: `train.reference_guidance`.

    Raises: ConfigError for `least` outside [0, 1], max_advantage not above 0, or a likelihood
    without a velocity.
    """
    if not (0 <= least <= 1 and max_advantage > 0):
        raise ConfigError(
            "velocity_kl_by_advantage: expected 0 <= least <= 1 and max_advantage > 0, got "
            f"{least=}, {max_advantage=}"
        )
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    good = a / (2 * max_advantage) + 0.5
    return (least + good * (1 - least)) * _velocity_gap(data, "ref")


@needs("ref", "zero_advantage")
def norm_guard(data: LossInput) -> Tensor:
    """Penalise a velocity that is longer than that of the weights from before training:
    ``relu(|v| / |v_ref| - 1)^2`` [B].

    NormGuard (2606.27771): forward-process and preference losses make velocities 5 to 15 % longer.
    Reconstruction: the power and the division by the reference's length are ours.

    Raises: ConfigError for a likelihood without a velocity.
    """
    now, ref = data.now.v, data.under["ref"].v
    if now is None or ref is None:
        raise ConfigError("norm_guard: the likelihood has no velocity; take forward or reverse")
    return (length_ratio(now, ref.detach()) - 1).relu().square()


@needs("zero_advantage")
def noise_moments(data: LossInput) -> Tensor:
    """Penalise initial noise that is far from the model's own, ``mean(m^2 + (q - 1)^2)`` [B] for
    the mean m and std q of likelihood `prior`, over dimensions.

    FIND (2407.19453), its code: weight 0.01.

    Raises: ConfigError for a likelihood that looks at velocities or images.
    """
    if data.now.v is not None or data.now.images is not None:
        raise ConfigError(
            "noise_moments: looks at the learned Gaussian of the initial noise, which this "
            "likelihood has not; take likelihood prior, or another penalty, such as velocity_kl"
        )
    off = per_sample(data.now.std, data.now.mean) if data.now.std.dim() == 1 else data.now.std
    return (data.now.mean.square() + (off - 1).square()).flatten(1).mean(1)


@needs("data", "zero_advantage")
def data_velocity(
    data: LossInput,
    *,
    weight: Literal["edm", "one"] = "edm",
    fresh: Literal["none", "noise", "all"] = "none",
) -> Tensor:
    """Penalise the error of the velocity on a noised real image of the row's prompt,
    ``w mean((v(x_s) - (eps - x0))^2)`` [B] with ``x_s = (1 - s) x0 + s eps``: the loss by which
    flow models are trained on data, in place of a distance to the base model.

    weight "edm": ``w = s^2 + (1 - s)^2``, "one": ``w = 1``. fresh "none": s is the row's noise
    level, eps the initial noise that its image was sampled from; "noise": eps is drawn anew; "all":
    s, too, as ``sigmoid(log 4 + 1.2 z)`` of a standard normal z. Without guidance.

    DDRL (2512.04332), code: beta 0.01, "edm", "none"; with ``use_rl_sigma_and_noise`` off "all".
    **Differs:** the flow form of the term is often given with w = 1. The code weighs the squared
    error of the x0 estimate by ``(r^2 + 1) / r^2``, where ``r = s / (1 - s)``, which is "edm"; its
    network's own weight for rectified flows, which would be "one", is not called. "noise" is ours.
    Its "all" also moves 5 % of the noise levels of videos next to pure noise, and multiplies the
    others by the root of the number of latent frames.

    Raises: ConfigError for another `weight` or `fresh`, or a likelihood without a velocity.
    """
    if weight not in ("edm", "one") or fresh not in ("none", "noise", "all"):
        raise ConfigError(
            'data_velocity: expected weight "edm" or "one" and fresh "none", "noise" or "all", got '
            f"{weight=}, {fresh=}"
        )
    if data.now.v is None or data.data is None:
        raise ConfigError(
            "data_velocity: the likelihood has no velocity; take forward or reverse, or leave the "
            "section kl out"
        )
    v, target, s = data.data
    error = (wide(v) - wide(target)).square().flatten(1).mean(1)
    return error if weight == "one" else error * (s.square() + (1 - s).square())


def _velocity_gap(data: LossInput, name: str) -> Tensor:
    now, other = data.now.v, data.under[name].v
    if now is None or other is None:
        raise ConfigError("velocity_kl: the likelihood has no velocity; take forward or reverse")
    return (wide(now) - wide(other.detach())).square().flatten(1).mean(1)
