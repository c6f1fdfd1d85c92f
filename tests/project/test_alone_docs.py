"""What costs no training stands beside the methods in docs/compare.md, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scriptkit import script_module

from flowrl.evaluation.crossed_errors import crossed


def test_a_table_by_hand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two tasks, three prompts; means are over tasks, prompts are paired by their order."""
    docs = script_module("alone_docs")
    monkeypatch.setattr(docs, "RESULTS", tmp_path)
    # base: colors 1 and .5, counting 0 -> (.75 + 0) / 2
    base = {"tags": ["colors", "counting", "colors"], "outcomes": "11 00 10"}
    runs: list[Any] = [{"at": {"nfe": {"outcomes": text}}} for text in ("11 10 10", "11 11 10")]
    configs = [
        {"name": "shapes-flow-grpo", "seeds": [*runs, {"at": {"nfe": None}}]},
        {"name": "shapes-spo", "seeds": runs[:1]},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"base": base, "configs": configs}))
    for name, colors, counting in (("guided", [1, 0.5], [1]), ("best-of-8", [1, 1], [1])):
        setting = {"guidance": 3.5, "steps": 20}
        if name == "best-of-8":
            setting = {"guidance": 1.0, "steps": 10, "best_of": 8}
        found = {"by_prompt": {"counting": counting, "colors": colors}, "setting": setting}
        (tmp_path / f"own-{name}.json").write_text(json.dumps(found))
    lines = docs.table(docs.Group("", "own", ("one",))).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines[2:]]
    shares = {row[0]: row[1] for row in cells}
    assert [row[3] for row in cells] == ["10", "40", "80", "10", "10"]
    assert shares["base model"] == "37.5 %"
    assert shares["base model, guidance 3.5, 20 steps"] == "87.5 %"
    assert shares["base model, best of 8 by the reward"] == "100.0 %"
    # (.75 + .5) / 2 and (.75 + 1) / 2; the run that did not get there is left out
    assert shares["`shapes/flow_grpo`"] == "75.0 %"
    row = next(row for row in cells if row[0] == "`shapes/flow_grpo`")
    assert [cell.split(" ")[0] for cell in row[4:]] == ["-12.5", "-25.0"]
    # the one error model, over prompts, and over seeds and prompts
    tags, seeds = ["colors", "counting", "colors"], np.array([[1, 0.5, 0.5], [1, 1, 0.5]])
    for name, values in (("base model", np.array([[1, 0, 0.5]])), ("`shapes/flow_grpo`", seeds)):
        ends = crossed(values, tags)["interval"]
        low, high = (100 * min(1.0, max(0.0, end)) for end in ends)
        shown = next(row[2] for row in cells if row[0] == name)
        assert shown == f"{low:.1f} to {high:.1f}"
    # one seed has no interval
    assert cells[-1] == ["`shapes/spo`", "62.5 %", "–", "10", "-25.0", "-37.5"]


def test_every_table_has_its_place() -> None:
    """A page that lost its marks would stay as it is, and pass for up to date."""
    docs, six = script_module("alone_docs"), script_module("six_docs")
    wanted = [(group.page, f"{group.mark}, alone: table") for group in docs.GROUPS]
    for part in ("tuning", "arms", "alone", "all", "tasks", "over tasks"):
        wanted.append((six.PAGE, f"six, {part}: table"))
    for name in six.METHODS:
        page = six.ROOT / "docs" / "methods" / f"{name.replace('-', '_')}.md"
        wanted.append((page, f"six: {name}"))
    wanted += [(docs.FACTORIAL, f"{part}: table") for part in ("factorial", "clip")]
    for page, mark in wanted:
        assert page.read_text(encoding="utf-8").count(f"<!-- {mark} -->") == 1, mark
