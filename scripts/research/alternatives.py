"""What the small editor and the small video model reach without training: more steps, guidance,
best of 8.

    python scripts/research/alternatives.py edits
    python scripts/research/alternatives.py moving

Steps and guidance are chosen on the validation list; the choice and the best of 8 by the graded
reward are judged on the test list, with the images per prompt of learning.py. Writes
assets/results/edits-alternatives.json or moving-alternatives.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flowrl.cli.options import quiet_libraries
from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.runs.evaluate import evaluate


class Task(NamedTuple):
    """Which model, and how it is guided and judged."""

    folder: str  # with the config and the lists
    guidance: str  # config key of the guidance
    scales: tuple[float, ...]
    reward: str  # graded: it chooses the best of 8
    score: str  # what is compared


TASKS = {
    "edits": Task("assets/shapes-edits", "model.true_cfg_scale", (1.0, 1.5, 2.5), "edit", "strict"),
    "moving": Task("assets/moving", "model.guidance", (1.0, 1.5, 2.5, 4.0), "moving", "moving"),
}
STEPS = (5, 10, 20)


def judged(
    task: Task, prompts: str, steps: int, guidance: float, best_of: int = 1
) -> dict[str, Any]:
    """Judge the model as it is shipped on one of its lists."""
    changes = [
        f"prompts.test={task.folder}/{prompts}.jsonl",
        f"eval.steps={steps}",
        f"{task.guidance}={guidance}",
        f"eval.best_of={best_of}",
        f"eval.best_by={task.reward}",
        f"eval.score={task.score}",
    ]
    config = load_config(f"{task.folder}/awm.yaml", changes)
    found = evaluate(config.call("model")(), config)
    calls = steps * best_of * (1 if guidance == 1 else 2)
    row = {"prompts": prompts, "steps": steps, "guidance": guidance, "best_of": best_of}
    row |= {"nfe": calls, task.score: found[task.score], "interval": found["interval"]}
    print(row, flush=True)
    return row


def main() -> None:
    """Search on validation, judge on test, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    name = parser.parse_args().task
    task = TASKS[name]
    torch.set_num_threads(1)
    quiet_libraries()
    pairs = [(steps, scale) for scale in task.scales for steps in STEPS]
    tried = [judged(task, "validation", *pair) for pair in pairs]
    best = max(tried, key=lambda row: row[task.score])
    result = {
        "environment": environment(),
        "command": f"python scripts/research/alternatives.py {name}",
        "tried": tried,
        "base": judged(task, "test", 10, 1.0),
        "best_settings": judged(task, "test", best["steps"], best["guidance"]),
        "best_of_8": judged(task, "test", 10, 1.0, 8),
    }
    write_json(Path(f"assets/results/{name}-alternatives.json"), result)


if __name__ == "__main__":
    main()
