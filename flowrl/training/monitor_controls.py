"""What monitors have changed in the course of a run, and the gradients that it has seen.

They stand in `Setup.memory` as plain JSON, so that checkpoints keep them to the bit.
"""

from __future__ import annotations

import statistics
from typing import Any

from flowrl.config.monitors import GradientsMonitor

Memory = dict[str, Any]
ENOUGH = 20  # gradient norms, before one can be an outlier


def lr_factor(memory: Memory) -> float:
    """Return the factor of the learning rate; 1 where nobody has changed it."""
    return float(memory.get("lr_factor", 1.0))


def kl_factor(memory: Memory) -> float:
    """Return the factor of the weight of the `kl` section; 1 where nobody has changed it."""
    return float(memory.get("kl_factor", 1.0))


def is_usual(memory: Memory, norm: float, options: GradientsMonitor) -> bool:
    """Say whether a gradient norm is at most `factor` times the median of those before, and
    remember it.

    Outliers are remembered, too: a run whose gradients stay larger is not left standing.
    """
    norms: list[float] = memory.setdefault("norms", [])
    enough = len(norms) >= min(ENOUGH, options.history)
    usual = not enough or norm <= options.factor * statistics.median(norms)
    norms.append(norm)
    del norms[: -options.history]
    return usual
