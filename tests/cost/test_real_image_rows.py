"""What an estimate says of a config that trains on real images beside the reward."""

from __future__ import annotations

import pytest

from flowrl.config.load import load_config
from flowrl.cost.estimate import Estimate, estimate
from flowrl.cost.report import calls


def estimated(*changes: str) -> Estimate:
    """Estimate shapes/ddrl; its list of images need not be there."""
    return estimate(load_config("shapes/ddrl", ["model.dtype=float32", *changes]))


def trained(found: Estimate) -> int:
    """Return the bytes that come and go in training."""
    return next(phase.extra for phase in found.phases if phase.name == "training")


def test_the_second_row_of_a_state_is_counted() -> None:
    """Of 64 states, siblings of a fork: 3 calls more each, twice the FLOPs of training, and as many
    activations as twice the micro-batch without images, since both wait for the backward pass."""
    plain, real = estimated("kl.beta=0"), estimated()
    assert real.forecast.states == plain.forecast.states == 64
    assert real.forecast.calls - plain.forecast.calls == 3 * 64
    assert real.flops["training"] == pytest.approx(2 * plain.flops["training"], rel=1e-3)
    assert real.flops["sampling"] == plain.flops["sampling"]
    half = estimated("train.micro_batch=32")
    assert half.saved == plain.saved
    assert trained(half) == trained(plain) > 0
    assert "3 per state, and 3 on a real image" in calls(real)[0]
    assert "real image" not in calls(plain)[0]
