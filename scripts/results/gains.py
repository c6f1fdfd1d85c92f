"""What each config gained on shapes: rows of assets/results/gains.json, and where docs show them.

    flowrl compare shapes/slas --seeds 0 1 2 --nfe 64000 --run runs/slas
    flowrl eval shapes/slas --set model.guidance=3.5 eval.steps=20 --json guided.json ...
    python scripts/results/gains.py runs/slas/result.json --guided guided.json

The command adds a row for each config of a comparison, or replaces the one that is there, and what
`again.py` works its interval out from to assets/results/gains-outcomes.json; the evaluation of the
base model with guidance must be of the same prompts and noise. `tables.py` writes docs/results.md
from the rows, and a sentence in docs/methods between `<!-- gain: shapes/NAME -->` and
`<!-- gain: end -->`, or a list where the mark names several configs: of those that were measured.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import methods_table
import numpy as np
from again import OUTCOMES, outcomes_of, read
from figures import between, percent, points, wrapped

from flowrl.core.files import write_json
from flowrl.core.tables import markdown_table
from flowrl.evaluation.crossed_errors import crossed
from flowrl.runs.compare.summary import unpacked

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "assets" / "results" / "gains.json"
PAGE, METHODS = ROOT / "docs" / "results.md", ROOT / "docs" / "methods"
TEST = "the test prompts"
MARK = re.compile(r"<!-- gain: (?!end)([\w/\s]+)\s-->\n.*?<!-- gain: end -->", re.DOTALL)
HEAD = ["config", "gain", "95 % interval", "right images", "against guidance", "NFE"]
LEARNT = {"shapes/mind_v": FILE.parent / "mind_v.json"}
"""Configs whose score is no share of right images -> what scripts/assets/learning.py measured."""

NOT_MEASURED = "Not measured on shapes."
COUNTS = {1: "1 seed", 2: "2 seeds", 3: "3 seeds", 4: "4 seeds", 5: "5 seeds"}
Row = dict[str, Any]


def rows(file: Path = FILE) -> list[Row]:
    """Read all rows, the largest gain first."""
    found = json.loads(file.read_text(encoding="utf-8"))["rows"]
    return sorted(found, key=lambda row: -row["gain"])


# ------------------------------------------------------------------------------ from a comparison


def rows_of(result: Mapping[str, Any], guided: Mapping[str, Any] | None, on: str) -> list[Row]:
    """Read a comparison -> a row for each config that reached its budget of evaluations."""
    made = []
    for entry in result["configs"]:
        end = entry["summary"]["nfe"]
        runs = [run for run in entry["seeds"] if run["failed"] is None]
        commits = sorted({_commit(result, run)["commit"] for run in runs})
        mean, low, high = end["gain"]
        row = {"config": entry["file"], "gain": mean, "low": low, "high": high}
        row |= {"right": end["mean"], "against_guidance": _against(result, entry, guided)}
        row |= {"nfe": result["budgets"]["nfe"], "iterations": end["iteration"]}
        row |= {"seeds": end["seeds"], "on": on, "commits": commits}
        made.append({**row, "version": max(_commit(result, run)["flowrl"] for run in runs)})
    return made


def _commit(result: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, str]:
    return dict(result["environments"][run["environment"]])


def _against(
    result: Mapping[str, Any], entry: Mapping[str, Any], guided: Mapping[str, Any] | None
) -> float | None:
    """Return how far the runs are above the base model with guidance; None where it was not judged
    on the same prompts."""
    if guided is None:
        return None
    tags = result["base"]["tags"]
    left = {task: iter(some) for task, some in guided["by_prompt"].items()}
    alone = np.array([[next(left[tag]) for tag in tags]])
    ends = [seed["at"]["nfe"] for seed in entry["seeds"] if seed["at"]["nfe"]]
    shares = []
    for end in ends:
        shares.append([sum(some) / len(some) for some in unpacked(end["outcomes"])])
    return float(crossed(np.array(shares) - alone, tags)["mean"])


def added(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Put rows in the place of those of the same configs, figures with six digits."""
    made = {row["config"]: row for row in old}
    for row in new:
        made[row["config"]] = {
            key: round(value, 6) if isinstance(value, float) else value
            for key, value in row.items()
        }
    return [made[config] for config in sorted(made)]


# ------------------------------------------------------------------------------------- for the docs


def table(some: Sequence[Row], where: bool = False) -> str:
    """Draw rows; `where` adds the column of what they were judged on."""
    lines = [[*HEAD, "iterations", "seeds", *(["judged on"] * where)]]
    for row in some:
        span = "–" if row["low"] is None else f"{points(row['low'])} to {points(row['high'])}"
        star = "*" if row["low"] is not None and row["low"] > 0 else ""
        over = "–" if row["against_guidance"] is None else points(row["against_guidance"])
        nfe = "–" if row["nfe"] is None else f"{row['nfe']:,.0f}"
        cells = [f"`{row['config']}`", points(row["gain"]) + star, span, percent(row["right"])]
        cells += [over, nfe, f"{row['iterations']:.0f}", str(row["seeds"])]
        lines.append([*cells, *([row["on"]] * where)])
    return markdown_table(lines)


def page(text: str, found: Sequence[Row]) -> str:
    """Fill both tables of docs/results.md: what the table on equal terms has not."""
    left = [row for row in found if row["config"] not in methods_table.by_config()]
    on_test = [row for row in left if row["on"] == TEST]
    others = [row for row in left if row["on"] not in (TEST, "")]
    text = between(text, "gains: table", "gains: end", [table(on_test)])
    return between(text, "gains, others: table", "gains, others: end", [table(others, True)])


def line(config: str, found: Sequence[Row]) -> str:
    """Say what a config gains: one line, or two for a long name.

    docs/results.md has the rest, and says what is compared with what. Rows on equal terms come
    first.
    """
    if config in methods_table.by_config():
        return methods_table.line(methods_table.by_config()[config], methods_table.found()[0])
    if config in LEARNT and LEARNT[config].exists():
        return wrapped(_learnt(config))
    row = next((row for row in found if row["config"] == config and row["on"]), None)
    if row is None:
        return NOT_MEASURED
    facts = [COUNTS[row["seeds"]]]
    facts.append(f"{row['nfe']:,.0f} NFE" if row["nfe"] else f"{row['iterations']:.0f} iterations")
    if row["low"] is not None:
        facts.insert(0, f"{points(row['low'], '')} to {points(row['high'], '')}")
    text = f"`{config}`: {points(row['gain'])} points ({', '.join(facts)})"
    if row["on"] != TEST:
        text += f" on {row['on']}"
    if row["against_guidance"] is not None:
        text += f"; {points(row['against_guidance'])} against guidance"
    return wrapped(f"{text}.")


def _learnt(config: str) -> str:
    """Say what a config gained of its own reward, and what guidance gains without training."""
    one = read(LEARNT[config])
    seeds, name, (low, high) = one["seeds"], one["gain"]["reward"], one["gain"]["interval"]
    facts = f"{points(low, '')} to {points(high, '')}, {COUNTS[len(seeds)]}"
    facts += f", {len(seeds[0]['training'])} iterations"
    before = np.mean([run["before"][name] for run in seeds])
    guided = np.mean([run["guided"][name] for run in seeds])
    return (
        f"`{config}`: {points(one['gain']['mean'])} points of the reward `{name}` ({facts}) on the "
        f"test prompts; the base model has {percent(before)}, with guidance {one['guidance']:g} "
        f"{percent(guided)}."
    )


def method_page(text: str, found: Sequence[Row]) -> str:
    """Fill the lines of a method page; a page without marks stays as it is."""

    def filled(match: re.Match[str]) -> str:
        """Return a mark with its line, or a list of those of several that were measured."""
        lines = [line(config, found) for config in match[1].split()]
        lines = [text for text in lines if text != NOT_MEASURED] or [NOT_MEASURED]
        if len(lines) > 1:
            lines = [wrapped(f"- {' '.join(text.split())}", "  ") for text in lines]
        mark = wrapped(f"<!-- gain: {' '.join(match[1].split())} -->")
        return "\n".join([mark, *lines, "<!-- gain: end -->"])

    return MARK.sub(filled, text)


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List the pages, each with what fills it."""
    found = rows()
    some: list[tuple[Path, Callable[[str], str]]] = [(PAGE, lambda text: page(text, found))]
    for file in sorted(METHODS.glob("*.md")):
        some.append((file, lambda text: method_page(text, found)))
    return some


def main() -> None:
    """Add the rows of a comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="of flowrl compare")
    parser.add_argument("--guided", type=Path, help="flowrl eval of the base model with guidance")
    parser.add_argument("--on", default=TEST, help="what it was judged on")
    args = parser.parse_args()
    guided = json.loads(args.guided.read_text(encoding="utf-8")) if args.guided else None
    result = read(args.result)
    new = rows_of(result, guided, args.on)
    write_json(FILE, {"rows": added(rows(), new)})
    kept, names = read(OUTCOMES), [row["config"] for row in new]
    for other in kept["comparisons"].values():
        other["rows"] = [config for config in other["rows"] if config not in names]
    kept["comparisons"][args.result.parent.name] = outcomes_of(result, names)
    write_json(OUTCOMES, kept)
    print(table(new))


if __name__ == "__main__":
    main()
