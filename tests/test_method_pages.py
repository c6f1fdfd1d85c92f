"""The pages in docs/methods: every method has one, and what it says of a shapes config is what that config says."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import test_docs
import yaml
from test_docs import OFFERED, PAGES, spans, tables

from flowrl.config import load_config
from flowrl.methods import METHODS, Method
from flowrl.resources import list_configs

FOLDER = "docs/methods/"
METHOD_PAGES = {name[len(FOLDER) : -len(".md")]: PAGES[name] for name in sorted(PAGES) if name.startswith(FOLDER)}
SHAPES = {name.removeprefix("shapes/") for name in list_configs() if name.startswith("shapes/")}
CALLS = ("plan", "transition", "rewards", "aggregate", "credit", "segment", "select", "likelihood", "loss", "kl")
# The sections of a config that a row of an axes table speaks of, by the words of its first cell.
SECTIONS = {axis: (axis,) for axis in CALLS} | {
    "reward": ("rewards", "aggregate"),
    "credit": ("credit", "segment", "select"),
    "loss": ("loss", "kl"),
}
FUNCTIONS = {name for offered in OFFERED.values() for name in offered}
KNOBS = ("plan", "credit", "segment", "select", "loss")  # the sections that make a method: a page has all their keys
ELSEWHERE = {"adv_grpo": {"cps"}}  # functions that a page leaves to another one, which it names

# ------------------------------------------------------------------------------------------------- configs and pages


@cache
def resolved(name: str) -> dict[str, Any]:
    """Return a shapes config with every default filled in."""
    return load_config(f"shapes/{name}").to_dict()


def calls(name: str, section: str) -> list[dict[str, Any]]:
    """Return the calls of a section as a config writes them: none, one, or several."""
    value = resolved(name).get(section)
    if value is None:
        return []
    return value if isinstance(value, list) else list(value.values()) if section == "rewards" else [value]


def used(names: set[str], sections: tuple[str, ...] = CALLS) -> set[str]:
    """Return the functions that some configs name in some sections."""
    return {call["fn"] for name in names for section in sections for call in calls(name, section)}


def needed(name: str) -> set[str]:
    """Return the functions that a page must name: not the default aggregator, nor rewards that are only watched."""
    every = [call for section in CALLS for call in calls(name, section)]
    return {call["fn"] for call in every if call.get("weight") != 0} - {"weighted_sum"}


def columns(head: list[str]) -> dict[int, str]:
    """Return the columns of a table that are a shapes config's."""
    found = {i: re.fullmatch(r"`shapes/(\w+)`", cell) for i, cell in enumerate(head)}
    return {i: match[1] for i, match in found.items() if match}


def covered(page: str) -> set[str]:
    """Return the shapes configs whose axes or knobs a page has."""
    both = tables(METHOD_PAGES[page], "axis") + tables(METHOD_PAGES[page], "key")
    return {name for table in both for name in columns(table[0]).values()}


def page_of(method: Method) -> str | None:
    """Return the page of a method: its own, or the one that covers its shapes config."""
    if method.slug in METHOD_PAGES:
        return method.slug
    return next((page for page in sorted(METHOD_PAGES) if method.slug in covered(page)), None)


def mapping(span: str) -> dict[str, Any]:
    """Read `a: 1, b: 2` as arguments; what is not written so has none."""
    try:
        value = yaml.safe_load(f"{{{span}}}") if re.match(r"\w+: ", span) else {}
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}


# -------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.slug)
def test_every_method_has_a_page_with_its_paper_status_and_configs(method: Method) -> None:
    page = page_of(method)
    assert page is not None, f"no page for {method.slug}, and no table with a column `shapes/{method.slug}`"
    text = METHOD_PAGES[page]
    assert [name for name in method.configs if not re.search(rf"\b{name}\b", text)] == []
    assert method.paper is None or f"https://arxiv.org/abs/{method.paper.arxiv}" in text
    status = re.search(r"Status: \**(\w+)", text)
    assert status is None or page != method.slug or status[1] == method.status


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_pages_have_what_they_must_have(page: str) -> None:
    text = METHOD_PAGES[page]
    assert covered(page) <= SHAPES and tables(text, "axis")
    ideas = test_docs.section(text, "The idea")
    assert len(re.findall(r"^\d\. ", ideas, re.MULTILINE)) == 5
    assert "run-folder.md" in text or page == "adv_grpo"
    if page not in ("flow_grpo", "adv_grpo"):  # older than the comparison
        assert "(../compare.md)" in text


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_the_axes_are_the_configs(page: str) -> None:
    """Functions and arguments in code: those of the column's config, or of another one that the cell names."""
    for head, *rows in tables(METHOD_PAGES[page], "axis"):
        for i, name in columns(head).items():
            named = ELSEWHERE.get(page, set())
            for row in rows:
                label, found = row[0].split(", "), spans(row[i])
                mine = {name, *found} & SHAPES
                if not set(label) <= set(SECTIONS):  # "plan of Flash": of whichever config of the page
                    label, mine = [word for word in row[0].split() if word in SECTIONS], covered(page)
                sections = tuple(section for word in label for section in SECTIONS[word])
                functions = {span for span in found if span in FUNCTIONS}
                assert sorted(functions - used(mine, sections)) == [], (row[0], name)
                named |= functions | check_arguments(row, found, mine)
            assert sorted(needed(name) - named) == [], f"the column of {name} does not name them"


def check_arguments(row: list[str], found: list[str], names: set[str]) -> set[str]:
    """Find each argument in a call of one of the configs -> functions that are named by a whole call."""
    every = [call for name in names for section in CALLS for call in calls(name, section)]
    whole = set()
    for key, value in ((k, v) for span in found for k, v in mapping(span).items()):
        if key in CALLS:  # `select: {fn: fraction, share: 0.6}`
            assert any(value.items() <= call.items() for name in names for call in calls(name, key)), (row[0], value)
            whole.add(value["fn"])
        else:
            assert any(key in call and call[key] == value for call in every), (row[0], key, value)
    return whole


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_the_knobs_are_the_configs(page: str) -> None:
    """A value in code is the config's, list or not; an empty cell says that the config has no such key."""
    for head, *rows in tables(METHOD_PAGES[page], "key"):
        for row in rows:
            (key,) = spans(row[0])
            for i, name in columns(head).items():
                values = knob(name, key)
                if row[i] == "":
                    assert values == [], f"{name}: {key} is {values}"
                elif spans(row[i]):
                    (text,) = spans(row[i])
                    assert yaml.safe_load(text) in values, f"{name}: {key} is {values}, not {text}"


def knob(name: str, key: str) -> list[Any]:
    """Return what a config has under a dotted key: nothing, a value, or that of each call with this argument."""
    section, _, tail = key.partition(".")
    if section in CALLS:
        return [call[tail] for call in calls(name, section) if tail in call]
    values = resolved(name)[section]
    assert tail in values, f"{name}: there is no {key}"
    return [values[tail]]


@pytest.mark.parametrize("page", METHOD_PAGES)
def test_every_argument_that_makes_the_method_is_a_knob(page: str) -> None:
    for head, *rows in tables(METHOD_PAGES[page], "key"):
        keys = {span for row in rows for span in spans(row[0])}
        for name in columns(head).values():
            mine = {f"{section}.{arg}" for section in KNOBS for call in calls(name, section) for arg in call}
            missing = {key for key in mine - keys if not key.endswith(".fn")}
            assert sorted(missing) == [], name


@pytest.mark.parametrize("page", [page for page in METHOD_PAGES if page not in ("flow_grpo", "adv_grpo")])
def test_lines_are_short(page: str) -> None:
    """120 characters, tables too; two older pages have longer tables."""
    assert [line for line in METHOD_PAGES[page].splitlines() if len(line) > 120] == []
