"""The rewards of shapes, of their edits and of files: the checker's verdicts, the distance to the
nearest right image, and Pillow's own files on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapterkit import TOKENS
from clipkit import pil
from modelkit import edit
from PIL import Image
from tiny import tiny_flux
from torch import Tensor
from torch.nn.functional import interpolate
from toykit import write_toy

from flowrl.config.load import load_config
from flowrl.core.errors import DataError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import RewardBatch, Source
from flowrl.evaluation.reward_call import ask
from flowrl.evaluation.sources import check_sources, sources_of
from flowrl.evaluation.suites.shapes.checker import Verdict, check
from flowrl.evaluation.suites.shapes.edits import KINDS, Edits, draw_edits
from flowrl.evaluation.suites.shapes.lists import HARD_TASKS, hard_records
from flowrl.evaluation.suites.shapes.nearest_right import nearest_right
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import SIZE, Scenes, render
from flowrl.models.flux_kontext import flux_kontext
from flowrl.runs.evaluate import sample_grid_prompts
from flowrl.training.trainer import Trainer
from rewards.jpeg import jpeg
from rewards.shapes import shapes
from rewards.shapes_edit import shapes_edit
from rewards.soft_shapes import soft_shapes

RECORDS = [record for records in all_records().values() for record in records[::11]]
IMAGES = render(scenes_for(RECORDS, np.random.default_rng(0)))
COUNT = len(IMAGES)
FOUR_RED = [{"class": "circle", "count": 4, "color": "red"}]  # no record asks for them


def batch_of(images: Tensor, meta: list[dict[str, Any]] = RECORDS) -> RewardBatch:
    prompts = [record.get("prompt", "") for record in meta]
    return RewardBatch(images, prompts, torch.arange(len(images)), meta, torch.zeros(len(images)))


def noise() -> Tensor:
    return torch.rand(IMAGES.shape, generator=torch.Generator().manual_seed(1))


def test_true_scenes_earn_one_and_others_less() -> None:
    graded, strict = shapes()(batch_of(IMAGES)), shapes(mode="strict")(batch_of(IMAGES))
    assert graded.mean() > 0.98 and torch.equal((graded == 1).float(), strict)
    assert shapes()(batch_of(IMAGES.bfloat16())).mean() > 0.98
    batch = batch_of(IMAGES, [{"include": FOUR_RED}] * COUNT)
    assert shapes()(batch).max() < 1 and shapes(mode="strict")(batch).sum() == 0
    for hollow in ({}, {"prompt": "a circle"}):
        with pytest.raises(DataError, match="record"):
            shapes()(batch_of(IMAGES, [hollow] * COUNT))


def test_a_perpendicular_relation_pays_nothing_by_itself() -> None:
    """Scenes of "right of" and "left of" are asked to be "above" and "below". That part of the
    reward is 0 in the default mode, and 2/3 in the mode `graded`."""
    turned, seen, asked = {"right of": "above", "left of": "below"}, [], []
    for image, record in zip(IMAGES, RECORDS, strict=True):
        first, *rest = record["include"]
        relation, place = rest[-1].get("position", ("", 0)) if rest else ("", 0)
        if relation in turned:
            second = {**rest[-1], "position": [turned[relation], place]}
            seen.append(image)
            asked.append({**record, "include": [first, second]})
    batch = batch_of(torch.stack(seen), asked)
    now, then = shapes()(batch), shapes(mode="graded")(batch)
    assert (now < then).all() and torch.equal(now, shapes(mode="graded_angle")(batch))


def test_both_modes_look_at_the_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(images: Tensor, meta: list[dict[str, Any]]) -> Verdict:
        calls.append(len(images))
        return check(images, meta)

    monkeypatch.setattr("rewards.shapes.check", counting)
    batch = batch_of(IMAGES.clone())
    # each reward gets copies of its own, as in training
    graded = ask("graded", shapes(), batch, "here")
    strict = ask("strict", shapes(mode="strict"), batch, "here")
    assert len(calls) == 1 and torch.equal((graded == 1).float(), strict)
    # judged anew: other images in the same tensor, other records, the first ones again
    batch.images.fill_(0.5)
    assert shapes(mode="strict")(batch).sum() == 0 and len(calls) == 2
    shapes()(batch._replace(meta=RECORDS[::-1]))
    assert len(calls) == 3
    assert torch.equal(shapes()(batch_of(IMAGES)), graded) and len(calls) == 4


def test_images_and_records_that_were_changed_in_place_are_judged_anew() -> None:
    """The last batch is remembered by what it held, not by where it lies."""
    batch = batch_of(IMAGES.clone(), [dict(record) for record in RECORDS])
    before = shapes(mode="strict")(batch)
    assert before.mean() > 0.9
    batch.images.fill_(0.5)  # nothing is left on any of them
    assert shapes(mode="strict")(batch).sum() == 0
    batch.images.copy_(IMAGES)
    assert torch.equal(shapes(mode="strict")(batch), before)
    batch.meta[0]["include"] = FOUR_RED
    assert before[0] == 1 and shapes(mode="strict")(batch)[0] == 0


# -------------------------------------------------------------------------- the nearest right image


@pytest.mark.parametrize(
    ("images", "least"),
    [(IMAGES, 1.0), (IMAGES.roll(1, 0), 0.98), (noise(), 1.0), (torch.ones_like(IMAGES), 1.0)],
    ids=["right", "of other prompts", "noise", "blank"],
)
def test_the_nearest_right_image_is_right(images: Tensor, least: float) -> None:
    """By the checker's strict verdict, which knows nothing of this reward. Of scenes of other
    prompts one in fifty may fail: crowded ones where two shapes have to move."""
    strict = check(nearest_right(images, RECORDS), RECORDS).strict
    assert float(strict.float().mean()) >= least


@pytest.mark.parametrize("task", HARD_TASKS)
@pytest.mark.parametrize("seed", [2, 3])
def test_harder_prompts_have_a_nearest_right_image_too(task: str, seed: int) -> None:
    """Near scenes of the benchmark, by the strict verdict. Moved one by one, half of the targets of
    three objects in a relation to a fourth were wrong, and a fifth of those of five and six."""
    records = hard_records()[task]
    if task == "group_position":
        records = [record for record in records if record["include"][1]["count"] == 3]
    draw = np.random.default_rng(seed)
    chosen = [records[i] for i in draw.permutation(len(records))[:32]]
    near = IMAGES[torch.from_numpy(draw.permutation(COUNT)[: len(chosen)])]
    found = nearest_right(near, chosen)
    assert float(check(found, chosen).strict.float().mean()) >= 0.98
    assert torch.equal(nearest_right(near[-4:], chosen[-4:]), found[-4:])


def test_a_record_that_no_image_can_be_right_for() -> None:
    """Four in a row do not fit: two shapes are 20 pixels apart, 15 along an axis. It ends."""
    row = [{"class": "circle", "count": 1}]
    for place, shape in enumerate(["square", "triangle", "cross"]):
        row.append({"class": shape, "count": 1, "position": ["right of", place]})
    row[1]["count"], row[2]["count"] = 2, 2
    record = {"prompt": "a row", "include": row}
    assert nearest_right(torch.ones(1, 3, 64, 64), [record]).isfinite().all()


def test_right_images_are_near_themselves_and_others_are_not() -> None:
    """Rendered scenes against those of the next record; of a pair the right one always scores
    more."""
    right, wrong = soft_shapes()(batch_of(IMAGES)), soft_shapes()(batch_of(IMAGES.roll(1, 0)))
    strict = check(IMAGES.roll(1, 0), RECORDS).strict
    assert right.min() > 0.95 and bool((right[~strict] > wrong[~strict]).all())
    assert wrong[~strict].mean() < right.mean() - 0.2


def test_the_gradient_is_that_of_the_distance() -> None:
    """``-2 (image - right) / (n width)``, n = 3 * 64 * 64, with the 8-bit image in it; the Gaussian
    form ``exp(-d / width)`` has that of the linear form times itself."""
    images = (0.8 * IMAGES + 0.2 * noise()).requires_grad_()
    (found,) = torch.autograd.grad(soft_shapes(width=0.1)(batch_of(images)).sum(), images)
    levels = (images.detach() * 255).round() / 255
    expected = -2 * (levels - nearest_right(levels, RECORDS)) / (3 * 64 * 64 * 0.1)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-4)
    linear, gaussian = soft_shapes(width=0.05), soft_shapes(form="gaussian", width=0.05)
    one, other = linear(batch_of(images)), gaussian(batch_of(images))
    torch.testing.assert_close(other, (one - 1).exp())
    flat, steep = (torch.autograd.grad(found.sum(), images)[0] for found in (one, other))
    torch.testing.assert_close(steep, flat * other.detach().view(-1, 1, 1, 1))


def test_climbing_makes_a_wrong_image_right() -> None:
    """Gradient ascent on the pixels of scenes of other prompts, judged by the strict checker."""
    images = IMAGES.roll(1, 0).clone().requires_grad_()
    before = check(images.detach(), RECORDS).strict
    for _ in range(12):
        (gradient,) = torch.autograd.grad(soft_shapes()(batch_of(images)).sum(), images)
        with torch.no_grad():
            # a fifth of the way to `right`: the gradient is 2 (right - image) / (n width)
            images += 0.2 * gradient * (3 * 64 * 64 * 0.05) / 2
    after = check(images.detach().clamp(0, 1), RECORDS).strict
    assert before.float().mean() < 0.2 and after.float().mean() > 0.9


# -------------------------------------------------------------------------------------------- edits


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def edits() -> Edits:
    return draw_edits(np.random.default_rng(0), np.arange(120) % len(KINDS))


def scaled(images: torch.Tensor, size: int) -> torch.Tensor:
    """Scale images as sources are scaled to the size of a run."""
    levels = interpolate(images * 255, (size, size), mode="bilinear", antialias=True)
    return levels.round().clamp(0, 255) / 255


def asked(edits: Edits, pixels: Tensor, before: Tensor) -> RewardBatch:
    sources: list[Source] = [(image,) for image in before]
    return batch_of(pixels, edits.records)._replace(source=sources)


def judged(edits: Edits, images: Scenes | Tensor, mode: str, size: int = SIZE) -> Tensor:
    pixels = scaled(images if isinstance(images, Tensor) else render(images), size)
    batch = asked(edits, pixels, scaled(render(edits.before), size))
    return shapes_edit(mode=mode, resize=size != SIZE)(batch)  # type: ignore[arg-type]


def first(scenes: Scenes, count: int) -> Scenes:
    return Scenes(*(field[:count] for field in scenes))


@pytest.mark.parametrize(("size", "count"), [(64, 120), (384, 24)])
def test_rendered_edits_are_right_and_copies_get_nothing(
    edits: Edits, size: int, count: int
) -> None:
    """The truth is the layout: `after` is drawn from the scene that the edit was made of."""
    some = Edits(first(edits.before, count), first(edits.after, count), edits.records[:count])
    for images, worth in ((some.after, 1), (some.before, 0)):
        for mode in ("strict", "graded"):
            assert judged(some, images, mode, size).unique().tolist() == [worth]


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
    batch = asked(edits, images, before)
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
        none = first(edits.before, 4)._replace(number=np.zeros(4, np.int64))
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


# ----------------------------------------------------------------------------------- sizes of files


def _kilobytes(images: Tensor, folder: Path, **options: Any) -> Tensor:
    """Save by way of PNG, as a user would check it: sizes of files in units of 1000 bytes."""
    sizes = []
    for image in images:
        pil(image).save(folder / "x.png")
        Image.open(folder / "x.png").convert("RGB").save(folder / "x.jpg", **options)
        sizes.append((folder / "x.jpg").stat().st_size / 1000)
    return torch.tensor(sizes)


def test_sizes_are_those_of_pillows_files(tmp_path: Path) -> None:
    """The default is DDPO's compressibility: quality 95 and 4:2:0 as in all public code; 4:4:4
    makes a larger file of coloured noise. Values beyond [0, 1] are cut."""
    rough = torch.rand(3, 48, 64, generator=torch.Generator().manual_seed(0))
    flat, ramp = torch.full((3, 48, 64), 0.3), torch.linspace(0, 1, 64).expand(3, 48, 64)
    images = torch.stack([flat, ramp, rough])
    batch = batch_of(images, [{}] * 3)
    for quality in (95, 60):
        sizes = _kilobytes(images, tmp_path, quality=quality)
        assert sizes[0] < sizes[1] < sizes[2]
        assert torch.equal(jpeg(quality=quality)(batch), -sizes)
        assert torch.equal(jpeg(quality=quality, goal="incompressibility")(batch), sizes)
        scaled = jpeg(quality=quality, scale=500.0)(batch)
        torch.testing.assert_close(scaled, -sizes / 500, rtol=1e-6, atol=0)
    halved = _kilobytes(images, tmp_path, quality=95, subsampling="4:2:0")
    full = _kilobytes(images, tmp_path, quality=95, subsampling="4:4:4")
    assert halved[2] < full[2] and torch.equal(jpeg()(batch), -halved)
    wide = images * 3 - 1
    cut = jpeg()(batch._replace(images=wide.clamp(0, 1)))
    assert torch.equal(jpeg()(batch._replace(images=wide)), cut)
