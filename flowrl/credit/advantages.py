"""Turn the rewards of leaves into one weight per node. Where nothing was scored (NaN reward), the weight is 0."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.credit.reduce import normalize_by, subtree_mean
from flowrl.types import Tree


def group_norm(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    std: Literal["group", "global"] = "group",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Normalise leaf rewards [L] within each prompt; a node's weight is the mean over its leaves -> [V] float32.

    GRPO's advantage. **Differs** between sources: Flow-GRPO's code has ddof 0, eps 1e-4 and std "global" (the paper
    divides by the group's); DanceGRPO and MixGRPO have ddof 1, eps 1e-8, std "group". With 12 pictures the two ddof
    differ by 4.4 %.
    """
    score = normalize_by(reward, tree.group[leaf], std=std, eps=eps, ddof=ddof)
    return subtree_mean(score, leaf, tree).nan_to_num().float()


def depth_norm(reward: Tensor, leaf: Tensor, tree: Tree, *, eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Average rewards [L] up the tree, then normalise among a prompt's nodes of equal step -> [V] float32.

    BranchGRPO (2509.06040) section 3.2. **Differs:** its code has ddof 1 and sets stds below 1e-6 to 0; flowrl takes
    `ddof` and adds `eps`. Nodes made by noise and nodes made without (previews, clean ends) are never pooled.
    """
    value = subtree_mean(reward, leaf, tree)
    return normalize_by(value, tree.group, tree.step, tree.std > 0, eps=eps, ddof=ddof).nan_to_num().float()


def sibling_norm(reward: Tensor, leaf: Tensor, tree: Tree, *, eps: float = 1e-4, ddof: int = 0) -> Tensor:
    """Average rewards [L] up the tree, then normalise among the children of one parent -> [V] float32.

    TempFlow-GRPO (2508.04324), seed groups. Only children have siblings: an only child gets 0; roots are compared
    within their prompt.
    """
    value = subtree_mean(reward, leaf, tree)
    return normalize_by(value, tree.group, tree.parent, eps=eps, ddof=ddof).nan_to_num().float()
