"""Run configs x seeds on equal budgets, resumable, and keep one result file. One run is `flowrl.budgeted`."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.budgeted import draw, evaluated, spend
from flowrl.comparison import Result
from flowrl.comparison_file import entry_of, keep, open_result, setting, write
from flowrl.config import Config, load_config
from flowrl.errors import ConfigError
from flowrl.feasible import MOST_ITERATIONS, check_plan
from flowrl.ledger import RESULT, Budgets, different, load
from flowrl.loop import Interrupted, StopSignal, Trainer, write_json


class Search(NamedTuple):
    """The learning rates that every config tries before its seeds."""

    factors: tuple[float, ...]  # of the config's own train.lr
    seed: int = 100
    share: float = 0.5  # of the budget of network evaluations, for each


class Comparison(NamedTuple):
    """What is compared."""

    configs: tuple[str, ...]
    seeds: tuple[int, ...]
    budgets: Budgets
    runs: Path
    out: Path
    search: Search | None = None
    overrides: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()

    def load(self, name: str, *more: str) -> Config:
        """Load one of the configs with the comparison's overrides and more."""
        return load_config(name, [*self.overrides, *more], self.plugins)


class Pace:
    """Tell how many minutes the whole comparison still takes, from the work done since it was started."""

    def __init__(self, todo: float) -> None:
        self.todo, self.done, self.size, self.first = todo, 0.0, 0.0, math.nan
        self.began = time.perf_counter()

    def start(self, size: float) -> None:
        """Begin a run of `size` units of work."""
        self.size, self.first = size, math.nan

    def finish(self) -> None:
        """End the run."""
        self.todo -= self.size
        self.done += 0.0 if math.isnan(self.first) else self.size * (1 - self.first)

    def __call__(self, used: float) -> float:
        """Return the minutes left when the run has used a share of its budgets; NaN before it is known."""
        if math.isnan(self.first):  # a resumed run starts somewhere; the first report is already one iteration on
            self.first = used
        done = self.done + self.size * (used - self.first)
        minutes = (time.perf_counter() - self.began) / 60
        return minutes * (self.todo - self.size * used) / done if done else math.nan


def compare(what: Comparison, *, quiet: bool = False) -> Result:
    """Run what is not there yet -> the result with its statistics, also written to `what.out` after every run.

    What the file holds already, of other configs and seeds under the same settings, stays. Raises ConfigError before
    anything runs if settings differ or a budget is below one iteration; Interrupted after Ctrl-C.
    """
    configs = [what.load(name) for name in what.configs]
    _check(what, configs)
    result = open_result(what.out, configs, what.budgets, _stated(what))
    _warn_of_load(quiet)
    with StopSignal() as stop:
        base = _base(what, configs)
        result["base"] = result["base"] or base  # a file that is added to keeps the one it was begun with
        pace = Pace(_work(what, configs))
        for name, config in zip(what.configs, configs, strict=True):
            entry = entry_of(result, config, name)
            entry["search"], entry["lr"] = _search(what, name, config, stop, pace, quiet)
        for seed in what.seeds:  # one seed of every config before the next: a slow hour hits all alike
            for name, config in zip(what.configs, configs, strict=True):
                entry = entry_of(result, config, name)
                mine = what.load(name, f"train.lr={entry['lr']!r}", f"seed={seed}")
                run = _run(mine, what.runs / config.name / f"seed{seed}", what.budgets, 1.0, stop, pace, quiet)
                keep(result, entry, run)
                result = write(result, what.out)
    return result


def _run(
    config: Config, folder: Path, budgets: Budgets, size: float, stop: StopSignal, pace: Pace, quiet: bool
) -> dict[str, Any]:
    if stop.asked:
        raise Interrupted("stopped between two runs; the same command goes on")
    fresh = not (folder / RESULT).exists()
    if fresh:
        pace.start(size)
    found = spend(config, folder, budgets, stop=stop, quiet=quiet, pace=pace)
    if fresh:
        pace.finish()
    return found


def _work(what: Comparison, configs: Sequence[Config]) -> float:
    """Add up the runs that are still to be done; a seed counts 1, a search run its share."""
    share, factors = (what.search.share, what.search.factors) if what.search else (0.0, ())
    folders = {what.runs / c.name / f"seed{seed}": 1.0 for c in configs for seed in what.seeds}
    folders |= {what.runs / c.name / f"search-x{factor:g}": share for c in configs for factor in factors}
    return sum(size for folder, size in folders.items() if not (folder / RESULT).exists())


def _search(
    what: Comparison, name: str, config: Config, stop: StopSignal, pace: Pace, quiet: bool
) -> tuple[dict[str, Any] | None, float]:
    """Try the learning rates of one config -> (what was tried, the one of the best training score).

    Held-out pictures have no say. A run that failed cannot be chosen; if all failed, the config's own rate stays.
    """
    if what.search is None:
        return None, config.train.lr
    budgets = Budgets(what.budgets.evaluations * what.search.share, 0.0, 0, what.budgets.clock)
    tried = []
    for factor in what.search.factors:
        mine = what.load(name, f"train.lr={config.train.lr * factor!r}", f"seed={what.search.seed}")
        folder = what.runs / config.name / f"search-x{factor:g}"
        run = _run(mine, folder, budgets, what.search.share, stop, pace, quiet)
        score = None if run["failed"] is not None else run["last_quarter"]["accuracy"]
        kept = {key: run[key] for key in ("lr", "failed", "iterations", "evaluations", "seconds")}
        tried.append({"factor": factor, "score": score, **kept})
    good = [row for row in tried if row["score"] is not None]
    # of equal scores the rate nearest to the config's own
    best = max(good, key=lambda row: (row["score"], -abs(math.log(row["factor"]))), default={"lr": config.train.lr})
    return {"own_lr": config.train.lr, "chosen_lr": best["lr"], "tried": tried}, best["lr"]


def _stated(what: Comparison) -> dict[str, Any] | None:
    """Return the search as the result file states it."""
    if what.search is None:
        return None
    factors, evaluations = list(what.search.factors), what.budgets.evaluations * what.search.share
    return {**what.search._asdict(), "factors": factors, "evaluations": evaluations}


def _check(what: Comparison, configs: Sequence[Config]) -> None:
    """Raise ConfigError for what cannot be compared."""
    b, names = what.budgets, [config.name for config in configs]
    if not configs or not what.seeds:
        raise ConfigError(f"compare: expected at least 1 config and 1 seed, got {len(configs)} and {len(what.seeds)}")
    if not (0 < b.evaluations < math.inf and 0 < b.seconds < math.inf and b.points >= 1):
        raise ConfigError(
            f"compare: expected budgets above 0 and at least 1 point, got --evaluations {b.evaluations:g}, --seconds "
            f"{b.seconds:g}, --points {b.points}"
        )
    for kind, values in (("config name", names), ("seed", what.seeds)):
        twice = [value for value in dict.fromkeys(values) if list(values).count(value) > 1]
        if twice:
            raise ConfigError(f"compare: {kind} {twice[0]!r} comes twice; give each once, with a `name` of its own")
    for name, config in zip(what.configs, configs, strict=True):
        wrong = different(setting(configs[0]), setting(config))
        if wrong:
            raise ConfigError(
                f"compare: {what.configs[0]} and {name} differ in what must be equal: {', '.join(wrong[:4])}; set it "
                f"for all, as in --set {wrong[0].partition(' ')[0]}=..."
            )
    _check_search(what)


def _check_search(what: Comparison) -> None:
    if what.search is None:
        return
    factors, seed, share = what.search
    if not factors or min(factors) <= 0 or len(set(factors)) < len(factors) or not 0 < share <= 1:
        raise ConfigError(
            f"compare: expected different --lr-search factors above 0 and a --search-share in (0, 1], got {factors} "
            f"and {share:g}"
        )
    if seed in what.seeds:
        raise ConfigError(
            f"compare: --search-seed {seed} is one of --seeds; rates would be chosen on a run that counts"
        )


def _base(what: Comparison, configs: Sequence[Config]) -> Result:
    """Evaluate the model before training, once per runs folder, and check every config on it before hours are spent."""
    folder, equal = what.runs / "base", setting(configs[0])
    share = what.search.share if what.search else 1.0
    trainer = Trainer(configs[0])
    for config in configs:
        check_plan(replace(config, train=replace(config.train, iterations=MOST_ITERATIONS)))  # runs end by budget
        trainer_of = trainer if config is configs[0] else Trainer(config, model=trainer.model)
        least = trainer_of.budget.evaluations
        if least > what.budgets.evaluations * share:
            raise ConfigError(
                f"compare: one iteration of {config.name} samples with {least} network evaluations, more than "
                f"--evaluations {what.budgets.evaluations:g}{f' x --search-share {share:g}' if share < 1 else ''}"
            )
    if (folder / RESULT).exists():
        found = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        wrong = different(found["setting"], equal)
        if wrong:
            raise ConfigError(f"{what.runs} belongs to another comparison: {', '.join(wrong[:3])}; name another --runs")
        return dict(found["base"])
    folder.mkdir(parents=True, exist_ok=True)
    row = evaluated(trainer)
    draw(trainer, folder)
    tasks = {task: values["mean"] for task, values in row["tasks"].items()}
    base = {"score": row[row["score"]], "interval": row["interval"], "images": row["images"], "tasks": tasks}
    write_json(folder / RESULT, {"setting": equal, "base": base})
    return base


def _warn_of_load(quiet: bool) -> None:
    busy, cores = load(), os.cpu_count() or 1
    if busy is not None and busy > 0.5 * cores and not quiet:
        print(
            f"warning: {busy:g} processes on average want the {cores} processors already, so seconds mean little; "
            "stop the others, or read the result at equal network evaluations only",
            file=sys.stderr,
        )
