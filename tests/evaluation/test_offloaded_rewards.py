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
from rewards.latent_preference import LatentJudge, load_transformer

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


class Hung(nn.Module):
    """A network that keeps others without registering them, in a list of a part and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(1, 1)
        self.part.beside = {"it": [Moved()]}  # type: ignore[assignment]
        object.__setattr__(self, "frozen", Moved())
        self.library = torch  # a module of Python is nobody's network


def test_networks_that_a_network_does_not_register_are_found() -> None:
    """Two of them, and the network itself with its one part."""
    net = Hung()
    found = {id(one) for one in networks_of(net)}
    assert found == {id(net), id(net.frozen), id(net.part.beside["it"][0])}  # type: ignore[index]
    # also where the network itself has no weights
    empty = nn.Module()
    empty.held = [moved := Moved()]  # type: ignore[assignment]
    assert list(networks_of(empty)) == [moved]


def test_the_transformer_of_a_judge_of_latents_rests() -> None:
    """All that the judge computes with: its head, which is registered, and the frozen layers."""
    taps: dict[str, Any] = {"taps": [1, 3], "width": 32, "queries": 2}
    judge = LatentJudge(load_transformer("assets/shapes-sd3"), **taps)
    transformer = judge.transformer[0]
    assert {id(net) for net in networks_of(judge)} == {id(judge), id(transformer)}


class loads_at_once:
    """Load a network with the first image, another one when it is probed."""

    loads_late = True

    def probe(self) -> None:
        self.other = Moved()

    def __call__(self, batch: RewardBatch) -> Tensor:
        if not hasattr(self, "net"):
            self.net = Moved()
        found: Tensor = self.net(batch.images.mean((1, 2, 3))[:, None])[:, 0]
        return found


def test_networks_that_come_late_rest_from_then_on() -> None:
    call = Call("rewards.it", "late", "late", {}, function=loads_at_once, offload=True)
    reward: Any = resting(call)
    assert reward.networks == []
    reward.probe()
    assert reward.other.sent == ["cpu"]
    reward(batch_of(torch.rand(2, 3, 2, 2)))
    assert reward.net.sent == ["asked", "cpu"]
    reward(batch_of(torch.rand(2, 3, 2, 2)))
    assert reward.net.sent == ["asked", "cpu", "cpu", "asked", "cpu"]
    # home, away, home, away: each was taken in once
    assert reward.other.sent == ["cpu", "cpu", "cpu", "cpu", "cpu"]


def test_t2i_compbench_can_be_offloaded(weights: Weights) -> None:
    """It loads what its records need, here everything. The scores are those of the same reward
    where nothing rests."""
    scorer = SCORERS["t2i_compbench"](weights)
    plain = scorer.make(device="cpu")
    late = {"fn": "t2i_compbench", **weights.t2i_compbench, "device": "cpu", "offload": True}
    reward = resting(Call.bind("rewards.it", late))
    assert reward.networks == []
    torch.testing.assert_close(reward(scorer.batch()), plain(scorer.batch()))
    resting_ones, held = set(map(id, reward.networks)), set(map(id, networks_of(reward.reward)))
    assert resting_ones == held
    assert len(reward.networks) > 1


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_weights_leave_the_gpu(weights: Weights) -> None:
    scorer = SCORERS["clip, transformers"](weights)
    plain, away = scorer.make(device="cuda"), scorer.make(device="cuda")
    rested = Resting(away, list(networks_of(away)))
    assert all(p.device.type == "cpu" for net in rested.networks for p in net.parameters())
    torch.testing.assert_close(rested(scorer.batch()), plain(scorer.batch()))
    assert all(p.device.type == "cpu" for net in rested.networks for p in net.parameters())
