"""Losses that learn from other networks: teachers, and the two that judge a few-step model.
Unreduced: one value per decision or step; only the training loop divides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.losses._common import Loss, pull
from flowrl.core.devices import refuse_if
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.teacher_runs import Named
from flowrl.core.types import Eval, LossInput

Form = Literal["squared", "huber"]


@needs("teacher", "zero_advantage")
def distill(
    data: LossInput,
    *,
    teachers: Mapping[str, Named],
    by: str = "tag",
    form: Literal["kl", "ode", "velocity"] = "kl",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the distance of the policy's step to its teacher's [B], and metrics [B]: on-policy
    distillation.

    At the states that the student itself visits, form "kl": ``mean((m - m_T)^2) / (2 std^2)``, the
    closed KL of two Gaussians of one std (Flow-OPD; verl-omni). "ode": ``D^2 mean((v - v_T)^2) /
    2``, half the squared distance of two Euler steps of size D (DiffusionOPD). "velocity":
    ``mean((v - v_T)^2)``, all steps alike. With "kl" and "ode" late steps count far more. Rewards
    and advantages play no part.

    teachers: value of the record's key `by` -> the run that its images learn from, a run folder of
    the same model and layers, of which the newest checkpoint is taken, or a checkpoint. Several of
    one value are a list, and their distances are added up (DiffusionOPD), each times its `weight`,
    1 unless ``{run: ..., weight: ...}`` says otherwise. ``guidance`` there is the scale at which
    that teacher is asked, in place of the model's own (DiffusionOPD: student 4.5, GenEval's teacher
    1.0).

    **Differs:** where Flow-OPD takes the KL for an advantage, its gradient is not that of the KL
    (its shapes do not fit, and nothing is detached); it divides by the rate instead of the
    variance. Where domains have different numbers of teachers, DiffusionOPD adds zeros for those
    that are missing, whose distance is not 0; here they are left out. Weights are ours.

    Metrics: `velocity_gap`, mean((v - v_T)^2), the weighted mean over a row's teachers.

    Raises: ConfigError without a teacher, for a likelihood without a velocity, or with "kl" a step
    without noise.
    """
    if not teachers:
        raise ConfigError("distill: expected at least one teacher, as in teachers: {color: runs/a}")
    now = data.now
    if now.v is None or any(teacher.v is None for teacher, _ in data.teachers):
        raise ConfigError("distill: the likelihood has no velocity; take likelihood reverse")
    if form == "kl":
        wrong = ConfigError(
            "distill: form kl compares Gaussian steps, and a trained step has no noise; take "
            "likelihood reverse, or form ode"
        )
        refuse_if((now.std <= 0).any(), lambda: wrong)
    # one distance for each teacher of a row [B]; where it has fewer, their weight is 0
    total = torch.zeros(len(now.v), dtype=torch.float64, device=now.v.device)
    gaps, weights = torch.zeros_like(total), torch.zeros_like(total)
    for teacher, weight in data.teachers:
        far, gap = _distance(data, teacher, form)
        total = total + weight * far
        gaps, weights = gaps + weight * gap.detach(), weights + weight
    return total, {"velocity_gap": gaps / weights}


def _distance(data: LossInput, teacher: Eval, form: str) -> tuple[Tensor, Tensor]:
    """Return how far the policy's step is from a teacher's [B], and their velocities [B]."""
    now = data.now
    assert now.v is not None and teacher.v is not None  # `distill` has looked
    # mean over the latent's dimensions -> [B]; the teacher has no gradient
    gap = (now.v - teacher.v.detach()).double().square().flatten(1).mean(1)
    if form == "velocity":
        return gap, gap
    # D, the step's length in sigma, is what turns velocities into distances
    if form == "ode":
        return (data.batch.sigma - data.batch.sigma_next).double().square() * gap / 2, gap
    # both steps have the std of the transition, so only their means differ
    far = (now.mean - teacher.mean.detach()).double().square().flatten(1).mean(1)
    return far / (2 * now.std.double().square()), gap


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
    _check_tdm(data, width)
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


def _check_tdm(data: LossInput, width: float) -> None:
    if not width > 0:
        raise ConfigError(f"tdm: expected width > 0, got {width}")
    if data.batch.query is None:
        raise ConfigError(
            "tdm: trains the steps of a few-step model, which only likelihood generated has; set "
            "likelihood: {fn: generated} and plan: {fn: few_step, steps: 4}"
        )
