"""The forest engine: run a plan with a model and keep every decision, scored exactly as it was
stored.

Stored are roots, leaves and the nodes before and after each noisy step; runs without noise are one
edge, unless the plan keeps every step. v is evaluated once per live node, before it is repeated for
its children, the whole frontier in one batch (of at most `micro_batch`). A draw is rounded to
`store_dtype` before it is scored and before it is denoised further, so that a later evaluation sees
the very same numbers. All noise of prompt i comes from its own generator: the result depends
neither on `micro_batch` nor on which prompts run together. The loop reads no tensor's value, so it
never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from flowrl.algorithms.rollout.frontier import (
    ForestBuilder,
    Frontier,
    Sampling,
    apart,
    euler_step,
    given_latents,
    initial_latents,
    learned_noise,
    log_prob_of_draws,
    rounded,
    sibling_noise,
    sigma_rows,
    velocity,
    x0_estimate,
)
from flowrl.algorithms.rollout.plan_steps import Step, baseline_steps, steps_on, stops, trunk_ends
from flowrl.algorithms.rollout.sa_solver import check_adams, sa_step
from flowrl.algorithms.rollout.solvers import dpmpp_2m
from flowrl.algorithms.transitions import draw
from flowrl.core.errors import ConfigError
from flowrl.core.types import Cond, FlowModel, Gaussian, Plan, Rollout, Transition


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
    run = run._replace(
        plan=plan, keep_mean=keep_mean, history=any(step.solver > 1 for step in steps)
    )
    groups = torch.arange(len(generators)) if group_ids is None else group_ids
    forest = ForestBuilder(run, groups)
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
        leaves.append(_arrived(forest, live, len(steps)))
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
    x = initial_latents(run, 1 if same_noise else group_size)  # equal samples are computed once
    # Euler steps; the last ones with the weights that `late` puts in place
    steps = len(run.sigmas) - 1
    for k in range(steps):
        with late() if late is not None and k >= round(tuned * steps) else nullcontext():
            v = velocity(run, x, k)
        x = euler_step(run, x, v, k, k + 1)
    return apart(x, group_size if same_noise else 1)


def _roots(
    run: Sampling, forest: ForestBuilder, group_size: int, same_noise: bool, noise: Tensor | None
) -> Frontier:
    """Draw the initial noise, unless it is given, and store it; with same_noise one sample stands
    for a prompt's group."""
    copies = group_size if same_noise else 1
    if noise is None:
        x = initial_latents(run, 1 if same_noise else group_size)
    else:
        x = given_latents(run, noise)
    nowhere = torch.full((len(x) * copies,), -1)
    roots = forest.add(x, nowhere, 0, learned_noise(run, x, copies), copies=copies)
    return Frontier(x, roots, stored=True, copies=copies)


def _arrived(forest: ForestBuilder, live: Frontier, end: int) -> Tensor:
    """Store the clean latents, unless they are -> their ids."""
    if live.stored:
        return live.node
    return forest.add(live.x, live.node, end, copies=live.copies)


def _run_on(run: Sampling, live: Frontier, k: int, solver: int) -> Frontier:
    """Take step k without noise that is trained."""
    if run.plan.adams is not None:
        return sa_step(run, live, run.plan.adams, k)
    v = velocity(run, live.x, k) if live.v is None else live.v
    if solver == 1 or live.past is None:
        x = euler_step(run, live.x, v, k, k + 1)
    else:
        here, there, before = (sigma_rows(run, len(live.x), j) for j in (k, k + 1, k - 1))
        x = dpmpp_2m(live.x, v, here, there, live.past, before)
    return live._replace(x=x, stored=False, v=None, past=x0_estimate(run, live.x, v, k))


def _kept(run: Sampling, forest: ForestBuilder, live: Frontier, k: int) -> Frontier:
    """Store the states at place k of the grid."""
    x = rounded(run, live.x)
    node = forest.add(x, live.node, k, copies=live.copies)
    return live._replace(x=x, node=node, stored=True)


def _decide(
    run: Sampling, forest: ForestBuilder, live: Frontier, transition: Transition, k: int, step: Step
) -> tuple[Frontier, list[Tensor]]:
    """Draw every live node's children at step k -> the new frontier and the leaves hung under the
    children."""
    if not live.stored:  # training starts from the state of a draw, so that must be a node
        live = _kept(run, forest, live, k)._replace(past=None)
    v = velocity(run, live.x, k) if live.v is None else live.v
    trunk = live, v  # a trunk that goes on without noise stays one sample
    live, v = live._replace(x=apart(live.x, live.copies), copies=1), apart(v, live.copies)
    size = len(live.x)
    noise_scale = torch.full((size,), step.noise_scale, device=run.device)
    one = transition(live.x, v, sigma_rows(run, size, k), sigma_rows(run, size, k + 1), noise_scale)
    # one network call per state [F, *]; its children [F * branch, *] share the Gaussian
    many = Gaussian(
        one.mean.repeat_interleave(step.branch, 0), one.std.repeat_interleave(step.branch)
    )
    x = rounded(run, draw(many, sibling_noise(run, size, step.branch)))
    noisy = many.std > 0
    log_prob = torch.where(noisy, log_prob_of_draws(run, x, many), 0.0)
    made = (many.std, log_prob, noisy * step.noise_scale)
    node = forest.add(x, live.node.repeat_interleave(step.branch), k + 1, made, many.mean)
    if k + 2 == len(run.sigmas):
        return Frontier(x, node, True), []  # nothing goes on from here, so every child is a leaf
    # a preview's first velocity is also that of the next step: those that go on keep it
    v_next = velocity(run, x, k + 1) if step.tail else None
    leaves = (
        _tails(run, forest, Frontier(x, node, True, v_next), k + 1, step.tail, run.plan.strides)
        if step.tail
        else []
    )
    if step.keep == 0:
        return _run_on(run, trunk[0]._replace(v=trunk[1]), k, 1), leaves
    past = x0_estimate(run, live.x, v, k)
    v_kept = None if v_next is None else _first(v_next, step)
    past = None if past is None else past.repeat_interleave(step.keep, 0)
    return Frontier(_first(x, step), _first(node, step), True, v_kept, past), leaves


def _tails(
    run: Sampling,
    forest: ForestBuilder,
    live: Frontier,
    k: int,
    tail: int,
    strides: tuple[int, ...],
) -> list[Tensor]:
    """Finish live nodes at step k in at most `tail` Euler steps, once per stride -> leaf ids,
    stride by stride."""
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
    rows = {name: len(value) for name, value in cond.items()}
    if not generators or any(count != len(generators) for count in rows.values()):
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
    plan = Plan(nothing, nothing, nothing, nothing)
    return Sampling(
        model=model,
        cond=cond,
        sigmas=sigmas.float().tolist(),
        generators=generators,
        shape=tuple(shape),
        micro_batch=micro_batch,
        store=store,
        device=device,
        plan=plan,
        keep_mean=False,
        history=False,
    )


def _first(rows: Tensor, step: Step) -> Tensor:
    families = rows.reshape(-1, step.branch, *rows.shape[1:])
    return families[:, : step.keep].flatten(0, 1)
