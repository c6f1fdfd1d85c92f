"""The second half of an iteration: deal out what is trained, differentiate, step the optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flowrl.algorithms.forest import states_of, trained_nodes
from flowrl.core.devices import checked_later, on_host
from flowrl.core.errors import RunError
from flowrl.core.processes import World, whole
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import Batch, Eval, LossInput, Rollout, SelectInput, concatenated
from flowrl.training.batches import (
    Minibatch,
    NetworkCall,
    NodeTable,
    SharedForest,
    cut,
    deal,
)
from flowrl.training.method import KL_TERM, check_names, unrolled_calls
from flowrl.training.rollout import prompt_of
from flowrl.training.run import Iteration, Run

Rows = dict[str, Tensor]
Asked = tuple[tuple[Tensor, int], ...]
"""The states [b] that parts asked the network about, and how many calls each of them took."""
BY_STEP = ("ratio", "clip_frac", "approx_kl", "kl", "velocity_grad", "velocity_length")


class Trained(NamedTuple):
    """What one network call of training leaves behind."""

    metrics: Rows  # {name: [B]} of the loss, "kl" and its term if there is one, and "loss"
    node: Tensor  # [B] int64
    step: Tensor  # [B] int64
    state: Tensor  # [B] int64: rows with one id were one row of the network
    update: int  # number of the optimizer step within the iteration
    # of the network, and how many of them went backward, where rows took several steps
    calls: tuple[int, int] | None = None
    asked: Asked = ()  # of parts, such as teachers


class LocalData(NamedTuple):
    """What one process trains on in an iteration."""

    rollout: Rollout
    table: NodeTable
    streams: NodeStreams  # for what a likelihood draws anew
    rows: tuple[int, ...] = ()  # training prompt of each group


@dataclass
class CallRows:
    """The rows of one network call, for parts that provide something of them."""

    local: LocalData
    batch: Batch
    now: Eval  # under the current weights, with a gradient
    update: int  # number of the optimizer step within the iteration
    asked: list[tuple[Tensor, int]] = field(default_factory=list)  # `Asked`, of teachers

    def fact(self, name: str) -> Tensor:
        """Return the rows [B] of what is known of each node [V]."""
        return self.local.table.facts[name][self.batch.node]


def learn(run: Run, it: Iteration) -> None:
    """Make the iteration's optimizer steps from its rollout and the advantages of the whole forest,
    and add to ``it.metrics``.

    Every process deals out all nodes alike and differentiates its own; gradients are summed over
    processes. Raises RunError for a loss or gradient that is not finite; the weights are then those
    before the broken step.
    """
    assert it.forest is not None and it.advantage is not None and it.rollout is not None
    forest, ro = it.forest, it.rollout
    # what is trained, in the whole forest and here
    it.table = node_table(run, forest.whole, it.advantage)
    it.own_table = it.table.own(forest, ro)
    streams = NodeStreams(ro.tree.group, run.config.seed, "fresh", run.iteration)
    local = LocalData(ro, it.own_table, streams, tuple(it.rows))
    for rows in (ro.sigmas, ro.tree.step, ro.tree.parent):  # likelihoods read these on the host
        on_host(rows)
    run.parts.ask("before_learning", run, it)
    # one optimizer step per part of the nodes
    seen: list[Trained] = []
    norms: list[float] = []
    refused = 0
    follows = run.parts.agree("trains_policy", run.iteration)
    steps = _steps(run, forest, ro, it.table) if follows else []
    signals, progress = [], _Progress(run)
    for step in steps:
        signals.append(it.table.advantage[step.live.node])
        progress.total += len(step.mine.node)
    run.parts.ask("before_steps", run, signals)
    for update, step in enumerate(steps):
        _set_lr(run, run.iteration * run.config.train.updates + update)
        if not len(step.live.node):
            continue
        work = partial(_differentiate, run, local, step.mine, step.total, update, progress)
        parts = run.world.together(work)
        norm, made = _optimizer_step(run, ro, parts, it.rows, update)
        norms.append(norm)
        refused += not made
        seen += parts
    # what it gave; of a policy that stands still nothing, which does not mean that it was idle
    if follows:
        it.metrics |= reduce_metrics(seen, norms, run.world)
    if norms:
        it.metrics["grad_outliers"] = float(refused)
    if "kl_factor" in run.state.memory:
        it.metrics["kl_weight"] = run.method.kl_beta * run.state.kl_factor
    run.parts.ask("learned", run, it, seen)
    # what it cost
    spent = list(it.spent)
    for trained in seen:
        spent.append(_network_calls(run, trained))
    calls, backwards = run.world.totals(spent, 2)
    it.metrics |= {"nfe": float(run.cost.nfe + calls), "backwards": float(backwards)}
    it.metrics["lr"] = float(run.optimizer.param_groups[0]["lr"])


@dataclass
class _Progress:
    """Tell a run how many of this process' nodes were differentiated, in all optimizer steps."""

    run: Run
    total: int = 0
    done: int = 0

    def advance(self, nodes: int) -> None:
        self.done += nodes
        self.run.progress(self.done, self.total)


class _Step(NamedTuple):
    """What an optimizer step is made of."""

    total: int  # nodes that its loss is divided by
    live: Minibatch  # those of them that can have a gradient, in all processes
    mine: Minibatch  # and in this one


# ------------------------------------------------------------------------------ what is trained


def node_table(run: Run, ro: Rollout, advantage: Tensor) -> NodeTable:
    """Say of each node [V] what training needs besides the rollout. Raises RunError if nothing is
    left to train."""
    method = run.method
    segment = method.segment(ro) if method.segment else None
    # how much each node counts
    factor = torch.ones_like(advantage)
    rng = generator(run.config.seed, "select", run.iteration)
    data = SelectInput(ro, advantage, segment, run.iteration, rng, method.transition)
    data = data._replace(reward=run.reward_set.total)
    for select in method.select:
        factor = factor * select(data._replace(factor=factor)).to(factor)
    nodes = trained_nodes(ro, method.likelihood.trains)
    if not bool((factor[nodes] > 0).any()):
        trains = method.likelihood.trains
        what = "decisions" if trains == "draws" else trains
        raise RunError(
            f"iteration {run.iteration}: `select` left none of {len(nodes)} {what} to train"
        )
    # what loss and penalty want to know of nodes
    facts: dict[str, Tensor] = {}
    if run.reward_set.gate is not None:
        facts["gate"] = run.reward_set.gate  # factor of the penalty
    for part in run.parts.at("node_facts"):
        facts |= part.node_facts(run, ro, advantage)
    return NodeTable(advantage, factor, segment, facts)


def units(run: Run, ro: Rollout, table: NodeTable) -> tuple[Tensor, Tensor]:
    """List the nodes that are trained -> them [N] and the unit of each [N]: nodes of one unit stay
    together in optimizer steps and network calls."""
    nodes = trained_nodes(ro, run.method.likelihood.trains)
    if run.method.select:
        nodes = nodes[table.factor[nodes] > 0]
    return nodes, _unit_of(run, ro, table, nodes)


def first_unit(run: Run, ro: Rollout, table: NodeTable) -> Minibatch:
    """Return one unit whole, since losses refuse a part of one: the first that is trained, or of
    the first node where a selection took all."""
    nodes, unit = units(run, ro, table)
    if not len(nodes):
        nodes = trained_nodes(ro, run.method.likelihood.trains)
        unit = _unit_of(run, ro, table, nodes)
    first = nodes[unit == unit[0]]
    return Minibatch(first, torch.zeros_like(first))


def _unit_of(run: Run, ro: Rollout, table: NodeTable, nodes: Tensor) -> Tensor:
    if table.segment is not None:
        return table.segment[nodes]
    return states_of(ro, nodes, run.method.likelihood.trains)


def _steps(run: Run, forest: SharedForest, ro: Rollout, table: NodeTable) -> list[_Step]:
    """Deal the trained nodes out to optimizer steps."""
    t = run.config.train
    nodes, key = units(run, forest.whole, table)
    rng = generator(run.config.seed, "order", run.iteration)
    dealt = deal(forest.whole, nodes, unit=key, updates=t.updates, order=t.order, generator=rng)
    found = []
    for part in dealt:
        live = part
        # units of advantage 0 are left out where they have no gradient, but counted all the same
        if "zero_advantage" not in run.method.needs:
            kept = table.advantage[part.node] != 0
            if table.segment is not None and bool(kept.any()):
                kept = torch.isin(part.place, part.place[kept])
            live = Minibatch(part.node[kept], part.place[kept])
        found.append(_Step(len(part.node), live, forest.own_part(live, ro)))
    return found


# ---------------------------------------------------------------------------- one network call


def loss_input(run: Run, rows: CallRows) -> LossInput:
    """Make what loss and penalty see of the rows of a network call, and what they asked for."""
    batch, table = rows.batch, rows.local.table
    data = LossInput(batch, rows.now, batch.old_log_prob)
    if rows.local.rollout.mean is not None:
        data = data._replace(old_mean=rows.local.rollout.mean[batch.node])
    if table.segment is not None:
        data = data._replace(segment=table.segment[batch.node])
    for part in run.parts.at("provide"):
        data = part.provide(run, rows, data)
    return data


def backward(
    run: Run, local: LocalData, call: NetworkCall, total: int, update: int, *, idle: bool = False
) -> Trained:
    """Add the gradient of one network call, divided by the `total` nodes of its optimizer step.

    An `idle` one adds 0: under FSDP every process has to call the network as often as the others.
    """
    method, nodes = run.method, call.node
    # the batch under the current weights, and what loss or penalty ask for
    batch = method.likelihood.batch(local.rollout, local.table.advantage, nodes, local.streams)
    if method.likelihood.trains == "draws":
        batch = batch._replace(rows=call.rows)
    now = method.likelihood.evaluate(run.model, batch, method.transition)
    rows = CallRows(local, batch, now, update)
    data = loss_input(run, rows)
    # one value per row
    loss, metrics = method.loss(data)
    check_names(metrics)
    if method.select:
        loss = loss * local.table.factor[batch.node]
    if method.kl is not None:
        penalty = method.kl(data)
        if "gate" in local.table.facts:
            penalty = penalty * rows.fact("gate")
        pull = method.kl_beta * run.state.kl_factor * penalty
        loss = loss + pull
        metrics = {**metrics, "kl": penalty.detach(), KL_TERM: pull.detach()}
    # rows of one node share its part of the sum
    part = 0.0 if idle else len(nodes) / (len(loss) * total)
    watched = None if idle or now.v is None or not now.v.requires_grad else now.v
    if watched is not None:
        watched.retain_grad()  # type: ignore[no-untyped-call]
    (loss.sum() * part).backward()
    metrics = {**metrics, "loss": loss.detach()}
    for each in run.parts.at("measure"):
        metrics |= each.measure(run, data)
    if watched is not None and watched.grad is not None:
        metrics["velocity_grad"] = watched.grad.flatten(1).norm(dim=1).detach() / part
    calls = None if batch.unrolled is None else unrolled_calls(batch.unrolled)
    asked: Asked = tuple(rows.asked)
    return Trained(metrics, batch.node, batch.step, batch.parent, update, calls, asked)


def _network_calls(run: Run, part: Trained) -> tuple[int, int]:
    """Return the network calls that a part counts as, and its rows that went backward."""
    if part.calls is not None:
        return part.calls
    calls = run.method.trained_calls(part.update, run.steps_before)
    rows = len(torch.unique(part.state))
    backwards = rows * run.method.graphs if calls else 0
    # those of parts
    made = rows * calls
    for states, times in part.asked:
        made += times * len(torch.unique(states))
    return made, backwards


# --------------------------------------------------------------------------- one optimizer step


def _differentiate(
    run: Run, local: LocalData, part: Minibatch, total: int, update: int, progress: _Progress
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
    # under FSDP all processes call the network equally often
    if len(calls) < most:
        unit = first_unit(run, local.rollout, local.table)
        (spare,) = cut(unit, states_of(local.rollout, unit.node, trains), size)
        for _ in range(len(calls), most):
            backward(run, local, spare, total, update, idle=True)
    return parts


def _optimizer_step(
    run: Run, ro: Rollout, parts: list[Trained], rows: list[int], update: int
) -> tuple[float, bool]:
    """Step along the sum of all processes' gradients -> its norm, and whether no part refused the
    step. Raises RunError if the norm is not finite."""
    if run.world.size * run.world.context > 1:
        sum_gradients(run)
    gradients = []
    for p in run.params.values():
        if p.grad is not None:
            gradients.append(p.grad)
    norm = whole(torch.nn.utils.get_total_norm(gradients))
    size = float(norm)
    if not math.isfinite(size):
        found = run.world.gather(what_broke(parts, ro, run.train_set.texts_of(rows)))
        message = next(filter(None, found), what_gradient(run.params))
        run.optimizer.zero_grad(set_to_none=True)
        where = f"iteration {run.iteration}, optimizer step {update + 1}"
        raise RunError(f"{where}: {message}")
    usual, taken = True, True
    for part in run.parts.at("gradient"):
        said = part.gradient(run, size, update)
        usual = usual and said is True
        taken = taken and said is not False
    if taken:
        most = run.config.train.max_grad_norm
        torch.nn.utils.clip_grads_with_norm_(run.params.values(), most, norm)
        run.state.intact = False
        run.optimizer.step()
        run.parts.ask("after_step", run, update)
    run.optimizer.zero_grad(set_to_none=True)
    return size, usual


def sum_gradients(run: Run) -> None:
    """Add up the gradients of all processes; what none of them reached has none, as in one
    process."""
    if run.world.alone or run.sharded:  # FSDP has added them up
        return
    reached = run.world.gather([p.grad is not None for p in run.params.values()])
    params = [p for p, *found in zip(run.params.values(), *reached, strict=True) if any(found)]
    for p in params:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    run.world.sum_([p.grad for p in params if p.grad is not None])


def _set_lr(run: Run, update: int) -> None:
    t = run.config.train
    share = lr_share(update, warmup=t.warmup, decay=t.decay, decay_to=t.decay_to)
    for group in run.optimizer.param_groups:
        group["lr"] = run.optimizer.defaults["lr"] * share * run.state.lr_factor


def lr_share(update: int, *, warmup: int, decay: int, decay_to: float) -> float:
    """Return the share of the rate at optimizer step `update`, counted from 0.

    It rises linearly over `warmup` steps, ``(update + 1) / (warmup + 1)``. Then it falls along half
    a cosine from 1 to `decay_to` over `decay` steps, and stays there; with `decay` 0 it stays 1.

    AWM (2509.25050; scxue/advantage_weighted_matching be51372, train_sd3_awm.py): torch's
    CosineAnnealingLR from lr to lr / 3, then constant. Its shipped configs let that take 1e10
    steps.
    """
    rising = min(1.0, (update + 1) / (warmup + 1))
    if not decay:
        return rising
    gone = min(max(update - warmup, 0) / decay, 1.0)
    return rising * (decay_to + (1 - decay_to) * (1 + math.cos(math.pi * gone)) / 2)


def what_broke(parts: list[Trained], ro: Rollout, texts: list[str]) -> str | None:
    """Name this process' first row and metric that is not finite, if there is one."""
    for part in parts:
        for name, values in part.metrics.items():
            if bool(values.isfinite().all()):
                continue
            at = int((~values.isfinite()).nonzero()[0])
            return (
                f"{name} is not finite at denoising step {int(part.step[at])} of prompt "
                f"{prompt_of(ro, int(part.node[at]), texts)}; no weight was changed by it. Lower "
                "optimizer.lr or train.max_grad_norm, and resume"
            )
    return None


def what_gradient(params: dict[str, nn.Parameter]) -> str:
    """Name the first parameters whose gradient is not finite."""
    names = []
    for name, p in params.items():
        if p.grad is not None and not bool(p.grad.isfinite().all()):
            names.append(name)
    return (
        f"the gradient of {names[:3]} is not finite although the loss is; lower optimizer.lr, and "
        "resume"
    )


# ------------------------------------------------------------- from rows to a number per iteration


def reduce_metrics(seen: list[Trained], norms: list[float], world: World) -> dict[str, float]:
    """Reduce each metric of an iteration by its name, over all processes -> {name: number}.

    Every metric has its mean. `ratio` also has its spread, the largest distance from 1 before the
    first optimizer step (`on_policy_gap`), and the spread by denoising step; those of `BY_STEP`
    have their mean by denoising step. `kl_share` is the KL's part of the sizes of the loss's two
    terms. `grad_norm` is the mean over optimizer steps, `trained` the number of rows.
    """
    # all rows of all processes: a mean of means would weigh small calls too much
    rows = _all_rows(seen, world)
    if not rows:
        return {"trained": 0.0}
    # columns that sort the others, or are a part of one, are no metrics themselves
    step, update = rows.pop("step"), rows.pop("update")
    pull = rows.pop(KL_TERM, None)
    out = {}
    for name, values in rows.items():
        out[name] = values.mean().item()
    if pull is not None:
        out["kl_share"] = _kl_share(rows["loss"], pull)
    # before the first update old and new weights are the same, so a ratio other than 1 is a fault
    if "ratio" in rows:
        out["ratio_std"] = rows["ratio"].std(correction=0).item()
        first = rows["ratio"][update == 0]
        out["on_policy_gap"] = (first - 1).abs().max().item() if len(first) else 0.0
    # by denoising step: a mean over all would hide one step that is far off
    for k in step.unique().tolist():
        if "ratio" in rows:
            out[f"ratio_std/step{k}"] = rows["ratio"][step == k].std(correction=0).item()
        for name in BY_STEP:
            if name in rows:
                out[f"{name}/step{k}"] = rows[name][step == k].mean().item()
    out["grad_norm"] = torch.tensor(norms).mean().item()
    out["trained"] = float(len(step))
    return out


def _kl_share(loss: Tensor, pull: Tensor) -> float:
    """Return what part the KL's term [N] has in the sizes of both terms of the loss [N]; 0 where
    there is neither. Sizes, since what a group's advantages do to the loss sums to about 0."""
    own, kl = (loss - pull).abs().sum().item(), pull.abs().sum().item()
    return kl / (own + kl) if own + kl > 0 else 0.0


def _all_rows(seen: list[Trained], world: World) -> Rows:
    """Join the rows of all calls, and of all processes -> {metric, "step", "update": [N]}."""
    # the columns of all calls
    columns: dict[str, list[Tensor]] = {}
    for part in seen:
        update = torch.full_like(part.step, part.update)
        for name, values in {**part.metrics, "step": part.step, "update": update}.items():
            columns.setdefault(name, []).append(values)
    rows = {}
    for name, parts in columns.items():
        rows[name] = torch.cat(parts)
    if world.size == 1:
        return rows
    # of processes that have any
    found = world.gather({name: values.cpu() for name, values in rows.items()})
    there = list(filter(None, found))
    if not there:
        return {}
    return concatenated(there)
