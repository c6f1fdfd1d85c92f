"""The trainer: what a run needs in memory, one iteration after the other, and its checkpoints."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from flowrl.core.errors import CheckpointError
from flowrl.core.processes import shared_as
from flowrl.core.shards import here, is_share
from flowrl.core.types import Rollout
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import CheckpointState, checked_state
from flowrl.training.collect import collect, images_worked_on, sample_forest
from flowrl.training.give_credit import give_credit
from flowrl.training.learn import learn
from flowrl.training.optimizer_state import (
    check_settings,
    optimizer_from_tensors,
    optimizer_to_tensors,
)
from flowrl.training.prompt_visits import join_places
from flowrl.training.refill import refill
from flowrl.training.refreshes import limits_of, refresh_decay
from flowrl.training.setup import Setup
from flowrl.training.shared_forest import join
from flowrl.training.weights import put_saved


class Trainer(Setup):
    """Train one config. Everything random follows from (seed, iteration), so that a resume is
    exact.

    Example::

        trainer = Trainer(load_config("shapes/flow_grpo"))
        for iteration in range(trainer.iteration, 10):
            metrics = trainer.step()
    """

    def step(self) -> dict[str, float]:
        """Run one iteration -> its metrics. Raises RunError on a NaN, RewardError if a reward
        fails."""
        rows = self.rows()
        places = self.world.share(len(rows))
        # sample and score
        found = self.world.together(lambda: collect(self, rows, places))
        found, rows, dropped = refill(self, found, rows, places)
        with self.phase("reward"):
            forest = join(self.world, found.rollout)
            advantage, metrics = give_credit(self, forest, found, rows, dropped)
        worked = images_worked_on(self, found.rollout)
        decoded, scored = self.world.totals([worked], 2)
        metrics |= {"decoded": float(decoded), "scored": float(scored)}
        tree = join_places(self, forest.whole.tree, rows)
        forest = forest._replace(whole=forest.whole._replace(tree=tree))
        # the images go before anything is learned
        ro = found.rollout
        del found
        # update
        if self.reward_set.trains_policy(self.iteration):
            with self.phase("train"):
                metrics |= learn(self, ro, advantage, rows, forest)
            metrics |= self.follow(metrics.get("kl_most", 0.0))
        # the cost is this iteration's: the next one may have another plan
        metrics = {"nfe": float(self.cost.nfe), "backwards": 0.0, **metrics}
        if self.earlier is not None:
            metrics["nfe"] += self.world.totals([[self.earlier.calls]], 1)[0]
        if self.config.train.refill:
            # what was drawn in vain cost as much as what was not
            metrics["refilled"] = float(len(dropped))
            metrics["nfe"] += len(dropped) * self.cost.nfe / len(rows)
            for name, count in (("decoded", decoded), ("scored", scored)):
                metrics[name] += len(dropped) * count / len(rows)
        self.iteration += 1
        self.intact = True
        return metrics

    def trains_policy(self) -> bool:
        """Say whether the policy learns in this iteration; learned rewards, and models that are
        trained along, may want to be alone for a while."""
        rewards = self.reward_set.trains_policy(self.iteration)
        return rewards and self.companions.trains_policy(self.iteration)

    def can_be_saved(self) -> bool:
        """Say whether a checkpoint of now would be one that a run can go on from, also after an
        error: no iteration is half done, and every trained number is finite."""
        if not self.intact:
            return False
        finite = self._finite()
        return not self.world.any(not finite) if self.sharded else finite

    def sample(self, rows: list[int]) -> Rollout:
        """Sample the forest of the training prompts `rows`, as the current iteration would."""
        return sample_forest(self, rows)

    def save(self, folder: Path) -> None:
        """Write all that a bit-for-bit resume needs; the random streams follow from the iteration.

        All processes call it and the first one writes; under FSDP each writes what it holds.
        """
        # tensors by file: weights, optimizer, copies, trained rewards, companions, sampler
        tensors, state = optimizer_to_tensors(self.optimizer)
        files = {"current": {k: p.detach() for k, p in self.params.items()}, "optimizer": tensors}
        along, about_along = self.companions.files()
        files |= {**self._kept_weights(), **self.reward_set.state_dict(), **along}
        if self.sampler is not None:
            files["sampler"] = self.sampler.state_dict()
        if self.earlier is not None:
            files["earlier"] = self.earlier.state_dict()
        # what is no tensor goes to state.json
        config = self.config.dump()
        about = {"iteration": self.iteration, "optimizer": state, "config": config}
        about |= {"companions": about_along} if about_along else {}
        about |= {"monitors": self.memory}
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
            self._put(files, checked_state(state, folder / checkpoint.STATE), folder)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{folder}: whole, but not what a run saves: {type(error).__name__}: {error}; "
                "go on from another checkpoint"
            ) from error

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

    def _put(
        self, files: checkpoint.CheckpointTensors, state: CheckpointState, folder: Path
    ) -> None:
        """Take over what a checkpoint holds."""
        for name in ("current", "optimizer"):  # before a weight is changed
            if name not in files:
                raise KeyError(name)
        check_settings(self.config.optimizer.kwargs, state.optimizer, f"{folder}")
        self.companions.check(state.companions, folder)
        put_saved(self.params, files, "current")
        files.drop("current")
        if not self._finite():
            raise ValueError("a weight is no finite number")
        optimizer = files.pop("optimizer")
        rewards = {}
        for name in [*files]:
            if name.startswith("reward-") or name in ("aggregate", "credit"):
                rewards[name] = files.pop(name)
        # the rewards, the copies of the weights
        self.reward_set.load_state_dict(rewards, folder)
        self._load_sampler(files.pop("sampler") if "sampler" in files else None, folder)
        if self.earlier is not None:
            self.earlier.load_state_dict(files.pop("earlier"))
        self.companions.load(files, state.companions, folder)
        self._load_copies(files, folder)
        # the optimizer
        optimizer_from_tensors(self.optimizer, optimizer, state.optimizer, f"{folder}: optimizer")
        self.iteration, self.memory = state.iteration, state.monitors

    def follow(self, kl: float = 0.0) -> dict[str, float]:
        """Move the averaged weights towards the current ones, at first faster than ``train.ema``
        says, and the copies `old` and `slow` as their sections say, which may depend on the
        iteration's largest `kl` -> which of these were refreshed."""
        decay = self.config.train.ema
        if decay:
            self.weights.lerp("ema", min(decay, (1 + self.iteration) / (10 + self.iteration)))
        steps = (self.iteration + 1) * self.config.train.updates
        limits, refreshed = limits_of(self.config), {}
        for name, decay_at in self.method.copies.items():
            if name not in limits:
                self.weights.lerp(name, decay_at(steps))
                continue
            decay = refresh_decay(decay_at, steps, self.memory, name, kl > limits[name])
            self.weights.lerp(name, decay)
            refreshed[f"refreshed/{name}"] = float(decay == 0)
        return refreshed

    def _kept_weights(self) -> dict[str, dict[str, Tensor]]:
        """Return the copies of the weights that outlive an iteration."""
        return {name: rows for name, rows in self.weights.state_dict().items() if name in self.kept}

    def _load_sampler(self, state: dict[str, Tensor] | None, folder: Path) -> None:
        if (state is None) != (self.sampler is None):
            has, wants = ("none", "one") if state is None else ("one", "none")
            raise CheckpointError(
                f"{folder}: holds {has} of a sampler's memories, this config needs {wants}; the "
                "section sampler must be there or not as in the run that is resumed"
            )
        if state is not None and self.sampler is not None:
            self.sampler.load_state_dict(state)

    def _load_copies(self, files: checkpoint.CheckpointTensors, folder: Path) -> None:
        wanted = sorted(self._kept_weights())
        if sorted(files) != wanted:
            raise CheckpointError(
                f"{folder}: holds the weights {sorted(files)}, this config needs {wanted}; "
                "train.ema, kl, old, slow and an eval.tuned below 1 must be on or off as in the "
                "run that is resumed"
            )
        shared = {}
        for name, rows in files.items():
            like = {k: self.params.get(k, v) for k, v in rows.items()}
            shared[name] = {k: shared_as(v, like[k]) for k, v in rows.items()}
        # a teacher is another run's, so no checkpoint of this one has it
        theirs = self.teachers.names() if self.teachers is not None else []
        self.weights.load_state_dict(shared, besides=theirs)
