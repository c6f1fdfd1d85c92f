"""A reward must rise: that of every method's own axes, as configs/shapes has them, and a linear one
on a small linear field, beside a control; and on the embedded model, by the quickstart's config.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean

import pytest
from toykit import axes, toy
from toyscale import SETTING, TOY_SCALE
from trainkit import rise

from flowrl.config.load import load_config
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import list_configs, resource
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.learning
ITERATIONS = 30
# those have tests of their own: they need a reward that learns, images from files, or other runs;
# the guided ones have the axes of `rwr` and `best_of_n`, and draw with weights that stand still;
# `dina_lrm` has those of `awm`
APART = (
    "shapes/adv_awm",
    "shapes/adv_grpo",
    "shapes/adv_grpo_gated",
    "shapes/best_of_n_guided",
    "shapes/ddrl",
    "shapes/diffusion_dpo_offline",
    "shapes/dina_lrm",
    "shapes/flow_opd",
    "shapes/rwr_guided",
    "shapes/spo",
    "shapes/spo_latent",
    "shapes/tdm_r1_awm",
)
METHODS = [name for name in list_configs() if name.startswith("shapes/") and name not in APART]


def curve(folder: Path, name: str) -> list[float]:
    changes = [*SETTING, *axes(name), *TOY_SCALE.get(name, [])]
    trainer = Trainer(toy(folder, *changes, "seed=0", "model.seed=0"))
    rows = [trainer.step() for _ in range(ITERATIONS)]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert max(row.get("on_policy_gap", 0.0) for row in rows) < 1e-4
    return [row["reward/red"] for row in rows]


@pytest.mark.parametrize("name", METHODS)
def test_the_reward_rises(tmp_path: Path, name: str) -> None:
    """Mean red minus mean green of images, moved into [0, 1]: the last 8 iterations against the
    first 8.

    Measured: 0.035 (awm_tree) or more; without a signal a seed changes by at most 0.022
    (the control below, on this scale).
    """
    gain = rise(curve(tmp_path, name), 8)
    print(f"{name}: gain {gain}")
    assert gain > 0.03


# -------------------------------------------------------------------- a linear field, and a control


TOY_ITERATIONS, SEEDS = 50, 3
TOY_SETTING = [
    "model={fn: toykit.linear, channels: 2}",
    "image.height=8",
    "image.width=8",
    "train.group=8",
]
TOY_SETTING += [
    "train.prompts=4",
    "train.ema=0",
    "eval.weights=current",
    "train.micro_batch=64",
    "train.rollout_batch=32",
]
TOY_SETTING += ["kl={fn: transition_kl, beta: 0.001}"]


def rewards(folder: Path, *options: str, seed: int) -> list[float]:
    """Train on a latent of two numbers -> the mean reward of each iteration; KL and weights stay
    finite."""
    trainer = Trainer(toy(folder, *TOY_SETTING, *options, f"seed={seed}", f"model.seed={seed}"))
    rows = [trainer.step() for _ in range(TOY_ITERATIONS)]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert 0 < rows[0]["kl"] < rows[-1]["kl"] and max(row["approx_kl"] for row in rows) < 1
    return [row["reward/red"] for row in rows]


@pytest.mark.parametrize("weight", [1, -1])
def test_the_reward_rises_with_every_seed(tmp_path: Path, weight: int) -> None:
    """Mean red minus mean green of images, in [-1, 1]; with weight -1 it has to fall.

    Measured: +0.37 to +0.42 and -0.40 to -0.51; the control below moves by 0.01 to 0.04.
    """
    curves = [rewards(tmp_path, f"rewards.red.weight={weight}", seed=seed) for seed in range(SEEDS)]
    gains = [weight * rise(curve, 10) for curve in curves]
    blocks = []
    for i in range(0, TOY_ITERATIONS, 10):
        blocks.append(mean(mean(curve[i : i + 10]) for curve in curves))
    print(f"weight {weight}: gains {gains}, blocks of ten {blocks}")
    assert min(gains) > 0.2
    assert blocks == sorted(blocks, reverse=weight < 0), (
        "averaged over seeds, each ten iterations add to the last"
    )


def test_without_a_signal_nothing_is_learnt(tmp_path: Path) -> None:
    """The control: images are scored by chance."""
    options = ("rewards.noise={fn: toykit.noise}", "rewards.red.weight=0")
    gains = []
    for seed in range(SEEDS):
        curve = rewards(tmp_path, *options, f"rewards.noise.seed={seed}", seed=seed)
        gains.append(rise(curve, 10))
    print(f"no signal: gains {gains}")
    assert max(map(abs, gains)) < 0.15


# ----------------------------------------------------------------------- the quickstart on one task


SHAPES_ITERATIONS = 3


def one_task(name: str, folder: Path) -> Path:
    """Write the prompts of task color_attr of a shipped file into a file of their own."""
    lines = resource(f"assets/shapes/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(line + "\n" for line in lines if json.loads(line)["tag"] == "color_attr"),
        encoding="utf-8",
    )
    return path


def strict(trainer: Trainer) -> float:
    """Return the share of right images of held-out prompts, sampled without noise in the
    steps."""
    rewards = {"strict": trainer.rewards["strict"]}
    prompts = load_prompts(trainer.config.prompts.test)
    result = evaluate_prompts(
        trainer.model, prompts, rewards, headline="strict", height=64, width=64, steps=5, images=8
    )
    return float(result["strict"])


def gain(folder: Path, seed: int) -> float:
    """Train three iterations -> the change of strict accuracy on 24 held-out prompts, 8 images
    each."""
    files = [
        f"prompts.train={one_task('train', folder)}",
        f"prompts.test={one_task('validation', folder)}",
    ]
    sizes = ["train.prompts=24", "train.group=8", "train.warmup=2"]
    sizes += ["train.ema=0", "eval.weights=current"]
    trainer = Trainer(load_config("shapes/awm", [*files, *sizes, f"seed={seed}"]))
    before = strict(trainer)
    for _ in range(SHAPES_ITERATIONS):
        trainer.step()
    return strict(trainer) - before


def test_two_coloured_shapes_are_learnt(tmp_path: Path) -> None:
    """Effect: with seeds 0 to 2 the gains were .358, .205 and .236 of 288 images each, in float32.

    Without learning, the difference of two such accuracies near .3 has a standard error of .047: it
    passes .15 by chance 7 times in ten thousand. The seed is fixed, so on one machine the outcome
    is too.
    """
    found = gain(tmp_path, seed=0)
    print(f"gain {found}")
    assert found > 0.15
