"""Train the models that learn along with the policy, before it learns in an iteration."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.nodes import count_trained, states_of, trained_nodes
from flowrl.core.errors import RunError
from flowrl.core.host_copies import checked_later
from flowrl.core.processes import whole
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import Batch, Eval, LossInput, Rollout
from flowrl.training.companions import calls_of, slow
from flowrl.training.metrics import Trained, reduce_metrics
from flowrl.training.minibatches import Minibatch, NetworkCall, cut, deal
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import NodeTable, SharedForest


class Along(NamedTuple):
    """What training along gave and cost in this process."""

    metrics: dict[str, float]  # named after their companion
    cost: tuple[int, int]  # network calls, and rows that went backward


class CompanionUpdate(NamedTuple):
    """One update of one companion."""

    name: str
    rollout: Rollout
    table: NodeTable
    streams: NodeStreams
    siblings: Tensor | None  # [v] int64  the leaves of the node's prompt, where there are segments


def learn_along(
    run: Setup, ro: Rollout, table: NodeTable, local: NodeTable, forest: SharedForest
) -> Along:
    """Make all updates of the companions, one after the other.

    table, local: of the nodes of the whole forest, and of this process'. Raises RunError for a
    gradient that is not finite.
    """
    metrics: dict[str, float] = {}
    calls = backwards = 0
    count = None
    if table.segment is not None and run.companions.roles:
        everyone = torch.arange(len(ro.tree.parent), device=ro.tree.parent.device)
        count = count_trained(ro, "leaves", everyone)
    for name, role in run.companions.roles.items():
        if not role.learns(run.iteration):
            continue
        # a companion may take several steps for one of the policy, each with noise of its own
        seen: list[Trained] = []
        norms: list[float] = []
        for update in range(role.updates):
            keys = (run.config.seed, name, run.iteration, update)
            phase = CompanionUpdate(name, ro, local, NodeStreams(ro.tree.group, *keys), count)
            parts, norm = _update(run, phase, table, forest, update)
            seen += parts
            norms.append(norm)
        # its slow copy follows the trained weights, as an EMA does
        if "slow" in role.looks_at:
            done = (run.iteration + 1) * role.updates
            run.weights.lerp(slow(name), role.slow_decay(done), towards=name)
        # of the metrics only those that its loss returned, under its name
        found = reduce_metrics(seen, norms, run.world)
        own = {key for part in seen for key in part.metrics} | {"grad_norm"}
        metrics |= {f"{name}/{key}": found[key] for key in sorted(own) if key in found}
        rows = sum(len(part.node) for part in seen)
        calls += rows * calls_of(role)
        backwards += rows
    return Along(metrics, (calls, backwards))


def _update(
    run: Setup, phase: CompanionUpdate, table: NodeTable, forest: SharedForest, update: int
) -> tuple[list[Trained], float]:
    """Take one optimizer step of one companion over all trained nodes -> what its calls left,
    and the gradient's norm."""
    trains = run.method.likelihood.trains
    # the nodes that it learns from, dealt out alike in all processes
    rng = generator(run.config.seed, phase.name, "order", run.iteration, update)
    role = run.method.companions[phase.name]
    nodes = role.rows(forest.whole, trained_nodes(forest.whole, trains), rng)
    key = states_of(forest.whole, nodes, trains)
    key = key if table.segment is None else table.segment[nodes]
    dealt = deal(forest.whole, nodes, unit=key, updates=1, order="random", generator=rng)
    part = Minibatch(*(torch.cat(rows) for rows in zip(*dealt, strict=True)))
    mine = forest.own_part(part, phase.rollout)
    # the gradient of the copy, and its step
    with run.weights.training(phase.name):
        work = partial(_differentiate, run, phase, mine, len(part.node), update)
        parts = run.world.together(work)
        sum_gradients(run)
        norm = _step(run, phase.name)
    return parts, norm


def _differentiate(
    run: Setup, phase: CompanionUpdate, part: Minibatch, total: int, update: int
) -> list[Trained]:
    states = states_of(phase.rollout, part.node, run.method.likelihood.trains)
    calls = cut(part, states, run.config.train.micro_batch)
    updates, parts = run.companions.roles[phase.name].updates, []
    with checked_later():
        for number, call in enumerate(calls, 1):
            parts.append(_backward(run, phase, call, total, update))
            run.progress(update * len(calls) + number, updates * len(calls))
    return parts


def _backward(
    run: Setup, phase: CompanionUpdate, call: NetworkCall, total: int, update: int
) -> Trained:
    """Add the gradient of one network call, divided by the `total` nodes of the step."""
    role = run.companions.roles[phase.name]
    likelihood: Any = run.method.likelihood  # it generates, so it has queries
    queries = likelihood.queries
    batch = role.batch(phase.rollout, phase.table.advantage, call.node, phase.streams, queries)
    now = role.evaluate(run.model, batch)
    data = LossInput(batch, now, batch.old_log_prob, under=_others(run, phase.name, batch))
    if phase.table.segment is not None and phase.siblings is not None:
        segment, count = phase.table.segment[batch.node], phase.siblings[batch.node]
        scored = None if phase.table.scored is None else phase.table.scored[batch.node]
        data = data._replace(segment=segment, siblings=count, scored=scored)
    loss, metrics = role.loss(data)
    (loss.sum() / total).backward()  # type: ignore[no-untyped-call]
    metrics = {**metrics, "loss": loss.detach()}
    return Trained(metrics, batch.node, batch.step, batch.parent, update)


def _step(run: Setup, name: str) -> float:
    """Step a companion's optimizer -> the norm of its gradient. Raises RunError."""
    gradients = [p.grad for p in run.params.values() if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    size = float(norm)
    if not math.isfinite(size):
        run.optimizer.zero_grad(set_to_none=True)
        raise RunError(
            f"iteration {run.iteration}: the gradient of {name} is not finite; lower {name}.lr"
        )
    torch.nn.utils.clip_grads_with_norm_(run.params.values(), run.config.train.max_grad_norm, norm)
    run.intact = False
    run.companions.optimizers[name].step()
    run.companions.optimizers[name].zero_grad(set_to_none=True)
    return size


def _others(run: Setup, name: str, batch: Batch) -> dict[str, Eval]:
    """Evaluate a companion's batch under the other weights that it looks at."""
    role, under = run.method.companions[name], {}
    for other in role.looks_at:
        with torch.no_grad(), run.policy(slow(name) if other == "slow" else other):
            under[other] = role.evaluate(run.model, batch)
    return under


def sum_gradients(run: Setup) -> None:
    """Add up the gradients of all processes; what none of them reached has none, as in one
    process."""
    if run.world.alone or run.sharded:  # FSDP has added them up
        return
    reached = run.world.gather([p.grad is not None for p in run.params.values()])
    params = [p for p, *found in zip(run.params.values(), *reached, strict=True) if any(found)]
    for p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    run.world.sum_([p.grad for p in params if p.grad is not None])
