"""The shapes checker against known layouts, GenEval's rules by hand, probes that try to fool it,
and what it refuses."""

from __future__ import annotations

import io
from typing import Any

import checkerkit
import numpy as np
import pytest
import torch
from checkerkit import (
    EVERY,
    RECORDS,
    RGB,
    WHOLE,
    X,
    Y,
    against_all,
    grades,
    mask,
    paint,
    record_of,
    rounded,
)
from PIL import Image
from scipy import ndimage
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes import detect as detect_module
from flowrl.evaluation.suites.shapes.checker import check, judge_detections, offsets, rules
from flowrl.evaluation.suites.shapes.detect import detect, has_corners
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
    found = checkerkit.measure(task, scenes=100, seed=7)
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


def images() -> Tensor:
    """Scenes of all tasks, noisy ones, noise and a flat image."""
    rng = np.random.default_rng(0)
    clean = render(scenes_for(EVERY[::3], rng))
    noise = torch.from_numpy(rng.random(clean.shape, np.float32))
    every = [clean, 0.8 * clean + 0.2 * noise, noise[:2], torch.full_like(noise[:1], 0.95)]
    return torch.cat(every)


@pytest.mark.parametrize(("size", "threads"), [(1, 1), (7, 1), (7, 3)])
def test_every_field_is_that_of_one_look(
    size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = images()
    monkeypatch.setattr(detect_module, "CHUNK", len(some))
    whole = detect(some, find_flaws=True)
    monkeypatch.setattr(detect_module, "CHUNK", size)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for name, one, parts in zip(whole._fields, whole, detect(some, find_flaws=True), strict=True):
        assert one is not None and parts is not None and np.array_equal(one, parts), name


FINE = 8  # a polygon's pixel is the mean of so many points each way


def polygon(sides: int, r: float, turn: float) -> np.ndarray:
    """Draw a regular polygon of circumscribed radius r: the points on the inner side of every
    edge."""
    at = (np.arange(SIZE * FINE) + 0.5) / FINE - 32
    x, y = at[None, :], at[:, None]
    apothem = r * np.cos(np.pi / sides)
    inside = np.ones((SIZE * FINE,) * 2, bool)
    for k in range(sides):
        angle = turn + 2 * np.pi * k / sides
        inside &= x * np.cos(angle) + y * np.sin(angle) <= apothem
    return inside.reshape(SIZE, FINE, SIZE, FINE).mean((1, 3), dtype=np.float32)


def block(x: int, y: int, width: int, height: int) -> np.ndarray:
    out = np.zeros((SIZE, SIZE), np.float32)
    out[y : y + height, x : x + width] = 1
    return out


def every(step: int, *, of: str) -> np.ndarray:
    """Draw lines one pixel wide, every so many pixels."""
    line = (np.arange(SIZE) % step == 0).astype(np.float32)
    return np.broadcast_to(line if of == "columns" else line[:, None], (SIZE, SIZE))


def lighter(color: str, by: float) -> np.ndarray:
    return np.clip(RGB[color] + by, 0, 1)


def probes() -> dict[str, tuple[str, Tensor]]:
    """Name -> the class that is asked for, and an image that must not pass as it."""
    circle, square = mask("circle", 32, 32, 12), mask("square", 32, 32, 12)
    grey = np.full(3, 0.95)
    out: dict[str, tuple[str, Tensor]] = {}
    for sides in (5, 6):
        for r in (9.0, 11.0, 13.0):
            for turn in (0.0, 0.2, 0.4):
                out[f"{sides} sides, {r}, {turn}"] = (
                    "circle",
                    paint((polygon(sides, r, turn), "red")),
                )
    for contrast in (0.08, 0.1, 0.11):
        ghost = mask("square", 51, 51, 8), grey - contrast
        out[f"ghost {contrast}"] = "circle", paint((mask("circle", 20, 20, 11), "red"), ghost)
    for size in (2, 3):
        out[f"speck {size}"] = "circle", paint((circle, "red"), (block(4, 4, size, size), "blue"))
    for of in ("columns", "rows"):
        behind = (every(4, of=of) * (1 - circle), grey - 0.1)
        out[f"background of {of}"] = "circle", paint((circle, "red"), behind)
        out[f"circle of {of}"] = (
            "circle",
            paint((circle, "red"), (circle * every(2, of=of), lighter("red", 0.2))),
        )
    out["blue on red"] = "square", paint((square, "red"), (mask("circle", 32, 32, 2), "blue"))
    out["green on black"] = "square", paint((square, "black"), (block(30, 30, 4, 3), "green"))
    return out


PROBES = probes()


@pytest.mark.parametrize("name", PROBES)
def test_flawed_images_never_pass(name: str) -> None:
    kind, image = PROBES[name]
    verdict = check(image, [record_of(kind)])
    assert not verdict.strict[0] and not verdict.clean[0] and verdict.graded[0] < 1


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("r", [8.0, 9.3, 10.5, 13.0])
def test_drawn_shapes_pass(kind: str, r: float) -> None:
    image = paint((mask(kind, 31.7, 32.4, r), "purple"))
    assert check(image, [record_of(kind)]).strict.all()


def test_flaws_have_to_be_looked_for() -> None:
    """A verdict on detections that were made without looking for flaws would let them pass."""
    with pytest.raises(DataError, match="find_flaws=True"):
        judge_detections(detect(paint((mask("circle", 32, 32, 11), "red"))), [record_of("circle")])


def test_harmonics_of_a_wavy_disk() -> None:
    """``1 + eps cos(n angle)`` has the harmonic (n + 2) eps / 2: for n = 4 that is 0.15 at
    eps = 0.05 and 0.09 at eps = 0.03; the limit is 0.14."""
    at = (np.arange(SIZE * FINE) + 0.5) / FINE - 32
    angle, away = np.arctan2(at[:, None], at[None, :]), np.hypot(at[:, None], at[None, :])
    for eps, bad in ((0.05, True), (0.03, False)):
        inside = away < 12 * (1 + eps * np.cos(4 * angle))
        disk = inside.reshape(SIZE, FINE, SIZE, FINE).mean((1, 3), dtype=np.float32)
        assert has_corners(disk[None]).tolist() == [bad]


BACKGROUND = np.full(3, 0.95, np.float32)
FLAT = (1, 3, SIZE, SIZE)


def blank_probes() -> dict[str, Tensor]:
    """Return flat images, noise, mosaics of the palette, and everything at once."""
    rng = np.random.default_rng(0)
    probes = {f"flat {v}": torch.full(FLAT, v) for v in (0.0, 0.5, 0.95, 1.0)}
    probes |= {f"flat {c}": paint((WHOLE, c)) for c in COLORS}
    for i in range(3):
        probes[f"noise {i}"] = torch.from_numpy(rng.random(FLAT, np.float32))
    bright = 0.8 + 0.2 * rng.choice([-1.0, 1.0], FLAT)
    probes["bright noise"] = torch.from_numpy(bright)
    palette = np.stack(list(RGB.values()))
    for block in (2, 4, 8, 16):
        order = rng.permutation(np.arange((SIZE // block) ** 2) % 6).reshape(SIZE // block, -1)
        tiles = palette[order].repeat(block, 0).repeat(block, 1)
        mosaic = torch.from_numpy(tiles).permute(2, 0, 1)[None]
        probes[f"mosaic {block}"] = mosaic
        if block > 4:
            framed = torch.full(FLAT, 0.95)
            framed[:, :, 2:-2, 2:-2] = mosaic[:, :, 2:-2, 2:-2]
            probes[f"framed mosaic {block}"] = framed
    layers = []
    for i in range(16):
        x, y = (9, 24, 40, 55)[i // 4], (9, 24, 40, 55)[i % 4]
        layers.append((mask(CLASSES[i % 4], x, y, 6), list(COLORS)[i % 6]))
    return probes | {"all shapes in all colours": paint(*layers)}


def broken_probes() -> dict[str, Tensor]:
    """Return each shape broken in many ways, and squares that are half circles."""
    left, diagonal, fifth = ((X < 32) * WHOLE, (X > Y) * WHOLE, (X < 28) * WHOLE)
    hole, pink = (mask("circle", 32, 32, 6), BACKGROUND), np.array([0.95, 0.6, 0.75], np.float32)
    probes: dict[str, Tensor] = {}
    for kind in CLASSES:
        whole = mask(kind, 32, 32, 12)
        red, beside = (whole, "red"), (mask("circle", 39, 32, 10), "red")
        made = {
            "cut in half": paint((whole * left, "red")),
            "cut aslant": paint((whole * diagonal, "red")),
            "tiny": paint((mask(kind, 32, 32, 4), "red")),
            "half outside": paint((mask(kind, 0, 30, 12), "blue")),
            "a sliver outside": paint((mask(kind, 11, 30, 12), "black")),
            "a quarter outside": paint((mask(kind, 58, 30, 12), "blue")),
            "in two colours": paint(red, (whole * left, "blue")),
            "in two close colours": paint((whole, "purple"), (whole * left, "blue")),
            "a fifth of another colour": paint((whole, "green"), (whole * fifth, "black")),
            "of no palette colour": paint((whole, pink)),
            "merged with a circle": paint((mask(kind, 24, 32, 10), "red"), beside),
            "pierced": paint(red, hole),
            "on a coloured background": paint((WHOLE, "yellow"), red),
            "on grey": paint(red, background=0.6),
        }
        probes |= {f"{kind} {how}": image for how, image in made.items()}
    for r in (9.0, 11.0, 13.0):
        for t in (0.6, 0.65, 0.7):
            probes[f"rounded square {t} of {r}"] = paint((rounded(t, r), "green"))
    return probes


@pytest.mark.parametrize(("probes", "least"), [(blank_probes, 0.1), (broken_probes, 1.0)])
def test_no_probe_passes_any_record(probes: Any, least: float) -> None:
    """Blank and crowded images earn nothing; a broken shape earns less than a whole one."""
    passed = {}
    for name, image in probes().items():
        strict, graded = against_all(image)
        if strict or graded >= least:
            passed[name] = graded
    assert not passed


ONE = (mask("circle", 20, 20, 11), "red")
MIDDLE = (mask("circle", 32, 32, 11), "red")
SQUARE = (mask("square", 14, 14, 9), "red")
TWICE = (SQUARE, (mask("square", 46, 16, 9), "blue"))
CROSSED = (SQUARE, (mask("cross", 32, 48, 9), "green"))
# 2x2 pixels each: too small to be objects
SPECKS = ((X % 8 < 2) & (Y % 8 < 2) & (np.hypot(X - 32, Y - 32) > 18)).astype(np.float32)


def faint(contrast: float) -> Tensor:
    """Return a right circle with a small square of little contrast."""
    return paint(ONE, (mask("square", 48, 48, 4), BACKGROUND - np.float32(contrast)))


CIRCLE_ONLY, SQUARE_ONLY = record_of("circle"), record_of("square")
# GenEval: without `exclude` more objects are fine
ANY = {"include": [{"class": "square", "count": 1}]}
# image, record, the bounds of the grade; 1 to 1 is a pass
SPOILT = {
    "right": (paint(ONE), CIRCLE_ONLY, 1, 1),
    "faint .14": (faint(0.14), CIRCLE_ONLY, 0.5, 0.999),
    "faint .2": (faint(0.2), CIRCLE_ONLY, 0.5, 0.999),
    "faint .3": (faint(0.3), CIRCLE_ONLY, 0.5, 0.999),
    "faint .5": (faint(0.5), CIRCLE_ONLY, 0.5, 0.999),
    "few specks": (paint((SPECKS * (Y < 8), "blue"), MIDDLE), CIRCLE_ONLY, 0.75, 0.9),
    "specks": (paint((SPECKS, "blue"), MIDDLE), CIRCLE_ONLY, 0.2, 0.75),
    "dark": (paint(MIDDLE, background=0.7), CIRCLE_ONLY, 0.2, 0.75),
    "alone": (paint(SQUARE), SQUARE_ONLY, 1, 1),
    "twice": (paint(*TWICE), SQUARE_ONLY, 0, 0.7),
    "with a cross": (paint(*CROSSED), SQUARE_ONLY, 0, 0.7),
    "twice, allowed": (paint(*TWICE), ANY, 1, 1),
    "with a cross, allowed": (paint(*CROSSED), ANY, 1, 1),
}


def test_what_spoils_a_right_image_fails_and_costs() -> None:
    """Faint extra objects, dirt, a dark background, forbidden objects."""
    assert SPECKS.sum() > 120 and 20 < (SPECKS * (Y < 8)).sum() < 40
    images, records, low, high = zip(*SPOILT.values(), strict=True)
    verdict = check(torch.cat(images), list(records))
    for i, name in enumerate(SPOILT):
        assert low[i] <= float(verdict.graded[i]) <= high[i], name
        assert bool(verdict.strict[i]) == (low[i] == 1), name
    by_name = dict(zip(SPOILT, zip(verdict.clean, verdict.exclude_ok, strict=True), strict=True))
    assert not by_name["few specks"][0] and not by_name["specks"][0] and not by_name["dark"][0]
    assert not by_name["with a cross"][1]


def test_graded_rises_as_the_colour_comes_closer() -> None:
    images = []
    for t in (0.0, 0.3, 0.45, 0.6, 1.0):
        images.append(paint((MIDDLE[0], RGB["blue"] * (1 - t) + RGB["green"] * t)))
    scores = grades(images, record_of("circle", color="green"))
    assert scores[0] < 0.6 and scores[-1] == 1
    assert scores == sorted(scores) and scores[1] < scores[2] < scores[3]


def test_graded_rises_as_the_position_turns() -> None:
    """The circle turns around the square, from its right to its left."""
    square = {"class": "square", "count": 1}
    circle = {"class": "circle", "count": 1, "position": ["left of", 0]}
    images = []
    for angle in np.deg2rad((0, 50, 90, 130, 180)):
        x, y = 32 + 20 * np.cos(angle), 32 + 20 * np.sin(angle)
        there, opposite = mask("circle", x, y, 8), mask("square", 64 - x, 64 - y, 8)
        images.append(paint((there, "red"), (opposite, "black")))
    exclude = [{"class": c, "count": n} for c, n in zip(CLASSES, (2, 2, 1, 1), strict=True)]
    scores = grades(images, {"include": [square, circle], "exclude": exclude})
    assert scores == sorted(scores) and scores[-1] == 1
    assert scores[0] < scores[1] < scores[2] < 0.95
