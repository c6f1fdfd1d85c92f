"""Samplers as data: where noise goes on a chain. Each function returns the Plan of one training
iteration.

All are stateless: the same iteration gives the same plan on every rank and after a resume. Calling
one with iteration 0 checks its options."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from itertools import accumulate
from typing import Literal

import torch

from flowrl.algorithms.rollout.plan_steps import chain, check_steps_and_noise, flash_places
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan, SigmaGrid


def full(iteration: int, *, steps: int, noise_scale: float, ode_last: int = 0) -> Plan:
    """Put noise on every step but the last `ode_last` (Flow-GRPO: 0; DanceGRPO decodes x0 at the
    last step: 1). Raises: ConfigError if no noisy step is left."""
    check_steps_and_noise(steps, noise_scale)
    if not 0 <= ode_last < steps:
        raise ConfigError(
            f"plan full: ode_last={ode_last} leaves no noisy step of steps={steps}; use 0 to "
            f"{steps - 1}"
        )
    return chain(steps, noise_scale, range(steps - ode_last))


def sliding_window(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    size: int,
    start: int = 0,
    stride: int = 1,
    every: int = 25,
    pace: Literal["constant", "linear", "exponential"] = "constant",
    hold: int = 13,
    decay: float = 0.1,
    least: int = 1,
    roll_back: bool = True,
    spare: int = 2,
) -> Plan:
    """Put noise on `size` steps that move `stride` towards clean after each `every` iterations
    (MixGRPO, 2507.21802).

    The last `spare` steps never get noise. Past the last possible start, the window goes back to
    step 0, or with `roll_back` off stays at the end. stride 0 freezes it (MixGRPO-Flash*). With
    another `pace` the stay at step l shortens: "linear" as ``max(least, int(every (1 - p) + least
    p))`` with ``p = l / (steps - 2)``, "exponential" as ``ceil(every exp(-decay max(0, l -
    hold)))``. The paper's fourth strategy, a random start in each iteration, is `random_window`.

    **Differs:** the MixGRPO code ends its window at ``min(start + size, steps - 2)``, so that it
    shrinks, down to no step at all, before it rolls back at ``start > steps - 2``; the paper stops
    at ``steps - size``. flowrl keeps the size and rolls back before the window would shrink;
    ``spare=0, roll_back=False`` is the paper. The code rolls back to `start`, flowrl to step 0.

    Raises: ConfigError if the window cannot lie inside the steps.
    """
    check_steps_and_noise(steps, noise_scale)
    last = _last_start(steps, size, start, spare)
    if stride < 0 or not 1 <= least <= every or not decay >= 0:
        raise ConfigError(
            "plan sliding_window: needs stride >= 0, every >= least >= 1 and decay >= 0, got "
            f"stride={stride}, every={every}, {least=}, decay={decay}"
        )
    # only the start depends on the iteration: an interrupted run needs no memory of it
    first = _window_start(
        iteration,
        start=start,
        stride=stride,
        every=every,
        last=last,
        roll_back=roll_back,
        pace=pace,
        hold=hold,
        decay=decay,
        least=least,
        steps=steps,
    )
    return chain(steps, noise_scale, range(first, first + size))


def _last_start(steps: int, size: int, start: int, spare: int) -> int:
    """Return the last start that leaves the `spare` cleanest steps alone. Raises ConfigError if the
    window does not fit."""
    last = steps - spare - size
    if size < 1 or spare < 0 or not 0 <= start <= last:
        raise ConfigError(
            f"plan sliding_window: a window of size={size} at start={start} does not fit into "
            f"steps={steps} with the "
            f"last spare={spare} left without noise; it needs size >= 1 and 0 <= start <= {last}"
        )
    return last


def flash_window(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    size: int,
    ratio: float = 0.4,
    shift: float = 3.0,
    start: int = 0,
    stride: int = 1,
    every: int = 20,
    roll_back: bool = True,
    spare: int | None = None,
) -> Plan:
    """Slide a window as `sliding_window`; after it take fewer steps with DPM-Solver++ 2M
    (MixGRPO-Flash, 2507.21802).

    With j the window's last step, the steps behind it become ``int((steps - j) ratio) - 1`` steps
    that are even in time, `shift` undone (3 on FLUX in the authors' code). stride 0 with ratio 0.2
    is Flash*. Before the window the grid stays fine: the paper reports that speeding up there
    breaks the reward.

    `spare` defaults to the fewest steps, at least 2, that leave a point besides the window's end;
    the code's 2 would stop there at a noisy image for windows near the end, which its runs never
    reach.

    Raises: ConfigError if the window does not fit, or if a window that it may reach leaves one
    point behind it.
    """
    # behind the window there must be two points, its end and one more, to have a step
    if spare is None:
        spare = next((s for s in range(2, steps) if int((s + 1) * ratio) >= 2), 2)
    window = sliding_window(
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
    if stride:
        flash_places(
            steps, steps - spare - 1, ratio
        )  # the last place that the window will ever reach must work too
    # the window in steps of the fine grid, then the plan on the coarser one
    last = int(window.noise.nonzero().max()) if noise_scale else start + size - 1
    places = flash_places(steps, last, ratio)
    plan = chain(len(places) - 1, noise_scale, range(last + 1 - size, last + 1))
    # Euler up to the window's end; the longer steps behind it by the solver of second order
    solver = torch.where(torch.arange(len(places) - 1) > last, 2, 1)
    return plan._replace(sigma_grid=SigmaGrid(steps, places, shift), solver=solver)


def random_window(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    size: int,
    low: int = 0,
    high: int | None = None,
    seed: int | None = None,
    each: Literal["iteration", "prompt"] = "iteration",
) -> Plan:
    """Put noise on `size` steps inside ``[low, high)``, the start drawn from (seed, iteration)
    (Flow-GRPO-Fast); with `each` "prompt" from these and the prompt's place, so that every prompt
    has a window of its own, one for all of its images (Flash-GRPO, 2605.15980: size 1).

    `high` defaults to `steps`, and `seed` to that of the run. Every rank draws the same start, and
    a resumed run draws what it would have drawn.

    Raises: ConfigError if no start is possible.
    """
    check_steps_and_noise(steps, noise_scale)
    high = steps if high is None else high
    if size < 1 or low < 0 or high > steps or low + size > high:
        raise ConfigError(
            f"plan random_window: no window of size={size} fits into steps {low} to {high - 1} "
            f"(low={low}, "
            f"high={high}) of steps={steps}; it needs 0 <= low, low + size <= high <= steps"
        )
    # a text seed: CPython hashes it with SHA-512, the same on every machine
    text = f"random_window {seed or 0} {iteration}"
    if each == "prompt":
        return chain(steps, noise_scale, range(low, high))._replace(windows=(text, size))
    first = random.Random(text).randint(low, high - size)
    return chain(steps, noise_scale, range(first, first + size))


def fork(
    iteration: int,
    *,
    steps: int,
    noise_scale: float,
    branch: int,
    size: int = 1,
    low: int = 0,
    high: int | None = None,
    seed: int | None = None,
) -> Plan:
    """Draw `branch` children of each live sample at a random step in ``[low, high)``, noise on
    `size` steps from there.

    Flow-GRPO-Fast's first form (the authors' code of August 2025): one sample without noise up to a
    random step, 9 copies of that state, two noisy steps: ``branch=9, size=2``. With size 1 all that
    differs between siblings is one draw, so the whole spread of their rewards belongs to it. Their
    common past is sampled, and the state that they part from is trained, once. The first step is
    drawn from (seed, iteration).

    Raises: ConfigError if no start is possible or branch < 2.
    """
    plan = random_window(
        iteration, steps=steps, noise_scale=noise_scale, size=size, low=low, high=high, seed=seed
    )
    if branch < 2:
        raise ConfigError(
            f"plan fork: branch={branch} does not fork; use branch >= 2, or plan random_window"
        )
    count = plan.branch.clone()
    count[plan.noise.nonzero()[:1]] = branch  # the first of the noisy steps
    return plan._replace(branch=count, keep=count.clone())


def _window_start(
    iteration: int,
    *,
    start: int,
    stride: int,
    every: int,
    last: int,
    steps: int,
    roll_back: bool,
    pace: Literal["constant", "linear", "exponential"] = "constant",
    hold: int = 13,
    decay: float = 0.1,
    least: int = 1,
) -> int:
    """Say at which step the window starts: `start`, then `stride` further whenever its stay is over
    (2507.21802).

    After the last start that is at most `last` it goes back to step 0, or without `roll_back` moves
    to `last` and remains; stride 0 freezes it. The window stays at step l for so many iterations,
    at least 1 (MixGRPO's code):

    - constant: `every`;
    - linear: ``max(least, int(every (1 - p) + least p))`` with ``p = l / (steps - 2)``; `steps` are
      the denoising steps (the code has 10 and 1 for `every` and `least`);
    - exponential: ``ceil(every exp(-decay max(0, l - hold)))``.

    **Differs:** the code goes back to `start`.
    """
    if stride == 0:
        return start

    def stay(at: int) -> int:
        if pace == "linear":
            share = at / max(1, steps - 2)
            return max(least, int(every * (1 - share) + least * share))
        if pace == "exponential":
            return max(1, math.ceil(every * math.exp(-decay * max(0, at - hold))))
        return every

    # the starts of the first round, and of later ones, which begin at step 0
    ahead, again = range(start, last + 1, stride), range(0, last + 1, stride)
    # the iteration at which each stay is over; the first one that is not tells the start
    ends = list(accumulate(map(stay, ahead)))
    if iteration < ends[-1]:
        return ahead[bisect_right(ends, iteration)]
    if not roll_back:
        return last
    # later rounds are all alike: count from the end of the first, modulo their length
    left, ends = iteration - ends[-1], list(accumulate(map(stay, again)))
    return again[bisect_right(ends, left % ends[-1])]
