"""Other runs that a student learns from: their weights, and which rows are whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.processes import sharded
from flowrl.core.prompts import PromptSet
from flowrl.core.types import Batch, Eval
from flowrl.training import checkpoint
from flowrl.training.weights import Weights

PREFIX = "teacher-"


class Teachers:
    """The teachers of a config, as snapshots of the trained weights; empty if it has none."""

    def __init__(self, config: Config, prompts: PromptSet) -> None:
        """Raises ConfigError for a teacher that is not there, DataError for a record that names
        none of them."""
        self.paths: dict[str, str] = config.loss.kwargs.get("teachers", {})
        self.by: str = config.loss.kwargs.get("by", "tag")
        self._of = [record.get(self.by) for record in prompts.records]
        for name, path in self.paths.items():
            _found(name, path)
        for value, where in zip(self._of, prompts.places, strict=True):
            if value not in self.paths:
                raise ConfigError(
                    f"{where}: its {self.by!r} is {value!r}, and loss.teachers has no run for it "
                    f"(it has {', '.join(self.paths)})"
                )

    def names(self) -> list[str]:
        """Name the teachers' snapshots."""
        return [PREFIX + name for name in self.paths]

    def load(self, weights: Weights) -> None:
        """Add the teachers' weights. Raises CheckpointError if they do not fit the model."""
        for name, path in self.paths.items():
            like = weights.shared_as if sharded() else None
            files, _ = checkpoint.open_checkpoint(_found(name, path), like=like)
            weights.add(PREFIX + name, files["ema" if "ema" in files else "current"])

    def evaluate(self, run: Any, batch: Batch, rows: tuple[int, ...], group: Tensor) -> Eval:
        """Evaluate each row of a batch under its own teacher. rows: the training prompt of each
        group; group [B]. A network call for each teacher that occurs."""
        mine = [str(self._of[rows[g]]) for g in group.tolist()]
        whole: Eval | None = None
        for name in dict.fromkeys(mine):
            with torch.no_grad(), run.weights.using(PREFIX + name):
                found = run.method.likelihood.evaluate(run.model, batch, run.method.transition)
            here = torch.tensor([other == name for other in mine], device=found.log_prob.device)
            whole = found if whole is None else _chosen(here, found, whole)
        assert whole is not None  # a batch has rows
        return whole


def _chosen(here: Tensor, one: Eval, other: Eval) -> Eval:
    """Take rows `here` [B] of one evaluation and the rest of another."""
    fields = {}
    for name in ("log_prob", "mean", "std", "v"):
        first, second = getattr(one, name), getattr(other, name)
        if first is not None:
            fields[name] = torch.where(here.view(-1, *[1] * (first.dim() - 1)), first, second)
    return Eval(**fields)


def _found(name: str, path: str) -> Path:
    """Return the checkpoint of a teacher. Raises ConfigError."""
    folder = Path(path)
    if (folder / checkpoint.MANIFEST).is_file():
        return folder
    try:
        newest = checkpoint.latest(folder) if folder.is_dir() else None
    except CheckpointError:
        newest = None
    if newest is None:
        raise ConfigError(
            f"loss.teachers.{name}: there is no run with a whole checkpoint at {path}; train the "
            "teacher first, with the same model and layers"
        )
    return newest
