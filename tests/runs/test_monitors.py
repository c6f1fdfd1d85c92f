"""Monitors of whole runs: what they say and do, also over a resume."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
import torch
from runkit import config_for, rows
from torch import Tensor
from toykit import apprentice, toy

from flowrl.config.load import Config, load_config
from flowrl.config.sections import (
    AdaptiveKl,
    GradientsMonitor,
    HackingMonitor,
    MonitorsConfig,
    PlateauMonitor,
)
from flowrl.core.errors import ConfigError
from flowrl.runs import evaluate, milestones
from flowrl.runs.monitors import follow_kl, go_back, hacking, look, noise_of_change, plateau
from flowrl.runs.open_run import load_run
from flowrl.runs.stop import Interrupted
from flowrl.runs.train import train
from flowrl.training.checkpoint import checkpoint_folder, checkpoint_folders, load
from flowrl.training.parts.gradient_monitor import is_usual
from flowrl.training.trainer import Trainer


def evals(*scores: float, start: int = 0) -> list[dict[str, Any]]:
    """Return evaluations every 10 iterations."""
    return [{"iteration": 10 * i + start, "score": "red", "red": s} for i, s in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "min_gain", "since"),
    [
        # counted by hand: evaluations after the last one that rose above all before
        ([0.3], 0.0, 0),
        ([0.3, 0.4, 0.4, 0.39], 0.0, 2),
        ([0.3, 0.4, 0.35, 0.41], 0.0, 0),
        ([0.3, 0.4, 0.41, 0.42], 0.05, 2),
        ([0.3, 0.4, 0.42, 0.44, 0.46], 0.05, 0),  # small gains add up
        ([0.9, 0.2, 0.1], 0.0, 2),  # the base model was never beaten
    ],
)
def test_plateau(scores: list[float], min_gain: float, since: int) -> None:
    for patience in (1, 2, 3):
        found = plateau(PlateauMonitor(patience, min_gain), evals(*scores))
        assert (found is not None) == (since >= patience)
        assert found is None or f"in {since} evaluations" in found.what


def test_plateau_counts_one_score_only() -> None:
    """A run that goes on may be given another headline: what was before says nothing of it."""
    both = [*evals(0.9, 0.9, 0.9), *({**row, "score": "strict", "strict": 0.1} for row in evals(0))]
    assert plateau(PlateauMonitor(1), both) is None


STOP = ("eval.every=1", "monitors.plateau={patience: 2, min_gain: 9, action: stop}")


@pytest.mark.integration
def test_stop_ends_a_run_as_if_it_were_done(home: Path, tmp_path: Path) -> None:
    """No score rises by 9, so the second evaluation after the first one ends the run; up to there
    it is the run without monitors. Gone on with, it stays ended, and goes on once it may."""
    run = tmp_path / "run"
    summary = train(config_for(home, *STOP), run, quiet=True)
    assert summary["iterations"] == 2 and summary["stopped"]["monitor"] == "plateau"
    assert [row["iteration"] for row in rows(run / "eval.jsonl")] == [0, 1, 2]
    (found,) = rows(run / "findings.jsonl")
    assert (found["iteration"], found["action"]) == (2, "stop")
    assert "stopped after 2 iterations by the monitor plateau" in (run / "report.html").read_text()
    for name in ("current", "ema", "optimizer"):
        file = f"checkpoints/000002/{name}.safetensors"
        assert (run / file).read_bytes() == (home / "whole" / file).read_bytes()
    # again, and in a checkpoint that was saved before the evaluation was looked at
    assert train(config_for(home, *STOP), run, resume=True, quiet=True) == summary
    assert len(rows(run / "findings.jsonl")) == 1
    on = config_for(home, STOP[0], "monitors.plateau=null")
    assert train(on, run, resume=True, quiet=True)["iterations"] == 4
    assert (run / "metrics.jsonl").read_bytes() == (home / "whole/metrics.jsonl").read_bytes()


OFF = [f"monitors.{name}=null" for name in MonitorsConfig.inner() if name != "actions"]
UNCLIPPED = "train.max_grad_norm=.inf"  # or no gradient of the toy is an outlier
# every monitor fires on the toy: limits that nothing keeps
FIRING = (
    "eval.every=1",
    "monitors.plateau={patience: 2, min_gain: 9}",
    "monitors.drift.limit=1e-9",
    "monitors.diversity.floor=1",
    "monitors.images={saturation: 1.0001, sharpness: 1.0001}",
    "monitors.ratio={spread: 1e-9, patience: 1}",
    "monitors.gradients={factor: 1.0001, history: 2, action: warn}",
    UNCLIPPED,
)


@pytest.mark.integration
def test_warnings_change_nothing(home: Path, tmp_path: Path) -> None:
    """With every monitor at `warn`, and firing, weights and metrics are those of a run without
    monitors; a resume writes each finding once, and ends with the same memory."""
    run, bare = tmp_path / "run", tmp_path / "bare"
    train(config_for(home, "eval.every=1", UNCLIPPED, *OFF), bare, quiet=True)
    train(config_for(home, *FIRING), run, quiet=True)
    names = {row["monitor"] for row in rows(run / "findings.jsonl")}
    assert {"plateau", "drift", "ratio", "gradients"} <= names
    assert not rows(bare / "findings.jsonl") and "drift" not in rows(bare / "eval.jsonl")[1]
    for weights in ("current", "ema", "optimizer"):
        file = f"checkpoints/000004/{weights}.safetensors"
        assert (run / file).read_bytes() == (bare / file).read_bytes()
    counted = [row.pop("grad_outliers") for row in rows(run / "metrics.jsonl")]
    assert sum(counted) > 0
    # the same again, from the middle
    before = (run / "findings.jsonl").read_bytes()
    state = json.loads((run / "checkpoints/000004/state.json").read_text())["monitors"]
    for folder in sorted((run / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    train(config_for(home, *FIRING), run, resume=True, quiet=True)
    assert (run / "findings.jsonl").read_bytes() == before
    again = json.loads((run / "checkpoints/000004/state.json").read_text())["monitors"]
    assert again == state


def hacked(home: Path) -> Config:
    """Return a config whose reward is the opposite of its held-out score."""
    options = ["eval.every=1", "rewards.red.weight=-1", "checkpoint={every: 1, keep: 1}"]
    options += ["monitors.plateau={patience: 1, min_gain: 9, action: rollback}"]
    return config_for(home, *options, "monitors.actions.rollbacks=2")


@pytest.mark.integration
def test_rollback_goes_back_and_resumes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The score falls from the first iteration on, so the run goes back to the base model, at half
    the learning rate each time, and stops where it would go back a third time. A run that is
    interrupted after the first time ends with the same files."""
    run, broken = tmp_path / "run", tmp_path / "broken"
    summary = train(hacked(home), run, quiet=True)
    found = rows(run / "findings.jsonl")
    actions = [row["action"] for row in found if row["monitor"] == "plateau"]
    assert actions == ["rollback", "rollback", "stop"] and summary["iterations"] == 3
    assert "(after 2 rollbacks)" in summary["stopped"]["why"]
    assert "(back to iteration 0)" in found[0]["what"]
    metrics = rows(run / "metrics.jsonl")
    # warm-up: step n of 4 has n / 4 of 0.01; two steps an iteration
    assert [row["lr"] for row in metrics] == pytest.approx([0.005, 0.01 / 2, 0.01 / 4])
    scores = [row["red"] for row in rows(run / "eval.jsonl")]
    assert f"(back to iteration {scores.index(max(scores[:3]))})" in found[1]["what"]
    with monkeypatch.context() as patch:
        step = Trainer.step

        def stepping(self: Trainer) -> dict[str, float]:
            if self.iteration == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return step(self)

        patch.setattr(Trainer, "step", stepping)
        with pytest.raises(Interrupted):
            train(hacked(home), broken, quiet=True)
    train(hacked(home), broken, resume=True, quiet=True)
    files = ["metrics.jsonl", "eval.jsonl", "findings.jsonl"]
    files += ["checkpoints/000003/current.safetensors", "checkpoints/000003/state.json"]
    for name in files:
        assert (broken / name).read_bytes() == (run / name).read_bytes(), name


@pytest.mark.integration
def test_actions_move_rate_and_kl(home: Path, tmp_path: Path) -> None:
    """`lower_lr` halves the rate, `raise_kl` doubles the weight 0.1, outliers are left out."""
    options = ["eval.every=1", "monitors.plateau={patience: 2, min_gain: 9, action: lower_lr}"]
    options += ["monitors.drift={limit: 1e-9, action: raise_kl}", "monitors.actions.raise_kl=2"]
    options += ["monitors.gradients={factor: 1.0001, history: 2}", "train.warmup=0"]
    train(config_for(home, *options, UNCLIPPED), tmp_path / "run", quiet=True)
    metrics = rows(tmp_path / "run" / "metrics.jsonl")
    # no gain at 1 is the first, at 2 the second evaluation; at 3 it speaks anew
    assert [row["lr"] for row in metrics] == pytest.approx([0.01, 0.01, 0.005, 0.0025])
    assert [row.get("kl_weight") for row in metrics] == [None, 0.2, 0.4, 0.8]
    assert sum(row["grad_outliers"] for row in metrics) > 0


def test_gradient_outliers() -> None:
    """Medians by hand: of the last 3 norms, once there are 3."""
    options = GradientsMonitor(factor=2.0, history=3)
    memory: dict[str, Any] = {}
    norms = [1.0, 50.0, 1.0, 1.9, 3.9, 4.0, 7.7]
    # medians before the fourth and later ones: 1, 1.9, 1.9, 3.9
    usual = [True, True, True, True, False, False, True]
    assert [is_usual(memory, norm, options) for norm in norms] == usual
    assert memory["norms"] == norms[-3:]


@pytest.mark.parametrize(
    ("scores", "rewards", "found"),
    [
        ([0.5, 0.47], [1.0, 2.0], True),  # down by .03, reward up
        ([0.5, 0.49], [1.0, 2.0], False),  # within `drop`
        ([0.5, 0.40], [2.0, 1.0], False),  # both down: training fails, nothing is hacked
        ([0.5, 0.60, 0.57], [1.0, 2.0, 3.0], True),  # below the best, not the first
        ([0.5, 0.60, 0.57], [1.0, 3.0, 2.0], False),
    ],
)
def test_hacking(scores: list[float], rewards: list[float], found: bool) -> None:
    made = evals(*scores)
    known = {str(row["iteration"]): r for row, r in zip(made, rewards, strict=True)}
    assert (hacking(HackingMonitor(), made, known) is not None) == found


@pytest.mark.parametrize(
    ("changes", "found"), [([-0.1] * 4, True), ([0.2, -0.5, 0.3, -0.4], False)]
)
def test_a_fall_by_chance_is_no_hacking(changes: list[float], found: bool) -> None:
    """Both fall by 0.1 on the mean; the second with scipy's standard error of a paired mean of
    0.204, so by half of one."""
    before = [0.5, 0.6, 0.7, 0.8]
    made = evals(0.65, 0.55)
    made[0]["by_prompt"] = {"all": before}
    made[1]["by_prompt"] = {"all": [a + b for a, b in zip(before, changes, strict=True)]}
    noise = noise_of_change(*made)
    assert noise == pytest.approx(float(scipy.stats.sem(changes)), abs=1e-9)
    assert (hacking(HackingMonitor(), made, {"0": 1.0, "10": 2.0}) is not None) == found


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"diversity": 0.04}, "diversity"),
        ({"saturation": 0.45}, "images"),
        ({"saturation": 0.09}, "images"),
        ({"sharpness": 0.05}, "images"),
        ({"grid": 0.5}, "images"),
        ({"zero_std": 0.95}, "zero_std"),
        ({"prompt_entropy": 0.3}, "prompts"),
        ({"on_policy_gap": 0.2}, "ratio"),
        ({"ratio_std/step2": 3.0}, "ratio"),
        ({"clip_frac/step1": 0.95}, "ratio"),
        ({"grad_outliers": 1.0}, "gradients"),
        ({"grid": 0.01, "reward": 9.0}, ""),  # less of a grid is no harm
    ],
)
def test_iterations(change: dict[str, float], name: str) -> None:
    """One number out of its range, after three healthy iterations: its monitor speaks, at once or
    in the third iteration in a row, and no other."""
    usual = {"diversity": 0.1, "saturation": 0.2, "sharpness": 0.2, "grid": 0.1}
    usual |= {"zero_std": 0.1, "prompt_entropy": 0.9, "on_policy_gap": 1e-6}
    usual |= {"ratio_std/step2": 0.01, "clip_frac/step1": 0.1, "grad_outliers": 0.0}
    memory: dict[str, Any] = {}
    for _ in range(3):
        assert not any(look(MonitorsConfig(), usual, memory).values())
    spoken = []
    for _ in range(3):
        found = look(MonitorsConfig(), {**usual, **change}, memory)
        spoken.append([key for key, alarm in found.items() if alarm])
    lasting = name in ("zero_std", "prompts", "ratio")
    heard = [name] if name else []
    assert spoken == ([[], [], heard] if lasting else [heard] * 3)


def test_adaptive_kl() -> None:
    """Above 1.5 times the target the weight grows by 1.2, below 2/3 of it shrinks."""
    memory: dict[str, Any] = {}
    options = AdaptiveKl(target=0.1)
    factors = []
    for kl in (0.16, 0.16, 0.14, 0.07, 0.06):
        follow_kl(options, {"kl": kl}, memory)
        factors.append(memory["kl_factor"])
    assert factors == pytest.approx([1.2, 1.44, 1.44, 1.44, 1.2])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("monitors.plateu={}", "monitors has no section 'plateu'"),
        ("monitors.plateau.patence=2", "patence"),
        ("monitors.plateau.patience=0", "monitors.plateau.patience: expected a whole number >= 1"),
        ("monitors.plateau.action=halt", "expected one of 'warn', 'stop', 'rollback'"),
        ("monitors.drift.action=raise_kl", "monitors.drift: needs a kl section"),
        ("monitors.adaptive_kl={target: 1}", "monitors.adaptive_kl: needs a kl section"),
        ("monitors.adaptive_kl={}", "needs target"),
        ("monitors.actions=null", "monitors.actions: expected keys and values, got None"),
        ("monitors.plateau=3", "monitors.plateau: expected keys and values, got 3"),
    ],
)
def test_wrong_options(home: Path, wrong: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        toy(home, wrong)


@pytest.mark.integration
def test_an_early_stop_keeps_the_best_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best score is that of iteration 1, two evaluations later the run ends. Of the checkpoints
    only the newest is to be kept, and the best stays beside it: it is what the run is opened at."""
    scores = iter([0.2, 0.6, 0.5, 0.4, 0.3])
    real = evaluate.evaluate

    def scripted(*args: Any, **options: Any) -> dict[str, Any]:
        return real(*args, **options) | {"red": next(scores)}

    monkeypatch.setattr(milestones, "evaluate", scripted)
    stop = "monitors.plateau={patience: 2, action: stop}"
    run = tmp_path / "run"
    config = config_for(tmp_path, "eval.every=1", "checkpoint={every: 1, keep: 1}", stop)
    summary = train(config, run, quiet=True)
    assert config.train.iterations == 4 and summary["iterations"] == 3
    assert summary["stopped"]["monitor"] == "plateau"
    best = "checkpoints/000001"
    assert summary["best"] == {"iteration": 1, "score": 0.6, "checkpoint": best}
    assert [folder.name for folder in checkpoint_folders(run)] == ["000001", "000003"]
    model, _, iteration = load_run(run, plugins=("toykit",), weights="current")[:3]
    saved = load(run / best)[0]["current"]
    assert iteration == 1
    assert all(torch.equal(p, saved[name]) for name, p in model.trainable().items())


def test_the_stop_of_the_quickstart_is_after_27_iterations_without_a_gain() -> None:
    """Evaluations after 0, 9, ... 63 iterations and a patience of 3, as docs/shapes.md says."""
    config = load_config("shapes/awm")
    options = config.monitors.plateau
    assert options is not None and (options.action, options.patience) == ("stop", 3)
    assert (config.eval.every, config.train.iterations) == (9, 63)
    stops = {}
    for best in range(8):
        rows = evals_at({9 * i: 0.9 - 0.1 * abs(i - best) for i in range(8)})
        ends = [n for n in range(1, 9) if plateau(options, rows[:n]) is not None]
        stops[9 * best] = 9 * (ends[0] - 1) if ends else None
    assert stops == {0: 27, 9: 36, 18: 45, 27: 54, 36: 63, 45: None, 54: None, 63: None}


def evals_at(scores: dict[int, float]) -> list[dict[str, Any]]:
    """Return evaluations after so many iterations."""
    return [{"iteration": n, "score": "strict", "strict": s} for n, s in scores.items()]


def test_its_rounds_go_on_with_the_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it learned is the checkpoint's. Its count is not, else its turns and the policy's, which
    follow from the iteration, would fall apart after an odd number of iterations."""
    trainer = Trainer(toy(tmp_path, "rewards.fan={fn: toykit.apprentice, every: 2}"))
    fan: Any = trainer.reward_set.learned_rewards()["fan"]
    before = float(fan.taste)
    trainer.save(checkpoint_folder(tmp_path, 0))
    trainer.step()
    fan.rounds = 1
    assert float(fan.taste) > before
    load = apprentice.load_state_dict

    def with_count(self: Any, state: dict[str, Tensor]) -> None:
        load(self, state)
        self.rounds = 0

    monkeypatch.setattr(apprentice, "load_state_dict", with_count)
    assert go_back(trainer, tmp_path, [{"iteration": 0, "score": "red", "red": 1.0}]) == 0
    assert (float(fan.taste), fan.rounds, trainer.iteration) == (before, 1, 1)
