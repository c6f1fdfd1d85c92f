"""One reward's values -> better behaved ones, before several are added: ``(values [L], batch) ->
[L]``; NaN stays."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch


def clip(
    values: Tensor, batch: RewardBatch, *, low: float = float("-inf"), high: float = float("inf")
) -> Tensor:
    """Limit values [L] to [low, high]. Raises ConfigError if the range is empty."""
    if not low < high:
        raise ConfigError(f"clip: expected low < high, got low={low}, high={high}")
    return values.clamp(low, high)


def threshold(values: Tensor, batch: RewardBatch, *, at: float) -> Tensor:
    """Make values [L] yes or no: 1 where they are at least `at`, else 0. NaN stays.

    DanceGRPO's binary reward (2505.07818). It is one number for all prompts; `rank` compares the
    images of each.
    """
    return torch.where(values.isnan(), values, (values >= at).to(values.dtype))


def rank(values: Tensor, batch: RewardBatch) -> Tensor:
    """Replace each value by its rank among its prompt's -> [L] in [0, 1]; ties share the mean rank,
    one alone gets 0.5.

    Only the order is left: no outlier can take over, and no scale. Same as Pref-GRPO's win rate
    (2508.20751) with a scalar scorer as the judge.
    """
    known = (~values.isnan()).nonzero().flatten()
    mine, group = values[known], batch.group.to(values.device)[known]
    # each prompt's values in a row, lowest first; equal ones are a run
    order = torch.argsort(mine, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    row, prompt = mine[order], group[order]
    new = torch.ones_like(row, dtype=torch.bool)
    new[1:] = (row[1:] != row[:-1]) | (prompt[1:] != prompt[:-1])
    run = new.cumsum(0) - 1
    size = torch.bincount(run)
    place = (size.cumsum(0) - size)[run]
    count = torch.unique_consecutive(prompt, return_counts=True)[1]
    first = (count.cumsum(0) - count).repeat_interleave(count)
    others = count.repeat_interleave(count) - 1
    # those below, and half of those beside it
    beaten = (place - first + (size[run] - 1) / 2).to(values.dtype)
    share = torch.where(others > 0, beaten / others.clamp_min(1), 0.5)
    out = torch.full_like(values, torch.nan)
    out[known[order]] = share.to(values.dtype)
    return out


def noisy_backward(
    values: Tensor,
    batch: RewardBatch,
    *,
    false_accept: float | dict[str, float],
    false_refusal: float | dict[str, float],
) -> Tensor:
    """Undo the bias of a 0/1 verifier that errs at known rates: ``(r - rho0) / (1 - rho0 - rho1)``.

    rho0 = P(1 | wrong), rho1 = P(0 | right); numbers, or one per prompt tag. Its mean is that of
    the true verdicts (2510.00915, PGBC; second hand). Centring in a group removes a shift, so with
    one rate for all prompts this only scales; rates per tag change what counts.

    Raises: ConfigError for rates outside [0, 1), a sum of 1 or more, a tag without a rate, or
    values other than 0, 1.
    """
    rho0, rho1 = _rates(false_accept, batch, values), _rates(false_refusal, batch, values)
    _check_binary("noisy_backward", values)
    if bool((rho0 + rho1 >= 1).any()):
        raise ConfigError(
            "noisy_backward: false_accept + false_refusal must be below 1: such a verdict says "
            "nothing"
        )
    return (values - rho0) / (1 - rho0 - rho1)


def noisy_forward(
    values: Tensor, batch: RewardBatch, *, false_refusal: float | dict[str, float]
) -> Tensor:
    """Replace verdicts [L] by weights [L]: 1 -> rho1, 0 -> rho1 - 1, with rho1 = P(0 | right)
    (2510.00915, PGFC; second hand).

    Its mean is 0 over true right answers, so the clean gradient is only scaled; rho0 need not be
    known. It is a shift by ``rho1 - 1``, so with a credit that centres it acts only where rates
    differ within what is centred together.

    Raises: ConfigError as in `noisy_backward`.
    """
    _check_binary("noisy_forward", values)
    return values + _rates(false_refusal, batch, values) - 1


def _rates(rate: float | dict[str, float], batch: RewardBatch, like: Tensor) -> Tensor:
    table = rate if isinstance(rate, dict) else {}
    tags = [str(record.get("tag", "all")) for record in batch.meta]
    unknown = sorted({tag for tag in tags if tag not in table}) if isinstance(rate, dict) else []
    rates = (
        [table.get(tag, 0.0) for tag in tags]
        if isinstance(rate, dict)
        else [float(rate)] * len(like)
    )
    if unknown or not all(0 <= r < 1 for r in rates):
        raise ConfigError(
            f"a verifier's error rate must be in [0, 1), one per tag; got {rate!r}, tags without: "
            f"{unknown}"
        )
    return torch.tensor(rates, dtype=like.dtype, device=like.device)


def _check_binary(who: str, values: Tensor) -> None:
    odd = values[~values.isnan() & (values != 0) & (values != 1)]
    if len(odd):
        raise ConfigError(f"{who}: expected a verifier's verdicts 0 or 1, got {odd[0].item():g}")
