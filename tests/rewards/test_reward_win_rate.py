"""Win rates within a group: the published example, rank statistics, biased and failing judges."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from torch import Tensor
from winkit import Judge, Scorer, batch_of, number_of, with_judge

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch
from rewards._common.pairs import _ring, some_pairs, verdict

NAN = float("nan")
PUBLISHED = {(0, 1): 1.0, (0, 2): 0.0, (0, 3): 1.0, (1, 2): 1.0, (1, 3): 0.5, (2, 3): 1.0}


def fair(a: int, b: int) -> float:
    return PUBLISHED[a, b] if a < b else 1 - PUBLISHED[b, a]


def higher(a: int, b: int) -> float:
    return float(a > b)


def first_place(a: int, b: int) -> float:
    return 1.0


@pytest.mark.parametrize("swap", [True, False])
def test_the_published_example(swap: bool) -> None:
    """Worked example of Pref-GRPO's rule (rates rounded to 3 places, std with n - 1)."""
    rate = with_judge(Judge(fair), swap=swap)(batch_of([0] * 4))
    assert rate.dtype == torch.float32
    torch.testing.assert_close(rate, torch.tensor([2 / 3, 1 / 2, 2 / 3, 1 / 6]))
    rounded = rate.double().mul(1000).round() / 1000
    advantage = (rounded - rounded.mean()) / (rounded.std() + 1e-8)
    expected = torch.tensor([0.707460, -0.001061, 0.707460, -1.413860], dtype=torch.float64)
    torch.testing.assert_close(advantage, expected, atol=1e-6, rtol=0)
    # without the pair (0, 1): 0 has a loss and a win, 1 a win and a tie; 2 and 3 as before
    hides = Judge(lambda a, b: NAN if (a, b) == (0, 1) else fair(a, b))
    rate = with_judge(hides, swap=swap)(batch_of([0] * 4))
    torch.testing.assert_close(rate, torch.tensor([1 / 2, 3 / 4, 2 / 3, 1 / 6]))


PLACE = st.integers(0, 13)
TABLES = st.dictionaries(st.tuples(PLACE, PLACE), st.floats(0, 1, width=32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=14), TABLES, st.booleans())
def test_rates_of_a_group_sum_to_half_its_size(
    group: list[int], table: dict[tuple[int, int], float], swap: bool
) -> None:
    """G (G - 1) / 2 pairs hand out one win each, over G - 1: G / 2, however biased the judge."""
    rate = with_judge(Judge(lambda a, b: table.get((a, b), 1.0)), swap=swap)(batch_of(group))
    for number in set(group):
        own = rate[torch.tensor(group) == number]
        if len(own) == 1:
            assert bool(own.isnan().all())
        else:
            assert float(own.sum()) == pytest.approx(len(own) / 2, abs=1e-5)
            assert float(own.min()) >= 0 and float(own.max()) <= 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_a_scorer_gives_ranks(scores: list[int], random: Any) -> None:
    """Oracle: scipy's mean ranks; an image of rank r beats r - 1 of the G - 1 others."""
    order = list(range(len(scores)))
    random.shuffle(order)
    rate = with_judge(Scorer([float(s) for s in scores]))(batch_of([7] * len(scores), order))
    expected = (rankdata([scores[i] for i in order]) - 1) / (len(scores) - 1)
    torch.testing.assert_close(rate.double(), torch.tensor(expected), atol=1e-6, rtol=0)


def test_groups_do_not_meet_and_all_pairs_go_in_one_call() -> None:
    """A judge that takes places gets each image once."""

    class Places(Judge):
        def compare_pairs(
            self, images: Tensor, first: Tensor, second: Tensor, *words: list[Any]
        ) -> Tensor:
            assert len(images) == 5
            return super().compare(images[first], images[second], *words)

    forward = [(0, 2), (0, 4), (1, 3), (2, 4)]
    words = [("prompt 5", 5), ("prompt 5", 5), ("prompt 2", 2), ("prompt 5", 5)]
    for judge in (Judge(higher), Places(higher)):
        rate = with_judge(judge)(batch_of([5, 2, 5, 2, 5]))
        assert rate.tolist() == [0, 0, 0.5, 1, 1]  # 0 < 2 < 4 in one group, 1 < 3 in the other
        assert judge.calls == [forward + [(b, a) for a, b in forward]]
        assert judge.words == 2 * words


def test_who_is_shown_first_matters_to_a_biased_judge_only() -> None:
    order = [3, 1, 0, 2]
    batch, shuffled = batch_of([0] * 4), batch_of([0] * 4, order)
    for swap, rule, same in (
        (True, fair, True),
        (True, first_place, True),
        (False, fair, True),
        (False, first_place, False),
    ):
        rate = with_judge(Judge(rule), swap=swap)
        assert torch.equal(rate(batch)[torch.tensor(order)], rate(shuffled)) == same
    assert with_judge(Judge(first_place))(batch_of([0] * 5)).tolist() == [0.5] * 5
    # one order: image i of 5 is shown first to the 4 - i after it
    once = with_judge(Judge(first_place), swap=False)(batch_of([0] * 5))
    assert once.tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_both_orders_are_averaged() -> None:
    for forward, backward, expected in (
        (1.0, 0.0, 1.0),  # both name the first
        (0.0, 1.0, 0.0),
        (1.0, 1.0, 0.5),  # both name the one shown first
        (1.0, 0.5, 0.75),  # a win and a tie
        (0.9, 0.2, 0.85),  # shares: mean of .9 and 1 - .2
        (0.9, 0.7, 0.5),  # shares that name different winners, .9 and .3
        (0.5, 0.5, 0.5),
    ):
        judge = Judge(lambda a, b: forward if a < b else backward)  # noqa: B023 - used at once
        rate = with_judge(judge)(batch_of([0, 0]))
        torch.testing.assert_close(rate, torch.tensor([expected, 1 - expected]))


def test_an_image_without_an_answer_is_not_scored() -> None:
    silent = Judge(lambda a, b: NAN if 2 in (a, b) else float(a > b))
    rate = with_judge(silent)(batch_of([0, 0, 0]))
    assert rate[:2].tolist() == [0, 1] and bool(rate[2].isnan())
    scored = with_judge(Scorer([3.0, NAN, 3.0, 1.0]))(batch_of([0] * 4))
    assert scored[[0, 2, 3]].tolist() == [0.75, 0.75, 0] and bool(scored[1].isnan())
    out = verdict(torch.tensor([2.0, 1, 1, NAN, 1]), torch.tensor([1.0, 2, 1, 1, NAN]))
    assert out[:3].tolist() == [1, 0, 0.5] and bool(out[3:].isnan().all())


def test_a_lone_image_is_not_scored_and_nobody_is_asked() -> None:
    judge = Judge(first_place)
    assert bool(with_judge(judge)(batch_of([0, 1, 2])).isnan().all()) and judge.calls == []
    for options in ({}, {"max_pairs": 3}):
        assert with_judge(judge, **options)(batch_of([])).shape == (0,)


# ----------------------------------------------------------------------------- a share of the pairs


@pytest.mark.parametrize("size", range(2, 13))
def test_the_ring_has_every_pair_once_and_no_one_is_left_out(size: int) -> None:
    ring = _ring(size)
    pairs = torch.combinations(torch.arange(size), 2).tolist()
    assert sorted(sorted(pair) for pair in ring) == pairs
    for limit in range((size + 1) // 2, len(ring) + 1):
        times = torch.bincount(torch.tensor(ring[:limit]).flatten(), minlength=size)
        assert int(times.min()) >= 1 and int(times.max()) - int(times.min()) <= 2


def test_the_choice_of_pairs_follows_the_images() -> None:
    ids = list(range(16))
    batch, back = batch_of([0] * 8 + [1] * 8), batch_of([1] * 8 + [0] * 8, ids[::-1])

    def chosen(batch: RewardBatch, seed: int) -> list[tuple[int, int]]:
        first, second = some_pairs(batch.group, batch.images, 10, seed, option="it")
        a, b = number_of(batch.images[first]), number_of(batch.images[second])
        return sorted(zip(a, b, strict=True))

    pairs = chosen(batch, 0)
    assert len(pairs) == 20 == len({frozenset(pair) for pair in pairs})
    assert all((a < 8) == (b < 8) for a, b in pairs)
    assert pairs == chosen(back, 0)
    assert len({tuple(chosen(batch, seed)) for seed in range(5)}) == 5


def test_fewer_pairs_estimate_the_same_rates() -> None:
    """Expected: wins counted by hand from what was asked."""
    batch, judge = batch_of([0] * 8), Judge(higher)
    rate = with_judge(judge, max_pairs=12)(batch)
    assert [len(call) for call in judge.calls] == [24]
    wins: dict[int, list[float]] = {i: [] for i in range(8)}
    for a, b in judge.calls[0][:12]:
        wins[a].append(float(a > b))
        wins[b].append(float(b > a))
    torch.testing.assert_close(rate, torch.tensor([sum(won) / len(won) for won in wins.values()]))
    full = with_judge(judge)(batch)
    for limit in (28, 1000):
        assert torch.equal(with_judge(judge, max_pairs=limit)(batch), full)
    with pytest.raises(ConfigError, match="at least 4 for groups of 8"):
        with_judge(judge, max_pairs=3)(batch)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 9, 16])
def test_a_tournament_asks_twice_per_image_and_knows_the_best(size: int) -> None:
    """A fair judge: the best image is first, alone, 2 (G - 1) pairs are asked in 1 + ceil(log2 G)
    calls and a group sums to G/2, also beside another group and whatever the order."""
    for seed in range(40):
        judge = Judge(higher)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
        found = with_judge(judge, swap=False, schedule="tournament")(
            batch_of([0] * size + [1] * 3, [*order, 200, 201, 202])
        )
        best = order.index(size - 1)
        assert float(found[best]) == 1 and float(found[-1]) == 1, order
        assert int((found[:size] == 1).sum()) == 1 and found[:size].sum() == pytest.approx(size / 2)
        asked = [pair for call in judge.calls for pair in call]
        assert len(asked) == 2 * (size - 1) + 4
        assert len(judge.calls) == 1 + max(2, (size - 1).bit_length())


def test_a_tournament_of_equals_is_a_tie_and_a_missing_answer_is_missing() -> None:
    even = with_judge(Judge(lambda a, b: 0.5), schedule="tournament")(batch_of([0] * 8))
    assert even.tolist() == [0.5] * 8
    mute = with_judge(Judge(lambda a, b: NAN), schedule="tournament")(batch_of([0] * 4))
    assert bool(mute.isnan().all())
    with pytest.raises(ConfigError, match="schedule all"):
        with_judge(Judge(higher), schedule="tournament", max_pairs=3)


def test_tiny_noise_misleads_scores_and_not_win_rates() -> None:
    """Pref-GRPO's claim on synthetic data. Half of 200 groups have 8 images of one quality, half
    have two of which are better; scores have noise of 0.001, and a judge calls a tie what differs
    by less than 0.01.

    Scores, divided by the group's spread, give equal images advantages as large as different ones
    (both have a mean square of 1 by construction). Win rates give equal images exactly 0, and
    the different ones the two best: by hand, 2 of 8 with rate 13/14 and the others 5/14.
    """
    from flowrl.algorithms.credit.advantages import group_norm
    from flowrl.core.types import Tree

    draw = torch.Generator().manual_seed(0)
    quality = torch.zeros(200, 8)
    quality[100:, :2] = 0.05
    noise = 1e-3 * torch.randn(200, 8, generator=draw, dtype=torch.float64)
    table = (0.5 + quality + noise).flatten()
    group = torch.arange(200).repeat_interleave(8)
    leaf = torch.arange(1600)
    tree = Tree(torch.full_like(leaf, -1), torch.zeros_like(leaf), leaf.float() * 0, group)

    def scores(batch: RewardBatch) -> Tensor:
        return table

    images = torch.zeros(1600, 3, 1, 1)
    batch = RewardBatch(images, [""] * 1600, group, [{}] * 1600, torch.zeros(1600))
    rate = with_judge(scores, tie=0.01)(batch)
    found = {}
    for name, reward in (("scores", table.float()), ("rates", rate)):
        found[name] = group_norm(reward, leaf, tree, ddof=1).view(200, 8)
    equal, better = {}, {}
    for name, a in found.items():
        equal[name] = float(a[:100].square().mean())
        better[name] = float(a[100:, :2].mean())
    assert equal["rates"] == 0 and better["rates"] > 1.5
    assert equal["scores"] > 0.5 and better["scores"] > 1.5
    assert rate.view(200, 8)[150].tolist() == pytest.approx([13 / 14] * 2 + [5 / 14] * 6)
