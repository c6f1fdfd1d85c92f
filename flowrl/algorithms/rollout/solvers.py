"""Solvers of higher order on the flow path, for steps without noise that is trained: DPM-Solver++
2M, and SA-Solver.

SA-Solver is a stochastic Adams solver, predictor and corrector of second order, one network call a
step. Its noise is part of the sampler and is not trained. Source: SA-Solver (2309.05019), data
prediction, in the few-step form of AWM's code (2509.25050).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.transitions import euler
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import per_sample, wide, x0_from
from flowrl.core.types import Adams


def dpmpp_2m(
    x: Tensor,
    v: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    past_x0: Tensor | None = None,
    past_sigma: Tensor | None = None,
) -> Tensor:
    """Take a step of DPM-Solver++ (2M, midpoint) with the x0 estimate of the step before -> x_next
    [B, *].

    With ``lambda = ln((1 - sigma) / sigma)``, ``h = lambda_next - lambda`` and the x0 estimate ``D
    = x - sigma v``, it is the first-order step ``(sigma_next / sigma) x - (1 - sigma_next) (e^-h -
    1) D`` with ``D + (D - past_x0) h / (2 h_past)`` in the place of D (DPM-Solver++, 2211.01095;
    MixGRPO-Flash, 2507.21802). On this path the first order is Euler's step. That is taken without
    a past, at sigma 1 and towards sigma 0, where h is infinite.

    Args: x, v, past_x0 [B, *]; sigma, sigma_next, past_sigma [B], past_sigma > sigma > sigma_next.
    float32 or wider.
    """
    x = wide(x)
    first = euler(x, v, sigma, sigma_next)
    if past_x0 is None or past_sigma is None:
        return first
    sigma, sigma_next, past_sigma = (s.to(x.dtype) for s in (sigma, sigma_next, past_sigma))
    h, h_past = _log_snr_gain(sigma, sigma_next), _log_snr_gain(past_sigma, sigma)
    ahead = torch.where(
        (sigma < 1) & (sigma_next > 0), h / (2 * h_past), 0
    )  # h_past is infinite after sigma 1
    bend = per_sample((sigma - sigma_next) / sigma * ahead, x)
    return first + bend * (x0_from(x, v.to(x.dtype), sigma) - past_x0.to(x.dtype))


def _log_snr_gain(sigma: Tensor, sigma_next: Tensor) -> Tensor:
    # lambda_next - lambda, written as one logarithm without cancellation
    return torch.log1p((sigma - sigma_next) / (sigma_next * (1 - sigma)))


class Coefficients(NamedTuple):
    """``x_next = x * x + newest * D_newest + older * D_older + noise * z``."""

    x: float
    newest: float
    older: float
    noise: float


def coefficients(
    sigma: float,
    sigma_next: float,
    tau: float,
    *,
    nodes: tuple[float, ...],
    corrects: bool = False,
    published: bool = False,
) -> Coefficients:
    """Work out one update from sigma to sigma_next, with noise strength tau, in float64.

    nodes: the sigmas of the x0 estimates D, the newest first, one or two. With ``lambda = ln((1 -
    sigma) / sigma)`` the update is exact for a D that is linear in lambda (constant with one node).
    A predictor's nodes are sigma and the sigma before, a corrector's sigma_next and sigma.

    **Differs:** with `published` two nodes have the coefficients of the few-step form, in which
    that integral is replaced by one that agrees to second order. On coarse grids it overshoots:
    after AWM's 14 steps without noise data of variance 1 come out with 1.20, here with 1.09 (exact
    velocity).
    """
    here, there = _log_snr(sigma), _log_snr(sigma_next)
    a, h = 1 + tau * tau, there - here
    decay = math.exp(-a * h)
    # integrals of exp(a lambda) and lambda exp(a lambda) over the step, over exp(a there)
    flat = (1 - decay) / a
    c = [flat, 0.0]
    if len(nodes) > 1:
        slope = ((a * there - 1) - (a * here - 1) * decay) / a**2
        first, second = _log_snr(nodes[0]), _log_snr(nodes[1])
        extra = 0.0
        if published:
            bend = (a * h - 1 + decay) / a**2
            extra = h / 2 - bend / h if corrects else (h * h / 2 - bend) / (first - second)
        c[0] = (slope - second * flat) / (first - second) + extra
        c[1] = (slope - first * flat) / (second - first) - extra
    kept = math.exp(-tau * tau * h) if tau else 1.0
    fresh = math.sqrt(1 - kept * kept)
    scale = a * (1 - sigma_next)
    return Coefficients(kept * sigma_next / sigma, scale * c[0], scale * c[1], sigma_next * fresh)


def correction(sigmas: Sequence[float], adams: Adams, k: int) -> Coefficients:
    """Return the update that corrects the state at step k, from the state before it."""
    here, before = sigmas[k], sigmas[k - 1]
    return coefficients(
        before,
        here,
        adams.strength(here),
        nodes=(here, before),
        corrects=True,
        published=adams.published,
    )


def prediction(sigmas: Sequence[float], adams: Adams, k: int, *, first: bool) -> Coefficients:
    """Return the update that predicts the state after step k; the first step knows one x0 estimate,
    and so does the one after it, where the grid begins at 1."""
    nodes = (sigmas[k],) if first or sigmas[k - 1] >= 1 else (sigmas[k], sigmas[k - 1])
    tau = adams.strength(sigmas[k + 1])
    return coefficients(sigmas[k], sigmas[k + 1], tau, nodes=nodes, published=adams.published)


def combined(
    made: Coefficients, x: Tensor, newest: Tensor, older: Tensor | None, noise: Tensor | None
) -> Tensor:
    """Make one update of SA-Solver: of a state, two x0 estimates and noise [F, *] -> [F, *]."""
    out = made.x * x + made.newest * newest
    if older is not None and made.older:
        out = out + made.older * older
    return out if noise is None else out + made.noise * noise


def check_adams(adams: Adams, noisy: bool, same_noise: bool) -> None:
    """Raise ConfigError unless the solver can run: no other noise, and images that are apart."""
    if noisy:
        raise ConfigError("a plan with SA-Solver has noise of its own; set its noise to 0")
    if same_noise and adams.noise_scale > 0:
        raise ConfigError(
            "train.same_noise: images that start from one noise are one sample until a step that "
            "is trained, and SA-Solver's noise is not; set it to false, or plan.noise_scale to 0"
        )


def _log_snr(sigma: float) -> float:
    if sigma <= 0:
        return math.inf
    return math.log((1 - sigma) / sigma) if sigma < 1 else -math.inf
