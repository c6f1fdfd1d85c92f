"""Selections and segments: counts, published examples, laws of random choice, where chunks are cut,
and what is refused."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from forests import by_hand
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from selectkit import choose, draws, forest, forests, path, rake, step_of
from torch import Tensor
from toykit import toy

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.algorithms.selection._change import relative_change, relative_changes
from flowrl.algorithms.selection.segments import _cut, adaptive, fixed
from flowrl.algorithms.selection.select import (
    _inclusion,
    best_of_n,
    chunks,
    depth_pruning,
    fraction,
    noise_weight,
    reward_range,
    width_pruning,
)
from flowrl.algorithms.transitions import flow_sde
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.types import Rollout
from flowrl.training.rollout import collect
from flowrl.training.trainer import Trainer


def kept(factor: Tensor) -> list[int]:
    return factor.nonzero().flatten().tolist()


def by_root(ro: Rollout, nodes: list[int]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = {}
    for v in nodes:
        out.setdefault(path(ro, v)[-1], []).append(v)
    return out


# ----------------------------------------------------------------------------------------- fraction


def test_fraction_is_uniform_and_repeatable() -> None:
    """1000 samples: each of 9 steps is trained in 5/9 of them, ± 4 standard errors (0.063); same
    seed, same choice."""
    ro = forest([1] * 10, groups=[0] * 1000)
    factor = fraction(choose(ro), share=0.6)
    often = factor[draws(ro)].reshape(9, 1000).mean(1)
    assert often.tolist() == pytest.approx([5 / 9] * 9, abs=0.063)
    assert torch.equal(factor, fraction(choose(ro), share=0.6))
    assert not torch.equal(factor, fraction(choose(ro, seed=1), share=0.6))


@settings(deadline=None, max_examples=60)
@given(forests, st.floats(0.05, 1.0), st.integers(0, 99))
def test_fraction_counts_on_any_forest(ro: Rollout, share: float, seed: int) -> None:
    wanted = {root: int(len(nodes) * share) for root, nodes in by_root(ro, draws(ro)).items()}
    choice = choose(ro, seed=seed)
    if min(wanted.values()) == 0:
        with pytest.raises(ConfigError, match="leaves none"):
            fraction(choice, share=share)
        return
    factor = fraction(choice, share=share)
    assert factor.dtype == torch.float32 and set(factor.tolist()) <= {0.0, 1.0}
    assert set(kept(factor)) <= set(draws(ro))
    assert {root: len(v) for root, v in by_root(ro, kept(factor)).items()} == wanted


# ---------------------------------------------------------------------------------------- best of n


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
    choice = choose(ro, seed=seed)
    weight = choice.advantage.tolist()
    chosen = []
    for g in ro.group_ids:
        group = [v for v in ro.leaf.tolist() if ro.tree.group[v] == g]
        assume(1 <= top + bottom <= len(group))
        ranked = sorted(group, key=lambda v: -weight[v])
        chosen += ranked[:top] + ranked[len(group) - bottom :]
    above = {u for v in chosen for u in path(ro, v)}
    assert kept(best_of_n(choice, top=top, bottom=bottom)) == [v for v in draws(ro) if v in above]


# --------------------------------------------------------------------------------------- BranchGRPO

# BranchGRPO's tree: N = 20, splits 0, 3, 6, 9 -> 16 leaves, 218 draws, the last 16 not trained
SPLITS = [2 if k in (0, 3, 6, 9) else 1 for k in range(20)]


@pytest.mark.parametrize(
    ("iteration", "low"), [(0, 15), (29, 15), (30, 14), (179, 10), (180, 9), (5000, 9)]
)
def test_depth_pruning_schedule(iteration: int, low: int) -> None:
    """Depths {15..18}, one shallower every 30 iterations until the shallow end is 9."""
    ro = forest(SPLITS)
    factor = depth_pruning(choose(ro, iteration=iteration), first=15, size=4)
    wanted = [v for v in draws(ro) if not low <= ro.tree.step[v] <= low + 3]
    assert kept(factor) == wanted
    assert len(wanted) == 202 - sum(16 if d > 9 else 8 for d in range(low, low + 4))


@pytest.mark.parametrize(
    ("mode", "share", "best", "worst"),
    [("per_branch", 0.5, 5, 0), ("extremes", 0.5, 80, 80), ("extremes", 0.01, 1, 2)],
)
def test_width_pruning(mode: Any, share: float, best: int, worst: int) -> None:
    """Of 10 draws behind the last split (depths 11 to 20) of each branch its best stay; or of the
    320 of both trees the k // 2 best and the other worst, ``k = max(2, int(320 share))``. The 58
    above stay, and depth 20 is never trained."""
    ro = forest(SPLITS, groups=[0, 1])
    weight = torch.randn(len(ro.x), generator=torch.Generator().manual_seed(3)) + 5 * ro.tree.group
    chosen = kept(width_pruning(choose(ro, weight=weight), mode=mode, share=share))
    branches = [path(ro, leaf)[:10] for leaf in ro.leaf.tolist()]
    families = branches if mode == "per_branch" else [sum(branches, [])]
    wanted = {v for v in draws(ro) if ro.tree.step[v] <= 10}
    assert len(wanted) == 2 * 58
    for nodes in families:
        ranked = sorted(nodes, key=lambda v: -float(weight[v]))
        wanted |= {*ranked[:best], *ranked[len(ranked) - worst :]}
    assert set(chosen) == wanted & set(draws(ro))


def test_equal_weights_keep_the_noisier_half_of_a_branch() -> None:
    """group_norm gives all draws behind the last split the weight of their leaf."""
    ro = forest([1, 2, 1, 1, 1, 0])
    weight = group_norm(torch.tensor([0.0, 1.0]), ro.leaf, ro.tree)
    chosen = kept(width_pruning(choose(ro, weight=weight), mode="per_branch", share=0.5))
    assert [int(ro.tree.step[v]) for v in chosen] == [1, 2, 2, 3, 3]


def test_a_rake_has_no_draw_behind_its_last_split() -> None:
    """Two draws under the trunk nodes of steps 0 and 1; none is above another."""
    ro = rake()
    choice = choose(ro, weight=torch.arange(9.0))
    with pytest.raises(ConfigError, match=r"behind the last split, step 1 \(counted from 0\)"):
        width_pruning(choice, mode="per_branch", share=0.5)
    assert fixed(ro, sizes=[2])[[1, 2, 6, 7]].tolist() == [1, 2, 6, 7]
    assert len(kept(fraction(choice, share=0.5))) == 2


# ------------------------------------------------------------------------------------- noise weight


@pytest.mark.parametrize(
    ("noise_scale", "constant", "published"), [(0.7, 2.252, 2.25), (0.9, 1.726, 1.73)]
)
def test_noise_weight_gives_the_published_constants(
    noise_scale: float, constant: float, published: float
) -> None:
    """w = C s; C = 2.252 (SD3.5) and 1.726 (FLUX at 1024 px) by the reference, whose code has 2.25
    and 1.73. Grids: diffusers' own scheduler."""
    if noise_scale == 0.7:
        scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        scheduler.set_timesteps(10)
    else:
        scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        scheduler.set_timesteps(sigmas=np.linspace(1, 0.1, 10).tolist(), mu=1.15)
    x, sigmas = torch.zeros(10, 1), scheduler.sigmas
    std = flow_sde(x, x, sigmas[:-1], sigmas[1:], torch.full((10,), noise_scale)).std
    ro = forest([1] * 10, groups=[0, 0, 1], std=std)
    made = draws(ro)
    factor = noise_weight(choose(ro))[made]
    c = factor / ro.tree.std[made]
    assert c.tolist() == pytest.approx([constant] * 27, abs=5e-4)
    assert c[0].item() == pytest.approx(published, abs=6e-3)
    assert factor.mean().item() == pytest.approx(1, abs=1e-6)


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
    made = draws(ro)
    std, x = ro.tree.std[made].double()[:, None, None], ro.x[made].double()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
    mean = (x + std * noise).requires_grad_()
    theirs = torch.autograd.grad(-(x - mean).square().flatten(1).mean(1).sum(), mean)[0]
    factor = noise_weight(choose(ro), power=2.0)[made].double()
    density = torch.distributions.Normal(mean, std).log_prob(x).flatten(1).mean(1)
    ours = torch.autograd.grad((factor * density).sum(), mean)[0]
    torch.testing.assert_close(2 * std.square().mean() * ours, theirs, rtol=1e-6, atol=1e-9)
    assert noise_weight(choose(ro), power=0.0)[made].tolist() == [1.0] * 3


# ------------------------------------------------------------------------------------------- errors

FOUR = {"segment": fixed(forest([1] * 5, groups=[0] * 4 + [1] * 5), sizes=[4])}


@pytest.mark.parametrize(
    ("select", "options", "message"),
    [
        (fraction, {"share": 0.1}, "share=0.1 of 4 decisions .* leaves none; use at least 0.25"),
        (fraction, {"share": 1.5}, "at most 1, got 1.5"),
        (best_of_n, {"top": 3, "bottom": 2}, "top=3 and bottom=2 .* leaves of a prompt, 4"),
        (best_of_n, {"top": 0, "bottom": 0}, "top=0 and bottom=0"),
        (best_of_n, {"top": -1, "bottom": 2}, "top=-1"),
        (depth_pruning, {"first": 5, "size": 1, "stop": 1}, r"first < 5 \(the steps\).*first=5"),
        (depth_pruning, {"first": 3, "size": 1}, "stop=9, first=3"),
        (depth_pruning, {"first": 1, "size": 4, "stop": 1}, "depths 1 to 4 leaves no decision"),
        (depth_pruning, {"first": 2, "size": 1, "stop": 1, "every": 0}, "every=0"),
        (width_pruning, {"mode": "per_branch", "share": 0.5}, "a plan that forks"),
        (width_pruning, {"mode": "extremes", "share": 1.6}, "1, got 'extremes' with share=1.6"),
        (width_pruning, {"mode": "best", "share": 0.5}, "'best'"),
        (noise_weight, {"power": -1.0}, "power"),
        (noise_weight, {"power": float("nan")}, "power"),
        (noise_weight, {"power": float("inf")}, "power"),
        (chunks, {"share": 0.5}, "needs a segment section"),
        (chunks, FOUR | {"share": 0.5}, "of 1 segments"),
        (chunks, FOUR | {"share": 1, "weighted": "x"}, "'x'"),
    ],
)
def test_wrong_options_name_the_numbers(select: Any, options: Any, message: str) -> None:
    ro = forest([1] * 5, groups=[0] * 4 + [1] * 5)
    rest = {name: value for name, value in options.items() if name != "segment"}
    with pytest.raises(ConfigError, match=message):
        select(choose(ro, segment=options.get("segment")), **rest)


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


NAN = math.nan
RULE = "select={fn: reward_range, low: LOW, high: HIGH}"


def prompts_kept(
    reward: list[float], groups: list[int], low: float, high: float = math.inf
) -> list[int]:
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
    assert prompts_kept(reward, groups, 0.0) == [0, 2, 5, 7, 8]
    assert prompts_kept(reward, groups, 0.3, 1.0) == [2, 7]
    assert prompts_kept(reward, groups, 0.31, 1.99) == [7]
    assert prompts_kept(reward, groups, 1.5) == [5]
    assert prompts_kept(reward, groups, 0.0, 0.1) == [0, 8]


def test_prompts_without_a_score_and_without_any_reward() -> None:
    """Nothing scored: left out, whatever the band. In a rehearsal no reward is known, and all
    stay."""
    assert prompts_kept([NAN, NAN, 0.0, 0.5], [0, 0, 1, 1], 0.0) == [1]
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
