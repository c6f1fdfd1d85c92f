"""Rewards of 0 and 1 from a verifier that errs at known rates: ``(values [L], batch) -> [L]``; NaN
stays."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.prompts import task_of
from flowrl.core.types import RewardBatch


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
    """Return the rate of each value, one for all or by the tag of its prompt."""
    rates, unknown = [], set()
    if isinstance(rate, dict):
        for record in batch.meta:
            tag = task_of(record)
            rates.append(rate.get(tag, 0.0))
            if tag not in rate:
                unknown.add(tag)
    else:
        rates = [float(rate)] * len(like)
    if unknown or not all(0 <= r < 1 for r in rates):
        raise ConfigError(
            f"a verifier's error rate must be in [0, 1), one per tag; got {rate!r}, tags without: "
            f"{sorted(unknown)}"
        )
    return torch.tensor(rates, dtype=like.dtype, device=like.device)


def _check_binary(who: str, values: Tensor) -> None:
    odd = values[~values.isnan() & (values != 0) & (values != 1)]
    if len(odd):
        raise ConfigError(f"{who}: expected a verifier's verdicts 0 or 1, got {odd[0].item():g}")
