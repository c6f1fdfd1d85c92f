"""Searches of settings: the command on the toy field, going on, pruning, what is refused."""

from __future__ import annotations

import json
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from comparekit import rehearse_few
from optuna.distributions import CategoricalDistribution as Values
from optuna.distributions import FloatDistribution as Real
from optuna.distributions import IntDistribution as Whole
from toykit import write_toy

from flowrl.cli.main import main
from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.runs.compare import processes, tune
from flowrl.runs.compare.budgets import Budgets
from flowrl.runs.compare.records import comparable
from flowrl.runs.compare.search_space import (
    combinations,
    folder_of,
    grid_of,
    read_space,
)
from flowrl.runs.compare.tune import Tuning, read_tuning, run_tuning
from flowrl.runs.compare.tune_report import tuning_notes, tuning_rows
from flowrl.runs.folder import lock
from flowrl.runs.stop import Interrupted

CLIPS = "loss.clip_low=0.2,0.3"
BASE = {"score": 0.1, "interval": [0.0, 0.2], "images": 4, "tasks": {"all": 0.1}}


def _command(folder: Path, *more: str, tries: tuple[str, ...] = ()) -> list[str]:
    argv = ["tune", str(write_toy(folder)), "--plugin", "toykit", "--quiet"]
    argv += ["--try", *(tries or ("optimizer.lr=0.01,0.2", CLIPS)), "--nfe", "150"]
    return [*argv, "--set", "eval.score=red", "--out", str(folder / "out"), *more]


def _stamps(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.rglob("seed*/result.json")}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse_few(monkeypatch)


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Search three rates with two seeds; the third breaks its run."""
    folder = tmp_path_factory.mktemp("searched")
    tries = ("optimizer.lr=0.01,0.2,1e30",)
    with pytest.MonkeyPatch.context() as patch:
        rehearse_few(patch)
        assert main(_command(folder, "--seeds", "0", "1", tries=tries)) == 0
    return folder


@pytest.mark.integration
def test_the_command_on_the_toy_field(searched: Path) -> None:
    """The toy's reward rises with the rate, as far as these rates go: so the larger one wins. The
    rate that breaks its run has failed: it has no score, and is told."""
    result = read_tuning(searched / "out")
    assert [trial["state"] for trial in result["trials"]] == ["complete", "complete", "fail"]
    low, high, broken = [trial["score"] for trial in result["trials"]]
    assert high > low > result["base"]["score"] and broken is None and result["best"] == 1
    assert "Trial 2 failed: seed 0: " in (searched / "out/result.md").read_text()
    # the score is that of the runs' own evaluations
    best = result["trials"][1]
    runs = sorted((searched / "out/trials" / best["folder"]).glob("seed*"))
    own = [json.loads((run / "result.json").read_text())["at"]["nfe"]["score"] for run in runs]
    assert best["score"] == pytest.approx(sum(own) / 2) and len(own) == 2
    # the best as a config that can be trained: the run's own, with the config's own seed
    config = load_config(searched / "out/best.yaml", (), ("toykit",))
    trained = load_config(runs[0] / "config.yaml", (), ("toykit",))
    assert comparable(config) == {**comparable(trained), "seed": 3}
    assert (searched / "out/slice.png").stat().st_size > 5000
    assert "1\\* | " in (searched / "out/result.md").read_text()
    assert json.loads((searched / "out/result.json").read_text()) == result


@pytest.mark.integration
def test_what_is_there_is_not_trained_again(
    searched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, tries = searched / "out", ("optimizer.lr=0.01,0.2,1e30",)
    command, stamps = _command(searched, "--seeds", "0", "1", tries=tries), _stamps(searched)
    result = read_tuning(out)
    assert len(stamps) == 6 and main(command) == 0
    assert read_tuning(out) == result
    # the table alone, from the study
    capsys.readouterr()
    assert main(["tune", "--report-only", "--out", str(out), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == result
    # another budget or another setting of all trials is another search
    for more in (("--nfe", "300"), ("--set", "loss.clip_high=0.3"), ("--seeds", "2")):
        assert main([*command, *more]) == 2
        assert "holds another search" in capsys.readouterr().err
    assert stamps == _stamps(searched)


# searches whose runs are played: a score of the rate, without a model

Score = Callable[[Config], float]


def _height(config: Config) -> float:
    """Score a rate: the best is 0.01."""
    return 0.9 - abs(math.log10(config.lr) + 2) / 10


def _play(patch: pytest.MonkeyPatch, score: Score = _height, most: int = 10**9) -> list[Path]:
    """Let runs take no time; the run after `most` is stopped -> the folders that are run."""
    folders = list[Path]()

    def spend(config: Config, folder: Path, budgets: Budgets, **more: Any) -> dict[str, Any]:
        if len(folders) == most:
            raise Interrupted("stopped")
        found = score(config)
        for mark in range(1, budgets.points):
            row = {"marks": [mark], "score": "red", "red": found * mark / budgets.points}
            if more["judged"]:
                more["judged"](row)
        folders.append(folder)
        run: dict[str, Any] = {"seed": config.seed, "iterations": 3, "nfe": 150.0, "seconds": 1.0}
        if not math.isfinite(found):
            return {**run, "failed": "loss: NaN", "at": {"nfe": None}}
        row = {"score": found, "interval": [found, found], "tasks": {"all": found}}
        return {**run, "failed": None, "at": {"nfe": row}}

    patch.setattr(processes, "spend", spend)
    patch.setattr(tune, "Trainer", lambda config: None)
    patch.setattr(tune, "base_of", lambda *_: dict(BASE))
    patch.setattr(tune, "check_judged", lambda *_: None)
    return folders


RATES = ("optimizer.lr=1e-4..1e-1 log", "train.updates=1..3")


def _plan(folder: Path, out: str, *tries: str, **more: Any) -> Tuning:
    folder.mkdir(exist_ok=True)
    what = Tuning(str(write_toy(folder)), read_space(tries or RATES), (0,), 150, folder / out)
    overrides = ("eval.score=red",)
    return what._replace(overrides=overrides, plugins=("toykit",), **more)


def _found(result: dict[str, Any]) -> list[Any]:
    """Return the trials without their folders."""
    return [(trial["values"], trial["state"], trial["score"]) for trial in result["trials"]]


def test_the_same_seed_gives_the_same_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the search is stopped in a trial and goes on, or gets more trials later."""
    what = _plan(tmp_path, "whole", trials=13)
    _play(monkeypatch)
    whole = run_tuning(what, quiet=True)
    assert len(whole["trials"]) == 13 and whole["sampler"]["name"] == "tpe"
    values = [float(trial["values"]["optimizer.lr"]) for trial in whole["trials"]]
    assert all(1e-4 <= value <= 1e-1 for value in values) and len(set(values)) == 13
    # stopped in the sixth trial, then in the twelfth
    parts = what._replace(out=tmp_path / "parts")
    for most in (5, 6):
        _play(monkeypatch, most=most)
        with pytest.raises(Interrupted):
            run_tuning(parts, quiet=True)
    states = [trial["state"] for trial in read_tuning(parts.out)["trials"]]
    assert states == ["complete"] * 11 + ["running"]
    _play(monkeypatch)
    assert _found(run_tuning(parts, quiet=True)) == _found(whole)
    # begun with fewer
    fewer = what._replace(out=tmp_path / "fewer", trials=4)
    assert _found(run_tuning(fewer, quiet=True)) == _found(whole)[:4]
    assert _found(run_tuning(fewer._replace(trials=13), quiet=True)) == _found(whole)
    # another seed
    other = run_tuning(what._replace(out=tmp_path / "other", sampler_seed=1, trials=4), quiet=True)
    assert _found(other) != _found(whole)[:4]


def test_scores_lead_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ten trials are drawn by chance, those of tpe after them by the scores."""
    found = []
    for number, score in enumerate((_height, lambda config: -_height(config))):
        _play(monkeypatch, score)
        what = _plan(tmp_path, f"{number}", RATES[0], trials=12)
        found.append([trial["values"] for trial in run_tuning(what, quiet=True)["trials"]])
    one, other = found
    assert one[:10] == other[:10] and one[10] != other[10] and one[11] != other[11]


def test_a_grid_is_run_whole_or_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last key fastest; fewer trials are drawn by chance, and more hold the fewer."""
    _play(monkeypatch)
    tries = ("optimizer.lr=0.1,0.01", "train.updates=1..3")
    whole = run_tuning(_plan(tmp_path, "whole", *tries), quiet=True)
    # by hand
    rates = ["0.1"] * 3 + ["0.01"] * 3
    assert [trial["values"]["optimizer.lr"] for trial in whole["trials"]] == rates
    assert [trial["values"]["train.updates"] for trial in whole["trials"]] == [*"123123"]
    assert whole["best"] == 3
    part = _plan(tmp_path, "part", *tries, trials=2, sampler="grid")
    few = _found(run_tuning(part, quiet=True))
    more = _found(run_tuning(part._replace(trials=4), quiet=True))
    assert more[:2] == few and len({str(one) for one in more}) == 4


def test_hopeless_trials_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the first five trials: a sixth below it ends at its first evaluation, and has
    no score. What ends it is told."""
    ran = _play(monkeypatch, lambda config: config.lr)
    tries = ("optimizer.lr=0.5,0.4,0.3,0.2,0.6,0.1,0.7",)
    what = _plan(tmp_path, "out", *tries, pruner="median", points=4)._replace(seeds=(0, 1))
    result = run_tuning(what, quiet=True)
    assert [trial["state"] for trial in result["trials"]] == [*["complete"] * 5, "pruned"] + [
        "complete"
    ]
    # by hand: 0.1 x 1/4 at the first of four evaluations, where the median is 0.4 x 1/4
    pruned = result["trials"][5]
    assert (pruned["score"], pruned["why"]) == (None, "given up at 1 of 4 evaluations, with 0.025")
    assert result["best"] == 6 and len(ran) == 12  # its second seed never runs
    assert "The median pruner gave 1 of them up" in " ".join(tuning_notes(result))
    assert tuning_rows(result)[-2][:2] == ["5", "pruned"]


def test_trials_are_given_up_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played one after the other, by what a process is sent. The last two of eight rates are run
    beside each other, after six that are better than one of them."""
    ran = _play(monkeypatch, lambda config: config.lr)
    sent = []

    def beside(runs: Any, processes: int, stop: Any, ended: Any, *, quiet: bool) -> None:
        assert processes == 2 and len(runs) == 2
        for run in runs:
            try:
                pickle.loads(pickle.dumps(run)).spend(stop, quiet=True)
            except Interrupted as error:
                sent.append(str(error))

    monkeypatch.setattr(tune, "train_side_by_side", beside)
    tries = ("optimizer.lr=0.5,0.4,0.3,0.2,0.6,0.7,0.1,0.8",)
    what = _plan(tmp_path, "out", *tries, pruner="median", points=4, processes=2)
    result = run_tuning(what, quiet=True)
    states = [trial["state"] for trial in result["trials"]]
    assert states == [*["complete"] * 6, "pruned", "complete"] and result["best"] == 7
    assert sent == [result["trials"][6]["why"]] == ["given up at 1 of 4 evaluations, with 0.025"]
    assert len(ran) == 2 * 7  # each whole run once more, where its result is read


def test_hyperband_gives_trials_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(monkeypatch)
    what = _plan(tmp_path, "out", trials=12, pruner="hyperband", points=8)
    states = [trial["state"] for trial in run_tuning(what, quiet=True)["trials"]]
    assert {"complete", "pruned"} == set(states)


def test_a_trial_that_fails_is_told_and_is_no_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All scores are below 0, so that a failure that counts as 0 would win. One run breaks, and one
    combination cannot be trained."""
    _play(monkeypatch, lambda config: math.nan if config.lr == 0.3 else -config.lr)
    tries = ("optimizer.lr=0.2,0.3", "train.updates=1,2", "train.micro_batch=8,4")
    monkeypatch.setattr(tune, "_checked", _refusing(tune._checked))
    result = run_tuning(_plan(tmp_path, "out", *tries), quiet=True)
    states = [trial["state"] for trial in result["trials"]]
    assert states.count("complete") == 3 and states.count("fail") == 5
    assert result["best"] == 0 and result["trials"][0]["score"] == -0.2
    notes = " ".join(tuning_notes(result))
    assert "Trial 4 failed: seed 0: loss: NaN" in notes
    assert "Trial 3 failed: these do not go together" in notes
    # failed trials are not run again
    assert _found(run_tuning(_plan(tmp_path, "out", *tries), quiet=True)) == _found(result)


def _refusing(real: Callable[..., Config]) -> Callable[..., Config]:
    def checked(what: Tuning, own: Config, changes: list[str], *more: Any) -> Config:
        if {"train.updates=2", "train.micro_batch=4"} <= set(changes):
            raise ConfigError("these do not go together")
        return real(what, own, changes, *more)

    return checked


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, for scores that are shares."""
    _play(monkeypatch, lambda config: {0.1: 0.25, 0.2: 0.5, 0.3: math.nan}[config.lr])
    result = run_tuning(_plan(tmp_path, "out", "optimizer.lr=0.1,0.2,0.3"), quiet=True)
    assert tuning_rows(result) == [
        ["trial", "red %", "iterations", "optimizer.lr", "all"],
        ["1*", "50.0", "3", "0.2", "50.0"],
        ["0", "25.0", "3", "0.1", "25.0"],
        ["2", "fail", "3", "0.3", ""],
        ["base", "10.0", "", "", "10.0"],
    ]
    best = load_config(tmp_path / "out/best.yaml", (), ("toykit",))
    assert best.lr == 0.2 and best.seed == 3
    # without any best there is no config of one
    _play(monkeypatch, lambda config: math.nan)
    none = run_tuning(_plan(tmp_path, "none", "optimizer.lr=0.1,0.2"), quiet=True)
    assert none["best"] is None and not (tmp_path / "none/best.yaml").exists()
    assert "no best trial" in tuning_notes(none)[-1]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--try", "eval.images=2,4"], "changes what every trial is judged on: eval.images"),
        (["--try", "train.group=4,8"], "train.group=8: one iteration takes 208 network"),
        (["--try", CLIPS], "loss.clip_low: comes twice"),
        (["--try", "train.updates=1,1"], "train.updates: expected values that differ, got 1, 1"),
        (["--try", "credit.nothing=1,2"], "has no argument 'nothing'"),
        (["--try", "seed=1,2"], "--seeds says which seeds"),
        (["--try", "optimizer={fn: adamw, lr: 0.1}"], "optimizer.lr lies in it"),
        (["--try", "train.iterations=4..5"], "is the same run as"),
        (["--try", "monitors.gradients.action=warn,stop"], "is the same run as"),
        (["--try", "loss.clip_high=0.2,"], "parted by commas"),
        (["--try=loss.clip_high=[0.2", "b=3"], "has no partner"),
        (["--try", "loss.clip_high=0.1..0.3 lgo"], "expected log, float or step NUMBER"),
        (["--try", "loss.clip_high=0.3..0.1"], "expected a range that rises"),
        (["--try", "loss.clip_high=0..1 log"], "--try loss.clip_high: `low"),
        (["--try", "loss.clip_high=0.1..0.3", "--sampler", "grid"], "range without a step"),
        (["--trials", "-1"], "--trials: expected 0 or more"),
        (["--pruner", "median", "--points", "1"], "give --points 2 or more"),
        (["--pruner", "hyperband", "--processes", "2"], "takes --pruner median and one of"),
        (["--pruner", "median", "--processes", "2", "--seeds", "0", "1"], "one of --seeds, got"),
        (["--seeds", "0", "0"], "--seeds: expected seeds that differ"),
        (["--nfe", "0"], "--nfe: expected more than 0"),
        (["--try", "credit={fn: group_norm},{fn: sibling_norm}"], "gives every decision the"),
        (["--set", "prompts.test=assets/shapes/test.jsonl"], "the test prompts of the suite shape"),
        (["--report-only"], "or --report-only without them"),
    ],
)
def test_what_is_refused_before_anything_runs(
    tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nfe = [] if "--nfe" in more else ["--nfe", "120"]
    assert main(_command(tmp_path, *nfe, *more)) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "out").glob("*"))


def test_the_config_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    own = tmp_path / "out/best.yaml"
    own.write_bytes(write_toy(tmp_path).read_bytes())
    command = _command(tmp_path)
    command[1] = str(own)
    assert main(command) == 2 and "would overwrite" in capsys.readouterr().err


def test_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _play(monkeypatch)
    what = _plan(tmp_path, "out")
    with lock(what.out, mend=""), pytest.raises(RunError, match="works in it now"):
        run_tuning(what)


def test_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    for work in (lambda: run_tuning(_plan(tmp_path, "out")), lambda: read_tuning(tmp_path)):
        with pytest.raises(ConfigError, match=r"flowrl tune needs Optuna: pip install .*\[tune\]"):
            work()


def test_a_study_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"study\.db: expected the study of a search"):
        read_tuning(tmp_path)
    (tmp_path / "study.db").write_bytes(b"x" * 5000)
    with pytest.raises(DataError, match=r"study\.db: cannot be read as a study of Optuna"):
        read_tuning(tmp_path)
    # of another version: both are named
    _play(monkeypatch)
    what = _plan(tmp_path, "out", "optimizer.lr=0.1,0.2")
    run_tuning(what, quiet=True)
    monkeypatch.setattr(tune, "FORMAT", 4)
    with pytest.raises(DataError, match="expected a flowrl tuning of format 4, got .*, 3"):
        read_tuning(what.out)
    with pytest.raises(ConfigError, match=r"holds another search.*format \(3 and 4\)"):
        run_tuning(what, quiet=True)


# what is tried, without a search


@pytest.mark.parametrize(
    ("text", "some"),
    [
        ("a=1,2", Values(("1", "2"))),
        ("a={fn: full, steps: 6},{fn: fork}", Values(("{fn: full, steps: 6}", "{fn: fork}"))),
        ("a=[0, 1],[0, 2]", Values(("[0, 1]", "[0, 2]"))),
        (" a =1, 2", Values(("1", "2"))),
        ("a='x,y',z", Values(("'x,y'", "z"))),
        ("a=1e-5..1e-3 log", Real(1e-5, 1e-3, log=True)),
        ("a=0.1..0.5 step 0.1", Real(0.1, 0.5, step=0.1)),
        ("a=4..16 step 4", Whole(4, 16, step=4)),
        ("a=1..64 log", Whole(1, 64, log=True)),
        ("a=0..1 float", Real(0, 1)),
        ("a=-1..1", Whole(-1, 1)),
    ],
)
def test_what_is_tried_of_a_key(text: str, some: Any) -> None:
    assert read_space([text]) == {"a": some}


@pytest.mark.parametrize(
    "text", ["a=1,,2", "a=", "a=[1,2", "a=1),2", "a='x,y", "a=1..2 step 0", "a=1..2 log step 2"]
)
def test_values_that_cannot_be_told(text: str) -> None:
    with pytest.raises(ConfigError, match="--try a"):
        read_space([text])


def test_grids() -> None:
    space = read_space(["a=4..16 step 4", "b=x,y", "c=0.1..0.5 step 0.1"])
    grid = grid_of(space)
    assert grid["a"] == [4, 8, 12, 16] and grid["b"] == ["x", "y"]
    assert grid["c"] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert combinations(space) == 4 * 2 * 5
    assert combinations(read_space(["a=1..3 log"])) == math.inf
    with pytest.raises(ConfigError, match="at most 100,000"):
        grid_of(read_space(["a=1..1000", "b=1..1000"]))
    with pytest.raises(ConfigError, match="--try KEY=VALUE"):
        read_space([])


def test_folders_differ_wherever_trials_do() -> None:
    assert folder_of(["optimizer.lr=1e-4", "loss.beta=0.1"]) == "loss.beta=0.1_optimizer.lr=1e-4"
    assert folder_of(["a=1", "b=2"]) == folder_of(["b=2", "a=1"])
    one, two = folder_of(["plan={fn: full}"]), folder_of(["plan={fn; full}"])
    assert one != two and "/" not in one and " " not in one
    # capitals are no difference to some systems, so that a code makes one
    assert folder_of(["name=Toy"]).lower() != folder_of(["name=toy"]).lower()
    long = [folder_of([f"{'x' * 80}={value}"]) for value in (1, 2)]
    assert long[0] != long[1] and max(map(len, long)) < 80
