"""The trials of a search: which combinations of values are tried, and where their runs are kept."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from flowrl.core.errors import ConfigError

MOST = 100_000  # combinations of all values
_LONGEST = 60  # letters of a trial's folder
_OWN = ("seed", "name")  # keys that a search sets itself
Choices = Mapping[str, Sequence[str]]


def check_choices(choices: Choices) -> None:
    """Raise ConfigError for no key, one that a search sets itself or that lies in another one, and
    for a key without values or with one twice."""
    if not choices:
        raise ConfigError("tune: expected a --try KEY=VALUE,VALUE..., got none")
    for key, values in choices.items():
        if key in _OWN:
            raise ConfigError(f"--try {key}: is not tried; --seeds says which seeds a trial has")
        if not values or len(set(values)) < len(values):
            got = ", ".join(values) or "none"
            raise ConfigError(f"--try {key}: expected values that differ, got {got}")
        inside = [other for other in choices if other.startswith(f"{key}.")]
        if inside:
            raise ConfigError(
                f"--try {key}: {inside[0]} lies in it; give one of both, or whole sections as "
                "values"
            )
    total = math.prod(len(values) for values in choices.values())
    if total > MOST:
        raise ConfigError(f"tune: expected at most {MOST:,} combinations, got {total:,}")


def combinations(choices: Choices, most: int = 0, draw: int = 0) -> list[tuple[str, ...]]:
    """Return the overrides of each trial, "key=value": every combination of the choices, the last
    key fastest; or at most so many of them, drawn by chance, in that order.

    A draw of more holds those of a draw of less, and a value that is added takes few of them away:
    each combination has a rank of its own, from `draw` and what it changes. Raises ConfigError as
    `check_choices` does.
    """
    check_choices(choices)
    if most < 0:
        raise ConfigError(f"--trials: expected 0 or more, got {most}")
    every = []
    for values in itertools.product(*choices.values()):
        pairs = zip(choices, values, strict=True)
        every.append(tuple(f"{key}={value}" for key, value in pairs))
    if not 0 < most < len(every):
        return every
    drawn = sorted(every, key=lambda changes: _code(str(draw), *sorted(changes)))[:most]
    return [changes for changes in every if changes in set(drawn)]


def folder_of(changes: Sequence[str]) -> str:
    """Return the folder of a trial: named after what it changes, in whichever order, so that trials
    can be added."""
    text = "_".join(sorted(changes))
    plain = re.sub(r"[^A-Za-z0-9=.+_-]+", "-", text).strip("-")
    # capitals are no difference to some systems
    if plain == text.lower() and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST]}-{_code(*sorted(changes))[:8]}"


def one_line(text: str) -> str:
    """Set a value that may have line breaks in one line."""
    return " ".join(text.split())


def _code(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
