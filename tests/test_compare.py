"""Comparisons on the toy field: exact accounts, stops and resumes, fair search, what is refused, what is reported."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from toykit import write_toy

from flowrl import budgeted, compare_command
from flowrl import compare as compare_module
from flowrl.cli import main
from flowrl.compare import Comparison, Pace, Search, compare
from flowrl.comparison_file import read
from flowrl.config import load_config
from flowrl.curves import read_rows
from flowrl.errors import ConfigError, DataError, RewardError, RunError
from flowrl.ledger import Account, Budgets, different, trajectory
from flowrl.loop import Interrupted, StopSignal, Trainer
from flowrl.runs import evaluate_config, open_run

pytestmark = pytest.mark.integration
COST = 2 * 4 * 4 + 3 * (2 * 4 * 3)  # 2 prompts x 4 pictures, 4 steps each; 3 trained steps each, threefold
STEP = 0.5  # seconds of an iteration by the test's clock
SMALL = (
    "train.updates=1",
    "eval.steps=2",
    "eval.images=2",
    "eval.score=strict",
    "grid.prompts=2",
    "checkpoint.every=2",
)


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every iteration last half a second."""
    ticks = itertools.count()
    monkeypatch.setattr(budgeted, "clock", lambda: next(ticks) * STEP)


def toys(folder: Path, *names: str) -> tuple[str, ...]:
    """Write toy configs that differ in name and learning rate."""
    text = write_toy(folder).read_text()
    for number, name in enumerate(names):
        mine = text.replace("name: toy", f"name: {name}").replace("lr: 0.01", f"lr: {0.01 / (1 + number)}")
        (folder / f"{name}.yaml").write_text(mine)
    return tuple(str(folder / f"{name}.yaml") for name in names)


def plan(folder: Path, *names: str, **changes: Any) -> Comparison:
    """Compare toys with room for 3 iterations by evaluations and 5 by seconds."""
    what = Comparison(
        configs=toys(folder, *(names or ("toy-a",))),
        seeds=(0,),
        budgets=Budgets(2.5 * COST, 4.5 * STEP, 2),
        runs=folder / "runs",
        out=folder / "out" / "result.json",
        overrides=SMALL,
        plugins=("toykit",),
    )
    return what._replace(**changes)


def press_ctrl_c(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    """Ask to stop while `iteration` is being computed."""
    step = Trainer.step

    def stepping(self: Trainer) -> dict[str, float]:
        if self.iteration == iteration:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "step", stepping)


def break_step(monkeypatch: pytest.MonkeyPatch, error: Exception, *, seed: int, iteration: int) -> None:
    step = Trainer.step

    def stepping(self: Trainer) -> dict[str, float]:
        if self.config.seed == seed and self.iteration == iteration:
            raise error
        return step(self)

    monkeypatch.setattr(Trainer, "step", stepping)


def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def stepping(self: Trainer) -> dict[str, float]:
        raise AssertionError("nothing was left to train")

    monkeypatch.setattr(Trainer, "step", stepping)


def scores(result: dict[str, Any]) -> Any:
    """Return a result without what belongs to the machine."""
    configs = [
        {**c, "seeds": [{k: v for k, v in run.items() if k != "load"} for run in c["seeds"]]} for c in result["configs"]
    ]
    return {**result, "configs": configs, "environments": None}


# ------------------------------------------------------------------------------------------------------------- accounts


def test_accounts_are_exact(tmp_path: Path) -> None:
    """104 evaluations and 0.5 s an iteration: marks at 130 and 260 fall after iterations 2 and 3, 2.25 s after 5."""
    result = compare(plan(tmp_path), quiet=True)
    (run,) = result["configs"][0]["seeds"]
    assert (run["failed"], run["iterations"], run["evaluations"], run["seconds"]) == (None, 5, 5 * COST, 5 * STEP)
    rows = [(r["iteration"], r["evaluations"], r["seconds"], r["marks"], r["budget"]) for r in run["curve"]]
    assert rows == [
        (2, 2 * COST, 2 * STEP, [1], []),
        (3, 3 * COST, 3 * STEP, [2], ["evaluations"]),
        (5, 5 * COST, 5 * STEP, [], ["seconds"]),
    ]
    assert run["at"] == {"evaluations": run["curve"][1], "seconds": run["curve"][2]}
    metrics = read_rows(tmp_path / "runs" / "toy-a" / "seed0", "metrics.jsonl")
    assert [row["cost"] for row in metrics] == [COST] * 5
    assert run["trajectory"]["evaluations"] == [COST * (i + 1) for i in range(5)]
    assert run["last_quarter"]["reward"] == pytest.approx((metrics[3]["reward"] + metrics[4]["reward"]) / 2)


def test_a_run_goes_on_until_both_budgets_are_used_up(tmp_path: Path) -> None:
    """0.75 s end after iteration 2, 2.5 iterations' evaluations after 3; and both in one iteration are judged once."""
    (run,) = compare(plan(tmp_path / "a", budgets=Budgets(2.5 * COST, 1.5 * STEP, 1)), quiet=True)["configs"][0][
        "seeds"
    ]
    assert [(r["iteration"], r["budget"]) for r in run["curve"]] == [(2, ["seconds"]), (3, ["evaluations"])]
    (run,) = compare(plan(tmp_path / "b", budgets=Budgets(2 * COST, 2 * STEP, 1)), quiet=True)["configs"][0]["seeds"]
    assert [(r["iteration"], r["budget"]) for r in run["curve"]] == [(2, ["evaluations", "seconds"])]
    assert run["evaluations"] == 2 * COST  # a budget that is met exactly is used up


def test_scores_are_those_of_the_weights_at_that_time(tmp_path: Path) -> None:
    """The base is the model before training, the end the last checkpoint's averaged weights, evaluated anew."""
    result = compare(plan(tmp_path, overrides=(*SMALL, "eval.score=red", "train.lr=0.1")), quiet=True)
    folder = tmp_path / "runs" / "toy-a" / "seed0"
    for weights, found in (("base", result["base"]), ("ema", result["configs"][0]["seeds"][0]["at"]["seconds"])):
        model, config, _ = open_run(folder, weights=weights, plugins=("toykit",))
        again = evaluate_config(model, config)
        assert found["score"] == again["red"] and found["interval"] == again["interval"]
        assert found["tasks"] == {task: values["mean"] for task, values in again["tasks"].items()}
    model, config, _ = open_run(folder, weights="current", plugins=("toykit",))
    assert evaluate_config(model, config)["red"] != found["score"]


def test_marks_and_ends() -> None:
    budgets = Budgets(90, 10, 3)
    before, now = Account(4, 20, 4.0), Account(5, 60, 10.0)
    assert budgets.marks(before, now) == [1, 2] and budgets.ended(before, now) == ["seconds"]
    assert budgets.marks(now, Account(6, 89.9, 11.0)) == [] and budgets.ended(now, Account(6, 90, 11.0)) == [
        "evaluations"
    ]
    assert budgets.used(now) == pytest.approx(60 / 90) and budgets.used(Account(9, 900, 5.0)) == 0.5
    assert Budgets(90, 0, 0).used(Account(9, 45, 0.1)) == 0.5


def test_long_trajectories_become_means_of_blocks() -> None:
    rows = [{"iteration": i, "evaluations": 10.0 * (i + 1), "seconds": i + 1.0, "reward": float(i)} for i in range(200)]
    found = trajectory(rows)
    assert found["reward"] == [4 * i + 1.5 for i in range(50)] and found["ratio_std"] == [None] * 50
    assert found["evaluations"] == [40.0 * (i + 1) for i in range(50)]
    assert trajectory(rows[:3])["reward"] == [0.0, 1.0, 2.0] and trajectory([])["reward"] == []


# ------------------------------------------------------------------------------------------------------- stop and go on


@pytest.mark.parametrize("iteration", [0, 2, 4])
def test_stopped_and_resumed_is_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    """Ctrl-C in iteration 0, 2 or 4 of 5 of the first of two runs; the same command then gives the same result."""
    what = plan(tmp_path, seeds=(0, 1))
    whole = compare(what, quiet=True)
    for folder in (what.runs, what.out.parent):
        shutil.rmtree(folder)
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, iteration)
        where = "between two runs" if iteration == 4 else f"after iteration {iteration + 1}, saved .*seed0/checkpoints"
        with pytest.raises(Interrupted, match=f"stopped {where}.*the same command goes on"):
            compare(what, quiet=True)
    parts = compare(what, quiet=True)
    assert scores(parts) == scores(whole)
    kept = json.loads(what.out.read_text())
    assert kept["configs"][0]["summary"] == parts["configs"][0]["summary"]


@pytest.mark.parametrize("iteration", [1, 3])
def test_a_crash_goes_on_from_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int
) -> None:
    """Killed in iteration 1 (no checkpoint yet) or 3 (one after 2); evaluations made since then are made again."""
    whole = compare(plan(tmp_path), quiet=True)
    shutil.rmtree(tmp_path / "runs" / "toy-a")
    with monkeypatch.context() as patch:
        break_step(patch, KeyboardInterrupt(), seed=0, iteration=iteration)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            compare(plan(tmp_path), quiet=True)
    assert scores(compare(plan(tmp_path), quiet=True)) == scores(whole)


def test_what_is_there_is_not_run_again_and_more_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compare(plan(tmp_path), quiet=True)
    both = plan(tmp_path, "toy-a", "toy-b", seeds=(0, 1))
    full = compare(both, quiet=True)
    assert sorted((c["name"], run["seed"]) for c in full["configs"] for run in c["seeds"]) == [
        (name, seed) for name in ("toy-a", "toy-b") for seed in (0, 1)
    ]
    kept = next(c for c in full["configs"] if c["name"] == "toy-a")
    assert (
        kept["seeds"][0] == first["configs"][0]["seeds"][0] and kept["seeds"][0]["curve"] != kept["seeds"][1]["curve"]
    )
    no_training(monkeypatch)
    assert scores(compare(both, quiet=True)) == scores(full)
    one = compare(both._replace(configs=both.configs[:1], seeds=(1,)), quiet=True)
    assert scores(one) == scores(full) == scores(json.loads(both.out.read_text()))


def test_other_configs_and_budgets_are_refused(tmp_path: Path) -> None:
    """In the run's folder, in the result file and in the folder of the base model."""
    what = plan(tmp_path, seeds=(0,))
    compare(what, quiet=True)
    other = what._replace(overrides=(*SMALL, "train.betas=[0.8, 0.9]"))
    with pytest.raises(
        ConfigError, match=r"result.json holds .* toy-a: train.betas \(\[0.9, 0.999\] and \[0.8, 0.9\]\)"
    ):
        compare(other, quiet=True)
    with pytest.raises(ConfigError, match=r"toy-a/seed0 holds .* train.betas .*--runs, delete this one"):
        compare(other._replace(out=tmp_path / "new.json"), quiet=True)
    with pytest.raises(ConfigError, match=r"result.json holds .* budgets.seconds \(2.25 and 3.0\)"):
        compare(what._replace(budgets=what.budgets._replace(seconds=3.0)), quiet=True)
    with pytest.raises(ConfigError, match=r"runs belongs to another comparison: eval.images \(2 and 3\)"):
        compare(what._replace(overrides=(*SMALL, "eval.images=3"), out=tmp_path / "new.json"), quiet=True)
    compare(what._replace(overrides=(*SMALL, "train.iterations=7", "eval.every=1")), quiet=True)  # has no effect


# ---------------------------------------------------------------------------------------------------- what goes wrong


def test_a_broken_run_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1 breaks in its fourth iteration, after (a); the others are finished, and nothing is left out."""
    what = plan(tmp_path, seeds=(0, 1, 2))
    with monkeypatch.context() as patch:
        break_step(patch, RunError("iteration 3: ratio is not finite"), seed=1, iteration=3)
        result = compare(what, quiet=True)
    (entry,) = result["configs"]
    assert [run["failed"] for run in entry["seeds"]] == [None, "iteration 3: ratio is not finite", None]
    assert entry["seeds"][1]["iterations"] == 3 and entry["seeds"][1]["at"]["seconds"] is None
    assert [entry["summary"][k]["seeds"] for k in ("evaluations", "seconds")] == [3, 2]
    assert entry["summary"]["evaluations"]["beats_base"] is False
    no_training(monkeypatch)
    assert scores(compare(what, quiet=True)) == scores(result)


def test_a_reward_that_fails_is_not_held_against_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compare(plan(tmp_path / "whole"), quiet=True)
    with monkeypatch.context() as patch:
        break_step(patch, RewardError("the server is down"), seed=0, iteration=3)
        with pytest.raises(RewardError, match="the server is down\n.*seed0 goes on from its newest checkpoint"):
            compare(plan(tmp_path), quiet=True)
    assert (
        compare(plan(tmp_path), quiet=True)["configs"][0]["seeds"][0]["curve"]
        == whole["configs"][0]["seeds"][0]["curve"]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, "at least 1 config and 1 seed, got 1 and 0"),
        ({"configs": ()}, "at least 1 config and 1 seed, got 0 and 1"),
        ({"seeds": (1, 0, 1)}, "seed 1 comes twice"),
        ({"budgets": Budgets(0, 1, 1)}, "budgets above 0 .* got --evaluations 0, --seconds 1, --points 1"),
        ({"budgets": Budgets(1, 0, 1)}, "--seconds 0"),
        ({"budgets": Budgets(1000, 9, 0)}, "--points 0"),
        ({"budgets": Budgets(math.nan, 9, 1)}, "--evaluations nan"),
        ({"budgets": Budgets(31, 9, 1)}, "one iteration of toy-a samples with 32 network evaluations, .*31"),
        ({"budgets": Budgets(60, 9, 1), "search": Search((1.0,))}, "samples with 32 .*60 x --search-share 0.5"),
        ({"budgets": Budgets(103, 9, 1)}, "takes 104 network evaluations and 0.5 s, more than a budget of 103 eval"),
        ({"budgets": Budgets(500, 0.4, 1)}, "takes 104 .* 0.5 s, more than a budget of 0.4 seconds; raise --seconds"),
        ({"search": Search((1.0, 1.0))}, "different --lr-search factors above 0"),
        ({"search": Search((0.0,))}, "factors above 0"),
        ({"search": Search((1.0,), share=1.5)}, r"--search-share in \(0, 1\]"),
        ({"search": Search((1.0,), seed=0)}, "--search-seed 0 is one of --seeds"),
        ({"configs": ("nowhere/none",)}, "nowhere/none"),
    ],
)
def test_bad_input(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compare(plan(tmp_path)._replace(**changes), quiet=True)
    assert not (tmp_path / "out").exists() and not (tmp_path / "runs" / "toy-a" / "seed0").exists()


def test_configs_that_cannot_be_compared(tmp_path: Path) -> None:
    what = plan(tmp_path, "toy-a", "toy-b")
    text = Path(what.configs[1]).read_text()
    with pytest.raises(ConfigError, match="config name 'toy-a' comes twice"):
        compare(what._replace(configs=(what.configs[0],) * 2), quiet=True)
    for old, new, key in (
        ("scale: 0.3", "scale: 0.4", r"model.scale \(0.3 and 0.4\)"),
        ("test.jsonl", "train.jsonl", "prompts.test"),
        ("steps: 4, images: 2", "steps: 4, images: 2, seed: 5", r"eval.seed \(1234 and 5\)"),
        ("height: 16", "height: 8", "image.height"),
        ("toykit.reddish", "toykit.redness", "rewards.strict.fn"),
        ("threads: 1", "threads: 2", "train.threads"),
    ):
        Path(what.configs[1]).write_text(text.replace(old, new))
        with pytest.raises(ConfigError, match=f"differ in what must be equal: {key}"):
            compare(what, quiet=True)
    Path(what.configs[1]).write_text(text.replace("lr: 0.005", "lr: 0.005, group: 2, betas: [0.5, 0.9]"))


def test_a_plan_that_fails_after_the_config_s_own_iterations_is_found_before_anything_runs(tmp_path: Path) -> None:
    """Runs end by budget; the window of one step reaches the last one, where cps has no noise, at iteration 30 of 4."""
    late = "plan={fn: sliding_window, steps: 4, level: 0.5, size: 1, start: 1, stride: 2, every: 30, spare: 0}"
    with pytest.raises(ConfigError, match="iteration 30: .*the only noise is on step 3"):
        compare(plan(tmp_path, overrides=(*SMALL, late, "transition={fn: cps}", "train.iterations=4")), quiet=True)
    assert not (tmp_path / "runs").exists()


def test_differences_are_named() -> None:
    a = {"x": 1, "y": {"z": [1], "w": 2}}
    assert different(a, a) == [] and different(a, {"x": 1, "y": {"z": [2], "v": 3}}) == [
        "y.z ([1] and [2])",
        "y.w (2 and None)",
        "y.v (None and 3)",
    ]


def test_a_busy_machine_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for busy, said in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(compare_module, "load", lambda busy=busy: busy)
        compare_module._warn_of_load(False)
        assert ("2.1 processes on average want the 4 processors" in capsys.readouterr().err) is said


# --------------------------------------------------------------------------------------------------------------- search


def test_the_search_is_the_same_for_all_and_sees_no_held_out_picture(tmp_path: Path) -> None:
    """Half of 2.5 iterations' evaluations are used up after 2; the best training score of each config's tries wins."""
    what = plan(tmp_path, "toy-a", "toy-b", search=Search((0.5, 3.0), seed=9))
    result = compare(what, quiet=True)
    assert result["settings"]["search"] == {"factors": [0.5, 3.0], "seed": 9, "share": 0.5, "evaluations": 130.0}
    for entry, own in ((c, {"toy-a": 0.01, "toy-b": 0.005}[c["name"]]) for c in result["configs"]):
        tried = entry["search"]["tried"]
        assert [row["lr"] for row in tried] == pytest.approx([own * 0.5, own * 3])
        assert [(row["iterations"], row["evaluations"]) for row in tried] == [(2, 2 * COST)] * 2
        for row in tried:
            folder = tmp_path / "runs" / entry["name"] / f"search-x{row['factor']:g}"
            assert read_rows(folder, "metrics.jsonl")[-1]["accuracy"] == row["score"]  # a quarter of 2 is the last
            assert not (folder / "eval.jsonl").exists()
        best = max(tried, key=lambda row: row["score"])
        assert entry["lr"] == entry["search"]["chosen_lr"] == entry["seeds"][0]["lr"] and best["score"] == max(
            row["score"] for row in tried if row["lr"] == entry["lr"]
        )


@pytest.mark.parametrize(
    ("found", "chosen"),
    [({0.5: 0.3, 1: 0.2, 2: 0.1}, 0.5), ({0.5: 0.3, 1: 0.3, 2: 0.3}, 1), ({0.5: None, 1: 0.1, 2: 0.2}, 2)]
    + [({0.5: None, 1: None, 2: None}, 1)],
)
def test_which_rate_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[float, float | None], chosen: float
) -> None:
    """The best score; of equal ones the nearest to the config's own; none that failed; its own if all failed."""

    def spend(config: Any, folder: Path, *_: Any, **__: Any) -> dict[str, Any]:
        score = found[float(folder.name.removeprefix("search-x"))]
        used = {"iterations": 1, "evaluations": 1.0, "seconds": 1.0, "lr": config.train.lr}
        return {**used, "failed": "NaN" if score is None else None, "last_quarter": {"accuracy": score}}

    monkeypatch.setattr(compare_module, "spend", spend)
    what = plan(tmp_path, search=Search((0.5, 1.0, 2.0)))
    config = load_config(what.configs[0], (), what.plugins)
    with StopSignal() as stop:
        stated, lr = compare_module._search(what, what.configs[0], config, stop, Pace(1), True)
    assert lr == pytest.approx(0.01 * chosen) and stated is not None and stated["chosen_lr"] == lr


def test_a_search_that_chose_otherwise_is_not_mixed(tmp_path: Path) -> None:
    result = compare(plan(tmp_path), quiet=True)
    stored = read(tmp_path / "out" / "result.json")
    stored["configs"][0]["seeds"][0]["lr"] = 0.5
    (tmp_path / "out" / "result.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"toy-a: seed 1 ran with lr 0.01, seed 0 of the result file with 0.5"):
        compare(plan(tmp_path, seeds=(1,)), quiet=True)
    assert result["configs"][0]["lr"] == 0.01


# --------------------------------------------------------------------------------------------------------------- report


def command(what: Comparison, *more: str) -> list[str]:
    b = what.budgets
    words = ["compare", *what.configs, "--seeds", *map(str, what.seeds), "--evaluations", str(b.evaluations)]
    words += ["--seconds", str(b.seconds), "--points", str(b.points), "--set", *what.overrides, "--plugin", "toykit"]
    return [*words, "--runs", str(what.runs), "--out", str(what.out), *more]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two configs; progress with the time left; then tables and figures again, from the result file alone."""
    what = plan(tmp_path, "toy-a", "toy-b", seeds=(0, 1))
    assert main(command(what, "--figures", str(tmp_path / "figures"))) == 0
    out, err = capsys.readouterr()
    assert "strict % at (a)" in out and "base model" in out and "Pairs at (a)" in out
    assert err.count("held out after") == 2 * 2 * 3 and "min left" in err and "used % 100" in err and "acc " in err
    drawn = {file.name for file in (tmp_path / "figures").iterdir()}
    assert drawn == {f"result-{kind}.png" for kind in ("gains", "evaluations", "seconds", "training", "samples")}
    text = what.out.with_suffix(".md").read_text()
    assert "](../figures/result-samples.png)" in text
    shutil.rmtree(tmp_path / "figures")
    shutil.rmtree(tmp_path / "runs")
    alone = ["compare", "--report-only", "--out", str(what.out), "--runs", str(what.runs)]
    assert main(alone) == 0
    assert capsys.readouterr().out.split("\n\n")[0] == out.split("\n\n")[0]
    found = {file.name for file in what.out.parent.glob("*.png")}
    assert found == drawn - {"result-samples.png"}
    assert main([*alone, what.configs[0]]) == 2 and main(["compare"]) == 2
    assert "leave out the configs" in (said := capsys.readouterr().err) and "expected configs" in said


def test_the_grid_has_a_column_per_config(tmp_path: Path) -> None:
    what = plan(tmp_path, "toy-a", "toy-b")
    result = compare(what, quiet=True)
    one = compare_command.sample_grid({**result, "configs": result["configs"][:1]}, what.runs)
    two = compare_command.sample_grid(result, what.runs)
    assert isinstance(two, Image.Image) and two.height == one.height and two.width > one.width
    assert compare_command.sample_grid({**result, "base": {}}, what.runs) is None  # of another comparison
    model, config, _ = open_run(what.runs / "toy-a" / "seed0", weights="base", plugins=("toykit",))
    drawn = json.loads((what.runs / "base" / "prompts.json").read_text())
    from flowrl.figures import load_strip
    from flowrl.runs import sample_all

    expected = sample_all(model, config, drawn, seed=config.grid.seed)
    assert torch.equal(load_strip(what.runs / "base" / "samples.png", 2), expected)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"kind": "other", "format": 1}', '{"kind": "flowrl comparison", "format": 9}']
)
def test_another_file_is_no_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(DataError, match="r.json"):
        read(tmp_path / "r.json")


def test_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs of 1, the first taken up at a quarter: half a run took a minute, so 2.25 runs take 4.5 minutes."""
    now = itertools.chain([0.0], itertools.repeat(60.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    pace = Pace(3)
    pace.start(1)
    assert math.isnan(pace(0.25))
    assert pace(0.75) == pytest.approx(2.25 / 0.5)
    pace.finish()
    pace.start(1)
    pace(0.0)
    assert pace(0.25) == pytest.approx(1.75 / (0.75 + 0.25))
