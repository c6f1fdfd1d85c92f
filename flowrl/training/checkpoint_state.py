"""What the ``state.json`` of a run's checkpoint holds, checked before any of it is used."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Interval

from flowrl.config.values import convert, show
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.files import is_finite_number
from flowrl.core.part import PartState

MOST_ITERATIONS = 2**31  # no config trains for longer


class CheckpointState(NamedTuple):
    """What a run saves beside its tensors."""

    iteration: int
    optimizer: dict[str, Any]  # as `optimizer_to_tensors` gives it
    parts: dict[str, PartState]  # what each part keeps; its files by name alone
    monitors: dict[str, Any]
    seed: int | None = None  # None: of a checkpoint that does not say it
    prompts_hash: str | None = None  # of the training list, as `prompts_hash` makes it


def checked_state(found: Any, file: Path) -> CheckpointState:
    """Check what was read from `file`. Raises CheckpointError that names the file, the key, what
    was expected there and what came."""
    iteration = checked_iteration(found, file)
    _need(type(found.get("config", "")) is str, file, "config", "a text", found.get("config"))
    seed, prompts = found.get("seed"), found.get("prompts_hash")
    known = "seed" not in found or type(seed) is int
    _need(known, file, "seed", "a whole number", seed)
    known = "prompts_hash" not in found or type(prompts) is str
    _need(known, file, "prompts_hash", "a text", prompts)
    check_optimizer(found.get("optimizer"), file, "optimizer")
    # the parts: which files are theirs, and what is no tensor
    listed, parts = found.get("parts"), {}
    _need(isinstance(listed, dict), file, "parts", "an object", listed)
    for name, kept in listed.items():
        where = f"parts.{name}"
        _need(isinstance(kept, dict), file, where, "an object", kept)
        files, plain = kept.get("files"), kept.get("state")
        texts = isinstance(files, list) and all(isinstance(each, str) for each in files)
        _need(texts, file, f"{where}.files", "a list of names", files)
        _need(isinstance(plain, dict), file, f"{where}.state", "an object", plain)
        parts[name] = PartState(dict.fromkeys(files, {}), plain)
    # the monitors' memory
    try:
        monitors = checked_memory(found.get("monitors", {}))
    except ValueError as error:
        raise CheckpointError(_said(file, f"{error}")) from error
    return CheckpointState(iteration, found["optimizer"], parts, monitors, seed, prompts)


def checked_iteration(found: Any, file: Path) -> int:
    """Return the number of finished iterations of what was read from `file`. Raises
    CheckpointError."""
    if not isinstance(found, Mapping):
        raise CheckpointError(_said(file, f"expected an object, got {show(found)}"))
    iteration = found.get("iteration")
    known = type(iteration) is int and 0 <= iteration <= MOST_ITERATIONS
    _need(known, file, "iteration", f"a whole number from 0 to {MOST_ITERATIONS}", iteration)
    return int(found["iteration"])


def check_optimizer(found: Any, file: Path, key: str) -> None:
    """Check the JSON of an optimizer, {"scalars": {name: number}, "groups": [{"params": count,
    setting: value}]}."""
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
