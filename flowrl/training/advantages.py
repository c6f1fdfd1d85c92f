"""From the rewards of an iteration to the advantage of each node of the whole forest, the same in
all processes."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flowrl.algorithms.nodes import leaf_kinds
from flowrl.core.types import concatenated
from flowrl.evaluation.reward_metrics import finished_distances
from flowrl.training.batches import join
from flowrl.training.rollout import images_worked_on, reward_batch
from flowrl.training.run import Iteration, Run


def give_credit(run: Run, it: Iteration) -> None:
    """Join the forests of all processes, and give every node its advantage: ``it.forest``,
    ``it.tree``, ``it.advantage`` and metrics. What learns from rewards then takes its step.

    A prompt's images are in one process, and credit may compare those of all prompts, so every
    process gets all rewards; images stay where they are.
    """
    found = it.found
    it.forest = join(run.world, found.rollout)
    whole = it.forest.whole
    it.tree, it.batch, it.values = whole.tree, found.batch, found.values
    distance = None
    if it.forest.leaf is not None:
        kind = leaf_kinds(found.rollout.tree, found.rollout.leaf)
        own = finished_distances(found.batch.images, found.batch.group, kind)
        distance = torch.cat(run.world.gather(own))
        answers = concatenated(run.world.gather(found.values))
        it.values = {name: answers[name][it.forest.leaf] for name in found.values}
        it.batch = reward_batch(run, whole, torch.zeros(len(whole.leaf), 0), it.rows)
    run.reward_set.check_unscored(it.values, it.batch.prompts, f"iteration {run.iteration}")
    run.parts.ask("joined", run, it)
    # rewards [L] become advantages per node [V], by aggregate and credit
    credit, asked = run.method.credit, dict[str, Tensor]()
    for part in run.parts.at("credit_input"):
        asked |= part.credit_input(run, it)
    credit = partial(credit, **asked) if asked else credit
    for part in run.parts.at("credit_sees"):
        credit = part.credit_sees(run, it, credit)
    it.advantage, metrics = run.reward_set.advantages(
        it.values, it.batch, whole.leaf, it.tree, credit, distance=distance
    )
    decoded, scored = run.world.totals([images_worked_on(run, found.rollout)], 2)
    it.metrics |= metrics | {"decoded": float(decoded), "scored": float(scored)}
    # what learns from rewards does so now: after an error the iteration would be half done
    learners = run.parts.at("credited")
    keeps = any(part in learners for part in run.parts.at("state_dict"))
    run.state.intact = run.state.intact and not keeps
    run.parts.ask("credited", run, it)
    # a part may have joined prompts into one group
    it.forest = it.forest._replace(whole=whole._replace(tree=it.tree))
