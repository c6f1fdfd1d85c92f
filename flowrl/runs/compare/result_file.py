"""The result file of a comparison: what has to be equal in it, reading, adding, writing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.files import read_json, write_json
from flowrl.core.identity import differences, without_times
from flowrl.evaluation.contents import FUNCTIONS, judged_content, own_functions
from flowrl.runs.compare.budgets import Budgets, comparable, different
from flowrl.runs.compare.records import ResultFile, disagreement, mistake
from flowrl.runs.compare.summary import Result, summarize_result

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
        "model": {key: value for key, value in raw["model"].items() if key not in TUNING},
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
    path: Path, configs: Sequence[Config], budgets: Budgets, search: Mapping[str, Any] | None
) -> Result:
    """Read the result file to be added to, or begin one. Raises ConfigError if it is of other
    settings."""
    # begin one
    settings = {"score": configs[0].headline, "equal": setting(configs[0]), "search": search}
    fresh = {"budgets": budgets._asdict(), "settings": settings}
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
    for c in [c for c in configs if c.name in there]:
        entry = there[c.name]
        wrong += different(entry["config"], without_seed(c), f"{c.name}: ")
        kept = {key: value for key, value in entry.items() if key == FUNCTIONS}
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
        score = f", {there['score']:g} and now {base['score']:g}" if base else ""
        raise ConfigError(
            f"{path} was begun with another base model{score}: something changed under its name, "
            f"there and now: {'; '.join(wrong[:3])}; name another --out"
        )


def without_seed(config: Config) -> dict[str, Any]:
    """Return a config without its seed, as JSON gives it back."""
    return {k: v for k, v in json.loads(json.dumps(comparable(config))).items() if k != "seed"}


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
    mine = {k: v for k, v in run.items() if k not in ("name", "environment")}
    mine["environment"] = result["environments"].index(where)
    entry["seeds"] = sorted([*others, mine], key=lambda r: int(r["seed"]))


def write_result(result: Result, out: Path) -> Result:
    """Work out the statistics of all configs that have a run, and write the file. Raises
    RunError."""
    full = summarize_result(
        {**result, "configs": [entry for entry in result["configs"] if entry["seeds"]]}
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write {out}: {error.strerror or error}") from error
    write_json(out, full)
    return {
        **full,
        "configs": [
            *full["configs"],
            *(entry for entry in result["configs"] if not entry["seeds"]),
        ],
    }
