"""Named snapshots of the parameters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from trainkit import same_files

from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.models.toy import LinearFlow
from flowrl.training.weights import Weights

Params = dict[str, nn.Parameter]


def values(params: Params) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in params.items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return same_files({"": one}, {"": two})


def move(params: Params, by: float) -> None:
    with torch.no_grad():
        for p in params.values():
            p.add_(by)


@pytest.fixture
def params() -> Params:
    return LinearFlow().trainable()


def test_a_snapshot_does_not_follow_training(params: Params) -> None:
    """It is used, nested, left again after an exception, and taken anew."""
    weights, first = Weights(params), values(params)
    weights.snapshot("ref")
    move(params, 1.0)
    weights.snapshot("old")
    middle = values(params)
    move(params, 1.0)
    last = values(params)
    with pytest.raises(ZeroDivisionError), weights.using("old"):
        assert same(values(params), middle)
        with weights.using("ref"):
            assert same(values(params), first)
            raise ZeroDivisionError
    assert same(values(params), last)
    weights.snapshot("old")  # nothing is in use any more
    assert same(weights.state_dict()["old"], last) and weights.names() == ["ref", "old"]


def test_using_keeps_the_optimizer_attached(params: Params) -> None:
    """The Parameter objects stay: a step afterwards moves the current weights, no snapshot."""
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


def test_lerp(params: Params) -> None:
    """ema = .9 ema + .1 current; 0 copies and 1 keeps to the bit."""
    weights, first = Weights(params), values(params)
    weights.snapshot("ema")
    move(params, 1.0)
    weights.lerp("ema", 1.0)
    assert same(weights.state_dict()["ema"], first)
    weights.lerp("ema", 0.9)
    mixed = {name: 0.9 * value + 0.1 * (value + 1) for name, value in first.items()}
    torch.testing.assert_close(weights.state_dict()["ema"], mixed)
    weights.lerp("ema", 0.0)
    assert same(weights.state_dict()["ema"], values(params))


def test_state_comes_back_bit_for_bit(params: Params) -> None:
    weights = Weights(params)
    weights.snapshot("ref")
    move(params, 0.5)
    weights.snapshot("ema")
    other = Weights(LinearFlow(seed=9).trainable())
    other.snapshot("stale")
    other.load_state_dict(weights.state_dict())
    assert other.names() == ["ref", "ema"]
    assert same_files(other.state_dict(), weights.state_dict())
    move(params, 1.0)
    weights.lerp("ref", 0.0)  # writes into its own tensors, not into the loaded copies
    assert not same(other.state_dict()["ref"], weights.state_dict()["ref"])


def test_misuse_is_named(params: Params) -> None:
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


def test_a_foreign_checkpoint_is_refused_whole(params: Params) -> None:
    weights, good = Weights(params), values(params)
    weights.snapshot("ref")
    bad = {
        "lacks": {name: value for name, value in good.items() if name != "mix"},
        "unknown": good | {"lora": torch.zeros(1)},
        "shapes": good | {"mix": torch.zeros(2, 2)},
    }
    for words, state in bad.items():
        with pytest.raises(CheckpointError, match=words):
            weights.load_state_dict({"ema": good, "ref": state})
    assert weights.names() == ["ref"] and same(weights.state_dict()["ref"], good)


def test_parameters_that_must_stay_exchange_values(params: Params) -> None:
    """Places in memory are the same throughout; what is trained in a snapshot's place is the
    snapshot's, and a snapshot below another one is named."""
    weights, places = Weights(params, stay=True), [p.data_ptr() for p in params.values()]
    weights.snapshot("ref")
    first = values(params)
    move(params, 1.0)
    weights.snapshot("critic")
    last = values(params)
    with weights.using("ref"):
        assert same(values(params), first)
        with weights.using("critic"):
            assert same(values(params), last)
            with pytest.raises(RunError, match="'ref' is in use below 'critic'"):
                weights.using("ref").__enter__()
        assert same(values(params), first)
    with weights.training("critic"):
        move(params, 1.0)
    assert same(values(params), last)
    trained = {name: value + 1 for name, value in last.items()}
    assert same(weights.state_dict()["critic"], trained)
    assert same(weights.state_dict()["ref"], first)
    assert [p.data_ptr() for p in params.values()] == places


class Full:
    """Fail at the n-th clone of a tensor, and at every one after it if `always`."""

    def __init__(self, at: int, error: type[Exception], *, always: bool) -> None:
        self.left, self.error, self.always = at, error, always
        self.clone = Tensor.clone

    def __call__(self, tensor: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0 or (self.always and self.left < 0):
            raise self.error("full")
        return self.clone(tensor)


def two_sets(params: Params) -> tuple[Weights, dict[str, Tensor], dict[str, Tensor]]:
    """Return weights with a snapshot ref that exchanges values, its values, and the current."""
    weights = Weights(params, stay=True)
    weights.snapshot("ref")
    first = values(params)
    move(params, 1.0)
    return weights, first, values(params)


@pytest.mark.parametrize("at", [1, 2])
def test_an_exchange_that_fails_is_undone(
    params: Params, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """At the first or the second tensor: both sets of weights are whole afterwards."""
    weights, first, last = two_sets(params)
    full = Full(at, RuntimeError, always=False)
    monkeypatch.setattr(Tensor, "clone", lambda tensor: full(tensor))
    with pytest.raises(RuntimeError, match="full"), weights.using("ref"):
        raise AssertionError("never reached")
    monkeypatch.undo()
    assert same(values(params), last) and same(weights.state_dict()["ref"], first)


def test_without_memory_an_exchange_goes_by_the_host(
    params: Params, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way back must not fail for want of memory: each clone does, from the second on."""
    weights, first, last = two_sets(params)
    full = Full(2, torch.OutOfMemoryError, always=True)
    monkeypatch.setattr(Tensor, "clone", lambda tensor: full(tensor))
    with weights.using("ref"):
        inside = {name: p.detach().numpy().copy() for name, p in params.items()}
    monkeypatch.undo()
    assert same({name: torch.from_numpy(row) for name, row in inside.items()}, first)
    assert same(values(params), last) and same(weights.state_dict()["ref"], first)
