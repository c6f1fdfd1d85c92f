"""Rewards whose weights depend on the prompt's category."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forests import by_hand
from toykit import toy

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.reward_mix.aggregate import advantage_sum, by_field
from flowrl.core.errors import ConfigError
from flowrl.core.types import Scores, Tree
from flowrl.training.trainer import Trainer

# two prompts, a root each with two leaves: nodes 0 and 1 are the roots
TREE: Tree = by_hand([-1, -1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], group=[4, 2, 4, 4, 2, 2])
LEAF = torch.tensor([2, 3, 4, 5])
META = [{"tag": tag} for tag in ("face", "face", "text", "text")]
VALUES = {"a": [1.0, 3, 5, 7], "b": [0.5, 0.1, 0.0, 0.0], "c": [9.0, 9, 9, 8]}
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.0}


def scores(values: dict[str, list[float]] = VALUES, meta: Any = META) -> Scores:
    rows = {name: torch.tensor(row) for name, row in values.items()}
    return Scores(rows, WEIGHTS, LEAF, TREE, meta)


def credit(reward: torch.Tensor) -> torch.Tensor:
    return group_norm(reward, LEAF, TREE, eps=0.0)


def test_by_hand_on_two_categories() -> None:
    """Within its prompt, a pair has the advantages -1 and 1. `face` counts a half and b three
    times: -.5 + 3 and .5 - 3; `text` counts b not at all and names no a, which has its own weight
    1. Of the watched c nothing is seen."""
    mix = by_field(weights={"face": {"a": 0.5, "b": 3.0}, "text": {"b": 0.0}})
    mixed = mix(scores(), credit)
    assert mixed.advantage.tolist() == pytest.approx([0, 0, 2.5, -2.5, -1, 1])
    assert mixed.parts["a"].tolist() == pytest.approx([-0.5, 0.5, -1, 1])
    assert mixed.parts["b"].tolist() == pytest.approx([3, -3, 0, 0])
    assert list(mixed.parts) == ["a", "b"]
    # the scale of a reward says nothing: all of b a thousand times as large
    large = {**VALUES, "b": [1000 * value for value in VALUES["b"]]}
    again = mix(scores(large), credit).advantage
    torch.testing.assert_close(again, mixed.advantage)


def test_without_differences_it_is_advantage_sum() -> None:
    """Empty rows leave each reward its own weight; an image that was not scored has advantage
    0."""
    values = {name: [math.nan, *row[1:]] for name, row in VALUES.items()}
    mix = by_field(weights={"face": {}, "text": {}})
    mixed = mix(scores(values), credit)
    assert torch.equal(mixed.advantage, advantage_sum(scores(values), credit).advantage)
    assert float(mixed.advantage[2]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {}}, "expected weights: {category"),
        ({"weights": {"face": {"a": math.inf}, "text": {}}}, "of finite numbers"),
        ({"weights": {"face": {}}}, "category 'text' \\(tag\\), which has no weights"),
        ({"weights": {"face": {}, "text": {}}, "by": "tags"}, "no 'tags' in its record.*tag"),
        ({"weights": {"face": {"d": 1.0}, "text": {}}}, "weights.face: there is no reward 'd'"),
        ({"weights": {"face": {"c": 1.0}, "text": {}}}, "'c' has the weight 0, so it is only"),
        ({"weights": {"face": {"a": 0.0, "b": 0.0}, "text": {}}}, "face: no reward counts"),
    ],
)
def test_what_is_wrong_with_weights_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_field(**options)(scores(), credit)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (
            "{fn: by_field, weights: {odd: {}}}",
            r"training prompt 1 \('a red dot'\) is of the category 'even' \(tag\), which has no",
        ),
        (
            "{fn: by_field, by: kind, weights: {odd: {}}}",
            r"training prompt 1 \('a red dot'\) has no 'kind'.*it has prompt, tag, held_out",
        ),
        ("{fn: by_field, weights: {odd: {}, even: {blue: 1}}}", "there is no reward 'blue'"),
    ],
)
def test_a_list_that_lacks_a_category_is_refused_before_the_model(
    tmp_path: Path, mix: str, message: str
) -> None:
    unread = "model={fn: toykit.unloadable}"
    with pytest.raises(ConfigError, match=message):
        Trainer(toy(tmp_path, unread, f"aggregate={mix}"))


def test_a_run_weighs_by_the_records_of_its_prompts(tmp_path: Path) -> None:
    """Prompts of the tag `even` learn nothing, those of `odd` all: of six prompts three have
    advantages, and a category that is no text is read as one."""
    none = "{odd: {strict: 0.0}, even: {red: 0.0, strict: 1.0}}"
    rewards = "rewards={red: {fn: toykit.redness}, strict: {fn: toykit.same}}"
    changes = (rewards, f"aggregate={{fn: by_field, weights: {none}}}", "train.prompts=6")
    metrics = Trainer(toy(tmp_path, *changes, "train.updates=1")).step()
    # the share of the variance within prompts: all of it is red's
    assert metrics["share/red"] == pytest.approx(1) and metrics["share/strict"] == 0
    assert metrics["trained"] == 3 * 4 * 3
    mix = by_field(weights={"1": {"a": 2.0}, "2": {}}, by="n")
    found = mix(scores(meta=[{"n": 1}, {"n": 1}, {"n": 2}, {"n": 2}]), credit)
    assert found.parts["a"].tolist() == pytest.approx([-2, 2, -1, 1])
