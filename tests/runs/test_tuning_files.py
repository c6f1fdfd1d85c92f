"""Searches of settings without a run: combinations, folders, ranking, tables, damaged files."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.cli.tune import read_choices
from flowrl.core.errors import ConfigError, DataError
from flowrl.runs.compare.trials import combinations, folder_of
from flowrl.runs.compare.tuning_file import FORMAT, KIND, ranked, read_tuning
from flowrl.runs.compare.tuning_report import tuning_figure, tuning_notes, tuning_rows

CHOICES = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q"]}


def test_all_combinations_or_some_of_them() -> None:
    # oracle: itertools.product, whose last key runs fastest too
    every = []
    for values in itertools.product(*CHOICES.values()):
        pairs = zip(CHOICES, values, strict=True)
        every.append(tuple(f"{key}={value}" for key, value in pairs))
    assert combinations(CHOICES) == every and combinations(CHOICES, 99) == every
    some = combinations(CHOICES, 5, draw=1)
    assert len(set(some)) == 5 and some == [c for c in every if c in some]
    assert some == combinations(CHOICES, 5, draw=1) != combinations(CHOICES, 5, draw=2)
    # each of the 12 is drawn equally often: 2000 draws of 5, so 833 each, std 22
    drawn = [c for seed in range(2000) for c in combinations(CHOICES, 5, draw=seed)]
    assert all(abs(drawn.count(c) - 2000 * 5 / 12) < 5 * 22 for c in every)


def test_a_larger_draw_holds_the_smaller_one() -> None:
    for seed in range(20):
        sizes = [set(combinations(CHOICES, most, draw=seed)) for most in range(1, 13)]
        assert all(one < two for one, two in itertools.pairwise(sizes))
        # a value that is added pushes some out, but moves none of the others
        more = combinations({**CHOICES, "b": ["x", "y", "z"]}, 12, draw=seed)
        assert {c for c in more if "b=z" not in c} <= sizes[-1]


@pytest.mark.parametrize(
    ("texts", "choices"),
    [
        (["a=1,2", "b=x"], {"a": ["1", "2"], "b": ["x"]}),
        (["p={fn: full, steps: 6},{fn: fork}"], {"p": ["{fn: full, steps: 6}", "{fn: fork}"]}),
        (["splits=[0, 1],[0, 2]"], {"splits": ["[0, 1]", "[0, 2]"]}),
        ([" a =1, 2", "b='x,y',z"], {"a": ["1", "2"], "b": ["'x,y'", "z"]}),
    ],
)
def test_values_of_a_key(texts: list[str], choices: dict[str, list[str]]) -> None:
    assert read_choices(texts) == choices


@pytest.mark.parametrize("text", ["a=1,,2", "a=", "a=[1,2", "a=1),2", "a='x,y"])
def test_values_that_cannot_be_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--try a"):
        read_choices([text])


def test_folders_differ_wherever_trials_do() -> None:
    assert folder_of(["optimizer.lr=1e-4", "loss.beta=0.1"]) == "loss.beta=0.1_optimizer.lr=1e-4"
    assert folder_of(["a=1", "b=2"]) == folder_of(["b=2", "a=1"])
    one, two = folder_of(["plan={fn: full}"]), folder_of(["plan={fn; full}"])
    assert one != two and "/" not in one and " " not in one
    # capitals are no difference to some systems, so that a code makes one
    assert folder_of(["name=Toy"]).lower() != folder_of(["name=toy"]).lower()
    long = [folder_of([f"{'x' * 80}={value}"]) for value in (1, 2)]
    assert long[0] != long[1] and max(map(len, long)) < 80


def _trial(change: str, *scores: float | None) -> dict[str, Any]:
    runs = []
    for seed, score in enumerate(scores):
        failed = "NaN" if score is None else None
        run = {"seed": seed, "score": score, "failed": failed, "iterations": 3 + seed, "nfe": 9.0}
        tasks = None if score is None else {"all": score}
        runs.append({**run, "tasks": tasks, "interval": None, "seconds": 1.0, "environment": 0})
    return {"changes": [change], "folder": change, "runs": runs}


def _result(*trials: dict[str, Any]) -> dict[str, Any]:
    values = [trial["changes"][0].partition("=")[2] for trial in trials]
    found = {"kind": KIND, "format": FORMAT, "config": "toy", "score": "strict", "nfe": 9.0}
    found |= {"settings": {"prompts": {"test": "list"}, "eval": {"images": 2}}, "counted": "calls"}
    found |= {"choices": {"lr": values}, "seeds": [0, 1], "environments": [{}]}
    base = {"score": 0.25, "tasks": {"all": 0.25}, "interval": [0.2, 0.3], "images": 4}
    return {**found, "base": base, "trials": list(trials)}


def test_the_best_has_the_best_mean_and_no_failure() -> None:
    trials = [_trial("lr=1", 0.2, 0.4), _trial("lr=2", 0.9, None), _trial("lr=3", 0.3, 0.3)]
    # by hand: .3 and .3 are equal, the first counts; one failed
    result = ranked(_result(*trials))
    assert result["best"] == 0
    assert [t["score"] for t in result["trials"]] == [pytest.approx(0.3), None, 0.3]
    rows = tuning_rows(result)
    assert rows[0] == ["trial", "strict %", "iterations", "lr", "all"]
    assert rows[1] == ["1*", "30.0", "3 to 4", "1", "30.0"]
    assert rows[3] == ["2", "failed", "3 to 4", "2", ""]
    assert rows[-1] == ["base", "25.0", "", "", "25.0"]
    assert "Trial 2, seed 1, failed: NaN" in tuning_notes(result)
    # a trial that still lacks a seed may become the best, so there is none yet
    waiting = ranked(_result(*trials, _trial("lr=4", 0.1)))
    assert waiting["best"] is None and tuning_rows(waiting)[4][1] == "1 of 2 seeds"
    assert "no best trial" in tuning_notes(waiting)[-1]
    # scores that are no shares are told as they are
    trials[0]["runs"][0] |= {"score": 22.0, "tasks": {"all": 22.0}}
    assert tuning_rows(ranked(_result(*trials)))[1][:2] == ["1*", "11.200"]


def test_long_values_have_room() -> None:
    """Ticks of neighbouring values do not lie on each other, and no value is read as a formula."""
    values = ["{fn: full, steps: 6, noise_scale: 0.5}", "{fn: fork, low: 0}", "a$\\frac$b"]
    trials = [_trial(f"lr={value}", 0.2, 0.3) for value in values]
    figure = tuning_figure(ranked(_result(*trials)))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
    assert all(one.x1 < two.x0 for one, two in itertools.pairwise(boxes))
    assert boxes[0].x0 >= 0
    assert min(box.y0 for box in boxes) > 0


DAMAGE: list[tuple[str, Any]] = [
    ("choices", {}),
    ("choices", {"lr": []}),
    ("seeds", []),
    ("seeds", [0]),
    ("settings", {}),
    ("trials.0.changes", []),
    ("trials.0.changes", ["lr=7"]),
    ("trials.0.changes", ["x=1"]),
    ("trials.0.runs.0.tasks", None),
    ("trials.0.runs.0.tasks", {"other": 0.1}),
    ("trials.0.runs.0.environment", 4),
    ("trials.0.runs.0.score", "high"),
]


@pytest.mark.parametrize(("where", "value"), DAMAGE)
def test_a_damaged_file_is_one_message(tmp_path: Path, where: str, value: Any) -> None:
    found = _result(_trial("lr=1", 0.2, 0.4))
    file = tmp_path / "x.json"
    file.write_text(json.dumps(found))
    assert read_tuning(file)["best"] == 0
    whole: Any = copy.deepcopy(found)
    part = whole
    *path, last = where.split(".")
    for key in path:
        part = part[int(key)] if key.isdecimal() else part[key]
    part[last] = value
    file.write_text(json.dumps(whole))
    with pytest.raises(DataError, match=r"x\.json: "):
        read_tuning(file)


def test_no_key_and_another_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--try KEY=VALUE"):
        combinations({})
    with pytest.raises(ConfigError, match="at most 100,000"):
        combinations(dict.fromkeys("abc", list(map(str, range(60)))))
    others: list[Any] = [{"kind": "flowrl comparison", "format": 1}, []]
    for content in others:
        (tmp_path / "x.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match="expected a flowrl tuning"):
            read_tuning(tmp_path / "x.json")
