"""What a committed result file says follows from the outcomes in it, by flowrl's own functions: a
summary that was changed by hand, or is of another estimator, is found."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from docskit import ROOT
from scriptkit import module_of

from flowrl.evaluation.statistics import wilson
from flowrl.runs.compare.result_file import read_result
from flowrl.runs.compare.summary import summarize_result

Result = dict[str, Any]
FILES = sorted((ROOT / "assets/results").glob("*.json"))


def comparison(result: Result, file: Path) -> Result:
    """A comparison: summaries, pairs, statistics."""
    return summarize_result(read_result(file))


def demonstration(result: Result, _: Path) -> Result:
    found: Result = module_of("results/demonstration", "summaries").summarized(result)
    return found


def judge(result: Result, _: Path) -> Result:
    """Shares and intervals of counts."""
    again = copy.deepcopy(result)
    for target in again["targets"].values():
        for one in (target, *target["tasks"].values()):
            right, n = one["both_right"], one["images"]
            same = right + one["both_wrong"]
            one |= {"agreement": same / n, "interval": [*wilson(same, n)]}
            one |= {"judge": (right + one["judge_alone"]) / n}
            one |= {"checker": (right + one["checker_alone"]) / n}
        parts = ("both_right", "judge_alone", "checker_alone", "both_wrong")
        for key in (*parts, "images"):
            target[key] = sum(task[key] for task in target["tasks"].values())
        assert target["images"] == sum(target[key] for key in parts)
    return again


def seeds(result: Result, _: Path) -> Result:
    """Gains of several seeds."""
    gain = module_of("assets", "learning").gain
    named = [name for name in result["seeds"][0]["after"] if name != "strict"]
    gains = {"gain": {"reward": named[0], **gain(result["seeds"], named[0])}}
    if "strict" in result:
        gains["strict"] = gain(result["seeds"], "strict")
    return {**result, **gains}


KINDS: dict[str, Callable[[Result, Path], Result]] = {
    "flowrl comparison": comparison,
    "flowrl demonstration": demonstration,
    "flowrl judge agreement": judge,
    "seeds": seeds,
}
"""Kind of a file -> what works its numbers out again from what it holds."""


@cache
def read(file: Path) -> Result:
    found: Result = json.loads(file.read_text(encoding="utf-8"))
    return found


def kind_of(file: Path) -> str:
    """Return the kind of a result file; "" where nothing in it follows from anything else."""
    result = read(file)
    kind = result.get("kind", "seeds" if {"seeds", "gain"} <= result.keys() else "")
    return kind if kind in KINDS else ""


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything in a JSON value that holds nothing itself."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        where = f"{path}.{key}"
        if isinstance(each, dict | list) and each:
            yield from leaves(each, where)
        else:
            yield where, each


def wrong(result: Result, again: Result) -> list[str]:
    """Return where a file differs from what was worked out again, but for rounding."""
    one, other = dict(leaves(result)), dict(leaves(json.loads(json.dumps(again))))
    said = []
    for key in one | other:
        a, b = one.get(key, "nothing"), other.get(key, "nothing")
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        if a != b and not (numbers and math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)):
            said.append(f"{key}: {a} in the file, {b} worked out")
    return said


def test_every_file_with_outcomes_is_bound() -> None:
    """A kind of result file that is new needs its line in KINDS."""
    holding = set()
    for file in FILES:
        if any(".outcomes" in key for key, _ in leaves(read(file))):
            holding.add(file)
    assert {file.name for file in holding if not kind_of(file)} == set()
    bound = {file.name for file in FILES if kind_of(file)}
    assert {"demonstration.json", "judge.json", "edits.json", "moving.json"} <= bound


@pytest.mark.parametrize("file", [file for file in FILES if kind_of(file)], ids=lambda f: f.stem)
def test_numbers_follow_from_outcomes(file: Path) -> None:
    """Where the estimator has changed, the command that made the file writes it anew; of the
    demonstration: python scripts/results/demonstration/summaries.py."""
    assert wrong(read(file), KINDS[kind_of(file)](read(file), file)) == []


@pytest.mark.parametrize("file", [file for file in FILES if kind_of(file)], ids=lambda f: f.stem)
def test_a_number_that_was_changed_is_found(file: Path) -> None:
    """The first mean or agreement with an interval, and an end of that interval."""
    for part in ("value", "end"):
        made = copy.deepcopy(read(file))
        one = next(iter(made["targets"].values())) if "targets" in made else made.get("gain")
        one = one or made["rl"]
        if part == "value":
            one["mean" if "mean" in one else "agreement"] += 0.001
        else:
            one["interval"][1] += 0.001
        assert len(wrong(made, KINDS[kind_of(file)](made, file))) == 1


def test_a_comparison_is_worked_out_again(tmp_path: Path) -> None:
    """A small one: its summary, a pair and a statistic of all, each changed by hand."""
    from comparisonkit import config
    from comparisonkit import result as made_up

    result = json.loads(json.dumps(made_up(config("a", [0.5, 0.6]), config("b", [0.4, 0.7]))))
    assert wrong(result, summarize_result(result)) == []
    shown = [key for key, value in leaves(result) if isinstance(value, float)]
    worked = [key for key in shown if "summary" in key or key.startswith(".pairs")]
    assert len(worked) > 20
    for key in worked[::7]:
        changed = copy.deepcopy(result)
        node: Any = changed
        *above, last = key.strip(".").split(".")
        for name in above:
            node = node[int(name) if isinstance(node, list) else name]
        node[int(last) if isinstance(node, list) else last] += 0.01
        assert wrong(changed, summarize_result(changed)) != [], key
