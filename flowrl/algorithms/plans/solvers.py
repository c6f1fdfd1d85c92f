"""Samplers as data, for methods that train images and not draws: chains without noise that is
trained, and images that are there already."""

from __future__ import annotations

from typing import Literal

import torch

from flowrl.algorithms.rollout.plan_steps import chain, check_steps_and_noise
from flowrl.core.errors import ConfigError
from flowrl.core.types import Adams, Plan, SigmaGrid


def ode(iteration: int, *, steps: int, order: int = 2, last_order: int = 1) -> Plan:
    """Sample without any noise: order 1 is Euler, order 2 DPM-Solver++ 2M (DiffusionNFT's "dpm2").

    last_order is that of the last step whose end is not the image. Steps from sigma 1, the step
    after it, and the step to sigma 0 are of first order in any case.

    **Differs:** DiffusionNFT's code has order 2 there as well (last_order 2). On its grid that step
    ends at sigma 0.009 and overshoots: unit Gaussian data come out with variance 1.86, with
    last_order 1 with 0.88 and with Euler 0.67 (10 steps of SD3's grid, exact velocity).

    Raises: ConfigError for an order that is neither 1 nor 2.
    """
    check_steps_and_noise(steps, 0.0)
    if order not in (1, 2) or last_order not in (1, 2):
        raise ConfigError(
            f"plan ode: expected order and last_order 1 (Euler) or 2 (DPM-Solver++ 2M), got "
            f"{order=}, {last_order=}"
        )
    solver = torch.full((steps,), order, dtype=torch.int64)
    if steps > 1:
        solver[-2] = min(order, last_order)
    return chain(steps, 0.0, range(0))._replace(solver=solver)


def few_step(iteration: int, *, steps: int = 4) -> Plan:
    """Sample by Euler without noise and keep the state after every step: the sampler of a few-step
    model whose steps are trained one by one (TDM-R1, 2603.07700: 4).

    Raises: ConfigError for steps < 1.
    """
    check_steps_and_noise(steps, 0.0)
    return chain(steps, 0.0, range(0))._replace(every_step=True)


def sa_solver(
    iteration: int,
    *,
    steps: int,
    noise_scale: float = 0.4,
    low: float = 0.3,
    high: float = 0.9,
    form: Literal["exact", "published"] = "exact",
    first: float = 0.999,
) -> Plan:
    """Sample with SA-Solver of order 2 (AWM, 2509.25050): noise of strength `noise_scale` on steps
    that end at a sigma from `low` to `high`, none of it trained; one network call per step.

    The grid is the model's own with two edits of AWM's code: sigmas above `first` become it, and
    the last one above 0 half of the one before. AWM: 14 steps, noise_scale 0.4 (GenEval, OCR) or 0
    (PickScore).

    **Differs:** form "published" has the coefficients of AWM's code, see
    `flowrl.algorithms.rollout.solvers.coefficients`; "exact" integrates the line through two
    estimates exactly and overshoots less. Initial noise has the std of the path at `first`, in the
    code 1.

    Raises: ConfigError for fewer than 3 steps, or a range of sigmas that is none.
    """
    check_steps_and_noise(steps, noise_scale)
    if steps < 3 or not 0 <= low <= high <= 1 or not 0 < first <= 1:
        raise ConfigError(
            "plan sa_solver: expected steps >= 3, 0 <= low <= high <= 1 and 0 < first <= 1, got "
            f"{steps=}, {low=}, {high=}, {first=}"
        )
    places = torch.arange(steps + 1, dtype=torch.float64)
    grid = SigmaGrid(steps, places, 1.0, first, halve_last=True)
    adams = Adams(noise_scale, low, high, form == "published")
    return chain(steps, 0.0, range(0))._replace(sigma_grid=grid, adams=adams)


def pairs(
    iteration: int, *, steps: int = 1, judged_by: Literal["labels", "rewards"] = "labels"
) -> Plan:
    """Sample nothing: the images of a prompt are the two that its record names, as in offline
    preference learning (Diffusion-DPO, 2311.12908).

    The list of `prompts.train` has ``image_0``, ``image_1`` and ``label_0`` in each record, as
    `flowrl pairs` writes it; `train.group` is 2.

    Args:
        steps: steps of the model's grid, for likelihood `forward` with `times: grid`; as many as a
            model that predicts noise has training timesteps makes all of them equally likely.
        judged_by: labels = credit sees the labels in place of the rewards, which are only watched;
            rewards = it sees the rewards of the stored images (the paper's pseudo-labels).
    """
    check_steps_and_noise(steps, 0.0)
    return chain(steps, 0.0, range(0))._replace(stored=judged_by)
