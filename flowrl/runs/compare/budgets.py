"""The budgets of a run: what may be used up, what was used, and the files in its folder that say
so."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.files import is_finite_number, only, without, write_json, write_text
from flowrl.core.identity import differences
from flowrl.core.installation import environment
from flowrl.evaluation.contents import trained_content
from flowrl.runs.compare.records import (
    Claim,
    Evaluated,
    Record,
    Totals,
    comparable,
    different,
    mistake,
    stored,
)
from flowrl.runs.folder import (
    CONFIG,
    EVALS,
    METRICS,
    RESULT,
    left_of,
    read_rows,
    what_is_there,
    write_evals,
)
from flowrl.training import checkpoint

CLAIM = "claim.json"
TRACED = ("reward", "accuracy", "ratio_std", "clip_frac", "diversity", "grad_norm")
MOST = 50  # points of a stored trajectory


class Spent(NamedTuple):
    """What a run has used up."""

    iterations: int
    nfe: float  # calls of the network, per latent
    seconds: float  # of training: no evaluation, no checkpoint

    def metrics(self) -> dict[str, float]:
        """Return it as the metrics of an iteration hold it."""
        return {"total_nfe": self.nfe, "total_seconds": self.seconds}


class Budgets(NamedTuple):
    """What every run may use up. Without `points` nothing is judged; without `seconds` time does
    not count."""

    nfe: float
    seconds: float
    points: int  # held-out evaluations, at equal distances of network evaluations
    clock: str = "wall"  # that tells the seconds
    counted: str = "calls"  # what `nfe` is of: calls of the network, a trained state is several

    def used(self, spent: Spent) -> float:
        """Return the used share of the budget that is further from its end, at most 1."""
        used = min(1.0, spent.nfe / self.nfe)
        if self.seconds:
            used = min(used, spent.seconds / self.seconds)
        return used

    def marks(self, before: Spent, now: Spent) -> list[int]:
        """Return which of the marks 1 ... points were passed."""
        marks = range(1, self.points + 1)
        return [i for i in marks if before.nfe < self.nfe * i / self.points <= now.nfe]

    def ended(self, before: Spent, now: Spent) -> list[str]:
        """Return which budgets were used up from `before` to `now`."""
        ended = []
        if before.nfe < self.nfe <= now.nfe:
            ended.append("nfe")
        if before.seconds < self.seconds <= now.seconds:
            ended.append("seconds")
        return ended


def check_same_run(folder: Path, config: Config, budgets: Budgets) -> None:
    """Raise ConfigError if the folder holds a run of another config, of other budgets, or of a
    model, rewards or prompts that have changed under their names."""
    if not (folder / CONFIG).exists():
        if (folder / RESULT).exists():
            raise ConfigError(
                f"{folder} holds a {RESULT} without the {CONFIG} that says whose it is; put it "
                f"back, or delete the folder to make the run again"
            )
        return
    check_begun(folder)
    there = load_config(folder / CONFIG, (), config.plugins)
    wrong = different(comparable(there), comparable(config))
    claimed = _claimed(folder)
    wrong += different(claimed["budgets"], budgets._asdict())
    if not wrong:
        wrong += differences(claimed["content"], trained_content(config))
    if wrong:
        raise ConfigError(
            f"{folder} holds a run of another config or budget, there and now: "
            f"{', '.join(wrong[:3])}; name another folder with --runs, delete this one, or give "
            "the same settings again"
        )


def check_begun(folder: Path) -> None:
    """Raise RunError where an unfinished run has lines of a log and no checkpoint: before the first
    line there is one, so they are away."""
    begun = left_of(folder) and not (folder / RESULT).exists()
    if begun and not checkpoint.checkpoint_folders(folder):
        raise RunError(f"{folder}: no checkpoint to go on from{what_is_there(folder)}")


def claim(folder: Path, config: Config, budgets: Budgets) -> None:
    """Write what is run here, once. Raises RunError if the folder cannot be written."""
    if (folder / CONFIG).exists():
        return
    about = {"budgets": budgets._asdict(), "content": trained_content(config)}
    write_json(folder / CLAIM, {**about, "environment": _machine()})
    write_text(folder / CONFIG, config.dump())


def _claimed(folder: Path) -> dict[str, Any]:
    """Read what `claim` wrote. Raises RunError."""
    mend = f"put it back, or delete {folder} to make the run again"
    found = stored(folder, CLAIM, Claim, mend)
    if not found:
        raise RunError(f"{folder / CLAIM}: is missing; {mend}")
    return found


@functools.cache
def _machine() -> dict[str, Any]:
    """Describe the machine once per process: the code that runs does not change any more."""
    return environment()


def spent_at(folder: Path, iteration: int) -> Spent:
    """Read what was used up after `iteration` iterations from the metrics."""
    if iteration == 0:
        return Spent(0, 0.0, 0.0)
    for row in reversed(read_rows(folder, METRICS)):
        if row["iteration"] == iteration - 1:
            _check_row(folder, METRICS, row, Totals)
            return Spent(iteration, row["total_nfe"], row["total_seconds"])
    raise RunError(
        f"{folder / METRICS} lacks iteration {iteration - 1}: delete {folder} to start this run "
        "again"
    )


def _check_row(folder: Path, name: str, row: Mapping[str, Any], record: type[Record]) -> None:
    """Raise RunError for a line of a log that is damaged."""
    wrong = mistake(row, record)
    if wrong is not None:
        raise RunError(
            f"{folder / name}, iteration {row['iteration']}: {wrong}; delete {folder} to start "
            "this run again"
        )


def drop_evaluations(folder: Path, spent: Spent) -> None:
    """Drop evaluations from after `spent`: they will be made again."""
    rows = read_rows(folder, EVALS)
    kept = [row for row in rows if row["iteration"] <= spent.iterations]
    if kept != rows:
        write_evals(folder, kept)


def score_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Keep of an evaluation what a comparison needs."""
    return {
        **only(row, ("iteration", "nfe", "seconds", "marks", "budget")),
        "score": row[row["score"]],
        "interval": row["interval"],
        "tasks": {task: values["mean"] for task, values in row["tasks"].items()},
        "rewards": row.get("rewards", {}),  # the mean of each, also of those that train
        "outcomes": row["outcomes"],
    }


def result(config: Config, folder: Path, failed: str | None) -> dict[str, Any]:
    """Put a finished run together from its folder; `failed` is what broke it, or None."""
    # its logs
    metrics, claimed = read_rows(folder, METRICS), _claimed(folder)
    for row in metrics:
        _check_row(folder, METRICS, row, Totals)
    curve = []
    for row in read_rows(folder, EVALS):
        _check_row(folder, EVALS, row, Evaluated)
        if not is_finite_number(row.get(row["score"])):
            raise RunError(
                f"{folder / EVALS}, iteration {row['iteration']}: {row['score']}: expected a "
                f"finite number; delete {folder} to start this run again"
            )
        curve.append(score_row(row))
    spent = spent_at(folder, len(metrics))
    # the evaluation at the end of each budget; None where the run did not get there
    at = dict.fromkeys(("nfe", "seconds"))
    for row in reversed(curve):
        at |= dict.fromkeys(row["budget"], row)
    for place, row in enumerate(curve):
        curve[place] = without(row, "outcomes")
    quarter = metrics[len(metrics) - math.ceil(len(metrics) / 4) :]
    return {
        "name": config.name,
        "seed": config.seed,
        "lr": config.lr,
        "failed": failed,
        "iterations": len(metrics),
        "nfe": spent.nfe,
        "seconds": spent.seconds,
        "curve": curve,
        "at": at,
        "last_quarter": {key: _mean(quarter, key) for key in TRACED},
        "trajectory": trajectory(metrics),
        "environment": claimed["environment"],
    }


def trajectory(metrics: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Thin metrics to at most 50 equal blocks of iterations: their means with six digits, and what
    was used up at their ends."""
    n, out = min(MOST, len(metrics)), dict[str, list[float | None]]()
    for key in ("iteration", "nfe", "seconds", *TRACED):
        out[key] = []
    for i in range(n):
        block = metrics[len(metrics) * i // n : len(metrics) * (i + 1) // n]
        out["iteration"].append(block[-1]["iteration"])
        out["nfe"].append(block[-1]["total_nfe"])
        out["seconds"].append(_six_digits(block[-1]["total_seconds"]))
        for key in TRACED:
            out[key].append(_six_digits(_mean(block, key)))
    return out


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Average a metric over the rows that have it; None if none has."""
    values = [row[key] for row in rows if row.get(key) is not None]
    if not values:
        return None
    return sum(values) / len(values)


def _six_digits(value: float | None) -> float | None:
    """Round a number that is drawn only."""
    return None if value is None else float(f"{value:.6g}")
