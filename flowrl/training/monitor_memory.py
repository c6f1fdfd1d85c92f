"""What a checkpoint keeps of the monitors, checked before a run goes on with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Interval

from flowrl.config.values import convert
from flowrl.core.errors import ConfigError

MOST_KL = 1e3  # of the factor of the kl section's weight, and of its inverse

Count = Annotated[int, Interval(ge=0, lt=2**31)]
Norm = Annotated[float, Interval(ge=0)]
KINDS: dict[str, Any] = {
    "kl_factor": Annotated[float, Interval(gt=0, le=MOST_KL)],
    "lr_factor": Annotated[float, Interval(gt=0, le=1)],
    "rollbacks": Count,
    "norms": list[Norm],
    "start": dict[str, list[float]],
    "lasting": dict[str, Count],
    "rewards": dict[str, float],
    "stretch": list[float],
    "judged": Annotated[int, Interval(ge=-1, lt=2**31)],
    "findings": Count,
    "firing": list[str],
    "rest": dict[str, Count],
    "refreshed": dict[str, Count],
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
    known = isinstance(stopped, dict) and isinstance(stopped.get("monitor"), str)
    if stopped is not None and not known:
        raise ValueError(f"monitors.stopped: expected an object with a monitor, got {stopped!r}")
    return dict(found)
