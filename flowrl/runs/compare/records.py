"""What the JSON files of a comparison hold, as pydantic models, and how they are read: one that is
damaged, of another version, or another run's, is one message.

Outcomes per image are one short text for each evaluation. Prompts are separated by spaces. Verdicts
0 and 1 are letters, "0110 1111"; other scores stand between commas, "0.25,0.5 0.75,1".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flowrl.config.load import Config
from flowrl.config.values import show
from flowrl.core.errors import ConfigError, RunError
from flowrl.runs.folder import read_object

AGAIN = "delete it, and the same command puts it together again from the run's logs"


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


def _check_outcomes(text: str) -> str:
    """Raise ValueError unless a text holds one finite number or more for each prompt."""
    for some in unpacked(text):
        if not some or not all(map(math.isfinite, some)):
            raise ValueError
    return text


# the kinds of values
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Amount = Annotated[float, Field(allow_inf_nan=False, ge=0)]
Positive = Annotated[float, Field(allow_inf_nan=False, gt=0)]
Outcomes = Annotated[str, AfterValidator(_check_outcomes)]
Interval = list[Number | None]
Object = dict[str, Any]


class Record(BaseModel):
    """An object of a file; keys that it does not name may stand beside."""

    model_config = ConfigDict(strict=True)


class BudgetsRecord(Record):
    """What a run may use up, see `Budgets`."""

    nfe: Positive
    seconds: Amount
    points: Count
    clock: str
    counted: str


class Claim(Record):
    """What a run writes about itself when it begins."""

    budgets: BudgetsRecord
    environment: Object
    content: Object | None = None  # what it begins with; None of an earlier version


class Totals(Record):
    """What a line of a run's metrics says that it has used up."""

    total_nfe: Amount
    total_seconds: Amount


class Spot(Record):
    """Where in a run an evaluation was made."""

    iteration: Count
    nfe: Amount
    seconds: Amount
    marks: list[Count]
    budget: list[str]


class TaskMean(Record):
    """The mean of a task."""

    mean: Number


class Evaluated(Spot):
    """A line of a run's evaluations."""

    score: str
    interval: Interval
    tasks: dict[str, TaskMean]
    outcomes: Outcomes


class Point(Spot):
    """An evaluation in a result."""

    score: Number
    interval: Interval
    tasks: dict[str, Number]


class End(Point):
    """The evaluation at the end of a budget."""

    outcomes: Outcomes


class Ends(Record):
    """The evaluations that count; null where a run did not get there."""

    nfe: End | None
    seconds: End | None


class Run(Record):
    """A finished run."""

    seed: int
    lr: Positive
    failed: str | None
    iterations: Count
    nfe: Amount
    seconds: Amount
    curve: list[Point]
    at: Ends
    last_quarter: dict[str, float | None]
    trajectory: dict[str, list[float | None]]


class RunFile(Run):
    """The result of a run in its own folder."""

    name: str
    environment: Object


class Base(Record):
    """The model before training."""

    score: Number
    interval: Interval
    images: Count
    tasks: dict[str, Number]
    tags: list[str]
    scenes: list[str] = []  # of each prompt: those of one scene are one draw
    outcomes: Outcomes


class BaseFile(Record):
    """How the model before training was judged."""

    setting: Object
    base: Base
    content: Object | None = None  # what these names stood for; None of an earlier version


class SearchRecord(Record):
    """Which learning rates every config has tried."""

    factors: list[Positive]
    seed: int
    share: Positive
    prompts: str
    images: Count
    nfe: Positive


class Tried(Record):
    """A learning rate that was tried."""

    factor: Positive
    score: float | None
    lr: Positive
    failed: str | None


class Found(Record):
    """What the search of a config has found."""

    own_lr: Positive
    chosen_lr: Positive
    tried: list[Tried]


class EnteredRun(Run):
    """A run in the result file, and the number of its machine."""

    environment: Count


class Entry(Record):
    """A config in the result file."""

    name: str
    file: str
    config: Object
    lr: Positive
    search: Found | None
    seeds: list[EnteredRun]


class Settings(Record):
    """What is equal for all configs."""

    score: str
    equal: Object
    search: SearchRecord | None


class ResultFile(Record):
    """The result file of a comparison."""

    budgets: BudgetsRecord
    settings: Settings
    environments: list[Object]
    base: Base
    configs: list[Entry]


def mistake(value: Any, record: type[Record]) -> str | None:
    """Return the first thing that is wrong, "at.nfe: expected a valid dictionary, got 3 (a whole
    number)"; None where all is right."""
    try:
        record.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    else:
        return None
    # where it is: a.b[0].c
    where = ""
    for part in first["loc"]:
        where += f"[{part}]" if isinstance(part, int) else f".{part}"
    where = where.lstrip(".") or "the file"
    if first["type"] == "missing":
        return f"{where}: expected this key, which is missing"
    if first["type"] == "value_error":
        said = "expected scores of each prompt's images, such as '01 11' or '0.5,1, 0.25,'"
    else:
        said = first["msg"].replace("Input should be", "expected", 1)
    return f"{where}: {said}, got {show(first['input'])}"


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
            if run["environment"] >= machines:
                return f"{where}.environment: expected one of {machines} places in environments"
            said = said or unlike_base(run, base, where)
    return said


def unlike_base(run: Mapping[str, Any], base: Mapping[str, Any], where: str = "") -> str | None:
    """Return what a run's scores do not share with its own curve or those of the base model: the
    evaluation at the end of a budget, tasks, or prompts."""
    said = None
    for name, row in run["at"].items():
        key = f"{where}.at.{name}".lstrip(".")
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
    if row is base and set(row["tags"]) != row["tasks"].keys():
        return f"{where}.tags: expected those of its tasks, {', '.join(row['tasks'])}"
    got = len(row.get("scenes", ()))
    if row is base and got not in (0, len(row["tags"])):
        return f"{where}.scenes: expected {len(row['tags'])}, as base.tags has, got {got}"
    got = len(unpacked(row["outcomes"]))
    if got != len(base["tags"]):
        return (
            f"{where}.outcomes: expected {len(base['tags'])} prompts, as base.tags has, got {got}"
        )
    return None


def stored(folder: Path, name: str, record: type[Record], mend: str) -> dict[str, Any]:
    """Read an object of a run's folder; {} where there is no such file. Raises RunError that names
    the file and key and says how to mend it."""
    try:
        found = read_object(folder, name)
    except RunError as error:
        raise RunError(f"{error}; {mend}") from error
    if not found and not (folder / name).exists():
        return {}
    wrong = mistake(found, record)
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
