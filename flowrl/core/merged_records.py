"""Records that have the same names, put together name by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import Tensor


def concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Put rows {name: [N, ...]} behind each other; the names are those of the first part."""
    out = {}
    for name in parts[0]:
        out[name] = torch.cat([part[name] for part in parts])
    return out


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each number over rows of equal names."""
    out = {}
    for name in rows[0]:
        out[name] = median(row[name] for row in rows)
    return out
