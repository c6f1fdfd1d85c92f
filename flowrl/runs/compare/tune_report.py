"""A search of settings as a table, in sentences, and as Optuna's figures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from flowrl.core.files import write_text
from flowrl.core.tables import markdown_table
from flowrl.runs.compare.search_space import one_line
from flowrl.runs.compare.tables import Unit, unit_of
from flowrl.runs.compare.tune import Result, open_study

TABLE = "result.md"


def tuning_rows(result: Result) -> list[list[str]]:
    """Return the table: a row per trial, the best first and marked, those without a score last; the
    base model at the end."""
    keys, base, unit = list(result["space"]), result["base"], _unit(result)
    rows = [["trial", f"{result['score']}{unit.name}", "iterations", *keys, *base["tasks"]]]
    for trial in sorted(result["trials"], key=_rank):
        values = [_value(trial["values"].get(key, "")) for key in keys]
        name = str(trial["number"])
        if trial["number"] == result["best"]:
            name += "*"
        # one that has no score says what became of it
        score, means = trial["state"], [""] * len(base["tasks"])
        if trial["score"] is not None:
            score, means = unit.text(trial["score"]), _means(trial, base["tasks"], unit)
        rows.append([name, score, _span(trial), *values, *means])
    own = map(unit.text, base["tasks"].values())
    return [*rows, ["base", unit.text(base["score"]), "", *[""] * len(keys), *own]]


def tuning_notes(result: Result) -> list[str]:
    """Say in sentences what was run, what failed or was given up, and what the best score is
    worth."""
    settings, budgets, trials = result["settings"], result["budgets"], result["trials"]
    prompts, images = settings["prompts"]["test"], settings["eval"]["images"]
    seeds = ", ".join(map(str, result["seeds"]))
    notes = [
        f"{len(trials)} trials of {result['config']} by {result['sampler']['name']}, seed {seeds}, "
        f"{budgets['nfe']:g} network evaluations each, judged on {prompts}, {images} images per "
        "prompt."
    ]
    pruned = sum(trial["state"] == "pruned" for trial in trials)
    if pruned:
        notes.append(
            f"The {result['pruner']} pruner gave {pruned} of them up early: they have no score."
        )
    for trial in trials:
        if trial["state"] == "fail":
            notes.append(f"Trial {trial['number']} failed: {trial['why']}")
    if result["best"] is None:
        return [*notes, "There is no best trial: none has a score."]
    return [
        *notes,
        "The star: the best score. The best of several tries looks better than it is: a figure to "
        "report takes another run, other prompts and other noise.",
    ]


def write_tuning(result: Result, out: Path) -> list[Path]:
    """Write table and notes as Markdown, and Optuna's figures, into the folder of a search -> the
    files."""
    notes = "\n".join(f"- {one_line(note)}" for note in tuning_notes(result))
    write_text(out / TABLE, f"{markdown_table(tuning_rows(result), left=1)}\n\n{notes}\n")
    return [out / TABLE, *draw_study(out)]


def draw_study(out: Path) -> list[Path]:
    """Draw the study in a folder with Optuna: scores over trials and over each key's values, which
    key matters, and the evaluations that a pruner saw -> the files."""
    import matplotlib.pyplot as plt
    from optuna import Study
    from optuna.exceptions import ExperimentalWarning
    from optuna.importance import PedAnovaImportanceEvaluator
    from optuna.visualization import matplotlib as drawn

    from flowrl.runs.report.style import save_figure

    study, files = open_study(out), []
    whole = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    pictures: dict[str, Callable[[Study], Any]] = {}
    if whole:
        pictures["history"] = drawn.plot_optimization_history
        pictures["slice"] = drawn.plot_slice
    if any(trial.intermediate_values for trial in study.trials):
        pictures["evaluations"] = drawn.plot_intermediate_values
    if len({trial.value for trial in whole}) > 2:
        by = PedAnovaImportanceEvaluator()
        pictures["importance"] = partial(drawn.plot_param_importances, evaluator=by)
    # pyplot belongs to a user's program as well: what was drawn is closed again
    for name, draw in pictures.items():
        before = set(plt.get_fignums())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            warnings.simplefilter("ignore", UserWarning)  # of matplotlib, for one value of a key
            draw(study)
        files.append(out / f"{name}.png")
        save_figure(plt.gcf(), files[-1], dpi=130)
        for number in set(plt.get_fignums()) - before:
            plt.close(number)
    return files


def _unit(result: Result) -> Unit:
    """Return the unit of all scores that were measured."""
    scores = [result["base"]["score"]]
    for trial in result["trials"]:
        scores += [run["score"] for run in trial["runs"] if run["score"] is not None]
    return unit_of(scores)


def _value(text: str) -> str:
    """Shorten a number that was drawn."""
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return one_line(text)


def _span(trial: Result) -> str:
    """Say how many iterations the runs of a trial made."""
    counts = sorted({run["iterations"] for run in trial["runs"]})
    ends = dict.fromkeys(counts[:1] + counts[-1:])
    return " to ".join(map(str, ends))


def _rank(trial: Result) -> tuple[bool, float]:
    """Order trials: those with a score first, the best of them first."""
    return trial["score"] is None, -(trial["score"] or 0.0)


def _means(trial: Result, tasks: Iterable[str], unit: Unit) -> list[str]:
    """Write the mean of each task over a trial's seeds."""
    means = []
    for task in tasks:
        mean = fmean(run["tasks"][task] for run in trial["runs"])
        means.append(unit.text(mean))
    return means
