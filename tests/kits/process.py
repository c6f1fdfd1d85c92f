"""Train a toy config in one of several processes: ``python process.py FOLDER ITERATIONS RESULT
[key=value ...]``.

Started by tests/core/test_processes.py. Rank 0 writes the trained weights and metrics.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from toykit import toy

from flowrl.core.processes import end_process, world
from flowrl.training.trainer import Trainer

if __name__ == "__main__":
    folder, iterations, result, *overrides = sys.argv[1:]
    torch.set_num_threads(1)
    mine = Path(folder) / f"rank{world().rank}"
    mine.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(toy(mine, *overrides))
    rows = [trainer.step() for _ in range(int(iterations))]
    digest = trainer.world.gather(
        [float(p.detach().double().sum()) for p in trainer.params.values()]
    )
    assert all(one == digest[0] for one in digest), f"processes hold different weights: {digest}"
    if trainer.world.main:
        save_file(
            {name: p.detach().clone() for name, p in trainer.params.items()},
            f"{result}.safetensors",
        )
        Path(f"{result}.json").write_text(json.dumps(rows))
    end_process(0)
