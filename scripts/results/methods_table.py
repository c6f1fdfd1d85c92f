"""The table of all methods on equal terms, worked out from assets/results/methods.json.

`tables.py` writes with it docs/results.md, and the line of the head comment of configs/shapes that
says where a config's result is. `methods_figures.py` and `claims.py` show the same rows, `gains.py`
a line on each method's page, `method_docs.py` a column of docs/methods.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from figures import between, fixed, percent, points, wrapped
from methods import FILE, LOOKS, NFE, ROOT, SETTINGS, read

from flowrl.core.tables import markdown_table
from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.compare.summary import ErrorModel, error_model, holm, unpacked

PAGE = ROOT / "docs" / "results.md"
GUIDED = "guidance 3.5, 20 steps"  # the alternative that lines of method pages name
STEPS = next(int(one.partition("=")[2]) for one in SETTINGS if one.startswith("eval.steps="))
RISES = (0.05, 0.1)  # of right training images, to which network evaluations are told
FEWEST = 3  # points of a curve that make a line
UNMEASURED = re.compile(r"^(# result +)not measured( yet)?$", re.MULTILINE)
Result = dict[str, Any]


# ----------------------------------------------------------------------------------------- the rows


@cache
def found() -> tuple[Result, list[Result]]:
    """Return the result file and its rows; empty where nothing was trained yet."""
    if not FILE.exists():
        return {}, []
    result = read()
    return result, rows(result)


def by_config() -> dict[str, Result]:
    """Return the row of each config that has one."""
    return {row["config"]: row for row in found()[1]}


def model_of(result: Result) -> ErrorModel:
    """Return the one error model of all rows."""
    return error_model(result["configs"], result["base"], "nfe")


def rows(result: Result) -> list[Result]:
    """Work out every row from the outcomes, best first."""
    entries = {entry["file"]: entry for entry in result["configs"]}
    found = gains(result)
    for row in found:
        entry = entries[row["config"]]
        own = entry["search"]["own_lr"] if entry["search"] else entry["lr"]
        row |= {"lr": entry["lr"], "factor": entry["lr"] / own}
        row["looks"] = looks(result, entry["file"])
        row |= {"moves": moves(entry), "per_image": per_image(entry), "variety": variety(entry)}
        row["to"] = [evaluations_to(entry, rise) for rise in RISES]
        row["flowrl"] = _version(result, ended_runs(entry))
    return found


def gains(result: Result) -> list[Result]:
    """Work out what the configs of a comparison gained over its base model from the outcomes:
    score, gain, half its interval, p and Holm's p, seeds that failed or ended below, best first."""
    model = error_model(result["configs"], result["base"], "nfe")
    made = []
    for entry in result["configs"]:
        name = entry["name"]
        if name not in model.groups:
            continue
        # on the prompts of the comparison
        gain, error = model.gain(name)
        scores = model.groups[name] @ model.weights(None)
        base = float(model.base @ model.weights(None))
        row = {"config": entry["file"], "right": float(scores.mean()), "gain": gain}
        row |= {"half": float(error.half()), "p": error.p(gain)}
        # of the runs
        ended = ended_runs(entry)
        row |= {"seeds": len(ended), "failed": len(entry["seeds"]) - len(ended)}
        row["below"] = int((scores < base - 1e-9).sum())
        made.append(row)
    for row, p in zip(made, holm([row["p"] for row in made]), strict=True):
        row["holm"] = p
    return sorted(made, key=lambda row: -row["gain"])


def ended_runs(entry: Mapping[str, Any]) -> list[Result]:
    """Return the seeds of a config that reached the budget."""
    return [run for run in entry["seeds"] if run["at"]["nfe"]]


def looks(result: Mapping[str, Any], name: str) -> int:
    """Return how often a config was judged."""
    return int(result.get(LOOKS, {}).get(name, 1))


def _version(result: Result, runs: list[Result]) -> str:
    """Return the newest version of flowrl that trained one of the runs."""
    machines = result.get("environments", [])
    return max((machines[run["environment"]]["flowrl"] for run in runs), default="")


def moves(entry: Mapping[str, Any]) -> bool:
    """Say whether a plan's noise moves to other steps while it trains: then images get better and
    more alike by the move alone."""
    plan = entry["config"]["plan"]
    return bool((plan.get("every") and plan.get("stride", 1)) or plan.get("block"))


def per_image(entry: Mapping[str, Any]) -> float:
    """Return the network evaluations of a run for each image that is rewarded, those of training
    included."""
    train = entry["config"]["train"]
    images = train["prompts"] * train["group"]
    ends = [run["at"]["nfe"] for run in ended_runs(entry)]
    return float(np.mean([end["nfe"] / end["iteration"] / images for end in ends]))


def curve(run: Mapping[str, Any], key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return what a run's images had of something, against the evaluations used up."""
    trace = run["trajectory"]
    pairs = [pair for pair in zip(trace["nfe"], trace[key], strict=True) if None not in pair]
    x, y = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(x, float), np.array(y, float)


def slopes(entry: Mapping[str, Any]) -> list[float]:
    """Return for each seed the slope of a straight line through the right share of its training
    images, by evaluation: least squares, every point of the curve alike. None where noise moves."""
    found = []
    for run in [] if moves(entry) else ended_runs(entry):
        x, y = curve(run, "accuracy")
        if len(x) >= FEWEST:
            found.append(float(np.polyfit(x, y, 1)[0]))
    return found


def evaluations_to(entry: Mapping[str, Any], rise: float) -> float | None:
    """Return the evaluations in which the mean of the seeds' lines rises so far; None where that
    takes more than the budget."""
    each = slopes(entry)
    slope = sum(each) / len(each) if each else 0.0
    return rise / slope if slope * NFE >= rise else None


def variety(entry: Mapping[str, Any]) -> float | None:
    """Return how different the images of a prompt are in the last quarter of the runs, as a share
    of that in the first tenth; None where noise moves or nothing was measured."""
    shares = []
    for run in [] if moves(entry) else ended_runs(entry):
        _, spread = curve(run, "diversity")
        if len(spread) >= FEWEST:
            first = spread[: max(1, len(spread) // 10)].mean()
            shares.append(float(spread[-max(1, len(spread) // 4) :].mean() / first))
    return sum(shares) / len(shares) if shares else None


def untrained(result: Result) -> list[Result]:
    """Work out the rows of the base model and its alternatives: score, interval, NFE per image."""
    base = result["base"]
    made = []
    every = {"as it is": {"nfe_per_image": STEPS, "outcomes": base["outcomes"]}}
    for title, one in {**every, **result.get("alternatives", {})}.items():
        right, interval = share_of(base, one["outcomes"])
        row = {"title": title, "right": right, "interval": interval}
        made.append({**row, "nfe_per_image": one["nfe_per_image"]})
    return made


def share_of(prompts: Mapping[str, Any], outcomes: str) -> tuple[float, list[float | None]]:
    """Return the share of right images of one model, the mean over tasks, and its 95 % interval
    over scenes; `prompts` has the tag and the scene of each prompt."""
    places = list(zip(prompts["tags"], prompts["scenes"], strict=True))
    columns = list(dict.fromkeys(places))
    scores: dict[tuple[str, str], list[float]] = {}
    for place, some in zip(places, unpacked(outcomes), strict=True):
        scores.setdefault(place, []).extend(some)
    values = np.array([[np.mean(scores[place]) for place in columns]])
    whole = crossed(values, [tag for tag, _ in columns])
    return float(whole["mean"]), list(whole["interval"])


# ------------------------------------------------------------------------------------ for the docs

HEAD = ["config", "gain", "95 % interval", "Holm's p", "right", "to +5", "to +10", "NFE / image"]
HEAD += ["variety", "rate", "below"]


def table(some: Iterable[Result]) -> str:
    """Draw the rows of the trained configs."""
    lines = [HEAD]
    for row in some:
        name = f"`{row['config']}`" + (f" ({row['looks']} looks)" if row["looks"] > 1 else "")
        cells = [name, points(row["gain"]) + star(row), span(row), p_text(row["holm"])]
        cells += [percent(row["right"]), *(_thousands(row, count) for count in row["to"])]
        kept = "–" if row["variety"] is None else f"{fixed(100 * row['variety'], 0)} %"
        cells += [fixed(row["per_image"]), "moves" if row["moves"] else kept]
        cells += [f"{row['factor']:g} x"]
        lines.append([*cells, f"{row['below'] + row['failed']} of {row['seeds'] + row['failed']}"])
    return markdown_table(lines)


def broken(result: Result, some: Iterable[Result]) -> str:
    """Name the configs that have no row since none of their runs reached the budget."""
    rows_of = {row["config"] for row in some}
    names = [f"`{entry['file']}`" for entry in result["configs"] if entry["file"] not in rows_of]
    return wrapped(f"Broke in every seed: {', '.join(names)}.") if names else ""


def star(row: Mapping[str, Any]) -> str:
    """Mark a gain that all of the table's tests leave standing; a run that failed may have reached
    anything."""
    return "*" if row["holm"] < 0.05 and row["gain"] > 0 and not row["failed"] else ""


def span(row: Mapping[str, Any]) -> str:
    """Write a gain's interval in points."""
    if not np.isfinite(row["half"]):
        return "–"
    return f"{points(row['gain'] - row['half'], '')} to {points(row['gain'] + row['half'], '')}"


def p_text(p: float) -> str:
    """Write a p-value."""
    return "–" if not np.isfinite(p) else "< 0.001" if p < 0.001 else fixed(p, 3)


def _thousands(row: Mapping[str, Any], count: float | None) -> str:
    """Write evaluations in thousands."""
    if row["moves"]:
        return "moves"
    return "–" if count is None else f"{fixed(count / 1000, 0)}k"


def base_table(some: Iterable[Result]) -> str:
    """Draw the rows of the base model."""
    lines = [["base model", "right", "95 % interval", "NFE per image"]]
    for row in some:
        ends = interval_text(row["interval"])
        lines.append([row["title"], percent(row["right"]), ends, str(row["nfe_per_image"])])
    return markdown_table(lines)


def interval_text(interval: Sequence[float | None]) -> str:
    """Write an interval of a share in percent."""
    ends = [points(end, "") for end in interval if end is not None]
    return " to ".join(ends) if len(ends) == len(interval) else "–"


def line(row: Mapping[str, Any], result: Result) -> str:
    """Say on a method's page what a config gains; seeds and NFE are those of all."""
    text = f"`{row['config']}`: {points(row['gain'])} points ({span(row)}) on equal terms"
    guided = [one for one in untrained(result) if one["title"] == GUIDED]
    if guided:
        text += f"; {points(row['right'] - guided[0]['right'])} against guidance"
    return wrapped(f"{text}.")


def cell(row: Mapping[str, Any]) -> str:
    """Say in a cell of a table what a config gains."""
    return f"{points(row['gain'])}{star(row)} ({span(row)})"


INTRODUCTION = """## All on equal terms

Start with a method that has a star, and first see what guidance and best of n give the base model
without training, in the table below. Each config tried its own learning rate times 0.5, 1 and 2 for
20,000 network evaluations on validation prompts, then trained three seeds for 60,000 (a trained
state counts three), and was judged once, at its end, on scenes that no other list has, most of them
harder. `python scripts/results/methods.py` trains what is missing.

- *gain*: points of right images over the base model, the mean over eight tasks, with a 95 %
  interval over seeds and scenes. A star: above 0 after Holm's correction over all rows.
- *to +5*, *to +10*: thousands of network evaluations until the right share of the training images
  (easier prompts) has risen by so many points, on a straight line; –: not within 60,000.
- *NFE / image*: network evaluations of the training for each rewarded image. A trained model draws
  an image in 10, as the base model does.
- *variety*: how different the images of a prompt are at the end, as a share of the beginning.
  *Moves*: the method's noise moves to other steps meanwhile, which alone changes training images.
- *rate*: the factor that was chosen. *below*: seeds that ended below the base model, or broke."""
BASE_HEAD = """The base model without training, on the same prompts, in 10 steps unless the row says
otherwise; best of n takes the image that the checker likes best, as a reward would:"""


def page(text: str) -> str:
    """Write the section of docs/results.md; nothing where no config was trained yet."""
    result, some = found()
    parts = []
    if some:
        parts = [INTRODUCTION, table(some), broken(result, some)]
        parts += [BASE_HEAD, base_table(untrained(result))]
    parts = [part for part in parts if part]
    return between(text, "methods: table", "methods: end", parts)


def comment(text: str) -> str:
    """Say in the head of a config that has a row where its result is."""
    return UNMEASURED.sub(r"\1docs/results.md", text)


def targets() -> list[tuple[Path, Any]]:
    """Return the files that this module fills."""
    made: list[tuple[Path, Any]] = [(PAGE, page)]
    for name in by_config():
        made.append((ROOT / "configs" / f"{name}.yaml", comment))
    return made
