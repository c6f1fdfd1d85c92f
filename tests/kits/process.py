"""Run jobs one after the other in one of several processes: ``python process.py JOBS ANSWERS``.

Started by `processkit.pair`. JOBS is a JSON list; each process appends a line of JSON per job to
its own file in the folder ANSWERS.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from toykit import toy

from flowrl.cli.main import main
from flowrl.core.processes import end_process, world
from flowrl.training.trainer import Trainer


def trained(folder: Path, overrides: list[str], iterations: int = 3) -> dict[str, Any]:
    """Train the toy config -> weights at the start, weights at the end and metrics."""
    trainer = Trainer(toy(folder, *overrides))
    start = {name: p.tolist() for name, p in trainer.params.items()}
    rows = [trainer.step() for _ in range(iterations)]
    end = {name: p.tolist() for name, p in trainer.params.items()}
    return {"start": start, "end": end, "rows": rows}


def commanded(argv: list[str]) -> dict[str, Any]:
    """Run a command of flowrl -> exit code and what it said."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(argv)
    return {"code": code, "said": said.getvalue()}


def do(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Do one job: train the toy, run a command, perhaps on a copy of a run, or call a function of
    a kit."""
    if "overrides" in job:
        return trained(folder, job["overrides"])
    if "copy" in job and world().main:
        source, target, without = job["copy"]
        shutil.copytree(source, target, ignore=shutil.ignore_patterns(without))
    world().gather(None)  # the copy is whole
    with mock.patch.dict(os.environ, job.get("env", {})):
        if "call" in job:
            kit, _, name = job["call"].rpartition(".")
            found: dict[str, Any] = getattr(importlib.import_module(kit), name)(*job["args"])
            return found
        return commanded(job["argvs"][world().rank] if "argvs" in job else job["argv"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    answers = Path(sys.argv[2])
    rank = world().rank
    with (answers / f"{rank}.jsonl").open("w") as file:
        for job in json.loads(Path(sys.argv[1]).read_text()):
            answer = do(job, answers / f"rank{rank}")
            file.write(json.dumps(answer) + "\n")
    end_process(0)
