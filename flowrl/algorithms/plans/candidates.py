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
    finish: bool = False,
) -> Plan:
    """Draw `branch` next states at each step from `first` on, estimate the image of each, and go on
    with the first: a random one, as all are drawn alike.

    SPO (2406.04314), its code: DDIM with all of its noise, 20 steps, first 4, branch 4 (SD1.5) or 2
    (SDXL). Every step but the last is noisy. A state's image is its x0 estimate, judged at the
    state's own sigma (`RewardBatch.sigma`). Images per initial noise: ``branch (steps - 1 - first)
    + 1``, the last one finished.

    With `finish` each candidate is sampled to its end without noise and judged as a finished image,
    so that any reward can compare them, at up to ``steps - 1 - first`` times the network calls.
    That is ours: SPO has a preference model that judges estimates in its place.

    **Differs:** the code also compares states of the last step; its draws are never trained here,
    so that step has no noise.

    Raises: ConfigError unless 0 <= first < steps - 1, branch >= 2 and noise_scale > 0.
    """
    check_steps_and_noise(steps, noise_scale)
    if not 0 <= first < steps - 1 or branch < 2 or noise_scale == 0:
        raise ConfigError(
            f"plan candidates: needs 0 <= first < {steps - 1} (steps={steps}, the last has no "
            f"noise), branch >= 2 and noise_scale > 0, got {first=}, {branch=}, {noise_scale=}"
        )
    plan = chain(steps, noise_scale, range(steps - 1))
    compared = (torch.arange(steps) >= first) & (plan.noise > 0)
    branches = torch.where(compared, branch, 1)
    return plan._replace(branch=branches, tail=torch.where(compared, steps if finish else 1, 0))
