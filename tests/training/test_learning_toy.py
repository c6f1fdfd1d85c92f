"""A reward that is linear in the image must rise on a small linear field."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

import pytest
from toykit import toy
from trainkit import rise

from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.learning
ITERATIONS, SEEDS = 50, 5
SETTING = [
    "model={fn: toykit.linear, channels: 2}",
    "image.height=8",
    "image.width=8",
    "train.group=8",
]
SETTING += [
    "train.prompts=4",
    "train.ema=0",
    "eval.weights=current",
    "train.micro_batch=64",
    "train.rollout_batch=32",
]
SETTING += ["kl={fn: transition_kl, beta: 0.001}"]


def rewards(folder: Path, *options: str, seed: int) -> list[float]:
    """Train on a latent of two numbers -> the mean reward of each iteration; KL and weights stay
    finite."""
    trainer = Trainer(toy(folder, *SETTING, *options, f"seed={seed}", f"model.seed={seed}"))
    rows = [trainer.step() for _ in range(ITERATIONS)]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert 0 < rows[0]["kl"] < rows[-1]["kl"] and max(row["approx_kl"] for row in rows) < 1
    return [row["reward/red"] for row in rows]


@pytest.mark.parametrize("weight", [1, -1])
def test_the_reward_rises_by_more_than_five_standard_errors(tmp_path: Path, weight: int) -> None:
    """Mean red minus mean green of images, in [-1, 1]; with weight -1 it has to fall.

    Measured: +0.38 (45 standard errors) and -0.40 (52); with seeds 5 to 19 at least 0.38 and 10.
    False alarms: the seeds are fixed, so a pass stays one. Where the noise changes (another torch),
    a change of 0 would pass with the chance that Student's t with 4 degrees of freedom exceeds 5,
    0.4 %, and only if all blocks of ten rise, too.
    """
    curves = [rewards(tmp_path, f"rewards.red.weight={weight}", seed=seed) for seed in range(SEEDS)]
    gain, errors = rise(curves, 10)
    blocks = []
    for i in range(0, ITERATIONS, 10):
        blocks.append(mean(mean(curve[i : i + 10]) for curve in curves))
    print(f"weight {weight}: gain {gain:.3f}, {errors:.1f} standard errors, blocks of ten {blocks}")
    assert weight * gain > 0.2 and weight * errors > 5
    assert blocks == sorted(blocks, reverse=weight < 0), (
        "averaged over seeds, each ten iterations add to the last"
    )


def test_without_a_signal_nothing_is_learnt(tmp_path: Path) -> None:
    """The control: images are scored by chance. Measured: -0.05; with seeds 5 to 19 at most 0.06
    either way."""
    options = ("rewards.noise={fn: toykit.noise}", "rewards.red.weight=0")
    curves = [
        rewards(tmp_path, *options, f"rewards.noise.seed={seed}", seed=seed)
        for seed in range(SEEDS)
    ]
    gain, errors = rise(curves, 10)
    print(f"no signal: gain {gain:.3f}, {errors:.1f} standard errors")
    assert abs(gain) < 0.15
