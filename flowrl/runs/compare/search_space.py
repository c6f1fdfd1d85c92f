"""What a search tries: values or a range for each key of a config, read from texts such as
"optimizer.lr=1e-5..1e-3 log" as what Optuna draws from; and the name of a trial's folder."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrl.core.errors import ConfigError, install

Value = str | int | float

_MOST = 100_000  # combinations of a grid
_LONGEST = 60  # letters of a trial's folder
_OWN = ("seed", "name")  # keys that a search sets itself
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\.\.({_NUMBER})((?:\s+\S+)*)\s*")
_WHOLE = re.compile(r"[+-]?\d+")


if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = dict[str, "BaseDistribution"]


def import_optuna() -> Any:
    """Import Optuna, quietly. Raises ConfigError where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(f"flowrl tune needs Optuna: {install('tune')}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def read_space(texts: Sequence[str]) -> Space:
    """Read "KEY=VALUE,VALUE..." and "KEY=LOW..HIGH" -> what each key may be.

    Commas inside brackets and quotes do not part values. After a range may stand ``log``,
    ``step S`` and ``float``. Raises ConfigError for what cannot be read, a key that comes twice,
    one that a search sets itself, and one that lies in another one; and without Optuna.
    """
    import_optuna()
    space: Space = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        if key in space:
            raise ConfigError(f"--try {key}: comes twice; give its values once, parted by commas")
        found = _RANGE.fullmatch(values)
        if found:
            space[key] = _range(key, *found.groups())
        else:
            space[key] = _values(key, values)
    _check_keys(space)
    return space


def _check_keys(space: Space) -> None:
    if not space:
        raise ConfigError("tune: expected a --try KEY=VALUE,VALUE... or KEY=LOW..HIGH, got none")
    for key in space:
        if key in _OWN:
            raise ConfigError(f"--try {key}: is not tried; --seeds says which seeds a trial has")
        for other in space:
            if other.startswith(f"{key}."):
                raise ConfigError(
                    f"--try {key}: {other} lies in it; give one of both, or whole sections as "
                    "values"
                )


def _range(key: str, low: str, high: str, words: str) -> BaseDistribution:
    """Read the parts of a range; of whole numbers where both ends are written as such."""
    from optuna.distributions import FloatDistribution, IntDistribution

    # the words after it
    log, step, given = False, "", words.split()
    whole = all(map(_WHOLE.fullmatch, (low, high)))
    while given:
        word = given.pop(0)
        if word == "log":
            log = True
        elif word == "float":
            whole = False
        elif word == "step" and given and re.fullmatch(_NUMBER, given[0]):
            step = given.pop(0)
        else:
            raise ConfigError(
                f"--try {key}: expected log, float or step NUMBER after the range, got {word!r}"
            )
    whole = whole and (not step or _WHOLE.fullmatch(step) is not None)
    if float(low) >= float(high):
        raise ConfigError(f"--try {key}: expected a range that rises, got {low}..{high}")
    # the rest is refused by Optuna: log at 0 or with a step, steps that are none
    try:
        if whole:
            return IntDistribution(int(low), int(high), log, int(step or 1))
        return FloatDistribution(float(low), float(high), log, float(step) if step else None)
    except ValueError as error:
        raise ConfigError(f"--try {key}: {error}") from error


def _values(key: str, text: str) -> BaseDistribution:
    """Split at the commas that stand outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
        if depth < 0:
            break
    if depth or quote:
        raise ConfigError(f"--try {key}: a bracket or quote has no partner in {text!r}")
    values = [part.strip() for part in parts]
    if "" in values:
        raise ConfigError(f"--try {key}: expected values parted by commas, got {text!r}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--try {key}: expected values that differ, got {', '.join(values)}")
    from optuna.distributions import CategoricalDistribution

    return CategoricalDistribution(values)


def ends(some: BaseDistribution) -> list[Value]:
    """Return the values of a key that are checked before anything runs: all that are listed, of a
    range both ends."""
    if hasattr(some, "choices"):
        return [*some.choices]
    return [some.low, some.high]  # type: ignore[attr-defined]


def _every(some: Any) -> list[Value] | None:
    """Return all values of a key; None where there is no end of them."""
    if hasattr(some, "choices"):
        return [*some.choices]
    if some.log or some.step is None:
        return None
    count = math.floor((some.high - some.low) / some.step + 1e-9) + 1
    return [some.low + some.step * place for place in range(count)]


def grid_of(space: Space) -> dict[str, list[Value]]:
    """Return all values of each key. Raises ConfigError for a range without a step, and for too
    many combinations."""
    grid = {}
    for key, some in space.items():
        values = _every(some)
        if values is None:
            raise ConfigError(
                f"--sampler grid: {key} is a range without a step; give values or a step, or take "
                "--sampler tpe"
            )
        grid[key] = values
    total = combinations(space)
    if total > _MOST:
        raise ConfigError(f"--sampler grid: expected at most {_MOST:,} combinations, got {total:,}")
    return grid


def combinations(space: Space) -> float:
    """Count the combinations of all values; infinity where a range has no end of them."""
    total = 1
    for values in map(_every, space.values()):
        if values is None:
            return math.inf
        total *= len(values)
    return total


def change(key: str, value: Value) -> str:
    """Return the override that gives a key its value."""
    if isinstance(value, str):
        return f"{key}={value}"
    return f"{key}={value!r}"


def folder_of(changes: Sequence[str]) -> str:
    """Return the folder of a trial, named after what it changes: two trials that change the same
    share their runs."""
    text = "_".join(sorted(changes))
    plain = re.sub(r"[^A-Za-z0-9=.+_-]+", "-", text).strip("-")
    # capitals are no difference to some systems
    if plain == text.lower() and len(plain) <= _LONGEST:
        return plain
    code = hashlib.sha256("\n".join(sorted(changes)).encode()).hexdigest()[:8]
    return f"{plain[:_LONGEST]}-{code}"


def one_line(text: str) -> str:
    """Set a value that may have line breaks in one line."""
    return " ".join(text.split())
