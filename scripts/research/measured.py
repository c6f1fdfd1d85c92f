"""What comparisons measured, as text for method pages and compare.md.

`python scripts/research/tables.py` writes it. The sources are assets/results/compare-shapes.json,
of the noisy-captions control, and those of `later.py`, of the present base model. Filled in are

- docs/methods: the paragraph behind each ``<!-- measured: NAME -->``, NAME a config of shapes/:
  what demonstration and sources have of it, or that nothing was compared yet, and `untrained.py`;
- docs/compare.md: table and notes of each source, and the table of published claims.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import untrained
from figures import fixed
from later import EDITS, FURTHER, LATER

from flowrl.core.tables import markdown_table
from flowrl.runs.compare.summary import summarize_result
from flowrl.runs.compare.tables import comparison_table, notes

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "assets" / "results"
RESULT = RESULTS / "compare-shapes.json"
NOISY = "version 0.1, on the noisy-captions control"
MARK = re.compile(r"<!-- measured: ([a-z0-9_]+) -->\n(?:(?!\n|<!--|#|\|).+\n)*")
COUNTS = {2: "two", 3: "three", 4: "four", 5: "five"}
Result = dict[str, Any]


class Claim(NamedTuple):
    """A claim of a paper, what we read from our numbers, and the pairs that it speaks of."""

    published: str
    here: str
    pairs: tuple[tuple[str, str, str, str], ...]  # label, one, other, budget


A, B = "nfe", "seconds"
CLAIMS = (
    Claim(
        "Flow-GRPO-Fast, one or two trained steps, does about as well as all of them",
        "not contradicted; the difference may be chance",
        (("Fast less full ", "flow-grpo-fast", "flow-grpo-full", A),),
    ),
    Claim(
        "MixGRPO beats DanceGRPO",
        "holds at (b), nearly at (a)",
        (("", "mix-grpo", "dance-grpo", A), ("at (b) ", "mix-grpo", "dance-grpo", B)),
    ),
    Claim("TempFlow-GRPO beats DanceGRPO", "holds", (("", "tempflow-grpo", "dance-grpo", A),)),
    Claim(
        "TempFlow-GRPO beats Flow-GRPO at equal NFE",
        "not seen",
        (("", "tempflow-grpo", "flow-grpo-full", A),),
    ),
    Claim(
        "MixGRPO-Flash loses little against MixGRPO",
        "no loss shown; with 6 steps it saves no NFE either",
        (("", "mix-grpo-flash", "mix-grpo", A),),
    ),
    Claim(
        "BranchGRPO beats DanceGRPO, and Mix does as well for less",
        "not seen",
        (
            ("", "branch-grpo", "dance-grpo", A),
            ("Mix less Branch ", "branch-grpo-mix", "branch-grpo", A),
        ),
    ),
    Claim(
        "G2RPO beats MixGRPO and DanceGRPO",
        "not seen",
        (("", "g2rpo", "mix-grpo", A), ("", "g2rpo", "dance-grpo", A)),
    ),
    Claim(
        "CPS beats the SDE",
        "not seen, rather the contrary",
        (("CPS less full ", "flow-grpo-cps", "flow-grpo-full", A),),
    ),
    Claim(
        "TP-GRPO beats Flow-GRPO (a little)",
        "not seen",
        (("", "tp-grpo", "flow-grpo-full", A),),
    ),
    Claim(
        "Chunk-GRPO beats Flow-GRPO and DanceGRPO",
        "the contrary of the first",
        (("", "chunk-grpo", "flow-grpo-full", A), ("", "chunk-grpo", "dance-grpo", A)),
    ),
    Claim(
        "VGPO beats Flow-GRPO (a reconstruction here)",
        "the contrary",
        (("", "vgpo", "flow-grpo-full", A),),
    ),
    Claim(
        "Dynamic-TreeRPO beats MixGRPO and DanceGRPO (a reconstruction here)",
        "the contrary of the first",
        (("", "dynamic-treerpo", "mix-grpo", A), ("", "dynamic-treerpo", "dance-grpo", A)),
    ),
    Claim(
        "GRPO-Guard against over-optimisation",
        "not tested: nothing was clipped",
        (("Guard less full ", "grpo-guard", "flow-grpo-full", A),),
    ),
)

# ------------------------------------------------------------------------------ numbers as text


def percent(value: float) -> str:
    """Write a share as percent."""
    return fixed(100 * value)


def points(value: float) -> str:
    """Write a difference of shares in points, with its sign."""
    return fixed(100 * value, sign="+")


def interval(summary: Result, what: str = "") -> str:
    """Give the interval of a gain in points; nothing where there is none."""
    low, high = summary["gain"][1:]
    return "" if low is None else f" ({what} {points(low)} to {points(high)})".replace("( ", "(")


def broken(summary: Result) -> str:
    """Say how many runs failed, of which the means know nothing."""
    return f", {summary['failed']} more failed" if summary["failed"] else ""


def found(result: Result | None, name: str) -> Result | None:
    """Return what the comparison has of a config that reached both budgets."""
    wanted = f"shapes-{name.replace('_', '-')}"
    for config in result["configs"] if result else []:
        if config["name"] == wanted and all(config["summary"].values()):
            return dict(config)
    return None


def wrapped(text: str, indent: str = "") -> str:
    """Break a text into lines of at most 100 columns."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


# ------------------------------------------------------------------------------- what fills a place


def sentence(result: Result | None, name: str, where: str = NOISY) -> str:
    """Say what one config reached at equal NFE, and how sure that is; "" where it is not in."""
    # a config that was not compared has no sentence
    config = found(result, name)
    if result is None or config is None:
        return ""
    # A: equal network evaluations, B: equal seconds, if there was a budget of them
    a, b = config["summary"][A], config["summary"].get(B)
    base, budget = result["base"], result["budgets"]
    names = [one["name"] for one in result["configs"]]
    ranked = len(names) > 1 and result.get("rivals", True)
    place = f", place {names.index(config['name']) + 1} of {len(names)}" if ranked else ""
    clock = "" if budget.get("clock", "wall") == "wall" else "processor "
    seeds = f"{a['seeds']} seed{'s' * (a['seeds'] > 1)}"
    later = ""
    if b is not None:
        later = f" After {budget['seconds']:g} {clock}seconds: {percent(b['mean'])} %"
        later += f"{interval(b, 'gain')}."
    text = (
        f"`shapes/{name}`, {where}: strict accuracy "
        f"{percent(base['score'])} % → {percent(a['mean'])} % "
        f"after {budget['nfe']:,.0f} NFE: {points(a['gain'][0])} points over {seeds}"
        f"{interval(a, '95 %')}{broken(a)}{place}.{later} "
        f"{a['iteration']:.0f} iterations, lr {config['lr']:g}, {base['images']} held-out images "
        "per judgement."
    )
    if where == NOISY:
        return text + untrained.beside_control()
    edits = where == EDITS and untrained.beside_edits()
    return text + (edits or untrained.beside(result))


def page(
    text: str,
    result: Result | None,
    later: Sequence[tuple[str, Result]] = (),
    shown: Mapping[str, str] | None = None,
) -> str:
    """Fill the marks of a method page; later: where and what of other comparisons; shown: what the
    demonstration says of a config."""

    def told(match: re.Match[str]) -> str:
        """Return a mark with its paragraph."""
        name = match[1]
        looks = [sentence(one, name, where) for where, one in later]
        count = sum(map(bool, looks))
        parts = [(shown or {}).get(name, ""), *looks]
        if count > 1:
            number, more = COUNTS.get(count, str(count)), FURTHER.get(name, 0)
            number += f" of {COUNTS[count + more]}" if more else ""
            parts.append(
                f"These are {number} looks at one list; no interval is corrected for that."
            )
        parts.append(sentence(result, name))
        said = " ".join(filter(None, parts)) or f"`shapes/{name}`: not compared yet."
        return f"<!-- measured: {name} -->\n{wrapped(said)}\n"

    return MARK.sub(told, text)


def compared(text: str, result: Result | None, later: Mapping[str, Result] | None = None) -> str:
    """Fill the tables of docs/compare.md; later: other comparisons by the name of their marks."""
    for name, one in {"compare": result, **(later or {})}.items():
        items = [wrapped(f"- {line}", "  ") for line in notes(one)] if one else []
        parts = [markdown_table(comparison_table(one)), "\n".join(items)] if one else []
        text = between(text, f"{name}: table", f"{name}: end", parts)
    if "<!-- claims: table -->" not in text:
        return text
    return between(text, "claims: table", "claims: end", [claims(result)] if result else [])


def between(text: str, start: str, end: str, parts: list[str]) -> str:
    """Put parts between two marks; a page without the marks stays as it is."""
    new = "\n\n".join([f"<!-- {start} -->", *parts, f"<!-- {end} -->"])
    marks = f"<!-- {start} -->\n.*?<!-- {end} -->"
    return re.sub(marks, lambda _: new, text, flags=re.DOTALL)


def claims(result: Result) -> str:
    """Show for each claim the differences in points and p after Holm's correction.

    There is no verdict where the loser ran at a smaller share of its own learning rate than the
    winner: the rate may have made the difference.
    """
    lines = ["| published | here | difference | p |", "|---|---|---|---|"]
    # pair by pair: the difference in points, and p
    for claim in CLAIMS:
        differences, chances, unfair = [], [], []
        for label, one, other, budget in claim.pairs:
            tested = result["pairs"][budget]
            i, j = (tested["names"].index(f"shapes-{name}") for name in (one, other))
            differences.append(label + points(tested["difference"][i][j]).replace("-", "−"))
            p = tested["p_holm"][i][j]
            chances.append(fixed(p, 2) if p >= 0.005 else "<0.01")
            # a loser with a smaller share of its own learning rate may have lost by that
            loser, winner = (one, other) if tested["difference"][i][j] < 0 else (other, one)
            if rate_share(result, loser) < rate_share(result, winner):
                unfair.append(loser)
        here = claim.here
        if unfair:
            names = " and ".join(dict.fromkeys(unfair))
            here = f"no verdict: {names} ran at half its learning rate"
        cells = (claim.published, here, "; ".join(differences), "; ".join(chances))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rate_share(result: Result, name: str) -> float:
    """Return the learning rate of a config over its own one."""
    for config in result["configs"]:
        if config["name"] == f"shapes-{name}":
            own = config["search"]["own_lr"] if config["search"] else config["lr"]
            return float(config["lr"] / own)
    return 1.0


def load(file: Path = RESULT) -> Result | None:
    """Read a result file with its statistics; None where there is none."""
    return summarize_result(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List all files that say what was measured, each with what fills it."""
    result = load()
    read = {one: load(RESULTS / one.file) for one in LATER}
    later = [
        (one.where, {**data, "rivals": one.rivals})
        for one, data in read.items()
        if data is not None
    ]
    shown = untrained.demonstrated()
    named = {one.name: data for one, data in read.items() if data is not None}
    pages = sorted((ROOT / "docs" / "methods").glob("*.md"))
    return [
        *((path, partial(page, result=result, later=later, shown=shown)) for path in pages),
        (ROOT / "docs" / "compare.md", partial(compared, result=result, later=named)),
    ]
