"""Selections: counts, published examples, laws of random choice, and what they refuse."""

from __future__ import annotations

from collections import Counter
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from selectkit import choose, draws, forest, forests, path, rake, step_of
from torch import Tensor

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.selection._change import changes
from flowrl.algorithms.selection._inclusion import inclusion
from flowrl.algorithms.selection.segments import fixed
from flowrl.algorithms.selection.select import (
    best_of_n,
    chunks,
    depth_pruning,
    fraction,
    noise_weight,
    width_pruning,
)
from flowrl.algorithms.transitions import flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.types import Rollout


def kept(factor: Tensor) -> list[int]:
    return factor.nonzero().flatten().tolist()


def by_root(ro: Rollout, nodes: list[int]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for v in nodes:
        out.setdefault(path(ro, v)[-1], []).append(v)
    return out


# ----------------------------------------------------------------------------------------- fraction


@pytest.mark.parametrize(("steps", "share"), [(16, 0.6), (12, 0.6), (16, 1.0), (10, 0.35)])
def test_dance_trains_a_fraction_of_all_steps_but_the_last(steps: int, share: float) -> None:
    """int((N - 1) share) per sample, 9 for DanceGRPO's N = 16; each sample has an order of its
    own."""
    ro = forest([1] * steps, groups=[0] * 5 + [1] * 5)
    counts = {
        root: len(v) for root, v in by_root(ro, kept(fraction(choose(ro), share=share))).items()
    }
    assert counts == dict.fromkeys(range(10), int((steps - 1) * share))
    if (steps, share) == (16, 0.6):
        assert counts[0] == 9
        chosen = by_root(ro, kept(fraction(choose(ro), share=share)))
        assert len({tuple(step_of(ro, v) for v in nodes) for nodes in chosen.values()}) > 1


def test_fraction_is_uniform_and_repeatable() -> None:
    """2000 samples: each of 9 steps is trained in 5/9 of them, ± 4 standard errors (0.044); same
    seed, same choice."""
    ro = forest([1] * 10, groups=[0] * 2000)
    factor = fraction(choose(ro), share=0.6)
    share = [
        np.mean([float(factor[v]) for v in draws(ro)[k * 2000 : (k + 1) * 2000]]) for k in range(9)
    ]
    assert share == pytest.approx([5 / 9] * 9, abs=0.045)
    assert torch.equal(factor, fraction(choose(ro), share=0.6))
    assert not torch.equal(factor, fraction(choose(ro, seed=1), share=0.6))


@settings(deadline=None, max_examples=60)
@given(forests, st.floats(0.05, 1.0), st.integers(0, 99))
def test_fraction_counts_on_any_forest(ro: Rollout, share: float, seed: int) -> None:
    sizes = {root: len(nodes) for root, nodes in by_root(ro, draws(ro)).items()}
    choice = choose(ro, seed=seed)
    if min(int(n * share) for n in sizes.values()) == 0:
        with pytest.raises(ConfigError, match="leaves none"):
            fraction(choice, share=share)
        return
    factor = fraction(choice, share=share)
    assert (
        factor.dtype == torch.float32
        and set(factor.tolist()) <= {0.0, 1.0}
        and set(kept(factor)) <= set(draws(ro))
    )
    assert {root: len(v) for root, v in by_root(ro, kept(factor)).items()} == {
        r: int(n * share) for r, n in sizes.items()
    }


# ---------------------------------------------------------------------------------------- best of n


def test_best_of_24_keeps_four_best_and_four_worst() -> None:
    """DanceGRPO's numbers. Rewards are a permutation of 0 ... 23, so ranks are known; weights by
    group_norm."""
    ro = forest([1, 1, 1, 0], groups=[0] * 24 + [1] * 24)
    reward = torch.randperm(24, generator=torch.Generator().manual_seed(0)).float().repeat(2)
    weight = group_norm(reward, ro.leaf, ro.tree)
    factor = best_of_n(choose(ro, weight=weight), top=4, bottom=4)
    wanted = [root for root in range(48) if reward[root] < 4 or reward[root] > 19]
    assert {r: len(v) for r, v in by_root(ro, kept(factor)).items()} == dict.fromkeys(wanted, 3)
    assert set(kept(factor)) <= set(draws(ro))


def test_ties_go_by_leaf_order() -> None:
    """Weights 1 1 1 0 0 0: the first leaf is the best, the last the worst."""
    ro = forest([1, 0], groups=[0] * 6)
    weight = torch.zeros(len(ro.x))
    weight[ro.leaf[:3]] = 1
    factor = best_of_n(choose(ro, weight=weight), top=2, bottom=1)
    assert kept(factor) == [6 + at for at in (0, 1, 5)]


@settings(deadline=None, max_examples=60)
@given(forests, st.integers(0, 3), st.integers(0, 3), st.integers(0, 99))
def test_best_of_n_trains_what_is_above_a_kept_leaf(
    ro: Rollout, top: int, bottom: int, seed: int
) -> None:
    """Oracle: sort each prompt's leaves in Python, walk up from those kept."""
    leaves = ro.leaf.tolist()
    choice = choose(ro, seed=seed)
    weight = choice.advantage.tolist()
    groups = [[v for v in leaves if ro.tree.group[v] == g] for g in ro.group_ids]
    assume(1 <= top + bottom <= min(map(len, groups)))
    ranked = [sorted(group, key=lambda v: -weight[v]) for group in groups]
    chosen = [v for group in ranked for v in group[:top] + group[len(group) - bottom :]]
    above = {u for v in chosen for u in path(ro, v)}
    assert kept(best_of_n(choice, top=top, bottom=bottom)) == [v for v in draws(ro) if v in above]


# --------------------------------------------------------------------------------------- BranchGRPO


def branch_tree() -> Rollout:
    """BranchGRPO's tree: N = 20, splits 0, 3, 6, 9 -> 16 leaves, 218 edges of which the last 16 are
    not trained."""
    ro = forest([2 if k in (0, 3, 6, 9) else 1 for k in range(20)])
    assert len(ro.leaf) == 16 and int((ro.tree.std > 0).sum()) == 218 and len(draws(ro)) == 202
    return ro


@pytest.mark.parametrize(
    ("iteration", "low"), [(0, 15), (29, 15), (30, 14), (179, 10), (180, 9), (5000, 9)]
)
def test_depth_pruning_schedule(iteration: int, low: int) -> None:
    """Depths {15..18}, one shallower every 30 iterations until the shallow end is 9."""
    ro = branch_tree()
    factor = depth_pruning(choose(ro, iteration=iteration), first=15, size=4)
    assert kept(factor) == [v for v in draws(ro) if not low <= ro.tree.step[v] <= low + 3]
    assert sum(16 if d > 9 else 8 for d in range(low, low + 4)) == len(draws(ro)) - len(
        kept(factor)
    )


def test_width_pruning_per_branch() -> None:
    """16 branches of 10 draws behind the split (depths 11 to 20); half of each, its best, and all
    58 draws above are kept; depth 20 is never trained."""
    ro = branch_tree()
    choice = choose(ro)
    chosen = kept(width_pruning(choice, mode="per_branch", share=0.5))
    for leaf in ro.leaf.tolist():
        branch = [v for v in path(ro, leaf) if ro.tree.step[v] > 10]
        best = sorted(branch, key=lambda v: -float(choice.advantage[v]))[:5]
        assert len(branch) == 10 and {v for v in branch if v in chosen} == set(best) - {leaf}
    above = [v for v in draws(ro) if ro.tree.step[v] <= 10]
    assert len(above) == 58 and [v for v in chosen if ro.tree.step[v] <= 10] == above


@pytest.mark.parametrize(("share", "best", "worst"), [(0.5, 80, 80), (0.01, 1, 2)])
def test_width_pruning_extremes_over_all_trees(share: float, best: int, worst: int) -> None:
    """2 trees with 160 draws each behind the last split: ``k = max(2, int(320 share))``, k // 2
    best and the other worst of all."""
    ro = forest([2 if k in (0, 3, 6, 9) else 1 for k in range(20)], groups=[0, 1])
    weight = torch.randn(len(ro.x), generator=torch.Generator().manual_seed(3)) + 5 * ro.tree.group
    chosen = kept(width_pruning(choose(ro, weight=weight), mode="extremes", share=share))
    late = [v for v in range(len(weight)) if ro.tree.std[v] > 0 and ro.tree.step[v] > 10]
    late = sorted(late, key=lambda v: -float(weight[v]))
    assert len(late) == 320
    wanted = {*late[:best], *late[-worst:]} | {v for v in draws(ro) if ro.tree.step[v] <= 10}
    assert set(chosen) == wanted & set(draws(ro))


def test_equal_weights_keep_the_noisier_half_of_a_branch() -> None:
    """group_norm gives all draws behind the last split the weight of their leaf."""
    ro = forest([1, 2, 1, 1, 1, 0])
    weight = group_norm(torch.tensor([0.0, 1.0]), ro.leaf, ro.tree)
    chosen = kept(width_pruning(choose(ro, weight=weight), mode="per_branch", share=0.5))
    assert [int(ro.tree.step[v]) for v in chosen] == [1, 2, 2, 3, 3]


def test_the_published_tree_keeps_138_of_218_draws() -> None:
    """58 up to the split and 5 of the 10 behind each of its 16 draws. Of equal advantages the
    noisier 5, so all 138 are trained here too."""
    ro = branch_tree()
    weight = group_norm(torch.arange(16.0), ro.leaf, ro.tree)
    assert len(kept(width_pruning(choose(ro, weight=weight), mode="per_branch", share=0.5))) == 138


def test_a_rake_has_no_draw_behind_its_last_split() -> None:
    """Two draws under the trunk nodes of steps 0 and 1."""
    ro = rake()
    choice = choose(ro, weight=torch.arange(9.0))
    with pytest.raises(ConfigError, match=r"behind the last split, step 1 \(counted from 0\)"):
        width_pruning(choice, mode="per_branch", share=0.5)
    assert fixed(ro, sizes=[2]).tolist() == [
        -1,
        1,
        2,
        -1,
        -1,
        -1,
        6,
        7,
        -1,
    ]  # no draw is above another
    assert len(kept(fraction(choice, share=0.5))) == 2


# ------------------------------------------------------------------------------------- noise weight


def sampled_std(sigmas: Tensor, noise_scale: float) -> Tensor:
    """The std of Flow-GRPO's step at each step of a grid."""
    x = torch.zeros(len(sigmas) - 1, 1)
    return flow_sde(x, x, sigmas[:-1], sigmas[1:], torch.full((len(x),), noise_scale)).std


@pytest.mark.parametrize(
    ("noise_scale", "constant", "published"),
    [(0.7, 2.252, 2.25), (0.9, 1.726, 1.73)],
    ids=["SD3.5", "FLUX at 1024 px"],
)
def test_noise_weight_gives_the_published_constants(
    noise_scale: float, constant: float, published: float
) -> None:
    """w = C s; C = 2.252 and 1.726 by the reference, whose code has 2.25 and 1.73. Grids:
    diffusers' own scheduler."""
    if noise_scale == 0.7:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(10)
    else:
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        scheduler.set_timesteps(sigmas=np.linspace(1, 0.1, 10).tolist(), mu=1.15)
    std = sampled_std(scheduler.sigmas, noise_scale)
    ro = forest([1] * 10, groups=[0, 0, 1], std=std)
    made = torch.tensor(draws(ro))
    factor = noise_weight(choose(ro))
    c = (factor / ro.tree.std)[made]
    assert c.tolist() == pytest.approx([constant] * 27, abs=5e-4) and c[0].item() == pytest.approx(
        published, abs=6e-3
    )
    assert factor[made].mean().item() == pytest.approx(1, abs=1e-6)
    if noise_scale == 0.7:  # the reference's std of each step
        listed = [0.7000, 0.7430, 0.5362, 0.4459, 0.3918, 0.3528, 0.3191, 0.2820, 0.2254]
        assert factor[made][::3].tolist() == pytest.approx(
            [s / np.mean(listed) for s in listed], abs=3e-4
        )


def test_noise_weight_counts_each_trained_step_once() -> None:
    """A tree has 2 draws at the first and 4 at the second step; the mean of 0.2 and 0.6 is 0.4 all
    the same."""
    ro = forest([2, 2, 0, 1], std=torch.tensor([0.2, 0.6, 0.0, 5.0]))
    factor = noise_weight(choose(ro))
    assert factor[draws(ro)].tolist() == pytest.approx([0.5] * 2 + [1.5] * 4)
    assert int((factor > 0).sum()) == 6


def test_the_square_of_the_noise_gives_the_gradients_of_the_log_prob_of_cps() -> None:
    """CPS' code scores a draw by -mean((x_next - mean)^2); flowrl by the normalised density.

    Oracle: autograd of both with respect to the mean. Weighted by std^2 / mean std^2 of the steps
    the second is the first up to 2 mean(std^2).
    """
    ro = forest([1] * 4, std=torch.tensor([0.9, 0.4, 0.1, 0.3]))
    made = torch.tensor(draws(ro))
    std, x = ro.tree.std[made].double(), ro.x[made].double()
    mean = (
        x + std[:, None, None] * torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    ).requires_grad_()
    theirs = torch.autograd.grad(-(x - mean).square().flatten(1).mean(1).sum(), mean)[0]
    factor = noise_weight(choose(ro), power=2.0)[made].double()
    density = torch.distributions.Normal(mean, std[:, None, None]).log_prob(x).flatten(1).mean(1)
    ours = torch.autograd.grad((factor * density).sum(), mean)[0]
    torch.testing.assert_close(2 * std.square().mean() * ours, theirs, rtol=1e-6, atol=1e-9)
    assert noise_weight(choose(ro), power=0.0)[made].tolist() == [1.0] * 3


@pytest.mark.parametrize("power", [-1.0, float("nan"), float("inf")])
def test_impossible_powers(power: float) -> None:
    with pytest.raises(ConfigError, match="power"):
        noise_weight(choose(forest([1, 1, 1])), power=power)


# ------------------------------------------------------------------------------------------- chunks


def chunk_rollout(count: int) -> tuple[Rollout, Tensor]:
    ro = forest([1] * 17, groups=[0] * count)
    return ro, fixed(ro, sizes=[2, 3, 4, 7])


@pytest.mark.parametrize("weighted", ["none", "l1", "softmax"])
def test_two_of_four_chunks_are_trained(weighted: Any) -> None:
    """int(4 * .5) = 2 chunks per sample, each whole."""
    ro, segment = chunk_rollout(30)
    factor = chunks(choose(ro, segment=segment), share=0.5, weighted=weighted)
    for nodes in by_root(ro, draws(ro)).values():
        chosen = {int(segment[v]) for v in nodes if factor[v]}
        assert len(chosen) == 2
        assert [float(factor[v]) for v in nodes] == [
            float(int(segment[v]) in chosen) for v in nodes
        ]


def rho_rollout(count: int) -> tuple[Rollout, Tensor, list[float]]:
    """Chains in which rho(k) is 4, 2, 1, 1 at the four trained steps: x' = (1 + rho) x. Singleton
    chunks."""
    ro = forest([1] * 4 + [0], groups=[0] * count)
    x = torch.tensor([1.0, 5.0, 15.0, 30.0, 60.0, 60.0])[ro.tree.step]
    return ro._replace(x=x[:, None]), fixed(ro, sizes=[1] * 4), [4.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("weighted", ["none", "l1", "softmax"])
@pytest.mark.parametrize("corrected", [False, True])
def test_chunks_are_drawn_as_by_multinomial_without_replacement(
    weighted: Any, corrected: bool
) -> None:
    """How often each of 4 chunks is drawn in 6000 samples, against torch.multinomial: within 5
    standard errors of the difference (0.046). Corrected, the mean factor of each is 2/4 as with
    equal odds: within 5 standard errors."""
    count = 6000
    ro, segment, rho = rho_rollout(count)
    factor = chunks(choose(ro, segment=segment), share=0.5, weighted=weighted, corrected=corrected)
    odds = {
        "none": torch.ones(4),
        "l1": torch.tensor(rho) / 8,
        "softmax": torch.softmax(torch.tensor(rho), 0),
    }[weighted]
    drawn = torch.multinomial(odds.expand(count, 4), 2, generator=torch.Generator().manual_seed(9))
    often = torch.zeros(count, 4).scatter(1, drawn, 1.0).mean(0)
    got = factor[torch.tensor(draws(ro))].reshape(4, count)
    assert (got > 0).float().mean(1).tolist() == pytest.approx(often.tolist(), abs=0.046)
    if corrected:
        error = got.double().std(1) / count**0.5
        assert bool(((got.double().mean(1) - 0.5).abs() < 5 * error + 1e-12).all())
    else:
        assert set(got.flatten().tolist()) == {0.0, 1.0}


def test_odds_are_means_over_the_chunk() -> None:
    """rho = 4 | 2, 1, 1: one of two chunks, odds 4 to 4/3, so the first is drawn in 3/4 of 4000
    samples ± 5 errors."""
    ro, _, _ = rho_rollout(4000)
    segment = fixed(ro, sizes=[1, 3])
    factor = chunks(choose(ro, segment=segment), share=0.5, weighted="l1")
    first, second, third, fourth = factor[torch.tensor(draws(ro))].reshape(4, 4000)
    assert (
        torch.equal(second, 1 - first)
        and torch.equal(second, third)
        and torch.equal(second, fourth)
    )
    assert first.mean().item() == pytest.approx(0.75, abs=0.035)


@pytest.mark.parametrize(("change", "noisy"), [("sample", [0.8, 0.2]), ("batch", [0.5, 0.5])])
def test_whose_change_weighs_a_chunk(change: Any, noisy: list[float]) -> None:
    """2 x 2000 samples with rho 4 | 1 and 1 | 4 at two steps: the first chunk is drawn in 4/5 and
    1/5 of them by their own change, in half by the batch's (each mean is 2.5) ± 5 errors."""
    count = 2000
    ro = forest([1, 1, 0], groups=[0] * 2 * count)
    x = torch.tensor([[1.0, 5.0, 10.0, 10.0], [1.0, 2.0, 10.0, 10.0]])
    mine = torch.arange(len(ro.x)) % (2 * count) // count
    ro = ro._replace(x=x[mine, ro.tree.step][:, None])
    choice = choose(ro, segment=fixed(ro, sizes=[1, 1]))
    factor = chunks(choice, share=0.5, weighted="l1", change=change)
    first = factor[torch.tensor(draws(ro))].reshape(2, 2, count)[0]
    assert first.mean(1).tolist() == pytest.approx(noisy, abs=0.05)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0.01, 9), min_size=1, max_size=6), st.data())
def test_inclusion_by_enumerating_orders(odds: list[float], data: st.DataObject) -> None:
    """Oracle: the probability of every ordered draw, one by one in Python. Two families of
    different size at once."""
    take = data.draw(st.integers(1, len(odds)))
    items = range(len(odds))
    wanted = [0.0] * len(odds)
    for order in permutations(items, take):
        chance, left = 1.0, sum(odds)
        for item in order:
            chance, left = chance * odds[item] / left, left - odds[item]
        for item in order:
            wanted[item] += chance
    pair = torch.tensor([*odds, 1.0, 3.0], dtype=torch.float64)
    family = torch.tensor([7] * len(odds) + [2, 2])
    got = inclusion(pair, family, torch.tensor([take] * len(odds) + [1, 1])).tolist()
    assert got == pytest.approx([*wanted, 0.25, 0.75], rel=1e-7)


def test_chunks_by_change_do_not_need_the_latents() -> None:
    """Where latents stay in their processes, the joined forest has each draw's change in their
    place."""
    ro, segment = chunk_rollout(20)
    away = ro._replace(x=torch.zeros(len(ro.x), 0), change=changes(ro))
    for weighted in ("l1", "softmax"):
        choice = (
            choose(ro, segment=segment),
            choose(away, weight=torch.zeros(len(ro.x)), segment=segment),
        )
        one, two = (chunks(c, share=0.5, weighted=weighted) for c in choice)  # type: ignore[arg-type]
        assert torch.equal(one, two) and 0 < float(one.mean()) < 1


def test_equal_odds_need_no_correction() -> None:
    ro, segment = chunk_rollout(6)
    plain, corrected = (
        chunks(choose(ro, segment=segment), share=0.5, corrected=c) for c in (False, True)
    )
    torch.testing.assert_close(plain, corrected)


@settings(deadline=None, max_examples=40)
@given(forests, st.floats(0.2, 1.0), st.sampled_from(["none", "l1", "softmax"]), st.integers(0, 99))
def test_chunk_counts_on_any_forest(ro: Rollout, share: float, weighted: Any, seed: int) -> None:
    segment = fixed(ro, sizes=[len({step_of(ro, v) for v in draws(ro)})])
    sizes = {
        root: len({int(segment[v]) for v in nodes})
        for root, nodes in by_root(ro, draws(ro)).items()
    }
    assume(min(int(n * share) for n in sizes.values()) > 0)
    factor = chunks(choose(ro, segment=segment, seed=seed), share=share, weighted=weighted)
    chosen = {
        root: {int(segment[v]) for v in nodes} for root, nodes in by_root(ro, kept(factor)).items()
    }
    assert {root: len(ids) for root, ids in chosen.items()} == {
        root: int(n * share) for root, n in sizes.items()
    }
    assert kept(factor) == [
        v for v in draws(ro) if any(int(segment[v]) in ids for ids in chosen.values())
    ]


def test_generator_is_the_only_source_of_randomness() -> None:
    """Another global seed changes nothing; the choice's seed does."""
    ro, segment = chunk_rollout(20)
    seen = Counter()  # type: ignore[var-annotated]
    for state, seed in ((0, 5), (1, 5), (1, 6)):
        torch.manual_seed(state)
        seen[
            tuple(kept(chunks(choose(ro, segment=segment, seed=seed), share=0.5, weighted="l1")))
        ] += 1
    assert sorted(seen.values()) == [1, 2]


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: fraction(c, share=0.1),
            r"share=0.1 of 4 decisions of a sample leaves none; use at least 0.25",
        ),
        (lambda c: fraction(c, share=1.5), "at most 1, got 1.5"),
        (
            lambda c: best_of_n(c, top=3, bottom=2),
            r"top=3 and bottom=2 .* number of leaves of a prompt, 4",
        ),
        (lambda c: best_of_n(c, top=0, bottom=0), "top=0 and bottom=0"),
        (lambda c: best_of_n(c, top=-1, bottom=2), "top=-1"),
        (lambda c: depth_pruning(c, first=5, size=1, stop=1), r"first < 5 \(the steps\).*first=5"),
        (lambda c: depth_pruning(c, first=3, size=1), "stop=9, first=3"),
        (lambda c: depth_pruning(c, first=1, size=4, stop=1), "depths 1 to 4 leaves no decision"),
        (lambda c: depth_pruning(c, first=2, size=1, stop=1, every=0), "every=0"),
        (lambda c: width_pruning(c, mode="per_branch", share=0.5), "a plan that forks"),
        (
            lambda c: width_pruning(c, mode="extremes", share=1.6),
            "at most 1, got 'extremes' with share=1.6",
        ),
        (lambda c: width_pruning(c, mode="best", share=0.5), "'best'"),  # type: ignore[arg-type]
        (lambda c: chunks(c, share=0.5), "needs a segment section"),
        (
            lambda c: chunks(c._replace(segment=fixed(c.rollout, sizes=[4])), share=0.5),
            "of 1 segments",
        ),
        (
            lambda c: chunks(
                c._replace(segment=fixed(c.rollout, sizes=[4])),
                share=1,
                weighted="x",  # type: ignore[arg-type]
            ),
            "'x'",
        ),
    ],
)
def test_wrong_options_name_the_numbers(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(choose(forest([1] * 5, groups=[0] * 4 + [1] * 5)))


def test_correcting_many_chunks_is_refused() -> None:
    ro = forest([1] * 10)
    choice = choose(ro, segment=fixed(ro, sizes=[1] * 9))
    assert int((chunks(choice, share=0.5, weighted="l1") > 0).sum()) == 4
    with pytest.raises(ConfigError, match="up to 8 segments, got 9"):
        chunks(choice, share=0.5, weighted="l1", corrected=True)
