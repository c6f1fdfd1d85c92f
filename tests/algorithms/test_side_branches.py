"""Rakes, combs, sibling noise and coarse grids in the engine: what is shared, what is counted, what
is stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forests import Forest, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import PROMPTS, SHAPE, Counting, check_forest, ratios, run, seeds
from torch import Tensor

from flowrl.algorithms.nodes import best_below, decision_nodes, states_of
from flowrl.algorithms.plans.side_branches import comb, rake
from flowrl.algorithms.plans.trees import tree, window_tree
from flowrl.algorithms.plans.windows import flash_window, full, sliding_window
from flowrl.algorithms.rollout.engine import rollout, sample_ode
from flowrl.algorithms.rollout.join import merge
from flowrl.algorithms.rollout.plan_steps import counts, leaves_per_root, roots_for, steps_of
from flowrl.algorithms.rollout.sigma_grid import read_sigma_grid
from flowrl.algorithms.transitions import cps, dance_sde, draw, flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Gaussian, Plan, Rollout, Transition
from flowrl.models.toy import LinearFlow


def sigmas_of(plan: Plan) -> Tensor:
    return (
        linear_grid(len(plan.noise), 3.0)
        if plan.sigma_grid is None
        else read_sigma_grid(linear_grid(plan.sigma_grid.steps, 3.0), plan.sigma_grid)
    )


def counted(
    plan: Plan, transition: Transition = dance_sde, **options: Any
) -> tuple[Rollout, Counting]:
    model = LinearFlow()
    counting = Counting(model)
    ro = rollout(
        counting,  # type: ignore[arg-type]
        model.encode(PROMPTS),
        plan,
        transition,
        sigmas=sigmas_of(plan),
        shape=SHAPE,
        generators=seeds(0, 1, 2),
        **{"group_size": 2, **options},
    )
    return ro, counting


def finish(x: Tensor, places: list[int], sigmas: Tensor, prompt: int) -> Tensor:
    """Take Euler steps of one latent between grid places, written out."""
    model = LinearFlow()
    cond = {name: value[prompt : prompt + 1] for name, value in model.encode(PROMPTS).items()}
    x = x[None]
    for here, there in zip(places, places[1:], strict=False):
        with torch.no_grad():
            v = model.velocity(x, sigmas[here].expand(1), cond)
        x = x + (sigmas[there] - sigmas[here]) * v
    return x[0]


PLANS = {
    "full": full(0, steps=6, noise_scale=0.5),
    "rake": rake(0, steps=6, noise_scale=0.5, branch=3),
    "rake two strides": rake(
        0, steps=8, noise_scale=0.5, branch=2, low=1, high=5, strides=[1, 2, 3]
    ),
    "comb": comb(0, steps=6, noise_scale=0.5, size=4, baseline=True),
    "comb to the end": comb(0, steps=5, noise_scale=0.5, size=5, baseline=True),
    "comb x0": comb(0, steps=6, noise_scale=0.5, size=5, preview="x0"),
    "mix tree": tree(0, steps=8, noise_scale=0.5, splits=[0, 4], block=2),
    "window tree": window_tree(40, steps=8, noise_scale=0.5, size=3, growth=0.5, every=20),
    "flash": flash_window(0, steps=12, noise_scale=0.5, size=3, ratio=0.6),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("transition", [dance_sde, flow_sde, cps])
def test_every_plan_is_a_sound_forest_costs_what_is_counted_and_has_ratio_one(
    name: str, transition: Transition
) -> None:
    plan = PLANS[name]
    ro, model = counted(plan, transition)
    check_forest(ro)
    one = counts(plan)
    assert model.nodes == 6 * one.nfe  # 3 prompts x 2 roots
    assert len(ro.leaf) == 6 * one.leaves
    trained = decision_nodes(ro)
    assert len(trained) <= 6 * one.decisions  # cps may have std 0 at the last step
    if transition is dance_sde:
        assert len(trained) == 6 * one.decisions
        assert len(ro.tree.parent[trained].unique()) == 6 * one.states
    gap = (ratios(LinearFlow(), ro, transition) - 1).abs().max()
    assert float(gap) < 1e-5


@pytest.mark.parametrize("name", PLANS)
def test_samples_of_one_noise_are_computed_as_one_until_the_first_draw(name: str) -> None:
    """Counted rows and trained states against `counts`; roots and states before the first draw are
    equal to the bit."""
    plan, copies = PLANS[name], 4
    ro, model = counted(plan, same_noise=True, group_size=copies)
    together = counts(plan, copies)
    assert model.nodes == 3 * together.nfe < 3 * copies * counts(plan).nfe
    trained = decision_nodes(ro)
    states = states_of(ro, trained)
    assert len(trained) == 3 * together.decisions and len(states.unique()) == 3 * together.states
    assert torch.equal(ro.x[states], ro.x[ro.tree.parent[trained]])
    assert len(ro.leaf) == 3 * together.leaves
    check_forest(ro)
    assert float((ratios(LinearFlow(), ro, dance_sde) - 1).abs().max()) < 1e-5
    apart, _ = counted(plan, group_size=copies)
    assert apart.twin is not None and torch.equal(
        apart.twin, torch.arange(len(apart.x))
    )  # no two are one there


def test_a_rake_is_a_trunk_without_noise_and_one_draw_per_child() -> None:
    """TempFlow-GRPO: children at step k share x_k with the ODE's own trajectory, and go on without
    noise."""
    plan = rake(0, steps=6, noise_scale=0.5, branch=3)
    ro, _ = counted(plan, group_size=1)
    sigmas, parent, step = ro.sigmas, ro.tree.parent, ro.tree.step
    nodes = decision_nodes(ro)
    assert torch.bincount(step[nodes] - 1).tolist() == [
        9,
        9,
        9,
        9,
        9,
    ]  # 3 prompts x 3 children at each of 5 steps
    x = torch.cat([torch.randn((1, *SHAPE), generator=g) for g in seeds(0, 1, 2)])
    for node in nodes.tolist():
        prompt, k = int(ro.tree.group[node]), int(step[node]) - 1
        trunk = finish(x[prompt], list(range(k + 1)), sigmas, prompt)
        torch.testing.assert_close(ro.x[parent[node]], trunk, atol=1e-6, rtol=1e-5)
        leaf = int((parent == node).nonzero())
        torch.testing.assert_close(
            ro.x[leaf],
            finish(ro.x[node], list(range(k + 1, 7)), sigmas, prompt),
            atol=1e-6,
            rtol=1e-5,
        )
    assert not bool(torch.isin(ro.leaf, parent).any()) and len(ro.leaf) == len(nodes)


def test_a_stride_takes_one_whole_step_and_then_every_second() -> None:
    """G2RPO: from step k + 1 the places k + 2, k + 4, ... and the end, in a second leaf of the same
    child."""
    plan = rake(0, steps=8, noise_scale=0.5, branch=2, low=1, high=3, strides=[1, 2])
    ro, _ = counted(plan, group_size=1)
    places = {2: [2, 3, 5, 7, 8], 3: [3, 4, 6, 8]}
    for node in decision_nodes(ro).tolist():
        prompt, k = int(ro.tree.group[node]), int(ro.tree.step[node])
        fine, coarse = (ro.tree.parent == node).nonzero().flatten().tolist()
        torch.testing.assert_close(
            ro.x[fine],
            finish(ro.x[node], list(range(k, 9)), ro.sigmas, prompt),
            atol=1e-6,
            rtol=1e-5,
        )
        torch.testing.assert_close(
            ro.x[coarse], finish(ro.x[node], places[k], ro.sigmas, prompt), atol=1e-6, rtol=1e-5
        )


def test_a_combs_baseline_is_the_ode_from_the_same_noise() -> None:
    """TP-GRPO's R_0; its code starts it from other noise."""
    plan = comb(0, steps=6, noise_scale=0.5, size=4, baseline=True)
    ro, _ = counted(plan)
    below_root = ro.leaf[ro.tree.parent[ro.leaf] < 6]
    model = LinearFlow()
    x0 = sample_ode(
        model,
        model.encode(PROMPTS),
        sigmas=ro.sigmas,
        shape=SHAPE,
        group_size=2,
        generators=seeds(0, 1, 2),
    )
    assert torch.equal(ro.x[below_root], x0)


def test_without_noise_every_preview_of_a_comb_is_the_baseline() -> None:
    """As the level goes to 0 all rewards of a chain agree, so that no draw gets credit."""
    ro, _ = counted(comb(0, steps=6, noise_scale=1e-6, size=4, baseline=True), group_size=1)
    for prompt in range(3):
        mine = ro.x[ro.leaf[ro.tree.group[ro.leaf] == prompt]]
        assert len(mine) == 5
        torch.testing.assert_close(mine, mine[:1].expand_as(mine), atol=1e-4, rtol=0)


def test_an_x0_preview_is_one_jump() -> None:
    ro, _ = counted(comb(0, steps=6, noise_scale=0.5, size=4, preview="x0"), group_size=1)
    last = int(decision_nodes(ro).max())
    for node in decision_nodes(ro).tolist():
        k, prompt = int(ro.tree.step[node]), int(ro.tree.group[node])
        below = ro.leaf[ro.tree.parent[ro.leaf] == node]
        places = list(range(k, 7)) if k == int(ro.tree.step[last]) else [k, 6]
        torch.testing.assert_close(
            ro.x[below][0], finish(ro.x[node], places, ro.sigmas, prompt), atol=1e-6, rtol=1e-5
        )


def noise_of(ro: Rollout, transition: Transition) -> Tensor:
    """Recover the standardised noise of each decision from the stored latents and means."""
    nodes = decision_nodes(ro)
    assert ro.mean is not None
    return (ro.x[nodes] - ro.mean[nodes]) / ro.tree.std[nodes].view(-1, 1, 1, 1)


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_sibling_noise_of_the_paper_is_standard_normal_and_correlated(spread: float) -> None:
    """BranchGRPO: variance 1 and covariance 1 / (1 + spread^2); 3 standard errors of 36,864 pairs
    of samples."""
    plan = tree(0, steps=2, noise_scale=0.5, splits=[0], ode_last=1, spread=spread)
    model = LinearFlow()
    ro = rollout(
        model, model.encode(["a"]), plan, dance_sde, sigmas=linear_grid(2, 3.0), shape=SHAPE,
        group_size=3072,
        generators=seeds(5), keep_mean=True,
    )  # fmt: skip
    z = noise_of(ro, dance_sde).reshape(3072, 2, -1)
    n = z[:, 0].numel()
    rho = 1 / (1 + spread**2)
    assert abs(float(z.square().mean()) - 1) < 3 * (2 * (1 + rho**2) / (2 * n)) ** 0.5
    assert abs(float((z[:, 0] * z[:, 1]).mean()) - rho) < 3 * ((1 + rho**2) / n) ** 0.5


def test_sibling_noise_of_the_code_is_stretched_but_scored_as_if_it_were_not() -> None:
    plan = tree(
        0, steps=3, noise_scale=0.5, splits=[0], ode_last=1, split_noise="scaled", spread=4.0
    )
    ro, _ = counted(plan, group_size=500, keep_mean=True)
    z = noise_of(ro, dance_sde).flatten(1)
    step = ro.tree.step[decision_nodes(ro)]
    assert float(z[step == 1].std()) == pytest.approx(4.0, rel=0.02)
    assert float(z[step == 2].std()) == pytest.approx(1.0, rel=0.02)
    expected = (
        -0.5 * z.square().mean(1) - ro.tree.std[decision_nodes(ro)].log() - 0.9189385332046727
    )  # ln(2 pi) / 2
    torch.testing.assert_close(ro.log_prob[decision_nodes(ro)], expected, atol=1e-4, rtol=1e-4)


def test_a_tree_without_forks_is_a_chain_and_independent_noise_is_drawn_node_by_node() -> None:
    """The engine must draw the very noise that it drew before forks could share any."""
    plan = tree(0, steps=5, noise_scale=0.5, splits=[1], split_noise="independent")
    assert plan.share == 0 and plan.stretch == 1
    chain = run(full(0, steps=5, noise_scale=0.5))
    forked = run(plan)
    assert torch.equal(chain.x[:12], forked.x[:12])  # roots and first draws, before the fork
    bare = run(
        tree(0, steps=5, noise_scale=0.5, splits=[])
    )  # one child at every step: DanceGRPO's trajectory
    for name in ("x", "log_prob", "noise_scale", "leaf"):
        assert torch.equal(getattr(bare, name), getattr(chain, name)), name
    assert all(torch.equal(one, two) for one, two in zip(bare.tree, chain.tree, strict=True))


def test_noise_of_a_window_tree_grows_with_depth_and_slides() -> None:
    """level (1 + growth k / size) at the k-th step of the window; without growth it is the window's
    own noise."""
    options: dict[str, Any] = {"steps": 9, "size": 4, "noise_scale": 0.5, "every": 10}
    grown = [window_tree(i, growth=0.8, **options) for i in (0, 10)]
    wanted = torch.tensor([0.5 * 1.2, 0.5 * 1.4, 0.5 * 1.6, 0.5 * 1.8])
    for first, plan in enumerate(grown):
        expected = torch.zeros(9)
        expected[first : first + 4] = wanted
        torch.testing.assert_close(plan.noise, expected)
        assert plan.branch.tolist() == [2 if first <= k < first + 4 else 1 for k in range(9)]
    plain = window_tree(10, **options)
    assert torch.equal(plain.noise, sliding_window(10, **options).noise)


def test_grown_noise_is_in_mean_and_std_alike() -> None:
    """Each draw against the transition itself, at the grown level; one level for all would give
    another mean."""
    plan = window_tree(0, steps=6, size=3, noise_scale=0.4, growth=1.0)
    ro, _ = counted(plan, flow_sde, keep_mean=True)
    model, nodes = LinearFlow(), decision_nodes(ro)
    up, step = ro.tree.parent[nodes], ro.tree.step[ro.tree.parent[nodes]]
    cond = {name: value[ro.tree.group[nodes]] for name, value in model.encode(PROMPTS).items()}
    v = model.velocity(ro.x[up], ro.sigmas[step], cond).detach()
    noise_scale = torch.tensor([0.4 * (1 + k / 3) for k in (1, 2, 3)])[step]
    one = flow_sde(ro.x[up], v, ro.sigmas[step], ro.sigmas[step + 1], noise_scale)
    assert ro.mean is not None and set(step.tolist()) == {0, 1, 2}
    torch.testing.assert_close(ro.mean[nodes], one.mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ro.tree.std[nodes], one.std)


@pytest.mark.parametrize(
    ("transition", "noise_scale", "expected"),
    [(dance_sde, 0.0, 0.797), (flow_sde, 0.7, 0.874), (dance_sde, 0.3, 0.804), (cps, 0.8, 0.519)],
)
def test_variance_of_samples_of_gaussian_data(
    transition: Transition, noise_scale: float, expected: float
) -> None:
    """20,000 samples of 16 noisy steps, data N(0, 1): the reference's variances, within 3 SE of an
    estimate.

    The SE of a variance s of n normal numbers is s sqrt(2 / n). Seeded, so the test cannot fail by
    chance from run to run; the window of 3 SE lets 1 in 370 right engines fail once.
    """
    count = 20_000
    sigmas = linear_grid(16, 3.0)
    ro = rollout(
        Gauss(),  # type: ignore[arg-type]
        {"one": torch.zeros(1, 1)},
        full(0, steps=16, noise_scale=noise_scale),
        transition,
        sigmas=sigmas,
        shape=(1,),
        generators=seeds(5),
        group_size=count,
    )
    values = ro.x[ro.leaf].flatten().double()
    assert len(values) == count
    assert float(values.var()) == pytest.approx(
        expected, abs=3 * expected * (2 / count) ** 0.5 + 6e-4
    )


class Gauss(LinearFlow):
    """The exact velocity for data N(0, 1): E[eps - x0 | x] = (2 sigma - 1) / (sigma^2 + (1 -
    sigma)^2) x."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        s = sigma.reshape(-1, *[1] * (x.dim() - 1))
        return (2 * s - 1) / (s.square() + (1 - s).square()) * x


def test_kept_means_are_the_transitions() -> None:
    ro, _ = counted(full(0, steps=5, noise_scale=0.5), keep_mean=True)
    plain, _ = counted(full(0, steps=5, noise_scale=0.5))
    assert plain.mean is None and torch.equal(ro.x, plain.x) and ro.mean is not None
    model = LinearFlow()
    nodes = decision_nodes(ro)
    up = ro.tree.parent[nodes]
    cond = {name: value[ro.tree.group[nodes]] for name, value in model.encode(PROMPTS).items()}
    sigma, after = ro.sigmas[ro.tree.step[up]], ro.sigmas[ro.tree.step[nodes]]
    with torch.no_grad():
        one = dance_sde(
            ro.x[up], model.velocity(ro.x[up], sigma, cond), sigma, after, ro.noise_scale[nodes]
        )
    torch.testing.assert_close(ro.mean[nodes], one.mean, atol=1e-6, rtol=1e-5)
    both, place, _ = merge(
        [
            ro,
            ro._replace(group_ids=ro.group_ids + 3, tree=ro.tree._replace(group=ro.tree.group + 3)),
        ]
    )
    assert both.mean is not None and torch.equal(both.mean[place[: len(ro.mean)]], ro.mean)


def test_flash_counts_are_the_papers() -> None:
    """25 steps, window 0 to 3, ratio .4: 4 steps and 7 behind them (reference section 4.2)."""
    plan = flash_window(0, steps=25, noise_scale=0.7, size=4)
    assert counts(plan).nfe == 11 and len(plan.noise) == 11
    star = [
        flash_window(i, steps=25, noise_scale=0.7, size=4, stride=0, ratio=0.2) for i in (0, 99)
    ]
    assert torch.equal(star[0].noise, star[1].noise) and counts(star[0]).nfe == 4 + 3
    spared = flash_window(
        0, steps=25, noise_scale=0.7, size=4, stride=0, ratio=0.2, spare=2
    )  # the code's; it never slides
    assert torch.equal(spared.noise, star[0].noise)
    ro, _ = counted(plan, flow_sde)
    assert float(ro.sigmas[-1]) == 0 and len(ro.sigmas) == 12


def test_flash_is_closer_to_the_fine_ode_than_euler_on_its_grid() -> None:
    """What second order is for: behind the window, 400 Euler steps from the same states are the
    truth."""
    plan = flash_window(0, steps=20, noise_scale=0.3, size=2, ratio=0.9)
    far = []
    for solver in (plan.solver, None):
        ro, _ = counted(plan._replace(solver=solver), dance_sde, group_size=1)
        gaps = []
        for leaf in ro.leaf.tolist():
            node, prompt = int(ro.tree.parent[leaf]), int(ro.tree.group[leaf])
            fine = torch.linspace(float(ro.sigmas[2]), 0, 401)
            gaps.append(ro.x[leaf] - finish(ro.x[node], list(range(401)), fine, prompt))
        far.append(float(torch.stack(gaps).norm()))
    assert far[0] < 0.5 * far[1]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_plans_cost_what_is_counted(data: st.DataObject) -> None:
    """The engine's evaluated rows against `counts`, for random mixtures of forks, dead ends and
    previews."""
    size = data.draw(st.integers(2, 6))
    rows = []
    for k in range(size):
        if data.draw(st.booleans()):
            branch = data.draw(st.integers(1, 3))
            last = k + 1 == size
            keep = branch if last else data.draw(st.integers(0, branch))
            tail = 0 if last else size if keep == 0 else data.draw(st.sampled_from([0, 1, 2, size]))
            rows.append((0.5, branch, keep, tail))
        else:
            rows.append((0.0, 1, 1, 0))
    columns = [torch.tensor(column) for column in zip(*rows, strict=True)]
    noise, children, kept, tails = columns
    plan = Plan(noise.float(), children, kept, tails, baseline=data.draw(st.booleans()))
    ro, model = counted(plan)
    one = counts(plan)
    assert model.nodes == 6 * one.nfe and len(ro.leaf) == 6 * one.leaves
    assert len(decision_nodes(ro)) == 6 * one.decisions
    check_forest(ro)


def best_by_walking(forest: Rollout, weight: Tensor) -> dict[int, int]:
    """Walk up from every leaf; of equal weights the first leaf stays."""
    best: dict[int, int] = {}
    for leaf in sorted(forest.leaf.tolist()):
        node = leaf
        while node >= 0:
            if node not in best or weight[leaf] > weight[best[node]]:
                best[node] = leaf
            node = int(forest.tree.parent[node])
    return best


def test_best_below_in_the_engine_s_forests() -> None:
    ro, _ = counted(tree(0, steps=5, noise_scale=0.5, splits=[0, 2]))
    combed, _ = counted(comb(0, steps=5, noise_scale=0.5, size=4, baseline=True))
    for forest in (ro, combed):
        weight = torch.randn(len(forest.x), generator=torch.Generator().manual_seed(1))
        expected = best_by_walking(forest, weight)
        assert {node: int(best_below(forest, weight)[node]) for node in expected} == expected


@settings(max_examples=100, deadline=None)
@given(random_forest(), st.integers(0, 99), st.sampled_from([2, 1000]))
def test_best_below_in_any_forest(drawn: Forest, seed: int, kinds: int) -> None:
    """Few kinds of weights make many equal."""
    (nodes, leaf), zero = drawn, torch.zeros(len(drawn[0].parent))
    weight = torch.randint(kinds, zero.shape, generator=torch.Generator().manual_seed(seed)).float()
    sigmas = torch.linspace(1, 0, int(nodes.step.max()) + 2)
    forest = Rollout(nodes, zero[:, None], zero, zero, leaf, sigmas, {}, torch.unique(nodes.group))
    expected = best_by_walking(forest, weight)
    assert len(expected) == len(zero) and best_below(forest, weight).tolist() == [
        expected[n] for n in range(len(zero))
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: rake(0, steps=5, noise_scale=0.5, branch=4, high=5),
            ["high=5", "<= 4", "steps=5"],
        ),
        (lambda: rake(0, steps=5, noise_scale=0.5, branch=4, low=3, high=3), ["low=3", "high=3"]),
        (lambda: rake(0, steps=5, noise_scale=0.0, branch=4), ["noise_scale=0.0"]),
        (lambda: rake(0, steps=5, noise_scale=0.5, branch=1), ["branch=1"]),
        (lambda: rake(0, steps=5, noise_scale=0.5, branch=2, strides=[0, 1]), ["[0, 1]"]),
        (lambda: comb(0, steps=5, noise_scale=0.5, size=6), ["size=6", "steps=5"]),
        (lambda: comb(0, steps=5, noise_scale=0.0, size=3), ["noise_scale=0.0"]),
        (lambda: tree(0, steps=5, noise_scale=0.5, splits=[0], spread=0.0), ["spread=0.0"]),
        (
            lambda: tree(0, steps=5, noise_scale=0.5, splits=[0], block=31),
            ["block=31", "block_every=30"],
        ),
        (
            lambda: window_tree(0, steps=5, noise_scale=0.5, size=2, splits=[2]),
            ["[2]", "0 to 1", "size=2"],
        ),
        (lambda: window_tree(0, steps=5, noise_scale=0.5, size=4), ["size=4", "steps=5"]),
        (
            lambda: flash_window(0, steps=8, noise_scale=0.5, size=3, spare=2),
            ["one point", "ratio=0.4"],
        ),
        (
            lambda: steps_of(
                full(0, steps=3, noise_scale=0.5)._replace(solver=torch.tensor([1, 3, 1]))
            ),
            ["step 1", "got 3"],
        ),
        (
            lambda: roots_for(rake(0, steps=5, noise_scale=0.5, branch=4), 10),
            ["10 images", "16 leaves"],
        ),
    ],
)
def test_impossible_plans_name_the_numbers(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_tempflow_and_tp_cost_what_the_reference_counts_or_less() -> None:
    """One TempFlow seed: 10 + 6 x 45 = 280 calls in its code; one less here (the trunk's end). TP:
    64 there, here every preview's first velocity is the trunk's next: 10 + 9 + (8 + ... + 1) =
    55."""
    one = counts(rake(0, steps=10, noise_scale=0.7, branch=6))
    assert (one.nfe, one.leaves, one.decisions, one.states) == (279, 54, 54, 9)
    assert counts(comb(0, steps=10, noise_scale=0.7, size=9, baseline=True)).nfe == 55
    assert leaves_per_root(comb(0, steps=10, noise_scale=0.7, size=9, baseline=True)) == 10
    assert (
        counts(comb(0, steps=10, noise_scale=0.7, size=10, preview="x0")).nfe == 10
    )  # no call of their own


def test_draw_is_what_the_engine_adds() -> None:
    """Guards the recovered noise of the tests above: mean + std z is what was stored."""
    ro, _ = counted(full(0, steps=4, noise_scale=0.5), keep_mean=True)
    nodes = decision_nodes(ro)
    assert ro.mean is not None
    again = draw(Gaussian(ro.mean[nodes], ro.tree.std[nodes]), noise_of(ro, dance_sde))
    torch.testing.assert_close(again, ro.x[nodes], atol=1e-5, rtol=1e-5)
