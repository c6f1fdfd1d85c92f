"""Selections of techniques: which images are trained, and how good and bad ones count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selectkit import choose, draws, forest, forests, path
from torch import Tensor
from trainkit import ONE, trainer_for

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.selection.segments import fixed
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout, SelectInput
from flowrl.techniques import selections
from flowrl.techniques.selections import largest, sign_balance
from flowrl.training.learn import node_table

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


def chains(lengths: list[int], advantages: list[float], groups: list[int]) -> SelectInput:
    """Lay out a chain for each image, of whose draws an earlier selection keeps the first few."""
    ro = forest([1] * max(lengths) + [0], groups=groups)
    advantage, factor = torch.zeros(len(ro.x)), torch.zeros(len(ro.x))
    for leaf in ro.leaf.tolist():
        way = path(ro, leaf)
        image = way[-1]  # roots come first
        advantage[way] = advantages[image]
        factor[way[::-1][1 : 1 + lengths[image]]] = 1
    return choose(ro, weight=advantage)._replace(factor=factor)


def loss_of(data: SelectInput, values: list[float]) -> float:
    """Average factor times value over the trained draws, as the trainer does; a value per image."""
    assert data.factor is not None
    factor = (sign_balance(data) * data.factor).double()
    image = torch.tensor([path(data.rollout, v)[-1] for v in range(len(factor))])
    trained = factor > 0
    return float((factor * torch.tensor(values, dtype=torch.float64)[image])[trained].mean())


def test_the_reference_s_fixture() -> None:
    """B 3.11: good images of 2 draws (value 2) and 4 (value 1), a bad one of 10 (value -.5): the
    mean over draws is .1875, over images .833333, balanced 2/3 x 8/6 - 1/3 x .5 = .722222."""
    data = chains([2, 4, 10], [0.7, 1.0, -1.7], [0, 0, 0])
    assert loss_of(data, [2.0, 1.0, -0.5]) == pytest.approx(0.722222, abs=5e-7)
    trained = data.factor
    assert trained is not None and int(trained.sum()) == 16


def test_each_prompt_is_balanced_by_itself() -> None:
    """Two prompts of three and two images: 3/5 and 2/5 of the loss. The first as above; of the
    second, draws of a good image (value 3) and of one without advantage (value 7), half each."""
    data = chains([2, 4, 10, 1, 5], [0.7, 1.0, -1.7, 0.4, 0.0], [0, 0, 0, 1, 1])
    wanted = 0.6 * (2 / 3 * 8 / 6 - 1 / 3 * 0.5) + 0.4 * (3 / 2 + 7 / 2)
    assert loss_of(data, [2.0, 1.0, -0.5, 3.0, 7.0]) == pytest.approx(wanted, rel=1e-6)


def test_equal_lengths_make_it_the_plain_mean() -> None:
    """Whole chains, whatever their advantages; exactly 1 on every trained draw, 0 elsewhere."""
    ro = forest([1, 1, 1, 0], groups=[0, 0, 0, 1, 1])
    advantage = torch.tensor([0.5, -0.2, -0.3, 1.0, -1.0]).repeat(len(ro.x) // 5)
    found = sign_balance(choose(ro, weight=advantage))
    assert found[draws(ro)].tolist() == pytest.approx([1.0] * 15)
    assert float(found.sum()) == pytest.approx(15)


def test_draws_of_one_segment_are_one_term() -> None:
    """Chunks of 2 and 1 draws: of one image the longer is trained, of the other the shorter. Each
    image has one term, so neither counts more."""
    ro = forest([1, 1, 1, 0], groups=[0, 0])
    segment, advantage = fixed(ro, sizes=[2, 1]), torch.zeros(len(ro.x))
    first, second = (path(ro, leaf)[::-1] for leaf in ro.leaf.tolist())
    advantage[first], advantage[second] = 1.0, -1.0
    factor = torch.zeros(len(ro.x))
    factor[[first[1], first[2], second[3]]] = 1
    data = choose(ro, weight=advantage, segment=segment)._replace(factor=factor)
    assert sign_balance(data)[[first[1], first[2], second[3]]].tolist() == pytest.approx([1] * 3)
    # by itself each draw is a term: 1/2 x 3/2 on the long side, 1/2 x 3 on the short one
    alone = sign_balance(data._replace(segment=None))
    assert alone[[first[1], second[3]]].tolist() == pytest.approx([0.75, 1.5])


def shares(ro: Rollout, advantage: Tensor) -> dict[tuple[int, float], float]:
    """Count the images of each prompt on each side, by walking up from every leaf."""
    own: dict[tuple[int, float], float] = {}
    trained = {*draws(ro)}
    for leaf in ro.leaf.tolist():
        mine = [v for v in path(ro, leaf) if v in trained]
        for v in mine:
            key = int(ro.tree.group[v]), float(advantage[v].sign())
            own[key] = own.get(key, 0.0) + 1 / len(mine)
    return own


@settings(deadline=None, max_examples=60)
@given(forests, st.integers(0, 99))
def test_on_any_forest_a_side_has_the_share_of_its_images(ro: Rollout, seed: int) -> None:
    """The factors of a side of a prompt sum to its share of the images, times all trained draws."""
    data = choose(ro, seed=seed)
    advantage = (data.advantage * 2).round() / 2  # some are 0
    found = sign_balance(data._replace(advantage=advantage)).double()
    counted = shares(ro, advantage)
    for (group, sign), images in counted.items():
        side = (ro.tree.group == group) & (advantage.sign() == sign)
        wanted = images / sum(counted.values()) * len(draws(ro))
        assert float(found[side].sum()) == pytest.approx(wanted, rel=1e-5)
    assert float(found.sum()) == pytest.approx(len(draws(ro)), rel=1e-5)


def test_a_run_balances_what_earlier_selections_left(tmp_path: Path) -> None:
    """On a tree, whose roots keep differently many draws: the table's factor is that of `largest`
    times that of `sign_balance`, which has seen it; in the other order it has not."""
    plan = "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [1, 2], ode_last: 1}"
    half, last = "{fn: largest, share: 0.5}", "{fn: sign_balance}"
    found = []
    for select in (f"[{half}, {last}]", f"[{last}, {half}]"):
        trainer = trainer_for(tmp_path, *ONE, plan, "train.group=8", f"select={select}")
        ro = trainer.sample(trainer.rows())
        reward = torch.rand(len(ro.leaf), generator=torch.Generator().manual_seed(0))
        advantage = group_norm(reward, ro.leaf, ro.tree)
        found.append(node_table(trainer, ro, advantage).factor)
    data: Any = choose(ro, weight=advantage)
    kept = largest(data, share=0.5)
    torch.testing.assert_close(found[0], kept * sign_balance(data._replace(factor=kept)))
    torch.testing.assert_close(found[1], kept * sign_balance(data))
    assert not torch.allclose(found[0], found[1])
    assert float(found[0].sum()) == pytest.approx(float(kept.sum()), rel=1e-5)
    assert trainer.step()["grad_norm"] > 0
