"""The shapes reward: the checker's verdict for each image's own record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.reward_call import ask
from flowrl.evaluation.suites.shapes.checker import Verdict, check
from flowrl.evaluation.suites.shapes.prompts import all_records, scenes_for
from flowrl.evaluation.suites.shapes.scene import render
from rewards.shapes import shapes

RECORDS = [record for records in all_records().values() for record in records[::7]]
IMAGES = render(scenes_for(RECORDS, np.random.default_rng(0)))
COUNT = len(IMAGES)


def _batch(images: Tensor, meta: list[dict[str, Any]]) -> RewardBatch:
    prompts = [record.get("prompt", "") for record in meta]
    return RewardBatch(images, prompts, torch.arange(COUNT), meta, torch.zeros(COUNT))


def test_true_scenes_earn_one_and_others_less() -> None:
    batch = _batch(IMAGES, RECORDS)
    graded, strict = shapes()(batch), shapes(mode="strict")(batch)
    assert graded.mean() > 0.98 and torch.equal((graded == 1).float(), strict)
    assert shapes()(_batch(IMAGES.bfloat16(), RECORDS)).mean() > 0.98
    # no record asks for four red circles
    other = {"include": [{"class": "circle", "count": 4, "color": "red"}]}
    batch = _batch(IMAGES, [other] * COUNT)
    assert shapes()(batch).max() < 1 and shapes(mode="strict")(batch).sum() == 0


def test_a_perpendicular_relation_pays_nothing_by_itself() -> None:
    """Scenes of "right of" and "left of" are asked to be "above" and "below". That part of the
    reward is 0 in the default mode, and 2/3 in that of version 0.1."""
    turned, seen, asked = {"right of": "above", "left of": "below"}, [], []
    for image, record in zip(IMAGES, RECORDS, strict=True):
        first, *rest = record["include"]
        relation, place = rest[-1].get("position", ("", 0)) if rest else ("", 0)
        if relation in turned:
            second = {**rest[-1], "position": [turned[relation], place]}
            seen.append(image)
            asked.append({**record, "include": [first, second]})
    count = len(asked)
    batch = RewardBatch(
        torch.stack(seen), [""] * count, torch.arange(count), asked, torch.zeros(count)
    )
    now, then = shapes()(batch), shapes(mode="graded")(batch)
    assert (now < then).all() and torch.equal(now, shapes(mode="graded_angle")(batch))


@pytest.mark.parametrize("meta", [[], [{}] * COUNT, [{"prompt": "a circle"}] * COUNT])
def test_a_missing_record_is_an_error(meta: list[dict[str, Any]]) -> None:
    with pytest.raises(DataError, match="record"):
        shapes()(_batch(IMAGES, meta))


def test_nan_images_are_an_error_that_names_them() -> None:
    images = IMAGES.clone()
    images[5, 0, 3, 3] = float("nan")
    with pytest.raises(DataError, match=r"\[5\]"):
        shapes()(_batch(images, RECORDS))


def test_both_modes_look_at_the_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counting(images: Tensor, meta: list[dict[str, Any]]) -> Verdict:
        calls.append(len(images))
        return check(images, meta)

    monkeypatch.setattr("rewards.shapes.check", counting)
    batch = _batch(IMAGES.clone(), RECORDS)
    # each reward gets copies of its own, as in training
    graded = ask("graded", shapes(), batch, "here")
    strict = ask("strict", shapes(mode="strict"), batch, "here")
    assert len(calls) == 1 and torch.equal((graded == 1).float(), strict)
    # judged anew: other images in the same tensor, other records, the first ones again
    batch.images.fill_(0.5)
    assert shapes(mode="strict")(batch).sum() == 0 and len(calls) == 2
    shapes()(batch._replace(meta=RECORDS[::-1]))
    assert len(calls) == 3
    assert torch.equal(shapes()(_batch(IMAGES, RECORDS)), graded) and len(calls) == 4


def test_images_that_were_changed_in_place_are_judged_anew() -> None:
    """The last batch is remembered by what it held, not by where it lies, and so are its
    records."""
    images, records = IMAGES.clone(), [dict(record) for record in RECORDS]
    batch = _batch(images, records)
    before = shapes(mode="strict")(batch)
    assert before.mean() > 0.9
    images.fill_(0.5)  # nothing is left on any of them
    assert shapes(mode="strict")(batch).sum() == 0
    images.copy_(IMAGES)
    assert torch.equal(shapes(mode="strict")(batch), before)
    records[0]["include"] = [{"class": "circle", "count": 4, "color": "red"}]
    assert before[0] == 1 and shapes(mode="strict")(batch)[0] == 0
