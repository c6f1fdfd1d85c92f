"""A comparison whose runs were made by several commands, as on several GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from comparekit import no_training, plan, scores, tick

from flowrl.runs.compare.compare import run_comparison as compare

pytestmark = pytest.mark.integration


def test_seeds_of_two_commands_are_one_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe of docs/compare.md: nothing is trained again, and the result is that of one
    command for both seeds. Budgets are counted in calls."""
    tick(monkeypatch)
    whole = plan(tmp_path, seeds=(0, 1))
    whole = whole._replace(budgets=whole.budgets._replace(seconds=0.0))
    want = compare(whole, quiet=True)
    joined = whole._replace(runs=tmp_path / "joined", out=tmp_path / "joined.json")
    for seed in whole.seeds:
        folder = tmp_path / f"gpu{seed}"
        one = whole._replace(seeds=(seed,), runs=folder / "runs", out=folder / "result.json")
        compare(one, quiet=True)
        run = f"toy-a/seed{seed}"
        shutil.copytree(one.runs / run, joined.runs / run)
    shutil.copytree(one.runs / "base", joined.runs / "base")
    with monkeypatch.context() as patch:
        no_training(patch)
        found = compare(joined, quiet=True)
    assert len(found["configs"][0]["seeds"]) == 2
    for result in (want, found):
        for run in result["configs"][0]["seeds"]:
            # of the machine: what the clock of the test ticked before
            run.pop("seconds")
            for row in run["curve"]:
                row.pop("seconds")
            run["at"]["nfe"].pop("seconds")
            run.pop("environment", None)
        result["configs"][0]["summary"]["nfe"].pop("seconds", None)
    assert scores(found) == scores(want)
