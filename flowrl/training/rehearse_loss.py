"""Call the loss and the penalty of a config once, on a rehearsed rollout: so what they refuse, such
as a clip range of 0 or a segment that is missing, is found before any weight is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.nodes import best_below, count_trained
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, FlowModel, LossInput, Rollout
from flowrl.training.method import Method
from flowrl.training.metrics import check_names


def rehearse_loss(
    method: Method,
    model: FlowModel,
    made: Rollout,
    advantage: Tensor,
    nodes: Tensor,
    segment: Tensor | None,
) -> Batch | None:
    """Make the batch of nodes [N] of a rollout, evaluate it with a stand-in for the model, and call
    what looks at it -> the batch, if there is one. Raises ConfigError as they do.

    On policy: all weights that the loss asks for give the same evaluation.
    """
    likelihood = method.likelihood
    if not likelihood.rows_per_state:  # it needs the parameters that it adds to the model
        return None
    # the batch, as every set of weights evaluates it
    streams = NodeStreams(made.tree.group, "rehearsal")
    batch = likelihood.batch(made, advantage, nodes, streams)
    now = likelihood.evaluate(model, batch, method.transition)
    # what loss and penalty see
    under = dict.fromkeys(method.snapshots, now)
    data = LossInput(batch, now, now.log_prob, now.mean, under)
    if "teacher" in method.needs:
        data = data._replace(teachers=((now, torch.ones(len(batch.node))),))
    if segment is not None:
        data = data._replace(segment=segment[batch.node])
    if "best" in method.needs:
        draws = likelihood.trains == "draws"
        above = made.tree.parent[batch.node] if draws else batch.node
        best = best_below(made, advantage)[above]
        data = data._replace(best_x0=made.x[best], best_advantage=advantage[best])
    if "siblings" in method.needs:
        data = data._replace(siblings=count_trained(made, likelihood.trains, batch.node))
    if "reward_variance" in method.needs:
        data = data._replace(reward_variance=advantage.new_zeros(len(batch.node)))
    if now.images is not None:
        data = data._replace(reward=now.images.new_zeros(len(now.images)))
    check_names(method.loss(data)[1])
    generates: Any = likelihood  # of models that are trained along alone, it has queries
    for role in method.companions.values():
        rows = role.batch(made, advantage, nodes, streams, generates.queries)
        seen = role.evaluate(model, rows)
        found = LossInput(rows, seen, rows.old_log_prob, under=dict.fromkeys(role.looks_at, seen))
        if segment is not None:
            counted = count_trained(made, "leaves", rows.node)
            found = found._replace(segment=segment[rows.node], siblings=counted)
        role.loss(found)
    if method.kl is not None:
        method.kl(data)
    return batch
