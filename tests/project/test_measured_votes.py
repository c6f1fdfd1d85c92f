"""What votes buy: the simulated person, the votes that a rise took, and the table."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from scriptkit import script_module

from flowrl.core.prompts import load_prompts
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from flowrl.evaluation.votes import ask_people, keep_image, opinions, pair_of, read_votes

VOTES = script_module("results/votes")


def kept(folder: Path, image: torch.Tensor) -> str:
    png = io.BytesIO()
    levels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(levels).save(png, "PNG")
    return keep_image(folder, png.getvalue())


def asked(folder: Path, count: int) -> dict[Any, float]:
    """Ask about right scenes beside those of another prompt -> what is true of each pair."""
    records = load_prompts(VOTES.PROMPTS).records
    truth = {}
    for number in range(count):
        mine, other = records[number % 12], records[(number + 5) % 12]
        images = render(scenes_for([mine, other], np.random.default_rng(number)))
        # another prompt's scene may be as good
        if check(images, [mine, mine]).graded_angle.unique().numel() < 2:
            continue
        right, wrong = (kept(folder, image) for image in images)
        pair = pair_of(mine["prompt"], right, wrong)
        truth[pair] = float(pair.first == right)
    ask_people(folder, list(truth))
    return truth


def test_the_person_prefers_what_is_right_and_errs_as_often_as_told(tmp_path: Path) -> None:
    """50 pairs and more of a right scene and another: without errors all votes are true, and with a
    fifth of errors as many are not as a binomial has in 999 of 1,000 cases."""
    truth = asked(tmp_path / "a", 60)
    count = len(truth)
    assert VOTES.Person(tmp_path / "a", 0, wrong=0.0).vote() == count >= 50
    said = opinions(read_votes(tmp_path / "a"))
    assert {pair: votes[0] for pair, votes in said.items()} == truth
    # nothing waits for a second vote
    assert VOTES.Person(tmp_path / "a", 0, wrong=0.0).vote() == 0
    truth = asked(tmp_path / "b", 60)
    assert VOTES.Person(tmp_path / "b", 1).vote() == count
    said = opinions(read_votes(tmp_path / "b"))
    wrong = sum(said[pair][0] != truth[pair] for pair in truth)
    low, high = stats.binom.ppf([5e-4, 0.9995], count, VOTES.WRONG)
    assert low <= wrong <= high


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([[100, 0.5], [200, 0.7]], 150.0),  # half way between both
        ([[100, 0.7]], 50.0),  # from the start on
        ([[100, 0.55], [200, 0.55]], None),
        ([[100, 0.4], [300, 0.8]], 200.0),  # after it fell
    ],
)
def test_votes_to_a_rise_by_hand(curve: list[list[float]], expected: float | None) -> None:
    """From .5 to .6 on straight lines between evaluations."""
    found = VOTES.votes_to(curve, 0.5)
    assert found == (None if expected is None else pytest.approx(expected))


def test_the_table_by_hand() -> None:
    """Two seeds that gained 20 and 10 points: 15, with Student's interval; one never got to +10."""
    runs = {
        "0": {"votes": 200, "curve": [[200, 0.7]]},
        "1": {"votes": 220, "curve": [[110, 0.55], [220, 0.59]]},
    }
    result = {"base": 0.5, "guided": 0.62, "rows": {"one": runs}}
    row = VOTES.summary(result)["one"]
    assert row["gain"] == pytest.approx(0.145) and row["votes"] == 210
    assert row["half"] == pytest.approx(stats.t.ppf(0.975, 1) * 0.055)
    assert row["to"] == [pytest.approx(100), None]
    lines = VOTES.table(result).splitlines()
    assert "+14.5" in lines[2] and "100, never" in lines[2] and "+12.0" in lines[3]
    assert "50.0 %" in lines[-1]


def test_a_row_trains_on_votes_alone() -> None:
    """Both judge the prompts that they train, ask as many people, and watch the checker with weight
    0."""
    for name in VOTES.ROWS:
        config = VOTES.config_of(name, Path("votes")).to_dict()
        assert config["prompts"]["train"] == config["prompts"]["test"] == VOTES.PROMPTS
        weights = {key: row["weight"] for key, row in config["rewards"].items()}
        assert weights == {"people": 1, "strict": 0} and config["train"]["prompts"] == 12
        assert config["eval"]["score"] == "strict" and config["train"]["group"] == VOTES.GROUP
