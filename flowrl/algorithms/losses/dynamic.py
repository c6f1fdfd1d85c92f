"""Clip bounds that follow the advantage, and a pull towards the best leaf (Dynamic-TreeRPO,
LayerTuning-RL).

Reconstruction: eq. 11 and 13 of the paper (2509.23352) are known second hand only. Known: bounds
between two limits that follow the trajectory's reward with a sensitivity eta, and an SFT term,
dynamically scaled, towards the velocity of the group's best path. Ours: both sigmoids, the
advantage instead of the reward, equal bounds on both sides, the straight line to the best leaf
below, and every default value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.losses._common import ratio_metrics, segment_mean, surrogate
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.noise_path import per_sample, wide
from flowrl.core.types import LossInput


@needs("old_log_prob", "best", "zero_advantage")
def dynamic_clip(
    data: LossInput,
    *,
    clip_min: float,
    clip_max: float,
    eta: float,
    max_advantage: float = 5.0,
    sft: float = 0.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``max(-A r, -A clip(r, 1 - e, 1 + e)) + sft sigmoid(best_advantage) mean((v -
    best_v)^2)`` [B], metrics [B].

    ``e = clip_min + (clip_max - clip_min) sigmoid(eta A)``, A the advantage within ±max_advantage:
    good draws may move further (eta > 0). ``best_v = (x - best_x0) / sigma``, a constant, leads
    straight from the state x [B, *] at sigma [B] to the latent best_x0 [B, *] of the best leaf
    below it, whose advantage is best_advantage [B]; v [B, *] has a gradient. eta 0 and sft 0 is
    `ppo_clip` with the range ``(clip_min + clip_max) / 2`` on both sides.

    Reconstruction, see above. Siblings repeat the pull of their state, and a `segment` (as in
    `ppo_clip`) does not share it out. Metrics: those of `ppo_clip`; clip_range e; sft the pull.

    Raises: ConfigError unless 0 < clip_min <= clip_max <= 1, max_advantage > 0 and sft >= 0.
    """
    _check(clip_min, clip_max, max_advantage, sft)
    # bounds that follow the advantage
    log_ratio, share = segment_mean(data.now.log_prob - data.old_log_prob.detach(), data.segment)
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    bound = clip_min + (clip_max - clip_min) * (eta * a).sigmoid()
    loss, stopped = surrogate(log_ratio, a, bound, bound)
    # the pull towards the best leaf
    pull = _pull(data, sft) if sft else torch.zeros_like(loss)
    metrics = ratio_metrics(log_ratio.detach(), stopped)
    metrics |= {"clip_range": bound, "sft": pull.detach()}
    return loss * share + pull, metrics


def _pull(data: LossInput, sft: float) -> Tensor:
    """Return `sft` times the sigmoid of the best leaf's advantage times the mean squared distance
    of v from the velocity that leads straight to it, [B]."""
    if data.now.v is None or data.best_x0 is None or data.best_advantage is None:
        raise ConfigError("dynamic_clip: sft needs the velocity and the best leaf, got none")
    v = wide(data.now.v)
    x, best_x0, sigma = (
        part.to(v.dtype) for part in (data.batch.x, data.best_x0, data.batch.sigma)
    )
    path = (x - best_x0) / per_sample(sigma, x)
    distance = (v - path.detach()).square().flatten(1).mean(1)
    return sft * data.best_advantage.detach().sigmoid() * distance


def _check(clip_min: float, clip_max: float, max_advantage: float, sft: float) -> None:
    if not (0 < clip_min <= clip_max <= 1 and max_advantage > 0 and sft >= 0):
        raise ConfigError(
            "dynamic_clip needs 0 < clip_min <= clip_max <= 1, max_advantage > 0 and sft >= 0, "
            f"got clip_min={clip_min}, "
            f"clip_max={clip_max}, max_advantage={max_advantage}, sft={sft}"
        )
