"""A search of settings as a table, in sentences, and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from flowrl.core.files import write_text
from flowrl.core.tables import fixed_digits, markdown_table
from flowrl.runs.compare.panels import OTHER, OWN, cells, new_figure, plain_axes
from flowrl.runs.report.style import INK, save_figure, styled

Result = dict[str, Any]


def _units(result: Result) -> tuple[float, int, str]:
    """Return factor, digits and unit of scores: percent where all lie in [0, 1]."""
    scores = [result["base"]["score"]]
    for trial in result["trials"]:
        scores += [run["score"] for run in trial["runs"] if run["score"] is not None]
    return (100.0, 1, " %") if all(0 <= score <= 1 for score in scores) else (1.0, 3, "")


def tuning_rows(result: Result) -> list[list[str]]:
    """Return the table: a row per trial, the best first, those without a score last; the base model
    at the end."""
    keys, tasks = list(result["choices"]), list(result["base"]["tasks"])
    factor, digits, unit = _units(result)

    def shown(value: float) -> str:
        return fixed_digits(factor * value, digits)

    # by score; a trial without one is behind the others
    rows = [["", *keys, f"{result['score']}{unit}", "iterations", *tasks]]
    for number, trial in sorted(enumerate(result["trials"]), key=_rank):
        values = [change.partition("=")[2] for change in trial["changes"]]
        iterations = sorted({run["iterations"] for run in trial["runs"]})
        span = str(iterations[0]) if iterations else ""
        span += f" to {iterations[-1]}" if len(iterations) > 1 else ""
        score = shown(trial["score"]) if trial["score"] is not None else _why(trial)
        row = ["*" if number == result["best"] else "", *values, score, span]
        means = [shown(mean) for mean in _means(trial, tasks)]
        rows.append(row + (means or [""] * len(tasks)))
    base, empty = result["base"], [""] * (len(keys) - 1)
    own = [shown(base["tasks"][task]) for task in tasks]
    return [*rows, ["", "base model", *empty, shown(base["score"]), "", *own]]


def tuning_notes(result: Result) -> list[str]:
    """Say in sentences what was run, and what the best score is worth."""
    prompts, images = result["settings"]["prompts"]["test"], result["settings"]["eval"]["images"]
    counted = "calls alone" if result["counted"] == "calls" else "other work at its measured cost"
    seeds = ", ".join(map(str, result["seeds"]))
    return [
        f"{len(result['trials'])} trials of {result['config']}, seed {seeds}, "
        f"{result['nfe']:g} network evaluations each ({counted}), judged on {prompts}, "
        f"{images} images per prompt.",
        "The star: the best mean. The best of several tries looks better than it is: a figure to "
        "report takes another run, other prompts and other noise.",
    ]


def write_tuning(result: Result, out: Path) -> list[Path]:
    """Write table and notes as Markdown and the figure beside the result -> the files."""
    notes = "\n".join(f"- {note}" for note in tuning_notes(result))
    text, picture = out.with_suffix(".md"), out.with_suffix(".png")
    write_text(text, f"{markdown_table(tuning_rows(result), left=1)}\n\n{notes}\n")
    save_figure(tuning_figure(result), picture, dpi=150)
    return [text, picture]


@styled
def tuning_figure(result: Result) -> Figure:
    """Draw every trial's score over the values of each key, a panel per key, the base model as a
    dashed line."""
    choices, (factor, _, unit) = result["choices"], _units(result)
    figure = new_figure(max(4.2, 2.6 * len(choices)), 3.2, "Trials")
    panels = cells(figure, 1, len(choices), left=0.65, top=0.45, bottom=0.55)
    for place, (key, values) in enumerate(choices.items()):
        axes = figure.add_subplot(panels[0, place])
        plain_axes(axes, "y")
        axes.axhline(factor * result["base"]["score"], color=OTHER, linewidth=1, linestyle="--")
        for number, trial in enumerate(result["trials"]):
            if trial["score"] is None:
                continue
            best = number == result["best"]
            x = values.index(trial["changes"][place].partition("=")[2])
            color = OWN if best else "#8a8a8a"
            axes.plot(x, factor * trial["score"], "o", color=color, ms=6 if best else 4.5)
        axes.set_xticks(range(len(values)), values, fontsize=8, color=INK)
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_xlabel(key)
        if place == 0:
            axes.set_ylabel(f"{result['score']}{unit}, dashed: base model")
    return figure


def _why(trial: Result) -> str:
    """Say why a trial has no score."""
    return "failed" if any(run["failed"] is not None for run in trial["runs"]) else "not run yet"


def _rank(pair: tuple[int, Result]) -> tuple[bool, float]:
    """Order trials: those with a score first, the best of them first."""
    score = pair[1]["score"]
    return score is None, -(score or 0.0)


def _means(trial: Result, tasks: Sequence[str]) -> list[float]:
    """Return the mean of each task over a trial's seeds; none without a score."""
    if trial["score"] is None:
        return []
    means = []
    for task in tasks:
        means.append(fmean(run["tasks"][task] for run in trial["runs"]))
    return means
