"""Advantages that look at more than a prompt's mean: how likely an image was, how much a prompt's
images agree, and from which noise they come."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.credit._groups import Groups
from flowrl.algorithms.forest import normalize_by, subtree_mean
from flowrl.algorithms.nodes import climb
from flowrl.algorithms.selection._change import rank_within
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import Tree


@needs("log_prob")
def unlikely_norm(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    penalty: float = 0.25,
    eps: float = 1e-6,
    log_prob: Tensor | None = None,
) -> Tensor:
    """Normalise ``r (1 - penalty rank / n)`` within each prompt -> [V] float32; rank 0 is the least
    likely of its n images.

    The unlikeliness reward of Rewarding the Unlikely (2506.02355), its code
    (AndreHe02/rewarding-unlikely-release at ca1cff0): penalty 0.25, ranks by the mean log-prob of
    the sampling policy, std with n - 1. An image's log-prob is the mean over the draws above it.

    A trap: under the policy that drew it, a Gaussian draw is the less likely the larger its noise
    was, whatever it shows. So here "unlikely" means far from the mean of its step.

    Raises: ConfigError for a penalty outside [0, 1], eps not above 0, a negative reward, or without
    log_prob.
    """
    if not (0 <= penalty <= 1 and eps > 0):
        raise ConfigError(
            f"unlikely_norm: needs penalty in [0, 1] and eps > 0, got {penalty=}, {eps=}"
        )
    if log_prob is None:
        raise ConfigError("unlikely_norm: needs log_prob, the rollout's log-prob of every node")
    found = Groups(reward, leaf, tree)
    low = found.value[found.scored]
    if len(low) and low.min() < 0:
        raise ConfigError(
            f"unlikely_norm: expected rewards from 0 on, got {low.min().item():.4g}; for a "
            "negative one the penalty would be a bonus"
        )
    # likely images come last; what was not scored takes no rank from others
    likely = torch.where(found.scored, _of_draws(log_prob, leaf, tree), torch.inf)
    rank = rank_within(likely, found.group)[0]
    value = found.value * (1 - penalty * rank / found.count[found.group])
    score = normalize_by(value, found.group, eps=eps, ddof=1)
    return subtree_mean(score, leaf, tree).nan_to_num().float()


def consistency_blend(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    steepness: float = 20.0,
    middle: float = 0.5,
    discount: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """Blend the advantage within a prompt with that of the prompt among all prompts, by how much
    its images agree: ``w A + (1 - w) A_prompt`` -> [V] float32.

    COPO (2508.04138), its code (hijih/copo-code at dfe989d, "soft-with-forced"): ``w =
    sigmoid(steepness (H - middle))``, H the entropy in bits of the outcomes of a prompt's images;
    an image whose own A is 0 has w = 0, so that prompts whose images are all alike still teach.
    Both A are ``(r - mean) / (std + eps)``, std with n - 1; a prompt's r is its mean reward, with
    `discount` times ``1 - H (1 - 1/n) / log2 n``.

    **Differs:** an outcome there is an answer, here a reward, so rewards should be of few values,
    as 0 and 1. The code blends two clipped losses, which is the same where nothing is clipped.

    Raises: ConfigError unless steepness and eps are above 0.
    """
    if not (steepness > 0 and eps > 0):
        raise ConfigError(
            f"consistency_blend: expected steepness > 0 and eps > 0, got {steepness=}, {eps=}"
        )
    found = Groups(reward, leaf, tree)
    size = found.count[found.group]
    entropy = _bits(found)
    # prompts among prompts
    worth = found.mean()
    if discount:
        most = torch.log2(found.count).clamp_min(1e-12)
        worth = worth * (1 - entropy * (1 - 1 / found.count) / most)
    among = normalize_by(worth, torch.zeros_like(worth).long(), eps=eps, ddof=1)[found.group]
    own = normalize_by(found.value, found.group, eps=eps, ddof=1)
    weight = torch.sigmoid(steepness * (entropy[found.group] - middle))
    weight = torch.where(own == 0, 0.0, weight)
    mixed = torch.where(found.scored & (size > 0), weight * own + (1 - weight) * among, torch.nan)
    return subtree_mean(mixed, leaf, tree).nan_to_num().float()


def strata_norm(
    reward: Tensor, leaf: Tensor, tree: Tree, *, blend: float, eps: float = 1e-6
) -> Tensor:
    """Normalise among the images of one initial noise, and blend with the advantage within the
    prompt: ``blend A_stratum + (1 - blend) A`` -> [V] float32, both ``(r - mean) / (std + eps)``.

    Stratified GRPO (2510.06214), its blended advantage, for plans in which several images of a
    prompt start from one noise: images are compared with their true peers. Reconstruction: the
    paper's strata are numbers of search calls, ours are initial noises; its blend and the divisor
    of its std (here n) were not in what we could read. A stratum of one image has A_stratum 0.

    Raises: ConfigError for a blend outside [0, 1], eps not above 0, or where no two images of a
    prompt share their noise.
    """
    if not (0 <= blend <= 1 and eps > 0):
        raise ConfigError(f"strata_norm: needs blend in [0, 1] and eps > 0, got {blend=}, {eps=}")
    node = torch.arange(len(tree.parent), device=tree.parent.device)
    above = torch.where(tree.parent < 0, node, tree.parent)
    root = climb(above, int(tree.step.max()) + 1)[leaf]
    if int(torch.bincount(root).max()) < 2:
        raise ConfigError(
            "strata_norm: each image has an initial noise of its own, so no stratum has two; take "
            "a plan that forks, such as tree, or credit group_norm"
        )
    own = normalize_by(reward, root, eps=eps)
    whole = normalize_by(reward, tree.group[leaf], eps=eps)
    return subtree_mean(blend * own + (1 - blend) * whole, leaf, tree).nan_to_num().float()


def _of_draws(log_prob: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Average the log-probs [V] of the draws above each leaf -> [L] float64; 0 without any."""
    total = torch.zeros(2, len(leaf), dtype=torch.float64, device=leaf.device)
    node = leaf
    for _ in range(int(tree.step.max()) + 1):
        drawn = (node >= 0) & (tree.std[node.clamp_min(0)] > 0)
        at = node.clamp_min(0)
        total = total + torch.stack(
            [torch.where(drawn, log_prob[at].double(), 0.0), drawn.double()]
        )
        node = torch.where(node >= 0, tree.parent[at], -1)
    return total[0] / total[1].clamp_min(1)


def _bits(found: Groups) -> Tensor:
    """Return the entropy in bits of the rewards of each prompt [G], equal ones an outcome."""
    known = found.scored.nonzero().flatten()
    pairs = torch.stack([found.group[known].double(), found.value[known]])
    index, count = torch.unique(pairs, dim=1, return_inverse=True, return_counts=True)[1:]
    share = count[index] / found.count[found.group[known]]
    bits = torch.zeros_like(found.value).index_copy(0, known, -torch.log2(share))
    return found.total(bits) / found.count
