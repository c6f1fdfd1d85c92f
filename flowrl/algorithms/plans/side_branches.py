"""Plans that look at one draw at a time: side branches without noise hang on a trunk and are
rewarded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from flowrl.algorithms.rollout.plan_steps import chain, check_steps_and_noise
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan


def rake(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    branch: int,
    low: int = 0,
    high: int | None = None,
    strides: Sequence[int] = (1,),
) -> Plan:
    """Run a trunk without noise; at each step in ``[low, high)`` hang `branch` children with one
    draw each on it.

    Children are finished by ODE, so that all that differs between them is that draw. `high`
    defaults to ``steps - 1``. A child has one leaf per stride: its tail takes one whole step, then
    every stride-th of the grid. TempFlow-GRPO (2508.04324): 6 children at each of 9 of 10 steps.
    G2RPO (2510.01982): 12 children at steps 0 to 7 of 16, strides 1, 2 (and 3).

    **Differs:** the trunk stops at the last step that has children, and its end is not drawn: one
    network call less than TempFlow's code. Strides share the child's first two velocities.

    Raises: ConfigError if the range is empty or reaches the last step, for branch < 2 or strides
    below 1.
    """
    check_steps_and_noise(steps, noise_scale)
    high = steps - 1 if high is None else high
    if not 0 <= low < high <= steps - 1:
        raise ConfigError(
            f"plan rake: needs 0 <= low < high <= {steps - 1} (steps={steps}; a draw of the last "
            "step stays in the "
            f"image and is not trained), got low={low}, high={high}"
        )
    if branch < 2 or noise_scale == 0:
        raise ConfigError(
            f"plan rake: needs branch >= 2 and noise, got branch={branch}, "
            f"noise_scale={noise_scale}"
        )
    # equal strides would pay twice for the same image
    if not strides or min(strides) < 1 or len(set(strides)) != len(strides):
        raise ConfigError(
            f"plan rake: strides must be different whole numbers of at least 1, got {list(strides)}"
        )
    plan = chain(steps, noise_scale, range(low, high))
    # keep 0: children do not go on, the trunk does; a tail of all steps finishes them
    forks = plan.noise > 0
    return plan._replace(
        branch=torch.where(forks, branch, 1),
        keep=torch.where(forks, 0, 1),
        tail=torch.where(forks, steps, 0),
        strides=tuple(strides),
    )


def comb(
    iteration: int,
    *,
    steps: int,
    noise_scale: float | Sequence[float],
    size: int,
    preview: Literal["full", "x0"] = "full",
    baseline: bool = False,
    preview_steps: int = 0,
    first: int = 0,
) -> Plan:
    """Put noise on `size` steps from `first` on and reward a preview after each of these draws, but
    the last.

    preview "full": the sample is finished without noise (TP-GRPO, 2602.06422). "x0": one Euler jump
    to sigma 0, at no network call of its own (VGPO, 2512.12387). The last draw's preview would be
    the sample itself, which is a leaf. `baseline` adds the image of the initial noise without any
    draw; it starts from the very same noise. `preview_steps` above 0 finishes a full preview in so
    many steps, spread evenly over those that are left (Stepwise-Flow-GRPO, 2603.28718: 5), and the
    baseline too: finished better than the first preview, it would hide what the first draw adds.

    `noise_scale` is one for all of them, or a list with one for each of the `size` steps that have
    noise, noisiest first: DenseGRPO (2601.20218) calibrates each step's. **Differs:** its numbers
    stand for the whole rate; here the transition says what a scale means, as for any plan.

    Images per initial noise: `size`, and 1 with a baseline.

    Raises: ConfigError unless 1 <= size <= steps - first, and noise_scale is above 0, of a list
    each of its `size` numbers.
    """
    scales = [*noise_scale] if isinstance(noise_scale, Sequence) else [noise_scale] * size
    for scale in scales:
        check_steps_and_noise(steps, scale)
    if first < 0 or not 1 <= size <= steps - first or min(scales, default=0) == 0:
        raise ConfigError(
            f"plan comb: needs 1 <= size <= steps={steps} - first={first} and noise_scale > 0, got "
            f"size={size}, noise_scale={noise_scale}"
        )
    if len(scales) != size:
        raise ConfigError(
            f"plan comb: a list of noise scales needs one for each of the size={size} steps with "
            f"noise, got noise_scale={scales}"
        )
    last = first + size - 1
    plan = chain(steps, 0.0, range(first, last + 1))
    plan.noise[first : last + 1] = torch.tensor(scales)
    if preview_steps < 0 or (preview_steps and preview == "x0"):
        raise ConfigError(
            f"plan comb: preview_steps={preview_steps} belongs to preview full, and is at least 0"
        )
    long = 1 if preview == "x0" else preview_steps or steps
    tail = torch.where((plan.noise > 0) & (torch.arange(steps) < last), long, 0)
    return plan._replace(tail=tail, baseline=baseline)
