"""The runs that a student learns from, as a config names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from annotated_types import Gt, Interval
from typing_extensions import TypedDict

from flowrl.core.errors import ConfigError


class TeacherOptions(TypedDict, total=False):
    """A teacher with options of its own."""

    run: str  # required
    weight: Annotated[float, Gt(0)]
    guidance: Annotated[float, Interval(ge=0)]


Named = str | TeacherOptions | list[str | TeacherOptions]
"""What stands behind a value of the record's key: a run, one with options, or several."""


class TeacherRun(NamedTuple):
    """A teacher of one domain."""

    run: str  # a run folder, or a checkpoint
    weight: float = 1.0  # of its distance in the sum over the domain's teachers
    guidance: float | None = None  # None = the model's own


def runs_of(teachers: Mapping[str, Named]) -> dict[str, list[TeacherRun]]:
    """Return the teachers of each value. Raises ConfigError that names one without a run, a value
    without a teacher, or a run that is named twice."""
    found = {}
    for value, named in teachers.items():
        listed = named if isinstance(named, list) else [named]
        found[value] = [_teacher(value, row) for row in listed]
        names = [teacher.run for teacher in found[value]]
        if not names:
            raise ConfigError(
                f"loss.teachers.{value}: expected at least one run, as in {value}: runs/a"
            )
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(
                f"loss.teachers.{value}: {twice[0]} is named twice; give it a weight instead"
            )
    return found


def _teacher(value: str, row: str | TeacherOptions) -> TeacherRun:
    if isinstance(row, str):
        return TeacherRun(row)
    if not row.get("run"):
        raise ConfigError(
            f"loss.teachers.{value}: expected a run, as in {{run: runs/a, guidance: 1.0}}, got "
            f"{dict(row)}"
        )
    return TeacherRun(row["run"], row.get("weight", 1.0), row.get("guidance"))
