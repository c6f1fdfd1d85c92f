"""What a run says of its gain: the interval of paired prompts, one sentence, and the base model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from runkit import make_home

from flowrl.runs.folder import EVALS
from flowrl.runs.gain import Gain, base_is_best, gain_of, run_gain
from flowrl.runs.report.page import html_report, story


def row(
    iteration: int, means: Sequence[float | None], images: int = 1, **more: Any
) -> dict[str, Any]:
    """Return a line of eval.jsonl with one task."""
    known = [mean for mean in means if mean is not None]
    mean = sum(known) / len(known)
    found = {"iteration": iteration, "score": "red", "red": mean, "by_prompt": {"all": means}}
    return {**found, "images": images * len(means), **more}


def test_a_gain_of_right_images_is_told_in_points() -> None:
    """Of 200 prompts 60 were wrong and are right: 30 points, by hand +- 1.96 sqrt(.3 x .7 / 200) =
    6.4."""
    found = gain_of([row(0, [0.0] * 200), row(8, [1.0] * 60 + [0.0] * 140)])
    assert found and found.change == pytest.approx(0.3) and found.certain
    assert found.interval and found.interval == pytest.approx((0.236, 0.364), abs=0.01)
    low, high = (f"{100 * end:.1f}".rstrip("0").rstrip(".") for end in found.interval)
    sentence = f"red gains {low} to {high} points (95 % interval, 200 images of 200 test prompts)"
    assert found.sentence == sentence and repr(found) == f"Gain({sentence})"
    half = f"{50 * (found.interval[1] - found.interval[0]):.1f}".rstrip("0").rstrip(".")
    assert found.short == f"+30±{half} points"
    # the other way round
    lost = gain_of([row(0, [1.0] * 60 + [0.0] * 140), row(8, [0.0] * 200)])
    assert lost and lost.sentence == sentence.replace("gains", "loses")


def test_a_change_by_chance_says_what_could_have_been_told() -> None:
    half = [1.0, 0.0] * 50
    found = gain_of([row(0, half), row(8, half[1:] + half[:1])])
    assert found and not found.certain and found.interval
    half_width = 100 * (found.interval[1] - found.interval[0]) / 2
    assert "the change of red by 0 points cannot be told from chance: 100 images of 100 test " in (
        found.sentence
    )
    told = float(found.sentence.rpartition("above ")[2].removesuffix(" points"))
    assert told == pytest.approx(half_width, abs=0.06)


def test_shares_differ_by_no_more_than_a_hundred_points() -> None:
    """Two prompts decide nothing: their interval is longer than all that could be."""
    found = gain_of([row(0, [1.0, 1.0]), row(8, [1.0, 1.0])])
    assert (
        found
        and not found.certain
        and "2 images of 2 test prompts are too few to tell any" in (found.sentence)
    )


def test_scores_that_are_no_shares_keep_their_unit() -> None:
    before = [20.0 + i / 10 for i in range(20)]
    found = gain_of([row(0, before), row(3, [one + 1.5 + i / 40 for i, one in enumerate(before)])])
    assert found and not found.points and "points" not in found.sentence
    assert found.sentence.startswith("red gains 1.6") and found.change == pytest.approx(1.7375)
    # with four images of each prompt quarters are shares, and thirds are not
    quarters = gain_of([row(0, [0.25, 0.5], 4), row(3, [0.75, 0.5], 4)])
    thirds = gain_of([row(0, [1 / 3, 0.5], 4), row(3, [0.75, 0.5], 4)])
    assert quarters and quarters.points and thirds and not thirds.points


def test_prompts_that_one_side_did_not_score_count_on_neither() -> None:
    found = gain_of([row(0, [0.0, None, 0.5, 1.0]), row(3, [0.5, 1.0, None, 1.5])])
    assert found and found.prompts == 2 and found.change == pytest.approx(0.5)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(0, [1.0])],
        [row(2, [0.0]), row(4, [1.0])],
        [row(0, [0.0]), row(2, [1.0], score="x")],
    ],
)
def test_there_is_no_gain_without_both_sides(rows: list[dict[str, Any]]) -> None:
    assert gain_of(rows) is None


@pytest.mark.parametrize("damage", [None, {"other": [0.0, 0.0]}, {"all": [0.0]}, {"all": "no"}])
def test_evaluations_that_cannot_be_paired_have_no_interval(damage: Any) -> None:
    found = gain_of([row(0, [0.0, 0.0]), row(3, [1.0, 1.0], by_prompt=damage)])
    assert found and found.interval is None and not found.certain
    assert found.sentence.startswith("red changed by +1")


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    (folder / EVALS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_base_model_may_be_the_best(tmp_path: Path) -> None:
    """Equal is not better; what was judged within a budget does not count."""
    said = "no checkpoint is better than the base model: red 0.500 before training"
    worse = [row(0, [0.5]), row(2, [0.25]), row(4, [0.5])]
    assert base_is_best(write(tmp_path, *worse)).startswith(said)
    assert base_is_best(write(tmp_path, *worse, row(6, [1.0], marks=["nfe"]))).startswith(said)
    assert base_is_best(write(tmp_path, *worse, row(6, [0.6]))) == ""
    assert base_is_best(write(tmp_path, row(0, [0.5]))) == ""


@pytest.mark.integration
def test_console_summary_and_report_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of the toy model that learns, and one that goes the other way."""
    run = make_home(tmp_path) / "whole"
    found = run_gain(run)
    assert isinstance(found, Gain)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["verdict"] == found.sentence
    assert summary["gain_interval"] == pytest.approx(found.interval)
    assert story(run)["verdict"][0] == found.sentence and found.sentence in html_report(run)
