"""The forest engine: run a plan with a model and keep every decision, scored exactly as it was stored.

Stored are roots, leaves and the nodes before and after each noisy step; runs without noise are one edge. v is evaluated
once per live node, before it is repeated for its children, the whole frontier in one batch (of at most `micro_batch`).
A draw is rounded to `store_dtype` before it is scored and before it is denoised further, so that a later evaluation
sees the very same numbers. All noise of prompt i comes from its own generator: the result depends neither on
`micro_batch` nor on which prompts run together. The loop reads no tensor's value, so it never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.flow import wide, x0_from
from flowrl.samplers.steps import Step, steps_of, stops, trunk_ends
from flowrl.solvers import dpmpp_2m
from flowrl.transitions import draw, euler, gaussian_log_prob
from flowrl.types import Cond, FlowModel, Gaussian, Plan, Rollout, Transition, Tree


class _Run(NamedTuple):
    """What does not change during one sampling pass. Each prompt always owns an equal, consecutive share of rows."""

    model: FlowModel
    cond: Cond
    sigmas: list[float]
    generators: list[torch.Generator]
    shape: tuple[int, ...]
    micro_batch: int | None
    store: torch.dtype
    device: torch.device
    plan: Plan
    keep_mean: bool
    history: bool  # keep the last x0 estimate, for steps of second order


class _Live(NamedTuple):
    """The frontier: the samples that are still being denoised."""

    x: Tensor  # [F, *]
    node: Tensor  # [F] int64 on the host: the last stored node above, or at, x; [F * copies] before the first draw
    stored: bool  # x is that node itself, not an ODE run past it
    v: Tensor | None = None  # velocity at x where a preview has already paid for it
    past: Tensor | None = None  # [F, *] x0 estimate of the step before, where steps of second order are to come
    copies: int = 1  # samples that are still one: each row of x, v and past stands for so many


class _Forest:
    """Collect nodes block by block; a node's id is its place in the concatenation."""

    def __init__(self, run: _Run, group_ids: Tensor) -> None:
        self.run, self.group_ids, self.count = run, group_ids.long().cpu(), 0
        self.blocks: list[tuple[Tensor, ...]] = []

    def add(
        self,
        x: Tensor,
        parent: Tensor,
        step: int,
        made: tuple[Tensor, Tensor, Tensor] | None = None,
        mean: Tensor | None = None,
        copies: int = 1,
    ) -> Tensor:
        """Store x [F, *] under parent [F]; `made` = (std, log_prob, level) of the draw. -> ids [F] on the host.

        With `copies` each row is stored so many times, under parent [F * copies] -> ids [F * copies].
        """
        x = _apart(x, copies)
        size = len(x)
        zero = torch.zeros(size, device=x.device)
        group = self.group_ids.repeat_interleave(size // len(self.group_ids))
        numbers = tuple(value.float() for value in made or (zero, zero, zero))
        latents = (x.to(self.run.store), *([x.float() if mean is None else mean.float()] * self.run.keep_mean))
        ids = torch.arange(self.count, self.count + size)
        twin = self.count + (ids - self.count) // copies * copies
        block = torch.full((size,), len(self.blocks))
        self.blocks.append((parent, torch.full((size,), step), group, twin, block, *numbers, *latents))
        self.count += size
        return ids

    def rollout(self, leaf: list[Tensor], sigmas: Tensor) -> Rollout:
        device = self.run.device
        columns = zip(*self.blocks, strict=True)
        joined = (torch.cat(column).to(device) for column in columns)
        parent, step, group, twin, block, std, log_prob, level, x, *kept = joined
        tree = Tree(parent, step, std, group)
        groups, leaves, mean = self.group_ids.to(device), torch.cat(leaf).to(device), kept[0] if kept else None
        return Rollout(tree, x, log_prob, level, leaves, sigmas.to(device), self.run.cond, groups, mean, twin, block)


@torch.no_grad()
def rollout(
    model: FlowModel,
    cond: Cond,
    plan: Plan,
    transition: Transition,
    *,
    sigmas: Tensor,
    shape: tuple[int, ...],
    group_size: int,
    generators: list[torch.Generator],
    group_ids: Tensor | None = None,
    same_noise: bool = False,
    micro_batch: int | None = None,
    store_dtype: torch.dtype = torch.float32,
    keep_mean: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Sample a forest: `group_size` roots for each prompt, run along the plan.

    With same_noise the roots of a prompt are one sample until the first draw, and are computed as one.

    Args: cond {name: [G, ...]}; sigmas [S+1]; shape of one latent; generators: one per prompt; group_ids [G]:
        prompt ids that are unique across ranks; same_noise: one initial noise for the whole group (DanceGRPO);
        keep_mean: also keep each draw's mean; progress: called with (steps done, steps).
    Raises: ConfigError if plan, sigmas, cond and generators do not fit together.
    """
    steps = _matched(steps_of(plan), sigmas)
    run = _start(model, cond, sigmas, shape, generators, micro_batch, store_dtype)
    run = run._replace(plan=plan, keep_mean=keep_mean, history=any(step.solver > 1 for step in steps))
    groups = torch.arange(len(generators)) if group_ids is None else group_ids
    forest, leaves = _Forest(run, groups), []
    x, copies = _roots(run, 1 if same_noise else group_size), group_size if same_noise else 1
    roots = forest.add(x, torch.full((len(x) * copies,), -1), 0, copies=copies)
    live = _Live(x, roots, stored=True, copies=copies)
    if plan.baseline:
        live = live._replace(v=_velocity(run, x, 0))
        leaves += _tails(run, forest, live, 0, len(steps), (1,))
    ends = trunk_ends(steps)
    for k, step in enumerate(steps if ends is None else steps[: ends + 1]):
        if step.level == 0:
            live = _run_on(run, live, k, step.solver)
        else:
            live, previews = _decide(run, forest, live, transition, k, step)
            leaves += previews
        if progress is not None:
            progress(k + 1, len(steps))
    if ends is None or ends + 1 == len(steps):
        leaves.append(live.node if live.stored else forest.add(live.x, live.node, len(steps), copies=live.copies))
    return forest.rollout(leaves, sigmas.float())


@torch.no_grad()
def sample_ode(
    model: FlowModel,
    cond: Cond,
    *,
    sigmas: Tensor,
    shape: tuple[int, ...],
    group_size: int,
    generators: list[torch.Generator],
    same_noise: bool = False,
    micro_batch: int | None = None,
    tuned: float = 1.0,
    late: Callable[[], AbstractContextManager[None]] | None = None,
) -> Tensor:
    """Sample x0 [G * group_size, *] by plain Euler, from the initial noise that `rollout` would draw.

    Hybrid inference (MixGRPO, 2507.21802): from step ``round(tuned * steps)`` on, the velocity is computed inside
    ``late()``, which puts the base model's weights in place. Raises ConfigError for a `tuned` outside [0, 1], or below
    1 without `late`.
    """
    if not 0 <= tuned <= 1:
        raise ConfigError(f"sampling: the share of steps with the trained weights must lie in [0, 1], got {tuned=}")
    if tuned < 1 and late is None:
        raise ConfigError(
            f"sampling: {tuned=} leaves steps to the base model, whose weights are not at hand; hand over `late`, or "
            "the `base` that flowrl.runs.load_run returns"
        )
    run = _start(model, cond, sigmas, shape, generators, micro_batch, torch.float32)
    x = _roots(run, 1 if same_noise else group_size)
    steps = len(run.sigmas) - 1
    for k in range(steps):
        with late() if late is not None and k >= round(tuned * steps) else nullcontext():
            v = _velocity(run, x, k)
        x = _euler(run, x, v, k, k + 1)
    return _apart(x, group_size if same_noise else 1)


def merge(parts: list[Rollout]) -> tuple[Rollout, Tensor, Tensor]:
    """Join rollouts of one plan, of ascending prompts, into the one that all prompts at once would have given.

    Returns the rollout; the new number of each node [V], part after part; and the order [L] in which leaves of the
    parts, one after the other, stand in it.
    """
    first = parts[0]
    if len(parts) == 1:
        return first, torch.arange(len(first.x)), torch.arange(len(first.leaf))
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + len(part.tree.parent))
    # Nodes that were made together stand together: within them by prompt, and in the order of their own part.
    order = torch.argsort(_cat([part.block for part in parts]), stable=True)
    place = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))

    def moved(ids: list[Tensor]) -> Tensor:
        return torch.cat(
            [torch.where(n < 0, -1, place[n.clamp_min(0) + at]) for n, at in zip(ids, starts, strict=False)]
        )

    columns = zip(*(part.tree[1:] for part in parts), strict=True)
    tree = Tree(moved([part.tree.parent for part in parts])[order], *(torch.cat(rows)[order] for rows in columns))
    x, log_prob, level = (torch.cat(rows)[order] for rows in zip(*(part[1:4] for part in parts), strict=True))
    leaf, block = moved([part.leaf for part in parts]), _cat([part.block for part in parts])[order]
    seen = torch.argsort(block[leaf], stable=True)
    cond = {name: torch.cat([part.cond[name] for part in parts]) for name in first.cond}
    ids = torch.cat([part.group_ids for part in parts])
    mean = None if first.mean is None else _cat([part.mean for part in parts])[order]
    twin = None if first.twin is None else moved([_known(part.twin) for part in parts])[order]
    change = None if first.change is None else _cat([part.change for part in parts])[order]
    whole = Rollout(tree, x, log_prob, level, leaf[seen], first.sigmas, cond, ids, mean, twin, block, change)
    return whole, place, seen


def _cat(rows: list[Tensor | None]) -> Tensor:
    return torch.cat([_known(row) for row in rows])


def _known(row: Tensor | None) -> Tensor:
    if row is None:
        raise ConfigError("only rollouts of `rollout`, and all alike, can be merged")
    return row


def _run_on(run: _Run, live: _Live, k: int, solver: int) -> _Live:
    """Take step k without noise."""
    v = _velocity(run, live.x, k) if live.v is None else live.v
    if solver == 1 or live.past is None:
        x = _euler(run, live.x, v, k, k + 1)
    else:
        here, there, before = (_sigma(run, len(live.x), j) for j in (k, k + 1, k - 1))
        x = dpmpp_2m(live.x, v, here, there, live.past, before)
    return live._replace(x=x, stored=False, v=None, past=_x0(run, live.x, v, k))


def _decide(
    run: _Run, forest: _Forest, live: _Live, transition: Transition, k: int, step: Step
) -> tuple[_Live, list[Tensor]]:
    """Draw every live node's children at step k -> the new frontier and the leaves hung under the children."""
    if not live.stored:
        x = _round(run, live.x)
        live = _Live(x, forest.add(x, live.node, k, copies=live.copies), stored=True, copies=live.copies)
    v = _velocity(run, live.x, k) if live.v is None else live.v
    live, v = live._replace(x=_apart(live.x, live.copies), copies=1), _apart(v, live.copies)
    size = len(live.x)
    level = torch.full((size,), step.level, device=run.device)
    one = transition(live.x, v, _sigma(run, size, k), _sigma(run, size, k + 1), level)
    many = Gaussian(one.mean.repeat_interleave(step.branch, 0), one.std.repeat_interleave(step.branch))
    x = _round(run, draw(many, _sibling_noise(run, size, step.branch)))
    noisy = many.std > 0
    log_prob = torch.where(noisy, _score(run, x, many), 0.0)
    made = (many.std, log_prob, noisy * step.level)
    node = forest.add(x, live.node.repeat_interleave(step.branch), k + 1, made, many.mean)
    past = _x0(run, live.x, v, k)
    if k + 2 == len(run.sigmas):
        return _Live(x, node, True), []  # nothing goes on from here, so every child is a leaf
    v_next = _velocity(run, x, k + 1) if step.tail else None
    leaves = _tails(run, forest, _Live(x, node, True, v_next), k + 1, step.tail, run.plan.strides) if step.tail else []
    if step.keep == 0:
        return _Live(_euler(run, live.x, v, k, k + 1), live.node, stored=False, past=past), leaves
    v_kept = None if v_next is None else _first(v_next, step)
    past = None if past is None else past.repeat_interleave(step.keep, 0)
    return _Live(_first(x, step), _first(node, step), True, v_kept, past), leaves


def _tails(run: _Run, forest: _Forest, live: _Live, k: int, tail: int, strides: tuple[int, ...]) -> list[Tensor]:
    """Finish live nodes at step k in at most `tail` Euler steps, once per stride -> leaf ids, stride by stride."""
    end, leaves = len(run.sigmas) - 1, []
    shared: dict[int, Tensor] = {} if live.v is None else {k: live.v}
    for stride in strides:
        x, places = live.x, stops(k, end, tail, stride)
        for here, there in pairwise(places):
            v = shared[here] if here in shared else _velocity(run, x, here)
            if len(strides) > 1 and here <= k + 1:  # all strides pass here in the same state
                shared[here] = v
            x = _euler(run, x, v, here, there)
        leaves.append(forest.add(x, live.node, end, copies=live.copies))
    return leaves


def _apart(rows: Tensor, copies: int) -> Tensor:
    return rows.repeat_interleave(copies, 0) if copies > 1 else rows


def _x0(run: _Run, x: Tensor, v: Tensor, k: int) -> Tensor | None:
    return x0_from(x, v, _sigma(run, len(x), k)) if run.history else None


def _velocity(run: _Run, x: Tensor, k: int) -> Tensor:
    size, chunk = len(x), run.micro_batch or len(x)
    row = torch.arange(size, device=run.device) // (size // len(run.generators))
    parts = zip(*(torch.split(rows, chunk) for rows in (x, _sigma(run, size, k), row)), strict=True)
    v = [run.model.velocity(xs, ss, {name: value[at] for name, value in run.cond.items()}) for xs, ss, at in parts]
    return torch.cat(v).to(x.dtype)


def _score(run: _Run, x: Tensor, gaussian: Gaussian) -> Tensor:
    # in the micro-batches of training, because a reduction over dimensions may depend on the batch in its last bit
    parts = zip(*(torch.split(rows, run.micro_batch or len(x)) for rows in (x, *gaussian)), strict=True)
    return torch.cat([gaussian_log_prob(*part) for part in parts])


def _euler(run: _Run, x: Tensor, v: Tensor, k: int, k_next: int) -> Tensor:
    return euler(x, v, _sigma(run, len(x), k), _sigma(run, len(x), k_next))


def _sigma(run: _Run, size: int, k: int) -> Tensor:
    return torch.full((size,), run.sigmas[k], device=run.device)


def _noise(run: _Run, size: int) -> Tensor:
    shape = (size // len(run.generators), *run.shape)
    dtype = torch.promote_types(run.store, torch.float32)
    parts = [torch.randn(shape, generator=g, device=g.device, dtype=dtype) for g in run.generators]
    return torch.cat(parts).to(run.device, non_blocking=True)


def _sibling_noise(run: _Run, size: int, branch: int) -> Tensor:
    """Draw the noise of `branch` children of each of `size` nodes -> [size * branch, *]."""
    if branch == 1 or run.plan.share == 0:
        noise = _noise(run, size * branch)
        return noise if branch == 1 or run.plan.stretch == 1 else noise * run.plan.stretch
    common, own = _noise(run, size), _noise(run, size * branch)
    share = run.plan.share
    return (math.sqrt(share) * common.repeat_interleave(branch, 0) + math.sqrt(1 - share) * own) * run.plan.stretch


def _roots(run: _Run, group_size: int) -> Tensor:
    if group_size < 1:
        raise ConfigError(f"a rollout needs at least 1 root per prompt, got group_size={group_size}")
    x = _noise(run, len(run.generators) * group_size)
    # Below sigma 1 there is no pure noise: a variance-preserving model starts from N(0, 1) in its own coordinates. At
    # sigma 1 the factor is 1.
    return _round(run, x * math.hypot(1 - run.sigmas[0], run.sigmas[0]))


def _round(run: _Run, x: Tensor) -> Tensor:
    return wide(x.to(run.store))


def _first(rows: Tensor, step: Step) -> Tensor:
    families = rows.reshape(-1, step.branch, *rows.shape[1:])
    return families[:, : step.keep].flatten(0, 1)


def _start(
    model: FlowModel,
    cond: Cond,
    sigmas: Tensor,
    shape: tuple[int, ...],
    generators: list[torch.Generator],
    micro_batch: int | None,
    store: torch.dtype,
) -> _Run:
    rows = {name: len(value) for name, value in cond.items()}
    if not generators or any(count != len(generators) for count in rows.values()):
        raise ConfigError(f"a rollout needs one generator per row of cond: {len(generators)} generators, rows {rows}")
    if micro_batch is not None and micro_batch < 1:
        raise ConfigError(f"micro_batch must be at least 1, got {micro_batch}; leave it out for one batch")
    device = next(iter(cond.values())).device if cond else generators[0].device
    nothing = torch.zeros(0)
    plan = Plan(nothing, nothing, nothing, nothing)
    levels = sigmas.float().tolist()
    return _Run(model, cond, levels, generators, tuple(shape), micro_batch, store, device, plan, False, False)


def _matched(steps: list[Step], sigmas: Tensor) -> list[Step]:
    if len(sigmas) != len(steps) + 1:
        raise ConfigError(f"a plan of {len(steps)} steps needs {len(steps) + 1} sigmas, got {len(sigmas)}")
    return steps
