"""Factors that even out how strongly the steps of a sampler pull at the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.selection._change import drawn_at, trained_draws
from flowrl.core.errors import ConfigError
from flowrl.core.types import SelectInput


def gradient_scale(data: SelectInput, *, low: int = 0, high: int) -> Tensor:
    """Weigh each draw by ``std / |d mean / d v|``, over its mean of the steps from `low` to `high`
    - 1 -> factor [V].

    The gradient of a log-prob is ``|d mean / d v| / std`` times a number of about one, so with this
    factor all steps pull alike. Flash-GRPO (2605.15980), for whose transition it is
    ``1 / (sqrt(D) / g + g sqrt(D) (1 - sigma) / (2 sigma))``, D the step's size; here it is taken
    of the run's own transition. The mean is over the steps that could have been drawn, as in UniRL:
    **Differs:** the authors' code divides by the mean of the batch.

    Raises: ConfigError for a range that the sampler's steps do not have, or a step in it without
    noise.
    """
    sigmas, tree = data.rollout.sigmas.double(), data.rollout.tree
    if not 0 <= low < high <= len(sigmas) - 1 or data.transition is None:
        raise ConfigError(
            f"select gradient_scale: expected steps from low to high - 1 of the sampler's "
            f"{len(sigmas) - 1}, got {low=}, {high=}"
        )
    # the transition's mean is linear in v: ask at 0 and at 1
    here, after = sigmas[low:high], sigmas[low + 1 : high + 1]
    level = torch.full_like(here, float(data.rollout.noise_scale.max()))
    zero = torch.zeros_like(here)[:, None]
    rest, moved = (data.transition(zero, v, here, after, level) for v in (zero, zero + 1))
    scale = moved.std / (moved.mean - rest.mean).abs()[:, 0]
    if not bool((scale > 0).all() & scale.isfinite().all()):
        raise ConfigError(
            f"select gradient_scale: a step from {low} to {high - 1} has no noise; narrow the range"
        )
    # of the step that each draw was made at
    factor = torch.zeros(len(sigmas), dtype=torch.float64, device=sigmas.device)
    factor[low:high] = scale / scale.mean()
    mine = trained_draws(data.rollout)
    return (factor[drawn_at(tree)] * mine).float()
