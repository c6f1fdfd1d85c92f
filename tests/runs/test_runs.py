"""Whole runs in a folder: what they leave behind, how they stop and go on."""

from __future__ import annotations

import copy
import json
import math
import os
import shlex
import shutil
import signal
import warnings
from pathlib import Path

import pytest
import torch
from runkit import config_for, rows
from toykit import toy

from flowrl.api.arguments import config_of
from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.errors import CheckpointError, ConfigError, DataError, RunError
from flowrl.runs.evaluate import evaluate
from flowrl.runs.open_run import load_run
from flowrl.runs.start_run import claimed
from flowrl.runs.stop import Interrupted
from flowrl.runs.train import describe_training, train
from flowrl.training.run import OverlapWarning
from flowrl.training.trainer import Trainer

pytestmark = pytest.mark.integration
EXACT = ["metrics.jsonl", "eval.jsonl", "config.yaml", "checkpoints/000004/*"]
EXACT += ["grid.png", "samples/*.png", "samples/prompts.json"]


def stop_in(monkeypatch: pytest.MonkeyPatch, iteration: int) -> None:
    """Press Ctrl-C while `iteration` is being computed."""
    step = Trainer.step

    def stepping(self: Trainer) -> dict[str, float]:
        if self.iteration == iteration:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self)

    monkeypatch.setattr(Trainer, "step", stepping)


def assert_same_run(run: Path, other: Path) -> None:
    """Compare byte for byte what does not depend on the clock."""
    for pattern in EXACT:
        names = sorted(file.relative_to(other) for file in other.glob(pattern))
        assert names and names == sorted(file.relative_to(run) for file in run.glob(pattern))
        for name in names:
            assert (run / name).read_bytes() == (other / name).read_bytes(), name


# ------------------------------------------------------------------------------------------ one run


def test_what_a_run_leaves_behind(home: Path) -> None:
    run = home / "whole"
    assert [row["iteration"] for row in rows(run / "metrics.jsonl")] == [0, 1, 2, 3]
    assert [row["iteration"] for row in rows(run / "timing.jsonl")] == [0, 1, 2, 3]
    evals = rows(run / "eval.jsonl")
    assert [row["iteration"] for row in evals] == [0, 4]  # every: 0 means before and after
    summary = json.loads((run / "summary.json").read_text())
    short = copy.deepcopy(evals)
    for row in short:
        row.pop("by_prompt", None)
    assert [summary["before"], summary["after"]] == short != evals
    assert summary["gain"] == pytest.approx(evals[1]["red"] - evals[0]["red"])
    assert abs(summary["gain"]) > 1e-4
    strips = [f"{iteration:06d}.png" for iteration in (0, 2, 4)]
    assert sorted(file.name for file in (run / "samples").glob("*.png")) == strips
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == ["000002", "000004"]
    for name in ("grid.png", "curves.png", "report.html", "environment.json"):
        assert (run / name).stat().st_size > 100
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert load_config(run / "config.yaml", (), ("toykit",)) == config_for(home)
    names = """iteration reward nfe reward/red reward/strict accuracy reward_std zero_std diversity
        ratio loss ratio_std on_policy_gap clip_frac clip_high_frac approx_kl kl grad_norm lr
        trained velocity_grad corr/red/strict backwards decoded scored saturation sharpness grid
        prompt_entropy grad_outliers kl_share velocity_length"""
    keys = {*names.split()}
    by_step = ["ratio", "ratio_std", "clip_frac", "approx_kl", "kl"]
    by_step += ["velocity_grad", "velocity_length"]
    keys |= {f"{name}/step{k}" for name in by_step for k in range(3)}
    for row in rows(run / "metrics.jsonl"):
        assert row.keys() == keys and all(map(math.isfinite, row.values()))
        # the headline, and the only reward with a weight
        assert row["accuracy"] == row["reward/red"] == row["reward"]
        # the first of two updates sees the policy itself, the second one that has moved
        assert 0 < row["kl_share"] < 1


def test_stopped_and_resumed_is_uninterrupted(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during the third of four iterations, away from any milestone; then --resume."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_in(patch, 2)
        said = f"after iteration 3, saved .*000003; .*--resume {run} --plugin toykit"
        with pytest.raises(Interrupted, match=said):
            train(config_for(home), run, quiet=True)
    assert len(rows(run / "metrics.jsonl")) == 3 and not (run / "summary.json").exists()
    torch.manual_seed(1)
    summary = train(load_config(run / "config.yaml", (), ("toykit",)), run, resume=True, quiet=True)
    shutil.rmtree(run / "checkpoints" / "000003")
    assert_same_run(run, home / "whole")
    whole = json.loads((home / "whole" / "summary.json").read_text())
    clock = {key: summary[key] for key in ("seconds", "finished")}
    assert summary == whole | clock | {"run": str(run)}


def test_stopped_in_the_last_iteration_is_finished(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_in(monkeypatch, 3)
    assert train(config_for(home), tmp_path / "run", quiet=True)["iterations"] == 4
    assert_same_run(tmp_path / "run", home / "whole")


def test_a_torn_newest_checkpoint_falls_back(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(home / "whole", tmp_path / "my run"))
    torn = run / "checkpoints" / "000004" / "optimizer.safetensors"
    torn.write_bytes(torn.read_bytes()[:100])
    with pytest.warns(UserWarning, match="skipping a checkpoint: .*000004.*torn"):
        train(config_for(home), run, resume=True)
    assert_same_run(run, home / "whole")
    assert "were done before" not in capsys.readouterr().err
    # it is finished now: to resume it again says so, changes nothing, and warns of nothing
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.simplefilter("ignore", OverlapWarning)  # the toy's two lists are one
        train(config_for(home), run, resume=True)
    said = " ".join(capsys.readouterr().err.split())
    assert "all 4 iterations were done before, so nothing is trained" in said
    longer = f"flowrl train --resume '{run}' --plugin toykit train.iterations=8"
    assert f"train on: {longer} the change of red" in said
    assert_same_run(run, home / "whole")


def test_the_last_lines_name_the_command_that_trains_on(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It works as it stands, and trains as a run that was meant to be so long."""
    run = tmp_path / "a run"
    train(config_for(home, "train.iterations=2"), run)
    *_, last, verdict = capsys.readouterr().err.splitlines()
    assert verdict == json.loads((run / "summary.json").read_text())["verdict"]
    words = shlex.split(last.removeprefix("train on: "))
    assert last.startswith("train on: flowrl train --resume ") and words[-1] == "train.iterations=4"
    assert main([*words[1:], "--quiet"]) == 0
    for pattern in ("metrics.jsonl", "config.yaml", "checkpoints/000004/*.safetensors"):
        for file in (home / "whole").glob(pattern):
            assert (run / file.relative_to(home / "whole")).read_bytes() == file.read_bytes()
    # of what a program handed over the call is named
    functions = {"red": lambda images, prompts: images.mean((1, 2, 3))}
    config = config_of(config_for(home, "train.iterations=1"), rewards=functions)
    train(config, tmp_path / "mine")
    (last,) = (line for line in capsys.readouterr().err.splitlines() if "train on:" in line)
    assert last.endswith("rewards={'red': ...}).resume(train={'iterations': 2})")


def test_schedules_and_weights(home: Path, tmp_path: Path) -> None:
    """Evaluate every 2, save every 1 and keep 1; evaluations are those of the current weights,
    measured again. The reward counts negatively, so the run gets worse: the checkpoint of the
    better evaluation stays, and is what is opened."""
    options = ["eval.every=2", "checkpoint.every=1", "checkpoint.keep=1", "samples.every=0"]
    options += ["eval.weights=current", "train.ema=0", "plan.noise_scale=0.3"]
    options += ["rewards.red.weight=-1"]
    config, run = toy(home, *options), tmp_path / "run"
    summary = train(config, run, quiet=True)
    evals = rows(run / "eval.jsonl")
    assert [row["iteration"] for row in evals] == [0, 2, 4] and evals[1]["red"] > evals[2]["red"]
    assert {folder.name for folder in (run / "checkpoints").iterdir()} == {"000002", "000004"}
    assert len(list((run / "samples").glob("*.png"))) == 2
    best = {"iteration": 2, "score": evals[1]["red"], "checkpoint": "checkpoints/000002"}
    assert summary["best"] == best and summary["stopped"] is None
    assert {row["setting"].pop("weights") for row in evals} == {"current"}
    for which, at in ((None, 2), ("best", 2), ("last", 4), (4, 4), ("4", 4)):
        model, again, iteration = load_run(run, iteration=which, plugins=("toykit",))[:3]
        assert iteration == at and again == config
        row = {**evals[at // 2]}
        assert row.pop("drift") > 0 and {"iteration": at, **evaluate(model, again)} == row
    with pytest.raises(CheckpointError, match="expected the number of an iteration, best or last"):
        load_run(run, iteration="first", plugins=("toykit",))
    with pytest.raises(CheckpointError, match="has no 'ema' weights, only current"):
        load_run(run, weights="ema", plugins=("toykit",))


def test_headline_and_describe(home: Path) -> None:
    text = describe_training(Trainer(config_for(home)))
    assert "4 iterations, 24 trained numbers, lr 0.01, seed 3" in text  # 3x3 + 3x4 + 3
    assert "8 images from 8 initial noises, 4 steps" in text
    assert f"6 to train on ({home}/train.jsonl), 6 held out, 2 images each" in text


# -------------------------------------------------------------------------- folders that do not fit


def test_folders_that_do_not_fit(home: Path, tmp_path: Path) -> None:
    before = (home / "whole" / "metrics.jsonl").read_bytes()
    taken = "whole holds a run already: resume it with --resume .*resume=True.*, or name"
    with pytest.raises(RunError, match=taken):
        train(config_for(home), home / "whole", quiet=True)
    assert (home / "whole" / "metrics.jsonl").read_bytes() == before
    with pytest.raises(CheckpointError, match="none: no whole checkpoint to resume from"):
        train(config_for(home), tmp_path / "none", resume=True, quiet=True)
    (tmp_path / "file").write_text("")  # a file where a folder is needed fails for root, too
    closed = "cannot write to the run folder .*file/run: Not a directory"
    with pytest.raises(RunError, match=closed):
        train(config_for(home), tmp_path / "file" / "run", quiet=True)


def test_a_users_config_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A config and a log of the user's in a folder stay, byte for byte, whatever is asked for and
    whatever config is given; a new run without a folder of its own takes the next one."""
    monkeypatch.chdir(tmp_path)
    run = Path("runs/toy-seed3")
    # nor one with a space in its name, which a command has to quote
    odd = Path("my runs")
    odd.mkdir()
    (odd / "config.yaml").write_text(config_for(tmp_path).dump())
    with pytest.raises(RunError, match="flowrl train 'my runs/config.yaml' --plugin toykit$"):
        train(config_for(tmp_path), odd, quiet=True)
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("# mine\n" + config_for(tmp_path).dump())
    (run / "metrics.jsonl").write_text("mine\n")
    before = {name: (run / name).read_bytes() for name in ("config.yaml", "metrics.jsonl")}
    mine = load_config(run / "config.yaml", (), ("toykit",))
    for resume in (False, "auto"):
        with pytest.raises(RunError, match="write its own config.yaml.*another folder with --run$"):
            train(mine, run, resume=resume, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no whole checkpoint to resume from"):
        train(mine, run, resume=True, quiet=True)
    # nor by a run of another config
    other = config_for(tmp_path)
    for resume in (False, "auto"):
        with pytest.raises(RunError, match="that no run wrote .*flowrl train runs/toy-seed3/conf"):
            train(other, run, resume=resume, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="no whole checkpoint to resume from"):
        train(other, run, resume=True, quiet=True)
    for config in (mine, other):
        with claimed(config, None, False) as start:
            assert start.run.name == "toy-seed3-2"
    assert before == {name: (run / name).read_bytes() for name in before}


def test_a_config_that_does_not_work_leaves_the_folder_free(home: Path, tmp_path: Path) -> None:
    for wrong in ("prompts.train=nowhere.txt", "train.updates=99"):
        with pytest.raises(ConfigError, match=wrong.removeprefix("prompts.train=")):
            train(config_for(home, wrong), tmp_path / "run", quiet=True)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="expected at least one prompt"):
        train(config_for(home, f"prompts.test={tmp_path}/empty.txt"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run" / "config.yaml").exists()
    train(config_for(home, "train.iterations=1"), tmp_path / "run", quiet=True)
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_checkpoint_of_another_model(home: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(home / "whole", tmp_path / "run"))
    other = "000004: 3 of 3 trainable parameters do not fit .*another model"
    with pytest.raises(CheckpointError, match=other):
        train(config_for(home, "model.channels=5"), run, resume=True, quiet=True)
    with pytest.raises(CheckpointError, match=r"this config needs \['ema'\]"):
        train(toy(home), run, resume=True, quiet=True)
    assert_same_run(run, home / "whole")
