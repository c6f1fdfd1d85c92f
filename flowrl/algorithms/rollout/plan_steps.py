"""Read plans: host numbers for the denoising loop, the sigmas of its steps, what a plan costs per
initial noise, and plans in which each prompt has noise on steps of its own (Flash-GRPO,
2605.15980)."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import shift_sigmas
from flowrl.core.types import Plan, SigmaGrid


class Step(NamedTuple):
    """One step of a plan as host numbers, so that the denoising loop never waits for the
    accelerator."""

    noise_scale: float
    branch: int
    keep: int
    tail: int
    solver: int


class PlanCounts(NamedTuple):
    """What a plan costs and gives per initial noise."""

    nfe: int  # network evaluations (NFE) of sampling
    leaves: int  # images
    decisions: int  # draws that can be trained: those of the last step cannot
    states: int  # states that they are drawn from
    edges: int  # samples times steps, as papers on trees count them


def chain(steps: int, noise_scale: float, noisy: range) -> Plan:
    """Make the plan without forks that has noise on the steps `noisy`."""
    noise = torch.zeros(steps)
    noise[noisy.start : noisy.stop] = noise_scale
    ones = torch.ones(steps, dtype=torch.int64)
    return Plan(noise, ones, ones.clone(), torch.zeros(steps, dtype=torch.int64))


def check_steps_and_noise(steps: int, noise_scale: float) -> None:
    """Raise ConfigError unless there is a step and the noise scale is a number of at least 0."""
    if steps < 1:
        raise ConfigError(f"a plan needs at least 1 step, got steps={steps}")
    if not (math.isfinite(noise_scale) and noise_scale >= 0):
        raise ConfigError(
            f"a noise scale must be a number of at least 0, got noise_scale={noise_scale}"
        )


def key_of(plan: Plan) -> str:
    """Return a text that two plans have in common if they are equal."""
    rows = []
    for row in plan:
        rows.append(row.tolist() if isinstance(row, Tensor) else row)
    return repr(rows)


def steps_of(plan: Plan) -> list[Step]:
    """Read a plan as host numbers. Raises ConfigError, naming the step, for a plan that cannot be
    run."""
    size = len(plan.noise)
    columns = [plan.noise, plan.branch, plan.keep, plan.tail]
    columns.append(torch.ones(size, dtype=torch.int64) if plan.solver is None else plan.solver)
    lengths = list(map(len, columns))
    if set(lengths) != {size} or not size:
        given = lengths[:4] if plan.solver is None else lengths
        raise ConfigError(f"a plan needs one entry per step in every field, got lengths {given}")
    # one copy to the host for each column, so the denoising loop never waits for the device
    noise, branch, keep, tail, solver = columns
    rows = (noise.tolist(), branch.tolist(), keep.tolist(), tail.tolist(), solver.tolist())
    steps = list(map(Step, *rows))
    # a plan is data that anybody may have made: what cannot be run is refused here
    for k, step in enumerate(steps):
        if (
            not (math.isfinite(step.noise_scale) and step.noise_scale >= 0)
            or step.tail < 0
            or not 0 <= step.keep <= step.branch
        ):
            raise ConfigError(
                f"plan step {k}: needs noise >= 0, 0 <= keep <= branch, tail >= 0, got {step}"
            )
        if step.noise_scale == 0 and (step.branch != 1 or step.keep != 1 or step.tail > 0):
            raise ConfigError(
                f"plan step {k}: forks and previews need noise, or they are all the same, got "
                f"{step}"
            )
        if step.keep == 0 and k + 1 < size and step.tail < size:
            raise ConfigError(
                f"plan step {k}: children that do not go on (keep=0) need a tail to the end, got "
                f"{step}"
            )
        if step.solver not in (1, 2):
            raise ConfigError(
                f"plan step {k}: solver must be 1 (Euler) or 2 (DPM-Solver++ 2M), got {step.solver}"
            )
    _check_rest(plan)
    return steps


def steps_on(plan: Plan, sigmas: Tensor) -> list[Step]:
    """Return `steps_of` a plan that is run on sigmas [S+1]. Raises ConfigError unless it has S
    steps, and is one for all prompts."""
    if plan.windows is not None:
        raise ConfigError("a plan with windows of each prompt is run by `engine.sample`")
    steps = steps_of(plan)
    if len(sigmas) != len(steps) + 1:
        raise ConfigError(
            f"a plan of {len(steps)} steps needs {len(steps) + 1} sigmas, got {len(sigmas)}"
        )
    return steps


def stops(here: int, end: int, tail: int, stride: int) -> list[int]:
    """List the grid places of a tail from place `here` to `end`: every stride-th after the first
    step, or `tail` steps.

    A tail of at least all steps takes them, each stride-th with a stride (G2RPO, 2510.01982: the
    first step is whole); a shorter one spreads its steps evenly.
    """
    if stride > 1:
        return [here, *range(here + 1, end, stride), end]
    count = min(tail, end - here)
    return [here + (end - here) * j // count for j in range(count + 1)]


def baseline_steps(plan: Plan) -> int:
    """Say in how many steps the image without any draw is finished: in those of a preview that is
    short but no jump, so that the two can be compared; else in all."""
    longest = int(plan.tail.max())
    return longest if 1 < longest < len(plan.noise) else len(plan.noise)


def trunk_ends(steps: list[Step]) -> int | None:
    """Say after which step a trunk that only carries forks ends; None if it goes on and is
    finished."""
    last = None
    for k, step in enumerate(steps):
        if step.noise_scale > 0:
            last = k
    return last if last is not None and steps[last].keep == 0 else None


def counts(plan: Plan, copies: int = 1) -> PlanCounts:
    """Count a plan for `copies` samples of one initial noise: exactly the network calls that the
    engine makes."""
    one = _one(plan)
    if plan.stored is not None:
        return PlanCounts(0, copies, 0, 0, 0)
    if copies == 1:
        return one
    steps, ends = steps_of(plan), trunk_ends(steps_of(plan))
    # they are one sample until the first draw that goes on; a trunk beside its draws stays one
    goes_on = [k for k, step in enumerate(steps) if step.noise_scale > 0 and step.keep > 0]
    last = goes_on[0] if goes_on else len(steps) - 1 if ends is None else ends
    shared = last + baseline_steps(plan) if plan.baseline else last + 1
    states = sum(step.noise_scale > 0 for step in steps[: min(last + 1, len(steps) - 1)])
    all_of = PlanCounts(*(copies * number for number in one))
    return all_of._replace(
        nfe=all_of.nfe - (copies - 1) * shared, states=all_of.states - (copies - 1) * states
    )


def _one(plan: Plan) -> PlanCounts:
    """Count a plan per sample."""
    steps = steps_of(plan)
    end, ends = len(steps), trunk_ends(steps)
    # live: samples under way; paid: their velocity was computed before, for a preview or baseline
    live, paid = 1, False
    nfe = leaves = decisions = states = edges = 0
    if plan.baseline:
        nfe, leaves, paid = baseline_steps(plan), 1, True  # its first velocity is the trunk's
    # a trunk that only carries forks is not run further than the last of them
    for k, step in enumerate(steps[: None if ends is None else ends + 1]):
        nfe += 0 if paid else live
        children, paid = live * step.branch, False
        edges += children
        # draws of the last step are no decisions: they are not trained
        if k + 1 == end:
            return PlanCounts(nfe, leaves + children, decisions, states, edges)
        if step.noise_scale == 0:
            continue
        decisions, states = decisions + children, states + live
        if step.tail:
            leaves += children * len(plan.strides)
            nfe += children * _tail_calls(k + 1, end, step.tail, plan.strides)
            paid = step.keep > 0  # a preview's first velocity is the next step's
        live *= max(step.keep, 1)
    return PlanCounts(nfe, leaves, decisions, states, edges)


def leaves_per_root(plan: Plan) -> int:
    """Count the images that one initial noise ends in, previews included."""
    return counts(plan).leaves


def roots_for(plan: Plan, images: int) -> int:
    """Say how many roots per prompt give `images` images per prompt. Raises ConfigError if they
    do not divide."""
    leaves = leaves_per_root(plan)
    if images < 1 or images % leaves:
        near = sorted({max(1, images // leaves) * leaves, (images // leaves + 1) * leaves})
        raise ConfigError(
            f"a group of {images} images per prompt is not a multiple of the {leaves} leaves "
            "that this plan gives "
            f"per initial noise; use {' or '.join(map(str, near))}"
        )
    return images // leaves


def _tail_calls(here: int, end: int, tail: int, strides: tuple[int, ...]) -> int:
    """Count the velocities of a child's tails: the first two places are common to all strides."""
    common, apart = set(), 0
    for stride in strides:
        for place in stops(here, end, tail, stride)[:-1]:
            if place <= here + 1:
                common.add(place)
            else:
                apart += 1
    return len(common) + apart


def _check_rest(plan: Plan) -> None:
    size = len(plan.noise)
    if min(plan.strides, default=0) < 1:
        raise ConfigError(
            f"a plan's strides must be whole numbers of at least 1, got {plan.strides}"
        )
    # strides thin out a tail of all steps; a shorter one spreads its few steps itself
    if plan.strides != (1,) and any(0 < tail < size for tail in plan.tail.tolist()):
        raise ConfigError(
            f"a plan's strides={plan.strides} need tails to the end, got tails {plan.tail.tolist()}"
        )
    if not 0 <= plan.share <= 1 or not (math.isfinite(plan.stretch) and plan.stretch > 0):
        raise ConfigError(
            f"a plan needs 0 <= share <= 1 and stretch > 0, got {plan.share} and {plan.stretch}"
        )
    if plan.sigma_grid is not None and len(plan.sigma_grid.places) != size + 1:
        raise ConfigError(
            f"a plan of {size} steps needs {size + 1} places of its grid, got "
            f"{len(plan.sigma_grid.places)}"
        )


def read_sigma_grid(sigmas: Tensor, grid: SigmaGrid) -> Tensor:
    """Read the model's sigmas [N+1] at the places of `grid` -> [S+1] in their dtype, by linear
    interpolation in time.

    Time is u with ``sigma = S(u; shift) = shift u / (1 + (shift - 1) u)``. At whole places the
    model's own values come back to the last bit. Computed in float64.

    Raises: ConfigError if `sigmas` is another grid than the one the places belong to, or a place is
    outside of it.
    """
    places = grid.places.to(sigmas.device, torch.float64)
    if (
        len(sigmas) != grid.steps + 1
        or bool((places < 0).any())
        or bool((places > grid.steps).any())
    ):
        raise ConfigError(
            f"a grid of places from {places.min().item():g} to {places.max().item():g} of "
            f"{grid.steps} steps needs "
            f"{grid.steps + 1} sigmas and places from 0 to {grid.steps}, got {len(sigmas)} sigmas"
        )
    wide = sigmas.double()
    time = wide / (grid.shift - (grid.shift - 1) * wide)
    below = places.floor().long().clamp(max=grid.steps - 1)
    between = shift_sigmas(torch.lerp(time[below], time[below + 1], places - below), grid.shift)
    near = places.round()
    out = torch.where(places == near, sigmas[near.long()], between.to(sigmas.dtype))
    # the ends, where a solver cannot bear the model's own
    out = out.clamp(max=grid.first)
    if grid.halve_last:
        out[-2] = out[-3] / 2
    return out


def flash_places(steps: int, last: int, ratio: float) -> Tensor:
    """Keep the grid of `steps` steps up to the one after step `last`, then fewer even ones ->
    places [S+1] float64.

    The rest has ``n = int(max((steps - last) * ratio, 1))`` points, its first included: n - 1
    steps. 25 steps, last 3 and ratio 0.4 give 4 + 7 = 11 steps (MixGRPO-Flash, 2507.21802 and its
    code, where an n of 1 ends the sampling at a noisy image: an error here).

    Raises: ConfigError for `last` outside the steps, a ratio outside (0, 1], or one point left.
    """
    if not (0 <= last < steps and 0 < ratio <= 1):
        raise ConfigError(
            "a coarse grid after the window needs 0 <= last < steps and 0 < ratio <= 1, got the "
            "window's last step "
            f"last={last} of steps={steps} and ratio={ratio}"
        )
    # rounded as the published code does
    points = int(max((steps - last) * ratio, 1))
    if points < 2:
        raise ConfigError(
            f"a coarse grid after step last={last} of steps={steps} with ratio={ratio} has one "
            "point: (steps - last) * "
            f"ratio = {(steps - last) * ratio:g}, and sampling would stop at place {last + 1} of "
            f"{steps}; it needs "
            f"last <= {steps - 2 / ratio:g} or ratio >= 2 / {steps - last}"
        )
    # fine places up to the window's end, then even ones up to the clean image
    first = last + 1
    rest = first + torch.arange(1, points, dtype=torch.float64) * (steps - first) / (
        points - 1
    )  # the end is exact
    return torch.cat([torch.arange(first + 1, dtype=torch.float64), rest])


# ------------------------------------------------------------- noise on steps of a prompt's own


def windows_of(plan: Plan) -> list[Plan]:
    """List the plans that a prompt may get, the noisiest window first; [plan] if all get one."""
    if plan.windows is None:
        return [plan]
    steps = plan.noise.nonzero().flatten().tolist()
    return [windowed(plan, first) for first in steps[: len(steps) - plan.windows[1] + 1]]


def plan_of(plan: Plan, place: int) -> Plan:
    """Return the plan of the prompt at a place of the iteration: the same in every process, and
    after a resume."""
    if plan.windows is None:
        return plan
    steps, (text, size) = plan.noise.nonzero().flatten().tolist(), plan.windows
    # a text seed: CPython hashes it with SHA-512, the same on every machine
    first = random.Random(f"{text} {place}").randint(0, len(steps) - size)
    return windowed(plan, steps[first])


def total_counts(plan: Plan, prompts: int, roots: int, *, same_noise: bool) -> PlanCounts:
    """Count what a plan costs for `prompts` prompts of `roots` initial noises each, which are one
    with `same_noise`."""
    copies, times = (roots, 1) if same_noise else (1, roots)
    if plan.windows is None:
        times, each = times * prompts, [counts(plan, copies)]
    else:
        each = [counts(plan_of(plan, place), copies) for place in range(prompts)]
    return PlanCounts(*(times * sum(column) for column in zip(*each, strict=True)))


def windowed(plan: Plan, first: int) -> Plan:
    """Keep the noise of the window that begins at step `first`."""
    assert plan.windows is not None
    steps = torch.arange(len(plan.noise))
    inside = (steps >= first) & (steps < first + plan.windows[1])
    return plan._replace(noise=torch.where(inside, plan.noise, 0.0), windows=None)
