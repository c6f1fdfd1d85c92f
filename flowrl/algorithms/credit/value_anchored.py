"""Credit by discounted rewards along the sample, weighed against the others and against zero."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.credit._chains import comb_of, spread_to_nodes
from flowrl.algorithms.forest import normalize_by
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


def value_anchored(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    gamma: float = 0.99,
    k: float = 0.1,
    anchored_steps: int = 5,
    direction: Literal["future", "past"] = "future",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Turn rewards >= 0 [L] into ``w_t ((Q_t - mean Q_t) / (std Q_t + eps) + k_t Q_t)`` -> [V]
    float32; for plan comb.

    VGPO (2512.12387), preview: x0. R_t is the reward of the x0 estimate after draw t, of the
    finished image for the last one. ``Q_t = sum_j gamma^(j - t) R_j`` over j >= t (direction
    "past": gamma^(t - j), j <= t), ``w_t = Q_t / mean_t Q_t`` per sample, 1 where all its rewards
    are 0; mean and std over the prompt's draws of equal step; k_t is `k` in the first
    `anchored_steps` denoising steps, else 0. Equal rewards give ``w_t k_t Q_t``, not 0, and the
    weights of a group do not sum to 0: keep k small and use a KL. A sample with an unscored image
    gets advantage 0 at every draw, since w_t needs all of them.

    Reconstruction: known, second hand, are the rewards of x0 estimates, their discounted sum, w_t,
    and an absolute term with the factor k std(Q) in the first 5 steps. Ours are gamma and k, the
    direction, that w_t multiplies after centring, and a std per step. **Differs:** k std(Q) divided
    by std + eps would vanish with the std, which is what the method is to prevent; here the std is
    cancelled.

    Raises: ConfigError for rewards below 0, options out of range, forks, and missing previews.
    """
    _check_options(gamma, k, anchored_steps, direction)
    comb = comb_of("value_anchored", leaf, tree, baseline=False)
    node = comb.decision.flatten()
    value = _accumulated(_checked(reward.double()[comb.seen]), gamma, direction)
    relative = normalize_by(
        value.flatten(), tree.group[node], tree.step[node], eps=eps, ddof=ddof
    ).view_as(value)
    anchor = k * (tree.step[comb.decision] <= anchored_steps).double() * value
    mean = value.mean(1, keepdim=True)
    share = torch.where(mean > 0, value / mean, 1.0)
    return spread_to_nodes(share * (relative + anchor), comb.owner)


def _accumulated(value: Tensor, gamma: float, direction: str) -> Tensor:
    """Add up rewards [C, w] along each chain, discounted by distance."""
    columns = list(value.unbind(1))
    order = range(len(columns) - 1, -1, -1) if direction == "future" else range(len(columns))
    total = torch.zeros_like(columns[0])
    for t in order:
        total = columns[t] + gamma * total
        columns[t] = total
    return torch.stack(columns, 1)


def _checked(value: Tensor) -> Tensor:
    """Take chains with an unscored image out [C, w], and refuse rewards below 0."""
    if bool((value < 0).any()):
        raise ConfigError(
            "value_anchored: expected rewards of at least 0, since it takes shares of their sum; "
            "got "
            f"{value.nan_to_num().min():g}. Give the reward a transform, {{fn: clip, low: 0}} or "
            f"{{fn: rank}}, add a "
            "constant to it, or use another credit"
        )
    return torch.where(value.isnan().any(1, keepdim=True), torch.nan, value)


def _check_options(gamma: float, k: float, anchored_steps: int, direction: str) -> None:
    if not (0 <= gamma <= 1 and k >= 0 and anchored_steps >= 0 and direction in ("future", "past")):
        raise ConfigError(
            "value_anchored: expected 0 <= gamma <= 1, k >= 0, anchored_steps >= 0 and "
            'direction "future" or "past"; '
            f"got gamma={gamma}, k={k}, anchored_steps={anchored_steps}, direction={direction!r}"
        )
