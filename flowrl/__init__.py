"""Align diffusion and flow models with rewards by reinforcement learning.

The public face: what a notebook or a script needs. Each function is imported when it is first used,
so that ``import flowrl`` stays light.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import TYPE_CHECKING, Any

from flowrl.core.version import __version__ as __version__

if TYPE_CHECKING:
    from flowrl.config.load import load_config
    from flowrl.core.part import Part
    from flowrl.cost.estimate import estimate
    from flowrl.runs.compare.compare import compare
    from flowrl.runs.evaluate import evaluate
    from flowrl.runs.export.export import export
    from flowrl.runs.open_run import open_run
    from flowrl.runs.train import train
    from flowrl.training.trainer import Trainer

__all__ = [
    "Part",
    "Trainer",
    "compare",
    "estimate",
    "evaluate",
    "export",
    "load_config",
    "open_run",
    "train",
]

_HOME = {
    "Part": "flowrl.core.part",
    "Trainer": "flowrl.training.trainer",
    "compare": "flowrl.runs.compare.compare",
    "estimate": "flowrl.cost.estimate",
    "evaluate": "flowrl.runs.evaluate",
    "export": "flowrl.runs.export.export",
    "load_config": "flowrl.config.load",
    "open_run": "flowrl.runs.open_run",
    "train": "flowrl.runs.train",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        _warn_of_other_package()
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")


@functools.cache
def _warn_of_other_package() -> None:
    from flowrl.core.installation import other_package

    found = other_package()
    if found:
        warnings.warn(found, stacklevel=3)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
