"""Run a factorial experiment: the cells of a design x seeds, resumable, one result file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.core.files import write_json, write_text
from flowrl.core.prompts import load_prompts
from flowrl.core.tables import markdown_table
from flowrl.runs.compare.budgets import RESULT, Budgets, different
from flowrl.runs.compare.design import Design, Levels, load_design
from flowrl.runs.compare.effects import Result, analysed, effect_rows
from flowrl.runs.compare.file_shapes import FACTORIAL_FILE
from flowrl.runs.compare.one_run import spend
from flowrl.runs.compare.outcomes import unpacked
from flowrl.runs.compare.result_file import read_checked, setting
from flowrl.runs.compare.run_process import Asked
from flowrl.runs.compare.side_by_side import check_processes, train_all
from flowrl.runs.compare.time_left import TimeLeft
from flowrl.runs.compare.work_prices import prices_of
from flowrl.runs.locks import lock
from flowrl.runs.stop import StopSignal
from flowrl.training.rehearsal import check_plan

KIND, FORMAT = "flowrl factorial experiment", 1


class Experiment(NamedTuple):
    """What is run."""

    design: Path
    seeds: tuple[int, ...]
    nfe: float  # of a run; each ends with the iteration that uses it up
    runs: Path
    out: Path
    overrides: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    counted: Literal["cost", "calls"] = "calls"  # as of `Budgets`
    processes: int = 1  # runs at the same time

    def changes(self, design: Design, cell: Levels, *more: str) -> tuple[str, ...]:
        """Return the overrides of a cell."""
        return (*design.changes(cell), *self.overrides, *more)

    def load(self, design: Design, cell: Levels, *more: str) -> Config:
        """Load the config of a cell."""
        return load_config(design.base, self.changes(design, cell, *more), self.plugins)


def run_factorial(what: Experiment, *, quiet: bool = False) -> Result:
    """Run what is not there yet -> the result with its effects, also in `what.out` after every run.

    Every cell is loaded and rehearsed before anything runs. Raises ConfigError for a cell that
    cannot be trained or differs in what has to be equal; Interrupted after Ctrl-C.
    """
    # everything that can be refused
    if not 0 < what.nfe < math.inf:
        raise ConfigError(
            f"compare --factorial: expected a finite --nfe above 0, got {what.nfe:g}: each run "
            "ends when it has used it up"
        )
    budgets = Budgets(what.nfe, 0.0, 1, counted=what.counted)
    check_processes(what.processes, budgets)
    design = load_design(what.design)
    if len(set(what.seeds)) < 2:
        raise ConfigError(
            f"compare --factorial: expected two seeds or more, got {list(what.seeds)}: without a "
            "spread over seeds no effect has an interval"
        )
    names = [f"cell{i:03d}" for i in range(len(design.cells))]
    configs = [
        what.load(design, cell, f"name={n}") for n, cell in zip(names, design.cells, strict=True)
    ]
    _check(design, configs)
    result = _opened(what, design, names, configs[0])
    # one seed of all cells before the next
    left = TimeLeft(float(len(what.seeds) * len(names)))
    with lock(what.runs, mend="name another --runs, or wait for it"), StopSignal() as stop:

        def keep(run: Asked) -> None:
            """Put a run into the result and its file; what is not there yet is run first."""
            nonlocal result
            config = load_config(run.config, list(run.overrides), run.plugins)
            options: dict[str, Any] = {"quiet": quiet, "minutes_left": left}
            if what.counted == "cost" and not (run.folder / RESULT).exists():
                options["prices"] = prices_of(config, run.folder.parent)
            left.start(1.0)
            found = spend(config, run.folder, budgets, stop=stop, **options)
            left.finish()
            result = _kept(result, config.name, config.seed, found)
            write_json(what.out, result)

        asked = _asked(what, design, names, budgets)
        train_all(asked, what.processes, stop, keep, quiet=quiet)
    return result


def _asked(what: Experiment, design: Design, names: Sequence[str], budgets: Budgets) -> list[Asked]:
    """Return the runs of all cells, seed by seed."""
    runs = []
    for seed in what.seeds:
        for name, cell in zip(names, design.cells, strict=True):
            changes = what.changes(design, cell, f"name={name}", f"seed={seed}")
            place = what.runs / name / f"seed{seed}"
            runs.append(Asked(design.base, changes, what.plugins, budgets, place))
    return runs


def _check(design: Design, configs: Sequence[Config]) -> None:
    """Rehearse every cell, and refuse cells that differ in what has to be equal."""
    equal = setting(configs[0])
    for cell, config in zip(design.cells, configs, strict=True):
        named = design.named(cell)
        wrong = different(equal, setting(config))
        if wrong:
            raise ConfigError(
                f"cell {named}: differs in what must be equal: {', '.join(wrong[:3])}"
            )
        try:
            check_plan(config)
        except ConfigError as error:
            raise ConfigError(
                f"cell {named} cannot be trained: {error}. Put what does not go together under "
                "`exclude` of the design"
            ) from error


def _opened(what: Experiment, design: Design, names: Sequence[str], config: Config) -> Result:
    """Begin the result, or go on with the one of the same design."""
    # what the experiment is: base, design, budget, cells
    cells = []
    for name, cell in zip(names, design.cells, strict=True):
        cells.append({"name": name, "levels": design.named(cell)})
    stated = {
        "base": design.base,
        "set": [*design.overrides, *what.overrides],
        "axes": design.axes,
        "interactions": [list(pair) for pair in design.interactions],
        "fraction": "D-optimal" if design.efficiency < 1 - 1e-9 else "D-optimal, orthogonal",
        "efficiency": design.efficiency,
    }
    fresh = {"kind": KIND, "format": FORMAT, "score": config.headline}
    fresh |= {"nfe": what.nfe, "counted": what.counted}
    fresh |= {"design": stated, "cells": cells}
    # as the file will give it back, where tuples are lists: it is compared with one below
    fresh = dict(json.loads(json.dumps(fresh)))
    tags = [str(r.get("tag", "all")) for r in load_prompts(config.prompts.test).records]
    if not what.out.exists():
        what.out.parent.mkdir(parents=True, exist_ok=True)
        return {**fresh, "tags": tags, "environments": [], "runs": []}
    # a file may only be gone on with by the same experiment; those without a count have calls
    found = {"counted": "calls", **read_factorial(what.out)}
    wrong = different({key: found[key] for key in fresh}, fresh)
    if wrong:
        raise ConfigError(
            f"{what.out} holds another experiment, there and now: {', '.join(wrong[:2])}; name "
            "another --out and --runs"
        )
    return found


def _kept(result: Result, cell: str, seed: int, found: dict[str, Any]) -> Result:
    """Put a run into the result, and work the effects out again."""
    at, where = found["at"]["nfe"] or {}, found["environment"]
    run = {"cell": cell, "seed": seed, "failed": found["failed"], "score": at.get("score")}
    run |= {key: at.get(key) for key in ("tasks", "outcomes")}
    run |= {key: found[key] for key in ("iterations", "nfe", "seconds", "last_quarter")}
    environments = list(result["environments"])
    if where not in environments:
        environments.append(where)
    run["environment"] = environments.index(where)
    others = [r for r in result["runs"] if (r["cell"], r["seed"]) != (cell, seed)]
    # in the order of one process, whichever has ended first
    runs = sorted([*others, run], key=lambda one: (one["seed"], one["cell"]))
    return analysed({**result, "environments": environments, "runs": runs})


def read_factorial(path: Path) -> Result:
    """Read a result file. Raises DataError if it is none."""
    return read_checked(path, KIND, FORMAT, FACTORIAL_FILE, _disagreement, analysed)


def _disagreement(found: Result) -> str | None:
    """Return what does not fit together in a result whose parts are right; None where all does."""
    names, machines = [cell["name"] for cell in found["cells"]], len(found["environments"])
    for place, run in enumerate(found["runs"]):
        if run["cell"] not in names:
            return f"runs[{place}].cell: expected one of cells, got {run['cell']!r}"
        if run.get("environment", -1) >= machines:
            return f"runs[{place}].environment: expected a place in environments"
        outcomes = run.get("outcomes")
        if outcomes is not None and len(unpacked(outcomes)) != len(found["tags"]):
            prompts = len(unpacked(outcomes))
            return f"runs[{place}].outcomes: expected {len(found['tags'])} prompts, got {prompts}"
    axes = found["design"]["axes"]
    for place, cell in enumerate(found["cells"]):
        for axis, levels in axes.items():
            if cell["levels"].get(axis) not in levels:
                return f"cells[{place}].levels.{axis}: expected one of {', '.join(levels)}"
    return None


def _budget_words(about: Result) -> str:
    """Say what the network evaluations of a budget were."""
    if about.get("counted", "calls") == "calls":
        return "calls alone, 3 for a trained state"
    return "with decoding, rewards and training at their measured cost"


def factorial_notes(result: Result) -> list[str]:
    """Say in sentences what was run and how the effects are to be read."""
    design, fit = result["design"], result["fit"]
    failed = sum(run["failed"] is not None for run in result["runs"])
    # what was run, and how to read the table
    lines = [
        f"{len(result['cells'])} cells ({design['fraction']}, efficiency per cell against the full "
        f"product {design['efficiency']:.2f}), {len(result['runs'])} runs, {failed} failed, "
        f"{result['nfe']:g} network evaluations each ({_budget_words(result)}), "
        f"score {result['score']}.",
        "Differences in points, averaged over the other axes; 95 % intervals over seeds and "
        "prompts; a star: p after Holm's correction over all effects is below 0.05. "
        "Interactions that are not listed are taken to be zero.",
    ]
    # how well a model without the missing interactions fits
    if fit is None:
        return [*lines, "The runs that are there cannot tell the effects apart yet."]
    if fit["lack_of_fit_p"] is not None:
        lines.append(f"What the model leaves out: lack of fit p = {fit['lack_of_fit_p']:.3f}.")
    return lines


def write_effects(result: Result, out: Path, figures: Path) -> list[Path]:
    """Write the table and the figure of effects -> the files."""
    from flowrl.runs.compare.effects_figure import effects_figure
    from flowrl.runs.report.style import save_figure

    notes = "\n".join(f"- {line}" for line in factorial_notes(result))
    parts = ["# Factorial experiment", notes]
    files = [out.with_suffix(".md")]
    if result["effects"]:
        parts.append(markdown_table(effect_rows(result)))
        files.append(figures / f"{out.stem}-effects.png")
        figures.mkdir(parents=True, exist_ok=True)
        save_figure(effects_figure(result), files[-1], dpi=130)
    write_text(files[0], "\n\n".join(parts) + "\n")
    return files
