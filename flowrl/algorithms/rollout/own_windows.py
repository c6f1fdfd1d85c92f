"""Plans in which each prompt has noise on steps of its own (Flash-GRPO, 2605.15980): which they
are, what that costs, and one forest of all prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.join import merge
from flowrl.algorithms.rollout.plan_steps import PlanCounts, counts
from flowrl.core.types import Cond, FlowModel, Plan, Rollout, Transition


def windows_of(plan: Plan) -> list[Plan]:
    """List the plans that a prompt may get, the noisiest window first; [plan] if all get one."""
    if plan.windows is None:
        return [plan]
    steps = plan.noise.nonzero().flatten().tolist()
    return [_windowed(plan, first) for first in steps[: len(steps) - plan.windows[1] + 1]]


def plan_of(plan: Plan, place: int) -> Plan:
    """Return the plan of the prompt at a place of the iteration: the same in every process, and
    after a resume."""
    if plan.windows is None:
        return plan
    steps, (text, size) = plan.noise.nonzero().flatten().tolist(), plan.windows
    # a text seed: CPython hashes it with SHA-512, the same on every machine
    first = random.Random(f"{text} {place}").randint(0, len(steps) - size)
    return _windowed(plan, steps[first])


def total_counts(plan: Plan, prompts: int, roots: int, *, same_noise: bool) -> PlanCounts:
    """Count what a plan costs for `prompts` prompts of `roots` initial noises each, which are one
    with `same_noise`."""
    copies, times = (roots, 1) if same_noise else (1, roots)
    if plan.windows is None:
        times, each = times * prompts, [counts(plan, copies)]
    else:
        each = [counts(plan_of(plan, place), copies) for place in range(prompts)]
    return PlanCounts(*(times * sum(column) for column in zip(*each, strict=True)))


def sample(
    model: FlowModel,
    cond: Cond,
    plan: Plan,
    transition: Transition,
    *,
    group_size: int,
    generators: list[torch.Generator],
    group_ids: Tensor,
    noise: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Rollout:
    """Sample as `rollout` does, each prompt along its own plan: those with the same noisy steps
    together, so that network calls are as full as they can be.

    A prompt's plan follows from its id in `group_ids` [G]. In the forest of all prompts, nodes of
    one kind and step stand together, prompt after prompt.
    """
    if plan.windows is None:
        options |= {"group_ids": group_ids, "noise": noise, "progress": progress}
        options |= {"group_size": group_size, "generators": generators}
        return rollout(model, cond, plan, transition, **options)
    # the rows of each window
    rows: dict[int, list[int]] = {}
    for row, place in enumerate(group_ids.tolist()):
        first = int(plan_of(plan, place).noise.nonzero().min())
        rows.setdefault(first, []).append(row)
    parts = []
    for number, first in enumerate(sorted(rows)):
        mine = torch.tensor(rows[first])
        starts = None if noise is None else noise.unflatten(0, (-1, group_size))
        part = rollout(
            model,
            {name: values[mine.to(values.device)] for name, values in cond.items()},
            _windowed(plan, first),
            transition,
            group_size=group_size,
            generators=[generators[row] for row in rows[first]],
            group_ids=group_ids[mine],
            noise=None if starts is None else starts[mine.to(starts.device)].flatten(0, 1),
            progress=_part_of(progress, number, len(rows)),
            **options,
        )
        parts.append(_labelled(part))
    whole = merge(parts)[0]
    return whole._replace(cond=cond, group_ids=group_ids.to(whole.group_ids.device))


def _windowed(plan: Plan, first: int) -> Plan:
    """Keep the noise of the window that begins at step `first`."""
    assert plan.windows is not None
    steps = torch.arange(len(plan.noise))
    inside = (steps >= first) & (steps < first + plan.windows[1])
    return plan._replace(noise=torch.where(inside, plan.noise, 0.0), windows=None)


def _labelled(part: Rollout) -> Rollout:
    """Number the blocks by the step and the kind of their nodes, the same in every window: states
    before draws, clean latents last."""
    end, tree = len(part.sigmas) - 1, part.tree
    return part._replace(block=2 * tree.step + ((tree.std > 0) & (tree.step < end)))


def _part_of(
    progress: Callable[[int, int], None] | None, number: int, parts: int
) -> Callable[[int, int], None] | None:
    """Say how much of a rollout is done of which this is one of several parts."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, parts * total)
