"""Set a comparison as tables and figures: aligned text for the terminal, Markdown for the
repository, what was gained and the held-out curves as pictures. Pure functions of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from flowrl.core.tables import fixed_digits, markdown_table, text_table
from flowrl.runs.compare.summary import (
    LETTERS,
    LEVEL,
    Result,
    failed_runs,
    judged_at,
    labels,
    mean_curve,
    seeds_needed,
    told_apart,
)
from flowrl.runs.report.style import EDGE, INK, PALETTE, grid_along, styled

DASH = "–"


class Unit(NamedTuple):
    """What scores are multiplied with to be written, their digits, and their unit."""

    factor: float
    digits: int
    name: str

    def text(self, score: float) -> str:
        """Write a score, without its unit."""
        return fixed_digits(self.factor * score, self.digits)

    def gain(self, difference: float) -> str:
        """Write a difference of scores, with its sign."""
        return fixed_digits(self.factor * difference, self.digits, sign=True)


def units(result: Result) -> Unit:
    """Return the unit of all scores that were measured."""
    scores = [result["base"]["score"]]
    for run in _runs(result):
        scores += [row["score"] for row in run["curve"]]
    return unit_of(scores)


def unit_of(scores: Sequence[float]) -> Unit:
    """Return the unit of scores: percent where all lie in [0, 1]."""
    if all(0 <= score <= 1 for score in scores):
        return Unit(100.0, 1, " %")
    return Unit(1.0, 3, "")


def _short(result: Result) -> dict[str, str]:
    """Return the short name of every config by its whole one."""
    return labels([config["name"] for config in result["configs"]])


def comparison_table(result: Result) -> list[list[str]]:
    """Return the rows of the main table as texts: the head, the configs best first, the base
    model."""
    unit, short = units(result), _short(result)
    score = f"{result['settings']['score']}{unit.name}"
    head, base = ["method", "lr", "seeds"], ["base model", "", ""]
    for budget in judged_at(result):
        head += [f"{score} at {LETTERS[budget]}", "gain [95 %]", "p"]
        base += [unit.text(result["base"]["score"]), "", ""]
    head += ["iterations (a)", "seconds (a)", "NFE (b)"][: 1 + len(judged_at(result))]
    rows = [head]
    for config in result["configs"]:
        rows.append(_row(config, short[config["name"]], unit))
    return [*rows, base + [""] * (len(head) - len(base))]


def _row(config: Result, name: str, unit: Unit) -> list[str]:
    # what became of the seeds
    at, failed, seeds = config["summary"], failed_runs(config), str(len(config["seeds"]))
    if failed:
        seeds += f", {failed} failed"
    collapsed = max((found["collapsed"] for found in at.values() if found), default=0)
    if collapsed:
        seeds += f", collapsed: {collapsed} of {len(config['seeds'])}"
    # score, gain and p at each budget, then what was used up until then
    cells = [name, f"{config['lr']:.3g}", seeds]
    for found in at.values():
        if found is None:
            cells += [DASH, DASH, DASH]
        else:
            cells += [_score(found, unit), _gain(found, unit), _or_dash(found["p"], _p_text)]
    a = at["nfe"]
    cells += [f"{a['iteration']:.0f}", f"{a['seconds']:.0f}"] if a else [DASH, DASH]
    if "seconds" in at:
        cells.append(f"{at['seconds']['nfe']:.0f}" if at["seconds"] else DASH)
    return cells


def task_table(result: Result, budget: str) -> list[list[str]]:
    """Return the scores per task at a budget as texts: the head, the configs best first, the base
    model."""
    unit, short, base = units(result), _short(result), result["base"]["tasks"]
    rows = [["method", *(task.replace("_", " ") for task in base)]]
    for config in result["configs"]:
        found, cells = config["summary"][budget], [DASH] * len(base)
        if found is not None:
            few = found["needs_seeds"] is not None
            cells = [_spread(found["tasks"][task], unit, few) for task in base]
        rows.append([short[config["name"]], *cells])
    return [*rows, ["base model", *map(unit.text, base.values())]]


def _or_dash(value: float | None, text: Callable[[float], str]) -> str:
    """Write a value, or a dash where there is none."""
    if value is None:
        return DASH
    return text(value)


def _p_text(p: float) -> str:
    if p < 0.0005:
        return "< 0.001"
    return f"{p:.3f}"


def _score(found: Result, unit: Unit) -> str:
    """Set a config's mean with its interval, or with the seeds that one would take."""
    if found["needs_seeds"] is None:
        return _spread(found, unit)
    return f"{unit.text(found['mean'])} (± from {found['needs_seeds']} seeds)"


def _spread(found: Result, unit: Unit, few: bool = False) -> str:
    """Set a mean with the half width of its interval, without one of too `few` seeds."""
    mean, (low, high) = unit.text(found["mean"]), found["interval"]
    if low is None or few:
        return mean
    return f"{mean} ± {unit.text((high - low) / 2)}"


def _gain(found: Result, unit: Unit) -> str:
    """Set the gain over base with its interval; a star where that excludes zero and no run
    failed."""
    mean, low, high = found["gain"]
    if low is None or found["needs_seeds"] is not None:
        return unit.gain(mean)
    said = f"{unit.gain(mean)} [{unit.gain(low)}, {unit.gain(high)}]"
    if found["beats_base"]:
        return f"{said}*"
    return said


def notes(result: Result) -> list[str]:
    """Say in sentences how the table is to be read, with the numbers of this comparison."""
    # the numbers that the sentences need
    b, s, base = result["budgets"], result["settings"], result["base"]
    over = [f"{_overshoot(result, b):.1%} at {LETTERS[b]}" for b in judged_at(result)]
    times, each = "", "measured"
    if b["seconds"]:
        times, each = f", (b) after {b['seconds']:g} seconds of training", "each measured"
    unit = units(result)
    score, low, high = map(unit.text, (base["score"], *base["interval"]))
    # budgets and intervals first, then what only some comparisons have: search, machines
    lines = [
        f"(a) after {b['nfe']:g} network evaluations{times} (evaluation and checkpoints not "
        f"counted), {each} at the end of the iteration that passed the budget; largest overshoot "
        f"{' and '.join(over)}.",
        f"± and brackets: 95 % intervals of the mean and of its gain over the base model, "
        f"{_errors(result)}; p: of no gain; a star: the interval lies above zero and no run "
        "failed.",
        f"The base model reaches {score}{unit.name} ({low} to {high} over its own "
        f"{base['images']} images); all are judged on the same prompts from the same noise.",
        _search_note(s["search"], result),
        *_machine_note(result),
    ]
    for budget in judged_at(result):
        lines += [*_spread_notes(result, budget), _power_note(result, budget)]
    return [*lines, *_few_notes(result), *_failures(result)]


def _errors(result: Result) -> str:
    """Say which error model intervals and pairs have."""
    found, whose = result["pairs"]["nfe"], "of each config's own"
    if found["pooled"]:
        whose = "pooled over all configs"
    if found["error"] == "seeds":
        return f"Student's over seeds, their variance {whose}; they say nothing of other prompts"
    return f"over seeds and prompts, seeds {whose}, prompts paired"


def _spread_notes(result: Result, budget: str) -> list[str]:
    """Say why spreads over seeds are not pooled, and which runs ended below the base model."""
    # the spread of each config, and those with runs that fell
    found, unit, short = result["pairs"][budget], units(result), _short(result)
    lines, spreads, fallen = [], [], []
    for config in result["configs"]:
        end = config["summary"][budget]
        if end is None:
            continue
        if end["spread"] is not None:
            spreads.append(end["spread"])
        if end["collapsed"]:
            fallen.append(f"{short[config['name']]} {end['collapsed']} of {end['seeds']}")
    # what there is to say of them
    if not found["pooled"]:
        lines.append(
            f"The spreads over seeds at {LETTERS[budget]}, {unit.text(min(spreads))} to "
            f"{unit.text(max(spreads))}, are not those of one (Bartlett's test, "
            f"p {_p_text(found['equal_spreads'])}): each config has the interval of its own."
        )
    if fallen:
        lines.append(
            f"Collapsed at {LETTERS[budget]}, ended below the base model by more than chance of "
            f"the prompts: {', '.join(fallen)}."
        )
    return lines


def _few_notes(result: Result) -> list[str]:
    """Say of which configs an interval would tell nothing, and what it would take."""
    few, short = [], _short(result)
    for config in result["configs"]:
        ends = filter(None, config["summary"].values())
        if any(end["needs_seeds"] is not None for end in ends):
            few.append(short[config["name"]])
    if not few:
        return []
    return [
        f"Too few seeds for an interval that tells something: {', '.join(few)}; the number beside "
        "the score is how many of each config would give one, by the spread seen here."
    ]


def _machine_note(result: Result) -> list[str]:
    count = len(result.get("environments", []))
    if count < 2:
        return []
    return [f"The runs began in {count} environments, see the result file."]


def _overshoot(result: Result, budget: str) -> float:
    limit = result["budgets"][budget]
    rows = [run["at"][budget] for run in _runs(result) if run["at"][budget]]
    return max((row[budget] / limit - 1 for row in rows), default=0.0)


def _search_note(search: Result | None, result: Result) -> str:
    tuned = sum(config["search"] is not None for config in result["configs"])
    if search is None:
        return "Learning rates are the configs' own, or those of `--set`."
    factors = ", ".join(f"{factor:g}" for factor in search["factors"])
    score = result["settings"]["score"]
    by = f"the mean training {score} of the last quarter; no held-out image was used"
    if search["prompts"]:
        by = f"the {score} of {search['prompts']} at its end; the prompts above had no say"
    return (
        f"Learning rates of {tuned} of {len(result['configs'])} configs: the best of the config's "
        f"own times {factors}, each tried for {search['nfe']:g} network evaluations with seed "
        f"{search['seed']}, by {by}."
    )


def _power_note(result: Result, budget: str) -> str:
    found, unit = result["pairs"][budget], units(result)
    if not found["tests"]:
        return f"Pairs at {LETTERS[budget]}: no test without two configs of two seeds."
    spread = least = ""
    if found["pooled"]:
        spread = f", the spread over seeds {unit.text(found['spread'])}"
    if found["detectable"] is not None:
        least = unit.text(found["detectable"])
    return (
        f"Pairs at {LETTERS[budget]}: {found['significant']} of {found['tests']} differ (the same "
        f"error model{spread}; Holm's correction, {LEVEL:g}). A pair has to lie about "
        f"{least} apart to be told apart in four of five cases. No difference found is not "
        "the same as none."
    )


def verdict(result: Result, budget: str) -> list[str]:
    """Say in sentences which configs are better than the base model, and which pairs differ."""
    unit, short = units(result), _short(result)
    groups: dict[str, list[str]] = {"better": [], "worse": [], "not told apart": []}
    for config in result["configs"]:
        found = config["summary"][budget]
        if found is None or found["p"] is None:
            continue
        gain, _, high = found["gain"]
        kind = "not told apart"
        if found["beats_base"]:
            kind = "better"
        elif high is not None and high < 0:
            kind = "worse"
        said = unit.gain(gain)
        if found["failed"]:
            said += f", {found['failed']} failed"
        groups[kind].append(f"{short[config['name']]} ({said})")
    parts = [f"{kind}: {', '.join(some)}" for kind, some in groups.items() if some]
    lines = []
    if parts:
        lines.append(f"Against the base model at {LETTERS[budget]}: {'; '.join(parts)}.")
    return lines + _pair_verdict(result["pairs"][budget], short, budget)


def _pair_verdict(found: Result, short: dict[str, str], budget: str) -> list[str]:
    """Say of each config which ones it is better than, by p after Holm's correction."""
    lines = []
    for i, name in enumerate(found["names"]):
        beaten = []
        for j, other in enumerate(found["names"]):
            p = found["p_holm"][i][j]
            if p is not None and p < LEVEL and found["difference"][i][j] > 0:
                beaten.append(f"{short[other]} (p {_p_text(p)})")
        if beaten:
            lines.append(f"{short[name]} is better at {LETTERS[budget]} than {', '.join(beaten)}.")
    if found["tests"] and not lines:
        lines.append(f"No two configs can be told apart at {LETTERS[budget]}.")
    return lines


def power_before(names: Sequence[str], seeds: int, result: Result) -> list[str]:
    """Say before anything runs how far apart two of the configs have to lie to be told apart in
    four of five cases, and how many seeds half of that takes.

    In spreads over seeds, and in scores where the result holds some by now.
    """
    configs = len(names)
    if seeds < 2:
        return [
            "one seed of each config has no interval and no test; give two or more with --seeds"
        ]
    apart, what = told_apart(configs, seeds), "a config and the base model have to"
    if configs > 1:
        what = f"two of {configs} configs have to"
    said = f"with {seeds} seeds {what} lie {apart:.1f} spreads over seeds apart"
    known = result.get("pairs", {}).get("nfe", {}).get("spread")
    if known is not None:
        unit = units(result)
        points = unit.text(apart * known)
        if unit.name:
            points += " points"
        said += f" ({points} by the runs that are there)"
    lines = [f"to be told apart in four of five cases, {said}"]
    more = seeds_needed(apart / 2, configs)
    if more:
        lines.append(f"half of that takes {more} seeds of each config")
    return lines


def _failures(result: Result) -> list[str]:
    lines = []
    for config in result["configs"]:
        for run in config["seeds"]:
            if run["failed"] is not None:
                lines.append(
                    f"Failed: {config['name']}, seed {run['seed']}, after {run['iterations']} "
                    f"iterations: {run['failed']}"
                )
    return lines


def _runs(result: Result) -> list[Result]:
    """Return the runs of all configs."""
    return list(chain.from_iterable(config["seeds"] for config in result["configs"]))


def aggregate_table(result: Result, budget: str) -> list[list[str]]:
    """Return interquartile means over seeds and tasks as texts, and how probably a config beats
    the others on a task: the mean over them, and against the first of the table."""
    found, unit, short = result["pairs"][budget], units(result), _short(result)
    rows = [["method", "IQM [95 %]", "P(better than another)", "P(better than the first)"]]
    for config in result["configs"]:
        if config["summary"][budget] is None:
            continue
        iqm = config["summary"][budget]["iqm"]
        score, (low, high) = unit.text(iqm["mean"]), iqm["interval"]
        if low is not None:
            score += f" [{unit.text(low)}, {unit.text(high)}]"
        # its row among the pairs, without itself
        i = found["names"].index(config["name"])
        better = found["improvement"][i]
        mean = first = DASH
        others = better[:i] + better[i + 1 :]
        if others:
            mean = f"{sum(others) / len(others):.2f}"
        if i > 0:
            first = f"{better[0]:.2f}"
        rows.append([short[config["name"]], score, mean, first])
    return rows


def pair_table(result: Result, budget: str) -> list[list[str]]:
    """Return the matrix of pairs as texts: p after Holm above the diagonal, row minus column
    below."""
    found, unit = result["pairs"][budget], units(result)
    count, short = len(found["names"]), labels(found["names"])
    rows = [["", *map(str, range(1, count + 1))]]
    for i, name in enumerate(found["names"]):
        below = map(unit.gain, found["difference"][i][:i])
        above = [_or_dash(p, _p_starred) for p in found["p_holm"][i][i + 1 :]]
        rows.append([f"{i + 1} {short[name]}", *below, "", *above])
    return rows


def _p_starred(p: float) -> str:
    if p < LEVEL:
        return f"{p:.3f}*"
    return f"{p:.3f}"


def terminal(result: Result, *, width: int | None = None) -> str:
    """Return what is printed at the end, for `width` columns: the main table, the tasks and pairs
    at (a), the verdict, and how to read them."""
    parts = [text_table(comparison_table(result), width=width)]
    parts.append("per task at (a)\n" + text_table(task_table(result, "nfe"), width=width))
    if result["pairs"]["nfe"]["tests"]:
        table = text_table(pair_table(result, "nfe"), width=width)
        parts.append("pairs at (a): p after Holm's correction, and row minus column\n" + table)
    said = []
    for budget in judged_at(result):
        said += verdict(result, budget)
    if said:
        parts.append("\n".join(said))
    return "\n\n".join([*parts, "\n".join(notes(result))])


def markdown(result: Result, images: Sequence[str] = ()) -> str:
    """Return the whole report as Markdown; `images` are paths as they stand beside it."""
    # the main table and how to read it, then more detail at each budget
    parts = [
        "# Comparison",
        markdown_table(comparison_table(result)),
        "\n".join(f"- {line}" for line in notes(result)),
    ]
    for budget in judged_at(result):
        said = verdict(result, budget)
        if said:
            lines = "\n".join(f"- {line}" for line in said)
            parts.append(f"## Verdict at {LETTERS[budget]}\n\n{lines}")
    over = "interquartile mean, probability of improvement"
    pairs = "p after Holm's correction above the diagonal, row minus column below it"
    for title, table in (
        ("Per task at {}", task_table),
        (f"Over tasks at {{}}: {over}", aggregate_table),
        (f"Pairs at {{}}: {pairs}", pair_table),
    ):
        for budget in judged_at(result):
            # pairs only where there are several configs to compare
            if table is not pair_table or result["pairs"][budget]["tests"]:
                parts.append(f"## {title.format(LETTERS[budget])}")
                parts.append(markdown_table(table(result, budget)))
    if images:
        parts += ["## Figures", *(f"![{path}]({path})" for path in images)]
    return "\n\n".join(parts) + "\n"


OWN, BEST, OTHER = PALETTE[0], PALETTE[1], "#d4d4d4"
DASHED = (0, (4, 3))
COUNTED = {"nfe": "network evaluations", "seconds": "seconds of training"}  # by a budget


def names(result: Result) -> dict[str, str]:
    """Return the configs' short names, with the number of runs that failed."""
    found = _short(result)
    for config in result["configs"]:
        failed = failed_runs(config)
        if failed:
            found[config["name"]] += f" ({failed} failed)"
    return found


@styled
def gains_figure(result: Result) -> Figure:
    """Draw the gain over the base model at each budget: each seed a dot, mean and 95 % interval
    over seeds."""
    configs, budgets, unit = result["configs"], judged_at(result), units(result)
    figure = Figure(figsize=(9.2, 1.3 + 0.36 * len(configs)), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharex=True, sharey=True, squeeze=False)[0]
    for axes, budget in zip(panels, budgets, strict=True):
        grid_along(axes, "x")
        axes.axvline(0, color=INK, linewidth=0.9)
        for row, config in enumerate(configs):
            _gain_row(axes, row, config, result, budget)
        limit = f"{result['budgets'][budget]:,.6g} {COUNTED[budget]}"
        axes.set_title(f"{LETTERS[budget]} after {limit}")
        gain = f"gain in {result['settings']['score']} score"
        if unit.name:
            gain += ", percentage points"
        axes.set_xlabel(gain)
    panels[0].set_yticks(range(len(configs)), list(names(result).values()), color=INK)
    panels[0].set_ylim(len(configs) - 0.4, -0.6)
    figure.suptitle(
        "Gain over the base model. Dots: seeds; bars: 95 % interval of their mean; filled: above 0",
        fontsize=8,
        color=INK,
    )
    return figure


def _gain_row(axes: Axes, row: int, config: Result, result: Result, budget: str) -> None:
    found, factor, base = config["summary"][budget], units(result).factor, result["base"]["score"]
    if found is None:
        axes.text(0, row, "no run got here", fontsize=7, color=BEST, va="center")
        return
    # the seeds
    for run in config["seeds"]:
        if run["at"][budget]:
            gain = factor * (run["at"][budget]["score"] - base)
            axes.plot(gain, row + 0.27, "o", color=OWN, alpha=0.45, markersize=3.4)
    # their mean and its interval, where there is one
    mean, low, high = (math.nan if value is None else factor * value for value in found["gain"])
    axes.plot([low, high], [row, row], color=OWN, linewidth=1.6, zorder=3)
    face = "white"
    if found["beats_base"]:
        face = OWN
    axes.plot(mean, row, "D", color=OWN, markerfacecolor=face, markersize=5, zorder=4)


@styled
def accuracy_figure(result: Result, x: str) -> Figure:
    """Draw held-out scores against `x` (NFE or seconds), one small panel per config over
    all others.

    The line is the mean over seeds at each mark, the band their range; axes are shared.
    """
    configs, unit, shown = result["configs"], units(result), names(result)
    curves = {config["name"]: mean_curve(config, result["base"], x) for config in configs}
    colors = dict.fromkeys(curves, OTHER) | {configs[0]["name"]: BEST}
    columns = min(4, len(configs))
    rows = -(-len(configs) // columns)
    size = (0.95 + 2.35 * max(columns, 2), 1.2 + 1.75 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, config in zip(panels, configs, strict=False):
        grid_along(axes)
        axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        base = unit.factor * result["base"]["score"]
        axes.axhline(base, color=INK, linewidth=0.8, linestyle=DASHED)
        axes.axvline(result["budgets"][x], color=EDGE, linewidth=0.8, linestyle=":")
        # the others, the best of them in a colour of its own
        for name, some in curves.items():
            if name != config["name"]:
                means = [unit.factor * point.mean for point in some]
                axes.plot([point.x for point in some], means, color=colors[name], linewidth=0.9)
        # its own
        own = curves[config["name"]]
        at = [point.x for point in own]
        low = [unit.factor * point.low for point in own]
        high = [unit.factor * point.high for point in own]
        means = [unit.factor * point.mean for point in own]
        axes.fill_between(at, low, high, color=OWN, alpha=0.22, linewidth=0)
        axes.plot(at, means, color=OWN, marker="o", markersize=3)
        # its name, and the score at the budget
        axes.set_title(shown[config["name"]])
        if config["summary"][x]:
            axes.set_title(unit.text(config["summary"][x]["mean"]), loc="right", color=OWN)
    for axes in panels[len(configs) :]:
        axes.remove()
    figure.supxlabel(COUNTED[x], fontsize=9)
    figure.supylabel(f"held-out {result['settings']['score']} score{unit.name}", fontsize=9)
    figure.suptitle(
        "Blue: mean and range of seeds; orange: the best config; dashed: the base model; dotted: "
        "the budget",
        fontsize=8,
        color=INK,
    )
    return figure
