"""Samplers as data: where noise and forks go. Each function returns the Plan of one training iteration.

All are stateless: the same iteration gives the same plan on every rank and after a resume. Calling one with
iteration 0 checks its options.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flowrl.errors import ConfigError
from flowrl.types import Plan


class Step(NamedTuple):
    """One step of a plan as host numbers, so that the denoising loop never waits for the accelerator."""

    level: float
    branch: int
    keep: int
    tail: int


def full(iteration: int, *, steps: int, level: float, ode_last: int = 0) -> Plan:
    """Put noise on every step but the last `ode_last` (Flow-GRPO: 0; DanceGRPO decodes x0 at the last step: 1)."""
    _check(steps, level)
    if not 0 <= ode_last < steps:
        raise ConfigError(f"plan full: ode_last={ode_last} leaves no noisy step of steps={steps}; use 0 to {steps - 1}")
    return _plan(steps, level, range(steps - ode_last))


def sliding_window(
    iteration: int,
    *,
    steps: int,
    level: float,
    size: int,
    start: int = 0,
    stride: int = 1,
    every: int = 25,
    roll_back: bool = True,
    spare: int = 2,
) -> Plan:
    """Put noise on `size` steps that move `stride` towards clean after each `every` iterations (MixGRPO, 2507.21802).

    The last `spare` steps never get noise. Past the last possible start, the window goes back to step 0, or with
    `roll_back` off stays at the end. stride 0 freezes it (MixGRPO-Flash*).

    **Differs:** the MixGRPO code ends its window at ``min(start + size, steps - 2)``, so that it shrinks, down to no
    step at all, before it rolls back at ``start > steps - 2``; the paper stops at ``steps - size``. flowrl keeps the
    size and rolls back before the window would shrink; ``spare=0, roll_back=False`` is the paper.

    Raises: ConfigError if the window cannot lie inside the steps.
    """
    _check(steps, level)
    last = steps - spare - size
    if size < 1 or spare < 0 or not 0 <= start <= last:
        raise ConfigError(
            f"plan sliding_window: a window of size={size} at start={start} does not fit into steps={steps} with the "
            f"last spare={spare} left without noise; it needs size >= 1 and 0 <= start <= {last}"
        )
    if stride < 0 or every < 1:
        raise ConfigError(f"plan sliding_window: needs stride >= 0 and every >= 1, got stride={stride}, every={every}")
    first = _slide(iteration // every, start=start, stride=stride, last=last, roll_back=roll_back)
    return _plan(steps, level, range(first, first + size))


def random_window(
    iteration: int, *, steps: int, level: float, size: int, low: int = 0, high: int | None = None, seed: int = 0
) -> Plan:
    """Put noise on `size` steps inside ``[low, high)``, the start drawn from (seed, iteration) (Flow-GRPO-Fast).

    `high` defaults to `steps`. Every rank draws the same start, and a resumed run draws what it would have drawn.

    Raises: ConfigError if no start is possible.
    """
    _check(steps, level)
    high = steps if high is None else high
    if size < 1 or low < 0 or high > steps or low + size > high:
        raise ConfigError(
            f"plan random_window: no window of size={size} fits into steps {low} to {high - 1} (low={low}, "
            f"high={high}) of steps={steps}; it needs 0 <= low, low + size <= high <= steps"
        )
    # a text seed: CPython hashes it with SHA-512, the same on every machine
    first = random.Random(f"random_window {seed} {iteration}").randint(low, high - size)
    return _plan(steps, level, range(first, first + size))


def tree(
    iteration: int, *, steps: int, level: float, splits: Sequence[int], branch: int = 2, ode_last: int = 0
) -> Plan:
    """Put noise on every step but the last `ode_last`, and `branch` children per node at `splits` (BranchGRPO).

    ``splits=[0, 3, 6, 9], branch=2`` gives 16 leaves per root (2509.06040). Children draw independent noise.

    Raises: ConfigError for splits outside the noisy steps, repeated splits or branch < 2.
    """
    plan = full(iteration, steps=steps, level=level, ode_last=ode_last)
    bad = [k for k in splits if not 0 <= k < steps - ode_last]
    if bad or len(set(splits)) != len(splits):
        raise ConfigError(
            f"plan tree: splits={list(splits)} must be different steps from 0 to {steps - ode_last - 1} "
            f"(steps={steps}, ode_last={ode_last}); wrong: {bad or 'a step is named twice'}"
        )
    if branch < 2:
        raise ConfigError(f"plan tree: branch={branch} does not fork; use branch >= 2, or plan full")
    count = plan.branch.clone()
    count[list(splits)] = branch
    return plan._replace(branch=count, keep=count.clone())


def fork(
    iteration: int, *, steps: int, level: float, branch: int, low: int = 0, high: int | None = None, seed: int = 0
) -> Plan:
    """Draw `branch` children of each live sample at one random step in ``[low, high)``; no noise elsewhere.

    All that differs between siblings is that one draw, so the whole spread of their rewards belongs to it; and their
    common past is sampled, and their common state trained, once. The step is drawn from (seed, iteration). It is
    Flow-GRPO-Fast's first form with one stochastic step. **Differs:** that code has two such steps and copies the state
    before the first; its groups of 9 are `branch` here.

    Raises: ConfigError if no step is possible or branch < 2.
    """
    plan = random_window(iteration, steps=steps, level=level, size=1, low=low, high=high, seed=seed)
    if branch < 2:
        raise ConfigError(f"plan fork: branch={branch} does not fork; use branch >= 2, or plan random_window")
    count = torch.where(plan.noise > 0, branch, plan.branch)
    return plan._replace(branch=count, keep=count.clone())


def steps_of(plan: Plan) -> list[Step]:
    """Read a plan as host numbers. Raises ConfigError, naming the step, for a plan that cannot be run."""
    if len({len(field) for field in plan}) != 1:
        raise ConfigError(f"a plan needs one entry per step in every field, got lengths {[len(f) for f in plan]}")
    steps = [Step(*row) for row in zip(*(field.tolist() for field in plan), strict=True)]
    for k, step in enumerate(steps):
        if not (math.isfinite(step.level) and step.level >= 0) or step.tail < 0 or not 1 <= step.keep <= step.branch:
            raise ConfigError(f"plan step {k}: needs noise >= 0, 1 <= keep <= branch, tail >= 0, got {step}")
        if step.level == 0 and (step.branch > 1 or step.tail > 0):
            raise ConfigError(f"plan step {k}: forks and previews need noise, or they are all the same, got {step}")
    return steps


def leaves_per_root(plan: Plan) -> int:
    """Count the pictures that one initial noise ends in, previews included."""
    steps, live, leaves = steps_of(plan), 1, 0
    for k, step in enumerate(steps):
        if step.tail and k + 1 < len(steps):
            leaves += live * step.branch
        if k + 1 == len(steps):
            return leaves + live * step.branch
        live *= step.keep
    raise ConfigError("a plan needs at least 1 step, got 0")


def roots_for(plan: Plan, images: int) -> int:
    """Say how many roots per prompt give `images` pictures per prompt. Raises ConfigError if they do not divide."""
    leaves = leaves_per_root(plan)
    if images < 1 or images % leaves:
        raise ConfigError(
            f"a group of {images} pictures per prompt is not a multiple of the {leaves} leaves that this plan gives "
            f"per initial noise; use {max(1, images // leaves) * leaves} or {(images // leaves + 1) * leaves}"
        )
    return images // leaves


def _slide(moves: int, *, start: int, stride: int, last: int, roll_back: bool) -> int:
    if stride == 0:
        return start
    before = (last - start) // stride + 1
    if moves < before:
        return start + moves * stride
    return (moves - before) % (last // stride + 1) * stride if roll_back else last


def _plan(steps: int, level: float, noisy: range) -> Plan:
    noise = torch.zeros(steps)
    noise[noisy.start : noisy.stop] = level
    ones = torch.ones(steps, dtype=torch.int64)
    return Plan(noise, ones, ones.clone(), torch.zeros(steps, dtype=torch.int64))


def _check(steps: int, level: float) -> None:
    if steps < 1:
        raise ConfigError(f"a plan needs at least 1 step, got steps={steps}")
    if not (math.isfinite(level) and level >= 0):
        raise ConfigError(f"a noise level must be a number of at least 0, got level={level}")
