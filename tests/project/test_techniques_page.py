"""What docs/group-techniques.md says in sentences of the comparison on the toy is what its result
file holds."""

from __future__ import annotations

import json
from typing import Any

from docskit import PAGES, ROOT

PAGE = " ".join(PAGES["docs/group-techniques.md"].split())


def found() -> dict[str, Any]:
    """The techniques by their short names."""
    file = ROOT / "assets/results/techniques-toy.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))["techniques"])


def test_what_is_no_technique_stands_beside() -> None:
    """What some techniques bring along, by itself, and which of them gain more than it."""
    rows = found()
    gain = {name: row["mean"] for name, row in rows.items()}
    wide, forward, both = (gain[name] for name in ("wide", "forward", "forward_wide"))
    assert f"a range of 0.2 alone gains {100 * wide:.1f} points" in PAGE
    assert f"need gains {100 * forward:.1f} points by itself, and {100 * both:.1f} with" in PAGE
    looser = ("ce_gppo", "dcpo_bounds", "dhpo", "clip_higher")
    assert max(gain[name] for name in looser) < wide
    assert gain["trpa"] < both and 2 * both < gain["simpo"] < 2.2 * both
    assert all(rows[name]["plain"] == "plain" for name in ("wide", "forward", "forward_wide"))


def test_salt_is_the_tree() -> None:
    """Its runs are, to the bit, the plain runs that Stratified GRPO is held to."""
    file = ROOT / "assets/results/techniques-toy.json"
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    tree, plain = runs["salt"], runs["plain-stratified"]
    scores = [run["score"] for run in tree]
    assert scores == [run["score"] for run in plain]
    assert f"that plain run, {100 * sum(scores) / len(scores):.1f}" in PAGE
