"""Search the settings that serve a config best, with Optuna: trials of equal budgets, judged on the
config's held-out prompts.

The study is a SQLite file in the folder of the search and holds all that is known of its trials, so
the same command goes on with it, and Optuna's dashboard opens it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.files import only, without, write_json, write_text
from flowrl.evaluation.contents import own_functions
from flowrl.evaluation.suites.catalogue import SUITES
from flowrl.runs.compare.budgets import Budgets, check_same_run
from flowrl.runs.compare.one_run import base_of
from flowrl.runs.compare.processes import Asked, check_processes, train_side_by_side
from flowrl.runs.compare.records import check_judged, comparable, different, setting, without_seed
from flowrl.runs.compare.search_space import (
    Space,
    Value,
    change,
    combinations,
    ends,
    folder_of,
    grid_of,
    import_optuna,
    one_line,
)
from flowrl.runs.folder import lock
from flowrl.runs.stop import Interrupted, StopSignal
from flowrl.training.rehearsal import MOST_ITERATIONS, check_plan
from flowrl.training.trainer import Trainer

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

Result = dict[str, Any]
Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["none", "median", "hyperband"]

STUDY, JSON, BEST = "study.db", "result.json", "best.yaml"  # in the folder of a search
TRIALS_IN = "trials"
KIND, FORMAT = "flowrl tuning", 3
NAME, ABOUT = "flowrl", "about"  # of the study, and what a trial holds of its runs
TRIALS = 20  # unless their number is given
# sections whose numbers leave a plan and its cost as they are
_APART = ("name", "seed", "optimizer")


class Tuning(NamedTuple):
    """What is tried."""

    config: str
    space: Space
    seeds: tuple[int, ...]
    nfe: float  # of each run
    out: Path  # folder of the search
    trials: int = 0  # 0: all combinations under grid, else 20
    sampler: Sampler | None = None  # None: grid where only few values are listed, else tpe
    sampler_seed: int = 0
    pruner: Pruner = "none"
    points: int = 1  # held-out evaluations of a run
    overrides: tuple[str, ...] = ()  # of every trial
    plugins: tuple[str, ...] = ()
    processes: int = 1  # runs at the same time
    given: Config | None = None  # the config, where a program handed it over
    track: tuple[str, ...] = ()  # trackers that are told each run

    def load(self, changes: Sequence[str] = (), *more: str) -> Config:
        """Load the config with the changes of a trial."""
        return load_config(
            self.given or self.config, [*self.overrides, *changes, *more], self.plugins
        )

    def folder(self, changes: Sequence[str], seed: int) -> Path:
        """Return the folder of a run."""
        return self.out / TRIALS_IN / folder_of(changes) / f"seed{seed}"

    @property
    def budgets(self) -> Budgets:
        """Return the budgets of each run."""
        return Budgets(self.nfe, 0.0, self.points)

    @property
    def search(self) -> Sampler:
        """Return the sampler, also where none was named."""
        if self.sampler is not None:
            return self.sampler
        if combinations(self.space) <= (self.trials or TRIALS):
            return "grid"
        return "tpe"

    @property
    def most(self) -> int:
        """Return how many trials there are to be."""
        if self.search != "grid":
            return self.trials or TRIALS
        total = combinations(self.space)
        return int(min(self.trials or total, total))


class _Pruned(RunError):
    """The pruner has given a run up."""


def run_tuning(what: Tuning, *, quiet: bool = False) -> Result:
    """Run the trials that are not there yet -> the result, also in ``result.json``, and the best
    trial as a config, ``best.yaml``, both in the folder of the search.

    Raises ConfigError before anything runs for values that cannot be trained, have no effect,
    change what a trial is judged on, or exceed the budget with one iteration; RunError if another
    process works in the folder; Interrupted after Ctrl-C.
    """
    own = what.load()
    _check(what, own)
    _check_space(what, own)
    with lock(what.out, mend="name another --out, or wait for it"), StopSignal() as stop:
        # the study, and what its trials are measured against
        study = _opened(what, own)
        base = base_of(what.out, own, Trainer(own))
        study.set_user_attr("base", only(base, ("score", "interval", "images", "tasks")))
        search = _Search(what, study, base, stop, quiet)
        search.run()
    result = result_of(study)
    _write_best(what, own, result)
    return result


def read_tuning(out: Path) -> Result:
    """Read the study in the folder of a search -> its result. Raises DataError if it is none."""
    import_optuna()
    if not (out / STUDY).is_file():
        raise DataError(f"{out / STUDY}: expected the study of a search, got no such file")
    study = open_study(out)
    got = study.user_attrs.get("kind"), study.user_attrs.get("format")
    if got != (KIND, FORMAT):
        raise DataError(
            f"{out / STUDY}: expected a {KIND} of format {FORMAT}, got {got[0]!r}, {got[1]!r}"
        )
    return result_of(study)


def _check(what: Tuning, own: Config) -> None:
    """Raise ConfigError for what can be refused without a model."""
    if not what.seeds or len(set(what.seeds)) < len(what.seeds):
        raise ConfigError(f"--seeds: expected seeds that differ, got {list(what.seeds)}")
    if not 0 < what.nfe < math.inf:
        raise ConfigError(f"--nfe: expected more than 0, got {what.nfe:g}")
    if what.trials < 0:
        raise ConfigError(f"--trials: expected 0 or more, got {what.trials}")
    if what.search == "grid":
        grid_of(what.space)
    check_processes(what.processes, what.budgets)
    # a run is given up between two evaluations; hyperband looks at trials that still run
    if what.pruner != "none" and what.points < 2:
        raise ConfigError(
            f"--pruner {what.pruner}: looks at the evaluations before the last one; give --points "
            "2 or more"
        )
    beside = what.processes > 1
    if beside and (what.pruner == "hyperband" or (what.pruner == "median" and len(what.seeds) > 1)):
        raise ConfigError(
            f"--processes {what.processes}: takes --pruner median and one of --seeds, got "
            f"{what.pruner} and {len(what.seeds)} seeds"
        )
    if what.points < 1:
        raise ConfigError(f"--points: expected at least 1, got {what.points}")
    # settings that were chosen on a test list would flatter the test
    for name, suite in SUITES.items():
        if suite.validation and own.prompts.test == suite.prompts:
            raise ConfigError(
                f"tune: {suite.prompts} are the test prompts of the suite {name}: give --set "
                f"prompts.test={suite.validation}"
            )
    if own.source and Path(own.source).resolve() == (what.out / BEST).resolve():
        raise ConfigError(f"--out {what.out}: the best config would overwrite {own.source}")


def _check_space(what: Tuning, own: Config) -> None:
    """Check each value of each key, of ranges both ends, beside the first values of the others.
    Raises ConfigError for one that cannot be trained, judged alike, or has no effect."""
    first = {key: ends(some)[0] for key, some in what.space.items()}
    rehearsed: dict[str, int] = {}
    for key, some in what.space.items():
        seen: dict[str, Value] = {}
        for value in ends(some):
            changes = changes_of({**first, key: value})
            config = _checked(what, own, changes, rehearsed)
            # a key that has no effect under a budget, or one value in two spellings
            whole = _text(comparable(config), ("name", "seed"))
            if whole in seen:
                raise ConfigError(
                    f"tune: {change(key, value)} is the same run as {change(key, seen[whole])}: "
                    "under a budget these settings make no difference"
                )
            seen[whole] = value


def _checked(
    what: Tuning, own: Config, changes: Sequence[str], rehearsed: dict[str, int]
) -> Config:
    """Load and rehearse a trial -> its config. Raises ConfigError if it cannot be trained, is
    judged on something else, or its folder holds another run."""
    config, named = what.load(changes), one_line(", ".join(changes))
    wrong = different(setting(own), setting(config))
    if wrong:
        raise ConfigError(
            f"tune: {named}: changes what every trial is judged on: {', '.join(wrong[:3])}; give "
            "it with --set, for all trials"
        )
    # plans that differ in their optimizer alone are rehearsed once
    part = _text(comparable(config), _APART)
    if part not in rehearsed:
        train = replace(config.train, iterations=MOST_ITERATIONS)
        rehearsed[part] = check_plan(replace(config, train=train)).calls
    if rehearsed[part] > what.nfe:
        raise ConfigError(
            f"tune: {named}: one iteration takes {rehearsed[part]} network evaluations, more than "
            f"--nfe {what.nfe:g}"
        )
    return config


def _text(config: Mapping[str, Any], left_out: Sequence[str]) -> str:
    """Set a config as text, to tell whether two are alike in what is not left out."""
    return json.dumps(without(config, *left_out))


def changes_of(values: Mapping[str, Value]) -> list[str]:
    """Return the overrides of a trial."""
    return [change(key, value) for key, value in values.items()]


# the study


def open_study(out: Path) -> Study:
    """Open the study in a folder, or begin one. Raises DataError where the file is none."""
    import optuna
    from optuna.storages import RDBStorage
    from sqlalchemy.engine import URL
    from sqlalchemy.exc import SQLAlchemyError

    url = URL.create("sqlite", database=str(out / STUDY))
    try:
        storage = RDBStorage(url.render_as_string(hide_password=False))
        return optuna.create_study(
            storage=storage, study_name=NAME, direction="maximize", load_if_exists=True
        )
    except (SQLAlchemyError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"{out / STUDY}: cannot be read as a study of Optuna: {reason}; put the file back, or "
            "name another --out: the runs that are there are read again"
        ) from error


def _opened(what: Tuning, own: Config) -> Study:
    """Begin a study, or go on with one of the same settings. Raises ConfigError for another one."""
    from optuna.distributions import distribution_to_json

    stated = {
        "kind": KIND,
        "format": FORMAT,
        "score": own.headline,
        "settings": without_seed(own),
        "budgets": what.budgets._asdict(),
        "seeds": sorted(what.seeds),
        "space": {key: distribution_to_json(some) for key, some in what.space.items()},
        "sampler": {"name": what.search, "seed": what.sampler_seed},
        "pruner": what.pruner,
        **own_functions(own),
    }
    stated = dict(json.loads(json.dumps(stated)))  # tuples are lists, as the study has them
    # trials whose study is away are another search's, or this one's without its memory
    left = [name for name in (TRIALS_IN, BEST, JSON) if (what.out / name).exists()]
    if left and not (what.out / STUDY).exists():
        raise ConfigError(
            f"{what.out} holds {' and '.join(left)} of a search whose {STUDY} is not there: bring "
            "it back, or name another --out; nothing was changed"
        )
    study = open_study(what.out)
    if "kind" in study.user_attrs:
        found = {key: study.user_attrs.get(key) for key in stated}
        wrong = different(found, stated)
        if wrong:
            raise ConfigError(
                f"{what.out} holds another search, there and now: {', '.join(wrong[:3])}; name "
                "another --out"
            )
    for key, value in {**stated, "config": what.config}.items():
        study.set_user_attr(key, value)
    return study


def _sampler(what: Tuning, number: int) -> Any:
    """Return the sampler of a trial. Each trial has its own random numbers, from the seed and its
    number: so a search that was stopped goes on as if it had not been."""
    from optuna.samplers import RandomSampler, TPESampler

    code = hashlib.sha256(f"{what.sampler_seed} {number}".encode()).digest()
    seed = int.from_bytes(code[:4], "big")
    if what.search == "tpe":
        return TPESampler(seed=seed)
    return RandomSampler(seed)


def _next_of_grid(what: Tuning, tried: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return the first combination that was not tried; where not all are wanted, in an order drawn
    by chance."""
    grid = grid_of(what.space)
    every = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    if what.most < len(every):
        random.Random(what.sampler_seed).shuffle(every)
    return next(one for one in every if one not in tried)


def _pruner(what: Tuning) -> Any:
    from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

    if what.pruner == "median":
        return MedianPruner()
    if what.pruner == "hyperband":
        return HyperbandPruner(1, what.points)
    return NopPruner()


class _Search:
    """The trials of a search, on their way."""

    def __init__(
        self,
        what: Tuning,
        study: Study,
        base: Result,
        stop: StopSignal,
        quiet: bool,
    ) -> None:
        self.what, self.study, self.base = what, study, base
        self.stop, self.quiet = stop, quiet
        self.own = what.load()
        self.rehearsed: dict[str, int] = {}

    def run(self) -> None:
        """Run trials until there are as many as were asked for; those that a stop has left open
        come first. Several processes run a trial each."""
        from optuna.trial import TrialState

        waiting = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        self._batch([trial.number for trial in waiting])
        while len(self.study.trials) < self.what.most:
            room = self.what.most - len(self.study.trials)
            asked = [self._ask() for _ in range(min(self.what.processes, room))]
            self._batch(asked)

    def _ask(self) -> int:
        """Let the sampler choose a trial -> its number."""
        trials = self.study.trials
        self.study.sampler = _sampler(self.what, len(trials))
        if self.what.search == "grid":
            tried = [trial.params for trial in trials]
            self.study.enqueue_trial(_next_of_grid(self.what, tried))
        return self.study.ask(self.what.space).number

    def _batch(self, numbers: Sequence[int]) -> None:
        """Run some trials; what cannot be trained has failed."""
        fit = []
        for number in numbers:
            changes = changes_of(self.study.trials[number].params)
            try:
                _checked(self.what, self.own, changes, self.rehearsed)
            except ConfigError as error:
                self._end(number, [], str(error))
                continue
            fit.append((number, changes))
        if self.what.processes > 1 and fit:
            self._train(fit)
        for number, changes in fit:
            self._trial(number, changes)
        write_json(self.what.out / JSON, result_of(self.study))

    def _train(self, fit: Sequence[tuple[int, list[str]]]) -> None:
        """Train the runs of some trials at the same time, as far as they get: what came of them is
        read by `_trial`."""
        asked: dict[Path, Asked] = {}
        for number, changes in fit:
            watch = _Watch(self.what, number, Interrupted)
            for run in self._asked(changes):
                asked[run.folder] = run._replace(judged=watch)
        runs = list(asked.values())
        train_side_by_side(runs, self.what.processes, self.stop, _nothing, quiet=self.quiet)

    def _trial(self, number: int, changes: list[str]) -> None:
        """Run the seeds of a trial, and tell the study."""
        runs = []
        try:
            for place, run in enumerate(self._asked(changes)):
                watch = None
                if place == 0:  # which the pruner looks at
                    watch = _Watch(self.what, number, _Pruned)
                found = run._replace(judged=watch).spend(self.stop, quiet=self.quiet)
                check_judged(found, self.base, run.folder)
                runs.append(_short(found))
        except _Pruned as error:
            self._end(number, runs, str(error), pruned=True)
        except ConfigError as error:  # one iteration exceeds the budget
            self._end(number, runs, str(error))
        else:
            self._end(number, runs, _why(runs))

    def _asked(self, changes: Sequence[str]) -> list[Asked]:
        what, runs = self.what, list[Asked]()
        for seed in what.seeds:
            own = (*what.overrides, *changes, f"seed={seed}")
            place = what.folder(changes, seed)
            check_same_run(place, what.load(changes, f"seed={seed}"), what.budgets)
            config, label = what.given or what.config, what.config
            runs.append(Asked(config, own, what.plugins, what.budgets, place, label, what.track))
        return runs

    def _end(self, number: int, runs: list[Result], why: str, *, pruned: bool = False) -> None:
        """Tell the study how a trial ended."""
        from optuna.trial import TrialState

        _live(self.study, number).set_user_attr(ABOUT, {"runs": runs, "why": why})
        if pruned:
            self.study.tell(number, state=TrialState.PRUNED)
        elif why:
            self.study.tell(number, state=TrialState.FAIL)
        else:
            self.study.tell(number, sum(run["score"] for run in runs) / len(runs))


def _live(study: Study, number: int) -> Trial:
    """Return a trial that has not ended, also one that another process began."""
    from optuna.trial import Trial

    return Trial(study, study.trials[number]._trial_id)


class _Watch:
    """Report a run's evaluations to the study, and give the run up where the pruner says so. It
    opens the study by itself, so that it can be sent to another process."""

    def __init__(self, what: Tuning, number: int, kind: type[RunError]) -> None:
        self.what, self.number, self.kind = what, number, kind

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Take note of an evaluation at equal cost. Raises an error of the kind."""
        step, points = max(row["marks"], default=0), self.what.points
        if not 0 < step < points or self.what.pruner == "none":
            return  # at the end there is nothing left to save
        study, score = open_study(self.what.out), float(row[row["score"]])
        study.pruner = _pruner(self.what)
        trial = _live(study, self.number)
        if step not in study.trials[self.number].intermediate_values:
            trial.report(score, step)
        if trial.should_prune():
            raise self.kind(f"given up at {step} of {points} evaluations, with {score:.4g}")


def _nothing(run: Asked) -> None:
    """Do nothing about a run that is finished."""


def _short(found: Result) -> Result:
    """Return what a study keeps of a run."""
    at = found["at"]["nfe"] or {}
    run = only(found, ("seed", "failed", "iterations", "nfe", "seconds"))
    return {**run, **{key: at.get(key) for key in ("score", "interval", "tasks")}}


def _why(runs: Sequence[Result]) -> str:
    """Say what broke the runs of a trial; "" where all were judged."""
    for run in runs:
        if run["failed"] is not None:
            return f"seed {run['seed']}: {run['failed']}"
        if run["score"] is None:
            return f"seed {run['seed']}: was not judged"
    return ""


def result_of(study: Study) -> Result:
    """Return all that is known of a search as plain data; the best trial is the one with the
    highest score, of equal ones the first."""
    trials, best = [], None
    for trial in study.trials:
        trials.append(_trial_row(trial))
        score = trials[-1]["score"]
        if score is not None and (best is None or score > trials[best]["score"]):
            best = trial.number
    return {**study.user_attrs, "trials": trials, "best": best}


def _trial_row(trial: FrozenTrial) -> Result:
    """Return a trial as plain data; one that failed or was given up has no score."""
    changes = changes_of(trial.params)
    values = {key: str(value) for key, value in trial.params.items()}
    row = {"number": trial.number, "state": trial.state.name.lower(), "values": values}
    row |= {"score": None, "changes": changes, "folder": folder_of(changes)}
    if trial.state.name == "COMPLETE":
        row["score"] = trial.value
    return {**row, "runs": [], "why": "", **trial.user_attrs.get(ABOUT, {})}


def _write_best(what: Tuning, own: Config, result: Result) -> None:
    """Write the best trial as a config of its own, with the seed that the config had."""
    if result["best"] is None:
        return
    changes = result["trials"][result["best"]]["changes"]
    config = what.load(changes, f"seed={own.seed}")
    named = one_line(f"{what.config} with {', '.join(changes)}")
    about = f"# {named}: the best of {len(result['trials'])} trials"
    write_text(what.out / BEST, f"{about}\n{config.dump()}")
