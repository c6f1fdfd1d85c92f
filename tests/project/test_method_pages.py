"""The tables of a method's page are its configs': knobs, functions of the axes, arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from docskit import PAGES, offered, spans, tables

from flowrl.config.load import load_config

METHOD_PAGES = sorted(name for name in PAGES if name.startswith("docs/methods/"))

every_page = pytest.mark.parametrize("name", METHOD_PAGES)
KNOBS = ("plan", "credit", "segment", "select", "loss")  # sections whose keys a page must all have


def calls(config: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the calls of a section, or the section itself: none, one, or several."""
    there: Any = config.get(key) or []
    if key == "rewards":
        return [call for call in there.values() if call["weight"] != 0]
    return there if isinstance(there, list) else [there]


def columns(page: str, *first: str) -> list[tuple[dict[str, Any], list[tuple[str, str]]]]:
    """Return (resolved config, its (first cell, own cell) of each row) for every column of a shapes
    config in the tables whose first column is named so."""
    found = []
    for head, *table in [table for name in first for table in tables(PAGES[page], name)]:
        for i, cell in enumerate(head):
            if match := re.fullmatch(r"`(shapes/\w+)`", cell):
                config = load_config(match[1]).to_dict()
                found.append((config, [(row[0], row[i]) for row in table]))
    return found


@every_page
def test_the_knobs_of_a_method_page_are_its_configs(name: str) -> None:
    """A value in code is the config's; an empty cell says that the config has no such key; all
    arguments that make the method are there."""
    for config, cells in columns(name, "key", "knob"):
        keys = [(spans(first)[0], cell) for first, cell in cells]
        assert [key for key, cell in keys if not holds(config, key, cell)] == [], config["name"]
    for config, cells in columns(name, "key"):
        known = {f"{part}.fn" for part in KNOBS}
        known |= {spans(first)[0] for first, _ in cells}
        mine = {f"{part}.{arg}" for part in KNOBS for call in calls(config, part) for arg in call}
        assert sorted(mine - known) == [], config["name"]


@every_page
def test_the_axes_of_a_method_page_are_its_configs(name: str) -> None:
    """A column names every function of its config; arguments in code, as `a: 1, b: 2`, are those of
    a config of the page."""
    found = columns(name, "axis")
    known = offered().keys() - {"model", "optimizer", "transform"}
    page = [config for config, _ in columns(name, "axis", "key")]
    used = [call for config in page for key in known for call in calls(config, key)]
    for config, cells in found:
        named = " ".join(cell for _, cell in cells)
        mine = {call["fn"] for key in known for call in calls(config, key)} - {"weighted_sum"}
        missing = [fn for fn in mine if not re.search(rf"\b{fn}\b", named)]
        assert missing == [] or name.endswith("adv_grpo.md"), config["name"]
        for span in [span for _, cell in cells for span in spans(cell)]:
            for key, value in arguments(span).items():
                assert any(call.get(key) == value for call in used), (config["name"], span)


def arguments(span: str) -> dict[str, Any]:
    """Read `a: 1, b: 2` as arguments; a whole call or anything else has none."""
    plain = re.match(r"\w+: (?!\{)", span)
    return yaml.safe_load(f"{{{span}}}") if plain else {}


def holds(config: dict[str, Any], key: str, cell: str) -> bool:
    """Say whether a cell is what a config has under a dotted key."""
    head, _, tail = key.partition(".")
    values = [call[tail] for call in calls(config, head) if tail in call]
    if not cell:
        return values == []
    return not spans(cell) or yaml.safe_load(spans(cell)[0]) in values


SECTIONS = ("The idea", "On the five axes", "What we measured", "Where flowrl differs")
WHOLE = (*SECTIONS, "Knobs", "Run it", "Known traps")
OTHERS = {  # pages that are ordered in another way
    "docs/methods/adv_grpo.md": SECTIONS,
    "docs/methods/combinations.md": (*SECTIONS[:3], "Knobs"),
}


@every_page
def test_a_method_page_is_whole(name: str) -> None:
    """What every page tells is there, to its end."""
    heads = re.findall(r"^## (.+)$", PAGES[name], re.MULTILINE)
    assert [head for head in OTHERS.get(name, WHOLE) if head not in heads] == []
