"""Balanced Aggregation: the reference's fixture, forests by hand, and what a run hands over."""

from __future__ import annotations

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
from flowrl.core.types import Rollout, SelectInput
from flowrl.techniques.selections import largest, sign_balance
from flowrl.training.node_table import node_table


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
