"""The training loop, and what a resume needs of it.

::

    rows -> rollout -> images -> rewards -> advantages -> batches -> loss -> step -> metrics

What every method shares stands here and in the files that `Trainer.step` calls. All else is a part
(`flowrl.core.part`), which the loop asks at fixed places and knows by no name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import leaf_kinds
from flowrl.config.load import Config
from flowrl.core.errors import CheckpointError
from flowrl.core.part import PartState
from flowrl.core.shards import here, is_share
from flowrl.core.types import FlowModel, RewardBatch, Rollout, concatenated
from flowrl.evaluation.reward_set import finished_distances
from flowrl.training import checkpoint
from flowrl.training.batches import join
from flowrl.training.checkpoint_state import (
    KEY,
    CheckpointState,
    check_draws,
    check_meaning,
    checked_state,
    draws_of,
    meaning_of,
)
from flowrl.training.learn import learn
from flowrl.training.optimizer_state import (
    check_settings,
    optimizer_from_tensors,
    optimizer_to_tensors,
)
from flowrl.training.rollout import (
    Collected,
    collect,
    images_worked_on,
    reward_batch,
    sample_forest,
)
from flowrl.training.run import Iteration, PhaseTimer, Run, Say, make_run
from flowrl.training.weights import check_saved, put_saved


class Trainer(Run):
    """A run that trains. Everything random follows from (seed, iteration), so that a resume is
    exact.

    Example::

        trainer = Trainer(load_config("shapes/flow_grpo"))
        for iteration in range(trainer.iteration, 10):
            metrics = trainer.step()
    """

    def __init__(
        self,
        config: Config,
        *,
        model: FlowModel | None = None,
        log: PhaseTimer | None = None,
        callbacks: Sequence[Any] = (),
        say: Say | None = None,
    ) -> None:
        """model: in place of the config's; callbacks: parts that join the loop; say: hears what is
        being done that may take a while. Raises ConfigError for numbers that do not fit together,
        and what rewards raise."""
        made = make_run(config, model=model, log=log, callbacks=callbacks, say=say)
        self.__dict__.update(vars(made))

    def step(self) -> dict[str, float]:
        """Run one iteration -> its metrics. Raises RunError on a NaN, RewardError if a reward
        fails."""
        with self.state.repeated():
            # the prompts of all processes, and the places of this one's
            rows = self.rows()
            places = self.world.share(len(rows))
            # sample, decode and score
            found = self.world.together(partial(collect, self, rows, places))
            it = Iteration(rows, places, found)
            self.parts.ask("scored", self, it)
        # from rewards to advantages
        with self.phase("reward"):
            give_credit(self, it)
        # the images go before anything is learned
        it.rollout, it.found, it.batch = it.found.rollout, None, None
        del found
        # optimizer steps; the cost is this iteration's, since the next may have another plan
        it.metrics |= {"nfe": float(self.cost.nfe), "backwards": 0.0}
        if self.parts.agree("learns", self.iteration):
            with self.phase("train"):
                learn(self, it)
        self.parts.ask("after_iteration", self, it)
        self.state.iteration += 1
        self.state.intact = True
        return it.metrics

    def sample(self, rows: list[int]) -> Rollout:
        """Sample the forest of the training prompts `rows`, as the current iteration would."""
        return sample_forest(self, rows)

    def collect(self, rows: list[int], places: Sequence[int], attempt: int = 0) -> Collected:
        """Sample and score training prompts again, for a part that wants others."""
        return collect(self, rows, places, attempt=attempt)

    def reward_batch(self, ro: Rollout, images: Tensor, rows: list[int]) -> RewardBatch:
        """Put images of a rollout's leaves together with their prompts, for such a part."""
        return reward_batch(self, ro, images, rows)

    # ------------------------------------------------------------------------------- checkpoints

    def can_be_saved(self) -> bool:
        """Say whether a checkpoint of now would be one that a run can go on from, also after an
        error: no iteration is half done, and every trained number is finite."""
        if not self.state.intact:
            return False
        finite = self._finite()
        return not self.world.any(not finite) if self.sharded else finite

    def save(self, folder: Path) -> None:
        """Write all that a bit-for-bit resume needs; the random streams follow from the iteration.

        All processes call it and the first one writes; under FSDP each writes what it holds.
        """
        # tensors by file: weights, optimizer, and those of the parts
        tensors, state = optimizer_to_tensors(self.optimizer)
        files: dict[str, Any] = {"current": {k: p.detach() for k, p in self.params.items()}}
        files["optimizer"] = tensors
        parts = {}
        for name, kept in self.parts.states(self).items():
            files |= kept.files
            parts[name] = {"files": [*kept.files], "state": dict(kept.plain)}
        # what is no tensor goes to state.json
        about = {"iteration": self.iteration, "optimizer": state, "config": self.config.dump()}
        about |= {"parts": parts, "monitors": self.state.memory, KEY: self._meaning()}
        about |= draws_of(self.config, self.train_set)
        # of tensors that are spread over processes each one writes its rows, of the rest the first
        if self.sharded:
            shares = {k: rows for k, rows in files.items() if any(map(is_share, rows.values()))}
            rest = {name: rows for name, rows in files.items() if name not in shares}
            checkpoint.save_shares(folder, self.world, shares, rest, about)
        elif self.world.main:
            checkpoint.save(folder, files, about)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint; all processes call it. Raises CheckpointError if it is torn,
        belongs to another model, or is none of a run."""
        self.world.together(lambda: self._load(folder))

    def _load(self, folder: Path) -> None:
        like = self._shared_as if self.sharded else None
        files, state = checkpoint.open_checkpoint(folder, like=like, world=self.world)
        try:
            checked = checked_state(state, folder / checkpoint.STATE)
            self._put(files, checked, folder, state)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: whole, but not what a run saves: {type(error).__name__}: {error}; "
                "go on from another checkpoint"
            ) from error

    def _meaning(self) -> dict[str, Any]:
        return meaning_of(self.config, self.method, self.model)

    def _put(
        self,
        files: checkpoint.CheckpointTensors,
        state: CheckpointState,
        folder: Path,
        raw: dict[str, Any],
    ) -> None:
        """Take over what a checkpoint holds."""
        # before a weight is changed
        for name in ("current", "optimizer"):
            if name not in files:
                raise KeyError(name)
        check_settings(self.config.optimizer.kwargs, state.optimizer, f"{folder}")
        check_draws(state, self.config, self.train_set, folder)
        check_saved(self.params, files, "current")
        self.parts.check_states(self, [*state.parts], folder)
        check_meaning(raw, self._meaning(), folder)
        # the parts, the weights, the optimizer
        for part in self.parts.at("state_dict"):
            kept = state.parts.get(part.title())
            if kept is not None:
                there = PartState(files.only(kept.files), kept.plain)
                try:
                    part.load_state_dict(self, there, folder)
                except KeyError as error:
                    raise CheckpointError(
                        f"{folder / checkpoint.STATE}: parts.{part.title()}.files: {error} is in "
                        "none of them: it is not what a run saves; go on from another checkpoint"
                    ) from error
        put_saved(self.params, files, "current")
        if not self._finite():
            raise ValueError("a weight is no finite number")
        saved = files["optimizer"]
        optimizer_from_tensors(self.optimizer, saved, state.optimizer, f"{folder}: optimizer")
        self.state.iteration, self.state.memory = state.iteration, state.monitors

    def _shared_as(self, file: str, name: str) -> Tensor | None:
        """Return the parameter that a checkpoint's tensor is shared out as, if there is one."""
        if file == "optimizer":
            index = name.partition(".")[0]
            params = dict(enumerate(self.params.values()))
            return params.get(int(index)) if index.isdecimal() else None
        return self.params.get(name)

    def _finite(self) -> bool:
        """Say whether all that this process holds of the trained weights are numbers."""
        return all(bool(here(p.detach()).isfinite().all()) for p in self.params.values())


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
    for part in run.parts.at("state_dict"):
        run.state.intact = run.state.intact and part not in learners
    run.parts.ask("credited", run, it)
    # a part may have joined prompts into one group
    it.forest = it.forest._replace(whole=whole._replace(tree=it.tree))
