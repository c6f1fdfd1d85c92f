"""Train a small model of the shapes worlds with several seeds, and write what it gained: the video
model on moving shapes, by AWM or by MIND-V, or the editing model on edits.

::

    python scripts/assets/learning.py moving --seed 0 --out runs/moving-0.json   # seeds 0, 1, 2
    python scripts/assets/learning.py moving --join runs/moving-*.json
    python scripts/assets/learning.py edits --seed 0 --out runs/edits-0.json

The first judges the base and the trained model on the test list, from the same noise; the second
writes assets/results/moving.json with a 95 % interval over the seeds (Student's t).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.prompts import load_prompts
from flowrl.core.types import FlowModel
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.training.trainer import Trainer


class Task(NamedTuple):
    """What is trained, and what judges it."""

    config: str
    test: str
    reward: str  # whose gain is reported
    strict: str
    images: int  # of each test prompt
    unit: str = "images"
    guidance: float = 1.0  # that the base model is judged with, too


TASKS = {
    "moving": Task(
        "assets/moving/awm.yaml", "assets/moving/test.jsonl", "moving", "strict", 16, "videos"
    ),
    "edits": Task(
        "assets/shapes-edits/awm.yaml", "assets/shapes-edits/test.jsonl", "edit", "strict", 8
    ),
    "mind_v": Task(
        "shapes/mind_v", "assets/moving/test.jsonl", "moving", "strict", 16, "videos", 3.0
    ),
}


def main() -> None:
    """Train, or join what was trained."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--validation", action="store_true", help="judge the list of the config")
    parser.add_argument("--set", nargs="*", default=[], help="changes of the config")
    parser.add_argument("--join", nargs="+", type=Path)
    asked = parser.parse_args()
    task = TASKS[asked.task]
    # seeds may be trained apart; joining them needs no model
    if asked.join:
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in asked.join]
        write_json(Path(f"assets/results/{asked.task}.json"), joined(task, runs))
        return
    trainer = Trainer(load_config(task.config, [f"seed={asked.seed}", *asked.set]))
    if asked.validation:
        task = task._replace(test=trainer.config.prompts.test)
    write_json(asked.out, trained(trainer, task))


def trained(trainer: Trainer, task: Task) -> dict[str, Any]:
    """Train -> scores of the test prompts before and after."""
    before, rewards = judged(trainer.model, trainer, task), []
    found: dict[str, Any] = {"seed": trainer.config.seed, "before": before}
    # what guidance alone makes of the base model, for those who would compare
    if task.guidance != 1:
        guided = trainer.config.replace(model={"guidance": task.guidance}).call("model")()
        where = environment()
        found |= {"flowrl": where["flowrl"], "commit": where["commit"]}
        found["guided"] = judged(guided, trainer, task)
    for _ in range(trainer.config.train.iterations):
        rewards.append(round(trainer.step()[f"reward/{task.reward}"], 4))
        print(trainer.config.seed, len(rewards), rewards[-1], flush=True)
    found["after"] = judged(trainer.model, trainer, task)
    print(found, flush=True)
    return {**found, "training": rewards}


def judged(model: FlowModel, trainer: Trainer, task: Task) -> dict[str, float]:
    """Return the mean of each reward of a model's images of the test prompts."""
    config = trainer.config
    report = evaluate_prompts(
        model,
        load_prompts(task.test),
        trainer.rewards,
        headline=task.reward,
        height=config.image.height,
        width=config.image.width,
        steps=config.eval.steps,
        images=task.images,
        batch=config.eval.batch,
    )
    return {name: round(float(value), 4) for name, value in report["rewards"].items()}


def joined(task: Task, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the gains of several seeds."""
    gains = {name: gain(runs, name) for name in (task.reward, task.strict)}
    head = {"reward": task.reward, **gains[task.reward]}
    what: dict[str, Any] = {"config": task.config, "prompts": task.test, task.unit: task.images}
    if task.guidance != 1:
        what["guidance"] = task.guidance
    return {**what, "gain": head, "strict": gains[task.strict], "seeds": runs}


def gain(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the mean gain of a reward, and its interval over the seeds."""
    gains = [run["after"][name] - run["before"][name] for run in runs]
    mean = float(np.mean(gains))
    half = float(stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains))
    return {"mean": round(mean, 4), "interval": [round(mean - half, 4), round(mean + half, 4)]}


if __name__ == "__main__":
    main()
