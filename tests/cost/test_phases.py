"""The benchmark counts right; no test here looks at how long something took."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import pytest
import toykit
from torch import Tensor
from toykit import toy

from flowrl.core.errors import ConfigError
from flowrl.core.types import Cond, RewardBatch
from flowrl.cost import phases
from flowrl.cost.phases import PHASES, measure_phases, phases_table
from flowrl.models.toy import LinearFlow

KEYS = {"config", "iterations", "images", "nfe", "decisions", "seconds", "images_per_s"}
KEYS |= {"environment"}
TREE = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 1, 2]}"
LATE = "plan={fn: tree, steps: 2, noise_scale: 0.5, splits: [1], branch: 4}"


@pytest.mark.parametrize(
    ("options", "images", "nfe", "decisions"),
    [
        ((), 8, 32, 24),
        # 8 leaves per root; 1 + 2 + 4 live nodes in the first three steps and 8 in the last
        ((TREE, "train.group=8"), 16, 2 * 15, 2 * 14),
        # a root that forks at the very end: fewer evaluations than images; more prompts than the
        # file has
        ((LATE, "train.prompts=8", "train.group=8", "train.updates=1"), 64, 32, 16),
    ],
)
def test_bench_reports_what_was_done(
    tmp_path: Path, options: tuple[str, ...], images: int, nfe: int, decisions: int
) -> None:
    """Counts by hand."""
    result = measure_phases(toy(tmp_path, *options), iterations=2)
    assert result.keys() == KEYS and result["config"] == "toy" and result["iterations"] == 2
    assert result["seconds"].keys() == {*PHASES, "other", "all"}
    counted = (result["images"], result["nfe"], result["decisions"])
    assert counted == (images, nfe, decisions) and result["images_per_s"] > 0
    text = phases_table(result)
    assert all(phase in text for phase in PHASES) and f"{nfe} NFE" in text


def test_every_second_is_counted_where_it_was_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only the work moves: 5 for a row of the network, 7 for an image of the VAE,
    11 for the reward. 8 images in 4 steps, of which 3 are trained."""
    clock = SimpleNamespace(time=0.0)
    velocity, decode = LinearFlow.velocity, LinearFlow.decode

    def slow_velocity(self: LinearFlow, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        clock.time += 5 * len(x)
        return velocity(self, x, sigma, cond)

    def slow_decode(self: LinearFlow, x0: Tensor) -> Tensor:
        clock.time += 7 * len(x0)
        return decode(self, x0)

    @functools.wraps(toykit.warmth)
    def slow_reward(batch: RewardBatch) -> Tensor:
        clock.time += 11
        return toykit.redness(batch)

    monkeypatch.setattr(LinearFlow, "velocity", slow_velocity)
    monkeypatch.setattr(LinearFlow, "decode", slow_decode)
    monkeypatch.setattr(toykit, "warmth", slow_reward)
    monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: clock.time))
    config = toy(tmp_path, "rewards={warm: {fn: toykit.warmth}}")
    seconds = measure_phases(config, iterations=1)["seconds"]
    spent = {"rollout": 5 * 32, "decode": 7 * 8, "reward": 11, "train": 5 * 24}
    assert seconds == {**spent, "other": 0, "all": sum(spent.values())}


def test_overlap_is_timed_against_scoring_in_turn(tmp_path: Path) -> None:
    """A reward that takes .1 s per part: in turn, two parts take .2 s at least."""
    slow = ("rewards.red={fn: toykit.slow, seconds: 0.1}", "rewards.strict=null")
    config = toy(tmp_path, "train.parts=2", *slow)
    result = measure_phases(config, iterations=1)
    assert result["seconds"]["all"] > 0.2 and result["seconds"]["overlapped"] > 0.1
    assert config.train.overlap and "with overlap" in phases_table(result)


def test_no_iterations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 iteration, got -1"):
        measure_phases(toy(tmp_path), iterations=-1)
