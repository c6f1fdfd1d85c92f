"""What the ``state.json`` of a run's checkpoint holds, checked before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.values import show
from flowrl.core.errors import CheckpointError
from flowrl.core.files import is_finite_number
from flowrl.training.monitor_memory import checked_memory

MOST_ITERATIONS = 2**31  # no config trains for longer


class CheckpointState(NamedTuple):
    """What a run saves beside its tensors."""

    iteration: int
    optimizer: dict[str, Any]  # as `optimizer_to_tensors` gives it
    companions: dict[str, dict[str, Any]]  # the same of each
    monitors: dict[str, Any]


def checked_state(found: Any, file: Path) -> CheckpointState:
    """Check what was read from `file`. Raises CheckpointError that names the file, the key, what
    was expected there and what came."""
    iteration = checked_iteration(found, file)
    _need(type(found.get("config", "")) is str, file, "config", "a text", found.get("config"))
    # the optimizers: of the policy, and of the models that learn along with it
    companions = found.get("companions", {})
    _need(isinstance(companions, dict), file, "companions", "an object", companions)
    for key, value in {"optimizer": found.get("optimizer"), **_below(companions)}.items():
        _check_optimizer(value, file, key)
    # the monitors' memory
    try:
        monitors = checked_memory(found.get("monitors", {}))
    except ValueError as error:
        raise CheckpointError(_said(file, f"{error}")) from error
    return CheckpointState(iteration, found["optimizer"], companions, monitors)


def checked_iteration(found: Any, file: Path) -> int:
    """Return the number of finished iterations of what was read from `file`. Raises
    CheckpointError."""
    if not isinstance(found, Mapping):
        raise CheckpointError(_said(file, f"expected an object, got {show(found)}"))
    iteration = found.get("iteration")
    known = type(iteration) is int and 0 <= iteration <= MOST_ITERATIONS
    _need(known, file, "iteration", f"a whole number from 0 to {MOST_ITERATIONS}", iteration)
    return int(found["iteration"])


def _below(companions: dict[str, Any]) -> dict[str, Any]:
    return {f"companions.{name}": value for name, value in companions.items()}


def _check_optimizer(found: Any, file: Path, key: str) -> None:
    """Check {"scalars": {name: number}, "groups": [{"params": count, setting: value}]}."""
    # the two parts
    _need(isinstance(found, dict), file, key, "an object", found)
    scalars, groups = found.get("scalars"), found.get("groups")
    _need(isinstance(scalars, dict), file, f"{key}.scalars", "an object", scalars)
    _need(isinstance(groups, list), file, f"{key}.groups", "a list of objects", groups)
    # what they hold
    for name, value in scalars.items():
        known = isinstance(value, bool) or is_finite_number(value)
        _need(known, file, f"{key}.scalars.{name}", "a finite number or a switch", value)
    for place, group in enumerate(groups):
        where = f"{key}.groups[{place}]"
        _need(isinstance(group, dict), file, where, "an object", group)
        count = group.get("params")
        _need(type(count) is int and count >= 0, file, f"{where}.params", "a count", count)
        for name, value in group.items():
            expected = "finite numbers, a switch or a text"
            _need(_is_setting(value), file, f"{where}.{name}", expected, value)


def _is_setting(value: Any) -> bool:
    """Say whether a value may be a setting of an optimizer, also of a user's own: plain JSON whose
    numbers are finite."""
    if isinstance(value, list):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, bool | str) or is_finite_number(value)


def _need(good: bool, file: Path, key: str, expected: str, found: Any) -> None:
    if not good:
        raise CheckpointError(_said(file, f"{key}: expected {expected}, got {show(found)}"))


def _said(file: Path, what: str) -> str:
    return f"{file}: {what}: it is not what a run saves; go on from another checkpoint"
