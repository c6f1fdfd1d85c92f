"""The model before training, judged once per folder of runs."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.config.load import Config
from flowrl.core.abilities import LearnsNoise
from flowrl.core.errors import ConfigError
from flowrl.core.files import write_json
from flowrl.runs.compare.budgets import RESULT, different
from flowrl.runs.compare.earlier_files import setting_then
from flowrl.runs.compare.file_shapes import BASE_FILE
from flowrl.runs.compare.one_run import draw_samples, evaluated
from flowrl.runs.compare.result_file import setting
from flowrl.runs.compare.stored_files import stored
from flowrl.training.trainer import Trainer


def base_of(runs: Path, config: Config, trainer: Trainer) -> dict[str, Any]:
    """Read how the base model was judged, or judge it and draw its samples -> score, interval,
    tasks and outcomes; `trainer` has the config's model, untrained.

    Raises ConfigError if the folder's base model was judged under other settings.
    """
    folder, equal = runs / "base", setting(config)
    # what is there
    mend = f"delete {folder}, and the same command judges the base model again"
    found = stored(folder, RESULT, BASE_FILE, mend)
    if found:
        wrong = different(setting_then(found["setting"], config, setting), equal)
        if wrong:
            raise ConfigError(
                f"{runs} belongs to another comparison: {', '.join(wrong[:3])}; name another --runs"
            )
        return dict(found["base"])
    # or else the model itself, also where a config learns a noise that begins elsewhere
    model = trainer.model
    with model.plain_noise() if isinstance(model, LearnsNoise) else nullcontext():
        row = evaluated(trainer)
        draw_samples(trainer, folder, partial(print, file=sys.stderr))
    tasks = {task: values["mean"] for task, values in row["tasks"].items()}
    base = {"score": row[row["score"]], "interval": row["interval"], "images": row["images"]}
    tags = [str(record.get("tag", "all")) for record in trainer.test_set.records]
    base |= {"tasks": tasks, "tags": tags, "outcomes": row["outcomes"]}
    write_json(folder / RESULT, {"setting": equal, "base": base})
    return base
