"""The benchmark counts right; no test here looks at how long something took."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import toykit
from storedkit import PAIRS, write_pairs
from torch import Tensor
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.types import Cond, RewardBatch
from flowrl.cost import overhead
from flowrl.cost.overhead import PHASES, measure_overhead, overhead_table
from flowrl.models.toy import LinearFlow

KEYS = {"config", "iterations", "images", "nfe", "decisions", "states", "environment"}
KEYS |= {"seconds", "bare", "images_per_s", "overhead_ratio", "clock", "shares", "wall_seconds"}
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
    result = measure_overhead(toy(tmp_path, *options), iterations=2)
    assert result.keys() == KEYS and result["config"] == "toy" and result["iterations"] == 2
    assert result["seconds"].keys() == {*PHASES, "other", "all"}
    assert result["bare"].keys() == {"rollout", "decode", "train"}
    counted = (result["images"], result["nfe"], result["decisions"])
    assert counted == (images, nfe, decisions)
    assert result["overhead_ratio"] > 0
    assert min(result["bare"].values()) > 0 and result["images_per_s"] > 0
    text = overhead_table(result)
    assert all(phase in text for phase in PHASES) and f"{nfe} NFE" in text


class Clock:
    """A clock that only the work moves: 5 for a row of the network, 3 for its gradient, 7 for an
    image of the VAE, 13 for one that it encodes, 2 for a prompt's embedding, 11 for each reward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time, self.rows, self.graded = 0.0, 0, 0
        velocity, decode, encode = LinearFlow.velocity, LinearFlow.decode, LinearFlow.encode
        latents, clock = LinearFlow.latents, self

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, v: Tensor) -> Tensor:
                return v.clone()

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Tensor:
                clock.time += 3 * len(gradients[0])
                clock.graded += len(gradients[0])
                return gradients[0]

        def slow_velocity(self: LinearFlow, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
            clock.time += 5 * len(x)
            clock.rows += len(x)
            out: Tensor = Slow.apply(velocity(self, x, sigma, cond))
            return out

        def slow_decode(self: LinearFlow, x0: Tensor) -> Tensor:
            clock.time += 7 * len(x0)
            return decode(self, x0)

        def slow_latents(self: LinearFlow, images: Tensor) -> Tensor:
            clock.time += 13 * len(images)
            return latents(self, images)

        def slow_encode(self: LinearFlow, prompts: list[str]) -> Cond:
            clock.time += 2 * len(prompts)
            return encode(self, prompts)

        @functools.wraps(toykit.warmth)
        def slow_reward(batch: RewardBatch) -> Tensor:
            clock.time += 11
            return toykit.redness(batch)

        monkeypatch.setattr(LinearFlow, "velocity", slow_velocity)
        monkeypatch.setattr(LinearFlow, "decode", slow_decode)
        monkeypatch.setattr(LinearFlow, "latents", slow_latents)
        monkeypatch.setattr(LinearFlow, "encode", slow_encode)
        monkeypatch.setattr(toykit, "warmth", slow_reward)
        monkeypatch.setattr(overhead, "now", lambda: clock.time)


@pytest.mark.parametrize("kl", [False, True])
def test_every_second_is_counted_where_it_was_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kl: bool
) -> None:
    """8 images in 4 steps, of which 3 are trained: 32 and 24 rows of the network, the latter again
    for a reference."""
    clock = Clock(monkeypatch)
    options = ["train.micro_batch=5", "train.rollout_batch=6"]
    options += ["rewards={warm: {fn: toykit.warmth}}"]
    options += ["kl={fn: transition_kl, beta: 1}"] if kl else []
    result = measure_overhead(toy(tmp_path, *options), iterations=1)
    assert clock.rows == 2 * (32 + 24 + 24 * kl) and clock.graded == 2 * 24
    bare = {"rollout": 5 * 32, "decode": 7 * 8, "train": (5 + 3) * 24 + 5 * 24 * kl}
    assert result["bare"] == bare and result["states"] == 24
    total = sum(bare.values()) + 2 * 2 + 11
    assert result["seconds"]["all"] == total and result["seconds"]["reward"] == 11
    assert result["overhead_ratio"] == pytest.approx(total / sum(bare.values()))
    assert result["shares"]["text encoders"] == pytest.approx(4 / total)
    assert result["shares"]["rewards"] == pytest.approx(11 / total)
    assert sum(result["shares"].values()) == pytest.approx(1)
    assert result["shares"]["around training"] == pytest.approx(0)


def test_stored_images_are_encoded_on_the_vae_s_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight images of four pairs, two noisy states of each; nothing is sampled. By hand."""
    clock = Clock(monkeypatch)
    config = load_config(write_pairs(tmp_path), PAIRS, ("toykit",))
    result = measure_overhead(config, iterations=1)
    learnt = (5 + 3) * 16 + 5 * 16  # the policy's calls and gradients, the reference's calls
    assert clock.graded == 2 * 16
    assert result["bare"] == {"rollout": 0, "decode": 13 * 8, "train": learnt}
    shares, total = result["shares"], result["seconds"]["all"]
    assert total == 13 * 8 + learnt + 4 * 2
    assert shares["VAE"] == pytest.approx(13 * 8 / total)
    assert shares["around sampling"] == shares["around decoding"] == 0
    assert result["overhead_ratio"] == pytest.approx(total / (total - 8))


def test_previews_are_no_part_of_what_sampling_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12 previews of 2 steps for each of 2 prompts, of which 4 are sampled in 4 steps: 48 + 32 rows
    of the network, 24 + 8 images, and the reward twice. By hand; around the calls is nothing."""
    Clock(monkeypatch)
    plan = ("plan={fn: ode, steps: 4}", "likelihood={fn: forward}", "loss={fn: awm}")
    scout = ("scout={images: 12, steps: 2}", "train.updates=1")
    config = toy(tmp_path, *plan, *scout, "rewards={warm: {fn: toykit.warmth}}")
    result = measure_overhead(config, iterations=1)
    assert result["bare"]["rollout"] == 5 * (48 + 32) and result["bare"]["decode"] == 7 * (24 + 8)
    assert result["seconds"]["decode"] == 7 * (24 + 8) and result["seconds"]["reward"] == 2 * 11
    assert result["shares"]["text encoders"] == pytest.approx(2 * 4 / result["seconds"]["all"])
    assert result["shares"]["around sampling"] == pytest.approx(0)
    assert result["shares"]["around decoding"] == pytest.approx(0)


def test_overlap_is_timed_against_scoring_in_turn(tmp_path: Path) -> None:
    """A reward that takes .1 s per part: in turn, two parts take .2 s at least."""
    slow = ("rewards.red={fn: toykit.slow, seconds: 0.1}", "rewards.strict=null")
    config = toy(tmp_path, "train.parts=2", *slow)
    result = measure_overhead(config, iterations=1)
    assert result.keys() == KEYS | {"seconds_without_overlap"}
    assert result["seconds_without_overlap"] > 0.2 and config.train.overlap
    assert "without overlap" in overhead_table(result)


def test_no_iterations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least 1 iteration, got -1"):
        measure_overhead(toy(tmp_path), iterations=-1)
