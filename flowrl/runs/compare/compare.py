"""Run configs x seeds on equal budgets, resumable, keep one result file, and set it as tables,
figures and a page of samples. One run is `flowrl.runs.compare.one_run`."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.core.files import only, write_json, write_text
from flowrl.evaluation.image_grids import labelled_grid, load_strip, save_png
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.one_run import base_of
from flowrl.runs.compare.processes import Asked, check_processes, train_all
from flowrl.runs.compare.records import (
    add_run,
    check_base,
    check_judged,
    different,
    entry_of,
    open_result,
    read_result,
    setting,
    write_result,
)
from flowrl.runs.compare.summary import Result, judged_at, labels, summarize_result
from flowrl.runs.compare.tables import markdown, power_before
from flowrl.runs.folder import RESULT, lock, read_object, read_prompts, read_verdicts
from flowrl.runs.report.samples import sample_files
from flowrl.runs.stop import StopSignal
from flowrl.training.rehearsal import MOST_ITERATIONS, check_plan
from flowrl.training.trainer import Trainer


class Search(NamedTuple):
    """The learning rates that every config tries before its seeds."""

    factors: tuple[float, ...]  # of the config's own optimizer.lr
    seed: int = 100
    share: float = 0.5  # of the budget of network evaluations, for each
    prompts: str = ""  # held-out prompts to choose by; without them training images are
    images: int = 0  # of each of these; 0: as many as `eval.images`


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
    processes: int = 1  # runs at the same time
    given: Mapping[str, Config] = MappingProxyType({})  # configs of a program, by name
    track: tuple[str, ...] = ()  # trackers that are told each run

    def load(self, name: str, *more: str) -> Config:
        """Load one of the configs with the comparison's overrides and more."""
        return load_config(self.given.get(name, name), [*self.overrides, *more], self.plugins)

    def asked(self, name: str, more: Sequence[str], budgets: Budgets, folder: Path) -> Asked:
        """Return a run of one of the configs with more overrides."""
        config, overrides = self.given.get(name, name), (*self.overrides, *more)
        return Asked(config, overrides, self.plugins, budgets, folder, name, self.track)


def run_comparison(what: Comparison, *, quiet: bool = False) -> Result:
    """Run what is not there yet -> the result with its statistics, also written to `what.out` after
    every run.

    What the file holds already, of other configs and seeds under the same settings, stays. Raises
    ConfigError before anything runs if settings differ or a budget is below one iteration; RunError
    if another process works in the folder of the runs; Interrupted after Ctrl-C.
    """
    # what can be refused or warned of before anything runs
    configs = [what.load(name) for name in what.configs]
    _check(what, configs)
    with lock(what.runs, mend="name another --runs, or wait for it"), StopSignal() as stop:
        result = open_result(what.out, configs, what.budgets._asdict(), _stated(what))
        if not quiet:
            names = {config.name for config in configs}
            names.update(one["name"] for one in result["configs"])
            for line in power_before(sorted(names), len(what.seeds), result):
                print(f"seeds: {line}", file=sys.stderr)
        # a file that is added to keeps the base that it was begun with
        judge = not result["base"] or (what.runs / "base").exists()
        base = _base(what, configs, quiet, judge=judge)
        check_base(result, base, configs[0], what.out)
        result["base"] = result["base"] or base
        runs = _Runs(what, configs, result, stop, quiet)
        # the learning rates
        for name, config in zip(what.configs, configs, strict=True):
            entry = entry_of(result, config, name)
            if not entry["seeds"] or (what.runs / config.name).exists():
                entry["search"], entry["lr"] = runs.search(name, config)
        # one seed of every config before the next: a slow hour hits all alike
        train_all(runs.asked(), what.processes, stop, runs.keep, quiet=quiet)
    return runs.result


class _Runs:
    """The single runs of a comparison. What the folder of the runs has is read from there; what it
    no longer has, but the result file, is not run again."""

    def __init__(
        self,
        what: Comparison,
        configs: Sequence[Config],
        result: Result,
        stop: StopSignal,
        quiet: bool,
    ) -> None:
        self.what, self.configs, self.result = what, configs, result
        self.stop, self.quiet = stop, quiet

    def asked(self) -> list[Asked]:
        """Return the runs of all seeds at the rates of the result, seed by seed."""
        what, runs = self.what, list[Asked]()
        for seed in what.seeds:
            for name, config in zip(what.configs, self.configs, strict=True):
                entry = entry_of(self.result, config, name)
                place = what.runs / config.name / f"seed{seed}"
                if seed in _seeds_of(entry) and not place.exists():
                    continue
                more = (f"optimizer.lr={entry['lr']!r}", f"seed={seed}")
                runs.append(what.asked(name, more, what.budgets, place))
        return runs

    def keep(self, run: Asked) -> None:
        """Put a run into the result and its file; what is not there yet is run first."""
        found = run.spend(self.stop, quiet=self.quiet)
        check_judged(found, self.result["base"], run.folder)
        add_run(self.result, entry_of(self.result, run.load(), run.label), found)
        self.result = write_result(self.result, self.what.out)

    def search(self, name: str, config: Config) -> tuple[dict[str, Any] | None, float]:
        """Try the learning rates of one config -> (what was tried, the one of the best score).

        The score is that of training images, or of the search's own held-out prompts; those that
        the comparison is judged by have no say. A run that failed cannot be chosen; if all failed,
        the config's own rate stays.
        """
        if self.what.search is None:
            return None, config.lr
        # every rate for its share of the budget
        tried = [self._try(name, config, factor) for factor in self.what.search.factors]
        # the best score; of equal ones the rate nearest to the config's own
        good = [row for row in tried if row["score"] is not None]
        good.sort(key=lambda row: (row["score"], -abs(math.log(row["factor"]))))
        best = config.lr
        if good:
            best = good[-1]["lr"]
        return {"own_lr": config.lr, "chosen_lr": best, "tried": tried}, best

    def _try(self, name: str, config: Config, factor: float) -> dict[str, Any]:
        what, search = self.what, self.what.search
        assert search is not None
        more = [f"optimizer.lr={config.lr * factor!r}", f"seed={search.seed}"]
        if search.prompts:
            more.append(f"prompts.test={search.prompts}")
        if search.images:
            more.append(f"eval.images={search.images}")
        # judged at its end where held-out prompts choose, else never
        share = what.budgets.nfe * search.share
        points = 1 if search.prompts else 0
        budgets = what.budgets._replace(nfe=share, seconds=0.0, points=points)
        place = what.runs / config.name / f"search-x{factor:g}"
        run = what.asked(name, more, budgets, place).spend(self.stop, quiet=self.quiet)
        score = None
        if run["failed"] is None and search.prompts:
            score = run["at"]["nfe"]["score"]
        elif run["failed"] is None:
            score = run["last_quarter"]["accuracy"]
        kept = only(run, ("lr", "failed", "iterations", "nfe", "seconds"))
        return {"factor": factor, "score": score, **kept}


def _seeds_of(entry: Result) -> set[int]:
    """Return the seeds that an entry of a result file has a run of."""
    return {run["seed"] for run in entry["seeds"]}


def _stated(what: Comparison) -> dict[str, Any] | None:
    """Return the search as the result file states it."""
    if what.search is None:
        return None
    factors, nfe = list(what.search.factors), what.budgets.nfe * what.search.share
    return {**what.search._asdict(), "factors": factors, "nfe": nfe}


def _check(what: Comparison, configs: Sequence[Config]) -> None:
    """Raise ConfigError for what cannot be compared."""
    check_processes(what.processes, what.budgets)
    # something to compare, each once
    b, names = what.budgets, [config.name for config in configs]
    if not configs or not what.seeds:
        got = f"{len(configs)} and {len(what.seeds)}"
        raise ConfigError(f"compare: expected at least 1 config and 1 seed, got {got}")
    for kind, values in (("config name", names), ("seed", what.seeds)):
        for value, times in Counter(values).items():
            if times > 1:
                raise ConfigError(
                    f"compare: {kind} {value!r} comes twice; give each once, with a `name` of its "
                    "own"
                )
    # budgets
    if not (0 < b.nfe < math.inf and 0 <= b.seconds < math.inf and b.points >= 1):
        raise ConfigError(
            "compare: expected --nfe above 0, --seconds of at least 0 (no budget of time) and at "
            f"least 1 point, got --nfe {b.nfe:g}, --seconds {b.seconds:g}, --points {b.points}"
        )
    # one setting
    for name, config in zip(what.configs, configs, strict=True):
        wrong = different(setting(configs[0]), setting(config))
        if wrong:
            raise ConfigError(
                f"compare: {what.configs[0]} and {name} differ in what must be equal: "
                f"{', '.join(wrong[:4])}; set it for all, as in --set "
                f"{wrong[0].partition(' ')[0]}=..."
            )
    _check_search(what, configs)


def _check_search(what: Comparison, configs: Sequence[Config]) -> None:
    if what.search is None:
        return
    factors, seed, share, prompts, _ = what.search
    if not factors or min(factors) <= 0 or len(set(factors)) < len(factors) or not 0 < share <= 1:
        raise ConfigError(
            "compare: expected different --lr-search factors above 0 and a --search-share in (0, "
            f"1], got {factors} and {share:g}"
        )
    if seed in what.seeds:
        raise ConfigError(
            f"compare: --search-seed {seed} is one of --seeds; rates would be chosen on a run that "
            "counts"
        )
    if any(prompts == str(config.prompts.test) for config in configs):
        raise ConfigError(
            f"compare: --search-prompts {prompts} are those that the comparison is judged by; name "
            "another list to choose rates by"
        )


def _base(
    what: Comparison, configs: Sequence[Config], quiet: bool, *, judge: bool
) -> dict[str, Any]:
    """Check every config on the model before training, before hours are spent, and `judge` it,
    once per runs folder. Its memory is free for the runs afterwards."""
    trainer = Trainer(configs[0])
    # on a copy of the weights: the others put what `train.start` names into the model
    trainer.weights.snapshot("checked")
    with trainer.weights.using("checked"):
        for config in configs:
            calls = _check_iterations(what, config, trainer)
            if not quiet:
                about = math.ceil(what.budgets.nfe / calls)
                print(f"{config.name}: the work is about {about} iterations", file=sys.stderr)
    return base_of(what.runs, configs[0], trainer) if judge else {}


def _check_iterations(what: Comparison, config: Config, trainer: Trainer) -> int:
    """Count the network evaluations of an iteration. Raise ConfigError if a config's plan fails in
    any iteration, or if one of them exceeds the budget."""
    # runs end by budget, so the config's own number of iterations says nothing
    endless = replace(config, train=replace(config.train, iterations=MOST_ITERATIONS))
    calls = check_plan(endless).calls
    if config is not trainer.config:
        trainer = Trainer(config, model=trainer.model)
    budget, said = what.budgets.nfe, f"--nfe {what.budgets.nfe:g}"
    if what.search is not None and what.search.share < 1:
        budget *= what.search.share
        said += f" x --search-share {what.search.share:g}"
    if trainer.cost.nfe > budget:
        raise ConfigError(
            f"compare: one iteration of {config.name} samples with {trainer.cost.nfe} network "
            f"evaluations, more than {said}"
        )
    return calls


def saved_result(out: Path) -> Result:
    """Read a result file and work out its statistics again -> the result, also written back: what
    a file says of its runs is what this version says. Raises DataError, RunError."""
    result = summarize_result(read_result(out))
    write_json(out, result)
    return result


def write_comparison(result: Result, out: Path, figures: Path, runs: Path) -> list[Path]:
    """Write tables and figures, and the sample grid where the runs are at hand -> the files. Raises
    RunError."""
    files = _draw(result, figures, out.stem)
    grid = sample_grid(result, runs)
    if grid is not None:
        files.append(figures / f"{out.stem}-samples.png")
        save_png(grid, files[-1])
    beside = [Path(os.path.relpath(file, out.parent)).as_posix() for file in files]
    table = out.with_suffix(".md")
    write_text(table, markdown(result, beside))
    return [table, *files]


def _draw(result: Result, folder: Path, stem: str) -> list[Path]:
    """Draw the figures into a folder -> the files."""
    from flowrl.runs.compare.tables import accuracy_figure, gains_figure
    from flowrl.runs.report.style import save_figure

    drawn, files = {"gains": gains_figure(result)}, []
    for budget in judged_at(result):
        drawn[budget] = accuracy_figure(result, budget)
    for name, figure in drawn.items():
        files.append(folder / f"{stem}-{name}.png")
        save_figure(figure, files[-1], dpi=130)
    return files


def sample_grid(result: Result, runs: Path) -> Any:
    """Draw the base model's images and those of each config's first seed, from the same noise, in
    green and red frames where a checker judged; None without runs. Raises RunError for a damaged
    file."""
    # the folder may be gone, or be of another comparison
    base = runs / "base"
    if not base.is_dir() or not sample_files(base):
        return None
    if read_object(base, RESULT).get("base") != result["base"]:
        return None
    # one column each
    prompts, shape = read_prompts(base)
    folders = {"base model": base}
    short = labels([config["name"] for config in result["configs"]])
    for config in result["configs"]:
        for run in config["seeds"]:
            folder = runs / config["name"] / f"seed{run['seed']}"
            if folder.is_dir() and sample_files(folder):
                folders[short[config["name"]].replace("-", " ")] = folder
                break
    columns, right = {}, {}
    for name, folder in folders.items():
        files, judged = sample_files(folder), read_verdicts(folder)
        last = max(files)
        columns[name] = load_strip(files[last], len(prompts), shape[1])
        if len(judged.get(last, [])) == len(prompts):
            right[name] = judged[last]
    return labelled_grid(columns, prompts, right=right)
