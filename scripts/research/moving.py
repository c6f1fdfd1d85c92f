"""Train the embedded video model on moving shapes with several seeds, and write what it gained.

::

    python scripts/research/moving.py --seed 0 --out runs/moving-0.json   # seeds 0, 1, 2
    python scripts/research/moving.py --join runs/moving-*.json

The first judges the base and the trained model on the test scenes, from the same noise; the second
writes assets/results/moving.json with a 95 % interval over the seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.training.trainer import Trainer

CONFIG, TEST = "assets/moving/awm.yaml", "assets/moving/test.jsonl"
RESULT = "assets/results/moving.json"
VIDEOS = 16  # of each of the test scenes


def main() -> None:
    """Train, or join what was trained."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--join", nargs="+", type=Path)
    asked = parser.parse_args()
    if asked.join:
        write_json(Path(RESULT), joined([json.loads(file.read_text()) for file in asked.join]))
    else:
        write_json(asked.out, trained(asked.seed))


def trained(seed: int) -> dict[str, Any]:
    """Train with a seed -> scores of the test scenes before and after."""
    trainer = Trainer(load_config(CONFIG, [f"seed={seed}"]))
    before, rewards = judged(trainer), []
    for _ in range(trainer.config.train.iterations):
        rewards.append(round(trainer.step()["reward/moving"], 4))
        print(seed, len(rewards), rewards[-1], flush=True)
    return {"seed": seed, "before": before, "after": judged(trainer), "training": rewards}


def judged(trainer: Trainer) -> dict[str, float]:
    """Return the mean of each reward on the test scenes."""
    config = trainer.config
    report = evaluate_prompts(
        trainer.model,
        load_prompts(TEST),
        trainer.rewards,
        headline="moving",
        height=config.image.height,
        width=config.image.width,
        steps=config.eval.steps,
        images=VIDEOS,
        batch=config.eval.batch,
    )
    return {name: round(float(value), 4) for name, value in report["rewards"].items()}


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the gains of several seeds."""
    gains = [run["after"]["moving"] - run["before"]["moving"] for run in runs]
    mean = float(np.mean(gains))
    half = float(stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains))
    interval = [round(mean - half, 4), round(mean + half, 4)]
    gain = {"reward": "moving", "mean": round(mean, 4), "interval": interval}
    return {"config": CONFIG, "prompts": TEST, "videos": VIDEOS, "gain": gain, "seeds": runs}


if __name__ == "__main__":
    main()
