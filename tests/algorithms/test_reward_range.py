"""Prompts are trained whose images' rewards differ enough, and not too much."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from forests import by_hand
from selectkit import choose, forest
from toykit import toy

from flowrl.algorithms.selection.select import reward_range
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.types import Rollout
from flowrl.training.collect import collect
from flowrl.training.trainer import Trainer

NAN = math.nan
RULE = "select={fn: reward_range, low: LOW, high: HIGH}"


def kept(reward: list[float], groups: list[int], low: float, high: float = math.inf) -> list[int]:
    """Name the prompts that are trained, of one noisy chain for each reward."""
    ro: Rollout = forest([1, 0], groups=groups)
    data = choose(ro)._replace(reward=torch.tensor(reward))
    assert len(ro.leaf) == len(reward)
    factor = reward_range(data, low=low, high=high)
    trained = ro.tree.group[factor > 0].unique().tolist()
    # a prompt is trained whole or not at all
    assert set(factor.tolist()) <= {0.0, 1.0}
    assert factor.tolist() == [float(g in trained) for g in ro.tree.group.tolist()]
    return trained


def test_by_hand_on_ranges_of_five_prompts() -> None:
    """Ranges 0, .3, 2, 1 and, of one scored image, 0. Both ends belong to the band, although .9 -
    .6 is .29999995 in float32."""
    groups = [0, 0, 2, 2, 5, 5, 7, 7, 8, 8]
    reward = [0.4, 0.4, 0.6, 0.9, -1.0, 1.0, 0.0, 1.0, NAN, 0.3]
    assert kept(reward, groups, 0.0) == [0, 2, 5, 7, 8]
    assert kept(reward, groups, 0.3, 1.0) == [2, 7]
    assert kept(reward, groups, 0.31, 1.99) == [7]
    assert kept(reward, groups, 1.5) == [5]
    assert kept(reward, groups, 0.0, 0.1) == [0, 8]


def test_prompts_without_a_score_and_without_any_reward() -> None:
    """Nothing scored: left out, whatever the band. In a rehearsal no reward is known, and all
    stay."""
    assert kept([NAN, NAN, 0.0, 0.5], [0, 0, 1, 1], 0.0) == [1]
    ro = forest([1, 0], groups=[0, 0, 1])
    assert bool((reward_range(choose(ro), low=5.0) == 1).all())


def test_a_tree_s_previews_count_as_images() -> None:
    """A root with two leaves, 1 and 4, and one with a single leaf of 9: ranges 3 and 0. All nodes
    of a prompt have its factor."""
    tree = by_hand([-1, -1, 0, 0, 1], [0, 0, 1, 1, 1], group=[0, 1, 0, 0, 1])
    zero = torch.zeros(5)
    leaf, grid = torch.tensor([2, 3, 4]), torch.linspace(1, 0, 2)
    ro = Rollout(tree, torch.zeros(5, 1), zero, zero, leaf, grid, {}, torch.tensor([0, 1]))
    data = choose(ro)._replace(reward=torch.tensor([1.0, 4, 9]))
    assert reward_range(data, low=1.0, high=3.0).tolist() == [1, 0, 1, 1, 0]


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.5), (0.6, 0.2), (-0.1, 1.0)])
def test_a_band_that_holds_nothing_is_refused_before_training(
    tmp_path: Path, low: float, high: float
) -> None:
    rule = RULE.replace("LOW", str(low)).replace("HIGH", str(high))
    with pytest.raises(ConfigError, match="reward_range: expected 0 <= low < high, got low"):
        Trainer(toy(tmp_path, "model={fn: toykit.unloadable}", rule))


def test_a_run_trains_the_prompts_of_the_band_alone(tmp_path: Path) -> None:
    """Between the ranges of an iteration's two prompts, one of them is trained: 4 images of 3
    draws, half of all. A band on another scale passes the rehearsal, keeps nothing of an iteration,
    and says so."""
    changes = ["rewards={red: {fn: toykit.redness}}", "train.updates=1"]
    run = Trainer(toy(tmp_path, *changes))
    found = collect(run, run.rows())
    group, value = found.batch.group, found.values["red"]
    spans = [float(value[group == g].max() - value[group == g].min()) for g in (0, 1)]
    assert abs(spans[0] - spans[1]) > 1e-4
    middle = sum(spans) / 2
    assert run.step()["trained"] == 24
    for low, high in ((middle, 9.0), (0.0, middle)):
        rule = RULE.replace("LOW", str(low)).replace("HIGH", str(high))
        assert Trainer(toy(tmp_path, *changes, rule)).step()["trained"] == 12
    far = RULE.replace("LOW", "50.0").replace("HIGH", "60.0")
    with pytest.raises(RunError, match="`select` left none of 24 decisions"):
        Trainer(toy(tmp_path, *changes, far)).step()
