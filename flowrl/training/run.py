"""What a run has: its config, prompts, rewards, model, weights, optimizer and parts.

`make_run` makes it in this order, and finds what is wrong as early as it can: before a weight is
loaded where that is possible.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flowrl.algorithms.rollout.plan_steps import read_sigma_grid
from flowrl.config.load import Config, check_config, check_eval_count, check_eval_size
from flowrl.core.abilities import EncodesAhead, ExtendsModel, Visit, stays
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.processes import sharded, world
from flowrl.core.prompts import (
    PromptSet,
    check_records,
    groups_of,
    load_prompts,
    overlap,
    stream,
    undeclared,
)
from flowrl.core.seeds import generator
from flowrl.core.types import Cond, FlowModel, Plan, RewardBatch, Rollout, Tree
from flowrl.evaluation.reward_call import check_arguments, frames_of, try_out
from flowrl.evaluation.reward_set import RewardSet
from flowrl.evaluation.sources import (
    SOURCE,
    check_sources,
    check_starts,
    encode_rows,
    source_paths,
    sources_of,
)
from flowrl.training.batches import NodeTable, SharedForest
from flowrl.training.checks import (
    check_headline,
    check_levels,
    check_processes,
    check_sees_sigma,
    check_trainable,
    context_of,
)
from flowrl.training.method import Method, method_of
from flowrl.training.optimizer import make_optimizer
from flowrl.training.parts import parts_of
from flowrl.training.rehearsal import check_plan
from flowrl.training.start_weights import check_start, start_from
from flowrl.training.task import IterationCost, Task
from flowrl.training.weights import Weights


class OverlapWarning(UserWarning):
    """Held-out prompts are trained on: their scores say nothing about new prompts."""


Say = Callable[[str], object]


class PhaseTimer(Protocol):
    """What training wants of a logger: somebody who measures how long each phase takes, and hears
    how much of it is done."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def progress(self, done: int, total: int) -> None: ...


@dataclass
class State:
    """What changes while a run trains, besides weights and optimizer."""

    iteration: int = 0  # finished iterations
    # whether weights, optimizer and rewards are those after `iteration` whole iterations
    intact: bool = True
    # whether nothing that is saved has changed since then, so that the iteration can be made again
    repeatable: bool = False
    leave: Callable[[], None] | None = None  # raises where a run is to end at once
    memory: dict[str, Any] = field(default_factory=dict)  # of the monitors: plain JSON, saved
    stop: str = ""  # why a part ends the run after this iteration; empty: it goes on
    log: PhaseTimer | None = None
    # rewards and advantages of the last iteration
    histograms: dict[str, Any] = field(default_factory=dict)
    probe: Any = None  # a `flowrl.evaluation.velocity_drift.Probe` of the base model's velocity

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Say that a resume makes what is inside again, to the bit, wherever it is left."""
        self.repeatable = True
        try:
            yield
        finally:
            self.repeatable = False

    @property
    def lr_factor(self) -> float:
        """Return the factor of the learning rate, which monitors and callbacks may change."""
        return float(self.memory.get("lr_factor", 1.0))

    @lr_factor.setter
    def lr_factor(self, value: float) -> None:
        self.memory["lr_factor"] = value

    @property
    def kl_factor(self) -> float:
        """Return the factor of the weight of the `kl` section, likewise."""
        return float(self.memory.get("kl_factor", 1.0))

    @kl_factor.setter
    def kl_factor(self, value: float) -> None:
        self.memory["kl_factor"] = value


@dataclass
class Iteration:
    """One iteration on its way through the loop; parts read it and add to it."""

    rows: list[int]  # training prompts, over all processes
    places: range  # those of this process
    # `flowrl.training.rollout.Collected` of this process; None once its images are let go
    found: Any
    metrics: dict[str, float] = field(default_factory=dict)
    # network calls besides sampling, and rows that went backward, in this process
    spent: list[tuple[int, int]] = field(default_factory=list)
    visits: list[Visit] = field(default_factory=list)  # of prompts that were drawn in vain
    # from here on: of the whole forest, the same in all processes
    forest: SharedForest | None = None
    tree: Tree | None = None
    batch: RewardBatch | None = None
    values: dict[str, Tensor] = field(default_factory=dict)
    advantage: Tensor | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)  # for the credit's own `update`
    # which nodes are trained: of the whole forest, and of this process
    table: NodeTable | None = None
    own_table: NodeTable | None = None
    rollout: Rollout | None = None  # of this process


@dataclass(frozen=True, kw_only=True)
class Prepared(Task):
    """A task with its prompts and rewards."""

    train_set: PromptSet
    test_set: PromptSet
    reward_set: RewardSet

    @property
    def rewards(self) -> dict[str, Any]:
        """Return the rewards by name."""
        return self.reward_set.rewards

    @property
    def size(self) -> tuple[int, int]:
        """Return height and width of the images, in pixels."""
        return self.config.image.height, self.config.image.width

    @functools.cached_property
    def edits(self) -> bool:
        """Say whether training prompts start from images."""
        return any(SOURCE in record for record in self.train_set.records)


@dataclass(frozen=True, kw_only=True)
class Run(Prepared):
    """All that a run has."""

    model: FlowModel
    params: dict[str, nn.Parameter]  # that are trained, by name
    weights: Weights  # copies of them
    optimizer: torch.optim.Optimizer
    state: State
    grids: dict[int, Tensor] = field(default_factory=dict)  # the model's own, by number of steps

    @functools.cached_property
    def latent_shape(self) -> tuple[int, ...]:
        """Return the shape of one latent."""
        return tuple(self.model.latent_shape(*self.size))

    def sigmas(self, plan: Plan) -> Tensor:
        """Return the sigmas [S+1] that a plan is run on: the model's own, which it is asked for
        once, or what the plan reads off them."""
        steps = len(plan.noise) if plan.sigma_grid is None else plan.sigma_grid.steps
        if steps not in self.grids:
            self.grids[steps] = self.model.sigmas(steps, *self.size)
        own = self.grids[steps]
        return own if plan.sigma_grid is None else read_sigma_grid(own, plan.sigma_grid)

    def encode(self, rows: Sequence[int]) -> Cond:
        """Encode training prompts `rows` [G], with their sources where the model starts from images
        -> {name: [G, ...]}."""
        if hasattr(self.model, "encode_with_sources"):
            return encode_rows(self.model, self.train_set, rows, self.size)
        return self.model.encode(self.train_set.texts_of(rows))

    @property
    def iteration(self) -> int:
        """Return how many iterations are finished."""
        return self.state.iteration

    @property
    def cost(self) -> IterationCost:
        """Return what the current iteration costs."""
        return self.work(self.method.plan(self.iteration))

    @property
    def steps_before(self) -> list[int]:
        """Return how many optimizer steps were made at the end of each earlier iteration."""
        updates = self.config.train.updates
        return list(range(updates, (self.iteration + 1) * updates, updates))

    def policy(self, name: str) -> AbstractContextManager[None]:
        """Let the model run with a copy of the weights; as its base model, where that is what the
        copy makes of it and the model can."""
        base = getattr(self.model, "base", None)
        if base is not None and self.weights.adds_nothing(name):
            bare: AbstractContextManager[None] | None = base()
            if bare is not None:
                return bare
        return self.weights.using(name)

    def sampling_policy(self) -> AbstractContextManager[None]:
        """Let the model run with the weights that sample: `old`, where a copy follows slowly."""
        return self.weights.using("old") if "old" in self.method.copies else nullcontext()

    def stream(self, purpose: str, place: int, attempt: int) -> torch.Generator:
        """Return the random stream of a prompt, by its place in the current iteration, and by the
        attempt where the place is drawn again."""
        keys = (self.config.seed, purpose, self.iteration, place)
        return generator(*keys, attempt) if attempt else generator(*keys)

    def rows(self, iteration: int | None = None) -> list[int]:
        """Return the training prompts of an iteration, the current one if none is given."""
        number = self.iteration if iteration is None else iteration
        chosen: list[int] | None = self.parts.first("rows", self, number)
        t = self.config.train
        if chosen is not None:
            return chosen
        first, seed = number * t.prompts, self.config.seed
        return stream(self.train_set, seed=seed, first=first, count=t.prompts, balance=t.balance)

    def trains_policy(self) -> bool:
        """Say whether the policy learns in this iteration; learned rewards, and models that are
        trained along, may want to be alone for a while."""
        learns = self.parts.agree("learns", self.iteration)
        return learns and self.parts.agree("trains_policy", self.iteration)

    def encode_ahead(self, iterations: int | None = None) -> None:
        """Encode this process' prompts of the next `iterations`, or all that are trained on, and
        the held-out ones, so that no iteration waits for text encoders. A model that keeps no
        embeddings does nothing."""
        if not isinstance(self.model, EncodesAhead):
            return
        texts = self.test_set.texts_of(self.world.share(len(self.test_set)))
        trained = self.train_set.texts_of(_ahead(self, iterations))
        for part in self.parts.at("texts"):
            texts += part.texts(self)
        with self.parts.inside("encoding", self):  # the negative prompt, too
            self.model.encode_ahead([*trained, *texts])

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is inside, if there is a logger."""
        return self.state.log.phase(name) if self.state.log is not None else nullcontext()

    def progress(self, done: int, total: int) -> None:
        """Say how much of the running phase this process has done, if there is a logger. Of work on
        an accelerator: how much is under way. Here a run may be left at once."""
        if self.state.leave is not None:
            self.state.leave()
        if self.state.log is not None:
            self.state.log.progress(done, total)


def make_run(
    config: Config,
    *,
    model: FlowModel | None = None,
    log: PhaseTimer | None = None,
    callbacks: Sequence[Any] = (),
    say: Say | None = None,
) -> Run:
    """Make a config real; `say` hears what may take a while. Raises ConfigError for numbers that do
    not fit together, and what rewards raise."""
    check_config(config)
    use_threads(config)
    here, split = world().in_groups(context_of(config)), sharded()
    method = method_of(config)
    task = Task(
        config=config,
        method=method,
        world=here,
        sharded=split,
        parts=parts_of(config, method, callbacks),
    )
    check_processes(task)
    # prompts and rewards, before any weight is loaded
    frames = frames_of(config, model)
    prepared = _prepared(task, frames, say)
    # the model, and the copies of the weights that it came with
    bare = config.call("model")() if model is None else model
    made = extended(bare, method, config)
    _check_model(prepared, made, bare, frames)
    params = made.trainable()
    check_trainable(config, params, sharded=split)
    weights = Weights(params, stay=stays(made))
    about = prepared.known()
    about |= {"model": made, "params": params, "weights": weights, "state": State(log=log)}
    run = Run(
        **about, optimizer=make_optimizer(config.optimizer, [*params.values()], sharded=split)
    )
    run.parts.ask("model_ready", run)
    # the weights that training begins with
    if config.train.start:
        start_from(config.train.start, params, model=made)
    run.parts.ask("weights_ready", run)
    return run


def _prepared(task: Task, frames: int, say: Say | None) -> Prepared:
    """Read the prompts and make the rewards; a video has `frames`. All that can be found wrong
    without the model is."""
    config = task.config
    train, test = load_prompts(config.prompts.train), load_prompts(config.prompts.test)
    groups_of(train, config.train.balance)  # or says which record lacks the key
    warn_of_overlap(train, test)
    check_plan(config, task)
    check_start(config.train.start)
    # images that prompts start from
    check_sources(train, (config.image.height, config.image.width))
    check_sources(test, config.eval_size)
    check_eval_count(config, len(test))
    rewards = RewardSet(config, train.records, task.method.credit, frames=frames)
    prepared = Prepared(**task.known(), train_set=train, test_set=test, reward_set=rewards)
    task.parts.ask("begin", prepared)
    # rewards, and an image like those to come
    check_headline(config, rewards.rewards)
    if "sigma_rewards" in needs_of(task.method.credit):
        check_sees_sigma(config, rewards.rewards, task.method.plan(0))
    for prompts in (train, test):
        check_records(prompts, rewards.rewards)
    check_arguments(rewards.rewards, [*train.records, *test.records])
    rewards.probe()
    if say is not None:
        size, names = f"{config.image.width} x {config.image.height}", ", ".join(rewards.rewards)
        say(f"asking {names} about two random images of {size} before anything is loaded")
    try_out(rewards.rewards, first_batch(train, config, frames))
    return prepared


def first_batch(train: PromptSet, config: Config, frames: int) -> RewardBatch:
    """Make what a reward sees of two images, or videos of so many frames, of a run's size: noise
    with the first two records of the training list."""
    height, width = config.image.height, config.image.width
    shape = (2, *((frames,) if frames > 1 else ()), 3, height, width)
    draw = generator(config.seed, "tried out")
    images = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
    rows = [0, min(1, len(train) - 1)]
    return RewardBatch(
        images=images,
        prompts=train.texts_of(rows),
        group=torch.arange(2),
        meta=[train.records[row] for row in rows],
        sigma=torch.zeros(2),
        source=sources_of(train, rows, (height, width)),
    )


def _check_model(prepared: Prepared, model: FlowModel, bare: FlowModel, frames: int) -> None:
    """Check that a model can do the work."""
    prepared.parts.ask("check_model", prepared, model, frames)
    check_levels(prepared.config, prepared.method, model)
    check_model_frames(bare, frames)
    check_eval_size(model, prepared.config)
    for prompts in (prepared.train_set, prepared.test_set):
        check_starts(model, prompts)


def _ahead(run: Run, count: int | None) -> list[int]:
    """Return the prompts of this process in the next `count` iterations, or all that are trained
    on."""
    per_iteration, rows = run.config.train.prompts, dict[int, None]()
    size = len(run.train_set)
    last = size // per_iteration + 1  # more iterations show every prompt
    count = last if count is None else min(count, last)
    if run.parts.at("rows") or run.parts.at("scored"):
        # nobody knows which, and how many; all of a list that is not much longer
        return list(range(size)) if count * per_iteration >= size else []
    for later in range(run.iteration, run.iteration + count):
        found = run.rows(later)
        rows |= dict.fromkeys(found[place] for place in run.world.share(len(found)))
    return list(rows)


def warn_of_overlap(train: PromptSet, test: PromptSet) -> None:
    """Warn of held-out prompts that training knows."""
    said = told_overlap(train, test)
    if said:
        warnings.warn(said, OverlapWarning, stacklevel=5)


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
