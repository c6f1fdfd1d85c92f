"""The forest engine: run a plan with a model and keep every decision, scored exactly as it was
stored.

Stored are roots, leaves and the nodes before and after each noisy step; runs without noise are one
edge, unless the plan keeps every step. v is evaluated once per sample in flight, before it is
repeated for its children, all samples in one batch (of at most `micro_batch`). A draw is rounded to
`store_dtype` before it is scored and before it is denoised further, so that a later evaluation sees
the very same numbers. All noise of prompt i comes from its own generator: the result depends
neither on `micro_batch` nor on which prompts run together. The loop reads no tensor's value, so it
never waits for the device.

The file reads downwards: what a pass holds, the two ways to sample, the steps, the forest that is
collected, how the network and the random streams are asked, and last prompts with noise on steps
of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.forest import merge
from flowrl.algorithms.rollout.plan_steps import (
    Step,
    baseline_steps,
    plan_of,
    steps_on,
    stops,
    trunk_ends,
    windowed,
)
from flowrl.algorithms.rollout.solvers import (
    check_adams,
    combined,
    correction,
    dpmpp_2m,
    prediction,
)
from flowrl.algorithms.transitions import draw, euler, gaussian_log_prob
from flowrl.core.devices import remember
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import wide, x0_from
from flowrl.core.types import Adams, Cond, FlowModel, Gaussian, Plan, Rollout, Transition, Tree

# ------------------------------------------------------------------------------ what a pass holds


class Sampling(NamedTuple):
    """What does not change during one sampling pass. Each prompt always owns an equal, consecutive
    share of rows."""

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


class Memory(NamedTuple):
    """What SA-Solver keeps of a step: the state that it began with, the x0 estimate there, and the
    noise that was drawn."""

    x: Tensor  # [F, *]
    x0: Tensor  # [F, *]
    noise: Tensor | None  # [F, *]


class Live(NamedTuple):
    """The samples in flight: those that are still being denoised."""

    x: Tensor  # [F, *]
    # [F] int64 on the host: the last stored node above, or at, x; [F * copies] before the first
    # draw
    node: Tensor
    stored: bool  # x is that node itself, not an ODE run past it
    v: Tensor | None = None  # velocity at x where a preview has already paid for it
    # [F, *] x0 estimate of the step before, where steps of second order are to come
    past: Tensor | None = None
    copies: int = 1  # samples that are still one: each row of x, v and past stands for so many
    memory: Memory | None = None  # of the step before, with SA-Solver


# -------------------------------------------------------------------------- the two ways to sample


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
    noise: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Sample a forest: `group_size` roots for each prompt, run along the plan.

    With same_noise the roots of a prompt are one sample until the first draw, and are computed as
    one.

    Args: cond {name: [G, ...]}; sigmas [S+1]; shape of one latent; generators: one per prompt;
    group_ids [G]: prompt ids that are unique across ranks; same_noise: one initial noise for the
    whole group (DanceGRPO); keep_mean: also keep each draw's mean; noise [G * group_size, *]:
    initial noise of std 1 in place of what would be drawn; progress: called with (steps done,
    steps). Raises: ConfigError if plan, sigmas, cond and generators do not fit together.
    """
    steps = steps_on(plan, sigmas)
    if plan.adams is not None:
        check_adams(plan.adams, any(step.noise_scale > 0 for step in steps), same_noise)
    run = _start(model, cond, sigmas, shape, generators, micro_batch, store_dtype)
    second_order = plan.solver is not None and bool((plan.solver > 1).any())
    run = run._replace(plan=plan, keep_mean=keep_mean, history=second_order)
    forest = ForestBuilder(run, torch.arange(len(generators)) if group_ids is None else group_ids)
    # the roots, and their leaves without noise
    live = _roots(run, forest, group_size, same_noise, noise)
    leaves: list[Tensor] = []
    if plan.baseline:
        live = live._replace(v=velocity(run, live.x, 0))
        leaves += _tails(run, forest, live, 0, baseline_steps(plan), (1,))
    # step by step, as far as anybody goes on
    ends = trunk_ends(steps)
    for k, step in enumerate(steps if ends is None else steps[: ends + 1]):
        if step.noise_scale == 0:
            live = _run_on(run, live, k, step.solver)
            if plan.every_step and k + 1 < len(steps):
                live = _kept(run, forest, live, k + 1)
        else:
            live, previews = _decide(run, forest, live, transition, k, step)
            leaves += previews
        if progress is not None:
            progress(k + 1, len(steps))
    # what has arrived is a leaf
    if ends is None or ends + 1 == len(steps):
        node, end = live.node, len(steps)
        leaves.append(node if live.stored else forest.add(live.x, node, end, copies=live.copies))
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
    """Sample x0 [G * group_size, *] by plain Euler, from the initial noise that `rollout` would
    draw.

    Hybrid inference (MixGRPO, 2507.21802): from step ``round(tuned * steps)`` on, the velocity is
    computed inside ``late()``, which puts the base model's weights in place. Raises ConfigError for
    a `tuned` outside [0, 1], or below 1 without `late`.
    """
    # a share of steps for the base model needs its weights
    if not 0 <= tuned <= 1:
        raise ConfigError(
            "sampling: the share of steps with the trained weights must lie in [0, 1], got "
            f"{tuned=}"
        )
    if tuned < 1 and late is None:
        raise ConfigError(
            f"sampling: {tuned=} leaves steps to the base model, whose weights are not at hand; "
            "hand over `late`, or the `base` that flowrl.runs.open_run.load_run returns"
        )
    # each different initial noise once
    run = _start(model, cond, sigmas, shape, generators, micro_batch, torch.float32)
    x = initial_latents(run, 1 if same_noise else group_size)
    # Euler steps; the last ones with the weights that `late` puts in place
    steps = len(run.sigmas) - 1
    for k in range(steps):
        with late() if late is not None and k >= round(tuned * steps) else nullcontext():
            v = velocity(run, x, k)
        x = euler_step(run, x, v, k, k + 1)
    return apart(x, group_size if same_noise else 1)


def _start(
    model: FlowModel,
    cond: Cond,
    sigmas: Tensor,
    shape: tuple[int, ...],
    generators: list[torch.Generator],
    micro_batch: int | None,
    store: torch.dtype,
) -> Sampling:
    # every row of the conditioning draws noise of its own
    rows = {}
    for name, value in cond.items():
        rows[name] = len(value)
    if not generators or {*rows.values()} - {len(generators)}:
        raise ConfigError(
            f"a rollout needs one generator per row of cond: {len(generators)} generators, rows "
            f"{rows}"
        )
    if micro_batch is not None and micro_batch < 1:
        raise ConfigError(
            f"micro_batch must be at least 1, got {micro_batch}; leave it out for one batch"
        )
    # latents lie where the conditioning is
    device = next(iter(cond.values())).device if cond else generators[0].device
    nothing = torch.zeros(0)  # no steps: `rollout` puts its own plan here
    return Sampling(
        model=model,
        cond=cond,
        sigmas=sigmas.float().tolist(),
        generators=generators,
        shape=tuple(shape),
        micro_batch=micro_batch,
        store=store,
        device=device,
        plan=Plan(nothing, nothing, nothing, nothing),
        keep_mean=False,
        history=False,
    )


# --------------------------------------------------------------------------------------- the steps


def _roots(
    run: Sampling, forest: ForestBuilder, group_size: int, same_noise: bool, noise: Tensor | None
) -> Live:
    """Draw the initial noise, unless it is given, and store it; with same_noise one sample stands
    for a prompt's group."""
    copies = group_size if same_noise else 1
    if noise is None:
        x = initial_latents(run, 1 if same_noise else group_size)
    else:
        x = rounded(run, noise * noise_std(run.sigmas))
    nowhere = torch.full((len(x) * copies,), -1)
    # a model that learns its noise can score it
    scored = hasattr(run.model, "initial_log_prob")
    made = learned_noise(run, x, copies) if scored else None
    roots = forest.add(x, nowhere, 0, made, copies=copies)
    return Live(x, roots, stored=True, copies=copies)


def _kept(run: Sampling, forest: ForestBuilder, live: Live, k: int) -> Live:
    """Store the states at place k of the grid."""
    x = rounded(run, live.x)
    node = forest.add(x, live.node, k, copies=live.copies)
    return live._replace(x=x, node=node, stored=True)


def _run_on(run: Sampling, live: Live, k: int, solver: int) -> Live:
    """Take step k without noise that is trained."""
    if run.plan.adams is not None:
        return _sa_step(run, live, run.plan.adams, k)
    v = velocity(run, live.x, k) if live.v is None else live.v
    if solver == 1 or live.past is None:
        x = euler_step(run, live.x, v, k, k + 1)
    else:
        here, there, before = (sigma_rows(run, len(live.x), j) for j in (k, k + 1, k - 1))
        x = dpmpp_2m(live.x, v, here, there, live.past, before)
    past = x0_estimate(run, live.x, v, k) if run.history else None
    return live._replace(x=x, stored=False, v=None, past=past)


def _sa_step(run: Sampling, live: Live, adams: Adams, k: int) -> Live:
    """Take step k of SA-Solver: evaluate, correct the state that the last step came to, predict the
    next one.

    The first step is not corrected; the last returns the newest x0 estimate.
    """
    memory, x = live.memory, live.x
    x0 = x - run.sigmas[k] * velocity(run, x, k)
    if k + 2 == len(run.sigmas):
        return live._replace(x=x0, stored=False, memory=None)
    # correct with the estimate at the predicted state, and with the noise of the prediction
    if memory is not None and k > 1:
        x = combined(correction(run.sigmas, adams, k), memory.x, x0, memory.x0, memory.noise)
    # predict
    made = prediction(run.sigmas, adams, k, first=memory is None)
    noise = sibling_noise(run, len(x), 1) if made.noise else None
    predicted = combined(made, x, x0, None if memory is None else memory.x0, noise)
    return live._replace(x=predicted, stored=False, memory=Memory(x, x0, noise))


def _decide(
    run: Sampling, forest: ForestBuilder, live: Live, transition: Transition, k: int, step: Step
) -> tuple[Live, list[Tensor]]:
    """Draw the children of every sample in flight at step k -> those that go on, and the leaves
    hung under the children."""
    if not live.stored:  # training starts from the state of a draw, so that must be a node
        live = _kept(run, forest, live, k)._replace(past=None)
    v = velocity(run, live.x, k) if live.v is None else live.v
    trunk = live._replace(v=v)  # a trunk that goes on without noise stays one sample
    live, v = live._replace(x=apart(live.x, live.copies), copies=1), apart(v, live.copies)
    size = len(live.x)
    noise_scale = torch.full((size,), step.noise_scale, device=run.device)
    one = transition(live.x, v, sigma_rows(run, size, k), sigma_rows(run, size, k + 1), noise_scale)
    # one network call per state [F, *]; its children [F * branch, *] share the Gaussian
    mean, std = one.mean.repeat_interleave(step.branch, 0), one.std.repeat_interleave(step.branch)
    many = Gaussian(mean, std)
    x = rounded(run, draw(many, sibling_noise(run, size, step.branch)))
    noisy = std > 0
    log_prob = torch.where(noisy, log_prob_of_draws(run, x, many), 0.0)
    made = (std, log_prob, noisy * step.noise_scale)
    node = forest.add(x, live.node.repeat_interleave(step.branch), k + 1, made, mean)
    if k + 2 == len(run.sigmas):
        return Live(x, node, True), []  # nothing goes on from here, so every child is a leaf
    # a preview's first velocity is also that of the next step: those that go on keep it
    leaves, v_kept = [], None
    if step.tail:
        v_next = velocity(run, x, k + 1)
        children = Live(x, node, True, v_next)
        leaves = _tails(run, forest, children, k + 1, step.tail, run.plan.strides)
        v_kept = _first(v_next, step)
    if step.keep == 0:
        return _run_on(run, trunk, k, 1), leaves
    past = None
    if run.history:
        past = x0_estimate(run, live.x, v, k).repeat_interleave(step.keep, 0)
    return Live(_first(x, step), _first(node, step), True, v_kept, past), leaves


def _tails(
    run: Sampling, forest: ForestBuilder, live: Live, k: int, tail: int, strides: tuple[int, ...]
) -> list[Tensor]:
    """Finish samples at step k in at most `tail` Euler steps, once per stride -> leaf ids, stride
    by stride."""
    end, leaves = len(run.sigmas) - 1, []
    shared: dict[int, Tensor] = {} if live.v is None else {k: live.v}
    for stride in strides:
        x, places = live.x, stops(k, end, tail, stride)
        for here, there in pairwise(places):
            v = shared[here] if here in shared else velocity(run, x, here)
            if len(strides) > 1 and here <= k + 1:  # all strides pass here in the same state
                shared[here] = v
            x = euler_step(run, x, v, here, there)
        leaves.append(forest.add(x, live.node, end, copies=live.copies))
    return leaves


def _first(rows: Tensor, step: Step) -> Tensor:
    """Pick the children that go on."""
    families = rows.reshape(-1, step.branch, *rows.shape[1:])
    return families[:, : step.keep].flatten(0, 1)


# ----------------------------------------------------------------------- the forest that is stored


@dataclass
class Blocks:
    """Nodes that were made together, block after block."""

    rows: list[tuple[Tensor, ...]] = field(default_factory=list)
    count: int = 0


class ForestBuilder:
    """Collect nodes block by block; a node's id is its place in the concatenation. `group_ids` [G]:
    the prompts of its trees.

    Clean nodes, at the end of the grid, are leaves and stand behind all others: nothing is below
    them, and their latents can be dropped once they are decoded.
    """

    def __init__(self, run: Sampling, group_ids: Tensor) -> None:
        self.run, self.group_ids = run, group_ids.long().cpu()
        self.inner, self.clean = Blocks(), Blocks()

    def add(
        self,
        x: Tensor,
        parent: Tensor,
        step: int,
        made: tuple[Tensor, Tensor, Tensor] | None = None,
        mean: Tensor | None = None,
        copies: int = 1,
    ) -> Tensor:
        """Store x [F, *] under parent [F]; `made` = (std, log_prob, noise_scale) of the draw. ->
        ids [F] on the host; those of clean nodes count from the first of these.

        With `copies` each row is stored so many times, under parent [F * copies] -> ids [F *
        copies].
        """
        # clean nodes are numbered apart from the others: they end up behind them
        blocks = self.clean if step == len(self.run.sigmas) - 1 else self.inner
        x = apart(x, copies)
        size = len(x)
        # prompts own equal, consecutive shares of the rows; a node without a draw has zeros
        group = self.group_ids.repeat_interleave(size // len(self.group_ids))
        zero = torch.zeros(size, device=x.device)
        std, log_prob, noise_scale = made or (zero, zero, zero)
        numbers = (std.float(), log_prob.double(), noise_scale.float())
        latents = [x.to(self.run.store)]
        if self.run.keep_mean:
            latents.append(x.float() if mean is None else mean.float())
        # twin: the first of a row's copies; block: which call of this made the nodes
        ids = torch.arange(blocks.count, blocks.count + size)
        twin = blocks.count + (ids - blocks.count) // copies * copies
        block = torch.full((size,), len(blocks.rows))
        steps = torch.full((size,), step)
        blocks.rows.append((twin, block, parent, steps, group, *numbers, *latents))
        blocks.count += size
        return ids

    def rollout(self, leaf: list[Tensor], sigmas: Tensor) -> Rollout:
        """Join the blocks to a Rollout with the leaves `leaf`, ids of clean nodes in parts, and the
        grid sigmas [S+1]."""
        device = self.run.device
        # clean nodes behind the others
        nodes, blocks = self.inner.count, len(self.inner.rows)
        clean = []
        for twin, block, *rest in self.clean.rows:
            clean.append((twin + nodes, block + blocks, *rest))
        joined = []
        for column in zip(*self.inner.rows, *clean, strict=True):
            joined.append(_sent(torch.cat(column), device))
        twin, block, parent, step, group, std, log_prob, noise_scale, x, *kept = joined
        return Rollout(
            tree=Tree(parent, step, std, group),
            x=x,
            log_prob=log_prob,
            noise_scale=noise_scale,
            leaf=_sent(torch.cat(leaf) + nodes, device),
            sigmas=_sent(sigmas, device),
            cond=self.run.cond,
            group_ids=_sent(self.group_ids, device),
            mean=kept[0] if kept else None,
            twin=twin,
            block=block,
        )


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    """Put rows on the device; what was on the host is known there still."""
    there = rows.to(device, non_blocking=True)
    return remember(there, rows) if rows.device.type == "cpu" else there


def apart(rows: Tensor, copies: int) -> Tensor:
    """Repeat each row [F, *] for the samples that it stands for -> [F * copies, *]."""
    return rows.repeat_interleave(copies, 0) if copies > 1 else rows


def rounded(run: Sampling, x: Tensor) -> Tensor:
    """Round latents [F, *] to the dtype in which they are stored -> [F, *] in the dtype of the
    arithmetic."""
    return wide(x.to(run.store))


# ------------------------------------------------------------- the network, asked in micro-batches


def velocity(run: Sampling, x: Tensor, k: int) -> Tensor:
    """Evaluate the network at x [F, *] and step k, in calls of at most `micro_batch` rows."""
    chunk = run.micro_batch or len(x)
    sigma, prompt = sigma_rows(run, len(x), k), _prompt_of_rows(run, len(x))
    found = []
    for start in range(0, len(x), chunk):
        some = slice(start, start + chunk)
        cond = {}
        for name, value in run.cond.items():
            cond[name] = value[prompt[some]]
        found.append(run.model.velocity(x[some], sigma[some], cond))
    return torch.cat(found).to(x.dtype)


def log_prob_of_draws(run: Sampling, x: Tensor, gaussian: Gaussian) -> Tensor:
    """Return the log-prob of draws x [F, *] -> [F]."""
    # in the micro-batches of training, because a reduction over dimensions may depend on the batch
    # in its last bit
    chunk, found = run.micro_batch or len(x), []
    for start in range(0, len(x), chunk):
        some = slice(start, start + chunk)
        found.append(gaussian_log_prob(x[some], gaussian.mean[some], gaussian.std[some]))
    return torch.cat(found)


def x0_estimate(run: Sampling, x: Tensor, v: Tensor, k: int) -> Tensor:
    """Estimate the clean latents [F, *] at step k."""
    return x0_from(x, v, sigma_rows(run, len(x), k))


def euler_step(run: Sampling, x: Tensor, v: Tensor, k: int, k_next: int) -> Tensor:
    """Take the ODE step from place k of the grid to place k_next -> [F, *]."""
    return euler(x, v, sigma_rows(run, len(x), k), sigma_rows(run, len(x), k_next))


def sigma_rows(run: Sampling, size: int, k: int) -> Tensor:
    """Return the sigma of step k for `size` rows -> [size]."""
    return torch.full((size,), run.sigmas[k], device=run.device)


def _prompt_of_rows(run: Sampling, size: int) -> Tensor:
    """Return which row of the conditioning each of `size` rows has -> [size]."""
    return torch.arange(size, device=run.device) // (size // len(run.generators))


# ------------------------------------------------------------------- noise, of each prompt's stream


def _noise(run: Sampling, size: int) -> Tensor:
    shape = (size // len(run.generators), *run.shape)
    dtype = torch.promote_types(run.store, torch.float32)
    parts = []
    for g in run.generators:
        parts.append(torch.randn(shape, generator=g, device=g.device, dtype=dtype))
    return torch.cat(parts).to(run.device, non_blocking=True)


def sibling_noise(run: Sampling, size: int, branch: int) -> Tensor:
    """Draw the noise of `branch` children of each of `size` nodes -> [size * branch, *]."""
    share, stretch = run.plan.share, run.plan.stretch
    if branch == 1:
        return _noise(run, size)
    if share == 0:
        noise = _noise(run, size * branch)
        return noise if stretch == 1 else noise * stretch
    # a part that siblings have in common, and one of their own
    common, own = _noise(run, size), _noise(run, size * branch)
    common = common.repeat_interleave(branch, 0)
    return (math.sqrt(share) * common + math.sqrt(1 - share) * own) * stretch


def initial_latents(run: Sampling, group_size: int) -> Tensor:
    """Draw `group_size` initial latents per prompt -> [G * group_size, *]. Raises ConfigError."""
    if group_size < 1:
        raise ConfigError(
            f"a rollout needs at least 1 root per prompt, got group_size={group_size}"
        )
    x = _noise(run, len(run.generators) * group_size)
    if hasattr(run.model, "initial_noise"):
        x = run.model.initial_noise(x, _cond_of_rows(run, len(x)))
    return rounded(run, x * noise_std(run.sigmas))


def learned_noise(run: Sampling, x: Tensor, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """Score initial noise x [R, *] by a model that learns it -> what a draw has, with std 0."""
    learner: Any = run.model
    log_prob = learner.initial_log_prob(x / noise_std(run.sigmas), _cond_of_rows(run, len(x)))
    zero = torch.zeros(len(x) * copies, device=x.device)
    return zero, apart(log_prob, copies), zero


def noise_std(sigmas: Sequence[float]) -> float:
    """Return the std of initial noise on a grid: 1 at sigma 1. Below it there is no pure noise: a
    variance-preserving model starts from N(0, 1) in its own coordinates."""
    return math.hypot(1 - sigmas[0], sigmas[0])


def _cond_of_rows(run: Sampling, size: int) -> Cond:
    """Copy each prompt's conditioning for its share of `size` rows -> {name: [size, ...]}."""
    row = _prompt_of_rows(run, size)
    return {name: value[row] for name, value in run.cond.items()}


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
            windowed(plan, first),
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
