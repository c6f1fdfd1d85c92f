"""What cases of published functions beside ours share: how they are compared, and on which forests.

A case returns what differs: {what: (largest difference, largest value of theirs)}. What is compared
is theirs as it is, in float32 or float64 as it computes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from sources import Source
from torch import Tensor

from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import gaussian_log_prob
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Plan, Rollout, Transition
from flowrl.models.toy import LinearFlow

Gaps = dict[str, tuple[float, float]]
SHAPE = (4, 8, 8)


class Case(NamedTuple):
    """What is compared, and where theirs is."""

    ours: str
    source: Source
    run: Callable[[dict[str, Any]], Gaps]


CASES: dict[str, Case] = {}
"""Name -> which published functions are run beside which of ours."""


def case(name: str, ours: str, place: str, path: str, names: str) -> Callable[[Any], Any]:
    """Enter a function that compares `ours` with functions of a file of "owner/name@commit"."""

    def entered(run: Callable[[dict[str, Any]], Gaps]) -> Any:
        repository, _, commit = place.partition("@")
        CASES[name] = Case(ours, Source(repository, commit, path, tuple(names.split())), run)
        return run

    return entered


def gap(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest value."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs.reshape(ours.shape)).abs().max()), float(theirs.abs().max())


def worst(gaps: list[Gaps]) -> Gaps:
    """Join the gaps of several steps: the largest of each."""
    out: Gaps = {}
    for one in gaps:
        for name, (difference, value) in one.items():
            before = out.get(name, (0.0, 0.0))
            out[name] = (max(before[0], difference), max(before[1], value))
    return out


def step_gaps(
    theirs: Callable[[Tensor, Tensor, Tensor], Tensor],
    ours: Callable[[Tensor, Tensor], Any],
    seed: int,
) -> Gaps:
    """Compare the log-prob of a step, and its gradient by the velocity, at random states.

    theirs(x, v, x_next) -> log-prob [B]; ours(x, v) -> mean and std.
    """
    draw = torch.Generator().manual_seed(seed)
    x, v, noise = torch.randn(3, 5, *SHAPE, generator=draw)
    with torch.no_grad():
        mean, std = ours(x, v)
    after = mean + std.view(-1, 1, 1, 1) * noise
    values, slopes = [], []
    for called in (lambda v: gaussian_log_prob(after, *ours(x, v)), lambda v: theirs(x, v, after)):
        v_ = v.clone().requires_grad_()
        value = called(v_)
        value.double().sum().backward()
        values.append(value)
        slopes.append(v_.grad)
    return {"log-prob": gap(*values), "its gradient": gap(*slopes)}


def all_steps(
    theirs: Callable[[int, Tensor, Tensor, Tensor], Tensor],
    ours: Callable[..., Any],
    sigmas: Tensor,
    *,
    steps: int,
    scale: float,
) -> Gaps:
    """Compare the first `steps` of a grid [S+1] -> the largest gaps.

    theirs(k, x, v, x_next) -> log-prob [B] of step k; ours(x, v, sigma, sigma_next, scale) -> mean
    and std.
    """
    gaps = []
    for k in range(steps):
        at = [torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], scale)]

        def taken(x: Tensor, v: Tensor, at: list[Tensor] = at) -> Any:
            return ours(x, v, *at)

        gaps.append(step_gaps(partial(theirs, k), taken, k))
    return worst(gaps)


def forest(
    plan: Plan, transition: Transition, *, prompts: int, group: int, sigmas: Tensor | None = None
) -> tuple[LinearFlow, Rollout]:
    """Sample from a toy field along a plan."""
    model = LinearFlow(channels=SHAPE[0])
    cond = model.encode([f"prompt {i}" for i in range(prompts)])
    streams = [torch.Generator().manual_seed(i) for i in range(prompts)]
    grid = linear_grid(len(plan.noise), 3.0) if sigmas is None else sigmas
    made = rollout(
        model, cond, plan, transition, group_size=group, generators=streams, sigmas=grid,
        shape=SHAPE,
    )  # fmt: skip
    return model, made
