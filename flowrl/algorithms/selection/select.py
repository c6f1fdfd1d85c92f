"""Which decisions are trained, and how much each counts: ``(data) -> [V] float32``, a factor on the
loss.

0 = not trained and not counted. Weights are given by then: a selection never changes an advantage.
What is random is drawn on the host from the iteration's own generator, so it is the same on every
device and after a resume."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.forest import climb, root_above, subtree_mean, trained_nodes
from flowrl.algorithms.selection._change import (
    drawn_at,
    one_of_each,
    rank_within,
    relative_change,
    relative_changes,
    trained_draws,
)
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout, SelectInput

MOST = 8
"""Items of a family that can be enumerated: 2**MOST subsets."""


NEAR = 1e-6  # rewards are float32: a range of 0.3 may come out as 0.29999998


def fraction(data: SelectInput, *, share: float) -> Tensor:
    """Train the first ``int(n share)`` of a random order of each sample's n decisions -> factor
    [V], 0 or 1.

    DanceGRPO (2505.07818), its code: share 0.6, so 9 of 15. On a forest with forks a sample is all
    that has one initial noise: paths share decisions there.

    Raises: ConfigError for a share outside (0, 1], or one that leaves a sample no decision.
    """
    node = trained_draws(data.rollout).nonzero().flatten()
    rank, size = rank_within(_uniform(data, len(node)), root_above(data.rollout)[node])
    return _at(data.rollout, node, rank < _quota("fraction", size, share, "decisions of a sample"))


def nonzero(data: SelectInput) -> Tensor:
    """Train only what has an advantage other than 0, and divide by its number alone -> factor [V],
    0 or 1.

    Without it nodes of advantage 0 count in the divisor, and are computed where another node of
    their segment is trained: the images of a prompt that are in no pair.
    """
    return (data.advantage != 0).float()


def best_of_n(data: SelectInput, *, top: int, bottom: int) -> Tensor:
    """Train what led to each prompt's `top` best and `bottom` worst leaves by advantage -> factor
    [V], 0 or 1.

    DanceGRPO (2505.07818), its code: 24 images, top 4, bottom 4. Advantages stay those of the
    whole group. A decision above a kept leaf is trained in full, also if others below it are not
    kept. Ties go by the order of the leaves, the earlier one counts as better. It needs a credit
    whose leaf advantages rise with the reward (`group_norm`); a leaf that was not scored has
    advantage 0 and so stands in the middle. **Differs:** the code ranks the images of one process,
    whatever their prompts; flowrl those of each prompt.

    Raises: ConfigError for negative numbers, none, or more than a prompt has leaves.
    """
    leaf, tree = data.rollout.leaf, data.rollout.tree
    rank, size = rank_within(-data.advantage[leaf], tree.group[leaf])
    if min(top, bottom) < 0 or not 1 <= top + bottom <= int(size.min()):
        raise ConfigError(
            f"select best_of_n: top={top} and bottom={bottom} must not be negative and together be "
            "from 1 to the "
            f"number of leaves of a prompt, {int(size.min())}"
        )
    kept = (rank < top) | (rank >= size - bottom)
    return (trained_draws(data.rollout) & (subtree_mean(kept.float(), leaf, tree) > 0)).float()


def reward_range(data: SelectInput, *, low: float, high: float = math.inf) -> Tensor:
    """Train only prompts whose images differ enough and not too much: the largest reward less the
    smallest one is from `low` to `high` -> factor [V], 0 or 1.

    The reward is the weighted sum of those that count, after their transforms, over all scored
    leaves of the prompt. A prompt with no scored leaf is left out; one leaf alone has the range 0.
    In a rehearsal, where no reward is known, all prompts are kept.

    Qwen-Image-2.0-RL (2606.27608): prompts are chosen by the range of rewards in their group.
    Reconstruction: the two thresholds were not found, nor whether prompts are looked at once before
    training or, as here, whenever they are drawn.

    Raises: ConfigError unless 0 <= low < high.
    """
    if not 0 <= low < high:
        raise ConfigError(
            f"select reward_range: expected 0 <= low < high, got {low=}, {high=}; a reward that is "
            "0 or 1 has the ranges 0 and 1 alone"
        )
    tree, leaf = data.rollout.tree, data.rollout.leaf
    if data.reward is None:
        return torch.ones_like(tree.std)
    group = torch.unique(tree.group, return_inverse=True)[1]
    value, mine = data.reward.double().to(leaf.device), group[leaf]
    most = value.new_full((int(group.max()) + 1,), -torch.inf)
    # without any scored leaf both stay infinite, and the range is below every `low`
    top = most.scatter_reduce(0, mine, value.nan_to_num(nan=-torch.inf), "amax")
    bottom = (-most).scatter_reduce(0, mine, value.nan_to_num(nan=torch.inf), "amin")
    span = top - bottom
    return ((span >= low - NEAR) & (span <= high + NEAR))[group].float()


def one_step(data: SelectInput) -> Tensor:
    """Train one step of each image, drawn anew in each iteration -> factor [V], 0 or 1. For a
    sampler of few steps without noise, all of which are trained otherwise (`generated`).

    TDM (2503.06674), the authors' code (Luo-Yihong/TDM 81b019f) draws one of 4.
    """
    nodes = trained_nodes(data.rollout, "steps")
    kept = one_of_each(data.rollout, nodes, data.generator)
    return torch.zeros_like(data.rollout.tree.std).index_fill(0, kept, 1.0)


def depth_pruning(
    data: SelectInput, *, first: int, size: int, every: int = 30, stop: int = 9
) -> Tensor:
    """Leave out draws into the depths ``first ... first + size - 1`` -> factor [V], 0 or 1; depth =
    steps taken.

    The window moves 1 towards noise after each `every` iterations until it begins at `stop`.
    BranchGRPO (2509.06040) DepPru, its code: depths 15 to 18 of 20, every 30, stop 9. Sampling and
    advantages stay as they are. **Differs:** the code counts iterations from 1, so its window moves
    one iteration earlier.

    Raises: ConfigError unless 1 <= stop <= first < steps and size, every >= 1, or if no decision is
    left.
    """
    steps, depth = len(data.rollout.sigmas) - 1, data.rollout.tree.step
    if not 1 <= stop <= first < steps or min(size, every) < 1:
        raise ConfigError(
            f"select depth_pruning: needs 1 <= stop <= first < {steps} (the steps) and size, every "
            ">= 1, got "
            f"stop={stop}, first={first}, size={size}, every={every}"
        )
    low = max(stop, first - data.iteration // every)
    kept = trained_draws(data.rollout) & ((depth < low) | (depth >= low + size))
    if not bool(kept.any()):
        raise ConfigError(
            f"select depth_pruning: leaving out depths {low} to {low + size - 1} leaves no decision"
        )
    return kept.float()


def width_pruning(
    data: SelectInput, *, mode: Literal["per_branch", "extremes"], share: float
) -> Tensor:
    """Leave out part of the draws behind the last split, by advantage -> factor [V], 0 or 1; the
    split's own draws and earlier ones all stay.

    The last split is the deepest step at which a node has several draws below it. "per_branch":
    behind each of its draws the ``max(1, int(n share))`` best of n; "extremes": of all n draws
    behind it, of all trees, ``k = max(2, int(n share))``, the ``k // 2`` best and ``k - k // 2``
    worst. BranchGRPO (2509.06040) WidPru modes 1 and 2, its code: share 0.5. As there, draws of the
    last denoising step are counted and ranked with the others; flowrl never trains them. Draws of
    equal advantage go by their order, noisiest first: behind the last split all of a branch have
    one advantage under `group_norm`, and nearly so under `depth_norm`, so that "per_branch" mostly
    keeps its noisier part.

    **Differs:** "extremes" ranks the trees of one process in the code, here those of the iteration.
    If nothing is behind the last split, the code prunes nothing; here that is an error.

    Raises: ConfigError for another mode, a share outside (0, 1], a plan that never splits, or that
    draws nothing behind its last split.
    """
    if mode not in ("per_branch", "extremes") or not 0 < share <= 1:
        raise ConfigError(
            'select width_pruning: expected the mode "per_branch" or "extremes" and a share above '
            f"0 and at most 1, got {mode!r} with {share=}"
        )
    mine = trained_draws(data.rollout)
    behind, branch = _behind_last_split(data.rollout, mine)
    if mode == "per_branch":
        rank, size = rank_within(-data.advantage[behind], branch)
        kept = rank < (size.double() * share).long().clamp_min(1)
    else:
        rank, size = rank_within(-data.advantage[behind], torch.zeros_like(branch))
        count = max(2, int(len(behind) * share))
        kept = (rank < count // 2) | (rank >= size - (count - count // 2))
    return mine.float().index_copy(0, behind, kept.float()) * mine


def noise_weight(data: SelectInput, *, power: float = 1.0) -> Tensor:
    """Weigh each decision by its noise, ``std^power / mean of the steps'`` -> factor [V]; mean 1
    over trained steps.

    power 1, TempFlow-GRPO (2508.04324), undoes the 1 / std in the gradient of a log-prob. power 2
    gives the gradients, up to one constant, of a log-prob without its 1 / (2 std^2), which is what
    the code of CPS (2509.05952) and TP-GRPO (2602.06422) has. Each trained step counts once in the
    mean, however many decisions it has.

    **Differs:** TempFlow's code has the constants 2.25 (SD3.5) and 1.73 (FLUX) for 1 / mean; they
    are 2.252 and 1.726 on its grids and follow from the rule here on any other. The code of CPS
    clips the ratio of its own log-prob, flowrl that of the normalised one.

    Raises: ConfigError unless power is a number of at least 0.
    """
    if not (math.isfinite(power) and power >= 0):
        raise ConfigError(f"select noise_weight: power must be a number of at least 0, got {power}")
    at, mine = drawn_at(data.rollout.tree), trained_draws(data.rollout)
    scale = torch.where(mine, data.rollout.tree.std.double(), 0.0) ** power * mine
    total = scale.new_zeros(2, len(data.rollout.sigmas)).index_add(
        1, at, torch.stack([scale, mine.double()])
    )
    mean = (total[0] / total[1]).nanmean()  # 0 / 0 where nothing is drawn
    return (scale / mean).float()


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


def chunks(
    data: SelectInput,
    *,
    share: float,
    weighted: Literal["none", "l1", "softmax"] = "none",
    change: Literal["sample", "batch"] = "sample",
    corrected: bool = False,
) -> Tensor:
    """Train ``int(n share)`` of each sample's n segments, drawn at random without replacement ->
    factor [V].

    Chunk-GRPO (2510.21583), its code: share 0.5, so 2 of 4. weighted "none": all alike; "l1",
    "softmax": one after the other with odds rho or exp(rho), rho the mean over the segment's draws
    of the relative change of the latents. change "sample", the code: the segment's own; "batch",
    ours: that of its steps averaged over the batch (`segments.adaptive`), with less noise. A sample
    is all that has one initial noise.

    Weighted draws train noisy steps more often, so they change the objective. corrected=True undoes
    it in expectation: the factor of a drawn segment is ``(int(n share) / n) / P(it is drawn)``, the
    probability by enumeration, which allows up to 8 segments per sample. **Differs:** the code does
    not correct.

    Raises: ConfigError without a `segment` section, for another `weighted`, a share outside (0, 1]
    or one that leaves a sample no segment, or too many segments to correct.
    """
    ro, mine = data.rollout, trained_draws(data.rollout).nonzero().flatten()
    known = weighted in ("none", "l1", "softmax") and change in ("sample", "batch")
    if data.segment is None or not known:
        raise ConfigError(
            "select chunks: needs a segment section, such as segment: {fn: fixed, sizes: [2, 3, "
            '4]}, weighted "none", "l1" or "softmax" and change "sample" or "batch"; got '
            f"{'no' if data.segment is None else 'a'} segment, {weighted=}, {change=}"
        )
    # from draws to segments: of which segment each draw is [N], of which sample each segment
    ids, index = torch.unique(data.segment[mine], return_inverse=True)
    family = torch.zeros_like(ids).scatter(0, index, root_above(ro)[mine])
    # drawn by odds without replacement: each gets a random time of that rate, the earliest win
    rho = _change_of(ro, mine, change) if weighted != "none" else None
    odds = _odds(rho, index, len(ids), weighted)
    rank, size = rank_within(
        -torch.log1p(-_uniform(data, len(ids))) / odds, family
    )  # a race of exponentials
    count = _quota("chunks", size, share, "segments of a sample")
    factor = (rank < count).double()
    # what is drawn more often than its share counts less, so that the mean is the same
    if corrected:
        if int(size.max()) > MOST:
            raise ConfigError(
                f"select chunks: corrected works with up to {MOST} segments, got {int(size.max())}"
            )
        factor = factor * (count / size) / _inclusion(odds, family, count)
    return _at(ro, mine, factor[index])


def _change_of(rollout: Rollout, mine: Tensor, change: str) -> Tensor:
    """Return the relative change of the latents at draws [N], their own or their step's ->
    [N] float64."""
    if change == "batch":
        return relative_change(rollout)[drawn_at(rollout.tree)[mine]]
    return relative_changes(rollout)[mine]


def _odds(rho: Tensor | None, index: Tensor, count: int, weighted: str) -> Tensor:
    """Return the odds of each segment [C] float64, up to a common factor, for the change rho [N] of
    its draws."""
    if rho is None:
        return torch.ones(count, dtype=torch.float64, device=index.device)
    total = rho.new_zeros(2, count).index_add(1, index, torch.stack([rho, torch.ones_like(rho)]))
    mean = total[0] / total[1]
    return mean if weighted == "l1" else (mean - mean.max()).exp()


def _inclusion(odds: Tensor, family: Tensor, take: Tensor) -> Tensor:
    """Return the probability that each item [N] is among those drawn -> [N] float64.

    Of each family (id [N], at most MOST items) `take` [N] are drawn one after the other without
    replacement, each time with probability proportional to `odds` [N] above 0. Exact: goes through
    all subsets in the order of their size.
    """
    # families as rows of a table: p [families, slots], 0 where a family is smaller
    row = torch.unique(family, return_inverse=True)[1]
    slot, size = rank_within(torch.zeros_like(odds), row)
    rows, slots = int(row.max()) + 1, int(size.max())
    p = odds.new_zeros(rows, slots).index_put((row, slot), odds)
    # a subset is the number whose bits are its items
    subset = torch.arange(2**slots, device=odds.device)
    holds = (
        subset[:, None].bitwise_right_shift(torch.arange(slots, device=odds.device)) % 2 == 1
    )  # [2^slots, slots]
    rest = (p @ (~holds).to(p.dtype).T).clamp_min(
        torch.finfo(p.dtype).tiny
    )  # odds of what is not drawn yet
    # chance [families, 2^slots]: that the items drawn so far are just this subset; none at first
    chance = torch.zeros_like(rest)
    chance[:, 0] = 1.0
    for drawn in range(slots):
        for item in range(slots):
            before = subset[(holds.sum(1) == drawn) & ~holds[:, item]]
            chance[:, before + 2**item] += (
                chance[:, before] * p[:, item : item + 1] / rest[:, before]
            )
    # add up the subsets of the size that was asked for, for each item that they hold
    asked = torch.zeros(rows, dtype=take.dtype, device=take.device).scatter(0, row, take)
    return ((chance * (holds.sum(1) == asked[:, None])) @ holds.to(p.dtype))[row, slot]


def _behind_last_split(rollout: Rollout, mine: Tensor) -> tuple[Tensor, Tensor]:
    """List the draws behind the last split, those of the last step too -> nodes [N], and for each
    the draw of the split above it [N]."""
    tree, at = rollout.tree, drawn_at(rollout.tree)
    # draws that have siblings among the trained ones
    split = mine & (
        torch.bincount(tree.parent[mine], minlength=len(mine))[tree.parent.clamp_min(0)] > 1
    )
    if not bool(split.any()):
        raise ConfigError(
            "select width_pruning: no node has more than one draw below it; it needs a plan that "
            "forks"
        )
    # behind it every path is single: climb until the draw that was made there
    last = at[split].max()
    node = torch.arange(len(mine), device=at.device)
    head = climb(torch.where(at > last, tree.parent, node), len(rollout.sigmas) - 1)
    behind = node[(tree.std > 0) & (at > last)]
    if not len(behind):
        raise ConfigError(
            f"select width_pruning: nothing is drawn behind the last split, step {int(last)} "
            "(counted from 0), so there is nothing to leave out; split earlier, or take out the "
            "selection"
        )
    return behind, head[behind]


def _quota(who: str, size: Tensor, share: float, what: str) -> Tensor:
    if not 0 < share <= 1:
        raise ConfigError(f"select {who}: share must be above 0 and at most 1, got {share}")
    count = (size.double() * share).long()  # int(n share), as published code has it
    if not bool((count > 0).all()):
        least = int(size.min())
        raise ConfigError(
            f"select {who}: share={share} of {least} {what} leaves none; use at least "
            f"{1 / least:.4g}"
        )
    return count


def _uniform(data: SelectInput, count: int) -> Tensor:
    return torch.rand(count, generator=data.generator, dtype=torch.float64).to(
        data.rollout.tree.std.device
    )


def _at(rollout: Rollout, node: Tensor, value: Tensor) -> Tensor:
    return torch.zeros_like(rollout.tree.std).index_copy(0, node, value.to(rollout.tree.std.dtype))
