"""Selections of techniques: which images are trained, and how good and bad ones count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from selectkit import forest
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import SelectInput
from flowrl.techniques import selections

SCORES = [-1.2, 0.1, 0.9, -0.05, 1.6, -0.7, 0.3, -0.95]  # of the reference


def kept(
    function: Callable[..., Tensor], advantages: list[float], *, iteration: int = 0, **options: Any
) -> list[int]:
    """Return which of a prompt's images are trained, one draw each, by their order."""
    ro = forest([1, 0], groups=[0] * len(advantages))
    advantage = torch.zeros(len(ro.tree.parent))
    above = ro.tree.parent[ro.leaf]
    advantage[ro.leaf] = advantage[above] = torch.tensor(advantages)
    factor = function(SelectInput(ro, advantage, None, iteration, torch.Generator()), **options)
    assert set(factor.nonzero().flatten().tolist()) <= set(above.tolist())
    return factor[above].nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("function", "options", "scores", "wanted"),
    [
        (selections.largest, {"share": 0.5}, SCORES, [0, 2, 4, 7]),
        (selections.spread, {"keep": 4}, SCORES, [0, 2, 4, 7]),
        # floor(5 * 0.2) = 1 is left out, though 5 (1 - 0.8) is below 1 in floating point
        (selections.largest, {"share": 0.8}, SCORES[:5], [0, 1, 2, 4]),
        # all large ones are positive; the variances of the widest sets of three are 7.9 and 6.9
        (selections.largest, {"share": 0.5}, [5.0, 4.9, 4.8, -1.0, 0.0, 0.1], [0, 1, 2]),
        (selections.spread, {"keep": 3}, [5.0, 4.9, 4.8, -1.0, 0.0, 0.1], [0, 1, 3]),
    ],
)
def test_which_images_are_trained(
    function: Callable[..., Tensor], options: dict[str, Any], scores: list[float], wanted: list[int]
) -> None:
    assert kept(function, scores, **options) == wanted


def test_d3s_loosens_over_training() -> None:
    """(1 - t) 3 + t 8 of 8 images, rounded down, over 10 iterations: 3, 3.5, 4 ... 7.5, 8, then 8;
    at 4 the reference's set, of its variance."""
    options = {"keep": 3, "keep_last": 8, "over": 10}
    found = [kept(selections.spread, SCORES, iteration=k, **options) for k in range(12)]
    assert [len(images) for images in found] == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]
    assert found[2] == [0, 2, 4, 7]
    variance = torch.tensor([SCORES[image] for image in found[2]]).var(correction=0)
    assert float(variance) == pytest.approx(1.420469, abs=1e-6)
    # downwards as well, and at once
    assert len(kept(selections.spread, SCORES, iteration=1, keep=8, keep_last=2, over=1)) == 2


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (selections.largest, {"share": 1.0}, "share above 0"),
        (
            selections.spread,
            {"keep": 9},
            "keep=9 must be from 2 to the number of leaves of a prompt, 8",
        ),
        (
            selections.spread,
            {"keep": 4, "keep_last": 9, "over": 5},
            "keep_last=9 must be from 2 to",
        ),
        (selections.spread, {"keep": 4, "keep_last": 8}, "keep_last=8 and over=0"),
        (selections.spread, {"keep": 4, "over": 8}, "keep=4 and keep_last=0 must be from 2"),
        (selections.spread, {"keep": 4, "keep_last": 8, "over": -1}, "over=-1"),
    ],
)
def test_bad_selections_are_named(
    function: Callable[..., Tensor], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        kept(function, SCORES, **options)
