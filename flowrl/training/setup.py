"""Everything that a run needs in memory: prompts, functions, rewards, model, weights, optimizer."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch

from flowrl.config.load import Config, check_config, check_eval_count, check_eval_size
from flowrl.core.abilities import EncodesAhead, ExtendsModel, stays
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.processes import sharded, world
from flowrl.core.prompts import (
    PromptSet,
    check_records,
    groups_of,
    load_prompts,
    overlap,
    undeclared,
)
from flowrl.core.types import FlowModel
from flowrl.evaluation.preference_pairs import check_pairs
from flowrl.evaluation.reward_call import frames_of
from flowrl.evaluation.reward_set import RewardSet
from flowrl.evaluation.sources import check_sources, check_starts, source_paths
from flowrl.training.checks import (
    check_data_model,
    check_guides,
    check_headline,
    check_levels,
    check_scout_rewards,
    check_sees_sigma,
)
from flowrl.training.companions import Companions, copies_of
from flowrl.training.earlier_draws import earlier_draws
from flowrl.training.guidance import encoding_guidance, no_prompt
from flowrl.training.iteration_cost import IterationCost
from flowrl.training.kept_copies import snapshots_of
from flowrl.training.method import Method, method_of
from flowrl.training.optimizer import make_optimizer
from flowrl.training.process_checks import (
    check_context,
    check_processes,
    check_trainable,
    context_of,
)
from flowrl.training.prompt_choice import ahead, check_refill, sampler_of, training_rows
from flowrl.training.real_images import RealImages
from flowrl.training.rehearsal import check_plan, cost_of
from flowrl.training.reward_gradient import check_differentiable
from flowrl.training.start_weights import check_start, start_from
from flowrl.training.stored_images import check_encodes
from flowrl.training.teachers import Teachers
from flowrl.training.weights import Weights


class OverlapWarning(UserWarning):
    """Held-out prompts are trained on: their scores say nothing about new prompts."""


class PhaseTimer(Protocol):
    """What training wants of a logger: somebody who measures how long each phase takes, and hears
    how much of it is done."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def progress(self, done: int, total: int) -> None: ...


class Setup:
    """A config made real. What can be found wrong without weights is found before they are
    loaded."""

    def __init__(
        self, config: Config, *, model: FlowModel | None = None, log: PhaseTimer | None = None
    ) -> None:
        """Raises ConfigError for numbers that do not fit together, and what rewards raise."""
        check_config(config)
        use_threads(config)
        self.config, self.log, self.iteration = config, log, 0
        self.histograms: dict[str, Any] = {}  # rewards and advantages of the last iteration
        self.memory: dict[str, Any] = {}  # of the monitors: plain JSON that checkpoints keep
        # a `flowrl.evaluation.velocity_drift.Probe` of the base model's velocity
        self.probe: Any = None
        # whether weights, optimizer and rewards are those after `iteration` whole iterations
        self.intact = True
        self.world, self.sharded = world().in_groups(context_of(config)), sharded()
        check_processes(config, self.world, sharded=self.sharded)
        self._take_prompts()
        frames = frames_of(config, model)
        self._take_rewards(frames)
        bare = config.call("model")() if model is None else model
        self._take_model(bare, frames)
        self._take_weights()

    def _take_prompts(self) -> None:
        """Read the prompts, bind the method's functions, and check that they fit together."""
        config = self.config
        # the prompts, and who picks among them
        self.train_set = load_prompts(config.prompts.train)
        self.test_set = load_prompts(config.prompts.test)
        groups_of(self.train_set, config.train.balance)  # or says which record lacks the key
        warn_of_overlap(self.train_set, self.test_set)
        self.sampler = sampler_of(config, self.train_set)
        # the method's functions, and its plan of every iteration
        self.method: Method = method_of(config)
        check_context(self.method, self.world, sharded=self.sharded)
        self.kept = snapshots_of(config, self.method)
        self.earlier = earlier_draws(config, self.method, sharded=self.sharded)
        check_plan(config)
        check_start(config.train.start)
        for name, role in self.method.companions.items():
            check_start(role.begin, f"{name}.begin")
        # images that prompts start from, and those that are trained on
        check_sources(self.train_set, self.size)
        check_sources(self.test_set, config.eval_size)
        check_eval_count(config, len(self.test_set))
        plan = self.method.plan(0)
        if plan.stored is not None:
            check_pairs(self.train_set)
        check_refill(config, sharded=self.sharded, stored=plan.stored is not None)
        # real images, where loss or penalty ask for them
        self.real_images: RealImages | None = None
        if "data" in self.method.needs:
            self.real_images = RealImages(self.train_set, self.size)
        # teachers of a distillation, likewise
        self.teachers: Teachers | None = None
        if "teacher" in self.method.needs:
            self.teachers = Teachers(config, self.train_set)

    def _take_rewards(self, frames: int) -> None:
        """Make the rewards, and show them an image like those to come; a video has `frames`."""
        config, credit = self.config, self.method.credit
        self.reward_set = RewardSet(config, self.train_set.records, credit, frames=frames)
        self.rewards = self.reward_set.rewards
        if "reward" in self.method.needs:
            check_differentiable(config, self.rewards)
        check_headline(config, self.rewards)
        check_scout_rewards(config, self.rewards)
        if "sigma_rewards" in needs_of(credit):
            check_sees_sigma(config, self.rewards, self.method.plan(0))
        for prompts in (self.train_set, self.test_set):
            check_records(prompts, self.rewards)
        self.reward_set.probe()

    def _take_model(self, bare: FlowModel, frames: int) -> None:
        """Add to the model what the method trains beside it, and check that it can do the work."""
        self.model = extended(bare, self.method, self.config)
        check_encodes(self.model, self.method.plan(0), data="data" in self.method.needs)
        check_data_model(self.config, self.method, self.model, frames)
        check_guides(self.config, self.model)
        check_levels(self.config, self.method, self.model)
        check_model_frames(bare, frames)
        check_eval_size(self.model, self.config)
        for prompts in (self.train_set, self.test_set):
            check_starts(self.model, prompts)

    def _take_weights(self) -> None:
        """Name what is trained, keep the copies that the method looks at, make the optimizer."""
        config = self.config
        # what is trained
        self.params = self.model.trainable()
        check_trainable(config, self.params, sharded=self.sharded)
        self.weights = Weights(self.params, stay=stays(self.model))
        # copies of the base model are taken before, all others after the start weights
        first = {"ref", *copies_of(self.method.companions)}  # copies of the model as it came
        for name in [name for name in self.kept if name in first]:
            self.weights.snapshot(name)
        self._begin_companions()
        if config.train.start:
            start_from(config.train.start, self.params)
        for name in [name for name in self.kept if name not in first]:
            self.weights.snapshot(name)
        # what learns beside the policy, or is learnt from
        self.companions = Companions(self.method.companions, list(self.params.values()))
        if self.teachers is not None:
            self.teachers.load(self.weights)
        self.optimizer = make_optimizer(
            config.optimizer, list(self.params.values()), sharded=self.sharded
        )

    def _begin_companions(self) -> None:
        """Let companions begin with given weights where they should, and their slow copies."""
        for name, role in self.method.companions.items():
            for copy in copies_of({name: role}) if role.begin else []:
                with self.weights.training(copy):
                    start_from(role.begin, self.params, f"{name}.begin")

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width of the images, in pixels."""
        return self.config.image.height, self.config.image.width

    @property
    def cost(self) -> IterationCost:
        """Return what the current iteration costs."""
        return cost_of(self.config, self.iteration)

    @property
    def steps_before(self) -> list[int]:
        """Return how many optimizer steps were made at the end of each earlier iteration."""
        return [(k + 1) * self.config.train.updates for k in range(self.iteration)]

    def policy(self, name: str) -> AbstractContextManager[None]:
        """Let the model run with a copy of the weights; as its base model, where that is what the
        copy makes of it and the model can."""
        base = getattr(self.model, "base", None)
        bare = base() if base is not None and self.weights.adds_nothing(name) else None
        return self.weights.using(name) if bare is None else bare

    def encode_ahead(self, iterations: int | None = None) -> None:
        """Encode this process' prompts of the next `iterations`, or all that are trained on, and
        the held-out ones, so that no iteration waits for text encoders. A model that keeps no
        embeddings does nothing."""
        if not isinstance(self.model, EncodesAhead):
            return
        texts, held_out = self.train_set.texts, self.test_set.texts
        mine = [held_out[place] for place in self.world.share(len(held_out))]
        rows = ahead(
            self.config, self.train_set, self.sampler, self.world, self.iteration, iterations
        )
        blank = [no_prompt(self.model)] if self.config.train.empty_prompts else []
        with encoding_guidance(self.config, self.model):  # the negative prompt, too
            self.model.encode_ahead([*(texts[row] for row in rows), *mine, *blank])

    def rows(self) -> list[int]:
        """Return the training prompts of the current iteration."""
        return training_rows(self.config, self.train_set, self.sampler, self.iteration)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is inside, if there is a logger."""
        return self.log.phase(name) if self.log is not None else nullcontext()

    def progress(self, done: int, total: int) -> None:
        """Say how much of the running phase this process has done, if there is a logger. Of work on
        an accelerator: how much is under way."""
        if self.log is not None:
            self.log.progress(done, total)


def warn_of_overlap(train: PromptSet, test: PromptSet) -> None:
    """Warn of held-out prompts that training knows."""
    said = told_overlap(train, test)
    if said:
        warnings.warn(said, OverlapWarning, stacklevel=4)


def told_overlap(train: PromptSet, test: PromptSet) -> str:
    """Say which held-out prompts training knows, "" for none: the same text, the same in other
    words, or with the relation mirrored; each by itself. Edits are others if they start from other
    files."""
    here, there = _starts(test), _starts(train)
    found = overlap(test, train, (here, there) if here and there else None)
    lines = "; ".join(undeclared(found, test).lines(len(test)))
    if not lines:
        return ""
    return (
        f"prompts.test ({test.path}) and prompts.train ({train.path}): of the held-out prompts, "
        f"{lines}. Scores on these do not say how the model does on new prompts; take them out of "
        "one list"
    )


def _starts(prompts: PromptSet) -> list[tuple[Path, ...]]:
    """Return the files that each prompt starts from; [] where one has none."""
    rows = range(len(prompts))
    files = [tuple(map(Path.resolve, source_paths(prompts, row))) for row in rows]
    return files if all(files) else []


def use_threads(config: Config) -> None:
    """Let torch use as many CPU threads as the config says, if it says so."""
    if config.train.threads:
        torch.set_num_threads(config.train.threads)


def build_model(config: Config) -> FlowModel:
    """Make a config's model, with all that is trained in it."""
    return extended(config.call("model")(), method_of(config), config)


def extended(model: FlowModel, method: Method, config: Config) -> FlowModel:
    """Return the model, with the likelihood's own parameters if it has any."""
    if not isinstance(method.likelihood, ExtendsModel):
        return model
    shape = model.latent_shape(config.image.height, config.image.width)
    wants = method.likelihood.wants_prompts
    texts = load_prompts(config.prompts.train).texts if wants else []
    return method.likelihood.extend(model, shape, texts, config.seed)


def check_model_frames(model: FlowModel, frames: int) -> None:
    """Raise ConfigError if a model makes other videos than its rewards were made for."""
    made = int(getattr(model, "frames", 1))
    if made != frames:
        raise ConfigError(
            f"model: {type(model).__name__} makes videos of {made} frames, but the config says "
            f"{frames}; a model that makes videos takes their number as an argument `frames`"
        )
