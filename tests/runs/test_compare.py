"""Comparisons on the toy field: exact accounts, stops and resumes, fair search, what is refused,
what is reported."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError, RewardError, RunError
from flowrl.runs.compare import compare as compare_module
from flowrl.runs.compare import one_run
from flowrl.runs.compare.budgets import Budgets, Spent, different, trajectory
from flowrl.runs.compare.compare import Comparison, Search, TimeLeft
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.compare.report import sample_grid
from flowrl.runs.compare.result_file import read
from flowrl.runs.evaluate import evaluate
from flowrl.runs.folder import read_rows
from flowrl.runs.open import open_run
from flowrl.runs.stop import Interrupted, StopSignal
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration
COST = 2 * 4 * 4 + 3 * (
    2 * 4 * 3
)  # 2 prompts x 4 images, 4 steps each; 3 trained steps each, threefold
STEP = 0.5  # seconds of an iteration by the test's clock
SMALL = (
    "train.updates=1",
    "eval.steps=2",
    "eval.images=2",
    "eval.score=strict",
    "samples.prompts=2",
    "checkpoint.every=2",
)


def tick(patch: pytest.MonkeyPatch) -> None:
    """Let every iteration last half a second, and rehearse 40 iterations in place of 10000."""
    ticks = itertools.count()
    patch.setattr(one_run, "clock", lambda: next(ticks) * STEP)
    patch.setattr(compare_module, "MOST_ITERATIONS", 40)


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
    with pytest.MonkeyPatch.context() as patch:
        tick(patch)
        overrides = (*SMALL, "eval.score=red", "optimizer.lr=0.1")
        folder = tmp_path_factory.mktemp("whole")
        what = plan(folder, "toy-a", "toy-b", seeds=(0, 1), overrides=overrides)
        what = what._replace(configs=what.configs[:1])
        return Whole(what, compare(what, quiet=True))


def toys(folder: Path, *names: str) -> tuple[str, ...]:
    """Write toy configs that differ in name and learning rate."""
    text = write_toy(folder).read_text()
    for number, name in enumerate(names):
        mine = text.replace("name: toy", f"name: {name}").replace(
            "lr: 0.01", f"lr: {0.01 / (1 + number)}"
        )
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


def break_step(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, *, seed: int, iteration: int
) -> None:
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
        {**c, "seeds": [{k: v for k, v in run.items() if k != "load"} for run in c["seeds"]]}
        for c in result["configs"]
    ]
    return {**result, "configs": configs, "environments": None}


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
    assert run["at"] == {"nfe": run["curve"][1], "seconds": run["curve"][2]}
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
        model, config, _ = open_run(folder, weights=weights, plugins=("toykit",))
        again = evaluate(model, config)
        assert found["score"] == again["red"] and found["interval"] == again["interval"]
        assert found["tasks"] == {task: values["mean"] for task, values in again["tasks"].items()}
    model, config, _ = open_run(folder, weights="current", plugins=("toykit",))
    assert evaluate(model, config)["red"] != end["score"]


def test_marks_and_ends() -> None:
    budgets = Budgets(90, 10, 3)
    before, now = Spent(4, 20, 4.0), Spent(5, 60, 10.0)
    assert budgets.marks(before, now) == [1, 2] and budgets.ended(before, now) == ["seconds"]
    assert budgets.marks(now, Spent(6, 89.9, 11.0)) == [] and budgets.ended(
        now, Spent(6, 90, 11.0)
    ) == ["nfe"]
    assert budgets.used(now) == pytest.approx(60 / 90) and budgets.used(Spent(9, 900, 5.0)) == 0.5
    assert Budgets(90, 0, 0).used(Spent(9, 45, 0.1)) == 0.5


def test_long_trajectories_become_means_of_blocks() -> None:
    rows = [
        {"iteration": i, **Spent(i, 10.0 * (i + 1), i + 1.0).metrics(), "reward": float(i)}
        for i in range(200)
    ]
    found = trajectory(rows)
    assert found["reward"] == [4 * i + 1.5 for i in range(50)] and found["ratio_std"] == [None] * 50
    assert found["nfe"] == [40.0 * (i + 1) for i in range(50)]
    assert trajectory(rows[:3])["reward"] == [0.0, 1.0, 2.0] and trajectory([])["reward"] == []


# ----------------------------------------------------------------------------------- stop and go on


@pytest.mark.parametrize("iteration", [0, 2, 4])
def test_stopped_and_resumed_is_uninterrupted(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, iteration: int
) -> None:
    """Ctrl-C in iteration 0, 2 or 4 of 5 of the first of two runs; the same command then gives the
    same result."""
    what = whole.elsewhere(tmp_path)
    after = f"after iteration {iteration + 1}, saved .*seed0/checkpoints"
    where = "between two runs" if iteration == 4 else after
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, iteration)
        with pytest.raises(Interrupted, match=f"stopped {where}.*the same command goes on"):
            compare(what, quiet=True)
    parts = compare(what, quiet=True)
    assert scores(parts) == scores(whole.result)
    kept = json.loads(what.out.read_text())
    assert kept["configs"][0]["summary"] == parts["configs"][0]["summary"]


@pytest.mark.parametrize(
    ("error", "iteration", "words"),
    [
        (KeyboardInterrupt(), 1, ".*"),  # no checkpoint yet
        (KeyboardInterrupt(), 3, ".*"),  # one after 2; evaluations since then are made again
        (RewardError("server down"), 3, "server down\n.*seed0 goes on from its newest checkpoint"),
    ],
)
def test_a_crash_and_a_failed_reward_go_on_from_the_last_checkpoint(
    whole: Whole,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    iteration: int,
    words: str,
) -> None:
    """Neither is held against the config: nothing is recorded, and the result is the same."""
    what = whole.elsewhere(tmp_path)
    with monkeypatch.context() as patch:
        break_step(patch, error, seed=0, iteration=iteration)
        with pytest.raises(type(error), match=words):
            compare(what, quiet=True)
    assert scores(compare(what, quiet=True)) == scores(whole.result)


def test_what_is_there_is_not_run_again_and_more_is_added(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = whole.copied(tmp_path)
    second = what.configs[0].replace("toy-a", "toy-b")
    both = what._replace(configs=(*what.configs, second), seeds=(0, 2))
    full = compare(both, quiet=True)
    seeds = {c["name"]: [run["seed"] for run in c["seeds"]] for c in full["configs"]}
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
    betas = (*what.overrides, "optimizer.betas=[0.8, 0.9]")
    images = (*what.overrides, "eval.images=3")
    seconds = what.budgets._replace(seconds=3.0)
    both = r"optimizer.betas \(\[0.9, 0.999\] and \[0.8, 0.9\]\)"
    for other, words in (
        (what._replace(overrides=betas), f"result.json holds .* toy-a: {both}"),
        (
            what._replace(overrides=betas, out=new),
            "toy-a/seed0 holds .* optimizer.betas .*--runs, delete this one",
        ),
        (what._replace(budgets=seconds), r"result.json holds .* budgets.seconds \(2.25 and 3.0\)"),
        (
            what._replace(overrides=images, out=new),
            r"runs belongs to another comparison: eval.images \(2 and 3\)",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            compare(other, quiet=True)
    without_effect = (*what.overrides, "train.iterations=7", "eval.every=1")
    compare(what._replace(overrides=without_effect), quiet=True)


# ---------------------------------------------------------------------------------- what goes wrong


def test_a_broken_run_is_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 1 breaks in its fourth iteration, after (a); the others are finished, and nothing is
    left out."""
    what = plan(tmp_path, seeds=(0, 1, 2))
    with monkeypatch.context() as patch:
        break_step(patch, RunError("iteration 3: ratio is not finite"), seed=1, iteration=3)
        result = compare(what, quiet=True)
    (entry,) = result["configs"]
    assert [run["failed"] for run in entry["seeds"]] == [
        None,
        "iteration 3: ratio is not finite",
        None,
    ]
    assert entry["seeds"][1]["iterations"] == 3 and entry["seeds"][1]["at"]["seconds"] is None
    assert [entry["summary"][k]["seeds"] for k in ("nfe", "seconds")] == [3, 2]
    assert entry["summary"]["nfe"]["beats_base"] is False
    no_training(monkeypatch)
    assert scores(compare(what, quiet=True)) == scores(result)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, "at least 1 config and 1 seed, got 1 and 0"),
        ({"configs": ()}, "at least 1 config and 1 seed, got 0 and 1"),
        ({"seeds": (1, 0, 1)}, "seed 1 comes twice"),
        ({"budgets": Budgets(0, 1, 1)}, "budgets above 0 .* got --nfe 0, --seconds 1, --points 1"),
        ({"budgets": Budgets(1, 0, 1)}, "--seconds 0"),
        ({"budgets": Budgets(1000, 9, 0)}, "--points 0"),
        ({"budgets": Budgets(math.nan, 9, 1)}, "--nfe nan"),
        (
            {"budgets": Budgets(31, 9, 1)},
            "one iteration of toy-a samples with 32 network evaluations, .*31",
        ),
        (
            {"budgets": Budgets(60, 9, 1), "search": Search((1.0,))},
            "samples with 32 .*60 x --search-share 0.5",
        ),
        (
            {"budgets": Budgets(103, 9, 1)},
            "takes 104 .* 0.5 s, more than a budget of 103 network evaluations; raise --nfe",
        ),
        (
            {"budgets": Budgets(500, 0.4, 1)},
            "takes 104 .* 0.5 s, more than a budget of 0.4 seconds; raise --seconds",
        ),
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
    Path(what.configs[1]).write_text(
        text.replace("lr: 0.005", "lr: 0.005, betas: [0.5, 0.9]").replace("group: 4", "group: 2")
    )


def test_a_plan_that_fails_after_the_config_s_own_iterations_is_found_before_anything_runs(
    tmp_path: Path,
) -> None:
    """Runs end by budget; the window of one step reaches the last one, where cps has no noise, at
    iteration 30 of 4."""
    late = "plan={fn: sliding_window, steps: 4, noise_scale: 0.5, size: 1, start: 1, stride: 2, "
    late += "every: 30, spare: 0}"
    with pytest.raises(ConfigError, match="iteration 30: .*the only noise is on step 3"):
        compare(
            plan(tmp_path, overrides=(*SMALL, late, "transition={fn: cps}", "train.iterations=4")),
            quiet=True,
        )
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


# ------------------------------------------------------------------------------------------- search


def test_the_search_is_the_same_for_all_and_sees_no_held_out_image(tmp_path: Path) -> None:
    """Half of 2.5 iterations' evaluations are used up after 2; the best training score of each
    config's tries wins."""
    what = plan(tmp_path, "toy-a", "toy-b", search=Search((0.5, 3.0), seed=9))
    result = compare(what, quiet=True)
    assert result["settings"]["search"] == {
        "factors": [0.5, 3.0],
        "seed": 9,
        "share": 0.5,
        "nfe": 130.0,
    }
    for entry, own in ((c, {"toy-a": 0.01, "toy-b": 0.005}[c["name"]]) for c in result["configs"]):
        tried = entry["search"]["tried"]
        assert [row["lr"] for row in tried] == pytest.approx([own * 0.5, own * 3])
        assert [(row["iterations"], row["nfe"]) for row in tried] == [(2, 2 * COST)] * 2
        for row in tried:
            folder = tmp_path / "runs" / entry["name"] / f"search-x{row['factor']:g}"
            assert (
                read_rows(folder, "metrics.jsonl")[-1]["accuracy"] == row["score"]
            )  # a quarter of 2 is the last
            assert not (folder / "eval.jsonl").exists()
        best = max(tried, key=lambda row: row["score"])
        assert entry["lr"] == entry["search"]["chosen_lr"] == entry["seeds"][0]["lr"] and best[
            "score"
        ] == max(row["score"] for row in tried if row["lr"] == entry["lr"])


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({0.5: 0.3, 1: 0.2, 2: 0.1}, 0.5),
        ({0.5: 0.3, 1: 0.3, 2: 0.3}, 1),
        ({0.5: None, 1: 0.1, 2: 0.2}, 2),
    ]
    + [({0.5: None, 1: None, 2: None}, 1)],
)
def test_which_rate_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[float, float | None], chosen: float
) -> None:
    """The best score; of equal ones the nearest to the config's own; none that failed; its own if
    all failed."""

    def spend(config: Any, folder: Path, *_: Any, **__: Any) -> dict[str, Any]:
        score = found[float(folder.name.removeprefix("search-x"))]
        used = {"iterations": 1, "nfe": 1.0, "seconds": 1.0, "lr": config.lr}
        return {
            **used,
            "failed": "NaN" if score is None else None,
            "last_quarter": {"accuracy": score},
        }

    monkeypatch.setattr(compare_module, "spend", spend)
    what = plan(tmp_path, search=Search((0.5, 1.0, 2.0)))
    config = load_config(what.configs[0], (), what.plugins)
    with StopSignal() as stop:
        stated, lr = compare_module._Runs(what, [config], stop, True).search(
            what.configs[0], config
        )
    assert lr == pytest.approx(0.01 * chosen) and stated is not None and stated["chosen_lr"] == lr


def test_a_search_that_chose_otherwise_is_not_mixed(whole: Whole, tmp_path: Path) -> None:
    what = whole.copied(tmp_path)
    stored = read(what.out)
    stored["configs"][0]["seeds"] = [{**stored["configs"][0]["seeds"][0], "lr": 0.5}]
    what.out.write_text(json.dumps(stored))
    words = "toy-a: seed 1 ran with lr 0.1, seed 0 of the result file with 0.5"
    with pytest.raises(ConfigError, match=words):
        compare(what._replace(seeds=(1,)), quiet=True)


# ------------------------------------------------------------------------------------------- report


def command(what: Comparison, *more: str) -> list[str]:
    b = what.budgets
    words = ["compare", *what.configs, "--seeds", *map(str, what.seeds), "--nfe", str(b.nfe)]
    words += [
        "--seconds",
        str(b.seconds),
        "--points",
        str(b.points),
        "--set",
        *what.overrides,
        "--plugin",
        "toykit",
    ]
    return [*words, "--runs", str(what.runs), "--out", str(what.out), *more]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two configs; progress with the time left; then tables and figures again, from the result file
    alone."""
    what = plan(tmp_path, "toy-a", "toy-b", seeds=(0, 1))
    assert main(command(what, "--figures", str(tmp_path / "figures"))) == 0
    out, err = capsys.readouterr()
    assert "strict % at (a)" in out and "base model" in out and "Pairs at (a)" in out
    assert (
        err.count("held out after") == 2 * 2 * 3
        and "min left" in err
        and "used % 100" in err
        and "acc " in err
    )
    drawn = {file.name for file in (tmp_path / "figures").iterdir()}
    assert drawn == {
        f"result-{kind}.png" for kind in ("gains", "nfe", "seconds", "training", "samples")
    }
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
    assert (
        "leave out the configs" in (said := capsys.readouterr().err) and "expected configs" in said
    )


def test_the_grid_has_a_column_per_config(tmp_path: Path) -> None:
    what = plan(tmp_path, "toy-a", "toy-b")
    result = compare(what, quiet=True)
    one = sample_grid({**result, "configs": result["configs"][:1]}, what.runs)
    two = sample_grid(result, what.runs)
    assert isinstance(two, Image.Image) and two.height == one.height and two.width > one.width
    assert sample_grid({**result, "base": {}}, what.runs) is None  # of another comparison
    model, config, _ = open_run(what.runs / "toy-a" / "seed0", weights="base", plugins=("toykit",))
    drawn = json.loads((what.runs / "base" / "prompts.json").read_text())
    from flowrl.evaluation.image_grids import load_strip
    from flowrl.runs.evaluate import sample_all

    expected = sample_all(model, config, drawn, seed=config.samples.seed)
    assert torch.equal(load_strip(what.runs / "base" / "samples.png", 2), expected)


@pytest.mark.parametrize(
    "text",
    ["", "{}", '{"kind": "other", "format": 1}', '{"kind": "flowrl comparison", "format": 9}'],
)
def test_another_file_is_no_result(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(DataError, match="r.json"):
        read(tmp_path / "r.json")


def test_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs of 1, the first taken up at a quarter: half a run took a minute, so 2.25 runs take
    4.5 minutes."""
    now = itertools.chain([0.0], itertools.repeat(60.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    pace = TimeLeft(3)
    pace.start(1)
    assert math.isnan(pace(0.25))
    assert pace(0.75) == pytest.approx(2.25 / 0.5)
    pace.finish()
    pace.start(1)
    pace(0.0)
    assert pace(0.25) == pytest.approx(1.75 / (0.75 + 0.25))
