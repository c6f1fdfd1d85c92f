"""Rewards that are offloaded: where their weights are while they score, and when they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scorerkit import SCORERS
from torch import Tensor, nn
from weightkit import Weights

from flowrl.config.calls import Call
from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.offloaded_rewards import Resting, networks_of, resting
from flowrl.evaluation.reward_call import ask, rewards_of

CUDA = torch.cuda.is_available()


class Moved(nn.Linear):
    """A layer that remembers where it was sent, and where it was when it was called."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.sent: list[str] = []
        self.away = False

    def to(self, *args: Any, **more: Any) -> Moved:
        self.sent.append(str(args[0]))
        return super().to(*args, **more)

    def forward(self, x: Tensor) -> Tensor:
        self.sent.append("asked")
        if bool(x.isnan().any()):
            raise ValueError("no number")
        return super().forward(x)


class Towers:
    def __init__(self) -> None:
        self.parts = {"it": [Moved()]}


class looks:
    judges_singly = True

    def __init__(self) -> None:
        self.towers = Towers()

    def __call__(self, batch: RewardBatch) -> Tensor:
        net = self.towers.parts["it"][0]
        found: Tensor = net(batch.images.mean((1, 2, 3))[:, None])[:, 0]
        return found


def batch_of(images: Tensor) -> RewardBatch:
    count = len(images)
    return RewardBatch(images, [""] * count, torch.arange(count), [{}] * count, torch.zeros(count))


def test_networks_are_away_but_while_it_scores() -> None:
    """Also after an error; what the reward promises stays, but for gradients."""
    call = Call("rewards.it", "looks", "looks", {}, function=looks, offload=True)
    (reward,) = rewards_of({"it": call}).values()
    (net,) = networks_of(reward)
    assert isinstance(reward, Resting) and isinstance(net, Moved)
    assert net.sent == ["cpu"] and reward.judges_singly and not reward.differentiable
    images = torch.rand(3, 3, 2, 2)
    scores = ask("it", reward, batch_of(images), "here")
    assert net.sent == ["cpu", "cpu", "asked", "cpu"]  # its home is this machine's CPU, too
    expected = images.mean((1, 2, 3)) * net.weight[0, 0] + net.bias[0]
    torch.testing.assert_close(scores, expected.detach())
    with pytest.raises(ValueError, match="no number"):
        reward(batch_of(images * torch.nan))
    assert net.sent[-2:] == ["asked", "cpu"]


def test_every_scorers_networks_are_found(weights: Weights) -> None:
    """All weights that a public layout has: nothing would be left on the device."""
    for name in ("clip, transformers", "dino"):
        reward = SCORERS[name](weights).make(device="cpu")
        held = sum(p.numel() for net in networks_of(reward) for p in net.parameters())
        assert held > 1000, name
    with pytest.raises(ConfigError, match="rewards.it.offload: jpeg has no network"):
        resting(Call.bind("rewards.it", {"fn": "jpeg", "offload": True}))
    call = Call.bind("rewards.it", {"fn": "jpeg", "offload": True})
    assert call.offload and call.to_dict()["offload"] is True


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_weights_leave_the_gpu(weights: Weights) -> None:
    scorer = SCORERS["clip, transformers"](weights)
    plain, away = scorer.make(device="cuda"), scorer.make(device="cuda")
    rested = Resting(away, list(networks_of(away)))
    assert all(p.device.type == "cpu" for net in rested.networks for p in net.parameters())
    torch.testing.assert_close(rested(scorer.batch()), plain(scorer.batch()))
    assert all(p.device.type == "cpu" for net in rested.networks for p in net.parameters())
