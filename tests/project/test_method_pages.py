"""A method's page has one form, is short, and says what its configs say."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import yaml
from docskit import PAGES, ROOT, commands, offered, prose, spans, tables
from scriptkit import script_module
from shippedkit import shipped

from flowrl.config.sections import SECTIONS
from flowrl.core.shipped_files import list_configs
from flowrl.runs.catalogue import load_methods

METHOD_PAGES = sorted(name for name in PAGES if name.startswith("docs/methods/"))
FORM = ["Idea", "Axes", "Run it", "Knobs that matter", "Watch", "What it gains", "Where it differs"]
LINES = 66
NUMBERS = 3.5  # figures per 100 words of prose
THEIRS = {"aggregate_fn", "sde_frac"}  # names of published code
GAIN = re.compile(r"<!-- gain: (shapes/[\w/\s]+)\s-->\n(.*?)<!-- gain: end -->", re.DOTALL)

every_page = pytest.mark.parametrize("name", METHOD_PAGES)


def calls(config: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the calls of a section, or the section itself: none, one, or several."""
    there: Any = config.get(key) or []
    if key == "rewards":
        return [call for call in there.values() if call["weight"] != 0]
    return there if isinstance(there, list) else [there]


def functions(config: dict[str, Any]) -> set[str]:
    """Return all functions of the axes that a config calls, but for the plain sum of rewards."""
    found = set[str]()
    for key in offered().keys() - {"model", "optimizer", "transform"}:
        found |= {call["fn"] for call in calls(config, key)}
    return found - {"weighted_sum"}


def columns(page: str, first: str) -> list[tuple[dict[str, Any], list[tuple[str, str]]]]:
    """Return (resolved config, its (first cell, own cell) of each row) for every column of a
    config in the tables whose first column is named so."""
    found = []
    for head, *table in tables(PAGES[page], first):
        for i, cell in enumerate(head):
            if match := re.fullmatch(r"`(\w+/\w+)`", cell):
                config = shipped(match[1]).to_dict()
                found.append((config, [(row[0], row[i]) for row in table]))
    return found


def holds(config: dict[str, Any], key: str, cell: str) -> bool:
    """Say whether a cell is what a config has under a dotted key, also of a reward by its name."""
    head, *names, tail = key.split(".")
    section = calls(config, head) if head in config else [config["rewards"].get(head) or {}]
    for name in names:
        section = [call.get(name) or {} for call in section]
    values = [call[tail] for call in section if tail in call]
    return yaml.safe_load(spans(cell)[0]) in values if cell else values == []


@every_page
def test_a_method_page_has_the_form(name: str) -> None:
    """Seven sections in one order, none of them empty, the last of them to the page's end."""
    page = PAGES[name]
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == FORM
    for text in re.split(r"^## .+$", page, flags=re.MULTILINE)[1:]:
        assert text.strip()
    assert page.startswith("# ") and "<!-- methods.yaml: end -->" in page.partition("## ")[0]


@every_page
def test_a_method_page_is_short(name: str) -> None:
    """In lines, and in figures of its prose."""
    page = PAGES[name]
    assert len(page.splitlines()) <= LINES
    text = prose(GAIN.sub("", page).partition("<!-- methods.yaml: end -->")[2])
    text = re.sub(r"^\|.*$|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.MULTILINE)
    figures = re.findall(r"(?<![\w.])\d[\d.,]*", text)
    assert len(figures) <= NUMBERS * len(text.split()) / 100


@every_page
def test_the_knobs_of_a_method_page_are_its_configs(name: str) -> None:
    """A value is the config's; an empty cell says that the config has no such key."""
    found = columns(name, "key")
    assert found
    for config, cells in found:
        keys = [(spans(first)[0], cell) for first, cell in cells]
        assert [key for key, cell in keys if not holds(config, key, cell)] == [], config["name"]


@every_page
def test_the_axes_of_a_method_page_are_its_configs(name: str) -> None:
    """A row names a config, the functions of its axes, and no others."""
    (table,) = tables(PAGES[name], "config")
    for config, *cells in table[1:]:
        (path,) = spans(config)
        assert set(spans(" ".join(cells))) == functions(shipped(path).to_dict()), path


@cache
def names() -> frozenset[str]:
    """Return every function and argument that a config can name, every key, and every metric."""
    found = set[str]()
    for one in offered().values():
        found |= set(one)
        for arguments in one.values():
            found |= set(arguments)
    for section in SECTIONS.values():
        found |= {field.name for field in fields(section)}
    for file in (ROOT / "flowrl").rglob("*.py"):
        found |= set(re.findall(r"\"([a-z0-9_]+)\"", file.read_text(encoding="utf-8")))
    return frozenset(found)


@every_page
def test_what_a_method_page_names_exists(name: str) -> None:
    """A function in a call, any identifier of several words, every config."""
    page = PAGES[name].partition("<!-- methods.yaml: end -->")[2]
    axes = {function for one in offered().values() for function in one}
    assert set(re.findall(r"\bfn[:=] ?(\w+)", page)) <= axes
    words = {span for span in spans(prose(page)) if re.fullmatch(r"[a-z]+(_[a-z0-9]{2,})+", span)}
    assert sorted(words - names() - THEIRS) == []
    configs = set(re.findall(r"`((?:shapes|sd3|sd15|sdxl|flux\w*|wan|qwen_\w+)/\w+)`", page))
    assert sorted(configs - {*list_configs()}) == []


@every_page
def test_a_method_page_shows_how_to_train(name: str) -> None:
    """Every command to train names a shipped config, and the page's own are among them."""
    trained = []
    for words in commands(PAGES[name]):
        if words[:2] == ["flowrl", "train"]:
            trained.append(words[2])
    assert set(trained) <= {*list_configs()}
    mine = set[str]()
    for method in load_methods():
        if method.page_name == name.removeprefix("docs/methods/").removesuffix(".md"):
            mine |= set(method.configs)
    assert mine & {*trained}


@every_page
def test_a_method_page_has_the_marks_of_its_gains(name: str) -> None:
    """Between them stands one sentence about each config that they name and that was measured, a
    list of several, or that none was."""
    page = PAGES[name]
    found = GAIN.findall(page)
    assert found and page.count("<!-- gain: ") == 2 * len(found)
    for configs, text in found:
        assert {*configs.split()} <= {*list_configs()}
        said = re.findall(r"^(?:- )?(`shapes/\w+`: .*\n(?:[^-].*\n)?)", text, re.MULTILINE)
        assert "".join(said) == text.replace("\n- ", "\n").removeprefix("- ") or (
            not said and text == "Not measured on shapes.\n"
        )
        about = [spans(one)[0] for one in said]
        assert about == [config for config in configs.split() if config in about]


def test_every_gain_is_on_one_page() -> None:
    """A config's mark stands once, and what the table on equal terms asks for has one."""
    marks = [GAIN.findall(PAGES[name]) for name in METHOD_PAGES]
    configs = " ".join(one for found in marks for one, _ in found).split()
    assert len(set(configs)) == len(configs)
    assert {*script_module("results/methods").wanted()} <= {*configs}
