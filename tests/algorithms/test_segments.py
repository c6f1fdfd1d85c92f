"""Chunks: sizes, forks, gaps, and where the relative change turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forests import by_hand
from hypothesis import given, settings
from hypothesis import strategies as st
from selectkit import choose, draws, forest, forests, path, step_of

from flowrl.algorithms.selection._change import relative_change
from flowrl.algorithms.selection.segments import _cut, adaptive, fixed
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout


@pytest.mark.parametrize("branch", [[1] * 17, [1] * 16 + [0]])
def test_published_chunks_on_chains(branch: list[int]) -> None:
    """17 steps, 16 of them trained whether or not the last has noise, in chunks of 2, 3, 4, 7
    (Chunk-GRPO)."""
    ro = forest(branch, groups=[0, 0, 1])
    segment = fixed(ro, sizes=[2, 3, 4, 7])
    heads = [0] * 2 + [2] * 3 + [5] * 4 + [9] * 7
    for root in range(3):
        mine = [v for v in draws(ro) if path(ro, v)[-1] == root]
        assert segment[mine].tolist() == [mine[head] for head in heads]
    assert (segment >= 0).nonzero().flatten().tolist() == draws(ro)


@pytest.mark.parametrize(
    ("branch", "sizes", "places"),
    [  # place among the draws of the head of each draw's segment, by hand
        ([1] * 4 + [0], [1] * 4, [0, 1, 2, 3]),
        ([1, 2, 1, 0], [3], [0, 1, 2, 1, 2]),  # paths part: the fork begins segments of its own
        ([1, 2, 1, 0], [2, 1], [0, 1, 2, 3, 4]),
        ([1, 0, 2, 0], [2], [0, 1, 2]),  # a fork below a stretch without noise is one too
        ([1, 0, 1, 0], [2], [0, 0]),  # a gap without noise is no boundary
    ],
)
def test_segments_by_hand(branch: list[int], sizes: list[int], places: list[int]) -> None:
    ro = forest(branch)
    made = draws(ro)
    assert fixed(ro, sizes=sizes)[made].tolist() == [made[place] for place in places]


def test_a_step_that_others_train_is_a_boundary() -> None:
    """Nodes 1 and 3 are drawn at steps 0 and 2 of one chain, node 7 of another at step 1."""
    parent, step = [-1, 0, 1, 2, 3, -1, 5, 6, 7], [0, 1, 2, 3, 4, 0, 1, 2, 4]
    ro = forest([1, 0, 1, 0])
    tree = by_hand(parent, step, [0.0, 1, 0, 1, 0, 0, 0, 1, 0])
    mixed = ro._replace(tree=tree, x=torch.ones(9, 1), leaf=torch.tensor([4, 8]))
    assert fixed(mixed, sizes=[3]).tolist() == [-1, 1, -1, 3, -1, -1, -1, 7, -1]


def test_previews_are_no_forks() -> None:
    """Leaves that hang under the draws of a chain do not cut it."""
    ro = forest([1, 1, 1, 0], previews=True)
    made = draws(ro)
    assert len(ro.leaf) == 4 and fixed(ro, sizes=[3])[made].tolist() == [made[0]] * 3


@settings(deadline=None, max_examples=80)
@given(forests, st.randoms(use_true_random=False))
def test_segments_partition_the_draws_into_runs_inside_chunks(ro: Rollout, rng: Any) -> None:
    """Properties, by walking in Python: every trained draw has one segment; a segment is a maximal
    unbranched run."""
    made = draws(ro)
    steps = sorted({step_of(ro, v) for v in made})
    sizes: list[int] = []
    while sum(sizes) < len(steps):
        sizes.append(rng.randint(1, len(steps) - sum(sizes)))
    places = [j for j, size in enumerate(sizes) for _ in range(size)]
    chunk = dict(zip(steps, places, strict=True))
    segment = fixed(ro, sizes=sizes).tolist()
    assert [v for v, s in enumerate(segment) if s >= 0] == made
    above = {v: next(filter(made.__contains__, path(ro, v)[1:]), None) for v in made}
    for v in made:
        u = above[v]
        alone = u is not None and [w for w in made if above[w] == u] == [v]
        joins = u is not None and alone and chunk[step_of(ro, u)] == chunk[step_of(ro, v)]
        assert segment[v] == (segment[u] if joins and u is not None else v)


@pytest.mark.parametrize(
    ("segments", "options", "message"),
    [
        (fixed, {"sizes": [2, 3]}, r"\[2, 3\] add up to 5 steps, but 4 .* steps are trained"),
        (fixed, {"sizes": [4, 0]}, "at least 1"),
        (adaptive, {"chunks": 5}, "chunks=5 must be from 1 to .* 4"),
        (adaptive, {"chunks": 0}, "chunks=0"),
    ],
)
def test_wrong_sizes_name_both_numbers(segments: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        segments(forest([1] * 5), **options)


# --------------------------------------------------------------------------------------- adaptive


def test_relative_change_by_hand() -> None:
    """|x' - x|_1 / |x|_1 is 3/2 and 1/4 for the two draws of step 0, 2/3 and 0 for those of step
    1."""
    ro = forest([2, 1, 0])
    x = torch.tensor([[1.0, -1], [2, 1], [1, -1.5], [3, 2], [1, -1.5], [0, 0], [0, 0]])
    rho = relative_change(ro._replace(x=x))
    assert ro.tree.parent.tolist() == [-1, 0, 0, 1, 2, 3, 4]
    wanted = [(3 / 2 + 1 / 4) / 2, (2 / 3 + 0) / 2]
    assert rho[:2].tolist() == pytest.approx(wanted) and bool(rho[2].isnan())


@pytest.mark.parametrize(
    ("rho", "chunks", "sizes"),
    [  # by hand
        ([5, 4, 3, 2, 1, 0.5], 1, [6]),
        ([5, 4, 3, 2, 1, 0.5], 2, [3, 3]),  # no turn: the middle
        ([5, 4, 3, 2, 1, 0.5], 3, [1, 2, 3]),  # of equally long ones the noisiest
        ([5, 4, 3, 2, 1, 0.5], 4, [1, 2, 1, 2]),  # the longest
        ([1, 2, 5, 4, 3, 2], 2, [2, 4]),  # turns at its third step, which begins the second chunk
        ([1, 2, 5, 4, 3, 2], 3, [2, 2, 2]),  # then the longer rest, which does not turn
        ([4, 3, 2, 3, 4, 9, 1, 0], 2, [5, 3]),  # of the two turns, the sharper: 9
        ([4, 3, 2, 3, 4, 9, 1, 0], 3, [2, 3, 3]),  # then the other
        ([2, 2, 2, 2], 2, [2, 2]),
        ([3, 1, 2], 3, [1, 1, 1]),
    ],
)
def test_adaptive_cuts(rho: list[float], chunks: int, sizes: list[int]) -> None:
    assert _cut(rho, chunks) == sizes


@pytest.mark.parametrize(
    ("x", "sizes"),
    [
        ([1, 1 / 2, 1 / 4, 1 / 32, 1 / 256, 0.0], [2, 2]),  # rho = .5 .5 .875 .875 falls nowhere
        ([1, 1 / 2, 1 / 32, 1 / 64, 1 / 128, 0.0], [1, 3]),  # .5 .9375 .5 .5
    ],
)
def test_adaptive_segments_are_the_fixed_ones_of_its_sizes(x: list[float], sizes: Any) -> None:
    ro = forest([1] * 4 + [0])._replace(x=torch.tensor(x)[:, None])
    assert torch.equal(adaptive(ro, chunks=2), fixed(ro, sizes=sizes))
    assert choose(ro, segment=adaptive(ro)).segment is not None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(1, 20))
def test_adaptive_sizes_always_fit(rho: list[float], chunks: int) -> None:
    chunks = min(chunks, len(rho))
    sizes = _cut(rho, chunks)
    assert len(sizes) == chunks and sum(sizes) == len(rho) and min(sizes) >= 1
