"""Clip bounds that follow the advantage, and a pull towards the best leaf (Dynamic-TreeRPO, LayerTuning-RL).

Reconstruction: eq. 11 and 13 of the paper (2509.23352) are known second hand only. Known: bounds between two limits
that follow the trajectory's reward with a sensitivity eta, and an SFT term, dynamically scaled, towards the velocity
of the group's best path. Ours: both sigmoids, the advantage instead of the reward, equal bounds on both sides, the
straight line to the best leaf below, and every default value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.losses._common import joined, ratio_metrics, surrogate


def dynamic_clip(
    log_prob: Tensor,
    old_log_prob: Tensor,
    weight: Tensor,
    *,
    clip_min: float,
    clip_max: float,
    eta: float,
    max_weight: float = 5.0,
    sft: float = 0.0,
    segment: Tensor | None = None,
    v: Tensor,
    x: Tensor,
    sigma: Tensor,
    best_x0: Tensor,
    best_weight: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``max(-A r, -A clip(r, 1 - e, 1 + e)) + sft sigmoid(best_weight) mean((v - best_v)^2)`` [B], metrics [B].

    ``e = clip_min + (clip_max - clip_min) sigmoid(eta A)``, A the weight within ±max_weight: good draws may move
    further (eta > 0). ``best_v = (x - best_x0) / sigma``, a constant, leads straight from the state x [B, *] at sigma
    [B] to the latent best_x0 [B, *] of the best-weighted leaf below it, whose weight is best_weight [B]; v [B, *] has
    a gradient. eta 0 and sft 0 is `ppo_clip` with the range ``(clip_min + clip_max) / 2`` on both sides.

    Reconstruction, see above. Siblings repeat the pull of their state, and a `segment` (as in `ppo_clip`) does not
    share it out. Metrics: those of `ppo_clip`; clip_range e; sft the pull.

    Raises: ConfigError unless 0 < clip_min <= clip_max <= 1, max_weight > 0 and sft >= 0.
    """
    _check(clip_min, clip_max, max_weight, sft)
    log_ratio, share = joined(log_prob - old_log_prob.detach(), segment)
    a = weight.detach().clamp(-max_weight, max_weight)
    bound = clip_min + (clip_max - clip_min) * (eta * a).sigmoid()
    loss, stopped = surrogate(log_ratio, a, bound, bound)
    pull = sft * best_weight.detach().sigmoid() * _distance(v, x, sigma, best_x0) if sft else torch.zeros_like(loss)
    metrics = {**ratio_metrics(log_ratio.detach(), stopped), "clip_range": bound, "sft": pull.detach()}
    return loss * share + pull, metrics


def _distance(v: Tensor, x: Tensor, sigma: Tensor, best_x0: Tensor) -> Tensor:
    """Return the mean squared distance [B] of v from the velocity that leads straight to best_x0."""
    wide = v.float() if v.element_size() < 4 else v
    path = (x.to(wide.dtype) - best_x0.to(wide.dtype)) / sigma.to(wide.dtype).reshape(-1, *[1] * (x.dim() - 1))
    return (wide - path.detach()).square().flatten(1).mean(1)


def _check(clip_min: float, clip_max: float, max_weight: float, sft: float) -> None:
    if not (0 < clip_min <= clip_max <= 1 and max_weight > 0 and sft >= 0):
        raise ConfigError(
            f"dynamic_clip needs 0 < clip_min <= clip_max <= 1, max_weight > 0 and sft >= 0, got clip_min={clip_min}, "
            f"clip_max={clip_max}, max_weight={max_weight}, sft={sft}"
        )
