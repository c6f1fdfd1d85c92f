"""The shipped Flow-GRPO config, cut short and on one task, must raise accuracy of the embedded
model on fresh noise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flowrl.config.load import load_config
from flowrl.core.prompts import load_prompts
from flowrl.core.shipped_files import resource
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.learning
ITERATIONS = 24


def colors(name: str, folder: Path) -> Path:
    """Write the prompts of task colors of a shipped file into a file of their own."""
    lines = resource(f"assets/shapes/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    path = folder / f"{name}.jsonl"
    path.write_text(
        "".join(line + "\n" for line in lines if json.loads(line)["tag"] == "colors"),
        encoding="utf-8",
    )
    return path


def strict(trainer: Trainer) -> float:
    """Return the share of right images of held-out prompts, sampled without noise in the
    steps."""
    rewards = {"strict": trainer.rewards["strict"]}
    prompts = load_prompts(trainer.config.prompts.test)
    result = evaluate_prompts(
        trainer.model, prompts, rewards, headline="strict", height=64, width=64, steps=10, images=16
    )
    return float(result["strict"])


def gain(folder: Path, seed: int) -> float:
    """Train for a minute -> the change of strict accuracy on 24 held-out prompts, 16 images
    each."""
    files = [f"prompts.{name}={colors(name, folder)}" for name in ("train", "test")]
    sizes = ["train.prompts=12", "train.group=16", "train.ema=0", "eval.weights=current"]
    trainer = Trainer(load_config("shapes/flow_grpo", [*files, *sizes, f"seed={seed}"]))
    before = strict(trainer)
    for _ in range(ITERATIONS):
        trainer.step()
    return strict(trainer) - before


def test_colors_are_learnt(tmp_path: Path) -> None:
    """Effect: with seeds 0 to 3 the gains were .294, .276, .161 and .216 of 384 images each: mean
    .237, std .06.

    Without learning, the difference of two such accuracies near .25 has a standard error of .031:
    it passes .10 by chance 6 times in ten thousand. The seed is fixed, so on one machine the
    outcome is too. On another one, by the spread of those four, a sound run fails with
    probability 1 %.
    """
    found = gain(tmp_path, seed=0)
    print(f"gain {found}")
    assert found > 0.10
