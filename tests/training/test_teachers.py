"""On-policy distillation: the distance of a step to the teacher's, whose teacher is whose, several
teachers of one domain, and teachers with a guidance of their own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from adapterkit import Folders
from estimatekit import model_config
from losskit import loss_input
from modelkit import perturb
from tiny import tiny_sd3
from toykit import axes, write_toy
from trainkit import watch

from flowrl.algorithms.losses.distillation import distill
from flowrl.algorithms.transitions import cps, flow_sde
from flowrl.config.load import Config, load_config
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.teacher_runs import TeacherRun, runs_of
from flowrl.core.types import Eval, LossInput
from flowrl.training.checkpoint import checkpoint_folder
from flowrl.training.parts.teachers import Teachers, teacher_calls, teachers_of
from flowrl.training.rehearsal import check_plan
from flowrl.training.trainer import Trainer

ANY = {"red": "runs/none"}
SCALE = 3.0
UNLOADABLE = ["model={fn: toykit.unloadable}"]


# ------------------------------------------------------------------------------------- the distance


def steps(*velocities: float, transition: Any = flow_sde, level: float = 0.7) -> Eval:
    """Rows from x=.8 at sigma .7 to .5 with these velocities, by Flow-GRPO's step of .7."""
    v = torch.tensor(velocities, dtype=torch.float64)[:, None]
    one = torch.ones(len(velocities), dtype=torch.float64)
    mean, std = transition(0.8 * one[:, None], v, 0.7 * one, 0.5 * one, level * one)
    return Eval(torch.zeros(len(v)), mean, std, v)


def told(now: Eval, *teachers: tuple[Eval, torch.Tensor]) -> LossInput:
    """Say what the loss sees of such rows."""
    count = len(now.mean)
    sigmas = {"sigma": weights(*[0.7] * count), "sigma_next": weights(*[0.5] * count)}
    data = loss_input(*torch.zeros(3, count), **sigmas)
    return data._replace(now=now, teachers=teachers)


def weights(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


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
def test_the_distance_of_a_step(transition: Any, level: float, form: Any, wanted: float) -> None:
    now, teacher = (steps(v, transition=transition, level=level) for v in (-0.5, -0.3))
    loss, _ = distill(told(now, (teacher, weights(1.0))), teachers=ANY, form=form)
    assert float(loss) == pytest.approx(wanted, abs=1e-8)
    same, _ = distill(told(now, (now, weights(1.0))), teachers=ANY, form=form)
    assert float(same) == 0


def test_a_step_without_noise_is_refused() -> None:
    now = steps(-0.5, transition=cps, level=0.0)
    data = told(now, (now, weights(1.0)))
    with pytest.raises(ConfigError, match="has no noise"):
        distill(data, teachers=ANY)
    with pytest.raises(ConfigError, match="at least one teacher"):
        distill(data, teachers={})


@pytest.mark.parametrize(
    ("form", "one"), [("kl", 0.0054228280), ("ode", 0.0008), ("velocity", 0.04)]
)
def test_distances_of_several_teachers_are_added(form: Any, one: float) -> None:
    """The reference's fixture, v=-.5 and v_T=-.3: a distance `one`, quadratic in the gap. Row 0 has
    teachers at gaps .2 and .4 (four times as far), the second of weight .5; row 1 the first alone:
    a teacher that is missing adds nothing, whatever stands in its place."""
    now = steps(-0.5, -0.5)
    first, second = steps(-0.3, -0.3), steps(-0.1, 9.0)
    data = told(now, (first, weights(1.0, 1.0)), (second, weights(0.5, 0.0)))
    loss, metrics = distill(data, teachers=ANY, form=form)
    assert loss.tolist() == pytest.approx([one * (1 + 0.5 * 4), one], abs=2e-8)
    # weighted means of .04 and .16, and of .04 alone
    assert metrics["velocity_gap"].tolist() == pytest.approx([0.12 / 1.5, 0.04], abs=1e-12)


def test_the_gradient_leads_to_their_weighted_mean() -> None:
    """Quadratic distances with weights 3 and 1 pull to (3 * -.3 + 1 * .1) / 4 = -.2."""
    v = torch.tensor([[-0.2]], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1)
    data = loss_input(zero, zero, zero, v=v, std=torch.ones(1))
    data = data._replace(teachers=((steps(-0.3), weights(3.0)), (steps(0.1), weights(1.0))))
    loss, _ = distill(data, teachers=ANY, form="velocity")
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    assert float(gradient) == pytest.approx(0.0, abs=1e-12)


def test_how_teachers_are_named() -> None:
    found = runs_of({"a": "one", "b": ["one", {"run": "two", "weight": 0.5, "guidance": 1.0}]})
    two = TeacherRun("two", 0.5, 1.0)
    assert found == {"a": [TeacherRun("one")], "b": [TeacherRun("one", 1.0, None), two]}
    assert runs_of({"c": {"run": "two"}}) == {"c": [TeacherRun("two")]}


# ---------------------------------------------------------------------------------------- in a run


def teacher(folder: Path, config: str, seed: int) -> str:
    """Save a run whose weights are others -> its folder."""
    more = [f"model.seed={seed}", "train.ema=0", "eval.weights=current"]
    Trainer(load_config(config, more, ("toykit",))).save(checkpoint_folder(folder / f"{seed}", 0))
    return str(folder / f"{seed}")


def student(folder: Path, teachers: object, *overrides: str, form: str = "velocity") -> Trainer:
    loss = f"loss={{fn: distill, form: {form}, teachers: {json.dumps(teachers)}}}"
    more = ["train.updates=1", "train.prompts=4", "train.group=4", "train.iterations=99"]
    return Trainer(load_config(str(write_toy(folder)), [loss, *more, *overrides], ("toykit",)))


def of_two(folder: Path) -> Trainer:
    """A student of two teachers, one for each of the toy's tags."""
    config = str(write_toy(folder))
    runs = {tag: teacher(folder, config, seed) for tag, seed in (("even", 11), ("odd", 12))}
    return student(folder, runs, form="kl")


def test_each_row_learns_from_its_own_teacher(tmp_path: Path) -> None:
    run = of_two(tmp_path)
    assert {run.train_set.records[index]["tag"] for index in run.rows()} == {"even", "odd"}
    metrics = run.step()
    assert metrics["velocity_gap"] > 0 and metrics["trained"] == 4 * 4 * 3
    # sampling 4 steps; forward, backward of twice the work, and a teacher
    assert metrics["nfe"] == 4 * 4 * 4 + 4 * 4 * 3 * 4
    with pytest.raises(CheckpointError, match="teacher"):
        run.weights.add("teacher-x", {})


def test_a_student_resumes_exactly(tmp_path: Path) -> None:
    """Two iterations in one go, or with a checkpoint between them, which holds no teacher; nor
    does going back to a checkpoint lose them."""
    whole, again = of_two(tmp_path), of_two(tmp_path)
    whole.step()
    whole.save(tmp_path / "kept")
    again.load(tmp_path / "kept")
    second = whole.step()
    assert again.step() == second
    whole.load(tmp_path / "kept")
    assert whole.step() == second


@pytest.mark.learning
def test_the_student_comes_close(tmp_path: Path) -> None:
    """One teacher for all: the velocity gap falls to a tenth within 60 iterations."""
    path = teacher(tmp_path, str(write_toy(tmp_path)), 11)
    run = student(tmp_path, {"even": path, "odd": path}, "optimizer.lr=0.03")
    gaps = [run.step()["velocity_gap"] for _ in range(60)]
    print(gaps[0], gaps[-1])
    assert gaps[-1] < 0.1 * gaps[0]


def test_a_run_with_several_teachers_of_a_domain(tmp_path: Path) -> None:
    """Each row's loss against all velocities put into the model by hand; each run is kept once, and
    the network calls are those that were made: two teachers of even prompts, one of odd ones."""
    config = str(write_toy(tmp_path))
    a, b = (teacher(tmp_path, config, seed) for seed in (11, 12))
    run = student(tmp_path, {"even": [a, {"run": b, "weight": 0.25}], "odd": b})
    assert run.weights.names()[-2:] == ["teacher-0", "teacher-1"]
    teachers = run.parts.get(Teachers)
    assert teachers is not None
    rows, tags, paths = (
        run.rows(),
        [record["tag"] for record in run.train_set.records],
        teachers.paths,
    )
    seen = watch(run)
    metrics = run.step()
    wanted = []
    for data in seen:
        x, sigma, cond = data.batch.x, data.batch.sigma, data.batch.cond
        gaps = {}
        for path, name in paths.items():
            with torch.no_grad(), run.weights.using(name):
                v = run.model.velocity(x, sigma, cond)
            assert data.now.v is not None
            gaps[path] = (data.now.v.detach() - v).square().flatten(1).mean(1)
        for k, vector in enumerate(cond["text"]):
            both = gaps[a][k] + 0.25 * gaps[b][k]
            wanted.append(float(both if tag_of(run, vector) == "even" else gaps[b][k]))
    assert metrics["loss"] == pytest.approx(sum(wanted) / len(wanted), rel=1e-5)
    states = 4 * 4 * 3
    even = sum(tags[row] == "even" for row in rows) * 4 * 3
    assert 0 < even < states
    assert metrics["nfe"] == 4 * 4 * 4 + 3 * states + states + even
    # the forecast takes the domain with the most
    assert teacher_calls(run.config) == 2


def tag_of(run: Trainer, vector: torch.Tensor) -> str:
    """Return the tag of the training prompt that has this vector."""
    known = run.model.encode(run.train_set.texts)["text"]
    (row,) = (known == vector).all(1).nonzero()[:1, 0].tolist()
    return str(run.train_set.records[row]["tag"])


def test_without_options_nothing_has_changed(tmp_path: Path) -> None:
    """A run alone, in a list, or with the options that it has anyway: the same to the bit."""
    config = str(write_toy(tmp_path))
    a, b = (teacher(tmp_path, config, seed) for seed in (11, 12))
    ways = ({"even": a, "odd": b}, {"even": [a], "odd": {"run": b, "weight": 1.0}})
    one, two = (student(tmp_path, way).step() for way in ways)
    assert one == two


# -------------------------------------------------------------------------------------- guidance


def guided_config(folder: Path, teachers: object, *overrides: str, guidance: float = 1.0) -> Config:
    """Return a student of these teachers, on a tiny SD3."""
    if not (folder / "weights").exists():
        tiny_sd3(folder / "weights")
    model = f"{{fn: sd3, guidance: {guidance}, tune: full, path: {folder}/weights, device: cpu}}"
    loss = f"loss={{fn: distill, form: velocity, teachers: {json.dumps(teachers)}}}"
    own = ["image={height: 64, width: 48}", *axes("shapes/flow_opd"), loss, "train.updates=1"]
    return model_config(folder, model, *own, *overrides)


@pytest.mark.integration
@pytest.mark.parametrize(("own", "scale"), [(1.0, SCALE), (SCALE, 1.0), (SCALE, 2.0)])
def test_a_teacher_is_asked_at_its_own_guidance(tmp_path: Path, own: float, scale: float) -> None:
    """Oracle: the teacher's weights in a model that was loaded with that guidance. The student is
    guided as its config says, also where one of both has no guidance at all."""
    plain = ("loss={fn: ppo_clip, clip_low: 0.1, clip_high: 0.1}", "train.ema=0")
    made = Trainer(guided_config(tmp_path, ANY, *plain, "eval.weights=current"))
    perturb(made.model, 0.05)
    path = str(tmp_path / "teacher")
    made.save(checkpoint_folder(Path(path), 0))
    teachers = dict.fromkeys(("even", "odd"), {"run": path, "guidance": scale})
    config = guided_config(tmp_path, teachers, guidance=own)
    run = Trainer(config)
    seen = watch(run)
    metrics = run.step()
    oracle = guided_config(tmp_path, ANY, guidance=scale).call("model")()
    for name, p in oracle.trainable().items():
        p.data.copy_(made.params[name])
    for data in seen:
        with torch.no_grad():
            wanted = oracle.velocity(data.batch.x, data.batch.sigma, data.batch.cond)
        ((found, _),) = data.teachers
        assert found.v is not None and torch.equal(found.v, wanted)
    # a guided teacher of a student without takes two rows of the network for each state
    twice = 2 if own == 1 else 1
    assert teacher_calls(config) == twice
    states = metrics["backwards"]
    assert metrics["nfe"] == run_nfe(config) + 3 * states + twice * states


def run_nfe(config: Config) -> int:
    return check_plan(config).work.nfe


# --------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("teachers", "said"),
    [
        ({"even": [], "odd": "PATH"}, r"loss\.teachers\.even: expected at least one run"),
        ({"even": ["PATH", "PATH"], "odd": "PATH"}, "is named twice; give it a weight"),
        ({"even": {"weight": 2.0}, "odd": "PATH"}, r"even: expected a run, as in .*'weight': 2.0"),
        ({"even": {"run": "PATH", "weight": 0.0}, "odd": "PATH"}, "weight.*> 0"),
        ({"even": {"run": "PATH", "guidence": 1.0}, "odd": "PATH"}, "guidence"),
        ({"even": "PATH"}, "its 'tag' is 'odd', and loss.teachers has no run for it"),
        ({"even": ["PATH", "runs/nowhere"], "odd": "PATH"}, "even: there is no run with a whole"),
        ({"even": "runs/nowhere", "odd": "runs/nowhere"}, "no run with a whole checkpoint"),
        (
            {"even": {"run": "PATH", "guidance": 3.0}, "odd": "PATH"},
            "guidance=3: model toykit.linear has no `guiding`",
        ),
    ],
)
def test_teachers_that_cannot_be(tmp_path: Path, teachers: object, said: str) -> None:
    path = teacher(tmp_path, str(write_toy(tmp_path)), 11)
    named = json.loads(json.dumps(teachers).replace("PATH", path))
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        student(tmp_path, named, *([] if "guiding" in said else UNLOADABLE))


def test_records_without_the_key(tmp_path: Path) -> None:
    path = teacher(tmp_path, str(write_toy(tmp_path)), 11)
    said = r"train\.jsonl, line 1: expected the key 'tags' .*did you mean 'tag'"
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        student(tmp_path, {"even": path, "odd": path}, "loss.by=tags")


def test_models_that_have_no_other_guidance(folders: Folders) -> None:
    """FLUX.2 is told its guidance as a number, found before it is loaded; a distilled klein ignores
    it, found when its weights are there."""
    teachers = {"all": {"run": "runs/a", "guidance": 2.0}}
    loss = f"loss={{fn: distill, teachers: {json.dumps(teachers)}}}"
    with pytest.raises(ConfigError, match=r"(?s)loss\.teachers, runs/a: .*told its guidance"):
        check_plan(load_config("flux2/flow_grpo_fast", [loss]))
    klein = folders.load("flux2_klein distilled", tune="none")
    config = load_config("flux2_klein/flow_grpo_fast_distilled", [loss])
    part, made = Teachers(), cast(Any, SimpleNamespace(config=config))
    part.runs = teachers_of(config)
    with pytest.raises(ConfigError, match="is distilled, and its pipeline ignores guidance"):
        part.check_model(made, klein, 1)
