"""What one iteration costs: network calls, pictures, decisions and micro-batches, worked out before training starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.samplers.steps import counts, roots_for
from flowrl.types import Plan


@dataclass(frozen=True)
class Budget:
    """The resolved arithmetic of one training iteration, from three user numbers: prompts, group size, updates."""

    prompts: int
    group: int  # pictures per prompt
    roots: int  # initial noises per prompt
    images: int  # pictures that are rewarded
    steps: int  # denoising steps
    evaluations: int  # velocity evaluations while sampling, counted per latent
    decisions: int  # draws that are trained
    updates: int  # optimizer steps
    states: int  # states that the decisions were drawn from: siblings share one, and its network pass
    per_update: int  # states per optimizer step; the last one may have fewer
    micro_batch: int  # states per network call while training
    passes: int  # forward and backward network calls per optimizer step
    rollout_batch: int  # latents per network call while sampling
    guided: bool  # each velocity evaluates the network twice, in one batch

    def lines(self) -> list[str]:
        """Say it in plain English."""
        double = ", each with and without the prompt (guidance)" if self.guided else ""
        return [
            f"sampling   {self.prompts} prompts x {self.group} pictures = {self.images} pictures from "
            f"{self.prompts * self.roots} initial noises, {self.steps} steps",
            f"           {self.evaluations} velocity evaluations in batches of {self.rollout_batch}{double}",
            f"training   {self.decisions} decisions from {self.states} states / {self.updates} updates = "
            f"{self.per_update} states per update, in {self.passes} "
            f"micro-batch{'' if self.passes == 1 else 'es'} of up to {self.micro_batch}",
        ]


def budget(
    plan: Plan,
    *,
    prompts: int,
    group: int,
    updates: int,
    micro_batch: int,
    rollout_batch: int,
    guided: bool = False,
    same_noise: bool = False,
) -> Budget:
    """Count what a plan costs with these numbers.

    Raises: ConfigError if the group does not divide into the plan's leaves, if nothing is trained, if there are fewer
    decisions than updates, or for a number below 1.
    """
    numbers = {"prompts": prompts, "updates": updates, "micro_batch": micro_batch, "rollout_batch": rollout_batch}
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"train.{name}: expected at least 1, got {value}")
    roots = roots_for(plan, group)
    times, one = (prompts, counts(plan, roots)) if same_noise else (prompts * roots, counts(plan))
    evaluations, decisions, states = (times * n for n in (one.evaluations, one.decisions, one.states))
    if states < updates:
        raise ConfigError(
            f"train.updates={updates} needs at least as many states to train on per iteration, but the plan gives "
            f"{states} (noise on the last step is not trained): put noise on earlier steps or lower train.updates"
        )
    per_update = math.ceil(states / updates)
    return Budget(
        prompts=prompts,
        group=group,
        roots=roots,
        images=prompts * group,
        steps=len(plan.noise),
        evaluations=evaluations,
        decisions=decisions,
        updates=updates,
        states=states,
        per_update=per_update,
        micro_batch=micro_batch,
        passes=math.ceil(per_update / micro_batch),
        rollout_batch=rollout_batch,
        guided=guided,
    )
