"""Named snapshots of the parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.models.toy import LinearFlow
from flowrl.training.weights import Weights


def values(params: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def move(params: dict[str, nn.Parameter], by: float) -> None:
    with torch.no_grad():
        for p in params.values():
            p.add_(by)


@pytest.fixture
def params() -> dict[str, nn.Parameter]:
    return LinearFlow().trainable()


def test_a_snapshot_does_not_follow_training(params: dict[str, nn.Parameter]) -> None:
    weights, before = Weights(params), values(params)
    weights.snapshot("old")
    move(params, 1.0)
    after = values(params)
    with weights.using("old"):
        assert same(values(params), before)
    assert same(values(params), after)
    weights.snapshot("old")
    assert same(weights.state_dict()["old"], after) and weights.names() == ["old"]


def test_using_keeps_the_optimizer_attached(params: dict[str, nn.Parameter]) -> None:
    """The Parameter objects stay the same, so a step after `using` moves the current weights and no
    snapshot."""
    weights, optimizer = Weights(params), torch.optim.SGD(params.values(), lr=1.0)
    weights.snapshot("ref")
    start = values(params)
    with weights.using("ref"):
        pass
    for p in params.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert same(values(params), {name: p - 1 for name, p in start.items()})
    assert same(weights.state_dict()["ref"], start)


def test_using_restores_after_an_exception_and_nests(params: dict[str, nn.Parameter]) -> None:
    weights, first = Weights(params), values(params)
    weights.snapshot("ref")
    move(params, 1.0)
    weights.snapshot("old")
    move(params, 1.0)
    last = values(params)
    with pytest.raises(ZeroDivisionError), weights.using("old"), weights.using("ref"):
        assert same(values(params), first)
        raise ZeroDivisionError
    assert same(values(params), last)
    weights.snapshot("old")  # nothing is in use any more


def test_lerp(params: dict[str, nn.Parameter]) -> None:
    """ema = .9 ema + .1 current; 0 copies and 1 keeps to the bit."""
    weights, first = Weights(params), values(params)
    weights.snapshot("ema")
    move(params, 1.0)
    weights.lerp("ema", 1.0)
    assert same(weights.state_dict()["ema"], first)
    weights.lerp("ema", 0.9)
    for name, value in weights.state_dict()["ema"].items():
        torch.testing.assert_close(value, 0.9 * first[name] + 0.1 * (first[name] + 1))
    weights.lerp("ema", 0.0)
    assert same(weights.state_dict()["ema"], values(params))


def test_state_comes_back_bit_for_bit(params: dict[str, nn.Parameter]) -> None:
    weights = Weights(params)
    weights.snapshot("ref")
    move(params, 0.5)
    weights.snapshot("ema")
    other = Weights(LinearFlow(seed=9).trainable())
    other.snapshot("stale")
    state = weights.state_dict()
    other.load_state_dict(state)
    assert other.names() == ["ref", "ema"]
    assert all(same(other.state_dict()[name], state[name]) for name in state)
    move(params, 1.0)
    weights.lerp("ref", 0.0)  # writes into the tensors of `state`, not into the loaded copies
    assert not same(other.state_dict()["ref"], weights.state_dict()["ref"])


def test_misuse_is_named(params: dict[str, nn.Parameter]) -> None:
    weights = Weights(params)
    weights.snapshot("ref")
    with pytest.raises(ConfigError, match=r"'old'.*\['ref'\]"), weights.using("old"):
        pass
    with pytest.raises(ConfigError, match="1.5"):
        weights.lerp("ref", 1.5)
    for action in (
        lambda: weights.snapshot("old"),
        lambda: weights.lerp("ref", 0.5),
        lambda: weights.load_state_dict({}),
    ):
        with weights.using("ref"), pytest.raises(RunError, match="'ref'"):
            action()


def test_a_foreign_checkpoint_is_refused_whole(params: dict[str, nn.Parameter]) -> None:
    weights, good = Weights(params), values(params)
    weights.snapshot("ref")
    less = {name: value for name, value in good.items() if name != "mix"}
    bad = {
        "lacks": less,
        "unknown": good | {"lora": torch.zeros(1)},
        "shapes": good | {"mix": torch.zeros(2, 2)},
    }
    for words, state in bad.items():
        with pytest.raises(CheckpointError, match=words):
            weights.load_state_dict({"ema": good, "ref": state})
    assert weights.names() == ["ref"] and same(weights.state_dict()["ref"], good)
