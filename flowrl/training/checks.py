"""What is refused before training: parts of a config that do not go together."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from flowrl.algorithms.rollout.plan_steps import read_sigma_grid
from flowrl.config.load import Config
from flowrl.core.abilities import (
    ExtendsModel,
    discrete_levels,
    known_ahead,
    sees_latents,
    sees_sigma,
)
from flowrl.core.errors import ConfigError
from flowrl.core.types import FlowModel, Plan
from flowrl.training.method import Method


def check_headline(config: Config, rewards: dict[str, Any]) -> None:
    """Raise ConfigError if the score of the evaluations is of latents, which these do not have."""
    if sees_latents(rewards[config.headline]):
        raise ConfigError(
            f"eval.score: {config.headline} judges latents, but evaluations have images alone; "
            "name a reward that judges these, with weight 0 if it is only watched"
        )


class _OfTimesteps:
    """Stand in for a model that knows the noise levels of its training timesteps alone."""

    discrete_levels = True

    def sigmas(self, steps: int, *_: int) -> Tensor:
        """Return a grid [steps + 1]; which one does not matter."""
        return torch.linspace(1, 0, steps + 1)


def check_ahead(config: Config, method: Method) -> None:
    """Raise ConfigError if the method asks a model for noise levels which that, by what is known
    before it is loaded, does not know."""
    if known_ahead(config.model.function, config.model.kwargs).discrete_levels:
        check_levels(config, method, cast("FlowModel", _OfTimesteps()))


def check_levels(config: Config, method: Method, model: FlowModel) -> None:
    """Raise ConfigError if a model that knows the noise levels of its sampler alone is to be asked
    about others, by the likelihood or the plan."""
    likelihood: Any = method.likelihood
    if not discrete_levels(model):
        return
    if hasattr(likelihood, "queries"):
        raise ConfigError(
            f"likelihood {config.likelihood.fn}: judges what is generated at noise levels between "
            f"the sampler's, and model {config.model.fn} knows those of its training timesteps "
            "alone; take another likelihood, such as reverse, or another model"
        )
    if getattr(likelihood, "draws_steps", False):
        raise ConfigError(
            f"likelihood {config.likelihood.fn}: takes steps between noise levels of its own, and "
            f"model {config.model.fn} knows those of its training timesteps alone; take draft, "
            "draft_lv, align_prop or refl, which take the sampler's steps"
        )
    if getattr(likelihood, "draws_levels", False):
        raise ConfigError(
            f"likelihood {config.likelihood.fn}: draws noise levels of its own (times "
            f"{likelihood.times.kind}), and model {config.model.fn} knows those of its training "
            "timesteps alone; set likelihood.times to grid or any_steps, which take the sampler's"
        )
    _check_grid(config, method.plan(0), model)


def _check_grid(config: Config, plan: Plan, model: FlowModel) -> None:
    """Raise ConfigError if a plan samples between the noise levels of the model's own grid."""
    if plan.sigma_grid is None:
        return
    own = model.sigmas(plan.sigma_grid.steps, config.image.height, config.image.width)
    known = torch.isin(read_sigma_grid(own, plan.sigma_grid), own)
    if not bool(known.all()):
        raise ConfigError(
            f"plan {config.plan.fn}: samples at noise levels between those of the model's grid, "
            f"and model {config.model.fn} knows those of its training timesteps alone; take a plan "
            "on the model's own grid, such as full or ode"
        )


def check_sees_sigma(config: Config, rewards: dict[str, Any], plan: Plan) -> None:
    """Raise ConfigError unless every reward that counts looks at the sigma of what it judges, or
    the plan finishes every image."""
    left = len(plan.tail) - 1 - torch.arange(len(plan.tail))
    if not bool(((plan.tail > 0) & (plan.tail < left)).any()):
        return
    for name, weight in config.reward_weights.items():
        if weight and not sees_sigma(rewards[name]):
            raise ConfigError(
                f"rewards.{name}: {config.rewards[name].fn} judges every image as a finished one, "
                f"but credit {config.credit.fn} compares estimates at all noise levels. Take "
                "step_aware, or another that says `sees_sigma = True`, or finish the images by "
                "plan.finish=true, or set its weight to 0, so that it is only watched"
            )


def check_processes(task: Any) -> None:
    """Raise ConfigError unless the prompts of an iteration can be shared out over the processes,
    and all parts go with how these work together; task: `flowrl.training.task.Task`."""
    config, world, method = task.config, task.world, task.method
    # a prompt's images stay in one process, since they are compared with each other
    prompts = config.train.prompts
    if prompts < world.size:
        raise ConfigError(
            f"train.prompts={prompts}: {world.size} processes need at least one prompt each, since "
            "the images of a prompt stay together; start fewer of them"
        )
    # under FSDP each network call gathers the weights from all processes, and
    # one with less to do would make the others wait for ever
    if task.sharded and prompts % world.size:
        raise ConfigError(
            f"train.prompts={prompts}: under FSDP all processes call the network in step, so each "
            f"needs equally many prompts; take a multiple of {world.size}"
        )
    if task.sharded and method.plan(0).windows is not None:
        raise ConfigError(
            f"plan {config.plan.fn}: each prompt's window makes network calls of its own, but "
            "under FSDP all processes call the network in step; set plan.each=iteration, or start "
            "the processes without FSDP"
        )
    for part in task.parts:
        if task.sharded and part.fsdp:
            raise ConfigError(
                f"{part.asked_by(config)}: {part.fsdp} does not go with FSDP, under which all "
                "processes call the network in step; start the processes without it"
            )
    # what was not proven where processes compute each sample together
    also = [part.context for part in task.parts if part.context]
    if isinstance(method.likelihood, ExtendsModel):
        also.append("a likelihood with parameters of its own")
    if world.context > 1 and also:
        raise ConfigError(
            f"model.runtime.context_parallel={world.context}: does not go with {also[0]}; set it "
            "to 1"
        )


def context_of(config: Config) -> int:
    """Return how many processes compute each sample together."""
    runtime = config.model.kwargs.get("runtime") or {}
    return int(runtime.get("context_parallel", 1))


def check_trainable(config: Config, params: dict[str, nn.Parameter], *, sharded: bool) -> None:
    """Raise ConfigError unless there is something to train, all of it shared out under FSDP."""
    if not params:
        raise ConfigError(
            f"model: {config.model.fn} has nothing to train; choose a `tune` other than none"
        )
    if sharded and len({type(p.data) for p in params.values()}) > 1:
        raise ConfigError(
            f"likelihood: {config.likelihood.fn} has parameters of its own, which FSDP does not "
            "share out; start the processes without FSDP"
        )
