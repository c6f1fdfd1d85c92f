"""Training on real images beside the reward: which image, noise and level a row has, and what it
costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from scriptkit import module_of, script_module
from storedkit import (
    DATA,
    GREEN,
    PAIRS,
    RED,
    Rows,
    paint,
    real_trainer,
    write_pairs,
    write_real,
)
from torch import Tensor
from trainkit import ONE, TREE, flat, gradients, learnt

from flowrl.algorithms.forest import root_above, trained_nodes
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.prompts import load_prompts
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, LossInput, RealRows, Rollout
from flowrl.evaluation.image_files import find_images, read_image
from flowrl.evaluation.suites.shapes.checker import judge_detections
from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.models.toy import LinearFlow
from flowrl.training.learn import CallRows, LocalData
from flowrl.training.parts.real_images import RealImages
from flowrl.training.rehearsal import check_plan
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer

stand_in = module_of("bench", "performance").stand_in
FORWARD = ("plan={fn: ode, steps: 4}", "likelihood={fn: forward, draws: 2}", "loss={fn: awm}")


def batch_of(run: Trainer) -> tuple[Rollout, Batch]:
    """Sample an iteration -> it, and the batch of all that is trained in it."""
    ro = collect(run, run.rows()).rollout
    nodes = trained_nodes(ro, run.method.likelihood.trains)
    streams = NodeStreams(ro.tree.group, run.config.seed, "fresh", run.iteration)
    return ro, run.method.likelihood.batch(ro, torch.zeros(len(ro.tree.parent)), nodes, streams)


def images_of(run: Trainer) -> RealImages:
    """Return the part of a run that has the images."""
    images = run.parts.get(RealImages)
    assert images is not None
    return images


def real_rows(run: Trainer, ro: Rollout, batch: Batch) -> RealRows:
    """Ask for the real images of a batch, as a network call of training does."""
    local = LocalData(ro, cast(Any, None), cast(Any, None), tuple(run.rows()))
    data = LossInput(batch, cast(Any, None), batch.old_log_prob)
    found = images_of(run).provide(run, CallRows(local, batch, data.now, 0), data).data
    assert found is not None
    return found


def latent(colour: tuple[int, int, int]) -> Tensor:
    """The toy's latents of a plain image: 2 c - 1 everywhere."""
    return (torch.tensor(colour) / 255 * 2 - 1)[:, None, None].expand(3, 2, 2)


def clean(run: Trainer, ro: Rollout, batch: Batch) -> Tensor:
    """The image of each row: prompts at even places of the list have the red one."""
    rows = run.rows()
    of = [rows[g] for g in ro.tree.group[batch.node].tolist()]
    return torch.stack([latent((RED, GREEN)[row % 2]) for row in of])


def roots(ro: Rollout, nodes: Tensor) -> Tensor:
    """Go up from each node, one by one."""
    found = []
    for node in nodes.tolist():
        while int(ro.tree.parent[node]) >= 0:
            node = int(ro.tree.parent[node])
        found.append(node)
    return torch.tensor(found)


@pytest.mark.parametrize("change", [(), (TREE,), FORWARD])
def test_a_row_has_its_own_level_and_its_own_initial_noise(
    tmp_path: Path, change: tuple[str, ...]
) -> None:
    """As DDRL's code: x = (1 - s) x0 + s e, e being what the row's image was sampled from."""
    run = real_trainer(write_real(tmp_path), DATA, *change)
    ro, batch = batch_of(run)
    assert torch.equal(root_above(ro)[batch.node], roots(ro, batch.node))
    found = real_rows(run, ro, batch)
    x0, eps = clean(run, ro, batch), ro.x[roots(ro, batch.node)]
    s = batch.sigma[:, None, None, None]
    torch.testing.assert_close(found.target, eps - x0)
    assert torch.equal(found.sigma, batch.sigma)
    v = run.model.velocity((1 - s) * x0 + s * eps, batch.sigma, batch.cond)
    torch.testing.assert_close(found.v, v)


@pytest.mark.parametrize("change", [(), (TREE,), FORWARD])
def test_fresh_noise_is_that_of_a_state(tmp_path: Path, change: tuple[str, ...]) -> None:
    """Draws from one state share it, all others differ; another iteration has another."""
    config = write_real(tmp_path)
    run = real_trainer(config, DATA, *change, "kl.fresh=noise")
    ro, batch = batch_of(run)
    found = real_rows(run, ro, batch)
    again = real_rows(run, ro, batch)
    assert torch.equal(found.target, again.target) and torch.equal(found.sigma, batch.sigma)
    noise = found.target + clean(run, ro, batch)
    alike = (noise.flatten(1)[:, None] - noise.flatten(1)[None]).abs().amax(2) < 1e-5
    assert torch.equal(alike, batch.parent[:, None] == batch.parent[None])
    run.state.iteration = 1
    assert not torch.equal(real_rows(run, ro, batch).target, found.target)
    levels = real_trainer(config, DATA, *change, "kl.fresh=all")
    drawn = real_rows(levels, ro, batch).sigma
    assert bool(((drawn > 0) & (drawn < 1)).all()) and not torch.equal(drawn, batch.sigma)
    assert len(drawn.unique()) == len(batch.parent.unique())


def test_levels_that_are_drawn_have_the_published_distribution(tmp_path: Path) -> None:
    """Of EDM's level `exp(log 4 + 1.2 z)`: s = e / (1 + e), so logit s has mean 1.386 and std 1.2;
    of 240 the mean is off by .08 and the std by .055 (one standard error)."""
    run = real_trainer(
        write_real(tmp_path), DATA, "kl.fresh=all", "train.prompts=5", "train.group=16"
    )
    ro, batch = batch_of(run)
    logits = torch.logit(real_rows(run, ro, batch).sigma)
    assert len(logits) == 240
    assert float(logits.mean()) == pytest.approx(1.3863, abs=0.32)
    assert float(logits.std()) == pytest.approx(1.2, abs=0.22)


def error_of(run: Trainer) -> tuple[float, Tensor]:
    """Return the mean error on the images of an iteration, and its gradient."""
    found = real_rows(run, *batch_of(run))
    weight = found.sigma.square() + (1 - found.sigma).square()
    error = ((found.v - found.target).square().flatten(1).mean(1) * weight).mean()
    data = torch.autograd.grad(error, list(run.params.values()))
    return float(error.detach()), flat(data)


@pytest.mark.parametrize("size", [64, 3])
@pytest.mark.parametrize("fresh", ["none", "noise"])
def test_the_gradient_is_that_of_both_terms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, fresh: str
) -> None:
    """Of the policy's loss alone, plus beta times that of the mean error on the images, whatever
    the size of the network calls; advantages of 0 count in the second."""
    config = write_real(tmp_path)
    options = (*ONE, TREE, f"train.micro_batch={size}", "rewards.red.fn=toykit.picky")
    alone = gradients(real_trainer(config, *options), monkeypatch)[0][0]
    both = gradients(real_trainer(config, *options, DATA, f"kl.fresh={fresh}"), monkeypatch)[0][0]
    run = real_trainer(config, *options, DATA, f"kl.fresh={fresh}")
    _, data = error_of(run)
    expected = flat(alone[name] for name in run.params) + 0.1 * data
    there = flat(both[name] for name in run.params)
    torch.testing.assert_close(there, expected, rtol=1e-4, atol=1e-6)
    assert float(data.norm()) > 0.1


def test_data_alone_is_supervised_fine_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With loss `penalty_alone` the rewards move nothing, and the gradient is the images'."""
    config = write_real(tmp_path)
    options = (*ONE, DATA, "loss={fn: penalty_alone}")
    red, metrics = gradients(real_trainer(config, *options), monkeypatch)
    blue = real_trainer(config, *options, "rewards.red.fn=toykit.blueness")
    assert torch.equal(flat(red[0].values()), flat(gradients(blue, monkeypatch)[0][0].values()))
    run = real_trainer(config, *options)
    error, data = error_of(run)
    there = flat(red[0][name] for name in run.params)
    torch.testing.assert_close(there, 0.1 * data, rtol=1e-4, atol=1e-6)
    assert metrics["kl"] == pytest.approx(error, rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.1 * metrics["kl"], rel=1e-5)


def test_what_it_costs_is_counted_before_and_after(tmp_path: Path) -> None:
    """8 images in 4 steps are 32 calls; each of their 24 states goes forward and backward twice: 6
    calls. 2 prompts of 2 trees have 5 states in each: 20, shared by 32 draws."""
    config = write_real(tmp_path)
    for change, states in (((), 24), ((TREE, "train.group=8"), 20)):
        run = real_trainer(config, DATA, *ONE, *change)
        forecast = check_plan(run.config)
        metrics = run.step()
        assert forecast.states == states and (change or forecast.work.nfe == 32)
        assert forecast.calls == metrics["nfe"] == forecast.work.nfe + states * 6
        assert metrics["backwards"] == 2 * states


def test_an_image_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts may share images; what no iteration used for longest goes first."""
    made: list[int] = []
    plain = LinearFlow.latents

    def counted(self: LinearFlow, images: Tensor) -> Tensor:
        made.append(len(images))
        return plain(self, images)

    monkeypatch.setattr(LinearFlow, "latents", counted)
    run = real_trainer(write_real(tmp_path), DATA, "train.prompts=6", "train.group=2")
    for _ in range(2):
        run.step()
    assert sum(made) == 2
    # an image of 3 x 2 x 2 float32 numbers has 48 bytes: room for one
    monkeypatch.setattr("flowrl.training.parts.real_images.KEPT", 60)
    images = images_of(run)
    rows = list(range(6))
    images.prepare(run, [1], rows)
    images.prepare(run, [1], rows)
    assert sum(made) == 2
    images.prepare(run, [0], rows)
    images.prepare(run, [0, 1], rows)
    assert sum(made) == 4


def test_of_several_images_chance_takes_one(tmp_path: Path) -> None:
    """Another one in other iterations, the same for all rows of a prompt."""

    def both(rows: Rows) -> None:
        for row in rows:
            row["image"] = ["images/red.png", "images/green.png"]

    run = real_trainer(write_real(tmp_path, both), DATA)
    taken = []
    for iteration in range(20):
        run.state.iteration = iteration
        found = images_of(run).latents(run, [0, 0, 1], run.rows())
        assert torch.equal(found[0], found[1])
        taken += [bool(found[place, 0, 0, 0] > found[place, 1, 0, 0]) for place in (0, 2)]
    # of 40 fair draws all but 1 in 10,000 cases have 8 to 32
    assert 8 <= sum(taken) <= 32


@pytest.mark.learning
def test_the_policy_draws_what_the_images_show(tmp_path: Path) -> None:
    """Every image is red: mean red minus mean green of samples, before and after 60 iterations of
    supervised fine-tuning, on the scale on which the images have .63; a control without a signal
    moves by at most .06 (test_learning_methods.py)."""

    def red(rows: Rows) -> None:
        for row in rows:
            row["image"] = "images/red.png"

    change = (DATA, "loss={fn: penalty_alone}", "rewards.red.fn=toykit.noise", "train.group=8")
    run = real_trainer(write_real(tmp_path, red), *change, "train.updates=1", "optimizer.lr=0.02")
    redness = []
    for _ in range(2):
        images = collect(run, run.rows()).batch.images.float() / 255
        redness.append(float((images[:, 0] - images[:, 1]).mean()))
        for _ in range(60):
            run.step()
    print(f"redness {redness}")
    assert redness[1] - redness[0] > 0.2


def test_images_are_fitted_to_the_size_of_the_run(tmp_path: Path) -> None:
    """A larger one of another shape is scaled and cut."""
    config = write_real(tmp_path)
    paint(tmp_path / "images/red.png", RED, 40)
    run = real_trainer(config, DATA)
    found = images_of(run).latents(run, [0], [0])[0]
    torch.testing.assert_close(found, latent(RED))


def test_learning_without_the_trainer_s_preparation(tmp_path: Path) -> None:
    """The doctor differentiates rows of its own: images are read where they are wanted."""
    run = real_trainer(write_real(tmp_path), DATA, *ONE)
    ro, batch = batch_of(run)
    images_of(run).begin(run)  # nothing is kept
    assert len(real_rows(run, ro, batch).v) == len(batch.node)
    assert learnt(run, ro, torch.zeros(len(ro.tree.parent)))["kl"] > 0


def test_the_script_s_list_is_what_a_run_reads(tmp_path: Path) -> None:
    """Two images of each of 242 prompts, all of them right by the strict checker."""
    module = script_module("assets/shapes_images")
    records = module.draw(load_prompts("assets/shapes/train.jsonl"), tmp_path, 2, 0)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in records))
    prompts = load_prompts(str(tmp_path / "train.jsonl"))
    assert len(prompts) == 242
    RealImages().begin(cast(Any, SimpleNamespace(train_set=prompts, size=(64, 64))))
    some = prompts.records[::20]
    for number in (0, 1):
        files = find_images([tmp_path / record["image"][number] for record in some])
        images = torch.stack([read_image(file)[0] for file in files]).float() / 255
        looked = detect(images, find_flaws=True)
        assert bool(judge_detections(looked, some).strict.all())


# ---------------------------------------------------------- what is refused before a weight is read


def nameless(rows: Rows) -> None:
    del rows[1]["image"]


def empty(rows: Rows) -> None:
    rows[2]["image"] = []


def missing(rows: Rows) -> None:
    rows[3]["image"] = "images/gone.png"


def no_image(rows: Rows) -> None:
    rows[4]["image"] = "train.jsonl"


def a_folder(rows: Rows) -> None:
    rows[0]["image"] = "images"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (nameless, r"line 2: expected the file of a real image .* as 'image', .* got None"),
        (empty, r"line 3: expected the file of a real image .* got \[\]"),
        (missing, r"line 4, image: .*gone\.png: no such file"),
        (no_image, r"line 5, image: .*train\.jsonl: expected a PNG, JPEG or WebP"),
        (a_folder, r"line 1, image: .*images: no such file"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, change: Callable[[Rows], None], words: str) -> None:
    config = write_real(tmp_path, change)
    with pytest.raises(DataError, match=words):
        real_trainer(config, DATA, "model={fn: toykit.unloadable}")
    # nobody looks at images that the config does not train on
    assert real_trainer(config).parts.get(RealImages) is None
    assert real_trainer(config, DATA, "kl.beta=0").parts.get(RealImages) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ("likelihood={fn: prior}", "plan={fn: ode, steps: 4}"),
            "kl: real images .* likelihood prior trains roots; take reverse or forward",
        ),
        (
            ("likelihood={fn: draft}", "plan={fn: ode, steps: 4}", "loss={fn: reward_ascent}"),
            "kl: real images .* likelihood draft trains roots",
        ),
        (
            ("likelihood={fn: draft_lv}", "plan={fn: ode, steps: 4}", "loss={fn: reward_ascent}"),
            "data_velocity: the likelihood has no velocity",
        ),
        (
            ("monitors.adaptive_kl={target: 0.1}",),
            "monitors.adaptive_kl: follows a distance to the base model",
        ),
        (
            ("old={fn: reset, every: 2, above: 0.1}",),
            "old.above: follows a distance to the base model",
        ),
        (("kl.weight=two",), "weight"),
        (
            ("loss={fn: penalty_alone}", "kl=null"),
            "penalty_alone: learns from the section kl alone",
        ),
        (("loss={fn: penalty_alone}", "kl.beta=0"), "learns from the section kl alone"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, changes: tuple[str, ...], words: str) -> None:
    config = write_real(tmp_path)
    with pytest.raises(ConfigError, match=words):
        real_trainer(config, DATA, "model={fn: toykit.unloadable}", *changes)


ALIGNED = ("likelihood={fn: direct_align}", "loss={fn: reward_ascent}", "kl=null")


@pytest.mark.parametrize(
    ("options", "key", "initial", "fresh", "moved"),
    [
        ((DATA,), "kl.fresh", "none", "noise", "kl"),
        (ALIGNED, "likelihood.noise", "initial", "fresh", "grad_norm"),
    ],
)
def test_stored_pairs_have_no_initial_noise(
    tmp_path: Path, options: tuple[str, ...], key: str, initial: str, fresh: str, moved: str
) -> None:
    """Neither for images nor for Direct-Align, which take fresh noise."""

    def named(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["image"] = row["image_0"]

    config = write_pairs(tmp_path, named)
    with pytest.raises(ConfigError, match=f"{key}={initial}: plan pairs samples nothing"):
        real_trainer(config, *PAIRS, *options)
    assert real_trainer(config, *PAIRS, *options, f"{key}={fresh}").step()[moved] > 0


class Blind:
    """A field without a way back from images."""

    def __init__(self) -> None:
        self.field = LinearFlow()

    def __getattr__(self, name: str) -> Any:
        if name == "latents":
            raise AttributeError(name)
        return getattr(self.field, name)


class Steps(LinearFlow):
    """A field that knows the levels of its sampler alone."""

    discrete_levels = True


def test_models_that_cannot(tmp_path: Path) -> None:
    config = write_real(tmp_path)
    with pytest.raises(ConfigError, match="data_velocity.* needs a model that encodes images"):
        real_trainer(config, DATA, model=Blind())
    with pytest.raises(ConfigError, match="kl.fresh=all: draws noise levels"):
        real_trainer(config, DATA, "kl.fresh=all", model=Steps())
    assert real_trainer(config, DATA, model=Steps()).step()["kl"] > 0


def test_bench_has_no_images_of_made_up_prompts(tmp_path: Path) -> None:
    config = load_config(write_real(tmp_path), [DATA], ("toykit",))
    with pytest.raises(ConfigError, match="performance: kl trains on real images"):
        stand_in(config)
