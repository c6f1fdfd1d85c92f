"""The rewards of a run, together: asked, checked, made one advantage per node, logged, and trained
where they learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.algorithms.forest import leaf_kinds, subtree_mean
from flowrl.config.load import Config
from flowrl.core.abilities import LearnedReward
from flowrl.core.errors import CheckpointError, ConfigError, RewardError, as_one_message
from flowrl.core.types import Credit, Mixed, RewardBatch, Scores, Tree
from flowrl.evaluation.reward_call import ask, probe_rewards, rewards_of, unusable
from flowrl.evaluation.reward_guard import watched
from flowrl.evaluation.reward_metrics import (
    correlations,
    finished_distances,
    reward_metrics,
    shares,
    total_reward,
)
from flowrl.evaluation.sources import prompt_keys

Transform = Callable[[Tensor, RewardBatch], Tensor]


@runtime_checkable
class StatefulAggregator(Protocol):
    """An aggregator with a state of its own, such as dual variables; calling it changes nothing."""

    def update(self, scores: Scores) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


@runtime_checkable
class ReadsRecords(Protocol):
    """An aggregator that looks at the prompts' records, and says before training what they lack."""

    def check_records(self, records: Sequence[Mapping[str, Any]]) -> None: ...


@runtime_checkable
class RememberingCredit(Protocol):
    """A credit that compares images with those of earlier iterations; calling it changes
    nothing."""

    # the keys of the training list, as `prompt_keys` makes them
    def start(self, prompts: list[str]) -> None: ...

    def update(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str]
    ) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class RewardSet:
    """All rewards of a config with their transforms, the aggregator, and what they keep between
    iterations.

    Making one calls transforms and aggregator once on made-up images, so that a wrong tag or reward
    name is an error before the first image is made.
    """

    def __init__(
        self,
        config: Config,
        records: list[dict[str, Any]],
        credit: Credit | Any = None,
        *,
        frames: int = 1,
    ) -> None:
        """credit: the method's; one that remembers prompts is kept along. frames: of the model's
        videos; 1: it makes images."""
        # the functions that the config names
        self.rewards = rewards_of(config.rewards, frames)
        self.transforms: dict[str, list[Transform]] = {}
        for name, call in config.rewards.items():
            self.transforms[name] = [step.partial() for step in call.transform]
        self.aggregate: Callable[[Scores, Credit], Mixed] = config.aggregate.make()
        self.weights, self.max_unscored = config.reward_weights, config.train.max_unscored
        # of the last advantages: weighted sum of the rewards [L]; factor of the penalty, and which
        # nodes were judged [V]
        self.total: Tensor | None = None
        self.gate: Tensor | None = None
        self.scored: Tensor | None = None
        self.credit = credit if isinstance(credit, RememberingCredit) else None
        if self.credit is not None:
            texts = [record["prompt"] for record in records]
            self.credit.start(prompt_keys(texts, records))
        # a rehearsal
        if isinstance(self.aggregate, ReadsRecords):
            self.aggregate.check_records(records)
        self._rehearse(records)

    def probe(self) -> None:
        """Ask each reward that can tell whether it is ready. Raises as `probe_rewards` does."""
        probe_rewards(self.rewards)

    @torch.no_grad()
    def score(
        self,
        batch: RewardBatch,
        where: str,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Tensor]:
        """Ask every reward about a batch -> {name: [L] float32 on the CPU}, NaN = not scored.
        `progress` gets (rewards that have answered, all). Raises RewardError."""
        found: dict[str, Tensor] = {}
        for name, reward in self.rewards.items():
            found[name] = ask(name, reward, batch, where)
            progress(len(found), len(self.rewards))
        return found

    def check_unscored(self, values: Mapping[str, Tensor], prompts: list[str], where: str) -> None:
        """Raise RewardError if a reward left more of an iteration's images unscored than
        `train.max_unscored` allows: those of all parts and of all processes together."""
        for name, row in values.items():
            unscored = row.isnan()
            if unscored.double().mean().item() > self.max_unscored:
                rule = (
                    f"NaN means not scored; train.max_unscored={self.max_unscored} is the share "
                    "that may be left out so"
                )
                raise unusable(name, row, prompts, where, int(unscored.nonzero()[0]), rule)

    def advantages(
        self,
        values: Mapping[str, Tensor],
        batch: RewardBatch,
        leaf: Tensor,
        tree: Tree,
        credit: Callable[..., Tensor],
        *,
        distance: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Turn raw rewards {name: [L]} into one advantage per node [V] -> (advantage, metrics).

        credit: called as ``credit(reward, leaf, tree)``. distance: [G] as `finished_distances`
        gives it, needed where another process holds some of the images.
        """
        # transforms, credit and aggregator
        scores = self._scores(values, batch, leaf, tree)
        mixed = self.aggregate(scores, lambda reward: credit(reward, leaf, tree))
        self.gate = mixed.gate
        total = total_reward(scores.values, self.weights)
        self.total = total
        # a credit may have judged by something else, such as labels
        self.scored = ~subtree_mean(total, leaf, tree).isnan() | (mixed.advantage != 0)
        # figures of the raw rewards, and the aggregator's own
        kind = leaf_kinds(tree, leaf)
        if distance is None:
            distance = finished_distances(batch.images, batch.group, kind)
        metrics = reward_metrics(values, self.weights, distance, batch.group, kind)
        metrics |= mixed.metrics
        metrics |= shares(mixed.parts, batch.group) | correlations(values, batch.group)
        return mixed.advantage, metrics

    def update(
        self,
        values: Mapping[str, Tensor],
        batch: RewardBatch,
        leaf: Tensor,
        tree: Tree,
        extra: Mapping[str, Tensor] | None = None,
    ) -> dict[str, float]:
        """Let the aggregator and the rewards that are trained along take their step -> metrics.

        extra: what the credit asked for besides the prompts.
        """
        # the credit first: it remembers the rewards that the advantages were made of
        if self.credit is not None:
            learn: Callable[..., None] = self.credit.update
            keys = prompt_keys(batch.prompts, batch.meta)
            learn = partial(learn, prompts=keys, **(extra or {}))
            self._remember(learn, self._scores(values, batch, leaf, tree))
        if isinstance(self.aggregate, StatefulAggregator):
            self.aggregate.update(self._scores(values, batch, leaf, tree))
        metrics: dict[str, float] = {}
        for name, reward in self.learned_rewards().items():
            with as_one_message(f"the update of reward {name!r}", RewardError), watched(name):
                said = reward.update(batch)
            metrics |= {f"learned/{name}/{key}": value for key, value in said.items()}
        return metrics

    def judged(
        self, values: Mapping[str, Tensor], batch: RewardBatch, leaf: Tensor, tree: Tree
    ) -> Tensor:
        """Return the weighted sum [L] of the rewards after their transforms, NaN = not scored."""
        scores = self._scores(values, batch, leaf, tree)
        return total_reward(scores.values, self.weights)

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy is updated in this iteration; a reward may first learn alone."""
        return all(reward.trains_policy(iteration) for reward in self.learned_rewards().values())

    def learned_rewards(self) -> dict[str, LearnedReward]:
        """Return the rewards that are trained along."""
        found = {}
        for name, reward in self.rewards.items():
            if isinstance(reward, LearnedReward):
                found[name] = reward
        return found

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return {file: tensors} for a checkpoint; empty where nothing has a state."""
        files = {f"reward-{n}": reward.state_dict() for n, reward in self.learned_rewards().items()}
        if isinstance(self.aggregate, StatefulAggregator):
            files["aggregate"] = self.aggregate.state_dict()
        if self.credit is not None:
            files["credit"] = self.credit.state_dict()
        return files

    def load_state_dict(self, files: Mapping[str, dict[str, Tensor]], where: Any) -> None:
        """Put back what `state_dict` gave. Raises CheckpointError if the files are others."""
        wanted = sorted(self.state_dict())
        if sorted(files) != wanted:
            raise CheckpointError(
                f"{where}: holds the reward states {sorted(files)}, this config needs {wanted}"
            )
        for name, reward in self.learned_rewards().items():
            reward.load_state_dict(files[f"reward-{name}"])
        if isinstance(self.aggregate, StatefulAggregator):
            self.aggregate.load_state_dict(files["aggregate"])
        if self.credit is not None:
            self.credit.load_state_dict(files["credit"])

    def _remember(self, learn: Callable[..., None], scores: Scores) -> None:
        """Show a credit's `update` what the aggregator makes of an iteration's rewards."""

        def seen(reward: Tensor) -> Tensor:
            learn(reward, scores.leaf, scores.tree)
            return torch.zeros(len(scores.tree.parent), device=reward.device)

        self.aggregate(scores, seen)

    def _scores(
        self, values: Mapping[str, Tensor], batch: RewardBatch, leaf: Tensor, tree: Tree
    ) -> Scores:
        """Transform, and take an image out of every baseline if one reward that counts did not
        score it."""
        done = dict(values)
        for name, steps in self.transforms.items():
            for step in steps:
                done[name] = step(done[name], batch)
        missing = torch.stack([done[name].isnan() for name in done if self.weights[name]]).any(0)
        if bool(missing.any()):
            done = {name: torch.where(missing, torch.nan, row) for name, row in done.items()}
        rows = {name: row.to(leaf.device) for name, row in done.items()}
        return Scores(rows, self.weights, leaf, tree, batch.meta)

    def _rehearse(self, records: list[dict[str, Any]]) -> None:
        """Run transforms and aggregator on two made-up images of each tag, so that a wrong name
        is found at once."""
        # one record per tag, twice: two images of each group
        by_tag = {str(record.get("tag", "all")): record for record in records}
        meta = 2 * list(by_tag.values())
        size = len(meta)
        place = torch.arange(size)
        group = place % (size // 2)
        # roots without steps, with rewards 0 and 1
        tree = Tree(torch.full((size,), -1), torch.zeros_like(place), torch.zeros(size), group)
        batch = RewardBatch(torch.zeros(size, 3, 1, 1), [""] * size, group, meta, torch.zeros(size))
        values = {name: (place * 2 // size).float() for name in self.rewards}
        asked: list[Tensor] = []

        def count(reward: Tensor) -> Tensor:
            asked.append(reward)
            return reward

        self.aggregate(self._scores(values, batch, place, tree), count)
        if self.credit is not None and len(asked) > 1:
            raise ConfigError(
                f"credit: {type(self.credit).__name__} remembers one reward of each prompt, but "
                "the aggregate asks about each reward by itself; take aggregate weighted_sum"
            )
