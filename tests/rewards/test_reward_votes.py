"""A reward that asks people: a vote is a vote, and none is none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from serving import batch_of, random_images

from flowrl.core.errors import ConfigError
from flowrl.core.types import Source
from flowrl.core.votes import VotePair, append_vote, questions
from rewards.votes import votes

BATCH = batch_of(random_images(5), group=[0, 0, 0, 1, 1])
Choose = Callable[[VotePair], float | None]


def people(folder: Path, choose: Choose) -> threading.Thread:
    """Answer the next question as `choose` says: 1 for the first of a pair; None is no vote."""

    def answer() -> None:
        while not (asked := questions(folder)):
            time.sleep(0.01)
        for pair in asked[0].pairs:
            label = choose(pair)
            record: dict[str, Any] = {
                "prompt": pair.prompt,
                "image_0": pair.first,
                "image_1": pair.second,
            }
            record |= {"source": list(pair.sources)} if pair.sources else {}
            if label is not None:
                append_vote(folder, {**record, "label_0": label, "voter": "0" * 8})

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def test_scores_are_shares_of_wins_and_a_resumed_run_finds_them(tmp_path: Path) -> None:
    """Everybody likes the image with the smaller name: of three the ranks give 1, 1/2 and 0."""
    reward = votes(folder=str(tmp_path), patience=60, look=0.01)
    people(tmp_path, lambda pair: 1.0)
    scores = reward(BATCH)
    assert sorted(scores[:3].tolist()) == [0, 0.5, 1] and sorted(scores[3:].tolist()) == [0, 1]
    assert questions(tmp_path) == []
    # nobody is asked again: the images are the same to the byte
    began = time.monotonic()
    assert torch.equal(votes(folder=str(tmp_path), patience=60)(BATCH), scores)
    assert time.monotonic() - began < 30


def test_edits_are_asked_with_their_sources(tmp_path: Path) -> None:
    """A file for each image that the groups start from, with its 256 levels."""
    levels = torch.tensor([0, 51, 255])[:, None, None, None] / 255
    black, grey, white = levels.expand(-1, 3, 4, 4)
    sources: list[Source] = [*[(black, grey)] * 3, *[(white,)] * 2]
    batch = BATCH._replace(source=sources)
    asked = set()

    def first(pair: VotePair) -> float:
        asked.add(pair)
        return 1.0

    people(tmp_path, first)
    scores = votes(folder=str(tmp_path), patience=60, look=0.01)(batch)
    assert sorted(scores[3:].tolist()) == [0, 1]
    shown = {}
    for pair in asked:
        files = [Image.open(tmp_path / name) for name in pair.sources]
        shown[pair.prompt] = [image.getpixel((0, 0)) for image in files]
    assert shown == {"prompt 0": [(0, 0, 0), (51, 51, 51)], "prompt 1": [(255, 255, 255)]}


def test_missing_votes_are_missing_and_never_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the second group is judged, as a tie, before patience ends; the command that is said
    can be pasted."""
    tmp_path = tmp_path / "my votes"
    people(tmp_path, lambda pair: 0.5 if pair.prompt == "prompt 1" else None).join(0)
    scores = votes(folder=str(tmp_path), patience=1.0, look=0.01)(BATCH)
    assert scores[:3].isnan().all() and scores[3:].tolist() == [0.5, 0.5]
    assert f"flowrl view RUNS --votes '{tmp_path}'" in caplog.text
    assert questions(tmp_path) == []


def test_equal_images_need_no_vote(tmp_path: Path) -> None:
    same = batch_of(random_images(1).repeat(2, 1, 1, 1), group=[0, 0])
    assert votes(folder=str(tmp_path), patience=60)(same).tolist() == [0.5, 0.5]


def test_too_few_pairs_are_told_by_their_own_name(tmp_path: Path) -> None:
    """Three images need two pairs, so that each is in one."""
    expected = "^rewards.votes: pairs: expected at least 2 for groups of 3 images, .* got 1"
    with pytest.raises(ConfigError, match=expected):
        votes(folder=str(tmp_path), pairs=1, patience=0)(BATCH)


@pytest.mark.parametrize("wrong", [{"pairs": 0}, {"each": 0}, {"patience": -1.0}, {"look": 0.0}])
def test_numbers_that_cannot_be(tmp_path: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="rewards.votes"):
        votes(folder=str(tmp_path), **wrong)  # type: ignore[arg-type]
