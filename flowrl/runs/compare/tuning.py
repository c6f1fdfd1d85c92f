"""Search the settings that serve a config best: trials of equal budgets, judged on its held-out
prompts."""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.files import read_text, write_json, write_text
from flowrl.runs.compare.base_model import base_of
from flowrl.runs.compare.budgets import RESULT, Budgets, comparable, different
from flowrl.runs.compare.compare import TimeLeft
from flowrl.runs.compare.file_shapes import TUNING_FILE, mistake
from flowrl.runs.compare.one_run import spend
from flowrl.runs.compare.result_file import MEND, setting
from flowrl.runs.compare.stored_files import check_judged
from flowrl.runs.compare.work_prices import prices_of
from flowrl.runs.locks import lock
from flowrl.runs.stop import Interrupted, StopSignal
from flowrl.training.rehearsal import MOST_ITERATIONS, check_plan
from flowrl.training.trainer import Trainer

KIND, FORMAT = "flowrl tuning", 1
BEST = "best.yaml"
Result = dict[str, Any]
_LONGEST = 60  # letters of a trial's folder


class Tuning(NamedTuple):
    """What is tried."""

    config: str
    choices: Mapping[str, Sequence[str]]  # key of the config: values, each as --set has it
    seeds: tuple[int, ...]
    nfe: float  # of each run
    runs: Path
    out: Path
    trials: int = 0  # of all combinations, drawn by chance; 0: all
    draw: int = 0  # the seed of that draw
    counted: Literal["cost", "calls"] = "cost"  # as of `Budgets`
    overrides: tuple[str, ...] = ()  # of every trial
    plugins: tuple[str, ...] = ()

    def load(self, changes: Sequence[str] = (), *more: str) -> Config:
        """Load the config with the changes of a trial."""
        return load_config(self.config, [*self.overrides, *changes, *more], self.plugins)


def combinations(
    choices: Mapping[str, Sequence[str]], trials: int = 0, draw: int = 0
) -> list[tuple[str, ...]]:
    """Return the overrides of each trial: every combination of the choices, the last key fastest,
    or so many of them, drawn without replacement in that order.

    Raises ConfigError for a key without values or with one twice, or for no key at all.
    """
    if not choices:
        raise ConfigError("tune: expected a --try KEY=VALUE,VALUE..., got none")
    for key, values in choices.items():
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"--try {key}: expected values that differ, got {list(values)}")
    total = math.prod(len(values) for values in choices.values())
    if trials < 0 or total > 100_000:
        raise ConfigError(f"tune: expected 0 to 100,000 trials, got {trials} of {total:,}")
    places = range(total)
    chosen = random.Random(draw).sample(places, trials) if 0 < trials < total else places
    return [_combination(choices, place) for place in sorted(chosen)]


def _combination(choices: Mapping[str, Sequence[str]], place: int) -> tuple[str, ...]:
    """Return the combination at a place of the full product."""
    changes = []
    for key, values in reversed([*choices.items()]):
        place, number = divmod(place, len(values))
        changes.append(f"{key}={values[number]}")
    return tuple(reversed(changes))


def run_tuning(what: Tuning, *, quiet: bool = False) -> Result:
    """Run the trials that are not there yet -> the result, also in `what.out` after every run, and
    the best config in `best.yaml` beside it.

    Every trial is loaded and rehearsed before anything runs. One seed of all trials runs before the
    next. Raises ConfigError for a trial that cannot be trained, changes what it is judged on, or
    exceeds the budget with one iteration; RunError if another process works in the folder of the
    runs; Interrupted after Ctrl-C.
    """
    # everything that can be refused
    tried = combinations(what.choices, what.trials, what.draw)
    if not what.seeds or len(set(what.seeds)) < len(what.seeds) or not 0 < what.nfe < math.inf:
        raise ConfigError(
            "tune: expected seeds that differ and --nfe above 0, got "
            f"{list(what.seeds)} and {what.nfe:g}"
        )
    own, budgets = what.load(), Budgets(what.nfe, 0.0, 1, counted=what.counted)
    _check(what, own, tried)
    with lock(what.runs, mend="name another --runs, or wait for it"), StopSignal() as stop:
        result = _opened(what, own, tried)
        result["base"] = base_of(what.runs, own)
        left = TimeLeft(_todo(what, tried))
        # one seed of all trials before the next
        for seed in what.seeds:
            for number, changes in enumerate(tried):
                if stop.asked:
                    raise Interrupted("stopped between two runs; the same command goes on")
                config = what.load(changes, f"seed={seed}")
                folder = what.runs / folder_of(changes) / f"seed{seed}"
                fresh, options = not (folder / RESULT).exists(), dict[str, Any]()
                if fresh and what.counted == "cost":
                    options["prices"] = prices_of(config, folder.parent)
                if fresh:
                    left.start(1.0)
                options |= {"quiet": quiet, "minutes_left": left}
                found = spend(config, folder, budgets, stop=stop, **options)
                check_judged(found, result["base"], folder)
                if fresh:
                    left.finish()
                _keep(result, number, found)
                write_json(what.out, ranked(result))
    _write_best(what, own, result)
    return result


def folder_of(changes: Sequence[str]) -> str:
    """Return the folder of a trial, named after what it changes, so that trials can be added."""
    plain = re.sub(r"[^A-Za-z0-9=.+_-]+", "-", "_".join(changes)).strip("-")
    if len(plain) <= _LONGEST and plain == "_".join(changes):
        return plain
    code = hashlib.sha256("\n".join(changes).encode()).hexdigest()[:8]
    return f"{plain[:_LONGEST]}-{code}"


def ranked(result: Result) -> Result:
    """Work out each trial's score, the mean over its seeds, and which trial is the best.

    A trial with a failed run, or one that has not run all its seeds, has no score and cannot be the
    best. Of equal scores the first counts.
    """
    seeds = result["seeds"]
    for trial in result["trials"]:
        scores = [run["score"] for run in trial["runs"]]
        whole = len(scores) == len(seeds) and None not in scores
        trial["score"] = sum(scores) / len(scores) if whole else None
    scored = [t for t in result["trials"] if t["score"] is not None]
    best = max(scored, key=lambda trial: float(trial["score"]), default=None)
    result["best"] = None if best is None else result["trials"].index(best)
    return result


def read_tuning(path: Path) -> Result:
    """Read a result file. Raises DataError if it is none."""
    try:
        found = json.loads(read_text(path))
        if found["kind"] == KIND and found["format"] == FORMAT:
            wrong = mistake(found, TUNING_FILE)
            if wrong is None:
                return ranked(found)
            raise DataError(f"{path}: {wrong}; {MEND}")
        got = f"{found['kind']!r}, {found['format']!r}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"
    raise DataError(f"{path}: expected a {KIND} of format {FORMAT}, got {got}")


def _check(what: Tuning, own: Config, tried: Sequence[tuple[str, ...]]) -> None:
    """Rehearse every trial; raise ConfigError for one that cannot be trained or judged alike."""
    equal, trainer = setting(own), Trainer(own)
    for changes in tried:
        config, named = what.load(changes), ", ".join(changes)
        wrong = different(equal, setting(config))
        if wrong:
            raise ConfigError(
                f"tune: {named}: changes what every trial is judged on: {', '.join(wrong[:3])}; "
                "give it with --set, for all trials"
            )
        try:
            check_plan(replace(config, train=replace(config.train, iterations=MOST_ITERATIONS)))
            cost = Trainer(config, model=trainer.model).cost.nfe
        except ConfigError as error:
            raise ConfigError(f"tune: {named} cannot be trained: {error}") from error
        if cost > what.nfe:
            raise ConfigError(
                f"tune: {named}: one iteration samples with {cost} network evaluations, more than "
                f"--nfe {what.nfe:g}"
            )


def _opened(what: Tuning, own: Config, tried: Sequence[tuple[str, ...]]) -> Result:
    """Begin the result, or go on with one of the same config and budget, whatever its trials."""
    fresh: Result = {"kind": KIND, "format": FORMAT, "config": what.config, "score": own.headline}
    fresh |= {"settings": comparable(own), "nfe": what.nfe, "counted": what.counted}
    fresh = dict(json.loads(json.dumps(fresh)))  # tuples are lists, as the file has them
    if what.out.exists():
        found = read_tuning(what.out)
        wrong = different({key: found[key] for key in fresh}, fresh)
        if wrong:
            raise ConfigError(
                f"{what.out} holds another search, there and now: {', '.join(wrong[:3])}; name "
                "another --out and --runs"
            )
    trials = []
    for changes in tried:
        trials.append({"changes": [*changes], "folder": folder_of(changes), "runs": []})
    choices = {key: [*values] for key, values in what.choices.items()}
    about = {"choices": choices, "seeds": [*what.seeds], "environments": []}
    return {**fresh, **about, "base": {}, "trials": trials}


def _todo(what: Tuning, tried: Sequence[tuple[str, ...]]) -> float:
    """Count the runs that are still to be done."""
    folders = [what.runs / folder_of(changes) for changes in tried]
    missing = 0
    for seed in what.seeds:
        missing += sum(not (folder / f"seed{seed}" / RESULT).exists() for folder in folders)
    return float(missing)


def _keep(result: Result, number: int, found: Mapping[str, Any]) -> None:
    """Put a run into its trial; machines are kept once."""
    at, where = found["at"]["nfe"] or {}, found["environment"]
    if where not in result["environments"]:
        result["environments"].append(where)
    run = {key: found[key] for key in ("seed", "failed", "iterations", "nfe", "seconds")}
    run |= {key: at.get(key) for key in ("score", "interval", "tasks")}
    run["environment"] = result["environments"].index(where)
    result["trials"][number]["runs"].append(run)


def _write_best(what: Tuning, own: Config, result: Result) -> None:
    """Write the best trial as a config of its own, with the seed that the config had."""
    if result["best"] is None:
        return
    changes = result["trials"][result["best"]]["changes"]
    config = what.load(changes, f"seed={own.seed}")
    about = f"# {what.config} with {', '.join(changes)}, the best of {len(result['trials'])} trials"
    write_text(what.out.parent / BEST, f"{about}\n{config.dump()}")
