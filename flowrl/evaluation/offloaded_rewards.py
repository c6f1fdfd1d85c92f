"""Rewards whose networks are on their device only while they score, and on the host while the
policy samples and trains."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from flowrl.config.calls import Call
from flowrl.core.abilities import LearnedReward, RewardWithProbe
from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_answer import call_reward

_REGISTERED = ("_parameters", "_buffers", "_modules")


def resting(call: Call) -> Resting:
    """Make a reward that is offloaded. Raises ConfigError for one without networks, or one that is
    trained along."""
    reward = call.make()
    if isinstance(reward, LearnedReward):
        raise ConfigError(
            f"{call.key}.offload: {call.fn} is trained along, so that its networks have to stay"
        )
    networks = list(networks_of(reward))
    # some load a network with the first image that needs it
    if not networks and not getattr(reward, "loads_late", False):
        raise ConfigError(
            f"{call.key}.offload: {call.fn} has no network of its own to offload; leave it out"
        )
    return Resting(reward, networks)


class Resting:
    """A reward that is asked like any other; everything else is that of the reward itself.

    Networks that it loads while it scores or is probed rest from then on. No gradient goes through
    it: the weights are elsewhere by the time of a backward pass.
    """

    differentiable = False

    def __init__(self, reward: Any, networks: list[nn.Module]) -> None:
        self.reward, self.networks = reward, networks
        self.homes = [_device(network) for network in networks]
        self.late = bool(getattr(reward, "loads_late", False))
        self._rest()

    def __getattr__(self, name: str) -> Any:
        if name == "reward":  # while it is copied
            raise AttributeError(name)
        return getattr(self.reward, name)

    def __call__(self, batch: RewardBatch) -> Any:
        """Score with the networks on their device; afterwards they are on the host again, also on
        an error."""
        try:
            for network, home in zip(self.networks, self.homes, strict=True):
                network.to(home)
            return call_reward(self.reward, batch)
        finally:
            self._rest()

    def probe(self) -> None:
        """Ask the reward whether it is ready, if it can tell; what it loads for that rests."""
        try:
            if isinstance(self.reward, RewardWithProbe):
                self.reward.probe()
        finally:
            self._rest()

    def _rest(self) -> None:
        # home is where a network was loaded
        for network in networks_of(self.reward) if self.late else ():
            if not any(network is known for known in self.networks):
                self.networks.append(network)
                self.homes.append(_device(network))
        for network in self.networks:
            network.to("cpu")


def networks_of(owner: Any) -> Iterator[nn.Module]:
    """Yield the networks with weights that an object holds, in its attributes and in theirs, each
    once; also those that a network keeps without registering them as its parts."""
    seen: set[int] = set()
    left = [owner]
    while left:
        one = left.pop()
        # objects may point to each other in circles
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            # its parts move with it, so they are not listed again; what hangs on them does not
            parts = list(one.modules())
            seen |= {id(part) for part in parts}
            for part in parts:
                left += [value for name, value in vars(part).items() if name not in _REGISTERED]
            if any(True for _ in one.parameters()):
                yield one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple | set):
            left += one
        elif hasattr(one, "__dict__") and not isinstance(one, type | ModuleType):
            left += vars(one).values()


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device
