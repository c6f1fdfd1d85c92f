"""The result file of a search of settings: its score, its best trial, and what may be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.runs.compare.file_shapes import TUNING_FILE
from flowrl.runs.compare.result_file import read_checked

KIND, FORMAT = "flowrl tuning", 1
Result = dict[str, Any]


def ranked(result: Result) -> Result:
    """Work out each trial's score, the mean over its seeds, and which trial is the best.

    A trial of which a run failed, or with a seed missing, has no score. The best is known once
    every trial has all seeds or has failed; of equal scores the first counts.
    """
    waiting = False
    for trial in result["trials"]:
        scores, failed = [run["score"] for run in trial["runs"]], has_failed(trial)
        whole = len(scores) == len(result["seeds"])
        trial["score"] = sum(scores) / len(scores) if whole and not failed else None
        waiting = waiting or not (whole or failed)
    scored = [trial for trial in result["trials"] if trial["score"] is not None]
    best = max(scored, key=lambda trial: float(trial["score"]), default=None)
    result["best"] = None if best is None or waiting else result["trials"].index(best)
    return result


def has_failed(trial: Result) -> bool:
    """Whether one of a trial's runs broke, or was not judged."""
    return any(run["failed"] is not None or run["score"] is None for run in trial["runs"])


def read_tuning(path: Path) -> Result:
    """Read a result file. Raises DataError if it is none, or damaged."""
    return read_checked(path, KIND, FORMAT, TUNING_FILE, _disagreement, ranked)


def _disagreement(found: Result) -> str | None:
    """Return what does not fit together in a result whose parts are right; None where all does."""
    choices, seeds = found["choices"], found["seeds"]
    if not choices or not all(choices.values()):
        return "choices: expected keys, each with values"
    if not seeds or len(set(seeds)) < len(seeds):
        return f"seeds: expected some that differ, got {seeds}"
    for number, trial in enumerate(found["trials"]):
        where = f"trials[{number}]"
        parts = [change.split("=", 1) for change in trial["changes"]]
        if [part[0] for part in parts] != list(choices):
            return f"{where}.changes: expected a value of each of {', '.join(choices)}"
        if not all(part[-1] in choices[part[0]] for part in parts):
            return f"{where}.changes: expected values of choices"
        own = [run["seed"] for run in trial["runs"]]
        if len(set(own)) < len(own) or set(own) - set(seeds):
            return f"{where}.runs: expected each of the seeds {seeds} at most once, got {own}"
        for place, run in enumerate(trial["runs"]):
            said = _of_run(run, found)
            if said is not None:
                return f"{where}.runs[{place}].{said}"
    return None


def _of_run(run: Result, found: Result) -> str | None:
    """Return what is wrong with a run."""
    if run["environment"] >= len(found["environments"]):
        return "environment: expected a place in environments"
    tasks = None if run["tasks"] is None else run["tasks"].keys()
    if (run["score"] is None) != (tasks is None):
        return "tasks: expected them where there is a score, and nowhere else"
    if tasks is not None and tasks != found["base"]["tasks"].keys():
        return "tasks: expected those of the base model"
    return None
