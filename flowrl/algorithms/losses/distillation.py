"""Learning from teachers on one's own trajectories. Unreduced: one value per decision."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.core.deferred_checks import refuse_if
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import LossInput


@needs("teacher", "zero_advantage")
def distill(
    data: LossInput,
    *,
    teachers: dict[str, str],
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
    the same model and layers, of which the newest checkpoint is taken, or a checkpoint.

    **Differs:** where Flow-OPD takes the KL for an advantage, its gradient is not that of the KL
    (its shapes do not fit, and nothing is detached); it divides by the rate instead of the
    variance. Several teachers of one domain are not added up. Teachers have the model's own
    guidance.

    Metrics: `velocity_gap`, mean((v - v_T)^2).

    Raises: ConfigError without a teacher, for a likelihood without a velocity, or with "kl" a step
    without noise.
    """
    if not teachers:
        raise ConfigError("distill: expected at least one teacher, as in teachers: {color: runs/a}")
    now, teacher = data.now, data.under["teacher"]
    if now.v is None or teacher.v is None:
        raise ConfigError("distill: the likelihood has no velocity; take likelihood reverse")
    # mean over the latent's dimensions -> [B]; the teacher has no gradient
    gap = (now.v - teacher.v.detach()).double().square().flatten(1).mean(1)
    metrics = {"velocity_gap": gap.detach()}
    if form == "velocity":
        return gap, metrics
    # D, the step's length in sigma, is what turns velocities into distances
    if form == "ode":
        return (data.batch.sigma - data.batch.sigma_next).double().square() * gap / 2, metrics
    wrong = ConfigError(
        "distill: form kl compares Gaussian steps, and a trained step has no noise; take "
        "likelihood reverse, or form ode"
    )
    refuse_if((now.std <= 0).any(), lambda: wrong)
    # both steps have the std of the transition, so only their means differ
    far = (now.mean - teacher.mean.detach()).double().square().flatten(1).mean(1)
    return far / (2 * now.std.double().square()), metrics
