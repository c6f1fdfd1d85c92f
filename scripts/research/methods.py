"""What configs/methods.yaml says of the methods, as text for the README and the method pages.

`python scripts/research/tables.py` writes it. Filled in are

- README.md: the table of methods;
- docs/methods: paper, status, summary and configs of each method of a page, at its head.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import verified

from flowrl.core.errors import ConfigError
from flowrl.runs.catalogue import PublishedMethod, load_methods, status_words, tried

ROOT = Path(__file__).resolve().parents[2]
HEAD = "| method | configs | paper | status | verified |\n|---|---|---|---|---|\n"
BEGIN, END = "<!-- methods.yaml -->", "<!-- methods.yaml: end -->"


def arxiv(method: PublishedMethod) -> str:
    """Return the address of a method's paper."""
    assert method.paper is not None
    return f"https://arxiv.org/abs/{method.paper.arxiv}"


def row(method: PublishedMethod) -> str:
    """Return a method's row of the README's table."""
    cells = [
        f"[{method.name}](docs/methods/{method.page_name}.md)",
        _configs(method),
        f"[{method.paper.arxiv}]({arxiv(method)})" if method.paper else "combination",
        status_words(method.status, method.parts, "`"),
        tried(verified.of_method(method), "`"),
    ]
    return f"| {' | '.join(cells)} |\n"


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


def readme(text: str) -> str:
    """Fill the README's table."""
    start, found, rest = text.partition(HEAD)
    if not found:
        raise ConfigError(f"README.md: expected a table with the head {HEAD.splitlines()[0]}")
    rest = re.sub(r"\A(\|.*\n)*", "", rest)
    return start + HEAD + "".join(map(row, load_methods())) + rest


def entry(method: PublishedMethod, above: Sequence[PublishedMethod] = ()) -> str:
    """Return a method's item at the head of its page, below those of the methods `above`."""
    status = status_words(method.status, method.parts, "`")
    if method.paper is None:
        return _item(f"- {_configs(method)}, {status}: {method.summary}")
    number, title = method.paper.arxiv, method.paper.title
    paper = f"[{title}]({arxiv(method)}), arXiv {number}, {method.paper.year}."
    if method.paper in [other.paper for other in above]:
        paper = "the same paper."
    text = f"- **{method.name}**: {paper} Status: {status}. {method.summary}"
    return _item(f"{text} Configs: {_configs(method)}.")


def _item(text: str) -> str:
    """Break an item of a list into lines of at most 100 columns."""
    return textwrap.fill(
        text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


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


def targets() -> list[tuple[Path, Callable[[str], str]]]:
    """List all files that say what the catalogue says, each with what fills it."""
    pages = sorted((ROOT / "docs" / "methods").glob("*.md"))
    return [
        (ROOT / "README.md", readme),
        *((path, partial(page, name=path.stem)) for path in pages),
    ]
