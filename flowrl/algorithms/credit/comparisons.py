"""Credit by comparison: who is preferred to whom, in which order images stand, and which of them
are imitated."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.forest import first_below_draw, normalize_by, subtree_mean
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import Tree


def best_worst(reward: Tensor, leaf: Tensor, tree: Tree) -> Tensor:
    """Give a prompt's best image 1 and its worst -1 from rewards [L] -> [V] float32; other images
    have 0, nodes above leaves the mean of the leaves below.

    The pair of Diffusion-DPO (2311.12908), made online. Of equal images the first counts. A prompt
    whose scored images are all equal has no pair. NaN = not scored: never in a pair.
    """
    group = tree.group[leaf]
    sign = torch.zeros_like(reward, dtype=torch.float64)
    for prompt in group.unique():
        mine = ((group == prompt) & ~reward.isnan()).nonzero().flatten()
        if not len(mine):
            continue
        best, worst = mine[reward[mine].argmax()], mine[reward[mine].argmin()]
        if reward[best] > reward[worst]:
            sign[best], sign[worst] = 1.0, -1.0
    return subtree_mean(sign, leaf, tree).nan_to_num().float()


@needs("sigma_rewards")
def candidate_pairs(
    reward: Tensor, leaf: Tensor, tree: Tree, *, least: float = 0.3, noisiest: float | None = None
) -> Tensor:
    """Of the states that were drawn from one, give that of the best estimate 1 and that of the
    worst -1, from rewards [L] of the estimates -> [V] float32; all else 0. For plan candidates.

    SPO (2406.04314), its code: a pair counts where the softmax over its two scores differs by more
    than `least`, 0.3 (SD1.5) or 0.4 (SDXL): a gap of more than ``2 artanh(least)``. Of equal ones
    the first counts. NaN = not scored: never in a pair.

    With `noisiest` the least difference rises with the std of the step, linearly from `least` at
    the smallest of those that are compared to `noisiest` at the largest: LPO (2502.01051), its
    code's form "sigma", 0.35 to 0.5 (SD1.5) or 0.45 to 0.6 (SDXL). **Differs:** its code has the
    stds of 20 DDIM steps of Stable Diffusion as a table, for every sampler.

    Raises: ConfigError for `least` or `noisiest` outside [0, 1), `noisiest` below `least`, or a
    plan that draws no candidates.
    """
    most = least if noisiest is None else noisiest
    if not 0 <= least <= most < 1:
        raise ConfigError(
            f"candidate_pairs: expected 0 <= least <= noisiest < 1, got {least=}, {noisiest=}"
        )
    child, score = _judged("candidate_pairs", reward, leaf, tree)
    state, size = tree.parent[child], len(tree.parent)
    sign = torch.zeros(size, device=leaf.device)
    wanted = _least_gap(tree.std[child].double(), least, most)
    for one in state.unique():
        mine = ((state == one) & ~score.isnan()).nonzero().flatten()
        if len(mine) < 2:
            continue
        best, worst = mine[score[mine].argmax()], mine[score[mine].argmin()]
        if score[best] - score[worst] > wanted[best]:
            sign[child[best]], sign[child[worst]] = 1.0, -1.0
    return sign


@needs("sigma_rewards")
def candidate_norm(
    reward: Tensor, leaf: Tensor, tree: Tree, *, eps: float = 1e-4, ddof: int = 0
) -> Tensor:
    """Normalise the scores of the states that were drawn from one, each by its own estimate alone,
    from rewards [L] -> [V] float32; all else 0. For plan candidates.

    DRM's Step-GRPO (2605.25661): a judge scores the k children of a state, and their advantages are
    ``(score - mean) / (std + eps)`` of these k. The one that goes on is compared like the others:
    what is drawn from it later, and the finished image, count for nothing, where `sibling_norm`
    would take their mean. An only child has no advantage. NaN = not scored: in no mean.

    Reconstruction: `eps` and `ddof` were not found; they are Flow-GRPO's.

    Raises: ConfigError for a negative eps or ddof, or a plan that draws no candidates.
    """
    child, score = _judged("candidate_norm", reward, leaf, tree)
    advantage = torch.zeros(len(tree.parent), device=leaf.device)
    among = normalize_by(score, tree.parent[child], eps=eps, ddof=ddof)
    advantage[child] = among.nan_to_num().float()
    return advantage


def rank_edges(reward: Tensor, leaf: Tensor, tree: Tree, *, best: int = 0) -> Tensor:
    """Give each image the number of images that it is ranked before, minus that of those ranked
    before it, over the number of comparisons, from rewards [L] -> advantage per node [V] float32.

    ZO-RankSGD (2303.03751), eq. 4: of m images of a prompt the `best` first are in order and stand
    before all others, whose order is not known; 0 = all are in order. With likelihood `prior`,
    ``start: noise`` and a small spread its policy gradient is the paper's descent direction. Only
    the order of the rewards counts; equal ones are not compared, and those that equal the last of
    the best are among them. NaN = not scored: compared with none, advantage 0.

    **Differs:** the published code gives the image of rank r, from 0, ``m - 2 r`` in place of
    ``m - 1 - 2 r``, so its weights do not add up to 0; and it searches along the direction by
    asking for another ranking, which no step here does.

    Raises: ConfigError for a negative `best`.
    """
    if best < 0:
        raise ConfigError(f"rank_edges: expected best >= 0, got {best}")
    group, worth = tree.group[leaf], torch.zeros_like(reward, dtype=torch.float64)
    for prompt in group.unique():
        mine = ((group == prompt) & ~reward.isnan()).nonzero().flatten()
        score = reward[mine]
        if best and len(mine) > best:
            # below the best, order is not known: all are as good as the next. Whoever is as good
            # as the last of the best is one of them
            below = score[score < score.sort(descending=True).values[best - 1]]
            score = score.clamp_min(below.max()) if len(below) else score
        before = (score[:, None] > score[None, :]).double()
        edges = before.sum()
        if bool(edges > 0):
            worth[mine] = (before.sum(1) - before.sum(0)) / edges
    worth[reward.isnan()] = torch.nan
    return subtree_mean(worth, leaf, tree).nan_to_num().float()


def reward_softmax(
    reward: Tensor, leaf: Tensor, tree: Tree, *, temperature: float, standardize: bool = False
) -> Tensor:
    """Weigh a prompt's images by ``n softmax(reward / temperature)`` from rewards [L] -> [V]
    float32; n images were scored, so the mean weight is 1. Nodes above leaves have the mean below.

    Reward-weighted regression: ``exp(reward / temperature) / Z`` with Z over the prompt's images
    (RWR as in DDPO, 2305.13301, section 4.2, where it is the prompt's expectation). standardize:
    rewards are first centred by prompt and divided by the std of all images, so that a temperature
    fits rewards of any scale. NaN = not scored: weight 0.

    Raises: ConfigError for a temperature that is not positive.
    """
    if not temperature > 0:
        raise ConfigError(f"reward_softmax: expected temperature > 0, got {temperature}")
    group = torch.unique(tree.group[leaf], return_inverse=True)[1]
    score = reward.double()
    if standardize:
        score = normalize_by(reward, group, std="global")
    scored = ~score.isnan()
    # above the prompt's highest, so that nothing overflows
    low = torch.full_like(score, -torch.inf)
    top = low.scatter_reduce(0, group, torch.where(scored, score, -torch.inf), "amax")
    power = torch.where(scored, ((score - top[group]) / temperature).exp(), 0.0)
    zeros = torch.zeros_like(score)
    total = zeros.index_add(0, group, power).clamp_min(torch.finfo(torch.float64).tiny)
    count = zeros.index_add(0, group, scored.double())
    weight = power * (count / total)[group]
    return subtree_mean(weight, leaf, tree).nan_to_num().float()


def best_of(
    reward: Tensor, leaf: Tensor, tree: Tree, *, keep: int = 1, equal: bool = False
) -> Tensor:
    """Give the `keep` best images of a prompt 1 and the others 0 from rewards [L] -> [V] float32;
    nodes above leaves have the mean of the leaves below.

    Best-of-n fine-tuning. Of equal images the first count; NaN = not scored: never among the best.
    A prompt whose scored images are all equal has no best: all have 0, unless `equal`, which takes
    the first of them, as RAFT does (2304.06767: the best of each prompt).

    Raises: ConfigError for keep below 1.
    """
    if keep < 1:
        raise ConfigError(f"best_of: expected keep >= 1, got {keep}")
    group = tree.group[leaf]
    sign = torch.zeros_like(reward, dtype=torch.float64)
    for prompt in group.unique():
        mine = ((group == prompt) & ~reward.isnan()).nonzero().flatten()
        if len(mine) and (equal or reward[mine].max() > reward[mine].min()):
            order = torch.sort(reward[mine], descending=True, stable=True).indices
            sign[mine[order[:keep]]] = 1.0
    return subtree_mean(sign, leaf, tree).nan_to_num().float()


def _judged(who: str, reward: Tensor, leaf: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
    """Return the candidates [N] and the score [N] of each one's own estimate, the first leaf below
    it."""
    judged = first_below_draw(tree, leaf)
    child, score = tree.parent[leaf[judged]], reward[judged].double()
    state = tree.parent[child]
    if len(state) == len(state.unique()):
        raise ConfigError(
            f"{who}: no state has several next ones with an estimate each; take plan candidates"
        )
    return child, score


def _least_gap(std: Tensor, least: float, most: float) -> Tensor:
    """Return how far apart two scores have to be [N], where a step's noise has the std [N]: their
    shares in a softmax then differ by `least`, at the noisiest step by `most`."""
    low, high = std.min(), std.max()
    share = (std - low) / (high - low).clamp_min(1e-12)
    return 2 * torch.atanh(least + (most - least) * share)
