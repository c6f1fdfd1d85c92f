"""Chunk-GRPO's choice of segments: its odds, its correction, and where its chance comes from."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from selectkit import choose, draws, forest, forests, path, step_of
from torch import Tensor

from flowrl.algorithms.selection._change import relative_changes
from flowrl.algorithms.selection.segments import fixed
from flowrl.algorithms.selection.select import _inclusion, chunks
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout

RHO = torch.tensor([4.0, 2.0, 1.0, 1.0])
ODDS = {"none": torch.ones(4), "l1": RHO / 8, "softmax": torch.softmax(RHO, 0)}


def rho_rollout(count: int) -> Rollout:
    """Chains in which rho(k) is RHO at the four trained steps: x' = (1 + rho) x."""
    ro = forest([1] * 4 + [0], groups=[0] * count)
    x = torch.tensor([1.0, 5.0, 15.0, 30.0, 60.0, 60.0])[ro.tree.step]
    return ro._replace(x=x[:, None])


def chunk_rollout(count: int) -> tuple[Rollout, Tensor]:
    ro = forest([1] * 17, groups=[0] * count)
    return ro, fixed(ro, sizes=[2, 3, 4, 7])


@pytest.mark.parametrize("weighted", ODDS)
@pytest.mark.parametrize("corrected", [False, True])
def test_chunks_are_drawn_as_by_multinomial_without_replacement(
    weighted: Any, corrected: bool
) -> None:
    """How often each of 4 chunks is drawn in 3000 samples, against torch.multinomial: within 5
    standard errors of the difference (0.065). Corrected, the mean factor of each is 2/4 as with
    equal odds: within 5 standard errors."""
    count, ro = 3000, rho_rollout(3000)
    segment = fixed(ro, sizes=[1] * 4)
    factor = chunks(choose(ro, segment=segment), share=0.5, weighted=weighted, corrected=corrected)
    odds, generator = ODDS[weighted].expand(count, 4), torch.Generator().manual_seed(9)
    often = torch.zeros(count, 4).scatter(1, torch.multinomial(odds, 2, generator=generator), 1.0)
    got = factor[draws(ro)].reshape(4, count).double()
    found = (got > 0).double().mean(1)
    assert found.tolist() == pytest.approx(often.mean(0).tolist(), abs=0.065)
    if corrected:
        error = got.std(1) / count**0.5
        assert bool(((got.mean(1) - 0.5).abs() < 5 * error + 1e-12).all())
    if weighted == "none" or not corrected:  # equal odds need no correction
        assert got.flatten().tolist() == pytest.approx((got > 0).double().flatten().tolist())


def test_odds_are_means_over_the_chunk() -> None:
    """rho = 4 | 2, 1, 1: one of two chunks, odds 4 to 4/3, so the first is drawn in 3/4 of 2000
    samples ± 5 errors; the second is drawn whole."""
    ro = rho_rollout(2000)
    factor = chunks(choose(ro, segment=fixed(ro, sizes=[1, 3])), share=0.5, weighted="l1")
    first, *rest = factor[draws(ro)].reshape(4, 2000)
    assert all(torch.equal(one, 1 - first) for one in rest)
    assert first.mean().item() == pytest.approx(0.75, abs=0.049)


@pytest.mark.parametrize(("change", "often"), [("sample", [0.8, 0.2]), ("batch", [0.5, 0.5])])
def test_whose_change_weighs_a_chunk(change: Any, often: list[float]) -> None:
    """2 x 2000 samples with rho 4 | 1 and 1 | 4 at two steps: the first chunk is drawn in 4/5 and
    1/5 of them by their own change, in half by the batch's (each mean is 2.5) ± 5 errors."""
    count = 2000
    ro = forest([1, 1, 0], groups=[0] * 2 * count)
    x = torch.tensor([[1.0, 5.0, 10.0, 10.0], [1.0, 2.0, 10.0, 10.0]])
    mine = torch.arange(len(ro.x)) % (2 * count) // count
    ro = ro._replace(x=x[mine, ro.tree.step][:, None])
    choice = choose(ro, segment=fixed(ro, sizes=[1, 1]))
    factor = chunks(choice, share=0.5, weighted="l1", change=change)
    first = factor[draws(ro)].reshape(2, 2, count)[0]
    assert first.mean(1).tolist() == pytest.approx(often, abs=0.05)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=6), st.data())
def test_inclusion_by_enumerating_orders(odds: list[float], data: st.DataObject) -> None:
    """Oracle: the probability of every ordered draw, one by one in Python. Two families of
    different size at once."""
    take = data.draw(st.integers(1, len(odds)))
    wanted = [0.0] * len(odds)
    for order in permutations(range(len(odds)), take):
        chance, left = 1.0, sum(odds)
        for item in order:
            chance, left = chance * odds[item] / left, left - odds[item]
        for item in order:
            wanted[item] += chance
    pair = torch.tensor([*odds, 1.0, 3.0], dtype=torch.float64)
    family = torch.tensor([7] * len(odds) + [2, 2])
    got = _inclusion(pair, family, torch.tensor([take] * len(odds) + [1, 1])).tolist()
    assert got == pytest.approx([*wanted, 0.25, 0.75], rel=1e-7)


@pytest.mark.parametrize("weighted", ["l1", "softmax"])
def test_chunks_by_change_do_not_need_the_latents(weighted: Any) -> None:
    """Where latents stay in their processes, the joined forest has each draw's change in their
    place."""
    ro, segment = chunk_rollout(20)
    away = ro._replace(x=torch.zeros(len(ro.x), 0), change=relative_changes(ro))
    choices = [choose(one, weight=torch.zeros(len(ro.x)), segment=segment) for one in (ro, away)]
    one, two = (chunks(choice, share=0.5, weighted=weighted) for choice in choices)
    assert torch.equal(one, two) and 0 < float(one.mean()) < 1


@settings(deadline=None, max_examples=40)
@given(forests, st.floats(0.2, 1.0), st.sampled_from(list(ODDS)), st.integers(0, 99))
def test_chunk_counts_on_any_forest(ro: Rollout, share: float, weighted: Any, seed: int) -> None:
    """int(n share) of a sample's n segments are trained, each whole."""
    segment = fixed(ro, sizes=[len({step_of(ro, v) for v in draws(ro)})])
    mine: dict[int, set[int]] = {}
    for v in draws(ro):
        mine.setdefault(path(ro, v)[-1], set()).add(int(segment[v]))
    assume(min(int(len(ids) * share) for ids in mine.values()) > 0)
    factor = chunks(choose(ro, segment=segment, seed=seed), share=share, weighted=weighted)
    kept = factor.nonzero().flatten()
    chosen = set(segment[kept].tolist())
    for ids in mine.values():
        assert len(ids & chosen) == int(len(ids) * share)
    assert kept.tolist() == [v for v in draws(ro) if int(segment[v]) in chosen]


def test_the_generator_is_the_only_source_of_randomness() -> None:
    """Another global seed changes nothing; the choice's seed does."""
    ro, segment = chunk_rollout(20)
    found = []
    for state, seed in ((0, 5), (1, 5), (1, 6)):
        torch.manual_seed(state)
        found.append(chunks(choose(ro, segment=segment, seed=seed), share=0.5, weighted="l1"))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


def test_correcting_many_chunks_is_refused() -> None:
    ro = forest([1] * 10)
    choice = choose(ro, segment=fixed(ro, sizes=[1] * 9))
    assert int((chunks(choice, share=0.5, weighted="l1") > 0).sum()) == 4
    with pytest.raises(ConfigError, match="up to 8 segments, got 9"):
        chunks(choice, share=0.5, weighted="l1", corrected=True)
