"""The shapes checker against known layouts, probes that must never pass, and GenEval's rules by
hand."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from scriptkit import script_module
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes.checker import check, judge, offsets, rules, validate
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.prompts import TASKS, all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import (
    CLASSES,
    COLORS,
    MAX_OBJECTS,
    SIZE,
    Scenes,
    coverage,
    render,
)

RECORDS = all_records()
EVERY = [record for records in RECORDS.values() for record in records]
RGB = {name: np.array(rgb, np.float32) / 255 for name, rgb in COLORS.items()}
Y, X = np.mgrid[:SIZE, :SIZE] + np.float32(0.5)


MEASURE = script_module("check_checker")


def _mask(kind: str, x: float, y: float, r: float) -> np.ndarray:
    return coverage(
        np.array([CLASSES.index(kind)]), np.array([[x, y]], np.float32), np.array([r], np.float32)
    )[0]


def _paint(*layers: tuple[np.ndarray, Any], background: float = 0.95) -> Tensor:
    """Paint masks [64, 64] in colours over each other: -> [1, 3, 64, 64]."""
    image = np.full((SIZE, SIZE, 3), background, np.float32)
    for mask, color in layers:
        rgb = RGB[color] if isinstance(color, str) else color
        image = image * (1 - mask[..., None]) + mask[..., None] * rgb
    return torch.tensor(image, dtype=torch.float32).permute(2, 0, 1)[None]


def _rounded(roundness: float, r: float) -> np.ndarray:
    """Draw a square of half side `r` whose corners have the radius `roundness * r`: 0 = square, 1 =
    circle."""
    corner = roundness * r
    dx, dy = np.abs(X - 32) - r + corner, np.abs(Y - 32) - r + corner
    away = (
        np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0) - corner
    )
    return np.clip(0.5 - away, 0, 1)


def _against_all(image: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Judge one image by every record of the benchmark: -> strict, graded."""
    found = detect(image)
    verdict = judge(Detections(*(np.repeat(field, len(EVERY), 0) for field in found)), EVERY)
    return verdict.strict.numpy(), verdict.graded.numpy()


def _one(image: Tensor, record: dict[str, Any]) -> tuple[bool, float]:
    verdict = check(image, [record])
    return bool(verdict.strict[0]), float(verdict.graded[0])


def _record(shape: str, count: int = 1, color: str | None = None) -> dict[str, Any]:
    wanted = {"class": shape, "count": count} | ({"color": color} if color else {})
    exclude = [{"class": c, "count": (count if c == shape else 0) + 1} for c in CLASSES]
    return {"tag": "test", "include": [wanted], "exclude": exclude}


def _rough(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Blur, add noise and compress, as hard as a VAE of 31 dB."""
    blurred = ndimage.gaussian_filter(images.numpy(), (0, 0, 0.6, 0.6))
    noisy = np.clip(blurred + rng.normal(0, 0.02, blurred.shape), 0, 1)
    out = []
    for image in np.round(noisy * 255).astype(np.uint8):
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "JPEG", quality=60, subsampling=0)
        out.append(np.asarray(Image.open(file)).transpose(2, 0, 1) / np.float32(255))
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("task", TASKS)
def test_agrees_with_layouts(task: str) -> None:
    # Truth: GenEval's rules on the layout, written a second time in the script.
    found = MEASURE.measure(task, scenes=150, seed=7)
    assert min(found[f"{kind}_agreement"] for kind in ("own", "random", "near")) >= 0.99
    assert found["near_false_accepts"] == found["random_false_accepts"] == 0


def test_survives_blur_noise_and_compression() -> None:
    rng = np.random.default_rng(3)
    records = [
        records[int(rng.integers(len(records)))] for records in RECORDS.values() for _ in range(40)
    ]
    images = render(scenes_for(records, rng))
    rough = _rough(images, rng)
    assert float(((rough - images) ** 2).mean()) > 10**-3.4  # worse than 34 dB
    assert check(rough, records).strict.float().mean() >= 0.98
    wrong = [MEASURE.near_miss(r, rng) for r in records if "position" not in r["include"][-1]]
    kept = torch.tensor(["position" not in r["include"][-1] for r in records])
    assert not check(rough[kept], wrong).strict.any()


def test_reads_objects_where_they_are() -> None:
    # Centres, boxes and areas by construction; the triangle's box is 2r wide and 1.85r high from y
    # - r.
    image = _paint((_mask("circle", 15, 17, 9), "red"), (_mask("triangle", 44, 40, 11), "blue"))
    found = detect(image)
    assert found.number[0] == 2 and (found.shape[0, 2:] == -1).all()
    slot = {CLASSES[s]: i for i, s in enumerate(found.shape[0, :2])}
    assert list(COLORS)[found.color[0, slot["circle"]]] == "red"
    assert list(COLORS)[found.color[0, slot["triangle"]]] == "blue"
    np.testing.assert_allclose(found.box[0, slot["circle"]], [6, 8, 24, 26], atol=0.25)
    np.testing.assert_allclose(
        found.box[0, slot["triangle"]], [33, 29, 55, 40 + 0.85 * 11], atol=0.35
    )
    np.testing.assert_allclose(found.center[0, slot["circle"]], [15, 17], atol=0.2)
    assert abs(found.area[0, slot["circle"]] - np.pi * 81) < 0.08 * np.pi * 81
    np.testing.assert_allclose(found.background[0], 0.95, atol=1 / 255)


def _blank_probes() -> dict[str, Tensor]:
    rng = np.random.default_rng(0)
    palette = np.stack(list(RGB.values()))
    probes = {f"flat {v}": torch.full((1, 3, SIZE, SIZE), v) for v in (0.0, 0.5, 0.95, 1.0)}
    probes |= {
        f"flat {c}": torch.tensor(RGB[c])[None, :, None, None].expand(1, 3, SIZE, SIZE)
        for c in COLORS
    }
    probes |= {
        f"noise {i}": torch.from_numpy(rng.random((1, 3, SIZE, SIZE), np.float32)) for i in range(3)
    }
    probes["bright noise"] = torch.from_numpy(
        0.8 + 0.2 * rng.choice([-1.0, 1.0], (1, 3, SIZE, SIZE))
    )
    for block in (2, 4, 8, 16):
        order = rng.permutation(np.arange((SIZE // block) ** 2) % 6).reshape(SIZE // block, -1)
        tiles = palette[order].repeat(block, 0).repeat(block, 1)
        probes[f"mosaic {block}"] = torch.from_numpy(tiles).permute(2, 0, 1)[None]
        if block > 4:
            framed = torch.full((1, 3, SIZE, SIZE), 0.95)
            framed[:, :, 2:-2, 2:-2] = probes[f"mosaic {block}"][:, :, 2:-2, 2:-2]
            probes[f"framed mosaic {block}"] = framed
    cells = [(x, y) for x in (9, 24, 40, 55) for y in (9, 24, 40, 55)]
    layers = [
        (_mask(CLASSES[i % 4], x, y, 6), list(COLORS)[i % 6]) for i, (x, y) in enumerate(cells)
    ]
    return probes | {"all shapes in all colours": _paint(*layers)}


BLANKS = _blank_probes()


@pytest.mark.parametrize("name", BLANKS)
def test_blank_and_crowded_images_earn_nothing(name: str) -> None:
    strict, graded = _against_all(BLANKS[name])
    assert not strict.any()
    assert graded.max() < 0.1


def _broken_probes() -> dict[str, Tensor]:
    left, diagonal = np.float32(X < 32), np.float32(X > Y)
    probes = {}
    for kind in CLASSES:
        whole = _mask(kind, 32, 32, 12)
        probes[f"{kind} cut in half"] = _paint((whole * left, "red"))
        probes[f"{kind} cut aslant"] = _paint((whole * diagonal, "red"))
        probes[f"tiny {kind}"] = _paint((_mask(kind, 32, 32, 4), "red"))
        probes[f"{kind} half outside"] = _paint((_mask(kind, 0, 30, 12), "blue"))
        probes[f"{kind} a sliver outside"] = _paint((_mask(kind, 11, 30, 12), "black"))
        probes[f"{kind} a quarter outside"] = _paint((_mask(kind, 58, 30, 12), "blue"))
        probes[f"{kind} in two colours"] = _paint((whole, "red"), (whole * left, "blue"))
        probes[f"{kind} in two close colours"] = _paint((whole, "purple"), (whole * left, "blue"))
        probes[f"{kind} a fifth of another colour"] = _paint(
            (whole, "green"), (whole * np.float32(X < 28), "black")
        )
        probes[f"{kind} of no palette colour"] = _paint(
            (whole, np.array([0.95, 0.6, 0.75], np.float32))
        )
        probes[f"{kind} merged with a circle"] = _paint(
            (_mask(kind, 24, 32, 10), "red"), (_mask("circle", 39, 32, 10), "red")
        )
        probes[f"{kind} pierced"] = _paint(
            (whole, "red"), (_mask("circle", 32, 32, 6), np.full(3, 0.95, np.float32))
        )
        probes[f"{kind} on a coloured background"] = _paint(
            (np.ones((SIZE, SIZE)), "yellow"), (whole, "red")
        )
        probes[f"{kind} on grey"] = _paint((whole, "red"), background=0.6)
    for r in (9.0, 11.0, 13.0):
        probes |= {
            f"rounded square {t} of {r}": _paint((_rounded(t, r), "green"))
            for t in (0.6, 0.65, 0.7)
        }
    return probes


BROKEN = _broken_probes()


@pytest.mark.parametrize("name", BROKEN)
def test_broken_shapes_never_pass(name: str) -> None:
    strict, graded = _against_all(BROKEN[name])
    assert not strict.any()
    assert graded.max() < 1


@pytest.mark.parametrize("contrast", [0.14, 0.2, 0.3, 0.5])
def test_a_faint_extra_object_fails_a_right_image(contrast: float) -> None:
    circle = (_mask("circle", 20, 20, 11), "red")
    good, bad = (
        _paint(circle),
        _paint(circle, (_mask("square", 48, 48, 4), np.full(3, 0.95 - contrast, np.float32))),
    )
    assert _one(good, _record("circle")) == (True, 1.0)
    strict, graded = _one(bad, _record("circle"))
    assert not strict and 0.5 < graded < 1


def test_specks_and_a_dark_background_fail_and_cost() -> None:
    circle = (_mask("circle", 32, 32, 11), "red")
    specks = ((X % 8 < 2) & (Y % 8 < 2) & (np.hypot(X - 32, Y - 32) > 18)).astype(
        np.float32
    )  # 2x2, too small to be objects
    few = specks * (Y < 8)
    assert specks.sum() > 120 and 20 < few.sum() < 40
    assert _one(_paint((few, "blue"), circle), _record("circle")) == (True, 1.0)
    dirty, dark = _paint((specks, "blue"), circle), _paint(circle, background=0.7)
    assert check(torch.cat([dirty, dark]), [_record("circle")] * 2).clean.tolist() == [False, False]
    for image in (dirty, dark):
        strict, graded = _one(image, _record("circle"))
        assert not strict and 0.2 < graded < 0.75


def test_forbidden_objects_fail_and_cost() -> None:
    first, second, third = (
        (_mask("square", 14, 14, 9), "red"),
        (_mask("square", 46, 16, 9), "blue"),
        (_mask("cross", 32, 48, 9), "green"),
    )
    alone, twice, with_cross = _paint(first), _paint(first, second), _paint(first, third)
    assert _one(alone, _record("square")) == (True, 1.0)
    for image in (twice, with_cross):
        strict, graded = _one(image, _record("square"))
        assert not strict and graded < 0.7
    assert check(with_cross, [_record("square")]).exclude_ok.tolist() == [False]
    allowed = {
        "include": [{"class": "square", "count": 1}]
    }  # GenEval: without `exclude` more objects are fine
    assert _one(with_cross, allowed)[0] and _one(twice, allowed)[0]


def test_mixed_scenes_with_one_more_object_fail() -> None:
    rng = np.random.default_rng(5)
    records = [
        r for t in TASKS for r in RECORDS[t] if sum(e["count"] for e in r["include"]) < MAX_OBJECTS
    ][::9]
    more = [
        dict(r, include=[*r["include"], {"class": str(rng.choice(CLASSES)), "count": 1}])
        for r in records
    ]
    plain = [
        {**m, "include": [{k: v for k, v in e.items() if k != "position"} for e in m["include"]]}
        for m in more
    ]
    assert not check(render(scenes_for(plain, rng)), records).strict.any()


def _ordered(images: list[Tensor], record: dict[str, Any]) -> list[float]:
    return check(torch.cat(images), [record] * len(images)).graded.tolist()


def test_graded_rises_with_the_count() -> None:
    spots = [(14, 14), (48, 14), (14, 48), (48, 48)]
    images = [_paint(*((_mask("cross", x, y, 9), "black") for x, y in spots[:n])) for n in range(5)]
    scores = _ordered(images, _record("cross", 3))
    # 0.95 (1 - |3 - n| / 3), exactly 1 at three, and 0.95 (2/3) exp(-1/2) with one forbidden cross
    # too many
    np.testing.assert_allclose(scores, [0, 0.95 / 3, 1.9 / 3, 1, 1.9 / 3 * np.exp(-0.5)], atol=1e-6)


def test_graded_rises_as_a_circle_becomes_a_square() -> None:
    shapes = [_paint((_rounded(t, 11), "green")) for t in (1.0, 0.85, 0.75, 0.65, 0.55, 0.45, 0.0)]
    scores = _ordered(shapes, _record("square"))
    assert scores[0] < 0.1 and scores[-1] == 1
    assert all(a < b for a, b in zip(scores[:5], scores[1:5], strict=False)) and scores[4] > 0.45


def test_graded_rises_as_the_colour_comes_closer() -> None:
    mask = _mask("circle", 32, 32, 11)
    mixes = [RGB["blue"] * (1 - t) + RGB["green"] * t for t in (0.0, 0.3, 0.45, 0.6, 1.0)]
    scores = _ordered([_paint((mask, mix)) for mix in mixes], _record("circle", color="green"))
    assert scores[0] < 0.6 and scores[-1] == 1
    assert scores == sorted(scores)
    assert scores[1] < scores[2] < scores[3]


def test_graded_rises_as_the_position_turns() -> None:
    exclude = [{"class": c, "count": n} for c, n in zip(CLASSES, (2, 2, 1, 1), strict=True)]
    include = [
        {"class": "square", "count": 1},
        {"class": "circle", "count": 1, "position": ["left of", 0]},
    ]
    record = {"include": include, "exclude": exclude}
    turned = []
    for degrees in (0, 50, 90, 130, 180):  # from right of the square to left of it
        x, y = 32 + 20 * np.cos(np.deg2rad(degrees)), 32 + 20 * np.sin(np.deg2rad(degrees))
        turned.append(
            _paint((_mask("circle", x, y, 8), "red"), (_mask("square", 64 - x, 64 - y, 8), "black"))
        )
    scores = _ordered(turned, record)
    assert scores == sorted(scores) and scores[-1] == 1
    assert scores[0] < scores[1] < scores[2] < 0.95


def test_graded_is_one_exactly_where_strict() -> None:
    rng = np.random.default_rng(11)
    records = [EVERY[i] for i in rng.integers(len(EVERY), size=120)]
    images = render(scenes_for(records, rng))
    others = [EVERY[i] for i in rng.integers(len(EVERY), size=120)]
    noisy = (
        images + 0.3 * torch.rand(images.shape, generator=torch.Generator().manual_seed(0)) - 0.15
    ).clamp(0, 1)
    for pixels, judged in ((images, records), (images, others), (noisy, records)):
        verdict = check(pixels, judged)
        assert torch.equal(verdict.graded == 1, verdict.strict)
        assert bool(((verdict.graded >= 0) & (verdict.graded <= 1)).all())
        checks = (
            verdict.count_ok,
            verdict.color_ok,
            verdict.position_ok,
            verdict.exclude_ok,
            verdict.clean,
        )
        assert torch.equal(torch.stack(checks).all(0), verdict.strict)


def test_verdicts_do_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(2)
    records = EVERY[::60]
    images = torch.cat(
        [render(scenes_for(records, rng)), BLANKS["noise 0"], BROKEN["circle pierced"]]
    )
    judged = [*records, EVERY[0], EVERY[1]]
    together, alone = (
        check(images, judged),
        [check(images[i : i + 1], [r]) for i, r in enumerate(judged)],
    )
    assert torch.equal(together.strict, torch.cat([v.strict for v in alone]))
    assert torch.equal(together.graded, torch.cat([v.graded for v in alone]))
    assert check(images[:0], []).strict.shape == (0,)


def test_details_name_the_check_that_failed() -> None:
    record = {
        "include": [{"class": "circle", "count": 1, "color": "red"}],
        "exclude": [{"class": "circle", "count": 2}],
    }
    blue, none = _paint((_mask("circle", 32, 32, 11), "blue")), _paint()
    verdict = check(torch.cat([blue, none, BROKEN["square cut in half"]]), [record] * 3)
    assert verdict.count_ok.tolist() == [True, False, False]
    assert verdict.color_ok.tolist() == [False, False, False]
    assert verdict.clean.tolist() == [True, True, False]


def test_offsets_follow_geneval() -> None:
    # By hand: extents 10 + 10, threshold 0.1 -> shrink by 2. Offset (-20, 0) -> -18 / 20. Offset
    # (-20, -20) -> -18 / sqrt(800) each, so two relations hold. Offset (1, 2) lies within the
    # shrink, so none holds.
    mine = np.array([[0, 0, 10, 10]], np.float32)
    other = np.array([[20, 0, 30, 10], [20, 20, 30, 30], [-1, -2, 9, 8]], np.float32)
    expected = [[-0.9, 0], [-18 / 800**0.5, -18 / 800**0.5], [0, 0]]
    np.testing.assert_allclose(offsets(mine, other)[0], expected, atol=1e-6)


def test_rules_agree_with_the_second_writing_on_any_layout() -> None:
    rng = np.random.default_rng(9)
    n = 400
    count, shape = rng.integers(1, 5, n), rng.integers(0, 4, (n, MAX_OBJECTS))
    color = rng.integers(0, 6, (n, MAX_OBJECTS))
    center = rng.uniform(10, 54, (n, MAX_OBJECTS, 2)).astype(np.float32)
    radius = rng.uniform(8, 13, (n, MAX_OBJECTS)).astype(np.float32)
    scenes = Scenes(count, shape, color, center, radius, np.ones(n, np.float32))
    seen = [0, 0]
    for row in range(n):
        k = int(count[row])
        box = np.array([MEASURE.extent(scenes, row, s) for s in range(k)])
        for record in (EVERY[int(i)] for i in rng.integers(len(EVERY), size=20)):
            expected = MEASURE.truth(scenes, row, record)
            assert all(rules(record, shape[row, :k], scenes.color[row, :k], box)) == expected
            seen[expected] += 1
    assert min(seen) > 20


def test_rules_look_at_count_objects_and_at_every_target() -> None:
    # GenEval's evaluate(): the first `count` of a class are looked at, and each must stand so to
    # each target.
    square, circle = CLASSES.index("square"), CLASSES.index("circle")
    box = np.array([[20, 20, 30, 30], [0, 20, 10, 30], [50, 20, 60, 30]], np.float32)
    wanted = {"class": "square", "count": 1, "position": ["left of", 0]}
    shape, color = np.array([circle, square, square]), np.zeros(3, np.int64)
    first = {"class": "circle", "count": 1}
    assert rules({"include": [first, wanted]}, shape, color, box) == (True, True, True, True)
    both = {"include": [first, dict(wanted, count=2)]}
    assert rules(both, shape, color, box) == (True, True, False, True)
    missing = {
        "include": [dict(first, count=2), wanted]
    }  # a reference entry that failed is no target
    assert rules(missing, shape, color, box) == (False, True, False, True)
    assert (
        rules(
            {"include": [first], "exclude": [{"class": "square", "count": 2}]}, shape, color, box
        )[3]
        is False
    )


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
    assert _one(torch.full((1, 3, SIZE, SIZE), 1.0005), EVERY[0]) == (False, 0.0)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "include"),
        ({}, "include"),
        ({"include": []}, "include"),
        ({"include": [{"class": "star", "count": 1}]}, "'star'"),
        ({"include": [{"class": "circle"}]}, "count"),
        ({"include": [{"class": "circle", "count": True}]}, "count"),
        ({"include": [{"class": "circle", "count": 0}]}, "count"),
        ({"include": [{"class": "circle", "count": 1, "color": "pink"}]}, "'pink'"),
        ({"include": [{"class": "circle", "count": 1, "colour": "red"}]}, "colour"),
        ({"include": [{"class": "circle", "count": 1, "position": ["left of", 0]}]}, "earlier"),
        ({"include": [{"class": "circle", "count": 1, "position": "left of"}]}, "position"),
        ({"include": [{"class": "circle", "count": 1}], "exclude": {"class": "circle"}}, "exclude"),
        (
            {
                "include": [{"class": "circle", "count": 1}],
                "exclude": [{"class": "dog", "count": 1}],
            },
            "'dog'",
        ),
    ],
)
def test_bad_records_are_refused(record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check(torch.full((1, 3, SIZE, SIZE), 0.9), [record])


def test_unknown_relation_and_wrong_number_of_records_are_refused() -> None:
    entries = [
        {"class": "circle", "count": 1},
        {"class": "square", "count": 1, "position": ["behind", 0]},
    ]
    with pytest.raises(DataError, match="behind"):
        validate({"include": entries}, "here")
    with pytest.raises(DataError, match="2 images and 1 records"):
        check(torch.full((2, 3, SIZE, SIZE), 0.9), [EVERY[0]])
