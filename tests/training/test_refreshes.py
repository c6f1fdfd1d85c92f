"""A reference that is refreshed when the policy is far from it, or after a time (GARDO)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainkit import trainer_for

from flowrl.core.errors import ConfigError
from flowrl.core.processes import World
from flowrl.training.metrics import Trained
from flowrl.training.parts.copies import decay_of, follow, largest_kl
from flowrl.training.trainer import Trainer

KL = ("kl={fn: transition_kl_slow, beta: 0.01}", "train.updates=2", "train.prompts=4")


def gardo(folder: Path, slow: str, *more: str) -> Trainer:
    """Return a trainer whose penalty measures from a copy that `slow` refreshes."""
    return trainer_for(folder, *KL, f"slow={{fn: reset, {slow}}}", *more)


def test_when_it_is_refreshed(tmp_path: Path) -> None:
    """By hand, an optimizer step an iteration, `every` 4: after 4 steps without a refresh, and
    where the KL is too large; then the 4 steps begin anew. GARDO's code: reset, or epoch -
    prev_epoch > 15."""
    run = gardo(tmp_path, "every: 4, above: 0.1", "train.updates=1")
    far = [False, True, False, False, False, False, True, True, False, False]
    wanted = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    for iteration, (one, decay) in enumerate(zip(far, wanted, strict=True)):
        run.state.iteration = iteration
        assert decay_of(run, "slow", far=one) == decay
        assert follow(run, kl=0.2 * one) == {"refreshed/slow": float(decay == 0)}
    assert run.memory == {"refreshed": {"slow": 8}}


def test_the_largest_kl_of_a_step() -> None:
    """Two network calls of the first optimizer step and one of the second: (1 + 2 + 6) / 3 = 3, and
    4. Every row counts alike; two processes that are alike change no mean."""

    def call(update: int, *kl: float) -> Trained:
        some = torch.zeros(len(kl), dtype=torch.int64)
        return Trained({"kl": torch.tensor(kl)}, some, some, some, update)

    seen = [call(0, 1.0, 2.0), call(0, 6.0), call(1, 4.0)]
    assert largest_kl(seen, World()) == 4.0
    assert largest_kl(seen[:2], World()) == 3.0 and largest_kl([], World()) == 0.0

    class Two(World):
        def gather(self, mine: Any) -> list[Any]:
            return [mine, mine]

    assert largest_kl(seen, Two()) == 4.0


def test_a_run_refreshes_where_the_kl_is_large(tmp_path: Path) -> None:
    """The copy is the current weights after an iteration that says so, and stays else. Two
    iterations are sampled to find a limit between their KLs."""
    free = gardo(tmp_path, "every: 100, above: 1.0e+9")
    kl = [free.step()["kl_most"] for _ in range(3)]
    assert kl[0] < kl[1] < kl[2]  # the policy goes away from where it began
    limit = (kl[0] + kl[1]) / 2
    run = gardo(tmp_path, f"every: 100, above: {limit!r}")
    for wanted in (0.0, 1.0):
        before = {name: p.clone() for name, p in run.weights.state_dict()["slow"].items()}
        metrics = run.step()
        assert metrics["refreshed/slow"] == wanted and metrics["kl_most"] >= metrics["kl"]
        for name, copy in run.weights.state_dict()["slow"].items():
            assert torch.equal(copy, run.params[name] if wanted else before[name])
    # measured from the new reference the next KL is small again
    assert run.step()["kl_most"] < kl[2]


def test_with_one_update_it_is_the_kl_of_the_log(tmp_path: Path) -> None:
    run = gardo(tmp_path, "every: 100, above: 1.0e+9", "train.updates=1")
    assert run.step()["kl"] == 0 and "refreshed" not in run.memory  # the copy is it
    metrics = run.step()
    assert metrics["kl_most"] == pytest.approx(metrics["kl"], rel=1e-6) and metrics["kl"] > 0


def test_a_resumed_run_knows_when_it_was_refreshed(tmp_path: Path) -> None:
    """2 + 4 iterations against 6: the second refresh comes 3 iterations after the one by KL, which
    the resumed run did not see."""
    first_kl = gardo(tmp_path, "every: 100, above: 1.0e+9").step()["kl_most"]
    slow = f"every: 6, above: {first_kl * 1.5!r}"
    whole, first = gardo(tmp_path, slow), gardo(tmp_path, slow)
    metrics = [whole.step() for _ in range(6)]
    again = [first.step() for _ in range(2)]
    first.save(tmp_path / "middle")
    second = gardo(tmp_path, slow)
    second.load(tmp_path / "middle")
    again += [second.step() for _ in range(4)]
    assert again == metrics and second.memory == whole.memory
    assert any(row["refreshed/slow"] for row in metrics[:2])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("slow={fn: reset, every: 2, above: 0.0}",), "above > 0, got every=2, above=0.0"),
        (("kl.beta=0.0",), r"slow\.above=0.1: a limit of the KL, but the run has no kl section"),
    ],
)
def test_limits_that_cannot_be(tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gardo(tmp_path, "every: 2, above: 0.1", *more)
