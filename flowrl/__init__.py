"""Align diffusion and flow models with rewards by reinforcement learning.

The public face: what a notebook or a script needs. Each function is imported when it is first used,
so that ``import flowrl`` stays light.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
import warnings
from typing import TYPE_CHECKING, Any

from flowrl.core.version import __version__ as __version__

if TYPE_CHECKING:
    from flowrl.api.calls import Trainer, compare, doctor, estimate, evaluate, train, tune
    from flowrl.api.trained_run import TrainedRun, open
    from flowrl.config.load import Config, load_config
    from flowrl.core.part import Part

__all__ = [
    "Config",
    "Part",
    "TrainedRun",
    "Trainer",
    "compare",
    "doctor",
    "estimate",
    "evaluate",
    "load_config",
    "open",
    "train",
    "tune",
]

_HOME = {
    "Config": "flowrl.config.load",
    "Part": "flowrl.core.part",
    "TrainedRun": "flowrl.api.trained_run",
    "Trainer": "flowrl.api.calls",
    "load_config": "flowrl.config.load",
    "open": "flowrl.api.trained_run",
}
_CALLS = "flowrl.api.calls"


class _Face(types.ModuleType):
    """The module itself: `doctor` is a function, and a room of the same name does not hide it."""

    @property
    def doctor(self) -> Any:
        """Return the function."""
        return importlib.import_module(_CALLS).doctor

    @doctor.setter
    def doctor(self, room: Any) -> None:
        """Let the import of the room ``flowrl/doctor/`` leave the function alone."""


sys.modules[__name__].__class__ = _Face


def __getattr__(name: str) -> Any:
    if name in __all__:
        _warn_of_other_package()
        return getattr(importlib.import_module(_HOME.get(name, _CALLS)), name)
    raise AttributeError(f"module 'flowrl' has no attribute {name!r}")


@functools.cache
def _warn_of_other_package() -> None:
    from flowrl.core.installation import other_package

    found = other_package()
    if found:
        warnings.warn(found, stacklevel=3)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
