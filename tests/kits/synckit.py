"""See that the sampling loop never makes the host wait for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.prompts import stream
from flowrl.core.types import Cond, FlowModel
from flowrl.training.trainer import Trainer


class SyncGuard:
    """Stand in for a model: between the first and the last of so many calls the host must not wait
    for the device."""

    def __init__(self, model: FlowModel, calls: int, switch: Callable[[str], None]) -> None:
        self.model, self.calls, self.switch, self.seen = model, calls, switch, 0

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the model's velocity [B, *], and count."""
        if self.seen == 0 and self.calls:
            self.switch("error")
        v = self.model.velocity(x, sigma, cond)
        self.seen += 1
        if self.seen == self.calls:
            self.switch("default")
        return v

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def check_sync(trainer: Trainer, *, switch: Callable[[str], None] | None = None) -> int:
    """Sample an iteration's prompts and let any wait for the device between two network calls be an
    error of torch -> calls. `switch` is torch.cuda.set_sync_debug_mode."""
    switch = switch or torch.cuda.set_sync_debug_mode
    config, model = trainer.config, trainer.model
    rows = stream(trainer.train_set, seed=config.seed, first=0, count=config.train.prompts)
    # a first pass counts the calls, so that the second knows which one is the last
    try:
        counter = SyncGuard(model, 0, switch)
        vars(trainer)["model"] = counter
        trainer.sample(rows)
        vars(trainer)["model"] = SyncGuard(model, counter.seen, switch)
        trainer.sample(rows)
    finally:
        switch("default")
        vars(trainer)["model"] = model
    return counter.seen
