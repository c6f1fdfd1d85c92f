"""docs/results.md and the index of the docs."""

from __future__ import annotations

import json
import re

import pytest
from docskit import PAGES, ROOT
from scriptkit import script_module

MODULE = script_module("overview")
PAGE = " ".join(PAGES["docs/results.md"].split())


@pytest.mark.parametrize("name", ["spo_latent", "uni_grpo", "rwr"])
def test_a_row_says_what_its_comparison_says(name: str) -> None:
    """Of three results: the gain, and how far guidance is, which `compare.md` has by itself."""
    one, config = next(each for each in MODULE.chosen() if each[1] == f"shapes/{name}")
    result = MODULE.read(one.file)
    (entry,) = (each for each in result["configs"] if each["file"] == config)
    mean, low, high = (100 * value for value in entry["summary"]["nfe"]["gain"])
    star = r"\*" if low > 0 else ""
    row = next(line for line in PAGES["docs/results.md"].splitlines() if f"`{config}`" in line)
    assert f"| `{config}` | {mean:+.1f}{star} | {low:+.1f} to {high:+.1f} |" in row
    again = PAGES["docs/compare.md"]
    beside = re.findall(rf"\| `{config}` \|.*\| 10 \| ([-+][\d.]+) \(", again)
    assert row.split(" | ")[4] in beside


def test_the_demonstration_stands_first() -> None:
    found = json.loads((ROOT / "assets/results/demonstration.json").read_text(encoding="utf-8"))
    over = 100 * found["rl_minus_base_best_guidance"]["mean"]
    row = next(line for line in PAGES["docs/results.md"].splitlines() if "demonstration |" in line)
    assert row.split(" | ")[4:] == [f"{over:+.1f}", "–", "63", f"{found['rl']['seeds']} |"]


def test_every_compared_config_has_one_row() -> None:
    rows = re.findall(r"^\| `(shapes/\w+)`", PAGES["docs/results.md"], re.MULTILINE)
    assert sorted(rows) == sorted({*(config for _, config in MODULE.chosen()), "shapes/awm"})


def test_what_differs_between_rows_is_said() -> None:
    """The range of the base model's own share, and the guidance beside each comparison."""
    shares = []
    for one, config in MODULE.chosen():
        if one.where.startswith(MODULE.TEST) and "four steps" not in one.where:
            result = MODULE.read(one.file)
            (entry,) = (each for each in result["configs"] if each["file"] == config)
            end = entry["summary"]["nfe"]
            shares.append(100 * (end["mean"] - end["gain"][0]))
    assert f"own share ({min(shares):.1f} to {max(shares):.1f} %)" in PAGE
    for group in (each for each in MODULE.GROUPS if each.comparisons):
        setting = MODULE.read(f"{group.alone}-guided.json")["setting"]
        assert (setting["guidance"], setting["steps"]) == (3.5, 20)
    assert "with guidance 3.5 and 20 steps" in PAGE


def test_the_index_has_every_page() -> None:
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\w[\w-]*\.md)\)", PAGES["docs/README.md"]))
