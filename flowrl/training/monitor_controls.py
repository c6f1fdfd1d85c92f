"""What monitors have changed in the course of a run, and the gradients that it has seen.

They stand in `Setup.memory` as plain JSON, so that checkpoints keep them to the bit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from flowrl.config.sections import GradientsMonitor

Memory = dict[str, Any]
ENOUGH = 20  # gradient norms, before one can be an outlier
# what losses ask for that learn from something else than advantages
OWN_SIGNAL = frozenset(("reward", "teacher", "fake"))


def lr_factor(memory: Memory) -> float:
    """Return the factor of the learning rate; 1 where nobody has changed it."""
    return float(memory.get("lr_factor", 1.0))


def kl_factor(memory: Memory) -> float:
    """Return the factor of the weight of the `kl` section; 1 where nobody has changed it."""
    return float(memory.get("kl_factor", 1.0))


def informative(needs: AbstractSet[str], advantages: list[Tensor]) -> list[bool]:
    """Say of each optimizer step whether anything in it has a signal: an advantage other than 0,
    or any row at all with a loss that learns from something else, a reward's gradient or a teacher.

    Of a step without a signal only a penalty is left, or what a loss does at advantage 0. Its norm
    is next to nothing, so it is not to be compared with those that teach.

    needs: of loss and penalty. advantages: [n] per step, of the nodes of all processes, so that all
    of them judge alike. On an accelerator the host waits once.
    """
    if needs & OWN_SIGNAL:
        return [len(rows) > 0 for rows in advantages]
    found = [(rows != 0).any() for rows in advantages]
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
