"""Write what the comparison measured into method pages, README and configs; `--check` only says what is stale.

    python scripts/measured.py

Reads assets/results/compare-shapes.json; without that file it says that nothing was compared yet. In docs/methods, the
paragraph behind each ``<!-- measured: NAME -->`` is replaced, NAME being a config of configs/shapes; in the README, the
last cell of each row whose first config was compared; in configs/shapes, the line `result` of the header.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from flowrl.comparison import summarize
from flowrl.comparison_tables import markdown_table, notes, table

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "assets" / "results" / "compare-shapes.json"
MARK = re.compile(r"<!-- measured: ([a-z0-9_]+) -->\n(?:(?!\n|<!--|#|\|).+\n)*")
TABLE, TABLE_END = "<!-- compare: table -->", "<!-- compare: end -->"
HEADER = re.compile(r"# result .*\n(?:# {11,}\S.*\n)*")
CELL = re.compile(r"[\d.]+ % → [\d.]+ %( \([-+][\d.]+ to [-+][\d.]+\))?(, \d+ more failed)?")


def percent(value: float) -> str:
    """Write a share as percent."""
    return f"{100 * value:.1f}"


def points(value: float) -> str:
    """Write a difference of shares in points, with its sign."""
    return f"{100 * value:+.1f}"


def sentence(result: dict[str, Any] | None, name: str) -> str:
    """Say what one config reached at equal network evaluations, and how sure that is."""
    config = found(result, name)
    if result is None or config is None:
        return f"`shapes/{name}`: not compared yet.\n"
    a, b = config["summary"]["evaluations"], config["summary"]["seconds"]
    base, budget = result["base"]["score"], result["budgets"]
    place = [c["name"] for c in result["configs"]].index(config["name"]) + 1
    pictures, clock = result["base"]["images"], "" if budget.get("clock", "wall") == "wall" else "processor "
    text = (
        f"`shapes/{name}`: strict accuracy {percent(base)} % → {percent(a['mean'])} % after "
        f"{budget['evaluations']:,.0f} network evaluations: {points(a['gain'][0])} points over {a['seeds']} seeds"
        f"{interval(a, '95 %')}{broken(a)}, place {place} of {len(result['configs'])}. After {budget['seconds']:g} "
        f"{clock}seconds: {percent(b['mean'])} %{interval(b, 'gain')}. {a['iteration']:.0f} iterations, lr "
        f"{config['lr']:g}, {pictures} held-out pictures per judgement."
    )
    words, lines = text.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) + 1 > 118:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines) + "\n"


def interval(found: dict[str, Any], what: str = "") -> str:
    """Give the interval of a gain in points; nothing where there is none."""
    low, high = found["gain"][1:]
    return "" if low is None else f" ({what} {points(low)} to {points(high)})".replace("( ", "(")


def broken(found: dict[str, Any]) -> str:
    """Say how many runs failed, of which the means know nothing."""
    return f", {found['failed']} more failed" if found["failed"] else ""


def cell(result: dict[str, Any], config: dict[str, Any]) -> str:
    """Say it for a table."""
    a = config["summary"]["evaluations"]
    return f"{percent(result['base']['score'])} % → {percent(a['mean'])} %{interval(a)}{broken(a)}"


def found(result: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """Return what the comparison has of a config that reached both budgets."""
    wanted = f"shapes-{name.replace('_', '-')}"
    for config in result["configs"] if result else []:
        if config["name"] == wanted and all(config["summary"].values()):
            return dict(config)
    return None


def page(text: str, result: dict[str, Any] | None) -> str:
    """Fill the marks of a method page."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- measured: {match[1]} -->\n{sentence(result, match[1])}"

    return MARK.sub(fill, text)


def readme(text: str, result: dict[str, Any] | None) -> str:
    """Fill the last cells of the README's method table; a cell that an older comparison filled is emptied."""
    lines = text.split("\n")
    for i, line in enumerate(lines):
        first = re.search(r"\| `shapes/([a-z0-9_]+)`", line)
        if not first:
            continue
        config, cells = found(result, first[1]), line.strip("|").split("|")
        said = f" {cell(result, config)} " if result and config else " "
        if said.strip() or CELL.fullmatch(cells[-1].strip()):
            lines[i] = "|" + "|".join([*cells[:-1], said]) + "|"
    return "\n".join(lines)


def tables(text: str, result: dict[str, Any] | None) -> str:
    """Fill the table of docs/compare.md and how it is to be read."""
    parts = [markdown_table(table(result)), "\n".join(f"- {line}" for line in notes(result))] if result else []
    filled = "\n\n".join([TABLE, *parts, TABLE_END])
    return re.sub(f"{re.escape(TABLE)}\n.*?{re.escape(TABLE_END)}", lambda _: filled, text, flags=re.DOTALL)


def header(text: str, result: dict[str, Any] | None, name: str) -> str:
    """Fill the result in a config's header, if it was compared."""
    config = found(result, name)
    if result is None or config is None:
        return text
    a = config["summary"]["evaluations"]
    said = f"strict accuracy {percent(result['base']['score'])} % -> {percent(a['mean'])} % after "
    said += f"{result['budgets']['evaluations']:,.0f} network evaluations, mean of {a['seeds']} seeds{broken(a)}"
    return HEADER.sub(lambda _: f"# result     {said} (docs/compare.md)\n", text, count=1)


def load() -> dict[str, Any] | None:
    """Read the result file with its statistics; None where there is none."""
    return summarize(json.loads(RESULT.read_text(encoding="utf-8"))) if RESULT.exists() else None


def targets() -> list[tuple[Path, Callable[[str, dict[str, Any] | None], str]]]:
    """List all files that say what was measured, each with what fills it."""
    configs = sorted((ROOT / "configs" / "shapes").glob("*.yaml"))
    return [
        *((path, page) for path in sorted((ROOT / "docs" / "methods").glob("*.md"))),
        (ROOT / "README.md", readme),
        (ROOT / "docs" / "compare.md", tables),
        *((path, partial(header, name=path.stem)) for path in configs),
    ]


def main() -> int:
    """Fill every page and the README, or say which are stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    args = parser.parse_args()
    result = load()
    stale = []
    for path, fill in targets():
        old = path.read_text(encoding="utf-8")
        new = fill(old, result)
        if new != old:
            stale.append(path)
            if not args.check:
                path.write_text(new, encoding="utf-8")
    print(
        "\n".join(f"{'stale' if args.check else 'written'}: {path.relative_to(ROOT)}" for path in stale) or "all true"
    )
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
