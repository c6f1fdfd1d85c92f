"""Does a reward judge each image by itself: the same score in any order, batch and company."""

from __future__ import annotations

import math
from functools import partial
from statistics import median

import torch
from torch import Tensor

from flowrl.core.errors import FlowRLError, RewardError
from flowrl.core.seeds import generator
from flowrl.evaluation.reward_tests.damage import DAMAGES
from flowrl.evaluation.reward_tests.under_test import (
    CheckResult,
    RewardUnderTest,
    Verdict,
    damaged,
    difference,
)
from flowrl.evaluation.score_images import PromptedImage

Way = tuple[list[int], int]  # order of the images, images per batch


def invariances(test: RewardUnderTest) -> list[CheckResult]:
    """Ask again: the same, in other orders, in other batches; a score must not change.

    Two images of three are damaged, since equal scores in another order would look alike.
    """
    images = _some_damaged(test)
    first = test.ask(images, test.batch)
    seconds = [test.first.seconds, first.seconds]
    rows = []
    for check, (ways, how) in _ways(test).items():
        # the largest difference over all ways
        worst = 0.0
        try:
            for order, most in ways:
                scores = test.ask([images[i] for i in order], most)
                worst = max(worst, difference(scores.values, first.values[order]))
                if most == test.batch:
                    seconds.append(scores.seconds)
        except RewardError as error:
            rows.append(test.result(check, "fails", f"{how}: {error}", hard=True))
            continue
        # against the tolerance; JSON has no infinity
        found = f"largest difference {worst:.3g}, {how} (tolerance {test.slack:.1g})"
        verdict: Verdict = "ok" if worst <= test.slack else "fails"
        figures = {"tolerance": test.slack}
        if worst < math.inf:
            figures["difference"] = worst
        rows.append(test.result(check, verdict, found, figures, hard=True))
    # the time that all took
    speed = len(images) / max(median(seconds), 1e-9)
    found = f"{speed:.4g} images/s in batches of {test.batch}"
    return [*rows, test.result("speed", "", found, {"images_per_s": speed})]


def _some_damaged(test: RewardUnderTest) -> list[PromptedImage]:
    kinds = [None, *DAMAGES]
    images = []
    for i, image in enumerate(test.images):
        kind = None if test.grouped else kinds[i % len(kinds)]
        images.append(image if kind is None else damaged(image, kind, i))
    return images


def _ways(test: RewardUnderTest) -> dict[str, tuple[list[Way], str]]:
    """Return {check: (ways to ask again, how messages call them)}."""
    # groups stay together
    count = len(test.images)
    place = torch.randperm(count, generator=generator(0, "selftest", "order")).tolist()
    same = list(range(count))
    shuffled = sorted(same, key=lambda i: (place[test.images[i].group], i))
    # the sizes hold one image, a few, and all
    sizes = [(same, most) for most in (1, 3, count)]
    return {
        "repeat": ([(same, test.batch)], "asked again"),
        "order": ([(same[::-1], test.batch), (shuffled, test.batch)], "reversed and shuffled"),
        "batch size": (sizes, f"batches of 1, 3 and {count}, not {test.batch}"),
    }


def nan_images(test: RewardUnderTest) -> CheckResult:
    """Show an image with one NaN, and one of NaN alone: each must be refused or not scored, and
    harm no other."""
    notes = [_with_a_broken_image(test, where) for where in ((0, 0, 0), ())]
    worst = min(notes, key=lambda note: ("fails", "weak", "ok").index(note[0]))
    return test.result("NaN image", *worst, hard=True)


def _with_a_broken_image(test: RewardUnderTest, where: tuple[int, ...]) -> tuple[Verdict, str]:
    # the first image has NaN at a place, or everywhere
    first = test.images[0]
    try:
        images = [first._replace(load=partial(_with_nan, first, where)), *test.images[1:]]
        values = test.ask(images, test.batch).values
    except RewardError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, FlowRLError):
            return "ok", "refused"
        return "weak", f"stops, but with a {type(cause).__name__}: {cause}"
    # it has no score, and other groups have theirs
    others = [i for i, image in enumerate(test.images) if image.group != first.group]
    if not bool(values[0].isnan()):
        return "fails", f"an image with NaN got the score {values[0].item():.4g}"
    if difference(values[others], test.first.values[others]) > test.slack:
        return "fails", "an image with NaN changes the scores of others"
    return "ok", "not scored"


def _with_nan(image: PromptedImage, where: tuple[int, ...]) -> Tensor:
    pixels = image.load().clone()
    pixels[where or ...] = torch.nan
    return pixels
