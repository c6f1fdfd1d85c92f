"""The second half of an iteration: deal out what is trained, differentiate, step the optimizer."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from flowrl.algorithms.nodes import states_of
from flowrl.core.errors import RunError
from flowrl.core.host_copies import checked_later, on_host
from flowrl.core.processes import whole
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import Rollout
from flowrl.training import monitor_controls
from flowrl.training.checks import what_broke, what_gradient
from flowrl.training.learn_companions import learn_along, sum_gradients
from flowrl.training.learning_rate import lr_share
from flowrl.training.loss_input import LocalData, loss_input
from flowrl.training.method import unrolled_calls
from flowrl.training.metrics import KL_TERM, Trained, check_names, reduce_metrics
from flowrl.training.minibatches import Minibatch, NetworkCall, cut, deal
from flowrl.training.node_table import first_unit, node_table, units
from flowrl.training.refreshes import largest_kl, limits_of
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import NodeTable, SharedForest
from flowrl.training.velocity_length import velocity_length


class _Progress:
    """Tell a run how many of this process' nodes were differentiated, in all optimizer steps."""

    def __init__(self, run: Setup, total: int) -> None:
        self.run, self.total, self.done = run, total, 0

    def advance(self, nodes: int) -> None:
        self.done += nodes
        self.run.progress(self.done, self.total)


def learn(
    run: Setup,
    ro: Rollout,
    advantage: Tensor,
    rows: list[int],
    forest: SharedForest | None = None,
) -> dict[str, float]:
    """Make the iteration's optimizer steps from a rollout and the advantages [V] of the whole
    forest -> metrics.

    Every process deals out all nodes alike and differentiates its own; gradients are summed over
    processes. Raises RunError for a loss or gradient that is not finite; the weights are then those
    before the broken step.
    """
    forest = forest or SharedForest(ro)
    if "old" in run.method.snapshots and "old" not in run.method.copies:
        run.weights.snapshot("old")
    # what is trained, in the whole forest and here
    table = node_table(run, forest.whole, advantage)
    streams = NodeStreams(ro.tree.group, run.config.seed, "fresh", run.iteration)
    local = LocalData(ro, table.own(forest, ro), streams, tuple(rows))
    _read_ahead(run, ro, rows)
    # the models that are trained along
    along = learn_along(run, ro, table, local.table, forest)
    # one optimizer step per part
    seen: list[Trained] = []
    norms: list[float] = []
    outliers = 0
    follows = run.companions.trains_policy(run.iteration)
    updates = _updates(run, forest.whole, table) if follows else []
    lives = [_live(run, part, table) for part in updates]
    mines = [forest.own_part(live, ro) for live in lives]
    progress = _Progress(run, sum(len(mine.node) for mine in mines))
    taught = [table.advantage[live.node] for live in lives]
    judged = monitor_controls.informative(run.method.needs, taught)
    for update, (part, live, mine) in enumerate(zip(updates, lives, mines, strict=True)):
        _set_lr(run, run.iteration * run.config.train.updates + update)
        if not len(live.node):
            continue
        work = partial(_differentiate, run, local, mine, len(part.node), update, progress)
        parts = run.world.together(work)
        norm, usual = _optimizer_step(run, ro, parts, rows, update, judged[update])
        norms.append(norm)
        outliers += not usual
        seen += parts
    # what it cost
    spent = [_network_calls(run, part) for part in seen] + [along.cost]
    calls, backwards = run.world.totals(spent, 2)
    cost = {"nfe": float(run.cost.nfe + calls), "backwards": float(backwards)}
    # a policy that stands still was not idle
    metrics = reduce_metrics(seen, norms, run.world) if follows else {}
    if norms:
        metrics["grad_outliers"] = float(outliers)
    if limits_of(run.config):
        metrics["kl_most"] = largest_kl(seen, run.world)
    if "kl_factor" in run.memory:
        metrics["kl_weight"] = run.method.kl_beta * monitor_controls.kl_factor(run.memory)
    return metrics | along.metrics | cost | {"lr": float(run.optimizer.param_groups[0]["lr"])}


def _read_ahead(run: Setup, ro: Rollout, rows: list[int]) -> None:
    """Bring to the host what likelihoods read there, and encode real images, before the first
    network call."""
    for rows_of_all in (ro.sigmas, ro.tree.step, ro.tree.parent):
        on_host(rows_of_all)
    if run.real_images is not None:
        places, images = on_host(ro.group_ids).tolist(), run.real_images
        # a file that one process cannot read ends all of them
        run.world.together(lambda: images.prepare(run, places, rows))


def backward(
    run: Setup, local: LocalData, call: NetworkCall, total: int, update: int, *, idle: bool = False
) -> Trained:
    """Add the gradient of one network call, divided by the `total` nodes of its optimizer step.

    An `idle` one adds 0: under FSDP every process has to call the network as often as the others.
    """
    method, nodes = run.method, call.node
    # the batch under the current weights and the others that loss or penalty look at
    batch = method.likelihood.batch(local.rollout, local.table.advantage, nodes, local.streams)
    if method.likelihood.trains == "draws":
        batch = batch._replace(rows=call.rows)
    now = method.likelihood.evaluate(run.model, batch, method.transition)
    data, asked = loss_input(run, local, batch, now, update)
    # one value per row
    loss, metrics = method.loss(data)
    check_names(metrics)
    if method.select:
        loss = loss * local.table.factor[batch.node]
    if method.kl is not None:
        penalty = method.kl(data)
        if local.table.gate is not None:
            penalty = penalty * local.table.gate[batch.node]
        pull = method.kl_beta * monitor_controls.kl_factor(run.memory) * penalty
        loss = loss + pull
        metrics = {**metrics, "kl": penalty.detach(), KL_TERM: pull.detach()}
    # rows of one node share its part of the sum
    part = 0.0 if idle else len(nodes) / (len(loss) * total)
    watched = None if idle or now.v is None or not now.v.requires_grad else now.v
    if watched is not None:
        watched.retain_grad()  # type: ignore[no-untyped-call]
    (loss.sum() * part).backward()
    metrics = {**metrics, "loss": loss.detach()}
    metrics |= velocity_length(now, data.under, method.likelihood)
    if watched is not None and watched.grad is not None:
        metrics["velocity_grad"] = watched.grad.flatten(1).norm(dim=1).detach() / part
    calls = None if batch.unrolled is None else unrolled_calls(batch.unrolled)
    return Trained(metrics, batch.node, batch.step, batch.parent, update, calls, asked)


def _network_calls(run: Setup, part: Trained) -> tuple[int, int]:
    """Return the network calls that a part counts as, and its rows that went backward."""
    if part.calls is not None:
        return part.calls
    calls = run.method.trained_calls(part.update, run.steps_before, taught=False)
    rows = part.network_rows()
    backwards = rows * run.method.graphs if calls else 0
    return rows * calls + part.teachers_calls(), backwards


def _updates(run: Setup, ro: Rollout, table: NodeTable) -> list[Minibatch]:
    t = run.config.train
    nodes, key = units(run, ro, table)
    rng = generator(run.config.seed, "order", run.iteration)
    return deal(ro, nodes, unit=key, updates=t.updates, order=t.order, generator=rng)


def _live(run: Setup, part: Minibatch, table: NodeTable) -> Minibatch:
    """Leave out units of advantage 0 where they have no gradient; they are counted all the
    same."""
    if "zero_advantage" in run.method.needs:
        return part
    kept = table.advantage[part.node] != 0
    if table.segment is not None and bool(kept.any()):
        kept = torch.isin(part.place, part.place[kept])
    return Minibatch(part.node[kept], part.place[kept])


def _differentiate(
    run: Setup, local: LocalData, part: Minibatch, total: int, update: int, progress: _Progress
) -> list[Trained]:
    """Add the gradients of this process' nodes of an optimizer step that has `total` in all."""
    trains = run.method.likelihood.trains
    size = max(1, run.config.train.micro_batch // run.method.rows)
    calls = cut(part, states_of(local.rollout, part.node, trains), size)
    most = max(run.world.gather(len(calls))) if run.sharded else 0
    parts = []
    with checked_later():
        for call in calls:
            parts.append(backward(run, local, call, total, update))
            progress.advance(len(call.node))
    if len(calls) < most:
        unit = first_unit(run, local.rollout, local.table)
        (spare,) = cut(unit, states_of(local.rollout, unit.node, trains), size)
        for _ in range(len(calls), most):
            backward(run, local, spare, total, update, idle=True)
    return parts


def _optimizer_step(
    run: Setup, ro: Rollout, parts: list[Trained], rows: list[int], update: int, judged: bool
) -> tuple[float, bool]:
    """Step along the sum of all processes' gradients -> its norm, and whether that is no outlier.

    An outlier is left out where the config says so; a step that is not `judged` is none. Raises
    RunError if the norm is not finite.
    """
    sum_gradients(run)
    gradients = [p.grad for p in run.params.values() if p.grad is not None]
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    size = float(norm)
    if not math.isfinite(size):
        texts = [run.train_set.texts[row] for row in rows]
        found = run.world.gather(what_broke(parts, ro, texts))
        message = next((text for text in found if text), what_gradient(run.params))
        run.optimizer.zero_grad(set_to_none=True)
        where = f"iteration {run.iteration}, optimizer step {update + 1}"
        raise RunError(f"{where}: {message}")
    # what is far larger than before is no direction to go in
    monitor, most = run.config.monitors.gradients, run.config.train.max_grad_norm
    usual = True
    if monitor is not None and judged:
        usual = monitor_controls.is_usual(run.memory, size, monitor, most)
    if usual or (monitor is not None and monitor.action != "skip"):
        torch.nn.utils.clip_grads_with_norm_(run.params.values(), most, norm)
        run.intact = False
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return size, usual


def _set_lr(run: Setup, update: int) -> None:
    t = run.config.train
    share = lr_share(update, warmup=t.warmup, decay=t.decay, decay_to=t.decay_to)
    for group in run.optimizer.param_groups:
        group["lr"] = run.config.lr * share * monitor_controls.lr_factor(run.memory)
