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
from flowrl.runs.compare.records import read_result
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


def quickstart(result: Result, _: Path) -> Result:
    """The gain of all runs by the shares of their prompts."""
    return {**result, "gain": module_of("results", "quickstart").gain(result["runs"].values())}


def counted_doctor(result: Result, _: Path) -> Result:
    """Faults that the doctor named, and configs of which it says nothing."""
    silent = sum(not row["findings"] for row in result["shipped"])
    named = sum(row["named"] for row in result["results"])
    counts = {"faults": len(result["results"]), "configs": len(result["shipped"])}
    return {**result, **counts, "named": named, "silent": silent}


def counted_faults(result: Result, _: Path) -> Result:
    missed = [row["claim"] for row in result["results"] if not row["caught"]]
    return {**result, "faults": len(result["results"]), "missed": missed}


def covered(result: Result, _: Path) -> Result:
    return {**result, "least": min(row["held"] for row in result["rows"])}


def side_by_side(result: Result, _: Path) -> Result:
    """Our figures over theirs."""
    ratios = module_of("bench/side_by_side", "side_by_side").ratios
    trainers, name = result["trainers"], result["trainer"]
    ours = {key: one for key, one in trainers.items() if key != name}
    again = {key: ratios(one, trainers[name]) for key, one in ours.items()}
    return {**result, "ratios": again}


KINDS: dict[str, Callable[[Result, Path], Result]] = {
    "flowrl comparison": comparison,
    "flowrl demonstration": demonstration,
    "flowrl judge agreement": judge,
    "flowrl quickstart": quickstart,
    "flowrl coverage of intervals": covered,
    "seeds": seeds,
    "doctor": counted_doctor,
    "faults": counted_faults,
    "side-by-side": side_by_side,
}
"""Kind of a file, or how its name begins -> what works its numbers out again from what it holds."""
COUNTS = ("named", "silent", "faults", "least")
ELSEWHERE = {
    "gains": "test_again.py, from gains-outcomes.json",
    "gains-outcomes": "test_again.py",
    "estimates": "tests/cost/test_estimate_table.py",
    "profiles": "tests/cost/test_fit_card.py",
    "first-gpu-run": "test_first_gpu_run.py, a row of which is counted again",
    "published-code": "test_published_code.py",
    "pairs": "tests/runs/test_rehearse.py",
    "adapters": "tests/models/test_adapter_outside.py",
    "pipelines": "tests/models/test_pipeline_table.py",
    "votes": "test_measured_votes.py: the table is worked out from curves over votes",
    "sizes": "test_carried_over.py, the table from outcomes",
    "student": "test_carried_over.py, the table from outcomes",
    "transfer": "test_carried_over.py, the table from outcomes",
    "performance-queue": "measurements, of which the file says nothing else",
}
"""File without a kind -> what holds its numbers."""


@cache
def read(file: Path) -> Result:
    found: Result = json.loads(file.read_text(encoding="utf-8"))
    return found


def kind_of(file: Path) -> str:
    """Return the kind of a result file; "" where nothing in it follows from anything else."""
    result = read(file)
    named = next((name for name in KINDS if file.stem.startswith(name)), "")
    kind = result.get("kind", "seeds" if {"seeds", "gain"} <= result.keys() else named)
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


def leaf(value: Any, path: str) -> tuple[Any, Any, Any]:
    """Return what holds the number at a path, under which key, and the number."""
    *above, last = path.strip(".").split(".")
    for name in above:
        value = value[int(name) if isinstance(value, list) else name]
    key = int(last) if isinstance(value, list) else last
    return value, key, value[key]


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


def test_every_file_is_bound() -> None:
    """A kind of result file that is new needs its line in KINDS, or in ELSEWHERE."""
    assert {file.stem for file in FILES if not kind_of(file)} == ELSEWHERE.keys()
    # an interval follows from outcomes, or there is none
    loose = set()
    for file in FILES:
        keys = [key for key, value in leaves(read(file)) if value is not None]
        if any(".interval." in key for key in keys) and not kind_of(file):
            loose.add(file.name)
    assert loose == set()


@pytest.mark.parametrize("file", [file for file in FILES if kind_of(file)], ids=lambda f: f.stem)
def test_numbers_follow_from_outcomes(file: Path) -> None:
    """Where the estimator has changed, the command that made the file writes it anew; of the
    demonstration: python scripts/results/demonstration/summaries.py."""
    assert wrong(read(file), KINDS[kind_of(file)](read(file), file)) == []


@pytest.mark.parametrize("file", [file for file in FILES if kind_of(file)], ids=lambda f: f.stem)
def test_a_number_that_was_changed_is_found(file: Path) -> None:
    """The first of each kind of number that the file has worked out."""
    for worked in ("mean", "agreement", "interval.1", *COUNTS):
        places = [key for key, value in leaves(read(file)) if key.endswith(f".{worked}")]
        if not places or leaf(read(file), places[0])[2] is None:
            continue
        made = copy.deepcopy(read(file))
        node, last, value = leaf(made, places[0])
        node[last] = value + 0.001
        assert wrong(made, KINDS[kind_of(file)](made, file)) != [], places[0]


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
        node, last, value = leaf(changed, key)
        node[last] = value + 0.01
        assert wrong(changed, summarize_result(changed)) != [], key
