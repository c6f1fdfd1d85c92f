"""What configs/methods.yaml says of the methods, and how far each of their configs was tried.

`tables.py` writes with it

- configs/methods.yaml: a block `verified` under each method, from assets/results/methods.json, or
  gains.json of what is not in it;
- README.md and docs/methods.md: the table of methods, where there is one;
- docs/methods: paper, status and configs of each method of a page, at its head; what it does is
  said below it, in words of the page, and for a combination here, by its summary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import gains
import methods_table
import yaml
from again import read
from figures import wrapped
from methods import FILE as EQUAL

from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs
from flowrl.runs.catalogue import PublishedMethod, Verified, load_methods, status_words, tried

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = ROOT / "configs" / "methods.yaml"
BLOCK = re.compile(r"  verified:\n(?:    .*\n)+")
HEAD = (
    "| method | configs | paper | status | verified | gain on equal terms |\n"
    "|---|---|---|---|---|---|\n"
)
BEGIN, END = "<!-- methods.yaml -->", "<!-- methods.yaml: end -->"


# ----------------------------------------------------------------------- how far a config was tried


@cache
def levels() -> dict[str, Verified]:
    """Return how far each shipped config was tried; without a row it is at "dry run", which
    tests/config/test_method_configs.py rehearses."""
    found = dict.fromkeys(list_configs(), Verified())
    kept: list[tuple[str, str, dict[str, Any]]] = []
    kept += [(gains.FILE.name, row["version"], row) for row in gains.rows()]
    kept += [(EQUAL.name, row["flowrl"], row) for row in methods_table.found()[1]]
    for config, file in gains.LEARNT.items():
        if file.exists():
            runs = read(file)["seeds"]
            row: dict[str, Any] = {"config": config, "seeds": len(runs)}
            kept.append((file.name, max(run["flowrl"] for run in runs), row))
    for name, version, row in kept:
        if row["config"] in found:
            found[row["config"]] = Verified(
                level="seeds" if row["seeds"] > 1 else "once",
                seeds=row["seeds"],
                version=version,
                results=name,
            )
    return found


def of_method(method: PublishedMethod) -> dict[str, Verified]:
    """Return the levels of a method's configs."""
    return {config: levels()[config] for config in method.configs}


def catalogue(text: str) -> str:
    """Write the blocks `verified` of the catalogue anew: every config that is not at "dry run"."""
    methods = {method.slug: method for method in load_methods()}
    head, *entries = re.split(r"(?=^- slug: )", BLOCK.sub("", text), flags=re.MULTILINE)
    made = [head]
    for entry in entries:
        slug = re.match(r"- slug: (\S+)", entry)
        assert slug
        body = entry.rstrip("\n")
        made.append(body + "\n" + _block(of_method(methods[slug[1]])) + entry[len(body) + 1 :])
    return "".join(made)


def _block(found: dict[str, Verified]) -> str:
    lines = []
    for config, one in found.items():
        if one.level != "dry run":
            told = yaml.safe_dump(one.model_dump(exclude_defaults=True), default_flow_style=True)
            lines.append(f"    {config}: {' '.join(told.split())}\n")
    return f"  verified:\n{''.join(lines)}" if lines else ""


# ---------------------------------------------------------------------------- the table of methods


def table(text: str, folder: str) -> str:
    """Fill the table of methods, if a page has one; `folder`: the pages, seen from it."""
    start, found, rest = text.partition(HEAD)
    if not found:
        return text
    rest = re.sub(r"\A(\|.*\n)*", "", rest)
    return start + HEAD + "".join(row(method, folder) for method in load_methods()) + rest


def row(method: PublishedMethod, folder: str) -> str:
    """Return a method's row."""
    cells = [
        f"[{method.name}]({folder}{method.page_name}.md)",
        _configs(method),
        f"[{method.paper.arxiv}]({arxiv(method)})" if method.paper else "combination",
        status_words(method.status, method.parts, "`"),
        tried(of_method(method), "`"),
        _gains(method),
    ]
    return f"| {' | '.join(cells)} |\n"


def _gains(method: PublishedMethod) -> str:
    """Say what those of a method's configs gained that are in the table on equal terms."""
    mine = [one for name, one in methods_table.by_config().items() if name in method.configs]
    said = [methods_table.cell(one) for one in mine]
    if len(mine) > 1:
        said = [f"`{one['config']}` {text}" for one, text in zip(mine, said, strict=True)]
    return "; ".join(said).replace("*", r"\*")


def arxiv(method: PublishedMethod) -> str:
    """Return the address of a method's paper."""
    assert method.paper is not None
    return f"https://arxiv.org/abs/{method.paper.arxiv}"


def _configs(method: PublishedMethod) -> str:
    """Name a method's configs of shapes/, and the other folders that have one."""
    shapes: list[str] = []
    others: dict[str, None] = {}  # in order, each once
    for name in method.configs:
        folder = name.partition("/")[0]
        if folder == "shapes":
            shapes.append(f"`{name}`")
        else:
            others[folder] = None
    return "; ".join(filter(None, [" ".join(shapes), ", ".join(others)]))


# ----------------------------------------------------------------------- the head of a method page


def page(text: str, name: str) -> str:
    """Fill the head of a method page, between its two marks."""
    mine = [method for method in load_methods() if method.page_name == name]
    start, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, rest = rest.partition(END)
    if not (mine and begin and end):
        raise ConfigError(
            f"docs/methods/{name}.md: expected the page of a method, with {BEGIN} and {END}"
        )
    items = [entry(method, mine[:i]) for i, method in enumerate(mine)]
    return start + begin + "\n".join(items) + f"\n{end}{rest}"


def entry(method: PublishedMethod, above: Sequence[PublishedMethod] = ()) -> str:
    """Return a method's item at the head of its page, below those of the methods `above`."""
    status = status_words(method.status, method.parts, "`")
    if method.paper is None:
        return wrapped(f"- {_configs(method)}, {status}: {method.summary}", "  ")
    number, title = method.paper.arxiv, method.paper.title
    paper = f"[{title}]({arxiv(method)}), arXiv {number}, {method.paper.year}."
    if method.paper in [other.paper for other in above]:
        paper = "the same paper."
    text = f"- **{method.name}**: {paper} Status: {status}. Configs: {_configs(method)}."
    return wrapped(text, "  ")


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List all files that say what the catalogue says, each with what fills it."""
    found: list[tuple[Path, Callable[[str], str]]] = [
        (CATALOGUE, catalogue),
        (ROOT / "README.md", partial(table, folder="docs/methods/")),
    ]
    if (ROOT / "docs" / "methods.md").exists():
        found.append((ROOT / "docs" / "methods.md", partial(table, folder="methods/")))
    for file in sorted((ROOT / "docs" / "methods").glob("*.md")):
        found.append((file, partial(page, name=file.stem)))
    return found
