"""Rewards, aggregators and credits that learn along with the policy."""

from __future__ import annotations

from pathlib import Path

import torch

from flowrl.core.part import Part, PartState
from flowrl.core.pixels import from_bytes
from flowrl.training.run import Iteration, Run


class LearnedRewards(Part):
    """Let what learns from rewards take its step after each iteration's advantages are given."""

    name = "learned rewards"
    rank = 70  # after what a credit's update asks for
    when = ("learns",)

    def begin(self, prepared: Run) -> None:
        """Remember who learns."""
        self.rewards = prepared.reward_set

    def learns(self, iteration: int) -> bool:
        """Say whether anything but rewards learns: a reward may first learn alone."""
        return self.rewards.trains_policy(iteration)

    def joined(self, run: Run, it: Iteration) -> None:
        """Show the images of all processes where a reward is trained along: every process trains it
        on all of them, so that it stays the same."""
        assert it.batch is not None and it.forest is not None
        if not self.rewards.learned_rewards():
            return
        images = it.found.batch.images
        if it.forest.leaf is not None:
            images = torch.cat(run.world.gather(images))[it.forest.leaf]
        it.batch = it.batch._replace(images=from_bytes(images))

    def credited(self, run: Run, it: Iteration) -> None:
        """Let credit, aggregator and rewards take their step."""
        assert it.batch is not None and it.forest is not None and it.tree is not None
        leaf = it.forest.whole.leaf
        it.metrics |= self.rewards.update(it.values, it.batch, leaf, it.tree, it.extra)

    def state_dict(self, run: Run) -> PartState | None:
        """Return what each keeps."""
        files = self.rewards.state_dict()
        return PartState(files) if files else None

    def load_state_dict(self, run: Run, state: PartState, where: Path) -> None:
        """Put it back. Raises CheckpointError where others were kept."""
        files = {name: dict(state.files[name]) for name in state.files}
        self.rewards.load_state_dict(files, where)
