"""Advantages of images from other group methods: each reads the rewards of a prompt in its own way.

They were made for texts. What carries over is what they do with the rewards of a group; a node of
the forest gets the mean over the leaves below it. Where nothing was scored the advantage is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.credit._groups import Groups, check_unit
from flowrl.algorithms.forest import subtree_mean
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


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
    return _to_nodes(found.centred() + lower, leaf, tree)


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
    return _to_nodes(power / torch.where(size > 0, size, 1.0), leaf, tree)


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
