"""Losses of few-step models, whose x0 estimates are pulled where other models point. Unreduced: one
value per step; only the training loop divides."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.algorithms.losses._pull import pull
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import LossInput

Loss = tuple[Tensor, dict[str, Tensor]]
Form = Literal["squared", "huber"]


@needs("ref", "fake", "zero_advantage")
def tdm(data: LossInput, *, form: Form = "squared", width: float = 1e-3) -> Loss:
    """Return the pull [B] of what a step generates towards the teacher and away from the fake
    model, and metrics [B]: trajectory distribution matching.

    x is the step's x0 estimate, x_T the teacher's and x_F the fake model's at the state noised
    again. With ``c = x_T - x_F`` and ``N = mean |x - x_T|``, both without a gradient, form
    "squared" is ``mean((x - (x + c))^2) / (2 N)``, whose gradient is ``-c / N`` over dimensions;
    "huber" is ``mean(sqrt(c^2 + width^2) - width) / N``. The teacher is the model from before
    training; rewards play no part.

    Source: TDM (2503.06674), as in Flow-Factory 1593258. **Differs:** N is at least 1e-5.

    Metrics: `fake_gap`, mean c^2.

    Raises: ConfigError for a width that is not above 0, or a likelihood other than `generated`.
    """
    _check(data, width)
    real, fake = data.under["ref"].mean.detach(), data.under["fake"].mean.detach()
    loss = pull(data.now.mean, real - fake, real, form, width)
    return loss, {"fake_gap": _mean_square(real - fake)}


@needs("ref", "fake", "surrogate", "zero_advantage")
def tdm_r1(
    data: LossInput,
    *,
    reward: float = 0.7,
    form: Form = "squared",
    width: float = 1e-3,
    least: float = 0.0,
) -> Loss:
    """Return `tdm` plus `reward` times the pull towards the surrogate, [B], and metrics [B]:
    reinforcement learning of a few-step model.

    The surrogate's pull has ``c = x_S - x_T`` and ``N = mean |x - x_S|``: what the surrogate learnt
    of the reward beyond the teacher. Source: TDM-R1 (2603.07700), as in Flow-Factory 1593258.
    **Differs:** there a third pull of weight ``1 - reward`` follows the teacher's guidance, which
    is left out for a teacher without; here teacher and surrogate have the model's own guidance, so
    there is none. Ours: at noise levels below `least`, where a surrogate that learnt from higher
    ones alone knows nothing, it does not pull.

    Metrics: those of `tdm`; `reward_gap`, mean (x_S - x_T)^2.

    Raises: ConfigError for reward outside [0, 1] or least outside [0, 1), and as `tdm`.
    """
    if not 0 <= reward <= 1 or not 0 <= least < 1:
        raise ConfigError(
            f"tdm_r1: expected 0 <= reward <= 1 and 0 <= least < 1, got {reward=}, {least=}"
        )
    loss, metrics = tdm(data, form=form, width=width)
    real, learnt = data.under["ref"].mean.detach(), data.under["surrogate"].mean.detach()
    level = data.batch.query
    assert level is not None  # `tdm` has looked
    weight = reward * (level >= least).double()
    loss = loss + weight * pull(data.now.mean, learnt - real, learnt, form, width)
    return loss, {**metrics, "reward_gap": _mean_square(learnt - real)}


def _mean_square(gap: Tensor) -> Tensor:
    return gap.double().square().flatten(1).mean(1)


def _check(data: LossInput, width: float) -> None:
    if not width > 0:
        raise ConfigError(f"tdm: expected width > 0, got {width}")
    if data.batch.query is None:
        raise ConfigError(
            "tdm: trains the steps of a few-step model, which only likelihood generated has; set "
            "likelihood: {fn: generated} and plan: {fn: few_step, steps: 4}"
        )
