"""Credit for one draw each: what it adds to the reward of the image that would follow from it. For
plans comb and rake."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.credit._chains import comb_of, rake_of, spread_to_nodes
from flowrl.algorithms.forest import normalize_by
from flowrl.core.errors import ConfigError
from flowrl.core.types import Tree


def step_gain(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    among: Literal["step", "prompt"] = "step",
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Normalise the gains ``R_t - R_(t-1)`` of a chain's draws, from rewards [L] -> [V] float32;
    for plan comb + baseline.

    R_0 is the reward of the initial noise finished without any draw, R_t that of the sample
    finished without noise after draw t. among "step": each step among a prompt's samples, DenseGRPO
    (2601.20218). "prompt": all gains of a prompt together, Stepwise-Flow-GRPO (2603.28718): steps
    that hardly change the reward then hardly count. A gain that reads an unscored image has
    advantage 0.

    At steps where all gains are nearly equal, "step" blows small differences up; a larger `eps`
    keeps them small.

    Raises: ConfigError unless every initial noise has one chain, previews and a baseline.
    """
    comb = comb_of("step_gain", leaf, tree, baseline=True)
    path = reward.double()[torch.cat([comb.start[:, None], comb.seen], 1)]
    gain, node = path.diff(dim=1).flatten(), comb.decision.flatten()
    keys = [tree.group[node]] + ([tree.step[node]] if among == "step" else [])
    return spread_to_nodes(normalize_by(gain, *keys, eps=eps, ddof=ddof), comb.owner)


def turning_point(
    reward: Tensor,
    leaf: Tensor,
    tree: Tree,
    *,
    strict: bool = True,
    balance: bool = True,
    eps: float = 1e-4,
    ddof: int = 0,
) -> Tensor:
    """Normalise reward increments [L] among a prompt's draws of equal step -> [V] float32; for plan
    comb + baseline.

    TP-GRPO (2602.06422) and its code. R_0 is the reward without noise, R_t that of the sample
    finished without noise after draw t, R_w the sample's own. Draw t counts ``d_t = R_t -
    R_(t-1)``; a turning point ``R_w - R_(t-1)``. With ``q_t = sign(d_t) sign(R_w - R_0)``, t >= 2
    is one where ``q_(t-1) < 0 < q_t`` (definition 4.1) and, if `strict`, ``sign(d_t) sign(R_w -
    R_t) > 0`` (5.1). t = 1 needs the latter alone, strict or not. So the last draw, where R_w - R_t
    is 0, is none if strict; if not, it may count in the balance, but both its rewards are the same.
    A tie has sign 0 and makes no turning point, which is common with rewards of few values.

    balance: of all turning points keep only as many with rising as with falling R_w - R_0, the
    largest ``|R_w - R_0|`` first, ties in batch order; the others count d_t. If one kind is absent,
    all stay.

    A draw whose rule reads an unscored image (d, the d before, R_0, R_w) gets advantage 0 and
    counts in no mean.

    **Differs:** the code balances within one GPU's batch, flowrl in the whole iteration. Its R_0
    starts from other noise; plan comb starts from the sample's own. Without `strict`, where R_w
    equals R_(t-1) its turning point counts d_t, here 0. Its last draw may have std 0
    and then a KL of 0/0; here that is no draw. Its all-zero samples are filtered out; here they
    have advantage 0.

    Raises: ConfigError unless every initial noise has one chain, previews and a baseline.
    """
    comb = comb_of("turning_point", leaf, tree, baseline=True)
    path = reward.double()[torch.cat([comb.start[:, None], comb.seen], 1)]
    worth = _step_rewards(path, strict, balance).flatten()
    node = comb.decision.flatten()
    return spread_to_nodes(
        normalize_by(worth, tree.group[node], tree.step[node], eps=eps, ddof=ddof), comb.owner
    )


def _step_rewards(path: Tensor, strict: bool, balance: bool) -> Tensor:
    """Return the reward of each draw [C, w] for the rewards R_0 .. R_w [C, w + 1]; NaN where it
    cannot be known."""
    gain, final = path.diff(dim=1), path[:, -1:]
    total = final - path[:, :1]
    trend = gain.sign() * total.sign()
    unknown = (gain + total).isnan()
    goes_on = gain.sign() * (final - path[:, 1:]).sign() > 0
    turn = torch.cat([goes_on[:, :1], (trend[:, :-1] < 0) & (trend[:, 1:] > 0)], 1)
    if strict:
        turn = turn & goes_on
    unknown[:, 1:] |= unknown[:, :-1].clone()
    if balance:
        turn = _balanced(turn, total)
    return torch.where(unknown, torch.nan, torch.where(turn, final - path[:, :-1], gain))


def _balanced(turn: Tensor, total: Tensor) -> Tensor:
    """Keep equally many turning points [C, w] of each sign of total [C, 1], those with the largest
    ``|total|``."""
    kinds = [turn & (total > 0), turn & (total < 0)]
    rising, falling = (kind.sum() for kind in kinds)
    limit = torch.where((rising > 0) & (falling > 0), torch.minimum(rising, falling), turn.numel())
    kept = [_rank(torch.where(kind, total.abs(), -1.0)) < limit for kind in kinds]
    return (kinds[0] & kept[0]) | (kinds[1] & kept[1])


def _rank(values: Tensor) -> Tensor:
    """Return each value's place, the largest first; ties in the order in which they stand."""
    return values.flatten().argsort(descending=True, stable=True).argsort().view_as(values)


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
