"""Set a comparison as tables: aligned text for the terminal, Markdown for the repository. Pure
functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowrl.core.tables import fixed_digits, markdown_table, text_table
from flowrl.runs.compare.summary import LETTERS, LEVEL, Result, judged_at, labels

DASH = "–"


def units(result: Result) -> tuple[float, int, str]:
    """Return factor, digits and unit of all scores that were measured."""
    scores = [result["base"]["score"]]
    for run in _runs(result):
        scores += [row["score"] for row in run["curve"]]
    return unit_of(scores)


def unit_of(scores: Sequence[float]) -> tuple[float, int, str]:
    """Return factor, digits and unit of scores: percent where all lie in [0, 1]."""
    return (100.0, 1, " %") if all(0 <= score <= 1 for score in scores) else (1.0, 3, "")


def comparison_table(result: Result) -> list[list[str]]:
    """Return the rows of the main table as texts: the head, the configs best first, the base
    model."""
    score = f"{result['settings']['score']}{units(result)[2]}"
    head, base = ["method", "lr", "seeds"], ["base model", "", ""]
    for budget in judged_at(result):
        head += [f"{score} at {LETTERS[budget]}", "gain [95 %]"]
        base += [_number(result)(result["base"]["score"]), ""]
    head += ["iterations (a)", "seconds (a)", "NFE (b)"][: 1 + len(judged_at(result))]
    short = labels([config["name"] for config in result["configs"]])
    rows = [_row(result, config, short[config["name"]]) for config in result["configs"]]
    return [head, *rows, base + [""] * (len(head) - len(base))]


def _row(result: Result, config: Result, name: str) -> list[str]:
    number, at = _number(result), config["summary"]
    failed = sum(run["failed"] is not None for run in config["seeds"])
    seeds = f"{len(config['seeds'])}" + (f", {failed} failed" if failed else "")
    cells = [name, f"{config['lr']:.3g}", seeds]
    for budget in judged_at(result):
        cells += [_spread(at[budget], number), _gain(at[budget], result)]
    a = at["nfe"]
    cells += [f"{a['iteration']:.0f}", f"{a['seconds']:.0f}"] if a else [DASH, DASH]
    if "seconds" in at:
        cells.append(f"{at['seconds']['nfe']:.0f}" if at["seconds"] else DASH)
    return cells


def task_table(result: Result, budget: str) -> list[list[str]]:
    """Return the scores per task at a budget as texts: the head, the configs best first, the base
    model."""
    tasks, number = list(result["base"]["tasks"]), _number(result)
    short = labels([config["name"] for config in result["configs"]])
    rows = [["method", *(task.replace("_", " ") for task in tasks)]]
    for config in result["configs"]:
        found = config["summary"][budget]
        cells = [_spread(found["tasks"][task], number) if found else DASH for task in tasks]
        rows.append([short[config["name"]], *cells])
    return [*rows, ["base model", *(number(result["base"]["tasks"][task]) for task in tasks)]]


def _number(result: Result) -> Callable[[float], str]:
    factor, digits, _ = units(result)
    return lambda value: fixed_digits(factor * value, digits)


def _spread(found: Result | None, number: Callable[[float], str]) -> str:
    """Set a mean with the half width of its interval."""
    if found is None:
        return DASH
    low, high = found["interval"]
    return number(found["mean"]) + ("" if low is None else f" ± {number((high - low) / 2)}")


def _gain(found: Result | None, result: Result) -> str:
    """Set the gain over base with its interval; a star where that excludes zero and no run
    failed."""
    if found is None:
        return DASH
    factor, digits, _ = units(result)
    mean, low, high = found["gain"]
    values = (mean, low, high)
    texts = [
        "" if value is None else fixed_digits(factor * value, digits, sign=True) for value in values
    ]
    if low is None:
        return texts[0]
    star = "*" if found["beats_base"] else ""
    return f"{texts[0]} [{texts[1]}, {texts[2]}]{star}"


def notes(result: Result) -> list[str]:
    """Say in sentences how the table is to be read, with the numbers of this comparison."""
    # the numbers that the sentences need
    b, s, base = result["budgets"], result["settings"], result["base"]
    over = [f"{_overshoot(result, b):.1%} at {LETTERS[b]}" for b in judged_at(result)]
    times, each = "", "measured"
    if b["seconds"]:
        times, each = f", (b) after {b['seconds']:g} {clock(result)} of training", "each measured"
    score, low, high = map(_number(result), (base["score"], *base["interval"]))
    # budgets and intervals first, then what only some comparisons have: prices, search, machines
    lines = [
        f"(a) after {b['nfe']:g} network evaluations{times} (evaluation and checkpoints not "
        f"counted), {each} at the end of the iteration that passed the budget; largest overshoot "
        f"{' and '.join(over)}.",
        f"± and brackets: 95 % intervals of the mean and of its gain over the base model, "
        f"{_errors(result)}; a star: it lies above zero and no run failed.",
        f"The base model reaches {score}{units(result)[2]} ({low} to {high} over its own "
        f"{base['images']} images); all are judged on the same prompts from the same noise.",
        *_price_note(result),
        _search_note(s["search"], result),
        *_machine_note(result),
    ]
    lines += [_power_note(result, budget) for budget in judged_at(result)]
    return [*lines, *_failures(result)]


def _errors(result: Result) -> str:
    """Say which error model intervals and pairs have."""
    if result["pairs"]["nfe"]["error"] == "seeds":
        return (
            "Student's over seeds with the variance pooled over all configs; they say nothing of "
            "other prompts"
        )
    return "over seeds and prompts, seeds pooled over all configs, prompts paired"


def clock(result: Result) -> str:
    """Say which seconds were counted."""
    return "seconds" if result["budgets"].get("clock", "wall") == "wall" else "processor seconds"


def _machine_note(result: Result) -> list[str]:
    loads = [run.get("load") for run in _runs(result)]
    known, lines = [load for load in loads if load is not None], []
    if known:
        lines.append(
            f"Processes that wanted a processor when a run began: {min(known):g} to {max(known):g}."
        )
    if len(result.get("environments", [])) > 1:
        lines.append(
            f"The runs began in {len(result['environments'])} environments, see the result file."
        )
    return lines


def _price_note(result: Result) -> list[str]:
    """Say what (a) counts other work as, where that was measured."""
    if result["budgets"].get("counted", "calls") == "calls":
        return []
    prices = [run["prices"] for run in _runs(result)]
    work = {"trained": "a trained state", "decoded": "an image decoded", "scored": "one scored"}
    parts = []
    for key, name in work.items():
        seen = sorted(row[key] for row in prices)
        parts.append(f"{name} {seen[0]:.3g} to {seen[-1]:.3g}")
    return [
        "(a) counts work at its measured cost, in velocities of one latent while sampling: "
        f"{', '.join(parts)}."
    ]


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
    found, (factor, digits, _) = result["pairs"][budget], units(result)
    if not found["tests"]:
        return f"Pairs at {LETTERS[budget]}: no test without two configs of two seeds."
    least = "" if found["detectable"] is None else f"{factor * found['detectable']:.{digits}f}"
    return (
        f"Pairs at {LETTERS[budget]}: {found['significant']} of {found['tests']} differ (the same "
        f"error model, the spread over seeds {factor * found['spread']:.{digits}f}; Holm's "
        f"correction, {LEVEL:g}). A pair has to lie about {least} apart to be told apart in four "
        "of five cases. No difference found is not the same as none."
    )


def _failures(result: Result) -> list[str]:
    lines = []
    for config in result["configs"]:
        for run in [run for run in config["seeds"] if run["failed"] is not None]:
            lines.append(
                f"Failed: {config['name']}, seed {run['seed']}, after {run['iterations']} "
                f"iterations: {run['failed']}"
            )
    return lines


def _runs(result: Result) -> list[Result]:
    """Return the runs of all configs."""
    return [run for config in result["configs"] for run in config["seeds"]]


def aggregate_table(result: Result, budget: str) -> list[list[str]]:
    """Return interquartile means over seeds and tasks as texts, and how probably a config beats
    the others on a task: the mean over them, and against the first of the table."""
    found, number = result["pairs"][budget], _number(result)
    short = labels([config["name"] for config in result["configs"]])
    rows = [["method", "IQM [95 %]", "P(better than another)", "P(better than the first)"]]
    for config in result["configs"]:
        if config["summary"][budget] is None:
            continue
        i, iqm = found["names"].index(config["name"]), config["summary"][budget]["iqm"]
        low, high = iqm["interval"]
        span = "" if low is None else f" [{number(low)}, {number(high)}]"
        others = [p for j, p in enumerate(found["improvement"][i]) if j != i]
        mean = f"{sum(others) / len(others):.2f}" if others else DASH
        first = f"{found['improvement'][i][0]:.2f}" if i else DASH
        rows.append([short[config["name"]], number(iqm["mean"]) + span, mean, first])
    return rows


def pair_table(result: Result, budget: str) -> list[list[str]]:
    """Return the matrix of pairs as texts: p after Holm above the diagonal, row minus column
    below."""
    found, (factor, digits, _) = result["pairs"][budget], units(result)
    short = labels(found["names"])
    rows = [["", *(str(i + 1) for i in range(len(found["names"])))]]
    for i, name in enumerate(found["names"]):
        cells = [_pair(found, i, j, factor, digits) for j in range(len(found["names"]))]
        rows.append([f"{i + 1} {short[name]}", *cells])
    return rows


def _pair(found: dict[str, Any], i: int, j: int, factor: float, digits: int) -> str:
    if i == j:
        return ""
    if j < i:
        return fixed_digits(factor * found["difference"][i][j], digits, sign=True)
    p = found["p_holm"][i][j]
    return DASH if p is None else f"{p:.3f}{'*' if p < LEVEL else ''}"


def terminal(result: Result, *, width: int | None = None) -> str:
    """Return what is printed at the end, for `width` columns: the main table, the tasks at (a), how
    to read them."""
    both = (comparison_table(result), task_table(result, "nfe"))
    tables = [text_table(rows, width=width) for rows in both]
    return "\n\n".join([tables[0], "per task at (a)\n" + tables[1], "\n".join(notes(result))])


def markdown(result: Result, images: Sequence[str] = ()) -> str:
    """Return the whole report as Markdown; `images` are paths as they stand beside it."""
    # the main table and how to read it, then more detail at each budget
    parts = [
        "# Comparison",
        markdown_table(comparison_table(result)),
        "\n".join(f"- {line}" for line in notes(result)),
    ]
    for budget in judged_at(result):
        parts += [f"## Per task at {LETTERS[budget]}", markdown_table(task_table(result, budget))]
    for budget in judged_at(result):
        title = (
            f"## Over tasks at {LETTERS[budget]}: interquartile mean, probability of improvement"
        )
        parts += [title, markdown_table(aggregate_table(result, budget))]
    # pairs only where there are several configs to compare
    for budget in judged_at(result):
        if result["pairs"][budget]["tests"]:
            what = "p after Holm's correction above the diagonal, row minus column below it"
            parts += [
                f"## Pairs at {LETTERS[budget]}: {what}",
                markdown_table(pair_table(result, budget)),
            ]
    parts += ["## Figures", *(f"![{path}]({path})" for path in images)] if images else []
    return "\n\n".join(parts) + "\n"
