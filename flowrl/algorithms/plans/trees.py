"""Plans that fork: trees whose branches share their past, side branches that judge one draw at a
time, and next states that are compared before one of them goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from flowrl.algorithms.plans.windows import full, sliding_window
from flowrl.algorithms.rollout.plan_steps import chain, check_steps_and_noise
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan


def tree(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    splits: Sequence[int],
    branch: int = 2,
    ode_last: int = 0,
    split_noise: Literal["correlated", "scaled", "independent"] = "correlated",
    spread: float = 4.0,
    block: int | None = None,
    block_every: int = 30,
) -> Plan:
    """Put noise on every step but the last `ode_last`, and `branch` children per node at `splits`
    (BranchGRPO).

    ``splits=[0, 3, 6, 9], branch=2`` gives 16 leaves per root (2509.06040). `split_noise` says what
    siblings draw:

    - correlated (paper): ``(z_0 + spread n_b) / sqrt(1 + spread^2)`` with a common z_0. Each is
      standard normal; two have the correlation ``1 / (1 + spread^2)``.
    - scaled (code): ``spread n_b``, scored as if it were n_b. Marginals break, and the log-prob is
      not the density of what was drawn.
    - independent: n_b.

    `block` (BranchGRPO-Mix): noise only on the first `block` steps of every `block_every`, and at
    the splits. **Differs:** with 20 steps the published script's 30 makes this the first block for
    ever, as it does here.

    Raises: ConfigError for splits outside the noisy steps, repeated splits, branch < 2, spread <= 0
    or an empty block.
    """
    plan = full(iteration, steps=steps, noise_scale=noise_scale, ode_last=ode_last)
    _check_splits(splits, steps, ode_last, branch)
    if not spread > 0:
        raise ConfigError(
            f"plan tree: spread={spread} leaves siblings without noise of their own; use spread > 0"
        )
    if block is not None and not 1 <= block <= block_every:
        raise ConfigError(
            f"plan tree: needs 1 <= block <= block_every, got block={block}, "
            f"block_every={block_every}"
        )
    plan = _forked(plan, list(splits), branch)
    if block is not None:
        # forks keep their noise outside the block: without it siblings are all the same
        k = torch.arange(steps)
        plan = plan._replace(
            noise=torch.where((k % block_every < block) | (plan.branch > 1), plan.noise, 0.0)
        )
    # what siblings have in common [correlated], and by how much noise is stretched [scaled]
    return plan._replace(
        share=1 / (1 + spread**2) if split_noise == "correlated" else 0.0,
        stretch=spread if split_noise == "scaled" else 1.0,
    )


def window_tree(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    size: int,
    branch: int = 2,
    splits: Sequence[int] | None = None,
    growth: float = 0.0,
    start: int = 0,
    stride: int = 1,
    every: int = 25,
    roll_back: bool = True,
    spare: int = 2,
) -> Plan:
    """Fork inside a sliding window, with noise that grows with depth; no noise elsewhere
    (Dynamic-TreeRPO).

    Every step of the window forks, or those of its places `splits` (0 = its first). At its k-th
    step, k = 1 ... size, the noise scale is ``noise_scale (1 + growth k / size)``; mean and std
    both take it, so that the marginals stay those of the transition. size 4 and branch 2 give 16
    leaves per root (2509.23352). The window slides as in `sliding_window`.

    Reconstruction: that noise grows linearly with depth is from a review of the paper; the formula,
    and everything on how the window moves, is ours.

    Raises: ConfigError if the window does not fit, for splits outside it, branch < 2 or growth <=
    -1.
    """
    plan = sliding_window(
        iteration,
        steps=steps,
        noise_scale=noise_scale,
        size=size,
        start=start,
        stride=stride,
        every=every,
        roll_back=roll_back,
        spare=spare,
    )
    # where the window forks, counted from its own first step
    places = list(range(size)) if splits is None else list(splits)
    _check_places(places, size)
    if branch < 2 or not growth > -1:
        raise ConfigError(
            f"plan window_tree: needs branch >= 2 and growth > -1, got branch={branch}, "
            f"growth={growth}"
        )
    if noise_scale == 0:
        raise ConfigError("plan window_tree: forks need noise, got noise_scale=0")
    first = int(plan.noise.nonzero().min())
    # 1 at the window's first step, `size` at its last
    depth = torch.arange(steps) - first + 1
    noise = torch.where(plan.noise > 0, noise_scale * (1 + growth * depth / size), 0.0)
    return _forked(plan._replace(noise=noise), [first + k for k in places], branch)


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


def _check_splits(splits: Sequence[int], steps: int, ode_last: int, branch: int) -> None:
    """Raise ConfigError unless a tree forks, at different noisy steps."""
    bad = [k for k in splits if not 0 <= k < steps - ode_last]
    if bad or len(set(splits)) != len(splits):
        raise ConfigError(
            f"plan tree: splits={list(splits)} must be different steps from 0 to "
            f"{steps - ode_last - 1} "
            f"(steps={steps}, ode_last={ode_last}); wrong: {bad or 'a step is named twice'}"
        )
    if branch < 2:
        raise ConfigError(
            f"plan tree: branch={branch} does not fork; use branch >= 2, or plan full"
        )


def _check_places(places: list[int], size: int) -> None:
    """Raise ConfigError unless a window forks, at different places of its own."""
    bad = [k for k in places if not 0 <= k < size]
    if bad or not places or len(set(places)) != len(places):
        raise ConfigError(
            f"plan window_tree: splits={places} must be different places from 0 to {size - 1} in a "
            "window of "
            f"size={size}; wrong: {bad or 'none, or one is named twice'}"
        )


def _forked(plan: Plan, splits: list[int], branch: int) -> Plan:
    count = plan.branch.clone()
    count[splits] = branch
    return plan._replace(branch=count, keep=count.clone())
