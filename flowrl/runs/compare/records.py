"""The JSON files of a comparison: what they hold, as pydantic models, and how they are read: one
that is damaged, of another version, or another run's, is one message. What has to be equal in the
result file, and how it is added to."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from flowrl.config.load import Config
from flowrl.config.sections import GradientsMonitor
from flowrl.config.values import show
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.files import read_json, without, write_json
from flowrl.core.identity import differences, without_times
from flowrl.evaluation.contents import FUNCTIONS, judged_content, own_functions
from flowrl.runs.compare.summary import Result, summarize_result, unpacked
from flowrl.runs.folder import read_object

AGAIN = "delete it, and the same command puts it together again from the run's logs"


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
    content: Object  # what it begins with


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
    content: Object  # what these names stood for


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
        if isinstance(part, int):
            where += f"[{part}]"
        else:
            where += f".{part}"
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
        if not ends and row is None:
            continue
        if not ends or row is None or without(row, "outcomes") != ends[0]:
            said = said or f"{key}: expected the point of the curve at which this budget ended"
        else:
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


def different(a: Mapping[str, Any], b: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the dotted keys in which two nested dicts differ, each with both values."""
    out = []
    for key in dict.fromkeys([*a, *b]):
        one, two, name = a.get(key), b.get(key), f"{path}{key}"
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            out += different(one, two, f"{name}.")
        elif one != two:
            out.append(f"{name} ({one!r} and {two!r})")
    return out


def comparable(config: Config) -> dict[str, Any]:
    """Return a config as plain data without what has no effect on a run under budgets."""
    raw = config.to_dict()
    idle = {"train": ("iterations", "threads"), "eval": ("every",), "samples": ("every",)}
    for section, keys in idle.items():
        raw[section] = without(raw[section], *keys)
    del raw["checkpoint"]
    acting = _acting(config, raw.pop("monitors"))
    if acting:
        raw["monitors"] = acting
    return raw


def _acting(config: Config, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the monitors changes a run under budgets, where it is not the default: which
    steps are skipped, and the weight of the KL."""
    acting, gradients = dict[str, Any](), config.monitors.gradients
    if gradients != GradientsMonitor():
        # null in place of a word would be taken for a default that is not there
        acting["gradients"] = "off"
        if gradients is not None and gradients.action == "skip":
            acting["gradients"] = raw["gradients"]
    if config.monitors.adaptive_kl is not None:
        acting["adaptive_kl"] = raw["adaptive_kl"]
    return acting


KIND, FORMAT = "flowrl comparison", 1
MEND = (
    "put the file back, or name another --out: the command that made it reads the runs that are "
    "there again"
)
TUNING = ("tune", "lora", "layers")  # arguments of a model that leave the base model as it is


def setting(config: Config) -> dict[str, Any]:
    """Return what has to be equal for a fair comparison: model, prompts, size, evaluation, grid,
    threads."""
    raw, headline = comparable(config), config.rewards[config.headline]
    equal = {
        "model": without(raw["model"], *TUNING),
        "prompts": raw["prompts"],
        "image": raw["image"],
        "eval": {**raw["eval"], "score": config.headline},
        "samples": raw["samples"],
        "train": {"threads": config.train.threads},
        "rewards": {config.headline: {"fn": headline.path, **headline.kwargs}},
    }
    return dict(json.loads(json.dumps(equal)))  # tuples and all, as it comes back from a file


def read_result(path: Path) -> Result:
    """Read a result file. Raises DataError if it is none."""
    try:
        found = read_json(path, constants=True)
        if found["kind"] != KIND or found["format"] != FORMAT:
            raise DataError(
                f"{path}: expected a {KIND} of format {FORMAT}, got {found['kind']!r}, format "
                f"{found['format']!r}"
            )
    except (OSError, RunError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read as a {KIND}: {type(error).__name__}: {error}; {MEND}"
        ) from error
    # its parts, and whether they fit together
    wrong = mistake(found, ResultFile) or disagreement(found)
    if wrong is not None:
        raise DataError(f"{path}: {wrong}; {MEND}")
    return dict(found)


def open_result(
    path: Path,
    configs: Sequence[Config],
    budgets: Mapping[str, Any],
    search: Mapping[str, Any] | None,
) -> Result:
    """Read the result file to be added to, or begin one. Raises ConfigError if it is of other
    settings."""
    # begin one
    settings = {"score": configs[0].headline, "equal": setting(configs[0]), "search": search}
    fresh = {"budgets": dict(budgets), "settings": settings}
    if not path.exists():
        return {
            "kind": KIND,
            "format": FORMAT,
            **fresh,
            "content": judged_content(configs[0]),
            "environments": [],
            "base": {},
            "configs": [],
        }
    # or add to one of the same settings
    found = read_result(path)
    stated = {"budgets": found["budgets"], "settings": found["settings"]}
    wrong = different(stated, fresh)
    there = {entry["name"]: entry for entry in found["configs"]}
    for c in configs:
        entry = there.get(c.name)
        if entry is None:
            continue
        wrong += different(entry["config"], without_seed(c), f"{c.name}: ")
        kept = {}
        if FUNCTIONS in entry:
            kept[FUNCTIONS] = entry[FUNCTIONS]
        wrong += differences(kept, own_functions(c))
    if wrong:
        raise ConfigError(
            f"{path} holds a comparison under other settings, there and now: "
            f"{', '.join(wrong[:3])}; name another --out, or give the same settings again"
        )
    return found


def check_base(result: Result, base: Mapping[str, Any], config: Config, path: Path) -> None:
    """Raise ConfigError if a file that is added to was begun with another base model: neither are
    its outcomes those of `base`, which is empty where it was not judged again, nor is its content
    that of now."""
    there = result["base"]
    if not there or there["outcomes"] == base.get("outcomes"):
        return
    known = without_times(result.get("content") or {})
    wrong = differences(known, without_times(judged_content(config)))
    if wrong:
        score = ""
        if base:
            score = f", {there['score']:g} and now {base['score']:g}"
        raise ConfigError(
            f"{path} was begun with another base model{score}: something changed under its name, "
            f"there and now: {'; '.join(wrong[:3])}; name another --out"
        )


def without_seed(config: Config) -> dict[str, Any]:
    """Return a config without its seed, as JSON gives it back."""
    return without(json.loads(json.dumps(comparable(config))), "seed")


def entry_of(result: Result, config: Config, name: str) -> Result:
    """Find a config's entry, or begin one."""
    for entry in result["configs"]:
        if entry["name"] == config.name:
            return entry
    entry = {
        "name": config.name,
        "file": name,
        "config": without_seed(config),
        "lr": config.lr,
        "search": None,
        **own_functions(config),
    }
    result["configs"].append({**entry, "seeds": []})
    return result["configs"][-1]


def add_run(result: Result, entry: Result, run: dict[str, Any]) -> None:
    """Put a run into its entry, in the order of seeds; machines are kept once.

    Raises ConfigError if the entry's other seeds ran with another learning rate.
    """
    others = [r for r in entry["seeds"] if r["seed"] != run["seed"]]
    if any(r["lr"] != run["lr"] for r in others):
        raise ConfigError(
            f"{entry['name']}: seed {run['seed']} ran with lr {run['lr']:g}, seed "
            f"{others[0]['seed']} of the result file with {others[0]['lr']:g}: the search chose "
            "another rate this time; name another --out"
        )
    where = run["environment"]
    if where not in result["environments"]:
        result["environments"].append(where)
    mine = without(run, "name", "environment")
    mine["environment"] = result["environments"].index(where)
    entry["seeds"] = sorted([*others, mine], key=itemgetter("seed"))


def write_result(result: Result, out: Path) -> Result:
    """Work out the statistics of all configs that have a run, and write the file. Raises
    RunError."""
    begun, empty = list[Result](), list[Result]()
    for entry in result["configs"]:
        if entry["seeds"]:
            begun.append(entry)
        else:
            empty.append(entry)
    full = summarize_result({**result, "configs": begun})
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error
    write_json(out, full)
    return {**full, "configs": [*full["configs"], *empty]}
