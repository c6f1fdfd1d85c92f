"""Test a reward as a user would want it tested: does it see damage, and does it judge each image
by itself?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, FlowRLError, RewardError
from flowrl.core.prompts import check_records
from flowrl.core.tables import text_table
from flowrl.core.types import Reward
from flowrl.evaluation.reward_tests.checks import (
    CheckResult,
    RewardUnderTest,
    answers,
    damaged,
    damages,
    invariances,
    nan_images,
    probes,
    try_wrong_prompts,
)
from flowrl.evaluation.score_images import (
    PromptedImage,
    RewardScores,
    prompts_of_images,
    score_images,
)
from flowrl.evaluation.suites.shapes.lists import benchmark_lists
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import SIZE, render

SKIPPABLE = ("blur", "noise", "prompt")


def rendered(count: int) -> list[PromptedImage]:
    """Draw `count` scenes of the shapes benchmark with their true prompts, spread over its test
    prompts."""
    test = benchmark_lists().test
    records = []
    for i in range(count):
        place = i % len(test)
        if count < len(test):
            place = i * len(test) // count
        records.append(test[place])
    pixels = (render(scenes_for(records, np.random.default_rng(0))) * 255).round().byte()
    images = []
    for i, record in enumerate(records):
        load = partial(_unit, pixels[i])
        images.append(PromptedImage(load, (SIZE, SIZE), record, i, f"scene {i + 1}"))
    return images


def load_once(images: Sequence[PromptedImage]) -> list[PromptedImage]:
    """Read the images once and keep them as bytes; each becomes a group of its own."""
    kept = []
    for i, image in enumerate(images):
        pixels = (image.load() * 255).round().byte()
        kept.append(image._replace(load=partial(_unit, pixels), group=i))
    return kept


def _unit(pixels: Tensor) -> Tensor:
    return pixels / 255


def selftest(
    name: str,
    reward: Reward,
    images: Sequence[PromptedImage],
    *,
    batch: int = 32,
    tolerance: float = 1e-4,
    skip: Sequence[str] = (),
    has_prompts: bool = True,
    progress: Callable[[int], Any] = lambda done: None,
) -> list[CheckResult]:
    """Test one reward on undamaged images with true prompts, image i being group i -> a row per
    check.

    Args:
        tolerance: differences up to this share of the largest score are rounding, and no
            difference.
        skip: the damages, of `SKIPPABLE`, that this reward is not meant to notice.

    Raises ConfigError, and DataError if the reward refuses these very images or prompts.
    """
    # the arguments
    if len(images) < 2 or not tolerance >= 0 or set(skip) - set(SKIPPABLE):
        raise ConfigError(
            "self-test: expected at least 2 images, a tolerance >= 0 and damages of "
            f"{', '.join(SKIPPABLE)} to skip, got {len(images)}, {tolerance} and "
            f"{', '.join(skip) or 'none'}"
        )

    def ask(shown: Sequence[PromptedImage], most: int) -> RewardScores:
        rewards = {name: reward}
        return score_images(
            rewards, shown, batch=most, whole=True, has_prompts=has_prompts, progress=progress
        )[name]

    # a reward that compares within groups gets each image with its noisy twin
    first = _first(name, reward, images, partial(ask, most=batch))
    if "group" in first.reads:
        twins: list[PromptedImage] = []
        for i, image in enumerate(images):
            twins += [image, damaged(image, "noise", i)]
        images, first = twins, ask(twins, batch)
    # differences that are rounding
    known = first.values[first.values.isfinite()].abs()
    slack = tolerance * (float(known.max()) if bool((known > 0).any()) else 1.0)
    # the checks
    test = RewardUnderTest(name, reward, images, ask, batch, first, slack)
    rows = [answers(test), *damages(test, skip), try_wrong_prompts(test, skip)]
    return [*rows, *invariances(test), nan_images(test), *probes(test)]


def _first(
    name: str,
    reward: Reward,
    images: Sequence[PromptedImage],
    ask: Callable[[Sequence[PromptedImage]], RewardScores],
) -> RewardScores:
    """Ask for the first time; a reward may be of another kind than these images and prompts."""
    # records with the places that messages name
    places = [f"{image.name}, prompt {image.record['prompt']!r}" for image in images]
    # an error of flowrl's own means other images, any other one a bug of the reward
    try:
        check_records(prompts_of_images(images, places), {name: reward})
        return ask(images)
    except (DataError, RewardError) as error:
        if isinstance(error, RewardError) and not isinstance(error.__cause__, FlowRLError):
            raise
        raise DataError(
            f"self-test of {name!r}: {error}\ntest it on images and prompts that it is made for: "
            "flowrl score --selftest IMAGES --prompts FILE"
        ) from error


def broken(rows: Sequence[CheckResult]) -> list[CheckResult]:
    """Return the failures that no taste explains."""
    return [row for row in rows if row.verdict == "fails" and row.hard]


def selftest_table(rows: Sequence[CheckResult], *, width: int | None = None) -> str:
    """Set the checks of all rewards as a table each, with what follows from them; `width` columns,
    None: any number."""
    lines: list[str] = []
    tables: dict[str, list[list[str]]] = {}
    for row in rows:
        table = tables.setdefault(row.reward, [[row.reward, "verdict", "found"]])
        table.append([row.check, row.verdict or "-", row.found])
    for table in tables.values():
        lines += [text_table(table, left=3, width=width), ""]
    # what fails
    failed = [row for row in rows if row.verdict == "fails"]
    for row in failed:
        why = "ranked the wrong way round; if that is not meant, look into it"
        if row.hard:
            why = "broken"
        lines.append(f"{row.reward}: {row.check}: {why}")
    if not failed:
        lines.append("nothing fails")
    return "\n".join(lines)
