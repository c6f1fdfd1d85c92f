"""What a checkpoint keeps of the monitors, checked before a run goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.config.values import convert
from flowrl.core.errors import ConfigError

KINDS: dict[str, Any] = {
    "kl_factor": float,
    "lr_factor": float,
    "rollbacks": int,
    "norms": list[float],
    "start": dict[str, list[float]],
    "lasting": dict[str, int],
    "rewards": dict[str, float],
    "stretch": list[float],
    "judged": int,
    "findings": int,
    "firing": list[str],
    "rest": dict[str, int],
    "told": list[str],
}
"""Keys of the memory and what they hold."""


def checked_memory(found: Any) -> dict[str, Any]:
    """Return a memory as it was read from JSON. Raises ValueError that names the key of what is
    none."""
    if not isinstance(found, Mapping):
        raise ValueError(f"monitors: expected an object, got {found!r}")
    try:
        for key, kind in KINDS.items():
            if key in found:
                convert(found[key], kind, f"monitors.{key}")
    except ConfigError as error:
        raise ValueError(str(error)) from error
    # what ended the run names its monitor
    stopped = found.get("stopped")
    if stopped is not None and not (isinstance(stopped, dict) and "monitor" in stopped):
        raise ValueError(f"monitors.stopped: expected an object with a monitor, got {stopped!r}")
    return dict(found)
