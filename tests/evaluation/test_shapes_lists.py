"""Disjoint prompt lists, harder prompts, and what the checker says of them; moving shapes."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scriptkit import script_module
from torch import Tensor

from flowrl.config.load import load_config
from flowrl.core.errors import DataError
from flowrl.core.shipped_files import resource
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites import moving_shapes as moving
from flowrl.evaluation.suites.moving_shapes import EVERY, Scene, check_videos
from flowrl.evaluation.suites.shapes.checker import check, judge_detections, validate, word_order
from flowrl.evaluation.suites.shapes.detect import Detections, detect
from flowrl.evaluation.suites.shapes.lists import scene_key
from flowrl.evaluation.suites.shapes.prompts import (
    HELD_COLORED,
    HELD_COUNTS,
    HELD_POSITIONS,
    Record,
    _held_attribute,
    all_records,
    entry,
    make_record,
    scenes_for,
)
from flowrl.evaluation.suites.shapes.scene import CLASSES, Scenes, render
from rewards.moving_shapes import moving_shapes
from rewards.shapes import shapes

ROOT = Path(__file__).resolve().parents[2]
LISTS = script_module("assets/make_shapes_prompts").all_lists(0)


def scenes_of(records: list[Any]) -> set[Any]:
    """Return the scenes that a list asks for, but single objects."""
    return {scene_key(r) for r in records if r["tag"] != "single_object"}


def test_the_lists_are_disjoint_by_scene_and_by_prompt() -> None:
    # one key by hand: a mirrored relation is the same scene, another reference is not
    one, mirrored, other = (
        make_record("", [entry(b), entry(a, position=(relation, 0))], "", False)
        for a, relation, b in (
            ("circle", "left of", "square"),
            ("square", "right of", "circle"),
            ("circle", "right of", "square"),
        )
    )
    assert scene_key(one) == scene_key(mirrored) != scene_key(other)
    # prompts of all lists; scenes of those that could leak into training or choosing
    for (a, some), (b, more) in itertools.combinations(LISTS.items(), 2):
        texts = {r["prompt"] for r in some}
        assert texts.isdisjoint(r["prompt"] for r in more), (a, b)
        if {a, b} == {"test", "ood"}:
            continue  # test scenes in other words
        left, right = scenes_of(some), scenes_of(more)
        # the four scenes of single objects are in every list, in other words
        assert not {key for key in left & right if len(key[0]) > 1 or key[0][0][1:] != (1, "")}


def test_the_lists_hold_what_they_say() -> None:
    known = {r["prompt"] for records in all_records().values() for r in records}
    words = {word for prompt in known for word in prompt.split()}
    for name, records in LISTS.items():
        # the files, the words of the vocabulary, and texts of at most 18 tokens
        lines = (ROOT / "assets/shapes" / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == records
        used = {word for record in records for word in record["prompt"].split()}
        assert used <= words, used - words
        assert max(len(record["prompt"].split()) for record in records) <= 18
        # held-out combinations are nowhere but where they are tested
        held = any(record["held_out"] for record in records)
        assert held == (name in ("test", "ood", "final")), name
        if name == "final":  # of both
            continue
        # prompts of the benchmark, or new ones
        old = {record["prompt"] for record in records} & known
        assert len(old) == (len(records) if name in ("train", "validation", "test") else 0), name


def test_the_final_list_has_scenes_of_its_own_and_about_equal_tasks() -> None:
    """All scenes that are left, up to 144 a task, each in as many rows as the others of its task;
    rows that are one draw say so."""
    final = LISTS["final"]
    tasks: dict[str, dict[str, list[Any]]] = {}
    for record in final:
        tasks.setdefault(record["tag"], {}).setdefault(record["scene"], []).append(record)
    counts = {task: len(scenes) for task, scenes in tasks.items()}
    assert counts["color_attr"] == 84 and counts["combination"] == 28 and len(counts) == 8
    assert max(counts.values()) == 144
    for scenes in tasks.values():
        keys = [scene_key(rows[0]) for rows in scenes.values()]
        assert len(set(keys)) == len(keys)
        for rows, key in zip(scenes.values(), keys, strict=True):
            assert {scene_key(row) for row in rows} == {key}
        assert len({len(rows) for rows in scenes.values()}) == 1
        assert 100 <= sum(map(len, scenes.values())) <= 170


def test_how_many_final_scenes_the_base_model_may_have_seen() -> None:
    """Scenes of its training are drawn at random, with nothing held-out in them."""
    scenes = {record["scene"]: record for record in LISTS["final"]}
    known = sum(not holds_held_out(record["include"]) for record in scenes.values())
    assert (len(scenes), known) == (715, 417)
    for page, sentence in (("README.md", "may have shown 417"), ("docs/shapes.md", "417 of them")):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "715 scenes" in text and sentence in text, page


def holds_held_out(include: list[Record]) -> bool:
    """Say whether a scene has a coloured shape, pair of colours, number or relation that the base
    model's training leaves out."""
    named = [
        (str(wish["class"]), str(wish.get("color", "")))
        for wish in include
        for _ in range(wish["count"])
    ]
    found = bool(HELD_COLORED & set(named))
    for one, other in itertools.combinations(named, 2):
        if one[0] != other[0] and one[1] and other[1]:
            found |= _held_attribute(one, other)
    found |= bool(HELD_COUNTS & set(Counter(shape for shape, _ in named).items()))
    for wish in include:
        if "position" in wish:
            relation, place = wish["position"]
            found |= (wish["class"], relation, include[place]["class"]) in HELD_POSITIONS
    return found


def test_true_scenes_of_every_list_pass_and_others_fail() -> None:
    records = [r for name in ("hard-train", "ood", "final") for r in LISTS[name][::9]]
    rng = np.random.default_rng(0)
    images = render(scenes_for(records, rng))
    for record in records:
        validate(record, "here")
    verdict = check(images, records)
    # the truth is what was drawn; small triangles and crosses are read right in most of the images
    assert verdict.strict.float().mean() > 0.98
    # the next record asks for another scene, mostly of the same task
    shifted = [*records[1:], records[0]]
    other = [scene_key(a) != scene_key(b) for a, b in zip(records, shifted, strict=True)]
    assert not check(images, shifted).strict[np.array(other)].any()


def _scene(*things: tuple[str, int, float, float]) -> Detections:
    """Read a rendered scene of (class, colour number, x, y), all of radius 8."""
    return detect(_image(*things), find_flaws=True)


def _image(*things: tuple[str, int, float, float]) -> torch.Tensor:
    """Render a scene -> [1, 3, 64, 64]."""
    shape, color = np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64)
    center, radius = np.full((1, 4, 2), 32, np.float32), np.full((1, 4), 8, np.float32)
    for slot, (name, tint, x, y) in enumerate(things):
        shape[0, slot], color[0, slot], center[0, slot] = CLASSES.index(name), tint, (x, y)
    grey = np.full(1, 0.95, np.float32)
    return render(Scenes(np.array([len(things)]), shape, color, center, radius, grey))


PAIR = make_record(
    "same_class",
    [entry("circle", color="blue"), entry("circle", color="red", position=("left of", 0))],
    "a red circle left of a blue circle",
    False,
)
RED, BLUE = 0, 2  # numbers of COLORS


@pytest.mark.parametrize(
    ("things", "flags"),
    [
        ([("circle", RED, 14, 32), ("circle", BLUE, 50, 32)], (True, True, True, True)),
        ([("circle", BLUE, 14, 32), ("circle", RED, 50, 32)], (True, True, False, True)),
        ([("circle", RED, 14, 32), ("circle", RED, 50, 32)], (True, False, False, True)),
        ([("circle", RED, 14, 32)], (False, False, False, True)),
        (
            [("circle", RED, 14, 32), ("circle", BLUE, 50, 32), ("circle", RED, 14, 52)],
            (True, True, True, False),
        ),
    ],
    ids=["asked", "swapped", "both red", "one", "one more"],
)
def test_two_of_a_class_are_told_apart_by_colour(things: Any, flags: tuple[bool, ...]) -> None:
    # count, colour, position, exclude: from the rules, by hand
    verdict = judge_detections(_scene(*things), [PAIR])
    found = (verdict.count_ok, verdict.color_ok, verdict.position_ok, verdict.exclude_ok)
    assert tuple(bool(flag[0]) for flag in found) == flags
    assert bool(verdict.strict[0]) == all(flags) == (float(verdict.graded[0]) == 1)


@pytest.mark.parametrize("colors", [(None, None), ("red", None), ("red", "red")])
def test_two_of_a_class_need_different_colours(colors: tuple[str | None, ...]) -> None:
    record = {"include": [entry("circle", color=color) for color in colors]}
    with pytest.raises(DataError, match="colour each"):
        validate(record, "line 3")


@pytest.mark.parametrize("degrees", [0, 50, 65, 75, 90, 120, 180])
def test_a_relation_is_paid_by_its_angle(degrees: int) -> None:
    # the square stands 30 pixels from the circle, `degrees` off the asked direction
    turn = math.radians(degrees)
    dx, dy = -30 * math.cos(turn), 30 * math.sin(turn)
    found = _scene(
        ("square", RED, 32 + dx / 2, 32 + dy / 2), ("circle", BLUE, 32 - dx / 2, 32 - dy / 2)
    )
    record = make_record(
        "position", [entry("circle"), entry("square", position=("left of", 0))], "", False
    )
    verdict = judge_detections(found, [record])
    # closed form: GenEval takes a tenth of both extents off each axis (a square of radius 8 is
    # 0.88 as wide as a circle); the mean of three credits, two of them full
    margin = 0.1 * (16 + 0.88 * 16)
    along = math.copysign(max(abs(dx) - margin, 0), -dx) / 30
    for score, place in ((verdict.graded_angle, along / 0.5), (verdict.graded, (along + 1) / 1.5)):
        paid = (2 + min(1.0, max(0.0, place))) / 3
        assert float(score[0]) == pytest.approx(1.0 if along > 0.5 else 0.95 * paid, abs=0.01)
    if degrees >= 90:
        assert float(verdict.graded_angle[0]) == pytest.approx(0.95 * 2 / 3, abs=0.001)


def test_the_reward_has_the_angle_as_a_mode() -> None:
    records = LISTS["hard-train"][::30]
    images = render(scenes_for(records, np.random.default_rng(1)))
    shifted = [*records[1:], records[0]]
    batch = RewardBatch(
        images, [""] * len(images), torch.arange(len(images)), shifted, torch.zeros(1)
    )
    expected = check(images, shifted)
    assert torch.equal(shapes(mode="graded_angle")(batch), expected.graded_angle)
    assert (expected.graded_angle <= expected.graded + 1e-6).all()


def test_word_order_is_counted_by_hand() -> None:
    # one image each: as asked, the other way, perpendicular, and with another shape
    position = make_record(
        "position", [entry("square"), entry("cross", position=("left of", 0))], "", False
    )
    pair = [("cross", RED, 14, 32), ("square", BLUE, 50, 32)]
    ways = [pair, [("square", BLUE, 14, 32), ("cross", RED, 50, 32)]]
    ways += [[("cross", RED, 32, 14), ("square", BLUE, 32, 50)]]
    ways += [[("circle", RED, 14, 32), ("square", BLUE, 50, 32)]]
    colored = [entry("cross", color="red"), entry("square", color="blue")]
    colors = make_record("color_attr", colored, "", False)
    swapped = [("cross", BLUE, 14, 32), ("square", RED, 50, 32)]
    third = [("cross", RED, 14, 32), ("square", 1, 50, 32)]
    images = torch.cat([_image(*things) for things in (*ways, pair, swapped, third)])
    records = [position] * 4 + [colors] * 3
    assert word_order(images, records, "position") == (1, 1, 1)
    assert word_order(images, records, "color_attr") == (1, 1, 1)


def test_domains_are_halves_of_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every prompt is in one of the two domains, whose tasks are those that shapes/flow_opd has
    for the teacher of that name."""
    monkeypatch.setattr("sys.argv", ["shapes_domains.py", "--out", str(tmp_path)])
    script_module("assets/shapes_domains").main()
    teachers = load_config("shapes/flow_opd").loss.kwargs["teachers"]
    for part in ("train", "validation"):
        whole = (ROOT / f"assets/shapes/{part}.jsonl").read_text(encoding="utf-8").splitlines()
        split = []
        for name in ("layout", "objects"):
            file = tmp_path / f"{name}-{part}.jsonl"
            mine = file.read_text(encoding="utf-8").splitlines()
            tags = {json.loads(line)["tag"] for line in mine}
            assert {teachers[tag] for tag in tags} == {f"runs/teacher-{name}"}
            split += mine
        assert sorted(split) == sorted(whole)


# ------------------------------------------------------------------------------------ moving shapes


ASKED = Scene("square", "red", "right")


def every_start(one: Scene) -> Tensor:
    rows, columns = moving.starts(one.direction, anywhere=True)
    return torch.stack([moving.paint(one, y, x) for y in rows for x in columns])


def test_every_scene_is_right_for_its_record_and_for_no_other() -> None:
    """All 32 scenes from all places: right for their own record, wrong for the 31 others."""
    noise = torch.Generator().manual_seed(0)
    for one in EVERY:
        videos = every_start(one)
        rough = (videos + 0.05 * torch.randn(videos.shape, generator=noise)).clamp(0, 1)
        assert bool(check_videos(rough, [one.record] * len(rough)).right.all()), one
        others = [other.record for other in EVERY if other != one]
        assert not bool(check_videos(videos[:1].expand(31, -1, -1, -1, -1), others).right.any()), (
            one
        )


def test_faults_cost_the_frames_and_moves_that_they_are_in() -> None:
    """By hand, of 5 frames and 4 moves."""
    right = moving.paint(ASKED, 5, 1)
    stands = right[:1].expand(5, -1, -1, -1).clone()  # 4 moves
    backwards = right.flip(0)  # 4 moves
    gone = right.clone()
    gone[2] = torch.tensor(moving.BACKGROUND)[:, None, None]  # a frame, and the 2 moves beside it
    second = right.clone()
    second[4, :, 0:3, 0:3] = torch.tensor(moving.COLORS["blue"])[:, None, None]  # a frame
    cross = moving.paint(ASKED._replace(kind="cross"), 5, 1)  # 5 frames
    green = moving.paint(ASKED._replace(color="green"), 5, 1)  # 5 frames, 4 moves
    videos = torch.stack([right, stands, backwards, gone, second, cross, green])
    verdict = check_videos(videos, [ASKED.record] * len(videos))
    assert verdict.looks.sum(1).tolist() == [5, 5, 5, 4, 4, 0, 0]
    assert verdict.moves.sum(1).tolist() == [4, 0, 0, 2, 4, 4, 0]
    assert verdict.right.tolist() == [True, *[False] * 6]
    assert verdict.graded.tolist() == pytest.approx([1, 0.5, 0.5, 0.65, 0.9, 0.5, 0])


def test_the_reward_and_its_records() -> None:
    videos = torch.stack([moving.paint(ASKED, 5, 1), moving.paint(ASKED, 5, 1)])
    videos[1, 0, 0, 0, 0] = torch.nan
    meta = [ASKED.record] * 2
    batch = RewardBatch(videos, [ASKED.prompt] * 2, torch.zeros(2), meta, torch.zeros(2))
    scores = moving_shapes(mode="strict")(batch)
    assert scores[0] == 1 and scores[1].isnan()
    for wrong in ({}, {**ASKED.record, "direction": "around"}):
        with pytest.raises(DataError, match="list:3: .*expected one of .* use a list of assets"):
            moving_shapes().check_record(wrong, "list:3")
    with pytest.raises(DataError, match=r"expected videos \[L, T, 3, H, W\]"):
        moving_shapes()(batch._replace(images=videos[:, 0]))


def test_lists_have_no_scene_in_common_and_every_word() -> None:
    found = []
    for name in ("train", "validation", "test"):
        lines = Path(resource(f"assets/moving/{name}.jsonl")).read_text().splitlines()
        found.append([json.loads(line) for line in lines])
        assert {record["direction"] for record in found[-1]} == set(moving.DIRECTIONS)
        assert {record["color"] for record in found[-1]} == set(moving.COLORS)
    assert [len(rows) for rows in found] == [20, 4, 8]
    assert len({record["prompt"] for rows in found for record in rows}) == len(EVERY)
