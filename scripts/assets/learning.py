"""Train a small model of the shapes worlds with several seeds, and write what it gained: the video
model on moving shapes, or the editing model on edits.

::

    python scripts/assets/learning.py moving --seed 0 --out runs/moving-0.json   # seeds 0, 1, 2
    python scripts/assets/learning.py moving --join runs/moving-*.json
    python scripts/assets/learning.py edits --seed 0 --out runs/edits-0.json --figure

The first judges the base and the trained model on the test list, from the same noise; the second
writes assets/results/moving.json with a 95 % interval over the seeds (Student's t). ``--figure``
draws some test edits (source, before, after) into assets/figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from flowrl.config.load import load_config
from flowrl.core.files import replacing, write_json
from flowrl.core.prompts import load_prompts
from flowrl.evaluation.held_out import evaluate_prompts, sampled_images, score_all
from flowrl.evaluation.image_grids import labelled_grid
from flowrl.evaluation.sources import sources_of
from flowrl.training.trainer import Trainer

ROWS = 12  # of the figure: the first edits of the test list, every kind as often


class Task(NamedTuple):
    """What is trained, and what judges it."""

    config: str
    test: str
    reward: str  # whose gain is reported
    strict: str
    images: int  # of each test prompt
    unit: str = "images"


TASKS = {
    "moving": Task(
        "assets/moving/awm.yaml", "assets/moving/test.jsonl", "moving", "strict", 16, "videos"
    ),
    "edits": Task(
        "assets/shapes-edits/awm.yaml", "assets/shapes-edits/test.jsonl", "edit", "strict", 8
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
    parser.add_argument("--figure", action="store_true", help="of edits, before and after")
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
    # one seed; edits to draw are made before and after
    trainer = Trainer(load_config(task.config, [f"seed={asked.seed}", *asked.set]))
    if asked.validation:
        task = task._replace(test=trainer.config.prompts.test)
    drawn = drawn_edits(trainer, task) if asked.figure else []
    write_json(asked.out, trained(trainer, task))
    if asked.figure:
        draw_figure(task, drawn, drawn_edits(trainer, task), asked.task)


def trained(trainer: Trainer, task: Task) -> dict[str, Any]:
    """Train -> scores of the test prompts before and after."""
    before, rewards = judged(trainer, task), []
    for _ in range(trainer.config.train.iterations):
        rewards.append(round(trainer.step()[f"reward/{task.reward}"], 4))
        print(trainer.config.seed, len(rewards), rewards[-1], flush=True)
    after = judged(trainer, task)
    print(before, after, flush=True)
    return {"seed": trainer.config.seed, "before": before, "after": after, "training": rewards}


def judged(trainer: Trainer, task: Task) -> dict[str, float]:
    """Return the mean of each reward on the test prompts."""
    config = trainer.config
    report = evaluate_prompts(
        trainer.model,
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
    what = {"config": task.config, "prompts": task.test, task.unit: task.images}
    return {**what, "gain": head, "strict": gains[task.strict], "seeds": runs}


def gain(runs: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the mean gain of a reward, and its interval over the seeds."""
    gains = [run["after"][name] - run["before"][name] for run in runs]
    mean = float(np.mean(gains))
    half = float(stats.t.ppf(0.975, len(gains) - 1) * stats.sem(gains))
    return {"mean": round(mean, 4), "interval": [round(mean - half, 4), round(mean + half, 4)]}


def drawn_edits(trainer: Trainer, task: Task) -> list[tuple[Tensor, Tensor, bool]]:
    """Make the first test edits -> source, image and verdict of each."""
    # the first rows of the list, each with the image that it edits
    prompts, config = load_prompts(task.test), trainer.config
    size = (config.image.height, config.image.width)
    given = sources_of(prompts, range(ROWS), size)
    found = list(
        sampled_images(
            trainer.model,
            prompts.texts[:ROWS],
            height=size[0],
            width=size[1],
            steps=config.eval.steps,
            sources=lambda rows: [given[row] for row in rows],
        )
    )
    # the strict reward says which edits are right
    images = torch.cat([part for _, part in found])
    rewards = {task.strict: trainer.rewards[task.strict]}
    verdicts = score_all(rewards, images, prompts.records[:ROWS], sources=given)[task.strict]
    rows = zip(given, images, verdicts, strict=True)
    return [(source[0], image, bool(verdict)) for source, image, verdict in rows]


def draw_figure(task: Task, before: list[Any], after: list[Any], name: str) -> None:
    """Draw edits (source, before, after), right ones in green frames, into assets/figures."""
    columns = {
        "source": torch.stack([row[0] for row in before]),
        "before": torch.stack([row[1] for row in before]),
        "after": torch.stack([row[1] for row in after]),
    }
    right = {"before": [row[2] for row in before]}
    right["after"] = [row[2] for row in after]
    page = labelled_grid(columns, load_prompts(task.test).texts[:ROWS], right=right)
    with replacing(Path(f"assets/figures/{name}.png")) as draft:
        page.save(draft, "PNG")


if __name__ == "__main__":
    main()
