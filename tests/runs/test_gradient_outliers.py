"""Which gradients are outliers: those of steps with a signal, and only above the clipping norm."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toykit
from torch import Tensor
from toykit import toy
from trainkit import KL, unchanged, weights_of

from flowrl.config.sections import GradientsMonitor
from flowrl.core.types import RewardBatch
from flowrl.training.parts.gradient_monitor import informative, is_usual
from flowrl.training.trainer import Trainer

SHORT = "monitors.gradients.history=4"  # so many norms are enough, too


class Sparse:
    """A reward of 0 for all images, but where it is told that this iteration `teaches`."""

    teaches = False

    def __init__(self, plain: Callable[[RewardBatch], Tensor]) -> None:
        self.plain = plain

    def __call__(self, batch: RewardBatch) -> Tensor:
        return self.plain(batch) if self.teaches else torch.zeros(len(batch.images))


@pytest.mark.parametrize("most", ["1.0", ".inf"])
def test_steps_with_a_signal_are_made_where_most_have_none(
    most: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four iterations only have the pull of the KL, with norms far below those that teach;
    none is left out, and only the latter are remembered."""
    sparse = Sparse(toykit.redness)

    def redness(batch: RewardBatch) -> Tensor:
        return sparse(batch)

    monkeypatch.setattr(redness, "__module__", "toykit")  # whose own a config may name
    monkeypatch.setattr(toykit, "redness", redness)
    options = ["train.updates=1", "train.iterations=16", f"train.max_grad_norm={most}"]
    trainer = Trainer(toy(tmp_path, KL.replace("0.1", "0.01"), SHORT, *options))
    made = []
    for iteration in range(16):
        sparse.teaches = iteration % 4 == 3
        before = weights_of(trainer)
        made.append(trainer.step())
        assert made[-1]["grad_outliers"] == 0 and not unchanged(trainer, before)
    norms = [row["grad_norm"] for row in made]
    taught, quiet = norms[3::4], sorted(set(norms) - set(norms[3::4]))
    assert min(taught) > 10 * quiet[len(quiet) // 2]  # what the old rule left out
    assert trainer.state.memory["norms"] == pytest.approx(taught, rel=1e-6)


@pytest.mark.parametrize(("most", "skipped"), [("1e-3", 1), ("1.0", 0), (".inf", 1)])
def test_an_outlier_is_left_out_above_the_clipping_norm(
    most: str, skipped: int, tmp_path: Path
) -> None:
    """The toy's gradient is about 0.2, here of 2000 times the median before."""
    options = ["train.updates=1", f"train.max_grad_norm={most}"]
    trainer = Trainer(toy(tmp_path, SHORT, *options))
    trainer.state.memory["norms"] = [1e-4] * 4
    before = weights_of(trainer)
    metrics = trainer.step()
    assert 0.01 < metrics["grad_norm"] < 1
    assert metrics["grad_outliers"] == skipped
    assert unchanged(trainer, before) == bool(skipped)
    assert len(trainer.state.memory["norms"]) == 4 and trainer.state.memory["norms"][-1] > 0.01


def test_the_clipping_norm_by_hand() -> None:
    """The median is 1 and the limit 2, or the clipping norm, if that is larger and finite."""
    options = GradientsMonitor(factor=2.0, history=3)
    for most, usual in ((math.inf, [2.0]), (1.5, [2.0]), (3.0, [2.0, 2.5, 3.0])):
        found = []
        for norm in (2.0, 2.5, 3.0, 3.5):
            if is_usual({"norms": [1.0] * 3}, norm, options, most):
                found.append(norm)
        assert found == usual


def test_informative_steps_by_hand() -> None:
    """An advantage other than 0, of whatever sign; losses that need none learn from any row."""
    steps = [torch.zeros(2), torch.tensor([0.0, -0.5]), torch.tensor([]), torch.tensor([2.0])]
    assert informative(frozenset({"ref", "zero_advantage"}), steps) == [False, True, False, True]
    assert informative(frozenset({"reward"}), steps) == [True, True, False, True]
    assert informative(frozenset(), []) == []
