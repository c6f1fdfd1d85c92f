"""Credit for one draw each, judged by images of several granularities."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.credit._chains import rake_of, spread_to_nodes
from flowrl.algorithms.forest import normalize_by
from flowrl.core.types import Tree


def granular_norm(
    reward: Tensor, leaf: Tensor, tree: Tree, *, eps: float = 1e-8, ddof: int = 1
) -> Tensor:
    """Normalise rewards [L] among a prompt's draws of equal step and stride, add over strides ->
    [V] float32.

    G2RPO (2510.01982) and its code, multi-granularity advantage integration; for plan rake. The sum
    over strides is not divided by their number. With several rewards, ``aggregate: advantage_sum``
    adds those too, and the loss's ``max_advantage`` is the code's limit of ±5 on the sum. A draw
    into the last step is its own image, the same for every stride, and counts once for each. All
    initial noises of a prompt are one group (the code has one).

    A draw with an unscored image, of whichever stride, gets advantage 0 and counts in no mean, so
    that the weights of a step always sum to 0.

    Raises: ConfigError for a forest that plan rake (or fork) does not give.
    """
    rake = rake_of("granular_norm", leaf, tree)
    value = reward.double()[rake.seen]
    value = torch.where(value.isnan().any(1, keepdim=True), torch.nan, value)
    stride = torch.arange(value.shape[1], device=value.device).expand_as(value)
    group, step = (row[rake.decision][:, None].expand_as(value) for row in (tree.group, tree.step))
    keys = [key.flatten() for key in (group, step, stride)]
    return spread_to_nodes(
        normalize_by(value.flatten(), *keys, eps=eps, ddof=ddof).view_as(value).sum(1), rake.owner
    )
