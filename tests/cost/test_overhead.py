"""The benchmark counts right; no test here looks at how long something took."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from toykit import toy

from flowrl.core.errors import ConfigError
from flowrl.core.types import Cond
from flowrl.cost.overhead import PHASES, bench, table
from flowrl.models.toy import LinearFlow

KEYS = {"config", "iterations", "images", "nfe", "decisions", "states", "environment"}
KEYS |= {"seconds", "bare", "images_per_s", "rollout_ratio", "rollout_ratios"}
KEYS |= {"overhead_ratio", "overhead_ratios", "overhead_ratio_with_vae"}
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
    result = bench(toy(tmp_path, *options), iterations=2)
    assert result.keys() == KEYS and result["config"] == "toy" and result["iterations"] == 2
    assert result["seconds"].keys() == {*PHASES, "other", "all"}
    assert result["bare"].keys() == {"rollout", "decode", "train"}
    counted = (result["images"], result["nfe"], result["decisions"])
    assert counted == (images, nfe, decisions)
    assert len(result["overhead_ratios"]) == 2 and min(result["overhead_ratios"]) > 0
    assert 0 < result["overhead_ratio"] < result["overhead_ratio_with_vae"]
    assert len(result["rollout_ratios"]) == 2 and min(result["rollout_ratios"]) > 0
    assert min(result["bare"].values()) > 0 and result["images_per_s"] > 0
    text = table(result)
    assert all(phase in text for phase in PHASES) and f"{nfe} velocity evaluations" in text


@pytest.mark.parametrize("kl", [False, True])
def test_bare_calls_are_those_of_the_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kl: bool
) -> None:
    """The same numbers of calls by size, with and without a gradient, in the iteration and on their
    own."""
    calls: list[tuple[bool, int]] = []
    velocity = LinearFlow.velocity

    def counting(self: LinearFlow, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        calls.append((torch.is_grad_enabled(), len(x)))
        return velocity(self, x, sigma, cond)

    monkeypatch.setattr(LinearFlow, "velocity", counting)
    options = ["train.micro_batch=5", "train.rollout_batch=6"]
    options += ["kl={fn: transition_kl, beta: 1}"] if kl else []
    bench(toy(tmp_path, *options), iterations=1)
    sampling = [(False, 6), (False, 2)] * 4
    # warm-up, iteration, a rollout that only notes its sizes, bare calls
    one = (len(calls) - len(sampling)) // 3
    warm_up, iteration, rest = calls[:one], calls[one : 2 * one], calls[2 * one :]
    sized, bare = rest[: len(sampling)], rest[len(sampling) :]
    assert warm_up[: len(sampling)] == sized == sampling
    assert len(bare) == one > len(sampling) and sorted(iteration) == sorted(bare) == sorted(warm_up)


def test_overlap_is_timed_against_scoring_in_turn(tmp_path: Path) -> None:
    """A reward that takes .1 s per part: in turn, two parts take .2 s at least."""
    slow = ("rewards.red={fn: toykit.slow, seconds: 0.1}", "rewards.strict=null")
    config = toy(tmp_path, "train.parts=2", *slow)
    result = bench(config, iterations=1)
    assert result.keys() == KEYS | {"seconds_without_overlap"}
    assert result["seconds_without_overlap"] > 0.2 and config.train.overlap
    assert "without overlap" in table(result)


def test_no_iterations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 iteration, got -1"):
        bench(toy(tmp_path), iterations=-1)
