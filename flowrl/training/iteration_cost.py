"""What one iteration costs: network calls, images, decisions and micro-batches, worked out before
training starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from flowrl.algorithms.nodes import Trains
from flowrl.algorithms.rollout.plan_steps import PlanCounts, roots_for, total_counts
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.types import Likelihood, Plan
from flowrl.training.guidance import guides_reference, is_guided, samples_guided

MOST_IMAGES, MOST_STEPS = 10**6, 1000  # of an iteration: more is a slip of the pen


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
    samples_guided: bool = False  # only in sampling; `nfe` counts both
    guides_reference: bool = False  # only the base model that is measured from
    previews: tuple[int, int] = (0, 0)  # of a prompt's noises, and their steps
    stored: bool = False  # the images are there already, as the pairs of offline preferences are

    def lines(self) -> list[str]:
        """Say it in plain English."""
        # what goes into the lines only sometimes
        double = ", each with and without the prompt (guidance)" if self.guided else ""
        if self.samples_guided:
            double = " latents, each with and without the prompt (train.guidance)"
        calls = f"micro-batch{'' if self.passes == 1 else 'es'} of up to {self.micro_batch}"
        twice = "           the base model with and without the prompt (train.reference_guidance)"
        count, steps = self.previews
        looks = [f"scouting   {self.prompts} prompts x {count} noises, {steps} steps"] * bool(count)
        # a line or two per phase, in the order of an iteration
        images = f"{self.prompts} prompts x {self.group} images = {self.images} images"
        sampled = [
            f"sampling   {images} from {self.starts} initial noises, {self.steps} steps",
            f"           {self.nfe} NFE in batches of {self.rollout_batch}{double}",
        ]
        read = [f"images     {images} from files, encoded {self.rollout_batch} at a time"]
        return [
            *looks,
            *(read if self.stored else sampled),
            f"training   {self._trained()} / {self.updates} updates = {self.per_update} states per "
            f"update, in {self.passes} {calls}",
            *([twice] if self.guides_reference else []),
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
    samples_guided: bool = False,
    guides_reference: bool = False,
    same_noise: bool = False,
    trains: Trains = "draws",
    rows: int = 1,
    previews: tuple[int, int] = (0, 0),
) -> IterationCost:
    """Count what a plan costs with these numbers. trains, rows: as a likelihood says; previews: how
    many noises of a prompt are looked at, and in how many steps; samples_guided: a velocity of
    sampling takes two evaluations, one of training one; guides_reference: the base model's two.

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
    nfe, per_update = all_of.nfe + prompts * math.prod(previews), math.ceil(states / updates)
    return IterationCost(
        prompts=prompts,
        group=group,
        roots=roots,
        starts=starts,
        images=prompts * group,
        steps=len(plan.noise),
        nfe=2 * nfe if samples_guided else nfe,
        trains=trains,
        decisions=decisions,
        updates=updates,
        states=states,
        per_update=per_update,
        micro_batch=micro_batch,
        passes=math.ceil(per_update / micro_batch),
        rollout_batch=rollout_batch,
        guided=guided,
        samples_guided=samples_guided,
        guides_reference=guides_reference,
        previews=previews,
        stored=plan.stored is not None,
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


class Guided(NamedTuple):
    """Where the network is evaluated with and without the prompt."""

    always: bool
    sampling: bool  # in sampling alone
    reference: bool  # for the base model alone


def guided_of(config: Config) -> Guided:
    """Say where a config's model is guided."""
    return Guided(is_guided(config), samples_guided(config), guides_reference(config))


def cost_of(config: Config, iteration: int = 0) -> IterationCost:
    """Count what one iteration of a config costs. Raises ConfigError as `iteration_cost` and
    the plan do."""
    plan = config.call("plan")(iteration)
    return cost_of_plan(config, plan, config.likelihood.make(), guided_of(config))


def cost_of_plan(
    config: Config, plan: Plan, likelihood: Likelihood, guided: Guided
) -> IterationCost:
    """Count what an iteration of a config with a plan costs."""
    t = config.train
    return iteration_cost(
        plan,
        prompts=t.prompts,
        group=t.group,
        updates=t.updates,
        micro_batch=t.micro_batch,
        rollout_batch=t.rollout_batch,
        guided=guided.always,
        samples_guided=guided.sampling,
        guides_reference=guided.reference,
        same_noise=t.same_noise,
        trains=likelihood.trains,
        rows=max(1, likelihood.rows_per_state),
        previews=(config.scout.images, config.scout.steps),
    )
