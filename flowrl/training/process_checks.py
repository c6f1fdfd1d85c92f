"""What a run of several processes can do, checked before anything is loaded."""

from __future__ import annotations

from torch import nn

from flowrl.config.load import Config
from flowrl.core.abilities import ExtendsModel
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.processes import World
from flowrl.training.method import COMPANIONS, Method


def check_processes(config: Config, world: World, *, sharded: bool) -> None:
    """Raise ConfigError unless the prompts of an iteration can be shared out over the processes."""
    # a prompt's images stay in one process, since they are compared with each other
    prompts = config.train.prompts
    if prompts < world.size:
        raise ConfigError(
            f"train.prompts={prompts}: {world.size} processes need at least one prompt each, since "
            "the images of a prompt stay together; start fewer of them"
        )
    # under FSDP each network call gathers the weights from all processes, and
    # one with less to do would make the others wait for ever
    if sharded and prompts % world.size:
        raise ConfigError(
            f"train.prompts={prompts}: under FSDP all processes call the network in step, so each "
            f"needs equally many prompts; take a multiple of {world.size}"
        )
    if sharded and config.call("plan")(0).windows is not None:
        raise ConfigError(
            f"plan {config.plan.fn}: each prompt's window makes network calls of its own, but "
            "under FSDP all processes call the network in step; set plan.each=iteration, or start "
            "the processes without FSDP"
        )
    along = [name for name in COMPANIONS if getattr(config, name) is not None]
    if sharded and along:
        raise ConfigError(
            f"{along[0]}: a model that is trained along does not go with FSDP; start the processes "
            "without it"
        )
    if sharded and "reward" in needs_of(config.call("loss")):
        raise ConfigError(
            f"loss {config.loss.fn}: images may take different numbers of steps with a gradient, "
            "but under FSDP all processes call the network in step; start the processes without "
            "FSDP"
        )


def context_of(config: Config) -> int:
    """Return how many processes compute each sample together."""
    runtime = config.model.kwargs.get("runtime") or {}
    return int(runtime.get("context_parallel", 1))


def check_context(method: Method, world: World, *, sharded: bool) -> None:
    """Raise ConfigError for what was not proven where processes compute each sample together."""
    if world.context == 1:
        return
    also = [
        *["FSDP"] * sharded,
        *["a loss that follows the reward's gradient"] * ("reward" in method.needs),
        *["training on real images"] * ("data" in method.needs),
        *["models that are trained along"] * bool(method.companions),
        *["a likelihood with parameters of its own"] * isinstance(method.likelihood, ExtendsModel),
    ]
    if also:
        raise ConfigError(
            f"model.runtime.context_parallel={world.context}: does not go with {also[0]}; set it "
            "to 1"
        )


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
