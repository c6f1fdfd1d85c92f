"""Credit for what each draw adds to the reward, and for the rest of the way where a draw turns a
trend around."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.credit._chains import comb_of, spread_to_nodes
from flowrl.algorithms.forest import normalize_by
from flowrl.core.types import Tree


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
