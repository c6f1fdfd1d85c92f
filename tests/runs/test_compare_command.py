"""`flowrl compare`: budgets, the search for rates, what is refused, and what is reported."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from comparekit import COST, SMALL, plan, tick
from PIL import Image
from toykit import toy

from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.evaluation.image_grids import load_strip
from flowrl.runs.compare import compare as compare_module
from flowrl.runs.compare import processes
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.compare import Comparison, Search, sample_grid
from flowrl.runs.compare.compare import run_comparison as compare
from flowrl.runs.compare.records import comparable, different, read_result
from flowrl.runs.evaluate import sample_all
from flowrl.runs.folder import read_prompts, read_rows, strip_file
from flowrl.runs.open_run import load_run
from flowrl.runs.stop import StopSignal

pytestmark = pytest.mark.integration
RAISE = "takes 104 .* 0.5 s, more than a budget of "


@pytest.fixture(autouse=True)
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    tick(monkeypatch)


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": ()}, "at least 1 config and 1 seed, got 1 and 0"),
        ({"configs": ()}, "at least 1 config and 1 seed, got 0 and 1"),
        ({"seeds": (1, 0, 1)}, "seed 1 comes twice"),
        ({"budgets": Budgets(0, 1, 1)}, "--nfe above 0.* got --nfe 0, --seconds 1, --points 1"),
        ({"budgets": Budgets(1, -1, 1)}, "of at least 0 .* got --nfe 1, --seconds -1"),
        ({"budgets": Budgets(1000, 9, 0)}, "--points 0"),
        ({"budgets": Budgets(math.nan, 9, 1)}, "--nfe nan"),
        ({"budgets": Budgets(31, 9, 1)}, "iteration of toy-a samples with 32 network eval.*, .*31"),
        (
            {"budgets": Budgets(60, 9, 1), "search": Search((1.0,))},
            "samples with 32 .*60 x --search-share 0.5",
        ),
        ({"budgets": Budgets(103, 9, 1)}, RAISE + "103 network evaluations; raise --nfe"),
        ({"budgets": Budgets(500, 0.4, 1)}, RAISE + "0.4 seconds; raise --seconds"),
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


def test_a_plan_that_fails_after_the_config_s_own_iterations_is_found_before_anything_runs(
    tmp_path: Path,
) -> None:
    """Runs end by budget; the window of one step reaches the last one, where cps has no noise, at
    iteration 30 of 4."""
    late = "plan={fn: sliding_window, steps: 4, noise_scale: 0.5, size: 1, start: 1, stride: 2, "
    late += "every: 30, spare: 0}"
    overrides = (*SMALL, late, "transition={fn: cps}", "train.iterations=4")
    with pytest.raises(ConfigError, match="iteration 30: .*the only noise is on step 3"):
        compare(plan(tmp_path, overrides=overrides), quiet=True)
    assert not [*(tmp_path / "runs").glob("*/*")]


# ------------------------------------------------------------------------------------------- search


def test_the_search_is_the_same_for_all_and_sees_no_held_out_image(tmp_path: Path) -> None:
    """Half of 2.5 iterations' evaluations are used up after 2; the best training score of each
    config's tries wins."""
    budgets = Budgets(2.5 * COST, 0.0, 2)
    what = plan(tmp_path, "toy-a", "toy-b", search=Search((0.5, 3.0), seed=9), budgets=budgets)
    result = compare(what, quiet=True)
    stated = {"factors": [0.5, 3.0], "seed": 9, "share": 0.5, "prompts": "", "images": 0}
    stated["nfe"] = 130.0
    assert result["settings"]["search"] == stated
    for entry in result["configs"]:
        own = {"toy-a": 0.01, "toy-b": 0.005}[entry["name"]]
        tried = entry["search"]["tried"]
        assert [row["lr"] for row in tried] == pytest.approx([own * 0.5, own * 3])
        assert [(row["iterations"], row["nfe"]) for row in tried] == [(2, 2 * COST)] * 2
        for row in tried:
            folder = tmp_path / "runs" / entry["name"] / f"search-x{row['factor']:g}"
            # a quarter of two iterations is the last
            assert read_rows(folder, "metrics.jsonl")[-1]["accuracy"] == row["score"]
            assert not (folder / "eval.jsonl").exists()
        chosen = [row["score"] for row in tried if row["lr"] == entry["lr"]]
        assert entry["lr"] == entry["search"]["chosen_lr"] == entry["seeds"][0]["lr"]
        assert max(chosen) == max(row["score"] for row in tried)


def test_a_search_may_choose_by_held_out_prompts_of_its_own(tmp_path: Path) -> None:
    """Each rate is judged once, at its end, on the search's list; those that count on theirs. The
    list that the comparison is judged by is refused."""
    (tmp_path / "choose.txt").write_text("blue\n")
    choose, judge = str(tmp_path / "choose.txt"), str(tmp_path / "judge.txt")
    (tmp_path / "judge.txt").write_text("red\nblue\n")
    search = Search((0.5, 3.0), seed=9, prompts=choose, images=3)
    overrides = (*plan(tmp_path).overrides, f"prompts.test={judge}")
    what = plan(tmp_path, search=search, overrides=overrides)
    entry = compare(what, quiet=True)["configs"][0]
    for row in entry["search"]["tried"]:
        folder = tmp_path / "runs" / "toy-a" / f"search-x{row['factor']:g}"
        (judged,) = read_rows(folder, "eval.jsonl")
        assert judged["strict"] == row["score"] and len(judged["outcomes"]) == 3
    best = max(row["score"] for row in entry["search"]["tried"])
    chosen = [row["score"] for row in entry["search"]["tried"] if row["lr"] == entry["lr"]]
    assert chosen == [best]
    assert len(entry["seeds"][0]["at"]["nfe"]["outcomes"].split()) == 2
    with pytest.raises(ConfigError, match=r"--search-prompts .*judge\.txt are those that the"):
        compare(what._replace(search=search._replace(prompts=judge)), quiet=True)


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ({0.5: 0.3, 1: 0.2, 2: 0.1}, 0.5),
        ({0.5: 0.3, 1: 0.3, 2: 0.3}, 1),
        ({0.5: None, 1: 0.1, 2: 0.2}, 2),
        ({0.5: None, 1: None, 2: None}, 1),
    ],
)
def test_which_rate_is_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[float, float | None], chosen: float
) -> None:
    """The best score; of equal ones the nearest to the config's own; none that failed; its own if
    all failed."""

    def spend(config: Any, folder: Path, *_: Any, **__: Any) -> dict[str, Any]:
        score = found[float(folder.name.removeprefix("search-x"))]
        used = {"iterations": 1, "nfe": 1.0, "seconds": 1.0, "lr": config.lr}
        failed = "NaN" if score is None else None
        return {**used, "failed": failed, "last_quarter": {"accuracy": score}}

    monkeypatch.setattr(processes, "spend", spend)
    what = plan(tmp_path, search=Search((0.5, 1.0, 2.0)))
    config = load_config(what.configs[0], (), what.plugins)
    with StopSignal() as stop:
        runs = compare_module._Runs(what, [config], {"configs": []}, stop, True)
        stated, lr = runs.search(what.configs[0], config)
    assert lr == pytest.approx(0.01 * chosen) and stated is not None and stated["chosen_lr"] == lr


# ------------------------------------------------------------------------------------------- report


def command(what: Comparison, *more: str) -> list[str]:
    """Write a comparison as a command line."""
    b = what.budgets
    words = ["compare", *what.configs, "--seeds", *map(str, what.seeds)]
    words += f"--nfe {b.nfe} --seconds {b.seconds} --points {b.points} --plugin toykit".split()
    words += ["--set", *what.overrides, "--runs", str(what.runs), "--out", str(what.out)]
    return [*words, *more]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two configs; progress with the time left; then tables and figures again, from the result file
    alone."""
    what = plan(tmp_path, "toy-a", "toy-b", seeds=(0, 1))
    assert main(command(what, "--figures", str(tmp_path / "figures"))) == 0
    out, err = capsys.readouterr()
    assert "strict % at (a)" in out and "base model" in out and "Pairs at (a)" in out
    assert err.count("held out after") == 2 * 2 * 3
    # 104 evaluations an iteration
    assert err.count(f": the work is about {math.ceil(what.budgets.nfe / 104)} iterations") == 2
    assert "min left" in err and "used % 100" in err and "  strict 0." in err
    drawn = {file.name for file in (tmp_path / "figures").iterdir()}
    kinds = ("gains", "nfe", "seconds", "samples")
    assert drawn == {f"result-{kind}.png" for kind in kinds}
    text = what.out.with_suffix(".md").read_text()
    assert "](../figures/result-samples.png)" in text
    the_grid_has_a_column_per_config(what)
    shutil.rmtree(tmp_path / "figures")
    shutil.rmtree(tmp_path / "runs")
    alone = ["compare", "--report-only", "--out", str(what.out), "--runs", str(what.runs)]
    assert main(alone) == 0
    assert capsys.readouterr().out.split("\n\n")[0] == out.split("\n\n")[0]
    found = {file.name for file in what.out.parent.glob("*.png")}
    assert found == drawn - {"result-samples.png"}
    assert main([*alone, what.configs[0]]) == 2 and main(["compare"]) == 2
    said = capsys.readouterr().err
    assert "leave out the configs" in said and "expected configs" in said
    # the table beside a result would be written over it
    text = what.out.read_text()
    what.out.with_suffix(".md").write_text(text)
    assert main([*alone[:3], str(what.out.with_suffix(".md"))]) == 2
    assert what.out.with_suffix(".md").read_text() == text


def the_grid_has_a_column_per_config(what: Comparison) -> None:
    """Beside the base model's images, which are those of its own settings."""
    result = read_result(what.out)
    one = sample_grid({**result, "configs": result["configs"][:1]}, what.runs)
    two = sample_grid(result, what.runs)
    assert isinstance(one, Image.Image) and isinstance(two, Image.Image)
    assert two.height == one.height and two.width > one.width
    assert sample_grid({**result, "base": {}}, what.runs) is None  # of another comparison
    model, config, _ = load_run(what.runs / "toy-a" / "seed0", weights="base", plugins=("toykit",))[
        :3
    ]
    drawn, _ = read_prompts(what.runs / "base")
    expected = sample_all(model, config, drawn, seed=config.samples.seed)
    assert torch.equal(load_strip(strip_file(what.runs / "base", 0), 2), expected)


def test_without_seconds_runs_end_and_are_judged_by_evaluations_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Room for 3 iterations; by seconds there had been room for 5."""
    tick(monkeypatch)
    what = plan(tmp_path, budgets=Budgets(2.5 * COST, 0.0, 2))
    (config,) = compare(what)["configs"]
    capsys.readouterr()
    (run,) = config["seeds"]
    assert run["iterations"] == 3 and run["at"]["nfe"] and run["at"]["seconds"] is None
    assert list(config["summary"]) == ["nfe"]
    # what is written says nothing of a second budget
    assert main(["compare", "--report-only", "--out", str(what.out)]) == 0
    text = capsys.readouterr().out + what.out.with_suffix(".md").read_text()
    assert "at (a)" in text and "(b)" not in text and "0 seconds" not in text
    assert "network evaluations (evaluation and checkpoints not counted), measured at" in text
    drawn = {file.name for file in what.out.parent.glob("*.png")}
    assert drawn == {"result-gains.png", "result-nfe.png"}


KL = "kl={fn: transition_kl, beta: 0.1}"
SKIPS, OFF = "monitors.gradients.factor=2", "monitors.gradients=null"
FOLLOWS = "monitors.adaptive_kl={target: 9.0, step: 2}"


@pytest.mark.parametrize(
    ("one", "two", "differ"),
    [
        ((), (SKIPS,), True),
        ((), (OFF,), True),
        ((SKIPS,), (OFF,), True),
        ((KL, FOLLOWS), (KL,), True),
        ((KL, FOLLOWS, OFF), (KL, FOLLOWS), True),
        # it says what it saw, and every step is made
        ((OFF,), ("monitors.gradients.action=warn", SKIPS), False),
        ((), ("monitors.gradients.factor=10",), False),
        ((), ("monitors.drift=null", "monitors.hacking.action=stop"), False),
    ],
)
def test_what_acts_on_training_is_part_of_a_run(
    tmp_path: Path, one: tuple[str, ...], two: tuple[str, ...], differ: bool
) -> None:
    """Which steps are skipped, and the weight of the KL; the other monitors have no say."""
    a, b = (comparable(toy(tmp_path, *changes)) for changes in (one, two))
    assert bool(different(a, b)) == differ == (json.dumps(a) != json.dumps(b))


def test_a_file_without_monitors_is_one_of_their_defaults(tmp_path: Path) -> None:
    """As earlier versions wrote them: they can be added to."""
    assert "monitors" not in comparable(toy(tmp_path))


def test_the_weight_of_the_kl_follows_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run of its own: it halves with each iteration whose KL is far below the target."""
    tick(monkeypatch)
    what = plan(tmp_path, budgets=Budgets(2.5 * COST, 0.0, 1))
    what = what._replace(overrides=(*what.overrides, KL, FOLLOWS))
    (run,) = compare(what, quiet=True)["configs"][0]["seeds"]
    rows: list[dict[str, Any]] = read_rows(what.runs / "toy-a" / "seed0", "metrics.jsonl")
    assert run["failed"] is None and all(row["kl"] < 6 for row in rows)
    assert [row.get("kl_weight", 0.1) for row in rows] == pytest.approx([0.1, 0.05, 0.025])
