"""Chunks: sizes, forks, gaps, and where the relative change turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from losskit import on_tensors
from selectkit import choose, draws, forest, forests, path, step_of

from flowrl.algorithms.losses import policy
from flowrl.algorithms.selection._change import relative_change
from flowrl.algorithms.selection.segments import _cut, adaptive, fixed
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout

ppo_clip = on_tensors(policy.ppo_clip)


def steps_of(rollout: Rollout) -> list[int]:
    return sorted({step_of(rollout, v) for v in draws(rollout)})


@pytest.mark.parametrize("branch", [[1] * 17, [1] * 16 + [0]])
def test_published_chunks_on_chains(branch: list[int]) -> None:
    """17 steps, 16 of them trained whether or not the last has noise, in chunks of 2, 3, 4, 7
    (Chunk-GRPO)."""
    ro = forest(branch, groups=[0, 0, 1])
    segment = fixed(ro, sizes=[2, 3, 4, 7])
    ids, counts = torch.unique(segment[segment >= 0], return_counts=True)
    assert len(ids) == 3 * 4 and sorted(counts.tolist()) == [2] * 3 + [3] * 3 + [4] * 3 + [7] * 3
    for root in range(3):
        mine = [v for v in draws(ro) if path(ro, v)[-1] == root]
        heads = [mine[at] for at in (0, 2, 5, 9)]
        assert segment[mine].tolist() == sum(
            ([h] * n for h, n in zip(heads, (2, 3, 4, 7), strict=True)), []
        )
    rest = [v for v in range(len(segment)) if v not in draws(ro)]
    assert bool((segment[rest] == -1).all())


def test_chunk_ratio_is_the_geometric_mean_of_the_step_ratios() -> None:
    """The reference's line: r_chunk == (prod r_k)^(1/size) to 1e-7, in float64."""
    ro = forest([1] * 17, groups=[0, 1])
    node = torch.tensor(draws(ro))
    segment = fixed(ro, sizes=[2, 3, 4, 7])[node]
    log_ratio = 0.1 * torch.randn(
        len(node), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    clip: dict[str, Any] = {"clip_low": 5e-5, "clip_high": 5e-5}
    zero, one = torch.zeros_like(log_ratio), torch.ones_like(log_ratio)
    _, metrics = ppo_clip(log_ratio, zero, one, segment=segment, **clip)
    for head in segment.unique():
        members = log_ratio[segment == head].exp()
        wanted = members.prod() ** (1 / len(members))
        assert float((metrics["ratio"][segment == head] - wanted).abs().max()) < 1e-7
    alone = fixed(ro, sizes=[1] * 16)[node]
    assert torch.equal(alone, node)  # singletons: every draw is its own segment, so the step loss
    assert torch.equal(
        ppo_clip(log_ratio, zero, one, segment=alone, **clip)[0],
        ppo_clip(log_ratio, zero, one, **clip)[0],
    )


def test_forks_begin_segments_of_their_own() -> None:
    """One draw, a fork into two, one draw each; all in one chunk. By hand: node 1 alone, (2, 4) and
    (3, 5)."""
    ro = forest([1, 2, 1, 0])
    assert ro.tree.parent[:6].tolist() == [-1, 0, 1, 1, 2, 3]
    assert fixed(ro, sizes=[3])[:6].tolist() == [-1, 1, 2, 3, 2, 3]
    assert fixed(ro, sizes=[2, 1])[:6].tolist() == [-1, 1, 2, 3, 4, 5]


def test_fork_below_a_stretch_without_noise_is_a_fork_too() -> None:
    """A draw, a step without noise, then two draws from the node stored there: the paths part, so 3
    segments."""
    ro = forest([1, 0, 2, 0])
    made = draws(ro)
    assert len(made) == 3 and fixed(ro, sizes=[2])[made].tolist() == made


def test_a_gap_without_noise_is_no_boundary_but_a_skipped_trained_step_is() -> None:
    """Chain with noise at steps 0 and 2: trained steps 0, 2 are neighbours. Another root drawn at 1
    makes them not."""
    ro = forest([1, 0, 1, 0])
    first, second = draws(ro)
    assert fixed(ro, sizes=[2])[[first, second]].tolist() == [first, first]
    parent = torch.tensor(
        [-1, 0, 1, 2, 3, -1, 5, 6, 7]
    )  # nodes 1, 3 drawn at steps 0, 2; node 7 drawn at step 1
    step = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 4])
    std = torch.tensor([0, 1, 0, 1, 0, 0, 0, 1.0, 0])
    tree = ro.tree._replace(
        parent=parent, step=step, std=std, group=torch.zeros(9, dtype=torch.int64)
    )
    mixed = ro._replace(tree=tree, x=torch.ones(9, 1), leaf=torch.tensor([4, 8]))
    assert fixed(mixed, sizes=[3]).tolist() == [-1, 1, -1, 3, -1, -1, -1, 7, -1]


def test_previews_are_no_forks() -> None:
    """Leaves that hang under the draws of a chain do not cut it."""
    ro = forest([1, 1, 1, 0], previews=True)
    made = draws(ro)
    assert len(ro.leaf) == 4 and fixed(ro, sizes=[3])[made].tolist() == [made[0]] * 3


@settings(deadline=None, max_examples=80)
@given(forests, st.randoms(use_true_random=False))
def test_segments_partition_the_draws_into_runs_inside_chunks(ro: Rollout, rng) -> None:  # type: ignore[no-untyped-def]
    """Properties, by walking in Python: every trained draw has one segment; a segment is a maximal
    unbranched run."""
    steps, made = steps_of(ro), draws(ro)
    sizes: list[int] = []
    while sum(sizes) < len(steps):
        sizes.append(rng.randint(1, len(steps) - sum(sizes)))
    chunk = dict(zip(steps, [j for j, size in enumerate(sizes) for _ in range(size)], strict=True))
    segment = fixed(ro, sizes=sizes).tolist()
    assert [v for v, s in enumerate(segment) if s >= 0] == made
    above = {v: next((u for u in path(ro, v)[1:] if u in made), None) for v in made}
    for v in made:
        u = above[v]
        alone = u is not None and [w for w in made if above[w] == u] == [v]
        joins = u is not None and alone and chunk[step_of(ro, u)] == chunk[step_of(ro, v)]
        assert segment[v] == (segment[u] if joins and u is not None else v)


def test_wrong_sizes_name_both_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"\[2, 3\] add up to 5 steps, but 4 denoising steps are trained"
    ):
        fixed(forest([1] * 5), sizes=[2, 3])
    with pytest.raises(ConfigError, match="at least 1"):
        fixed(forest([1] * 5), sizes=[4, 0])
    with pytest.raises(ConfigError, match="chunks=5 must be from 1 to .* 4"):
        adaptive(forest([1] * 5), chunks=5)
    with pytest.raises(ConfigError, match="chunks=0"):
        adaptive(forest([1] * 5), chunks=0)


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


def test_adaptive_segments_are_the_fixed_ones_of_its_sizes() -> None:
    """A chain whose latents shrink by 1/2, 1/2, 1/8, 1/8: rho = .5 .5 .875 .875 falls nowhere, so
    two and two."""
    ro = forest([1] * 4 + [0])
    ro = ro._replace(x=torch.tensor([1, 0.5, 0.25, 0.25 / 8, 0.25 / 64, 0.0])[:, None])
    assert torch.equal(adaptive(ro, chunks=2), fixed(ro, sizes=[2, 2]))
    ro = ro._replace(
        x=torch.tensor([1, 0.5, 0.25 / 8, 0.25 / 16, 0.25 / 32, 0.0])[:, None]
    )  # .5 .9375 .5 .5
    assert torch.equal(adaptive(ro, chunks=2), fixed(ro, sizes=[1, 3]))
    assert choose(ro, segment=adaptive(ro)).segment is not None


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=20), st.integers(1, 20))
def test_adaptive_sizes_always_fit(rho: list[float], chunks: int) -> None:
    chunks = min(chunks, len(rho))
    sizes = _cut(rho, chunks)
    assert len(sizes) == chunks and sum(sizes) == len(rho) and min(sizes) >= 1
