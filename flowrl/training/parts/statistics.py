"""Figures of each iteration's images, rewards and advantages, for monitors and reports."""

from __future__ import annotations

import torch

from flowrl.algorithms.forest import leaf_kinds, trained_nodes
from flowrl.core.part import Part
from flowrl.evaluation.reward_set import (
    LOOKS,
    histogram,
    looks_of,
    prompt_entropy,
    total_reward,
)
from flowrl.training.run import Iteration, Run


class Statistics(Part):
    """How colourful and sharp the images are, how evenly the prompts teach, and histograms."""

    name = "statistics"
    when = ("always",)
    rank = 0

    def credited(self, run: Run, it: Iteration) -> None:
        """Measure in the process that has the images; every process gets the figures."""
        found = it.found
        assert it.forest is not None and it.tree is not None and it.advantage is not None
        kind = leaf_kinds(found.rollout.tree, found.rollout.leaf)
        own = looks_of(found.batch.images, found.batch.group, kind)
        looks = torch.cat(run.world.gather(own))
        it.metrics |= dict(zip(LOOKS, looks.mean(0).tolist(), strict=True))
        # of finished images alone; previews of an early step would distort them
        whole = it.forest.whole
        finished = leaf_kinds(whole.tree, whole.leaf).cpu() == 0
        total = total_reward(it.values, run.reward_set.weights)[finished]
        nodes = trained_nodes(whole, run.method.likelihood.trains)
        it.metrics["prompt_entropy"] = prompt_entropy(it.advantage, it.tree.group)
        run.state.histograms = {
            "reward": histogram(total),
            "advantage": histogram(it.advantage[nodes]),
        }
