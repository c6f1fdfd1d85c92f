"""Which images are trained, and how the good and the bad ones count.

Advantages stay those of the whole group. A decision above a kept leaf is trained in full, also if
others below it are not kept."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.selection._change import rank_within, trained_draws
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout, SelectInput


def largest(
    data: SelectInput, *, share: float, among: Literal["batch", "prompt"] = "batch"
) -> Tensor:
    """Train what led to the leaves of largest |advantage| -> factor [V], 0 or 1.

    CPPO (2503.22342), its code: of n leaves ``int(n (1 - share))`` with the smallest go. among
    "batch": prompts compete, and one whose images are alike may vanish; "prompt": the same share of
    each. Ties go by the order of the leaves. **Differs:** the code looks at the images of one
    process, and fills the batch up with more prompts; raise `train.prompts` for that.

    Raises: ConfigError for a share outside (0, 1), another `among`, or if nothing is left.
    """
    if among not in ("batch", "prompt") or not 0 < share < 1:
        raise ConfigError(
            'select largest: needs share above 0 and below 1, and among "batch" or "prompt", got '
            f"{share=}, {among=}"
        )
    leaf, tree = data.rollout.leaf, data.rollout.tree
    family = tree.group[leaf] if among == "prompt" else torch.zeros_like(leaf)
    rank, size = rank_within(-data.advantage[leaf].abs(), family)
    # 10 (1 - 0.9) is 0.9999999999999998
    dropped = (size.double() * (1 - share) + 1e-9).long()
    return _led_to(data.rollout, rank < size - dropped)


def spread(data: SelectInput, *, keep: int, keep_last: int = 0, over: int = 0) -> Tensor:
    """Train what led to the `keep` leaves of each prompt whose advantages differ most -> factor
    [V], 0 or 1.

    D3S (2509.22115), sample level, also PODS: the subset of largest variance. It is made of the p
    best and the ``keep - p`` worst, for the best p. Of equal variances the one with more good
    leaves counts; ties go by the order of the leaves.

    keep_last, over: its schedule. The number goes from `keep` to `keep_last` over the first `over`
    iterations, ``(1 - t) keep + t keep_last`` rounded down with t the share of them that is done,
    and stays there; 0 and 0: it does not move. The paper loosens it, so keep_last is the larger;
    its first and last numbers are not in what we could read. **Differs:** the paper also picks
    parts of texts, whose share moves alike; an image is trained at all its steps.

    Raises: ConfigError for a number below 2 or above the number of a prompt's leaves, or for one
    of `keep_last` and `over` without the other.
    """
    leaf, group = data.rollout.leaf, data.rollout.tree.group[data.rollout.leaf]
    fewest = int(torch.bincount(group)[group].min())
    last = keep_last if over else keep
    if not 2 <= min(keep, last) <= max(keep, last) <= fewest:
        both = f"keep={keep}" + (f" and keep_last={keep_last}" if over else "")
        raise ConfigError(
            f"select spread: {both} must be from 2 to the number of leaves of a prompt, {fewest}"
        )
    if over < 0 or (over > 0) != (keep_last > 0):
        raise ConfigError(
            "select spread: a schedule has keep_last, where the number ends, and over, the "
            f"iterations until then; got {keep_last=} and {over=}"
        )
    # how many of them now, in whole numbers
    done = min(data.iteration, over)
    now = (keep * (over - done) + last * done) // over if over else keep
    kept = torch.zeros_like(leaf, dtype=torch.bool)
    for prompt in group.unique():
        mine = (group == prompt).nonzero().flatten()
        kept[mine[_most_varied(data.advantage[leaf[mine]], now)]] = True
    return _led_to(data.rollout, kept)


def _most_varied(advantage: Tensor, keep: int) -> Tensor:
    """Return the places of the `keep` advantages [N] with the largest variance."""
    order = advantage.double().argsort(descending=True, stable=True)
    best, found = -1.0, order[:keep]
    for top in range(keep, -1, -1):
        places = torch.cat([order[:top], order[len(order) - (keep - top) :]])
        variance = float(advantage[places].double().var(correction=0))
        if variance > best:
            best, found = variance, places
    return found


def _led_to(rollout: Rollout, kept: Tensor) -> Tensor:
    """Return 1 for trained decisions with a kept leaf below them, else 0 -> [V]."""
    below = subtree_mean(kept.float(), rollout.leaf, rollout.tree) > 0
    return (trained_draws(rollout) & below).float()
