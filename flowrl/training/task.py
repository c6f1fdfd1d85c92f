"""What is known of a run from its config alone, and what an iteration of it costs: network calls,
images, decisions and micro-batches."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, fields
from typing import Any

from flowrl.algorithms.forest import Trains
from flowrl.algorithms.rollout.plan_steps import PlanCounts, key_of, roots_for, total_counts
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.processes import ALONE, World
from flowrl.core.types import Likelihood, Plan
from flowrl.training.guidance import is_guided
from flowrl.training.method import Method
from flowrl.training.parts import Parts

MOST_IMAGES, MOST_STEPS = 10**6, 1000  # of an iteration: more is a slip of the pen


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is known of a run from its config alone."""

    config: Config
    method: Method
    parts: Parts
    world: World = ALONE
    sharded: bool = False
    # of the plans that were looked at, by `key_of`: no iteration counts one again
    costs: dict[str, IterationCost] = field(default_factory=dict)

    @functools.cached_property
    def guided(self) -> bool:
        """Say whether each velocity evaluates the network with and without the prompt."""
        return is_guided(self.config)

    def work(self, plan: Plan) -> IterationCost:
        """Count what an iteration with a plan costs; of one that was counted before, say it."""
        key = key_of(plan)
        if key not in self.costs:
            cost = cost_of_plan(self.config, plan, self.method.likelihood, guided=self.guided)
            for part in self.parts.at("work"):
                cost = part.work(self, plan, cost)
            self.costs[key] = cost
        return self.costs[key]

    def trained_calls(self, update: int, steps: list[int]) -> int:
        """Return the network calls that training one row takes at most: those of the method, and
        of parts."""
        calls = self.method.trained_calls(update, steps)
        if calls:
            for part in self.parts.at("row_calls"):
                calls += part.row_calls(self)
        return calls

    def known(self) -> dict[str, Any]:
        """Return the fields by name, for a record of more."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


@dataclass(frozen=True)
class IterationCost:
    """The resolved arithmetic of one training iteration, from three user numbers: prompts, group
    size, updates."""

    prompts: int
    group: int  # images per prompt
    roots: int  # initial noises per prompt
    starts: int  # different initial noises of all prompts
    images: int  # images that are rewarded
    steps: int  # denoising steps
    nfe: int  # network evaluations (NFE) of sampling, counted per latent
    trains: Trains  # what is trained
    decisions: int  # how many of them; draws are called decisions
    updates: int  # optimizer steps
    # rows of the network: siblings share the state they were drawn from, and its network pass
    states: int
    per_update: int  # states per optimizer step; the last one may have fewer
    micro_batch: int  # states per network call while training
    passes: int  # forward and backward network calls per optimizer step
    rollout_batch: int  # latents per network call while sampling
    guided: bool  # each velocity evaluates the network twice, in one batch
    # what parts add: where alone a latent takes two evaluations, such as "sampling", which `nfe`
    # counts; and what is said before the sampling, of its evaluations, and at the end
    twice: frozenset[str] = frozenset()
    before: tuple[str, ...] = ()
    evaluated: str = ""
    after: tuple[str, ...] = ()
    source: str = ""  # of images that are not sampled: where they come from

    def lines(self) -> list[str]:
        """Say it in plain English."""
        double = ", each with and without the prompt (guidance)" if self.guided else self.evaluated
        calls = f"micro-batch{'' if self.passes == 1 else 'es'} of up to {self.micro_batch}"
        # a line or two per phase, in the order of an iteration
        images = f"{self.prompts} prompts x {self.group} images = {self.images} images"
        sampled = [
            f"sampling   {images} from {self.starts} initial noises, {self.steps} steps",
            f"           {self.nfe} NFE in batches of {self.rollout_batch}{double}",
        ]
        if self.source:
            sampled = [f"images     {images} {self.source}"]
        return [
            *self.before,
            *sampled,
            f"training   {self._trained()} / {self.updates} updates = {self.per_update} states per "
            f"update, in {self.passes} {calls}",
            *self.after,
        ]

    def _trained(self) -> str:
        if self.trains == "draws":
            return f"{self.decisions} decisions from {self.states} states"
        what = {"roots": "initial noises", "leaves": "images", "steps": "steps"}[self.trains]
        return f"{self.decisions} {what} as {self.states} states"


def iteration_cost(
    plan: Plan,
    *,
    prompts: int,
    group: int,
    updates: int,
    micro_batch: int,
    rollout_batch: int,
    guided: bool = False,
    same_noise: bool = False,
    trains: Trains = "draws",
    rows: int = 1,
) -> IterationCost:
    """Count what a plan costs with these numbers. trains, rows: as a likelihood says.

    Raises: ConfigError if the group does not divide into the plan's leaves, if nothing is trained,
    if there are fewer decisions than updates, or for a number below 1 or absurdly large.
    """
    numbers = {"prompts": prompts, "updates": updates}
    numbers |= {"micro_batch": micro_batch, "rollout_batch": rollout_batch}
    _check_numbers(numbers, prompts * group, len(plan.noise))
    roots = roots_for(plan, group)
    all_of = total_counts(plan, prompts, roots, same_noise=same_noise)
    images = prompts * group * (len(plan.noise) if trains == "steps" else 1)
    starts = prompts * (1 if same_noise else roots)
    decisions, states = _trained(trains, all_of, starts, images, rows)
    if states < updates:
        raise ConfigError(
            f"train.updates={updates} needs at least as many states to train on per iteration, but "
            f"the plan gives {states} (noise on the last step is not trained): put noise on "
            "earlier steps or lower train.updates"
        )
    per_update = math.ceil(states / updates)
    return IterationCost(
        prompts=prompts,
        group=group,
        roots=roots,
        starts=starts,
        images=prompts * group,
        steps=len(plan.noise),
        nfe=all_of.nfe,
        trains=trains,
        decisions=decisions,
        updates=updates,
        states=states,
        per_update=per_update,
        micro_batch=micro_batch,
        passes=math.ceil(per_update / micro_batch),
        rollout_batch=rollout_batch,
        guided=guided,
    )


def _check_numbers(numbers: dict[str, int], images: int, steps: int) -> None:
    """Refuse numbers below 1, and absurdly many images or steps. Raises ConfigError."""
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"train.{name}: expected at least 1, got {value}")
    if images > MOST_IMAGES:
        raise ConfigError(
            f"train.prompts x train.group: {images:,} images in an iteration; expected at most "
            f"{MOST_IMAGES:,}"
        )
    if steps > MOST_STEPS:
        raise ConfigError(f"plan: {steps:,} steps; expected at most {MOST_STEPS:,}")


def _trained(
    trains: Trains, all_of: PlanCounts, starts: int, images: int, rows: int
) -> tuple[int, int]:
    """Count what is trained, and the rows of the network that takes; starts: different initial
    noises; images: or their steps."""
    if trains == "draws":
        return all_of.decisions, all_of.states
    nodes = starts if trains == "roots" else images
    return nodes, rows * nodes


def cost_of_plan(
    config: Config, plan: Plan, likelihood: Likelihood, *, guided: bool
) -> IterationCost:
    """Count what an iteration of a config with a plan costs, without its parts; guided: each
    velocity evaluates the network twice."""
    t = config.train
    return iteration_cost(
        plan,
        prompts=t.prompts,
        group=t.group,
        updates=t.updates,
        micro_batch=t.micro_batch,
        rollout_batch=t.rollout_batch,
        guided=guided,
        same_noise=t.same_noise,
        trains=likelihood.trains,
        rows=max(1, likelihood.rows_per_state),
    )
