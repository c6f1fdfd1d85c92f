"""What the JSON of a comparison's files has to look like, and the first thing that does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.load import Config
from flowrl.config.values import show
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.files import is_finite_number
from flowrl.runs.folder import read_object


class Kind(NamedTuple):
    """A value of one kind: what it is in words, and whether something is one."""

    words: str
    fits: Callable[[Any], bool]


class Maybe(NamedTuple):
    """A value or null."""

    shape: Any


class Each(NamedTuple):
    """An object whose values are all alike."""

    shape: Any


def mistake(value: Any, shape: Any, where: str = "") -> str | None:
    """Return the first thing that is wrong, "at.nfe: expected an object, got 3 (a whole number)";
    None where all is right.

    A shape is a Kind, Maybe, Each, a list with the shape of its items, or a dict of keys to
    shapes; a key that ends in "?" may be missing, others may be there beside.
    """
    return next(_mistakes(value, shape, where), None)


def _mistakes(value: Any, shape: Any, where: str) -> Iterator[str]:
    # null, or a single value
    if isinstance(shape, Maybe):
        if value is not None:
            yield from _mistakes(value, shape.shape, where)
        return
    if isinstance(shape, Kind):
        if not shape.fits(value):
            yield _said(where, shape.words, value)
        return
    # a list of values that are alike
    if isinstance(shape, list):
        if not isinstance(value, list):
            yield _said(where, "a list", value)
            return
        for place, item in enumerate(value):
            yield from _mistakes(item, shape[0], f"{where}[{place}]")
        return
    # an object
    if not isinstance(value, Mapping):
        yield _said(where, "an object", value)
    elif isinstance(shape, Each):
        for key, item in value.items():
            yield from _mistakes(item, shape.shape, _below(where, key))
    else:
        yield from _of_object(value, shape, where)


def _of_object(value: Mapping[str, Any], shape: Mapping[str, Any], where: str) -> Iterator[str]:
    for name, inner in shape.items():
        key = name.rstrip("?")
        if key in value:
            yield from _mistakes(value[key], inner, _below(where, key))
        elif key == name:
            yield f"{where or 'the object'}: expected the key {key!r}, which is missing"


def _below(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _said(where: str, words: str, value: Any) -> str:
    return f"{where or 'the file'}: expected {words}, got {show(value)}"


def _outcomes(value: Any) -> bool:
    """Say whether a text holds one finite number or more for each prompt."""
    try:
        found = unpacked(value)
    except (AttributeError, ValueError):
        return False
    return all(some and all(map(math.isfinite, some)) for some in found)


WHOLE = Kind("a whole number", lambda value: type(value) is int)
COUNT = Kind("a whole number from 0 on", lambda value: type(value) is int and value >= 0)
NUMBER = Kind("a finite number", is_finite_number)
AMOUNT = Kind("a finite number from 0 on", lambda value: is_finite_number(value) and value >= 0)
POSITIVE = Kind("a finite number above 0", lambda value: is_finite_number(value) and value > 0)
METRIC = Kind("a number", lambda value: type(value) in (int, float))
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
OUTCOMES = Kind("scores of each prompt's images, such as '01 11' or '0.5,1, 0.25,'", _outcomes)

PRICES = {"trained": AMOUNT, "decoded": AMOUNT, "scored": AMOUNT}
BUDGETS = {"nfe": POSITIVE, "seconds": AMOUNT, "points": COUNT, "clock?": TEXT, "counted?": TEXT}
CLAIM = {
    "budgets": BUDGETS,
    "prices?": PRICES,
    "load": Maybe(NUMBER),
    "environment": OBJECT,
}
ROW = {
    "iteration": COUNT,
    "nfe": AMOUNT,
    "seconds": AMOUNT,
    "marks": [COUNT],
    "budget": [TEXT],
    "score": NUMBER,
    "interval": [Maybe(NUMBER)],
    "tasks": Each(NUMBER),
}
AT = {**ROW, "outcomes?": OUTCOMES}
RUN = {
    "seed": WHOLE,
    "lr": POSITIVE,
    "failed": Maybe(TEXT),
    "iterations": COUNT,
    "nfe": AMOUNT,
    "seconds": AMOUNT,
    "curve": [ROW],
    "at": {"nfe": Maybe(AT), "seconds": Maybe(AT)},
    "last_quarter": Each(Maybe(METRIC)),
    "trajectory": Each([Maybe(METRIC)]),
    "prices?": PRICES,
    "load?": Maybe(NUMBER),
}
RUN_FILE = {**RUN, "name": TEXT, "environment": OBJECT}
EVALUATED = {
    "iteration": COUNT,
    "nfe": AMOUNT,
    "seconds": AMOUNT,
    "marks": [COUNT],
    "budget": [TEXT],
    "score": TEXT,
    "interval": [Maybe(NUMBER)],
    "tasks": Each({"mean": NUMBER}),
    "outcomes": OUTCOMES,
}
BASE = {
    "score": NUMBER,
    "interval": [Maybe(NUMBER)],
    "images": COUNT,
    "tasks": Each(NUMBER),
    "tags?": [TEXT],
    "outcomes?": OUTCOMES,
}
BASE_FILE = {"setting": OBJECT, "base": BASE}
SEARCH = {"factors": [POSITIVE], "seed": WHOLE, "share": POSITIVE, "nfe": POSITIVE}
TRIED = {"factor": POSITIVE, "score": Maybe(METRIC), "lr": POSITIVE, "failed": Maybe(TEXT)}
ENTRY = {
    "name": TEXT,
    "file": TEXT,
    "config": OBJECT,
    "lr": POSITIVE,
    "search": Maybe({"own_lr": POSITIVE, "chosen_lr": POSITIVE, "tried": [TRIED]}),
    "seeds": [{**RUN, "environment?": COUNT}],
}
RESULT_FILE = {
    "budgets": BUDGETS,
    "settings": {"score": TEXT, "equal": OBJECT, "search": Maybe(SEARCH)},
    "environments": [OBJECT],
    "base": BASE,
    "configs": [ENTRY],
}
FACTORIAL_FILE = {
    "score": TEXT,
    "nfe": POSITIVE,
    "counted?": TEXT,
    "design": {
        "axes": Each(OBJECT),
        "interactions": [[TEXT]],
        "fraction": TEXT,
        "efficiency": NUMBER,
    },
    "cells": [{"name": TEXT, "levels": OBJECT}],
    "tags": [TEXT],
    "environments": [OBJECT],
    "runs": [
        {
            "cell": TEXT,
            "seed": WHOLE,
            "failed": Maybe(TEXT),
            "score": Maybe(NUMBER),
            "tasks?": Maybe(Each(NUMBER)),
            "outcomes?": Maybe(OUTCOMES),
            "iterations": COUNT,
            "nfe": AMOUNT,
            "seconds": AMOUNT,
            "environment?": COUNT,
        }
    ],
}


TUNING_FILE = {
    "config": TEXT,
    "score": TEXT,
    "settings": {"prompts": {"test": TEXT}, "eval": {"images": COUNT}},
    "nfe": POSITIVE,
    "counted": TEXT,
    "choices": Each([TEXT]),
    "seeds": [WHOLE],
    "environments": [OBJECT],
    "base": BASE,
    "trials": [
        {
            "changes": [TEXT],
            "folder": TEXT,
            "runs": [
                {
                    "seed": WHOLE,
                    "failed": Maybe(TEXT),
                    "score": Maybe(NUMBER),
                    "interval": Maybe([Maybe(NUMBER)]),
                    "tasks": Maybe(Each(NUMBER)),
                    "iterations": COUNT,
                    "nfe": AMOUNT,
                    "seconds": AMOUNT,
                    "environment": COUNT,
                }
            ],
        }
    ],
}


def disagreement(result: Mapping[str, Any]) -> str | None:
    """Return what does not fit together in a result whose parts are right: names, seeds, machines,
    tasks, prompts; None where all does."""
    base, machines = result["base"], len(result["environments"])
    names = [entry["name"] for entry in result["configs"]]
    if len(set(names)) < len(names):
        return f"configs: expected each name once, got {', '.join(names)}"
    said = _unlike(base, base, "base")
    for number, entry in enumerate(result["configs"]):
        seeds = [run["seed"] for run in entry["seeds"]]
        if len(set(seeds)) < len(seeds):
            return f"configs[{number}].seeds: expected each seed once, got {seeds}"
        for place, run in enumerate(entry["seeds"]):
            where = f"configs[{number}].seeds[{place}]"
            if run.get("environment", -1) >= machines:
                return f"{where}.environment: expected one of {machines} places in environments"
            said = said or unlike_base(run, base, where)
    return said


def unlike_base(run: Mapping[str, Any], base: Mapping[str, Any], where: str = "") -> str | None:
    """Return what a run's scores do not share with its own curve or those of the base model: the
    evaluation at the end of a budget, tasks, or prompts."""
    said = None
    for name, row in run["at"].items():
        key = _below(where, f"at.{name}")
        ends = [point for point in run["curve"] if name in point["budget"]]
        plain = row and {part: row[part] for part in row if part != "outcomes"}
        if plain != (ends[0] if ends else None):
            said = said or f"{key}: expected the point of the curve at which this budget ended"
        elif row is not None:
            said = said or _unlike(row, base, key)
    return said


def _unlike(row: Mapping[str, Any], base: Mapping[str, Any], where: str) -> str | None:
    if row["tasks"].keys() != base["tasks"].keys():
        return f"{where}.tasks: expected those of the base model, {', '.join(base['tasks'])}"
    if row is base and "tags" in row and set(row["tags"]) != row["tasks"].keys():
        return f"{where}.tags: expected those of its tasks, {', '.join(row['tasks'])}"
    # outcomes of every prompt, or, in files of an earlier version, none at all
    tags = base.get("tags")
    got = len(unpacked(row["outcomes"])) if "outcomes" in row else None
    if tags is None and row is base and got is not None:
        return f"{where}: expected tags beside its outcomes"
    if tags is not None and got != len(tags):
        return f"{where}.outcomes: expected {len(tags)} prompts, as base.tags has, got {got or 0}"
    return None


AGAIN = "delete it, and the same command puts it together again from the run's logs"


def stored(folder: Path, name: str, shape: Mapping[str, Any], mend: str) -> dict[str, Any]:
    """Read an object of a run's folder; {} where there is no such file. Raises RunError that names
    the file and key and says how to mend it."""
    try:
        found = read_object(folder, name)
    except RunError as error:
        raise RunError(f"{error}; {mend}") from error
    if not found and not (folder / name).exists():
        return {}
    wrong = mistake(found, shape)
    if wrong is not None:
        raise RunError(f"{folder / name}: {wrong}; {mend}")
    return found


def check_whose(found: Mapping[str, Any], config: Config, file: Path) -> None:
    """Raise ConfigError if a run's result is that of another config, seed or learning rate."""
    mine = {"name": config.name, "seed": config.seed, "lr": config.lr}
    for key, value in mine.items():
        if found[key] != value:
            raise ConfigError(
                f"{file}: expected the result of {key} {value!r}, got that of {found[key]!r}: the "
                f"file was copied from another run; {AGAIN}"
            )


def check_judged(found: Mapping[str, Any], base: Mapping[str, Any], folder: Path) -> None:
    """Raise RunError if a run was judged on other tasks or prompts than the base model."""
    wrong = unlike_base(found, base)
    if wrong is not None:
        raise RunError(f"{folder / 'result.json'}: {wrong}; {AGAIN}")


def packed(outcomes: Sequence[Sequence[float]]) -> str:
    """Write scores, one list per prompt, as a text."""
    flat = {value for some in outcomes for value in some}
    short = flat <= {0.0, 1.0}
    words = []
    for some in outcomes:
        # -0.0 equals 0.0 but would be written "-0", two letters; + 0.0 takes its sign away
        if short:
            words.append("".join(f"{value + 0.0:.0f}" for value in some))
        else:
            words.append(",".join(f"{value + 0.0:.6g}" for value in some) + ",")
    return " ".join(words)


def unpacked(text: str) -> list[list[float]]:
    """Read what `packed` wrote."""
    out = []
    for part in text.split(" "):
        letters = part.strip(",").split(",") if "," in part else part
        out.append([float(value) for value in letters])
    return out
