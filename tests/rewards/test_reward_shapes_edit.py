"""Edits of shapes: what is right, what a copy gets, and what else may not change."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from adapterkit import TOKENS
from modelkit import edit
from tiny import tiny_flux
from torch.nn.functional import interpolate
from toykit import write_toy

from flowrl.config.load import load_config
from flowrl.core.errors import DataError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import RewardBatch, Source
from flowrl.evaluation.sources import check_sources, sources_of
from flowrl.evaluation.suites.shapes.edits import KINDS, Edits, draw_edits
from flowrl.evaluation.suites.shapes.scene import SIZE, Scenes, render
from flowrl.models.flux_kontext import flux_kontext
from flowrl.runs.evaluate import sample_grid_prompts
from flowrl.training.trainer import Trainer
from rewards.shapes_edit import shapes_edit

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def edits() -> Edits:
    return draw_edits(np.random.default_rng(0), np.arange(120) % len(KINDS))


def scaled(images: torch.Tensor, size: int) -> torch.Tensor:
    """Scale images as sources are scaled to the size of a run."""
    levels = interpolate(images * 255, (size, size), mode="bilinear", antialias=True)
    return levels.round().clamp(0, 255) / 255


def judged(
    edits: Edits, images: Scenes | torch.Tensor, mode: str, size: int = SIZE
) -> torch.Tensor:
    pixels = scaled(images if isinstance(images, torch.Tensor) else render(images), size)
    sources: list[Source] = [(image,) for image in scaled(render(edits.before), size)]
    count = len(sources)
    prompts = [record["prompt"] for record in edits.records]
    batch = RewardBatch(
        pixels, prompts, torch.arange(count), edits.records, torch.zeros(count), sources
    )
    return shapes_edit(mode=mode, resize=size != SIZE)(batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [64, 384])
def test_rendered_edits_are_right_and_copies_get_nothing(edits: Edits, size: int) -> None:
    """The truth is the layout: `after` is drawn from the scene that the edit was made of."""
    assert judged(edits, edits.after, "strict", size).mean() == 1
    assert judged(edits, edits.after, "graded", size).min() == 1
    assert judged(edits, edits.before, "strict", size).max() == 0
    assert judged(edits, edits.before, "graded", size).max() == 0


def test_what_should_not_change_is_punished(edits: Edits) -> None:
    """The first object is never the one that is edited: of another colour, moved by 6 pixels, or
    lost, it makes each edit wrong, and cheaper than the right one. Other sizes are scaled before
    anything is read, which the test above sees."""
    after = edits.after
    color, center, radius = after.color.copy(), after.center.copy(), after.radius.copy()
    color[:, 0] = (color[:, 0] + 1) % 6
    center[:, 0] += np.where(center[:, 0] > 32, -6, 6)
    radius[:, 0] = 0.1
    grey = after.background - 0.1
    for wrong in (
        after._replace(color=color),
        after._replace(center=center),
        after._replace(radius=radius),
        after._replace(background=grey),
    ):
        assert judged(edits, wrong, "strict", SIZE).max() == 0
        assert judged(edits, wrong, "graded", SIZE).max() < 0.96


def test_kept_and_done_are_told_apart(edits: Edits) -> None:
    """Rendered edits keep and do all; a copy keeps all and does nothing, but where something is to
    be removed, which is then one object too many: exp(-1/2). `both` is the root of the product."""
    removed = torch.tensor([record["edit"]["kind"] == "remove" for record in edits.records])
    one = torch.ones(len(removed))
    for images, kept, done in (
        (edits.after, one, one),
        (edits.before, torch.where(removed, math.exp(-0.5), 1.0), 0 * one),
    ):
        torch.testing.assert_close(judged(edits, images, "kept"), kept)
        torch.testing.assert_close(judged(edits, images, "done"), done)
        torch.testing.assert_close(judged(edits, images, "both"), (kept * done).sqrt())


def test_small_images_are_read_at_the_checkers_size(edits: Edits) -> None:
    """At three quarters of the size what was right stays right; without `resize` the size is an
    error. One iteration of the config, told to, trains at 48 and judges at 64 pixels."""
    images, before = (
        interpolate(render(scenes), (48, 48), mode="bilinear", antialias=True)
        for scenes in (edits.after, edits.before)
    )
    count, prompts = len(images), [record["prompt"] for record in edits.records]
    sources: list[Source] = [(image,) for image in before]
    group, zero = torch.arange(count), torch.zeros(count)
    batch = RewardBatch(images, prompts, group, edits.records, zero, sources)
    assert shapes_edit(mode="strict", resize=True)(batch).mean() > 0.97
    with pytest.raises(DataError, match=r"\[N, 3, 64, 64\]; got"):
        shapes_edit()(batch)
    small = ["train.prompts=2", "train.group=4", "train.warmup=0", "eval.images=1"]
    small += ["image.height=48", "image.width=48"]
    trainer = Trainer(load_config("shapes/paco_rl", [*small, "model.dtype=float32"]))
    before_step = {name: p.detach().clone() for name, p in trainer.params.items()}
    metrics = trainer.step()
    assert metrics["on_policy_gap"] < 1e-5 and metrics["grad_norm"] > 0
    assert any(not torch.equal(p, before_step[name]) for name, p in trainer.params.items())
    assert sample_grid_prompts(trainer)[1].shape[-2:] == (64, 64)


def test_the_lists_are_whole_and_a_tiny_kontext_trains_on_them(tmp_path: Path) -> None:
    """No scene is in two lists; one iteration on the tiny random model updates its weights."""
    seen: set[bytes] = set()
    for name, count in (("train", 384), ("validation", 32), ("test", 64)):
        prompts = load_prompts(ROOT / "assets/shapes-edits" / f"{name}.jsonl")
        check_sources(prompts, (64, 64))
        found = sources_of(prompts, range(len(prompts)), None)
        new = {source[0].numpy().tobytes() for source in found}
        assert len(prompts) == len(new) == count and not new & seen
        seen |= new
    folder = tiny_flux(tmp_path / "model", seed=7)
    edit("model_index.json", _class_name="FluxKontextPipeline")(folder)
    model = flux_kontext(str(folder), device="cpu", max_sequence_length=TOKENS, lora={"rank": 2})
    lists = {n: str(ROOT / f"assets/shapes-edits/{n}.jsonl") for n in ("train", "validation")}
    changes = (
        f"prompts={{train: {lists['train']}, test: {lists['validation']}}}",
        "image={height: 64, width: 64}",
        "rewards={edit: {fn: shapes_edit}, jpeg: {fn: jpeg}}",
        "train={iterations: 1, prompts: 2, group: 2, updates: 1, micro_batch: 4}",
        "eval.score=edit",
    )
    config = load_config(str(write_toy(tmp_path / "toy")), changes, ("toykit",))
    trainer = Trainer(config, model=model)
    before = {name: p.detach().clone() for name, p in trainer.params.items()}
    metrics = trainer.step()
    assert 0 <= metrics["reward/edit"] <= 1
    assert any(not torch.equal(p, before[name]) for name, p in trainer.params.items())


def test_what_it_refuses(edits: Edits) -> None:
    check = shapes_edit().check_record
    with pytest.raises(DataError, match="line 3: edit.to: expected red.*got 'pink'"):
        check({"edit": {**edits.records[0]["edit"], "to": "pink"}}, "line 3")
    with pytest.raises(DataError, match="line 3: expected an object `edit` with a `kind`"):
        check({"prompt": "x"}, "line 3")
    with pytest.raises(DataError, match="a source with 1 of the object, which is read 0 times"):
        blank = Scenes(*(field[:4] for field in edits.before))
        none = blank._replace(number=np.zeros(4, np.int64))
        some = Edits(none, none, edits.records[:4])
        judged(some, none, "strict")


def test_a_right_edit_with_a_flaw_is_wrong(edits: Edits) -> None:
    """Four dark specks in the corners, or paint on each object, on edits that are right without:
    `tests/evaluation/test_checker.py` has what else is looked for."""
    right = render(edits.after)
    specks, painted = right.clone(), right.clone()
    for y, x in ((1, 1), (1, 62), (62, 1), (62, 62)):
        specks[:, :, y, x] = 0.0
    # every third column of what is not background
    contrast = (right - right[:, :, :1, :1]).abs().amax(1, keepdim=True)
    inside = (contrast > 0.45) & (torch.arange(SIZE) % 3 == 0)
    painted = torch.where(inside, (painted + 0.22).clamp(0, 1), painted)
    for wrong in (specks, painted):
        assert judged(edits, wrong, "strict").max() == 0
        assert 0 < judged(edits, wrong, "graded").max() < 0.96
