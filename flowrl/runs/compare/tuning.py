"""Search the settings that serve a config best: trials of equal budgets, judged on its held-out
prompts."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.core.files import delete, write_json, write_text
from flowrl.runs.compare.base_model import base_of
from flowrl.runs.compare.budgets import RESULT, Budgets, check_same_run, comparable, different
from flowrl.runs.compare.earlier_files import config_then
from flowrl.runs.compare.one_run import spend
from flowrl.runs.compare.result_file import setting, without_seed
from flowrl.runs.compare.run_process import Asked
from flowrl.runs.compare.side_by_side import check_processes, train_all
from flowrl.runs.compare.stored_files import check_judged
from flowrl.runs.compare.time_left import TimeLeft
from flowrl.runs.compare.trials import Choices, combinations, folder_of, one_line
from flowrl.runs.compare.tuning_file import FORMAT, KIND, Result, ranked, read_tuning
from flowrl.runs.compare.work_prices import Prices, prices_of
from flowrl.runs.locks import lock
from flowrl.runs.stop import StopSignal
from flowrl.training.rehearsal import MOST_ITERATIONS, check_plan
from flowrl.training.trainer import Trainer

Trial = tuple[str, ...]  # overrides, "key=value"
# sections whose numbers leave a plan and its cost as they are
_APART = ("name", "seed", "optimizer")


class Tuning(NamedTuple):
    """What is tried."""

    config: str
    choices: Choices  # key of the config: values, each as --set has it
    seeds: tuple[int, ...]
    nfe: float  # of each run
    runs: Path
    out: Path
    trials: int = 0  # at most so many of all combinations, drawn by chance; 0: all
    draw: int = 0  # the seed of that draw
    counted: Literal["cost", "calls"] = "cost"  # as of `Budgets`
    overrides: tuple[str, ...] = ()  # of every trial
    plugins: tuple[str, ...] = ()
    processes: int = 1  # runs at the same time

    def load(self, changes: Sequence[str] = (), *more: str) -> Config:
        """Load the config with the changes of a trial."""
        return load_config(self.config, [*self.overrides, *changes, *more], self.plugins)

    @property
    def best(self) -> Path:
        """The config of the best trial."""
        return self.out.with_name(f"{self.out.stem}-best.yaml")

    def folder(self, changes: Sequence[str], seed: int) -> Path:
        """Return the folder of a run."""
        return self.runs / folder_of(changes) / f"seed{seed}"


def run_tuning(what: Tuning, *, quiet: bool = False) -> Result:
    """Run what is not there yet -> the result, also in `what.out` after every run, and the best
    trial as a config in `what.best`.

    Trials and seeds that the file holds already stay. Every trial is loaded and rehearsed before
    anything runs; one seed of all trials runs before the next. Raises ConfigError for a trial that
    cannot be trained, is another one's double, changes what it is judged on, or exceeds the budget
    with one iteration; RunError if another process works in the folder; Interrupted after Ctrl-C.
    """
    # everything that can be refused
    tried = combinations(what.choices, what.trials, what.draw)
    if not what.seeds or len(set(what.seeds)) < len(what.seeds):
        raise ConfigError(f"--seeds: expected seeds that differ, got {list(what.seeds)}")
    if not 0 < what.nfe < math.inf:
        raise ConfigError(f"--nfe: expected more than 0, got {what.nfe:g}")
    own, budgets = what.load(), Budgets(what.nfe, 0.0, 1, counted=what.counted)
    check_processes(what.processes, budgets)
    if own.source and Path(own.source).resolve() == what.best.resolve():
        raise ConfigError(f"--out {what.out}: the best config would overwrite {own.source}")
    with lock(what.runs, mend="name another --runs, or wait for it"), StopSignal() as stop:
        result = _opened(what, own, tried)
        result["base"] = _base(what, own, tried, budgets)
        prices = _prices(what, own)
        _run(what, tried, result, budgets, prices, stop, quiet)
    _write_best(what, own, result)
    return result


def _base(what: Tuning, own: Config, tried: Sequence[Trial], budgets: Budgets) -> dict[str, Any]:
    """Check every trial, then judge the model before training; it is gone afterwards."""
    trainer = Trainer(own)
    _check(what, own, tried, budgets)
    return base_of(what.runs, own, trainer)


def _run(
    what: Tuning,
    tried: Sequence[Trial],
    result: Result,
    budgets: Budgets,
    prices: Prices,
    stop: StopSignal,
    quiet: bool,
) -> None:
    """Run one seed of all trials before the next; what is there is read first."""
    todo = [(seed, changes) for seed in what.seeds for changes in tried]
    todo.sort(key=lambda one: not (what.folder(one[1], one[0]) / RESULT).exists())
    fresh = sum(not (what.folder(changes, seed) / RESULT).exists() for seed, changes in todo)
    left = TimeLeft(float(fresh))
    write_json(what.out, ranked(result))

    def keep(run: Asked) -> None:
        """Put a run into its trial and the file; what is not there yet is run first."""
        new = not (run.folder / RESULT).exists()
        if new:
            left.start(1.0)
        config = load_config(run.config, list(run.overrides), run.plugins)
        options: dict[str, Any] = {"quiet": quiet, "minutes_left": left, "prices": prices}
        found = spend(config, run.folder, budgets, stop=stop, **options)
        check_judged(found, result["base"], run.folder)
        if new:
            left.finish()
        _keep(result, changed[run.folder], found)
        write_json(what.out, ranked(result))

    asked = [_asked(what, changes, seed, budgets) for seed, changes in todo]
    changed = {run.folder: changes for run, (_, changes) in zip(asked, todo, strict=True)}
    train_all(asked, what.processes, stop, keep, quiet=quiet)


def _asked(what: Tuning, changes: Trial, seed: int, budgets: Budgets) -> Asked:
    own = (*what.overrides, *changes, f"seed={seed}")
    return Asked(what.config, own, what.plugins, budgets, what.folder(changes, seed))


def _check(what: Tuning, own: Config, tried: Sequence[Trial], budgets: Budgets) -> None:
    """Rehearse every trial; raise ConfigError for one that cannot be trained or judged alike."""
    equal, seen, rehearsed = setting(own), dict[str, Trial](), dict[str, int]()
    for changes in tried:
        config, named = what.load(changes), one_line(", ".join(changes))
        wrong = different(equal, setting(config))
        if wrong:
            raise ConfigError(
                f"tune: {named}: changes what every trial is judged on: {', '.join(wrong[:3])}; "
                "give it with --set, for all trials"
            )
        # a key that has no effect under a budget, or one value in two spellings
        whole = _text(comparable(config), ("name", "seed"))
        if whole in seen:
            raise ConfigError(
                f"tune: {named} is the same run as {one_line(', '.join(seen[whole]))}: under a "
                "budget these settings make no difference"
            )
        seen[whole] = changes
        # plans that differ in their optimizer alone are rehearsed once
        part = _text(comparable(config), _APART)
        if part not in rehearsed:
            train = replace(config.train, iterations=MOST_ITERATIONS)
            rehearsed[part] = check_plan(replace(config, train=train)).calls
        if rehearsed[part] > what.nfe:
            raise ConfigError(
                f"tune: {named}: one iteration takes {rehearsed[part]} network evaluations, more "
                f"than --nfe {what.nfe:g}"
            )
        for seed in what.seeds:
            check_same_run(what.folder(changes, seed), what.load(changes, f"seed={seed}"), budgets)


def _text(config: Mapping[str, Any], without: Sequence[str]) -> str:
    """Set a config as text, to tell whether two are alike in what is not left out."""
    return json.dumps({key: config[key] for key in config if key not in without})


def _opened(what: Tuning, own: Config, tried: Sequence[Trial]) -> Result:
    """Begin the result, or go on with one of the same settings and keys: trials, values and seeds
    are added to what it has."""
    fresh: Result = {"kind": KIND, "format": FORMAT, "score": own.headline}
    fresh["settings"] = without_seed(own)
    fresh |= {"nfe": what.nfe, "counted": what.counted}
    fresh = dict(json.loads(json.dumps(fresh)))  # tuples are lists, as the file has them
    result: Result = {**fresh, "config": what.config, "choices": {}, "seeds": []}
    result |= {"environments": [], "base": {}, "trials": []}
    if what.out.exists():
        found = read_tuning(what.out)
        stated = {key: found[key] for key in fresh}
        stated["settings"] = config_then(stated["settings"], own, without_seed)
        wrong = different(stated, fresh)
        if set(found["choices"]) != set(what.choices):
            wrong.append(f"keys ({', '.join(found['choices'])} and {', '.join(what.choices)})")
        if wrong:
            raise ConfigError(
                f"{what.out} holds another search, there and now: {', '.join(wrong[:3])}; name "
                "another --out and --runs"
            )
        result = found
    # what is new
    for key, values in what.choices.items():
        result["choices"][key] = [*dict.fromkeys([*result["choices"].get(key, []), *values])]
    result["seeds"] = sorted({*result["seeds"], *what.seeds})
    there = {trial["folder"] for trial in result["trials"]}
    for changes in tried:
        if folder_of(changes) not in there:
            named = dict(change.split("=", 1) for change in changes)
            ordered = [f"{key}={named[key]}" for key in result["choices"]]
            result["trials"].append({"changes": ordered, "folder": folder_of(changes), "runs": []})
    return result


def _prices(what: Tuning, own: Config) -> Prices:
    """Return what work beside sampling costs, measured once on the config itself: every trial
    counts with it, so that equal work is equal."""
    if what.counted == "calls":
        return Prices()
    code = hashlib.sha256(_text(comparable(own), ("name", "seed")).encode()).hexdigest()[:8]
    return prices_of(own, what.runs / f"prices-{code}")


def _keep(result: Result, changes: Trial, found: Mapping[str, Any]) -> None:
    """Put a run into its trial, in the order of seeds; machines are kept once."""
    at, where = found["at"]["nfe"] or {}, found["environment"]
    if where not in result["environments"]:
        result["environments"].append(where)
    run = {key: found[key] for key in ("seed", "failed", "iterations", "nfe", "seconds")}
    run |= {key: at.get(key) for key in ("score", "interval", "tasks")}
    run["environment"] = result["environments"].index(where)
    (trial,) = (one for one in result["trials"] if one["folder"] == folder_of(changes))
    others = [one for one in trial["runs"] if one["seed"] != run["seed"]]
    trial["runs"] = sorted([*others, run], key=lambda one: int(one["seed"]))


def _write_best(what: Tuning, own: Config, result: Result) -> None:
    """Write the best trial as a config of its own, with the seed that the config had; where there
    is none, the one of an earlier search goes."""
    if result["best"] is None:
        delete(what.best)
        return
    changes = result["trials"][result["best"]]["changes"]
    config = what.load(changes, f"seed={own.seed}")
    said = one_line(f"{what.config} with {', '.join(changes)}")
    about = f"# {said}: the best of {len(result['trials'])} trials by {what.out.name}"
    write_text(what.best, f"{about}\n{config.dump()}")
