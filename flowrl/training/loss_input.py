"""What a loss and a penalty see of a network call: its batch, and what they have asked for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.core.host_copies import on_host
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Eval, LossInput, Rollout
from flowrl.training.guidance import reference_guidance
from flowrl.training.metrics import Asked
from flowrl.training.real_images import real_rows
from flowrl.training.reward_batch import prompted
from flowrl.training.reward_gradient import scored, summed
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import NodeTable
from flowrl.training.teachers import Taught


class LocalData(NamedTuple):
    """What one process trains on in an iteration."""

    rollout: Rollout
    table: NodeTable
    streams: NodeStreams  # for what a likelihood draws anew
    rows: tuple[int, ...] = ()  # training prompt of each group


def loss_input(
    run: Setup, local: LocalData, batch: Batch, now: Eval, update: int
) -> tuple[LossInput, Asked]:
    """Make what loss and penalty have asked for -> it, and what teachers were asked about."""
    likelihood, needs, table = run.method.likelihood, run.method.needs, local.table
    # the same rows under other weights
    v = None if now.v is None else now.v.detach()
    same = Eval(now.log_prob.detach(), now.mean.detach(), now.std.detach(), v)
    under = dict.fromkeys(run.method.snapshots, same)
    judge = getattr(likelihood, "judge", None)
    for name in run.method.others(update, run.steps_before):
        guided = reference_guidance(run.config, run.model) if name == "ref" else nullcontext()
        with guided, torch.no_grad(), run.policy(name):
            if judge is None:
                under[name] = likelihood.evaluate(run.model, batch, run.method.transition)
            else:
                under[name] = judge(run.model, batch, now)
    taught = Taught((), ())
    if run.teachers is not None:
        group = local.rollout.tree.group[batch.node]
        taught = run.teachers.evaluate(run, batch, local.rows, group)
    # the policy that sampled: from the rollout, if that has it
    old_log_prob, old_mean = batch.old_log_prob, None
    if "old_log_prob" in needs - likelihood.keeps:
        old_log_prob = under["old"].log_prob
    if "old_mean" in needs:
        kept = local.rollout.mean
        old_mean = under["old"].mean if kept is None else kept[batch.node]
    # what the node table says of the rows
    data = LossInput(batch, now, old_log_prob, old_mean, under, taught.layers)
    if table.siblings is not None:
        scored = None if table.scored is None else table.scored[batch.node]
        data = data._replace(siblings=table.siblings[batch.node], scored=scored)
    if "reward" in needs and now.images is not None:
        values = _rewards(run, local, batch, now.images)
        data = data._replace(reward=summed(values, run.config.reward_weights), rewards=values)
    if "data" in needs:
        data = data._replace(data=real_rows(run, local.rollout, batch, local.rows))
    if table.variance is not None:
        data = data._replace(reward_variance=table.variance[batch.node])
    if table.segment is not None:
        data = data._replace(segment=table.segment[batch.node])
    if table.best is not None:
        draws = likelihood.trains == "draws"
        best = table.best[local.rollout.tree.parent[batch.node] if draws else batch.node]
        data = data._replace(best_x0=local.rollout.x[best], best_advantage=table.advantage[best])
    return data, taught.asked


def _rewards(run: Setup, local: LocalData, batch: Batch, images: Tensor) -> dict[str, Tensor]:
    """Ask the rewards about images [B, 3, H, W] of the batch's rows -> {name: [B]}, with the
    gradient."""
    group = local.streams.group[on_host(batch.node)]
    seen = prompted(run, images, group, [local.rows[g] for g in group.tolist()])
    return scored(run.rewards, run.config.reward_weights, seen, f"iteration {run.iteration}")
