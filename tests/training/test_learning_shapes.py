"""The quickstart's config, cut short and on one task, must raise accuracy of the embedded model on
fresh noise."""

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
ITERATIONS = 3


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
    for _ in range(ITERATIONS):
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
