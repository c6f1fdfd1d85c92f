"""Evaluate what a rollout left behind once more, in calls of any size."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.nodes import states_of
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Eval
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.training.batches import Minibatch, cut


def replayed(examined: ExaminedRun, nodes: Tensor, size: int) -> Eval:
    """Evaluate trained nodes [N] as training does, in calls of at most `size` states -> Eval in
    their order."""
    run, ro = examined.trainer, examined.rollout
    likelihood, found = run.method.likelihood, []
    state = states_of(ro, nodes, likelihood.trains)
    # states stand together, as `cut` asks for
    order = torch.argsort(state, stable=True)
    part = Minibatch(nodes[order], torch.arange(len(nodes)))
    zero = torch.zeros(len(ro.tree.parent), device=ro.x.device)
    for call in cut(part, state[order], max(1, size)):
        streams = NodeStreams(ro.tree.group, run.config.seed, "fresh", run.iteration)
        batch = likelihood.batch(ro, zero, call.node, streams)
        if likelihood.trains == "draws":
            batch = batch._replace(rows=call.rows)
        seen = likelihood.evaluate(run.model, batch, run.method.transition)
        found.append((batch.node, seen.log_prob.detach(), seen.mean.detach(), seen.std.detach()))
    node, log_prob, mean, std = (torch.cat(rows) for rows in zip(*found, strict=True))
    # back in the order that was asked for; likelihoods with several rows a node keep theirs
    if len(node) == len(nodes):
        place = torch.argsort(node)[torch.argsort(torch.argsort(nodes))]
        log_prob, mean, std = log_prob[place], mean[place], std[place]
    return Eval(log_prob, mean, std)
