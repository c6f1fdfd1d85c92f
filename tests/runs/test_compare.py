"""Comparisons of toy configs: exact accounts, stops and resumes, and runs that break."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from comparekit import (
    COST,
    SMALL,
    STEP,
    before_step,
    no_training,
    plan,
    raising,
    scores,
    tick,
)

from flowrl.core.errors import ConfigError, RewardError, RunError
from flowrl.evaluation.crossed_errors import weights_of
from flowrl.runs.compare.budgets import Budgets, Spent, trajectory
from flowrl.runs.compare.compare import Comparison
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.compare.one_run import spend
from flowrl.runs.compare.records import different, read_result
from flowrl.runs.compare.summary import unpacked
from flowrl.runs.evaluate import evaluate
from flowrl.runs.folder import lock, read_rows
from flowrl.runs.open_run import load_run
from flowrl.runs.stop import Interrupted, StopSignal

pytestmark = pytest.mark.integration


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch)


class Whole(NamedTuple):
    """An uninterrupted comparison of one config and two seeds."""

    what: Comparison
    result: dict[str, Any]

    def elsewhere(self, folder: Path) -> Comparison:
        """Return the same comparison in other folders, where nothing is yet."""
        return self.what._replace(runs=folder / "runs", out=folder / "out" / "result.json")

    def copied(self, folder: Path) -> Comparison:
        """Return the same comparison in other folders, with all that it left."""
        shutil.copytree(self.what.runs, folder / "runs")
        shutil.copytree(self.what.out.parent, folder / "out")
        return self.elsewhere(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    overrides = (*SMALL, "eval.score=red", "optimizer.lr=0.1")
    folder = tmp_path_factory.mktemp("whole")
    what = plan(folder, "toy-a", "toy-b", seeds=(0, 1), overrides=overrides)
    what = what._replace(configs=what.configs[:1])
    with pytest.MonkeyPatch.context() as patch:
        tick(patch)
        return Whole(what, compare(what, quiet=True))


# ----------------------------------------------------------------------------------------- accounts


def test_accounts_are_exact(whole: Whole) -> None:
    """104 evaluations and 0.5 s an iteration: marks at 130 and 260 fall after iterations 2 and 3,
    2.25 s after 5."""
    run = whole.result["configs"][0]["seeds"][0]
    assert run["failed"] is None
    assert (run["iterations"], run["nfe"], run["seconds"]) == (5, 5 * COST, 5 * STEP)
    rows = [(r["iteration"], r["nfe"], r["seconds"], r["marks"], r["budget"]) for r in run["curve"]]
    assert rows == [
        (2, 2 * COST, 2 * STEP, [1], []),
        (3, 3 * COST, 3 * STEP, [2], ["nfe"]),
        (5, 5 * COST, 5 * STEP, [], ["seconds"]),
    ]
    # what each reward said, beside the score: a proxy that rises while the score falls is seen
    logged = read_rows(whole.what.runs / "toy-a" / "seed0", "eval.jsonl")
    assert len(run["curve"]) == len(logged) > 0
    for point, row in zip(run["curve"], logged, strict=True):
        assert point["rewards"] == row["rewards"]
        assert row["rewards"][row["score"]] == pytest.approx(row[row["score"]], rel=1e-5)
    ends = {"nfe": run["curve"][1], "seconds": run["curve"][2]}
    for budget, row in run["at"].items():
        assert {key: row[key] for key in row if key != "outcomes"} == ends[budget]
        # the outcomes of every image average to the score: prompts, then tasks
        each = np.array(unpacked(row["outcomes"])).mean(1)
        assert each @ weights_of(whole.result["base"]["tags"]) == pytest.approx(
            row["score"], abs=1e-5
        )
    metrics = read_rows(whole.what.runs / "toy-a" / "seed0", "metrics.jsonl")
    assert [row["nfe"] for row in metrics] == [COST] * 5
    assert run["trajectory"]["nfe"] == [COST * (i + 1) for i in range(5)]
    last = [metrics[3]["reward"], metrics[4]["reward"]]
    assert run["last_quarter"]["reward"] == pytest.approx(sum(last) / 2)


@pytest.mark.parametrize(
    ("nfe", "seconds", "ends"),
    [
        (2.5, 1.5, [(2, ["seconds"]), (3, ["nfe"])]),
        (2, 2, [(2, ["nfe", "seconds"])]),  # met exactly; both in one iteration are judged once
    ],
)
def test_a_run_goes_on_until_both_budgets_are_used_up(
    tmp_path: Path, nfe: float, seconds: float, ends: list[Any]
) -> None:
    """Budgets in iterations: 1.5 of seconds end after 2, 2.5 of evaluations after 3."""
    what = plan(tmp_path, budgets=Budgets(nfe * COST, seconds * STEP, 1))
    (run,) = compare(what, quiet=True)["configs"][0]["seeds"]
    assert [(r["iteration"], r["budget"]) for r in run["curve"]] == ends
    assert run["nfe"] == ends[-1][0] * COST


def test_scores_are_those_of_the_weights_at_that_time(whole: Whole) -> None:
    """The base is the model before training, the end the last checkpoint's averaged weights,
    evaluated anew."""
    folder = whole.what.runs / "toy-a" / "seed0"
    end = whole.result["configs"][0]["seeds"][0]["at"]["seconds"]
    for weights, found in (("base", whole.result["base"]), ("ema", end)):
        model, config, _ = load_run(folder, weights=weights, plugins=("toykit",))[:3]
        again = evaluate(model, config)
        assert found["score"] == again["red"] and found["interval"] == again["interval"]
        assert found["tasks"] == {task: values["mean"] for task, values in again["tasks"].items()}
    model, config, _ = load_run(folder, weights="current", plugins=("toykit",))[:3]
    assert evaluate(model, config)["red"] != end["score"]


def test_marks_and_ends() -> None:
    budgets = Budgets(90, 10, 3)
    before, now = Spent(4, 20, 4.0), Spent(5, 60, 10.0)
    assert budgets.marks(before, now) == [1, 2] and budgets.ended(before, now) == ["seconds"]
    assert budgets.marks(now, Spent(6, 89.9, 11.0)) == []
    assert budgets.ended(now, Spent(6, 90, 11.0)) == ["nfe"]
    assert budgets.used(now) == pytest.approx(60 / 90) and budgets.used(Spent(9, 900, 5.0)) == 0.5
    assert Budgets(90, 0, 0).used(Spent(9, 45, 0.1)) == 0.5


def test_long_trajectories_become_means_of_blocks() -> None:
    rows = []
    for i in range(200):
        spent = Spent(i, 10.0 * (i + 1), i + 1.0).metrics()
        rows.append({"iteration": i, **spent, "reward": float(i)})
    found = trajectory(rows)
    assert found["reward"] == [4 * i + 1.5 for i in range(50)] and found["ratio_std"] == [None] * 50
    assert found["nfe"] == [40.0 * (i + 1) for i in range(50)]
    assert trajectory(rows[:3])["reward"] == [0.0, 1.0, 2.0] and trajectory([])["reward"] == []


# ----------------------------------------------------------------------------------- stop and go on


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


AFTER = "stopped after iteration {}, saved .*seed0/checkpoints.*the same command goes on"
DOWN = RewardError("server down")


@pytest.mark.parametrize(
    ("iteration", "happens", "raised", "words"),
    [
        (0, ctrl_c, Interrupted, AFTER.format(1)),
        (4, ctrl_c, Interrupted, "stopped between two runs.*the same command goes on"),
        (1, raising(KeyboardInterrupt()), KeyboardInterrupt, ".*"),  # no checkpoint yet
        # evaluations since the last checkpoint are made again
        (3, raising(DOWN), RewardError, "server down\n.*seed0 goes on from its newest checkpoint"),
    ],
)
def test_stopped_or_crashed_and_resumed_is_uninterrupted(
    whole: Whole,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    iteration: int,
    happens: Callable[[], None],
    raised: type[BaseException],
    words: str,
) -> None:
    """In an iteration of the first run, or after it; none of it is held against the config: nothing
    is recorded, and the same command gives the same result."""
    what = whole.elsewhere(tmp_path)
    what = what._replace(seeds=(0, 1) if "between" in words else (0,))
    with monkeypatch.context() as patch:
        before_step(patch, iteration, happens)
        with pytest.raises(raised, match=words):
            compare(what, quiet=True)
    parts = compare(what, quiet=True)
    (found,), (wanted,) = scores(parts)["configs"], scores(whole.result)["configs"]
    assert found["seeds"] == wanted["seeds"][: len(what.seeds)]
    assert parts["base"] == whole.result["base"]
    kept = json.loads(what.out.read_text())
    assert kept["configs"][0]["summary"] == parts["configs"][0]["summary"]


def test_what_is_there_is_not_run_again_and_more_is_added(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = whole.copied(tmp_path)
    second = what.configs[0].replace("toy-a", "toy-b")
    both = what._replace(configs=(*what.configs, second), seeds=(0, 2))
    full = compare(both, quiet=True)
    seeds: dict[str, list[int]] = {}
    for one in full["configs"]:
        seeds[one["name"]] = [run["seed"] for run in one["seeds"]]
    assert seeds == {"toy-a": [0, 1, 2], "toy-b": [0, 2]}
    kept = next(c for c in full["configs"] if c["name"] == "toy-a")["seeds"]
    assert kept[:2] == whole.result["configs"][0]["seeds"] and kept[0]["curve"] != kept[1]["curve"]
    no_training(monkeypatch)
    assert scores(compare(both, quiet=True)) == scores(full)
    one = compare(both._replace(configs=both.configs[:1], seeds=(1,)), quiet=True)
    assert scores(one) == scores(full) == scores(json.loads(both.out.read_text()))


def test_other_configs_and_budgets_are_refused(whole: Whole, tmp_path: Path) -> None:
    """In the run's folder, in the result file and in the folder of the base model."""
    what, new = whole.copied(tmp_path), tmp_path / "new.json"
    betas = what._replace(overrides=(*what.overrides, "optimizer.betas=[0.8, 0.9]"))
    images = what._replace(overrides=(*what.overrides, "eval.images=3"), out=new)
    seconds = what._replace(budgets=what.budgets._replace(seconds=3.0))
    both = r"optimizer.betas \(\[0.9, 0.999\] and \[0.8, 0.9\]\)"
    elsewhere = "toy-a/seed0 holds .* optimizer.betas .*--runs, delete this one"
    base = r"runs belongs to another comparison: eval.images \(2 and 3\)"
    for other, words in (
        (betas, f"result.json holds .* toy-a: {both}"),
        (betas._replace(out=new), elsewhere),
        (seconds, r"result.json holds .* budgets.seconds \(2.25 and 3.0\)"),
        (images, base),
    ):
        with pytest.raises(ConfigError, match=words):
            compare(other, quiet=True)
    without_effect = (*what.overrides, "train.iterations=7", "eval.every=1")
    compare(what._replace(overrides=without_effect), quiet=True)


def test_only_one_process_works_in_a_folder_of_runs(tmp_path: Path) -> None:
    """The lock's owner is this process; the message has its number and the way out."""
    what = plan(tmp_path)
    said = f"runs: process {os.getpid()} works in it now; name another --runs, or wait for it"
    with lock(what.runs, mend=""), pytest.raises(RunError, match=said):
        compare(what, quiet=True)
    assert not what.out.exists() and [file.name for file in what.runs.iterdir()] == [".lock"]


def test_differences_are_named() -> None:
    a = {"x": 1, "y": {"z": [1], "w": 2}}
    told = ["y.z ([1] and [2])", "y.w (2 and None)", "y.v (None and 3)"]
    assert different(a, a) == [] and different(a, {"x": 1, "y": {"z": [2], "v": 3}}) == told


def test_the_result_file_alone_is_enough_to_go_on(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the folder of the runs, as on another machine: nothing that the file has is trained
    or judged again, and another seed is added beside it."""
    what = whole.elsewhere(tmp_path)
    shutil.copytree(whole.what.out.parent, what.out.parent)
    with pytest.MonkeyPatch.context() as patch:
        no_training(patch)
        assert compare(what, quiet=True) == whole.result
    more = compare(what._replace(seeds=(0, 1, 2)), quiet=True)
    assert not (what.runs / "base").exists() and not (what.runs / "toy-a" / "seed0").exists()
    there, added = more["configs"][0]["seeds"][:2], more["configs"][0]["seeds"][2:]
    assert there == whole.result["configs"][0]["seeds"]
    assert [run["seed"] for run in added] == [2]


def test_a_search_that_chose_otherwise_is_not_mixed(whole: Whole, tmp_path: Path) -> None:
    what = whole.copied(tmp_path)
    stored = read_result(what.out)
    stored["configs"][0]["seeds"] = [{**stored["configs"][0]["seeds"][0], "lr": 0.5}]
    what.out.write_text(json.dumps(stored))
    words = "toy-a: seed 1 ran with lr 0.1, seed 0 of the result file with 0.5"
    with pytest.raises(ConfigError, match=words):
        compare(what._replace(seeds=(1,)), quiet=True)


def test_a_run_may_be_given_up_by_its_evaluations(tmp_path: Path) -> None:
    """Who is told of them may end it, without a result; when it goes on, they are told again."""
    what, told = plan(tmp_path), list[int]()
    config, folder = what.load(what.configs[0], "seed=0"), tmp_path / "run"

    def judged(row: Mapping[str, Any]) -> None:
        told.append(row["iteration"])
        if len(told) == 1:
            raise RunError("given up")

    options: dict[str, Any] = {"stop": StopSignal(), "quiet": True, "judged": judged}
    with pytest.raises(RunError, match="given up"):
        spend(config, folder, what.budgets, **options)
    assert told == [2] and not (folder / "result.json").exists()
    found = spend(config, folder, what.budgets, **options)
    assert told == [2, 2, 3, 5] and found["failed"] is None and found["iterations"] == 5


def test_a_broken_run_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1 breaks in its fourth iteration, after (a); the others are finished, and nothing is
    left out."""
    what = plan(tmp_path, seeds=(0, 1, 2))
    words = "iteration 3: ratio is not finite"
    with monkeypatch.context() as patch:
        before_step(patch, 3, raising(RunError(words)), seed=1)
        result = compare(what, quiet=True)
    (entry,) = result["configs"]
    assert [run["failed"] for run in entry["seeds"]] == [None, words, None]
    assert entry["seeds"][1]["iterations"] == 3 and entry["seeds"][1]["at"]["seconds"] is None
    assert [entry["summary"][k]["seeds"] for k in ("nfe", "seconds")] == [3, 2]
    assert entry["summary"]["nfe"]["beats_base"] is False
    no_training(monkeypatch)
    assert scores(compare(what, quiet=True)) == scores(result)


def test_seeds_of_two_commands_are_one_comparison(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the recipe of docs/compare.md: nothing is trained again, and the result is that of one
    command for both seeds."""
    joined = whole.elsewhere(tmp_path / "joined")
    other = whole.elsewhere(tmp_path / "gpu1")._replace(seeds=(1,))
    compare(other, quiet=True)
    for runs, seed in ((whole.what.runs, 0), (other.runs, 1)):
        shutil.copytree(runs / f"toy-a/seed{seed}", joined.runs / f"toy-a/seed{seed}")
    shutil.copytree(other.runs / "base", joined.runs / "base")
    no_training(monkeypatch)
    assert scores(compare(joined, quiet=True)) == scores(whole.result)
