"""The shapes reward: the checker's verdict for each image's own record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.checker import Verdict, check
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards.shapes import shapes

RECORDS = [record for records in all_records().values() for record in records[::7]]


def _batch(images: Tensor, meta: list[dict[str, Any]]) -> RewardBatch:
    n = len(images)
    prompts = [m.get("prompt", "") for m in meta]
    return RewardBatch(images, prompts, torch.arange(n), meta, torch.zeros(n))


IMAGES = render(scenes_for(RECORDS, np.random.default_rng(0)))


def test_true_scenes_earn_one_and_others_less() -> None:
    graded, strict = (
        shapes()(_batch(IMAGES, RECORDS)),
        shapes(mode="strict")(_batch(IMAGES, RECORDS)),
    )
    assert graded.dtype == strict.dtype == torch.float32 and graded.shape == (len(IMAGES),)
    assert graded.mean() > 0.98 and torch.equal((graded == 1).float(), strict)
    circle = {
        "include": [{"class": "circle", "count": 4, "color": "red"}]
    }  # no record asks for four red circles
    assert shapes()(_batch(IMAGES, [circle] * len(IMAGES))).max() < 1
    assert shapes(mode="strict")(_batch(IMAGES, [circle] * len(IMAGES))).sum() == 0


def test_half_precision_images_are_scored() -> None:
    assert shapes()(_batch(IMAGES.bfloat16(), RECORDS)).mean() > 0.98


@pytest.mark.parametrize("meta", [[], [{}] * len(IMAGES), [{"prompt": "a circle"}] * len(IMAGES)])
def test_a_missing_record_is_an_error(meta: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="record"):
        shapes()(_batch(IMAGES, meta))


def test_nan_images_are_an_error_that_names_them() -> None:
    images = IMAGES.clone()
    images[5, 0, 3, 3] = float("nan")
    with pytest.raises(DataError, match=r"\[5\]"):
        shapes()(_batch(images, RECORDS))


def test_an_unknown_mode_is_an_error() -> None:
    with pytest.raises(ConfigError, match="lenient"):
        shapes(mode="lenient")  # type: ignore[arg-type]


def test_both_modes_look_at_the_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(images: Tensor, meta: list[dict[str, Any]]) -> Verdict:
        calls.append(len(images))
        return check(images, meta)

    monkeypatch.setattr("rewards.shapes.check", counting)
    batch = _batch(IMAGES.clone(), RECORDS)
    graded, strict = shapes()(batch), shapes(mode="strict")(batch)
    assert len(calls) == 1 and torch.equal((graded == 1).float(), strict)
    batch.images.fill_(
        0.5
    )  # other images in the same tensor, other records, another tensor: all judged anew
    assert shapes(mode="strict")(batch).sum() == 0 and len(calls) == 2
    shapes()(batch._replace(meta=list(RECORDS)))
    assert (
        len(calls) == 3
        and torch.equal(shapes()(_batch(IMAGES, RECORDS)), graded)
        and len(calls) == 4
    )
