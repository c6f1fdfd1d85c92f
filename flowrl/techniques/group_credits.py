"""Advantages of the images of a prompt, by rules that were made for texts: other centres, other
scales, and blends of two comparisons.

What carries over is what they do with the rewards of a group; a node of the forest gets the mean
over the leaves below it. Where nothing was scored the advantage is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.credit._groups import Groups, check_unit
from flowrl.algorithms.forest import normalize_by, subtree_mean
from flowrl.algorithms.selection._change import rank_within
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import Tree


def median_norm(reward: Tensor, leaf: Tensor, tree: Tree, *, eps: float = 1e-3) -> Tensor:
    """Centre by the prompt's median, divide by ``median |r - median| + eps`` -> [V] float32.

    MC-GRPO (2601.22582), its code: of an even number the lower median. One lucky image does not
    turn all others into bad ones, which matters in groups of 2 to 8. The paper samples one image
    more than it trains and drops the median, whose advantage is 0: add `select: {fn: nonzero}`.
    **Differs:** of several images at the median the code drops one and raises the others in
    proportion, `nonzero` drops all; a prompt's part of the loss is the same but for a factor of
    group / (group - 1).

    Raises: ConfigError unless eps > 0.
    """
    if not eps > 0:
        raise ConfigError(f"median_norm: expected eps > 0, got {eps}")
    found = Groups(reward, leaf, tree)
    gap = found.value - found.median(found.value)
    return _to_nodes(gap / (found.median(gap.abs()) + eps), leaf, tree)


def virtual_best(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    best: float = 1.0,
    count: int = 1,
    eps: float = 1e-6,
) -> Tensor:
    """Normalise as if a prompt had `count` further images of reward `best` -> [V] float32.

    NGRPO, its code: ``(r - mean') / (std' + eps)``, both over the group with the virtual images,
    std with n - 1. A prompt whose images all failed then has a signal, away from all of them; a
    prompt whose images all have reward `best` has none. Use it with a penalty (`kl`).

    Raises: ConfigError for count < 1, eps not above 0, or a reward above `best`.
    """
    if count < 1 or not eps > 0:
        raise ConfigError(f"virtual_best: needs count >= 1 and eps > 0, got {count=}, {eps=}")
    found = Groups(reward, leaf, tree)
    top = found.value[found.scored]
    if len(top) and top.max() > best:
        raise ConfigError(
            f"virtual_best: best={best} has to be the highest possible reward, got a reward of "
            f"{top.max().item():.4g}"
        )
    # mean and std with the virtual images
    size = found.count + count
    mean = (found.total(found.value) + count * best) / size
    gap = found.value - mean[found.group]
    squares = found.total(gap.square()) + count * (best - mean).square()
    std = (squares / (size - 1)).sqrt()
    return _to_nodes(gap / (std[found.group] + eps), leaf, tree)


def beta_norm(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Weigh ``r - mean`` by how rare the prompt's mean is in the batch -> [V] float32.

    BNPO, its code: rewards in [0, 1], a prompt's mean is its success rate p. The rates of the batch
    give a Beta distribution by the method of moments (variance with n - 1), with parameters a, b;
    the weight is ``min(1 / pdf(p), 1e6)`` under Beta(max(1, 1 + a / 3), max(1, 1 + b / 3)).
    **Differs:** equal rates in the whole batch have no such distribution; the weight is then 1, as
    in the code for a single prompt.

    Raises: ConfigError for rewards outside [0, 1].
    """
    found = Groups(reward, leaf, tree)
    check_unit("beta_norm", found.value[found.scored])
    rate = found.mean()[found.count > 0]
    weight = _rarity(rate)
    whole = torch.zeros_like(found.count).masked_scatter(found.count > 0, weight)
    return _to_nodes(whole[found.group] * found.centred(), leaf, tree)


def difficulty_balanced(
    reward: Tensor, leaf: Tensor, tree: Tree, *, damp: float = 1.0, eps: float = 1e-6
) -> Tensor:
    """Shift the signal from easy prompts to hard ones as the policy gets better -> [V] float32.

    A-GRAE (2602.05548), its code: rewards in [0, 1]; p a prompt's mean, P the mean of these over
    the batch; ``A = (r - p) / (std + eps)``, std with n - 1;
    ``(1 - P) A / (2 (1 - sqrt p + eps)) + P A / (2 (sqrt p + eps))``; what is positive is
    multiplied by ``min(1, P / damp)``. damp: 1, for some data 0.5 in the code.

    Raises: ConfigError for rewards outside [0, 1], or damp or eps not above 0.
    """
    if not (damp > 0 and eps > 0):
        raise ConfigError(f"difficulty_balanced: needs damp > 0 and eps > 0, got {damp=}, {eps=}")
    found = Groups(reward, leaf, tree)
    check_unit("difficulty_balanced", found.value[found.scored])
    advantage = found.centred() / (found.std(ddof=1)[found.group] + eps)
    # hard prompts count more the better the batch
    p, level = found.mean()[found.group].sqrt(), found.mean().nanmean()
    easy, hard = advantage / (2 * (1 - p + eps)), advantage / (2 * (p + eps))
    mixed = (1 - level) * easy + level * hard
    damped = mixed * (level / damp).clamp_max(1.0)
    return _to_nodes(torch.where(mixed > 0, damped, mixed), leaf, tree)


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


def _to_nodes(advantage: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Give every node the mean advantage [L] of the leaves below it -> [V] float32."""
    return subtree_mean(advantage, leaf, tree).nan_to_num().float()


def _rarity(rate: Tensor) -> Tensor:
    """Return 1 over the density of success rates [G] under the Beta distribution fitted to them."""
    variance = rate.var() if len(rate) > 1 else rate.new_zeros(())
    if not variance > 0:
        return torch.ones_like(rate)
    # method of moments, flattened towards the uniform distribution
    mean = rate.mean()
    common = mean * (1 - mean) / variance - 1
    a = (1 + common * mean / 3).clamp_min(1.0)
    b = (1 + common * (1 - mean) / 3).clamp_min(1.0)
    log_pdf = torch.distributions.Beta(a, b, validate_args=False).log_prob(rate)
    return (-log_pdf).exp().clamp_max(1e6)


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
