"""A search of settings as a table, in sentences, and as a figure."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from flowrl.core.files import write_text
from flowrl.core.tables import fixed_digits, markdown_table
from flowrl.runs.compare.panels import OTHER, OWN, cells, new_figure, plain_axes
from flowrl.runs.compare.tables import unit_of
from flowrl.runs.compare.trials import one_line
from flowrl.runs.compare.tuning_file import Result, has_failed
from flowrl.runs.report.style import INK, save_figure, styled

_GREY, _WIDE = "#8a8a8a", 14  # letters of a value under the axis


def _units(result: Result) -> tuple[float, int, str]:
    """Return factor, digits and unit of all scores that were measured."""
    scores = [result["base"]["score"]]
    for trial in result["trials"]:
        scores += [run["score"] for run in trial["runs"] if run["score"] is not None]
    return unit_of(scores)


def tuning_rows(result: Result) -> list[list[str]]:
    """Return the table: a row per trial, the best first and marked, those without a score last; the
    base model at the end."""
    keys, tasks = list(result["choices"]), list(result["base"]["tasks"])
    factor, digits, unit = _units(result)

    def shown(value: float) -> str:
        return fixed_digits(factor * value, digits)

    # by score; a trial without one is behind the others
    rows = [["trial", f"{result['score']}{unit}", "iterations", *keys, *tasks]]
    for number, trial in sorted(enumerate(result["trials"]), key=_rank):
        values = [one_line(change.split("=", 1)[1]) for change in trial["changes"]]
        iterations = sorted({run["iterations"] for run in trial["runs"]})
        span = str(iterations[0]) if iterations else ""
        span += f" to {iterations[-1]}" if len(iterations) > 1 else ""
        score = _why(trial, result) if trial["score"] is None else shown(trial["score"])
        means = [shown(mean) for mean in _means(trial, tasks)]
        name = f"{number + 1}{'*' if number == result['best'] else ''}"
        rows.append([name, score, span, *values, *(means or [""] * len(tasks))])
    own = [shown(result["base"]["tasks"][task]) for task in tasks]
    return [*rows, ["base", shown(result["base"]["score"]), "", *[""] * len(keys), *own]]


def tuning_notes(result: Result) -> list[str]:
    """Say in sentences what was run, what failed, and what the best score is worth."""
    prompts, images = result["settings"]["prompts"]["test"], result["settings"]["eval"]["images"]
    counted = "calls alone" if result["counted"] == "calls" else "other work at its measured cost"
    seeds = ", ".join(map(str, result["seeds"]))
    notes = [
        f"{len(result['trials'])} trials of {result['config']}, seed {seeds}, "
        f"{result['nfe']:g} network evaluations each ({counted}), judged on {prompts}, "
        f"{images} images per prompt."
    ]
    for number, trial in enumerate(result["trials"]):
        for run in trial["runs"]:
            if run["failed"] is not None:
                notes.append(f"Trial {number + 1}, seed {run['seed']}, failed: {run['failed']}")
    if result["best"] is None:
        return [*notes, "There is no best trial: none has a score, or some have not run yet."]
    return [
        *notes,
        "The star: the best mean. The best of several tries looks better than it is: a figure to "
        "report takes another run, other prompts and other noise.",
    ]


def write_tuning(result: Result, out: Path) -> list[Path]:
    """Write table and notes as Markdown and the figure beside the result -> the files."""
    notes = "\n".join(f"- {one_line(note)}" for note in tuning_notes(result))
    text, picture = out.with_suffix(".md"), out.with_suffix(".png")
    write_text(text, f"{markdown_table(tuning_rows(result), left=1)}\n\n{notes}\n")
    save_figure(tuning_figure(result), picture, dpi=150)
    return [text, picture]


@styled
def tuning_figure(result: Result) -> Figure:
    """Draw every trial's score over the values of each key, a panel per key, failed ones as a cross
    at the bottom, and the base model as a dashed line."""
    choices, (factor, _, unit) = result["choices"], _units(result)
    # as much room as the longest value takes below its place
    texts = {key: list(map(_folded, values)) for key, values in choices.items()}
    lines = max(text.count("\n") for text in itertools.chain(*texts.values()))
    places = [max(1.1, 0.13 * _longest(values)) * len(values) for values in texts.values()]
    figure = new_figure(1.0 + sum(places) + 0.4 * len(places), 3.2 + 0.14 * lines, "Trials")
    size = {"left": 0.65, "top": 0.45, "bottom": 0.55 + 0.14 * lines}
    grid = cells(figure, 1, len(choices), **size, width_ratios=places)
    first = None
    for column, (key, values) in enumerate(choices.items()):
        axes = figure.add_subplot(grid[0, column], sharey=first)
        plain_axes(axes, "y")
        axes.axhline(factor * result["base"]["score"], color=OTHER, linewidth=1, linestyle="--")
        for number, trial in enumerate(result["trials"]):
            place = values.index(trial["changes"][column].split("=", 1)[1])
            _draw(axes, place, trial, factor, best=number == result["best"])
        axes.set_xticks(range(len(values)), texts[key], fontsize=8, color=INK, parse_math=False)
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_xlabel(key)
        if first is None:
            first = axes
            axes.set_ylabel(f"{result['score']}{unit}, dashed: base model")
    return figure


def _draw(axes: Any, place: int, trial: Result, factor: float, *, best: bool) -> None:
    """Draw one trial in a panel; one that waits for a run is left out."""
    if trial["score"] is not None:
        size, color = (6.0, OWN) if best else (4.5, _GREY)
        axes.plot(place, factor * trial["score"], "o", color=color, ms=size, zorder=3 + best)
    elif has_failed(trial):
        bottom = axes.get_xaxis_transform()
        axes.plot(place, 0.03, "x", color=_GREY, ms=5, transform=bottom)


def _folded(value: str) -> str:
    return "\n".join(textwrap.wrap(one_line(value), _WIDE)) or value


def _longest(texts: Sequence[str]) -> int:
    """Return the letters of the longest line."""
    return max(len(line) for line in "\n".join(texts).split("\n"))


def _why(trial: Result, result: Result) -> str:
    """Say why a trial has no score."""
    if has_failed(trial):
        return "failed"
    return f"{len(trial['runs'])} of {len(result['seeds'])} seeds"


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
