"""The rewards of a prompt's images, centred and scaled: one advantage per node. A node has the mean
over the leaves below it; where nothing was scored (NaN reward), the advantage is 0."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.credit._groups import Groups
from flowrl.algorithms.forest import normalize_by, subtree_mean, subtree_softmax
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import Tree


def group_norm(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    std: Literal["group", "global"] = "group",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Normalise leaf rewards [L] within each prompt; a node's advantage is the mean over its leaves
    -> [V] float32.

    GRPO's advantage. **Differs** between sources: Flow-GRPO's code has ddof 0, eps 1e-4 and std
    "global" (the paper divides by the group's); DanceGRPO and MixGRPO have ddof 1, eps 1e-8, std
    "group". With 12 images the two ddof differ by 4.4 %.
    """
    score = normalize_by(reward, tree.group[leaf], std=std, eps=eps, ddof=ddof)
    return subtree_mean(score, leaf, tree).nan_to_num().float()


@needs("log_prob")
def depth_norm(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    fusion: Literal["mean", "softmax"] = "mean",
    temperature: float = 1.0,
    eps: float = 1e-4,
    ddof: int = 0,
    log_prob: Tensor | None = None,
) -> Tensor:
    """Fuse rewards [L] up the tree, then normalise among a prompt's nodes of equal step -> [V]
    float32.

    BranchGRPO (2509.06040) section 3.2. fusion "mean": a node's value is the plain mean of the
    leaves below, its code's default. "softmax": its children's values, weighted by ``exp(log_prob /
    temperature)`` of their edges, step by step (log_prob [V] comes from the rollout; an edge
    without noise has 0, so use "mean" where previews hang beside draws). The log-prob is a mean
    over latent dimensions and hardly differs between siblings: at temperature 1 the weights are
    almost uniform. At a fork every child then counts alike, however many leaves each has.

    **Differs:** its code has ddof 1, adds 1e-8 and sets advantages to 0 where the std is below
    1e-6; flowrl takes `ddof` and adds `eps`. The code pools the nodes of one tree, flowrl those of
    the prompt. Nodes made by noise and nodes made without (previews, clean ends) are never pooled.
    The code names another mode, a leaf's advantage handed to all its ancestors, but as published
    that mode does not run; `group_norm` is its idea, with the mean over the leaves at a shared
    ancestor.

    Raises: ConfigError for an unknown fusion; softmax without log_prob, or with a temperature that
    is not positive.
    """
    value = _fused(reward, leaf, tree, fusion, temperature, log_prob)
    return (
        normalize_by(value, tree.group, tree.step, tree.std > 0, eps=eps, ddof=ddof)
        .nan_to_num()
        .float()
    )


def sibling_norm(
    reward: Tensor, leaf: Tensor, tree: Tree, *, eps: float = 1e-4, ddof: int = 0
) -> Tensor:
    """Average rewards [L] up the tree, then normalise among the children of one parent -> [V]
    float32.

    TempFlow-GRPO (2508.04324), seed groups. Only children have siblings: an only child gets 0;
    roots are compared within their prompt. A trunk that goes on without noise is no sibling of the
    draws beside it.
    """
    value = subtree_mean(reward, leaf, tree)
    return (
        normalize_by(value, tree.group, tree.parent, tree.std > 0, eps=eps, ddof=ddof)
        .nan_to_num()
        .float()
    )


def mean_centred(reward: Tensor, leaf: Tensor, tree: Tree, *, lower: float = 0.0) -> Tensor:
    """Subtract the prompt's mean reward, and divide by nothing: ``r - (mean - lower)`` -> [V]
    float32.

    lower 0 is Dr.GRPO (2503.20783): a prompt counts as much as its rewards spread, so the learning
    rate has to fit the scale of the reward. lower above 0 is AsymRE (2506.20520): with a baseline
    below the mean good images are reinforced more than bad ones are pushed away; a prompt whose
    images are equal then has the advantage `lower` everywhere. **Differs:** of Dr.GRPO only the
    advantage; its other half is about the length of texts.
    """
    found = Groups(reward, leaf, tree)
    return _averaged(found.centred() + lower, leaf, tree)


def signed_power(reward: Tensor, leaf: Tensor, tree: Tree, *, gamma: float = 0.5) -> Tensor:
    """Stretch large distances from the prompt's mean: ``sign(d) |d|^(1 + gamma)`` over the batch's
    mean magnitude -> [V] float32.

    SLAS (2605.10937): no division by a prompt's own std. Reconstruction: gamma, and what the batch
    is divided by, are not in what we could read; with the mean magnitude the learning rate keeps
    its meaning.

    Raises: ConfigError for gamma of -1 or less.
    """
    if not gamma > -1:
        raise ConfigError(f"signed_power: expected gamma > -1, got {gamma}")
    gap = Groups(reward, leaf, tree).centred()
    power = gap.sign() * gap.abs() ** (1 + gamma)
    size = power.abs().nanmean()
    return _averaged(power / torch.where(size > 0, size, 1.0), leaf, tree)


def _averaged(advantage: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Give every node the mean advantage [L] of the leaves below it -> [V] float32."""
    return subtree_mean(advantage, leaf, tree).nan_to_num().float()


def _fused(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    fusion: str,
    temperature: float,
    log_prob: Tensor | None,
) -> Tensor:
    if fusion == "mean":
        return subtree_mean(reward, leaf, tree)
    if fusion != "softmax":
        raise ConfigError(f'depth_norm: expected fusion "mean" or "softmax", got {fusion!r}')
    if log_prob is None:
        raise ConfigError(
            "depth_norm: fusion softmax needs log_prob, the rollout's log-prob of every node; got "
            "None"
        )
    return subtree_softmax(reward, leaf, tree, log_prob, temperature)
