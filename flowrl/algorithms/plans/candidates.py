"""Plans in which several next states are drawn and looked at, and one of them goes on."""

from __future__ import annotations

import torch

from flowrl.algorithms.rollout.plan_steps import chain, check_steps_and_noise
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan


def candidates(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    branch: int,
    first: int,
    last: int | None = None,
    finish: bool = False,
) -> Plan:
    """Draw `branch` next states at each step from `first` to `last`, estimate the image of each,
    and go on with the first: a random one, as all are drawn alike.

    SPO (2406.04314), its code: DDIM with all of its noise, 20 steps, first 4, branch 4 (SD1.5) or 2
    (SDXL). Every step but the last one of all is noisy; with `last` those after it are not, either.
    A state's image is its x0 estimate, judged at the state's own sigma (`RewardBatch.sigma`).
    Images per initial noise: ``branch (last - first + 1) + 1``, the last one finished; without
    `last` it is ``steps - 2``.

    With `finish` each candidate is sampled to its end without noise and judged as a finished image,
    so that any reward can compare them, at up to ``steps - 1 - first`` times the network calls.
    That is ours: SPO has a preference model that judges estimates in its place. So is `last`: where
    candidates hardly differ any more, no judge can tell them apart.

    **Differs:** the code also compares states of the last step; its draws are never trained here,
    so that step has no noise.

    Raises: ConfigError unless 0 <= first <= last < steps - 1, branch >= 2 and noise_scale > 0.
    """
    check_steps_and_noise(steps, noise_scale)
    end = steps - 2 if last is None else last
    if not 0 <= first <= end < steps - 1 or branch < 2 or noise_scale == 0:
        raise ConfigError(
            f"plan candidates: needs 0 <= first < {steps - 1} (steps={steps}, the last has no "
            "noise), first <= last < that, branch >= 2 and noise_scale > 0, got "
            f"{first=}, {last=}, {branch=}, {noise_scale=}"
        )
    plan = chain(steps, noise_scale, range(end + 1))
    compared = (torch.arange(steps) >= first) & (plan.noise > 0)
    branches = torch.where(compared, branch, 1)
    return plan._replace(branch=branches, tail=torch.where(compared, steps if finish else 1, 0))
