"""Align diffusion and flow models with rewards by reinforcement learning."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flowrl.config import load_config
    from flowrl.loop import Trainer
    from flowrl.runs import evaluate_config, open_run, train

__version__ = "0.1.0"
__all__ = ["Trainer", "evaluate_config", "load_config", "open_run", "train"]

_HOME = {
    "Trainer": "flowrl.loop",
    "evaluate_config": "flowrl.runs",
    "load_config": "flowrl.config",
    "open_run": "flowrl.runs",
    "train": "flowrl.runs",
}


def __getattr__(name: str) -> Any:  # so that `import flowrl` stays light
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")
