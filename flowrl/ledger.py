"""The books of a run under budgets: what may be used up, what was, and the files of its folder."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.config import Config, load_config
from flowrl.curves import EVALS, METRICS, read_rows
from flowrl.errors import ConfigError, RunError
from flowrl.log import environment
from flowrl.loop import write_json, write_text

CONFIG, CLAIM, RESULT = "config.yaml", "claim.json", "result.json"
TRACED = ("reward", "accuracy", "ratio_std", "diversity", "grad_norm")
MOST = 50  # points of a stored trajectory


class Account(NamedTuple):
    """What a run has used up."""

    iterations: int
    evaluations: float  # of the network, per latent
    seconds: float  # of training: no evaluation, no checkpoint


class Budgets(NamedTuple):
    """What every run may use up. Without `points` nothing is judged; without `seconds` time does not count."""

    evaluations: float
    seconds: float
    points: int  # held-out evaluations, at equal distances of network evaluations
    clock: Literal["wall", "processor"] = "wall"  # processor: of this process, over its threads; others do not count

    def used(self, account: Account) -> float:
        """Return the used share of the budget that is further from its end, at most 1."""
        time_share = account.seconds / self.seconds if self.seconds else 1.0
        return min(1.0, account.evaluations / self.evaluations, time_share)

    def marks(self, before: Account, now: Account) -> list[int]:
        """Return which of the marks 1 ... points were passed."""
        places = {i: self.evaluations * i / self.points for i in range(1, self.points + 1)}
        return [i for i, place in places.items() if before.evaluations < place <= now.evaluations]

    def ended(self, before: Account, now: Account) -> list[str]:
        """Return which budgets were used up between two accounts."""
        ends = {"evaluations": self.evaluations, "seconds": self.seconds}
        return [k for k, end in ends.items() if getattr(before, k) < end <= getattr(now, k)]


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
    raw["train"] = {key: value for key, value in raw["train"].items() if key not in ("iterations", "threads")}
    raw["eval"] = {key: value for key, value in raw["eval"].items() if key != "every"}
    raw["grid"] = {key: value for key, value in raw["grid"].items() if key != "every"}
    return {key: value for key, value in raw.items() if key != "checkpoint"}


def check(folder: Path, config: Config, budgets: Budgets) -> None:
    """Raise ConfigError if the folder holds a run of another config or of other budgets."""
    if not (folder / CONFIG).exists():
        return
    there = load_config(folder / CONFIG, (), config.plugins)
    claimed = json.loads((folder / CLAIM).read_text(encoding="utf-8"))
    wrong = different(comparable(there), comparable(config)) + different(claimed["budgets"], budgets._asdict())
    if wrong:
        raise ConfigError(
            f"{folder} holds a run of another config or budget, there and now: {', '.join(wrong[:3])}; name another "
            "folder with --runs, delete this one, or give the same settings again"
        )


def claim(folder: Path, config: Config, budgets: Budgets) -> None:
    """Write what is run here, once. Raises RunError if the folder cannot be written."""
    if (folder / CONFIG).exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot write to the run folder {folder}: {error.strerror or error}") from error
    write_json(folder / CLAIM, {"budgets": budgets._asdict(), "load": load(), "environment": _machine()})
    write_text(folder / CONFIG, config.dump())


@functools.cache
def _machine() -> dict[str, Any]:
    """Describe the machine once per process: the code that runs does not change any more."""
    return environment()


def load() -> float | None:
    """Return how many processes have wanted a processor over the last minute; None where the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except (OSError, AttributeError):
        return None


def account_at(folder: Path, iteration: int) -> Account:
    """Read the account after `iteration` iterations from the metrics, which are cut there."""
    if iteration == 0:
        return Account(0, 0.0, 0.0)
    rows = read_rows(folder, METRICS)
    if not rows or rows[-1]["iteration"] != iteration - 1:
        raise RunError(f"{folder / METRICS} lacks iteration {iteration - 1}: delete {folder} to start this run again")
    return Account(iteration, rows[-1]["evaluations"], rows[-1]["seconds"])


def drop_evaluations(folder: Path, account: Account) -> None:
    """Drop evaluations from after `account`: they will be made again."""
    rows = read_rows(folder, EVALS)
    kept = [row for row in rows if row["iteration"] <= account.iterations]
    if kept != rows:
        write_evaluations(folder, kept)


def write_evaluations(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write all evaluations of a run, one per line."""
    write_text(folder / EVALS, "".join(json.dumps(row) + "\n" for row in rows))


def score_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of an evaluation what a comparison needs."""
    return {
        **{key: row[key] for key in ("iteration", "evaluations", "seconds", "marks", "budget")},
        "score": row[row["score"]],
        "interval": row["interval"],
        "tasks": {task: values["mean"] for task, values in row["tasks"].items()},
    }


def result(config: Config, folder: Path, failed: str | None) -> dict[str, Any]:
    """Put a finished run together from its folder; `failed` is what broke it, or None."""
    metrics, curve = read_rows(folder, METRICS), [score_row(row) for row in read_rows(folder, EVALS)]
    claimed = json.loads((folder / CLAIM).read_text(encoding="utf-8"))
    last = metrics[-1] if metrics else {"evaluations": 0.0, "seconds": 0.0}
    at = {key: next((row for row in curve if key in row["budget"]), None) for key in ("evaluations", "seconds")}
    return {
        "name": config.name,
        "seed": config.seed,
        "lr": config.train.lr,
        "failed": failed,
        "iterations": len(metrics),
        "evaluations": last["evaluations"],
        "seconds": last["seconds"],
        "curve": curve,
        "at": at,
        "last_quarter": {key: _mean(metrics[len(metrics) - math.ceil(len(metrics) / 4) :], key) for key in TRACED},
        "trajectory": trajectory(metrics),
        "load": claimed["load"],
        "environment": claimed["environment"],
    }


def trajectory(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Thin metrics to at most 50 equal blocks of iterations: their means, and the account at their ends."""
    n = min(MOST, len(metrics))
    blocks = [metrics[len(metrics) * i // n : len(metrics) * (i + 1) // n] for i in range(n)]
    out: dict[str, list[float | None]] = {key: [_mean(block, key) for block in blocks] for key in TRACED}
    return {**{key: [block[-1][key] for block in blocks] for key in ("iteration", "evaluations", "seconds")}, **out}


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Average a metric over the rows that have it; None if none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return sum(values) / len(values) if values else None
