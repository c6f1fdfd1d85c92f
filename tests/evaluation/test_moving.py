"""Moving shapes: the checker on painted scenes, the lists, and what the reward makes of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.core.shipped_files import resource
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites import moving_shapes as moving
from flowrl.evaluation.suites.moving_shapes import EVERY, Scene, check_videos
from rewards.moving_shapes import moving_shapes

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
