"""On-policy distillation: the distance of a step to the teacher's, and whose teacher is whose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from losskit import loss_input
from toykit import write_toy

from flowrl.algorithms.losses.distillation import distill
from flowrl.algorithms.transitions import cps, flow_sde
from flowrl.config.load import load_config
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.types import Eval, LossInput
from flowrl.training.checkpoint import checkpoint_folder
from flowrl.training.trainer import Trainer

ANY = {"red": "runs/none"}


def step(v: float, transition: object, level: float) -> Eval:
    """One step from x=.8 at sigma .7 to .5 with a velocity."""
    x, velocity, here, there, scale = (
        torch.tensor([value], dtype=torch.float64) for value in (0.8, v, 0.7, 0.5, level)
    )
    mean, std = transition(x[:, None], velocity[:, None], here, there, scale)  # type: ignore[operator]
    return Eval(torch.zeros(1), mean, std, velocity[:, None])


def data_of(now: Eval, teacher: Eval) -> LossInput:
    zero = torch.zeros(1)
    sigmas = {"sigma": torch.tensor([0.7]), "sigma_next": torch.tensor([0.5])}
    data = loss_input(now.log_prob, zero, zero, **sigmas)
    return data._replace(now=now, teachers=((teacher, torch.ones(1)),))


@pytest.mark.parametrize(
    ("transition", "level", "form", "wanted"),
    [
        # the reference's fixture, v = -.5 and v_T = -.3, computed in numpy
        (flow_sde, 0.7, "kl", 0.0054228280),
        (cps, 0.8, "kl", 0.0081548620),
        (flow_sde, 0.7, "ode", 0.0008),
        (flow_sde, 0.7, "velocity", 0.04),
    ],
)
def test_the_distance_of_a_step(transition: object, level: float, form: str, wanted: float) -> None:
    now, teacher = step(-0.5, transition, level), step(-0.3, transition, level)
    loss, _ = distill(data_of(now, teacher), teachers=ANY, form=form)  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(wanted, abs=1e-8)
    same, _ = distill(data_of(now, now), teachers=ANY, form=form)  # type: ignore[arg-type]
    assert float(same) == 0


def test_a_step_without_noise_is_refused() -> None:
    now = step(-0.5, cps, 0.0)
    with pytest.raises(ConfigError, match="has no noise"):
        distill(data_of(now, now), teachers=ANY)
    with pytest.raises(ConfigError, match="at least one teacher"):
        distill(data_of(now, now), teachers={})


# ---------------------------------------------------------------------------------------- in a run


def teacher(folder: Path, config: str, seed: int) -> str:
    """Save a run whose weights are others -> its folder."""
    made = Trainer(load_config(config, [f"model.seed={seed}", "train.ema=0", *EVAL], ("toykit",)))
    made.save(checkpoint_folder(folder / f"run-{seed}", 0))
    return str(folder / f"run-{seed}")


EVAL = ["eval.weights=current"]


def student(folder: Path, *overrides: str) -> Trainer:
    """A student of two teachers, one for each of the toy's tags."""
    config = str(write_toy(folder))
    runs = {tag: teacher(folder, config, seed) for tag, seed in (("even", 11), ("odd", 12))}
    loss = f"loss={{fn: distill, teachers: {json.dumps(runs)}}}"
    more = ["train.updates=1", "train.prompts=4", "train.group=4", "train.iterations=99"]
    return Trainer(load_config(config, [loss, *more, *overrides], ("toykit",)))


def test_each_row_learns_from_its_own_teacher(tmp_path: Path) -> None:
    """Its velocity gap, against both teachers' weights put into the model by hand."""
    run = student(tmp_path)
    row = [run.train_set.records[index]["tag"] for index in run.rows()]
    assert {*row} == {"even", "odd"}
    metrics = run.step()
    assert metrics["velocity_gap"] > 0 and metrics["trained"] == 4 * 4 * 3
    # sampling 4 steps; forward, backward of twice the work, and a teacher
    assert metrics["nfe"] == 4 * 4 * 4 + 4 * 4 * 3 * 4
    with pytest.raises(CheckpointError, match="teacher"):
        run.weights.add("teacher-x", {})


def test_a_student_resumes_exactly(tmp_path: Path) -> None:
    """Two iterations in one go, or with a checkpoint between them, which holds no teacher; nor
    does going back to a checkpoint lose them."""
    whole = student(tmp_path)
    whole.step()
    whole.save(tmp_path / "kept")
    again = student(tmp_path)
    again.load(tmp_path / "kept")
    second = whole.step()
    assert again.step() == second
    whole.load(tmp_path / "kept")
    assert whole.step() == second


@pytest.mark.learning
def test_the_student_comes_close(tmp_path: Path) -> None:
    """One teacher for all: the velocity gap falls to a tenth within 60 iterations."""
    config = str(write_toy(tmp_path))
    path = teacher(tmp_path, config, 11)
    loss = f"loss={{fn: distill, form: velocity, teachers: {{even: {path}, odd: {path}}}}}"
    more = ["train.updates=1", "train.prompts=4", "train.group=4", "optimizer.lr=0.03"]
    run = Trainer(load_config(config, [loss, *more, "train.iterations=99"], ("toykit",)))
    gaps: list[float] = [run.step()["velocity_gap"] for _ in range(60)]
    print(gaps[0], gaps[-1])
    assert gaps[-1] < 0.1 * gaps[0]


def test_teachers_that_are_not_there(tmp_path: Path) -> None:
    config = str(write_toy(tmp_path))
    unloadable = "model={fn: toykit.unloadable}"
    for teachers, words in (
        ("{even: runs/nowhere, odd: runs/nowhere}", "no run with a whole checkpoint"),
        (f"{{even: {teacher(tmp_path, config, 11)}}}", "'tag' is 'odd', and loss.teachers has no"),
    ):
        loss = f"loss={{fn: distill, teachers: {teachers}}}"
        with pytest.raises(ConfigError, match=words):
            Trainer(load_config(config, [loss, unloadable], ("toykit",)))
