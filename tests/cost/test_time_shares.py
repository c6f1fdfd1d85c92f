"""Where the work of 1,000 iterations goes, and what `flowrl estimate` says first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from estimatekit import made

from flowrl.cli.main import main
from flowrl.core.prompts import load_prompts
from flowrl.cost.estimate import estimate
from flowrl.cost.fit_card import PROFILES, change, limit_of, profile_that_fits
from flowrl.cost.time_shares import time_lines, work_of_iterations

pytestmark = pytest.mark.integration


def test_the_work_of_many_iterations(tmp_path: Path) -> None:
    """An iteration's work, 1,000 times. Of evaluations: before and after, and each `every`; twice
    the denoising steps take twice the network calls. A reward without a network adds nothing."""
    config = made(tmp_path, "sd3, full")
    config = change(change(config, "eval.every", 0), "samples.every", 0)
    found = estimate(config)
    work = work_of_iterations(found)
    assert all(work[name] == 1000 * count for name, count in found.flops.items())
    assert work["rewards"] == 0 < work["evaluations"]
    # 2 evaluations become 2 + 4
    often = work_of_iterations(estimate(change(config, "eval.every", 250)))["evaluations"]
    grids = 2 * config.samples.prompts
    held = len(load_prompts(config.prompts.test))
    images = held * config.eval.images
    assert often / work["evaluations"] == pytest.approx((6 * images + grids) / (2 * images + grids))
    # steps: network calls grow, decoding does not
    steps = config.eval.steps
    ends = []
    for count in (steps, 2 * steps, 3 * steps):
        longer = estimate(change(config, "eval.steps", count))
        ends.append(work_of_iterations(longer)["evaluations"])
    assert ends[1] - ends[0] == ends[2] - ends[1] > 0


def test_the_shares_are_of_one_whole(tmp_path: Path) -> None:
    """In percent, the largest first; the hours are at 1e14 operations a second."""
    found = estimate(made(tmp_path, "sd3, full"))
    head, below = time_lines(found)
    words = head.partition(": ")[2].split(", ")
    shares = [float(word.split()[-2]) for word in words if word.endswith("%")]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.3)
    assert "rewards none counted" in words
    hours = sum(work_of_iterations(found).values()) / 1e14 / 3600
    assert f"{hours:.3g} hours at 100.0 TFLOP a second" in below


def test_the_profile_that_fits(tmp_path: Path) -> None:
    """The largest one for the card; a card that is too small for all is told so."""
    config = made(tmp_path, "sd3, LoRA, guidance")
    for card, name in ((24, "24gb"), (60, "48gb"), (96, "80gb"), (8, "24gb")):
        found = profile_that_fits(config, gigabytes=card)
        assert found is not None and found.name == name and name in PROFILES
        assert found.fits and found.phase.bytes <= limit_of(card)
    found = profile_that_fits(config, gigabytes=1.000001)
    assert found is not None and not found.fits


def test_the_verdict_is_the_first_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And after a no the profile; JSON has both."""
    config, file = made(tmp_path, "sd3, LoRA, guidance"), tmp_path / "found.json"
    (tmp_path / "it.yaml").write_text(config.dump())
    line = ["estimate", f"{tmp_path}/it.yaml", "--plugin", "toykit", "--json", f"{file}"]
    assert main([*line, "--card", "24"]) == 0
    assert capsys.readouterr().out.startswith("fits a 24 GB card: yes, ")
    assert main([*line, "--card", "1.000001"]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first.startswith("fits a 1 GB card: no, ")
    assert second.startswith("--profile 24gb is not enough: ")
    card = json.loads(file.read_text())["card"]
    assert (card["profile"], card["profile_fits"], card["verdict"]) == ("24gb", False, first)
