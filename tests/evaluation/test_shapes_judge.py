"""The judge that does not know the checker: its rules by hand, and that it reads what it says."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scriptkit import module_of
from torch import Tensor, nn

from flowrl.evaluation.suites.shapes.prompts import all_records, entry, make_record, scenes_for
from flowrl.evaluation.suites.shapes.scene import COLORS, render


@pytest.fixture(scope="module")
def judge() -> ModuleType:
    return module_of("assets/shapes_judge", "judge_network")


@pytest.fixture(scope="module")
def training() -> ModuleType:
    return module_of("assets/shapes_judge", "train_judge")


CIRCLE, SQUARE, ODD = 0, 1, 4
RED, BLUE = 0, 2
RELATION = make_record(
    "position", [entry("square"), entry("circle", color="red", position=("left of", 0))], "", False
)
TWICE = make_record(
    "same_class", [entry("circle", color="red"), entry("circle", color="blue")], "", False
)
TWO_RED = make_record("crossing", [entry("circle", 2, "red")], "", False)


@pytest.mark.parametrize(
    ("record", "things", "right"),
    [
        (RELATION, [(CIRCLE, RED, 10, 30), (SQUARE, BLUE, 50, 30)], True),
        (RELATION, [(CIRCLE, RED, 50, 30), (SQUARE, BLUE, 10, 30)], False),  # opposite
        (RELATION, [(CIRCLE, RED, 30, 10), (SQUARE, BLUE, 30, 50)], False),  # perpendicular
        (RELATION, [(CIRCLE, BLUE, 10, 30), (SQUARE, RED, 50, 30)], False),  # another colour
        (RELATION, [(CIRCLE, RED, 10, 30), (SQUARE, BLUE, 50, 30), (ODD, 0, 30, 50)], False),
        (RELATION, [(CIRCLE, RED, 10, 30)], False),
        (TWICE, [(CIRCLE, RED, 10, 30), (CIRCLE, BLUE, 50, 30)], True),
        (TWICE, [(CIRCLE, RED, 10, 30), (CIRCLE, RED, 50, 30)], False),
        (TWO_RED, [(CIRCLE, RED, 10, 30), (CIRCLE, RED, 50, 30)], True),
        (TWO_RED, [(CIRCLE, RED, 10, 30), (CIRCLE, BLUE, 50, 30)], False),
    ],
)
def test_the_rules_by_hand(judge: ModuleType, record: Any, things: Any, right: bool) -> None:
    seen = [judge.Thing(s, c, torch.tensor([float(x), float(y)])) for s, c, x, y in things]
    assert judge.is_right(seen, record) is right


class _Oracle(nn.Module):
    """Answer with given cells, whatever the images."""

    def __init__(self, cells: Tensor) -> None:
        super().__init__()
        self.cells = cells

    def forward(self, images: Tensor) -> Tensor:
        return self.cells


def test_labels_and_reading_fit_together(judge: ModuleType, training: ModuleType) -> None:
    """Cells that minimise the loss are read as the scene that was drawn; truth is the layout."""
    records = [r for records in all_records().values() for r in records[::60]]
    scenes = scenes_for(records, np.random.default_rng(0))
    odd = np.full(scenes.shape.shape, -1)
    cells = torch.zeros(len(records), 14, 16, 16, requires_grad=True)
    optimizer = torch.optim.Adam([cells], 0.5)
    for _ in range(80):
        optimizer.zero_grad()
        training.loss_of(cells, scenes, odd).backward()
        optimizer.step()
    seen = judge.things_on(_Oracle(cells.detach()), render(scenes))
    assert all(judge.is_right(things, r) for things, r in zip(seen, records, strict=True))
    # places to a pixel, and what is odd is of no class
    first = sorted(seen[0], key=lambda thing: float(thing.center[0]))[0]
    places = scenes.center[0, : scenes.number[0]]
    assert np.abs(places - first.center.numpy()).max(1).min() < 1
    strange = training.loss_of(cells, scenes, np.zeros_like(odd))
    assert strange > training.loss_of(cells, scenes, odd) + 1


def test_training_scenes_are_what_they_say(training: ModuleType) -> None:
    """Without oddities the painter draws what the benchmark's own renderer draws."""
    scenes, odd = training.draw(40, np.random.default_rng(1))
    assert (odd >= 0).any() and len(COLORS) == 6
    plain = training.paint(scenes, np.full_like(odd, -1), np.random.default_rng(2))
    expected = render(scenes)
    assert torch.allclose(plain, expected, atol=1e-5)
    painted = training.paint(scenes, odd, np.random.default_rng(2))
    used = (odd >= 0) & (np.arange(odd.shape[1]) < scenes.number[:, None])
    changed = (painted != expected).flatten(1).any(1).numpy()
    assert not changed[~used.any(1)].any()
    # what is cut by the edge lies elsewhere, not painted otherwise
    cut = training.ODDITIES.index("cut")
    assert changed[(used & (odd != cut)).any(1)].all()
    spoilt = training.spoil(painted, np.random.default_rng(3))
    assert spoilt.shape == painted.shape and spoilt.min() >= 0 and spoilt.max() <= 1
