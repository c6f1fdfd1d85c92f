"""The shapes checker against known layouts, GenEval's rules by hand, and what it refuses."""

from __future__ import annotations

import io
from typing import Any

import checkerkit
import numpy as np
import pytest
import torch
from paintkit import EVERY, RECORDS, grades, mask, paint, rounded
from PIL import Image
from scipy import ndimage
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes.checker import check, offsets, rules
from flowrl.evaluation.suites.shapes.detect import detect
from flowrl.evaluation.suites.shapes.prompts import TASKS, scenes_for
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    MAX_OBJECTS,
    SIZE,
    Scenes,
    render,
)


@pytest.mark.parametrize("task", TASKS)
def test_agrees_with_layouts(task: str) -> None:
    """Truth: GenEval's rules on the layout, written a second time in the kit."""
    found = checkerkit.measure(task, scenes=150, seed=7)
    assert min(found[f"{kind}_agreement"] for kind in ("own", "random", "near")) >= 0.99
    assert found["near_false_accepts"] == found["random_false_accepts"] == 0


def rough(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur, add noise and compress, as hard as a VAE of 31 dB."""
    blurred = ndimage.gaussian_filter(images.numpy(), (0, 0, 0.6, 0.6))
    noisy = np.clip(blurred + rng.normal(0, 0.02, blurred.shape), 0, 1)
    out = []
    for image in np.round(noisy * 255).astype(np.uint8):
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=60, subsampling=0)
        out.append(np.asarray(Image.open(file)).transpose(2, 0, 1) / np.float32(255))
    return torch.from_numpy(np.stack(out))


def test_survives_blur_noise_and_compression() -> None:
    rng = np.random.default_rng(3)
    records = []
    for of_task in RECORDS.values():
        records += [of_task[int(rng.integers(len(of_task)))] for _ in range(40)]
    images = render(scenes_for(records, rng))
    spoilt = rough(images, rng)
    assert float(((spoilt - images) ** 2).mean()) > 10**-3.4  # worse than 34 dB
    # 97.5 % here, and 99.6 % if 40 pixels of specks were let pass: compression leaves some
    assert check(spoilt, records).strict.float().mean() >= 0.97
    plain = [i for i, record in enumerate(records) if "position" not in record["include"][-1]]
    wrong = [checkerkit.near_miss(records[i], rng) for i in plain]
    assert not check(spoilt[plain], wrong).strict.any()


def test_reads_objects_where_they_are() -> None:
    """By construction; the triangle's box is 2r wide and 1.85r high from y - r."""
    image = paint((mask("circle", 15, 17, 9), "red"), (mask("triangle", 44, 40, 11), "blue"))
    found = detect(image)
    assert found.number[0] == 2 and (found.shape[0, 2:] == -1).all()
    slot = {CLASSES[s]: i for i, s in enumerate(found.shape[0, :2])}
    circle, triangle = slot["circle"], slot["triangle"]
    assert list(COLORS)[found.color[0, circle]] == "red"
    assert list(COLORS)[found.color[0, triangle]] == "blue"
    near = np.testing.assert_allclose
    near(found.box[0, circle], [6, 8, 24, 26], atol=0.25)
    near(found.box[0, triangle], [33, 29, 55, 40 + 0.85 * 11], atol=0.35)
    near(found.center[0, circle], [15, 17], atol=0.2)
    near(found.area[0, circle], np.pi * 81, rtol=0.08)
    near(found.background[0], 0.95, atol=1 / 255)


def test_mixed_scenes_with_one_more_object_fail() -> None:
    rng = np.random.default_rng(5)
    records, more = [], []
    for record in [r for task in TASKS for r in RECORDS[task]]:
        if sum(entry["count"] for entry in record["include"]) < MAX_OBJECTS:
            records.append(record)
    for record in records[::9]:
        without = [dict(entry) for entry in record["include"]]
        for entry in without:
            entry.pop("position", None)
        extra = {"class": str(rng.choice(CLASSES)), "count": 1}
        more.append({**record, "include": [*without, extra]})
    assert not check(render(scenes_for(more, rng)), records[::9]).strict.any()


# ----------------------------------------------------------------------------------- the verdict


def test_graded_is_one_exactly_where_all_checks_pass() -> None:
    rng = np.random.default_rng(11)
    records = [EVERY[i] for i in rng.integers(len(EVERY), size=120)]
    others = [EVERY[i] for i in rng.integers(len(EVERY), size=120)]
    images = render(scenes_for(records, rng))
    noise = 0.3 * torch.rand(images.shape, generator=torch.Generator().manual_seed(0)) - 0.15
    for pixels, judged in ((images, records), (images, others), (images + noise, records)):
        v = check(pixels.clamp(0, 1), judged)
        assert torch.equal(v.graded == 1, v.strict)
        assert bool(((v.graded >= 0) & (v.graded <= 1)).all())
        checks = torch.stack([v.count_ok, v.color_ok, v.position_ok, v.exclude_ok, v.clean])
        assert torch.equal(checks.all(0), v.strict)


def test_verdicts_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(2)
    whole, hole = mask("circle", 32, 32, 12), mask("circle", 32, 32, 6)
    pierced = paint((whole, "red"), (hole, np.full(3, 0.95, np.float32)))
    static = torch.from_numpy(rng.random((1, 3, SIZE, SIZE), np.float32))
    images = torch.cat([render(scenes_for(EVERY[::60], rng)), static, pierced])
    records = [*EVERY[::60], EVERY[0], EVERY[1]]
    together = check(images, records)
    alone = [check(images[i : i + 1], [record]) for i, record in enumerate(records)]
    assert torch.equal(together.strict, torch.cat([v.strict for v in alone]))
    assert torch.equal(together.graded, torch.cat([v.graded for v in alone]))
    assert check(images[:0], []).strict.shape == (0,)


def test_details_name_the_check_that_failed() -> None:
    wanted = {"class": "circle", "count": 1, "color": "red"}
    record = {"include": [wanted], "exclude": [{"class": "circle", "count": 2}]}
    half = mask("square", 32, 32, 12) * (np.arange(SIZE) < 32)
    blue, broken = paint((mask("circle", 32, 32, 11), "blue")), paint((half, "red"))
    verdict = check(torch.cat([blue, paint(), broken]), [record] * 3)
    assert verdict.count_ok.tolist() == [True, False, False]
    assert verdict.color_ok.tolist() == [False, False, False]
    assert verdict.clean.tolist() == [True, True, False]


def test_graded_rises_with_the_count() -> None:
    """0.95 (1 - |3 - n| / 3), exactly 1 at three, and times exp(-1/2) for a forbidden cross."""
    spots = [(14, 14), (48, 14), (14, 48), (48, 48)]
    crosses = [(mask("cross", x, y, 9), "black") for x, y in spots]
    exclude = [{"class": c, "count": 4 if c == "cross" else 1} for c in CLASSES]
    record = {"include": [{"class": "cross", "count": 3}], "exclude": exclude}
    scores = grades([paint(*crosses[:n]) for n in range(5)], record)
    expected = [0, 0.95 / 3, 1.9 / 3, 1, 1.9 / 3 * np.exp(-0.5)]
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_graded_rises_as_a_shape_comes_closer() -> None:
    """From a circle to a square: corners of ever smaller radius."""
    square = {"include": [{"class": "square", "count": 1}]}
    steps = (1.0, 0.85, 0.75, 0.65, 0.55, 0.45, 0.0)
    scores = grades([paint((rounded(t, 11), "green")) for t in steps], square)
    assert scores[0] < 0.1 and scores[-1] == 1 and scores[4] > 0.45
    assert scores[:5] == sorted(set(scores[:5]))


# -------------------------------------------------------------------------------- GenEval's rules


def test_offsets_follow_geneval() -> None:
    """By hand: extents 10 + 10, threshold 0.1, so the offset shrinks by 2.

    (-20, 0) -> -18 / 20; (-20, -20) -> -18 / sqrt(800) each, so two relations hold; (1, 2) lies
    within the shrink, so none holds.
    """
    mine = np.array([[0, 0, 10, 10]], np.float32)
    other = np.array([[20, 0, 30, 10], [20, 20, 30, 30], [-1, -2, 9, 8]], np.float32)
    expected = [[-0.9, 0], [-18 / 800**0.5, -18 / 800**0.5], [0, 0]]
    np.testing.assert_allclose(offsets(mine, other)[0], expected, atol=1e-6)


def test_rules_agree_with_the_second_writing_on_any_layout() -> None:
    rng, n = np.random.default_rng(9), 400
    count, shape = rng.integers(1, 5, n), rng.integers(0, 4, (n, MAX_OBJECTS))
    color = rng.integers(0, 6, (n, MAX_OBJECTS))
    center = rng.uniform(10, 54, (n, MAX_OBJECTS, 2)).astype(np.float32)
    radius = rng.uniform(8, 13, (n, MAX_OBJECTS)).astype(np.float32)
    scenes = Scenes(count, shape, color, center, radius, np.ones(n, np.float32))
    seen = [0, 0]
    for row in range(n):
        k = int(count[row])
        box = np.array([checkerkit.extent(scenes, row, s) for s in range(k)])
        for i in rng.integers(len(EVERY), size=20):
            expected = checkerkit.truth(scenes, row, EVERY[i])
            assert all(rules(EVERY[i], shape[row, :k], color[row, :k], box)) == expected
            seen[expected] += 1
    assert min(seen) > 20


FIRST = {"class": "circle", "count": 1}
LEFT = {"class": "square", "count": 1, "position": ["left of", 0]}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"include": [FIRST, LEFT]}, (True, True, True, True)),
        # each of the first `count` has to stand so
        ({"include": [FIRST, LEFT | {"count": 2}]}, (True, True, False, True)),
        # an entry that failed is no target
        ({"include": [FIRST | {"count": 2}, LEFT]}, (False, True, False, True)),
        (
            {"include": [FIRST], "exclude": [{"class": "square", "count": 2}]},
            (True, True, True, False),
        ),
    ],
)
def test_rules_are_genevals(record: dict[str, Any], expected: tuple[bool, ...]) -> None:
    """By GenEval's evaluate(): a circle, a square left of it and one right of it."""
    box = np.array([[20, 20, 30, 30], [0, 20, 10, 30], [50, 20, 60, 30]], np.float32)
    shape = np.array([CLASSES.index(name) for name in ("circle", "square", "square")])
    assert rules(record, shape, np.zeros(3, np.int64), box) == expected


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.full((1, 3, SIZE, SIZE), float("nan")), "finite"),
        (torch.rand(1, 3, 32, 32), r"\(1, 3, 32, 32\)"),
        (torch.rand(1, SIZE, SIZE, 3), "images"),
        (torch.rand(3, SIZE, SIZE), "images"),
        (torch.full((1, 3, SIZE, SIZE), 1.002), "1.002"),
        (torch.full((1, 3, SIZE, SIZE), -1.0), r"\(x \+ 1\) / 2"),
        (torch.zeros(1, 3, SIZE, SIZE, dtype=torch.uint8), "uint8"),
    ],
)
def test_bad_images_are_refused(images: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check(images, [EVERY[0]] * len(images))


def test_rounding_error_outside_the_range_is_accepted() -> None:
    image = torch.full((1, 3, SIZE, SIZE), 1.0005)
    assert check(image, [EVERY[0]]).graded.tolist() == [0.0]
    with pytest.raises(DataError, match="1 images and 2 records"):
        check(image, [EVERY[0]] * 2)


def second(**changes: Any) -> dict[str, Any]:
    """Return a record whose second entry is a square, changed."""
    return {"include": [FIRST, {"class": "square", "count": 1, **changes}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "include"),
        ({}, "include"),
        ({"include": []}, "include"),
        (second(**{"class": "star"}), "'star'"),
        ({"include": [{"class": "circle"}]}, "count"),
        (second(count=True), "count"),
        (second(count=0), "count"),
        (second(color="pink"), "'pink'"),
        (second(colour="red"), "colour"),
        (second(position=["left of", 1]), "earlier"),
        (second(position=["behind", 0]), "behind"),
        (second(position="left of"), "position"),
        (second() | {"exclude": FIRST}, "exclude"),
        (second() | {"exclude": [{"class": "dog", "count": 1}]}, "'dog'"),
    ],
)
def test_bad_records_are_refused(record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check(torch.full((1, 3, SIZE, SIZE), 0.9), [record])
