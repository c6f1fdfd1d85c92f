"""A part of the training loop as a user would write one, outside of the package: it skips optimizer
steps whose gradient is far above the running mean of the norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toykit import write_toy

import flowrl
from flowrl.core.errors import ConfigError
from flowrl.core.part import PartState

OFF = "monitors.gradients=null"  # the shipped part that skips steps, too
FACTOR = 0.8  # so low that some of the toy's few steps are above it, and some are not
PLUGIN = f"parts.steady={{fn: steadykit.Steady, factor: {FACTOR}}}"


class Steady(flowrl.Part):
    """Skip a step whose gradient norm is more than `factor` times the running mean."""

    name = "steady"

    def __init__(self, *, factor: float = 3.0, decay: float = 0.9) -> None:
        if factor <= 0:
            raise ConfigError(f"parts.steady: expected factor > 0, got {factor}")
        self.factor, self.decay = factor, decay
        self.mean: float | None = None
        self.skipped = 0

    def check(self, task: Any, plan: Any) -> None:
        """Two parts that skip steps would hide from each other what they saw."""
        if any(part.title() == "gradient monitor" for part in task.parts):
            raise ConfigError(f"parts.steady: skips steps as monitors.gradients does; set {OFF}")

    def gradient(self, run: Any, norm: float, update: int) -> bool:
        """Refuse a step far above the mean; outliers move it, too."""
        usual = self.mean is None or norm <= self.factor * self.mean
        old = norm if self.mean is None else self.mean
        self.mean = self.decay * old + (1 - self.decay) * norm
        self.skipped += not usual
        return usual

    def after_iteration(self, run: Any, it: Any) -> None:
        """Say how many steps were skipped, and the mean."""
        it.metrics["steady/mean"] = self.mean or 0.0
        it.metrics["steady/skipped"] = float(self.skipped)

    def state_dict(self, run: Any) -> PartState:
        """Return mean and count."""
        return PartState(plain={"mean": self.mean, "skipped": self.skipped})

    def load_state_dict(self, run: Any, state: PartState, where: Path) -> None:
        """Put them back."""
        self.mean, self.skipped = state.plain["mean"], state.plain["skipped"]


def steadied(folder: str, way: str, stop: int = 0) -> dict[str, Any]:
    """Train the toy for four iterations with the part, by "config" or "callbacks" -> weights and
    metrics. stop: go on from a checkpoint of a new trainer after so many."""

    file = write_toy(Path(folder))

    def made() -> flowrl.Trainer:
        if way == "config":
            plugins = ("toykit", "steadykit")
            return flowrl.Trainer(flowrl.load_config(file, [OFF, PLUGIN], plugins))
        config = flowrl.load_config(file, [OFF], ["toykit"])
        return flowrl.Trainer(config, callbacks=[Steady(factor=FACTOR)])

    trainer, rows = made(), []
    for iteration in range(4):
        if stop and iteration == stop:
            trainer.save(Path(folder) / "saved")
            trainer.world.gather(None)  # the first process has written it
            trainer = made()
            trainer.load(Path(folder) / "saved")
        rows.append(trainer.step())
    return {"rows": rows, "end": {name: p.tolist() for name, p in trainer.params.items()}}
