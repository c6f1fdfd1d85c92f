"""Scoring images of any size by any reward, and the table, figures and grid of the scores."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import brokenkit
import numpy as np
import pytest
import scipy.ndimage
import torch
from brokenkit import red
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RewardError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.score_images import PromptedImage, RewardScores, batches, score_images
from flowrl.evaluation.scorecard import (
    best_and_worst,
    places_best_first,
    score_summary,
    scorecard,
    scorecard_table,
)


def item(number: int, size: tuple[int, int] = (4, 4), group: int | None = None) -> PromptedImage:
    image = torch.rand(3, *size, generator=torch.Generator().manual_seed(number))
    group = number if group is None else group
    return PromptedImage(lambda: image, size, {"prompt": "a dot"}, group, f"{number}.png")


def scores(reward: Any, items: list[PromptedImage], **options: Any) -> list[float]:
    return score_images({"it": reward}, items, **options)["it"].values.tolist()


def test_images_of_any_sizes_and_groups_keep_their_order() -> None:
    """Each score is that of the image alone, computed without any batch."""
    sizes = [(4, 4), (5, 3), (4, 4), (5, 3), (5, 3), (2, 2), (4, 4)]
    seen: list[tuple[int, ...]] = []

    def watching(batch: RewardBatch) -> Tensor:
        seen.append(tuple(batch.images.shape))
        return red(batch)

    sized = [item(i, size) for i, size in enumerate(sizes)]
    mixed = [item(i, group=g) for i, g in enumerate([0, 1, 0, 2, 1, 0])]
    for items, batch in ((sized, 2), (mixed, 6)):
        alone = [one.load()[0].mean().item() for one in items]
        assert scores(watching, items, batch=batch) == pytest.approx(alone)
    assert sorted(seen[:-1]) == [(1, 3, s, s) for s in (2, 4)] + [
        (1, 3, 5, 3), (2, 3, 4, 4), (2, 3, 5, 3),
    ]  # fmt: skip


def test_groups_come_together() -> None:
    items = [item(i, group=g) for i, g in enumerate([0, 1, 0, 2, 1, 0])]
    assert list(batches(items, 6, False)) == [([0, 2, 5, 1, 4, 3], False)]
    assert list(batches(items, 3, False)) == [([0, 2, 5], False), ([1, 4, 3], False)]
    split = [([0, 2], True), ([5], True), ([1, 4], False), ([3], False)]
    assert list(batches(items, 2, False)) == split
    assert [rows for rows, _ in batches(items, 1, True)] == [[0, 2, 5], [1, 4], [3]]


@pytest.mark.parametrize(
    ("reward", "reads"),
    [
        (red, set()),
        (lambda b: red(b) + len(b.prompts), {"prompts"}),
        (
            lambda b: red(b._replace(sigma=b.sigma)) + b.group * len(b.meta),
            {"group", "meta"},
        ),
        # by place: seen by its effect only
        (lambda b: red(b) * torch.tensor([len(p) for p in b[1]]), set()),
    ],
)
def test_what_a_reward_reads_is_noticed(reward: Any, reads: set[str]) -> None:
    assert score_images({"it": reward}, [item(0), item(1)])["it"].reads == reads


def test_a_reward_that_reads_the_prompt_needs_one() -> None:
    with pytest.raises(ConfigError, match="'deaf' reads the prompt: give --prompt"):
        score_images({"deaf": brokenkit.deaf}, [item(0)], has_prompts=False)
    assert len(scores(brokenkit.sharp, [item(0)], has_prompts=False)) == 1


def test_a_reward_that_compares_needs_the_whole_group() -> None:
    def centred(batch: RewardBatch) -> Tensor:
        means = [red(batch)[batch.group == g].mean() for g in batch.group]
        return red(batch) - torch.stack(means)

    items = [item(i, group=0) for i in range(3)]
    assert sum(scores(centred, items, batch=3)) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ConfigError, match="larger --batch"):
        scores(centred, items, batch=2)
    with pytest.raises(ConfigError, match="of several sizes"):
        scores(centred, [item(0, group=0), item(1, (5, 5), group=0)], batch=9)
    alone = scores(lambda b: red(b) + 0 * b.group, items, batch=2, split=True)
    assert alone == scores(red, items)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda b: torch.tensor(1.0), r"expected 2 numbers, one per image, got shape \[\]"),
        (lambda b: red(b)[:, None], r"got shape \[2, 1\]"),
        (lambda b: red(b) / 0, "gave inf for image [01], prompt .*infinity is never allowed"),
        (lambda b: torch.tensor("x"), "failed with TypeError"),
        (brokenkit.picky, "no images of 'a dot' please"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_images(reward: Any, message: str) -> None:
    with pytest.raises(RewardError, match=rf"0\.png to 1\.png: reward 'it'.*{message}"):
        scores(reward, [item(0), item(1)])


# ----------------------------------------------------------------------------------- the figures


def scored(**columns: list[float]) -> dict[str, RewardScores]:
    return {name: RewardScores(torch.tensor(values)) for name, values in columns.items()}


def test_figures_are_those_of_the_statistics_module() -> None:
    values = [0.25, 3.0, -1.5, 0.0]
    found = score_summary(torch.tensor([*values, torch.nan]))
    assert found["mean"] == pytest.approx(statistics.mean(values))
    assert found["std"] == pytest.approx(statistics.stdev(values))
    assert (found["min"], found["max"], found["scored"], found["not_scored"]) == (-1.5, 3.0, 4, 1)
    assert score_summary(torch.tensor([2.0]))["std"] is None
    assert score_summary(torch.tensor([torch.nan]))["mean"] is None


def test_a_table_is_aligned_and_says_what_was_not_scored() -> None:
    """Std: sqrt(1.125), and statistics.stdev([1234.5, -1, 0]) = 713.03."""
    columns = scored(a=[0.5, torch.nan, 2.0], bb=[1234.5, -1.0, 0.0])
    card = scorecard([item(i) for i in range(3)], columns, has_prompts=True)
    assert scorecard_table(card).splitlines() == [
        "file                 a      bb",
        "------------------------------",
        "0.png           0.5000  1234.5",
        "1.png       not scored    -1.0",
        "2.png           2.0000     0.0",
        "------------------------------",
        "mean            1.2500   411.2",
        "std             1.0607   713.0",
        "min             0.5000    -1.0",
        "max             2.0000  1234.5",
        "not scored           1       0",
    ]


def test_sorting_puts_the_best_first_and_the_unscored_last() -> None:
    said = scored(a=[1.0, torch.nan, 3.0, 1.0])
    assert places_best_first(said, "a") == [2, 0, 3]
    card = scorecard([item(i) for i in range(4)], said, has_prompts=False, sort="a")
    assert [row["file"] for row in card["images"]] == ["2.png", "0.png", "3.png", "1.png"]
    assert [row["scores"]["a"] for row in card["images"]] == [3.0, 1.0, 1.0, None]
    with pytest.raises(ConfigError, match="--sort: expected one of the rewards a, got 'b'"):
        places_best_first(said, "b")


def test_the_grid_shows_the_best_left_and_the_worst_below() -> None:
    """Flat images whose grey is their score are found in the grid by their colour."""
    levels = [0.2, 0.8, 0.4, 0.6, 0.1, 0.9]
    items = []
    for i, level in enumerate(levels):
        flat = partial(torch.full, (3, 64, 64), level)
        items.append(item(i)._replace(load=flat, size=(64, 64)))
    page = np.array(best_and_worst(items, scored(a=levels), ["a"]).convert("L"))
    places = []
    for level in sorted(levels, reverse=True):
        exact = (page == round(255 * level)).astype(float)
        rows, columns = np.nonzero(scipy.ndimage.uniform_filter(exact, 40) > 0.999)
        places.append((bool(rows.mean() > page.shape[0] / 2), columns.mean()))
    assert places == sorted(places)
    assert [below for below, _ in places] == [False] * 3 + [True] * 3
    mixed = best_and_worst([*items, item(6, (32, 128))], scored(a=[*levels, 0.5]), ["a"])
    assert mixed.width > 3 * 192
    with pytest.raises(DataError, match="at least 2 images scored by 'a', got 1"):
        best_and_worst(items[:2], scored(a=[1.0, torch.nan]), ["a"])
