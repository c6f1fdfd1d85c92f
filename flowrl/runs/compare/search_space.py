"""What a search tries: values or a range for each key of a config, read from texts such as
"optimizer.lr=1e-5..1e-3 log", and the name of a trial's folder."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flowrl.core.errors import ConfigError

Value = str | int | float

_MOST = 100_000  # combinations of a grid
_LONGEST = 60  # letters of a trial's folder
_OWN = ("seed", "name")  # keys that a search sets itself
_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\.\.({_NUMBER})((?:\s+\S+)*)\s*")
_WHOLE = re.compile(r"[+-]?\d+")


class Values(NamedTuple):
    """Values of a key, each as --set has it."""

    texts: tuple[str, ...]

    def size(self) -> float:
        """Count the values."""
        return len(self.texts)

    def grid(self) -> list[Value]:
        """Return all values."""
        return list(self.texts)

    def checked(self) -> list[Value]:
        """Return the values that are checked before anything runs."""
        return list(self.texts)


class Range(NamedTuple):
    """Numbers of a key, both ends included; whole ones where both ends are written as such."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    def size(self) -> float:
        """Count the numbers; infinity where there is no end of them."""
        step = self._steps()
        return math.inf if step is None else math.floor((self.high - self.low) / step + 1e-9) + 1

    def grid(self) -> list[Value]:
        """Return all numbers of a range of a finite size."""
        step, count = self._steps() or 0.0, int(self.size())
        return [self._number(self.low + step * place) for place in range(count)]

    def checked(self) -> list[Value]:
        """Return the values that are checked before anything runs."""
        return [self._number(self.low), self._number(self.high)]

    def _steps(self) -> float | None:
        if self.log:
            return None
        return self.step or (1.0 if self.whole else None)

    def _number(self, value: float) -> int | float:
        return round(value) if self.whole else float(value)


Space = Mapping[str, Values | Range]


def read_space(texts: Sequence[str]) -> dict[str, Values | Range]:
    """Read "KEY=VALUE,VALUE..." and "KEY=LOW..HIGH" -> what each key may be.

    Commas inside brackets and quotes do not part values. After a range may stand ``log``,
    ``step S`` and ``float``. Raises ConfigError for what cannot be read, a key that comes twice,
    one that a search sets itself, and one that lies in another one.
    """
    space: dict[str, Values | Range] = {}
    for text in texts:
        key, _, values = text.partition("=")
        key = key.strip()
        if key in space:
            raise ConfigError(f"--try {key}: comes twice; give its values once, parted by commas")
        found = _RANGE.fullmatch(values)
        space[key] = _range(key, *found.groups()) if found else _values(key, values)
    _check_keys(space)
    return space


def _check_keys(space: Space) -> None:
    if not space:
        raise ConfigError("tune: expected a --try KEY=VALUE,VALUE... or KEY=LOW..HIGH, got none")
    for key in space:
        if key in _OWN:
            raise ConfigError(f"--try {key}: is not tried; --seeds says which seeds a trial has")
        inside = [other for other in space if other.startswith(f"{key}.")]
        if inside:
            raise ConfigError(
                f"--try {key}: {inside[0]} lies in it; give one of both, or whole sections as "
                "values"
            )


def _range(key: str, low: str, high: str, words: str) -> Range:
    """Read the parts of a range."""
    # the words after it
    log, step, given = False, "", words.split()
    whole = all(_WHOLE.fullmatch(end) for end in (low, high))
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
    found = Range(float(low), float(high), log, float(step) if step else None, whole)
    # what no number can be drawn from
    if not found.low < found.high:
        raise ConfigError(f"--try {key}: expected a range that rises, got {low}..{high}")
    if log and (found.low <= 0 or step):
        raise ConfigError(f"--try {key}: log needs a range above 0 without a step")
    if step and not found.step:
        raise ConfigError(f"--try {key}: expected a step above 0, got {step}")
    return found


def _values(key: str, text: str) -> Values:
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
    return Values(tuple(values))


def grid_of(space: Space) -> dict[str, list[Value]]:
    """Return all values of each key. Raises ConfigError for a range without a step, and for too
    many combinations."""
    for key, some in space.items():
        if math.isinf(some.size()):
            raise ConfigError(
                f"--sampler grid: {key} is a range without a step; give values or a step, or take "
                "--sampler tpe"
            )
    total = combinations(space)
    if total > _MOST:
        raise ConfigError(f"--sampler grid: expected at most {_MOST:,} combinations, got {total:,}")
    return {key: some.grid() for key, some in space.items()}


def combinations(space: Space) -> float:
    """Count the combinations of all values; infinity where a range has no end of them."""
    return math.prod(some.size() for some in space.values())


def said(some: Values | Range) -> str:
    """Say what is tried of a key, as a result file states it."""
    if isinstance(some, Values):
        return ", ".join(some.texts)
    low, high = some.checked()
    step = "" if some.step is None else f" step {some.step:g}"
    kind = "whole" if some.whole else "float"
    return f"{low} to {high}{' log' if some.log else ''}{step}, {kind}"


def change(key: str, value: Value) -> str:
    """Return the override that gives a key its value."""
    return f"{key}={value}" if isinstance(value, str) else f"{key}={value!r}"


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
