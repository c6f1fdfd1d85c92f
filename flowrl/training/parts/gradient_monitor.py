"""Gradients that are far larger than those before, which a run may skip (`monitors.gradients`)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from flowrl.config.sections import GradientsMonitor
from flowrl.core.part import Part
from flowrl.training.run import Run

Memory = dict[str, Any]
ENOUGH = 20  # gradient norms, before one can be an outlier
# what losses ask for that learn from something else than advantages
OWN_SIGNAL = frozenset(("reward", "teacher", "fake"))


class GradientMonitor(Part):
    """Compare the norm of each informative optimizer step with those before. What it has seen is in
    the monitors' memory, so that it outlives a rollback."""

    name = "gradient monitor"
    when = ("config.monitors.gradients",)

    def __init__(self) -> None:
        self.judged: list[bool] = []

    def before_steps(self, run: Run, advantages: list[Tensor]) -> None:
        """Look which of the steps to come have a signal."""
        self.judged = informative(run.method.needs, advantages)

    def gradient(self, run: Run, norm: float, update: int) -> bool | None:
        """Refuse an outlier, or count it, as the config says."""
        options = run.config.monitors.gradients
        assert options is not None
        if not self.judged[update]:
            return True
        if is_usual(run.state.memory, norm, options, run.config.train.max_grad_norm):
            return True
        return False if options.action == "skip" else None


def informative(needs: AbstractSet[str], advantages: list[Tensor]) -> list[bool]:
    """Say of each optimizer step whether anything in it has a signal: an advantage other than 0,
    or any row at all with a loss that learns from something else, a reward's gradient or a teacher.

    Of a step without a signal only a penalty is left, or what a loss does at advantage 0. Its norm
    is next to nothing, so it is not to be compared with those that teach.

    needs: of loss and penalty. advantages: [n] per step, of the nodes of all processes, so that all
    of them judge alike. On an accelerator the host waits once.
    """
    found = []
    for rows in advantages:
        found.append(torch.tensor(len(rows) > 0) if needs & OWN_SIGNAL else (rows != 0).any())
    return list(torch.stack(found).tolist()) if found else []


def is_usual(
    memory: Memory, norm: float, options: GradientsMonitor, most: float = math.inf
) -> bool:
    """Say whether the gradient norm of an informative step is at most `factor` times the median of
    those before, or at most `most`, if that is finite, and remember it.

    most: the norm above which gradients are clipped; below it one can do no harm. Outliers are
    remembered, too: a run whose gradients stay larger is not left standing.
    """
    norms: list[float] = memory.setdefault("norms", [])
    enough = len(norms) >= min(ENOUGH, options.history)
    small = math.isfinite(most) and norm <= most
    usual = small or not enough or norm <= options.factor * statistics.median(norms)
    norms.append(norm)
    del norms[: -options.history]
    return usual
