"""Rakes, combs, sibling noise and coarse grids in the engine: what is shared, counted, stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forests import Forest, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import PROMPTS, SHAPE, check_forest, counted, euler_walk, ratios, run, seeds
from slowcredits import up
from torch import Tensor

from flowrl.algorithms.nodes import best_below, decision_nodes, states_of
from flowrl.algorithms.plans.trees import comb, rake, tree, window_tree
from flowrl.algorithms.plans.windows import flash_window, full
from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.algorithms.rollout.join import merge
from flowrl.algorithms.rollout.plan_steps import counts
from flowrl.algorithms.transitions import cps, dance_sde, flow_sde
from flowrl.core.types import Plan, Rollout, Transition
from flowrl.models.toy import LinearFlow

COMB = comb(0, steps=6, noise_scale=0.5, size=4, baseline=True)
PLANS = {
    "full": full(0, steps=6, noise_scale=0.5),
    "rake": rake(0, steps=6, noise_scale=0.5, branch=3),
    "strides": rake(0, steps=8, noise_scale=0.5, branch=2, low=1, high=5, strides=[1, 2, 3]),
    "comb": COMB,
    "comb to the end": comb(0, steps=5, noise_scale=0.5, size=5, baseline=True),
    "comb short": comb(0, steps=6, noise_scale=0.5, size=4, baseline=True, preview_steps=2),
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
    ro, model = counted(PLANS[name], transition)
    check_forest(ro)
    one = counts(PLANS[name])
    assert model.nodes == 6 * one.nfe and len(ro.leaf) == 6 * one.leaves  # 3 prompts x 2 roots
    trained = decision_nodes(ro)
    assert len(trained) <= 6 * one.decisions  # cps may have std 0 at the last step
    if transition is dance_sde:
        assert len(trained) == 6 * one.decisions
        assert len(ro.tree.parent[trained].unique()) == 6 * one.states
    assert float((ratios(LinearFlow(), ro, transition) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("name", PLANS)
def test_samples_of_one_noise_are_computed_as_one_until_the_first_draw(name: str) -> None:
    """Counted rows and trained states against `counts`; states before the first draw are equal to
    the bit, and what is drawn differs."""
    plan, copies = PLANS[name], 4
    ro, model = counted(plan, same_noise=True, group_size=copies)
    together = counts(plan, copies)
    assert model.nodes == 3 * together.nfe < 3 * copies * counts(plan).nfe
    trained = decision_nodes(ro)
    states = states_of(ro, trained)
    assert len(trained) == 3 * together.decisions and len(states.unique()) == 3 * together.states
    assert torch.equal(ro.x[states], ro.x[ro.tree.parent[trained]])
    assert len(ro.x[ro.tree.parent < 0].flatten(1).unique(dim=0)) == 3  # prompts differ
    assert len(ro.x[trained].flatten(1).unique(dim=0)) == len(trained)
    assert len(ro.leaf) == 3 * together.leaves
    assert float((ratios(LinearFlow(), ro, dance_sde) - 1).abs().max()) < 1e-5
    apart = run(plan, group_size=copies)
    assert apart.twin is not None and torch.equal(apart.twin, torch.arange(len(apart.x)))


# --------------------------------------------------------------------- what hangs under a draw


@pytest.mark.parametrize(
    ("plan", "places"),
    [  # step of the draw -> places of the grid on the way to each of its leaves, by hand
        (rake(0, steps=5, noise_scale=0.5, branch=3), {k: [range(k, 6)] for k in range(1, 5)}),
        (  # G2RPO: one whole step, then every second
            rake(0, steps=8, noise_scale=0.5, branch=2, low=1, high=3, strides=[1, 2]),
            {2: [range(2, 9), [2, 3, 5, 7, 8]], 3: [range(3, 9), [3, 4, 6, 8]]},
        ),
        (COMB, {k: [range(k, 7)] for k in range(1, 5)}),
        (  # one jump each; behind the last draw the sample itself
            comb(0, steps=6, noise_scale=0.5, size=4, preview="x0"),
            {1: [[1, 6]], 2: [[2, 6]], 3: [[3, 6]], 4: [range(4, 7)]},
        ),
    ],
)
def test_leaves_under_a_draw_are_euler_walks(plan: Plan, places: dict[int, Any]) -> None:
    """TempFlow-GRPO, G2RPO, TP-GRPO, VGPO; the trunk of a rake is the ODE's own trajectory."""
    ro = run(plan, group_size=1)
    near: dict[str, Any] = {"atol": 1e-6, "rtol": 1e-5}
    nodes = decision_nodes(ro)
    assert set(ro.tree.step[nodes].tolist()) == set(places)
    for node in nodes.tolist():
        prompt, parent = int(ro.tree.group[node]), int(ro.tree.parent[node])
        k = int(ro.tree.step[node])
        leaves = ro.leaf[ro.tree.parent[ro.leaf] == node].sort().values
        for leaf, way in zip(leaves, places[k], strict=True):
            wanted = euler_walk(ro.x[node], list(way), ro.sigmas, prompt)
            torch.testing.assert_close(ro.x[leaf], wanted, **near)
        if bool((plan.keep == 0).any()):
            root = ro.x[up(node, ro.tree)[-1]]
            trunk = euler_walk(root, list(range(k)), ro.sigmas, prompt)
            torch.testing.assert_close(ro.x[parent], trunk, **near)


def test_a_combs_baseline_is_the_ode_from_the_same_noise() -> None:
    """TP-GRPO's R_0; its code starts it from other noise."""
    ro, model = run(COMB), LinearFlow()
    below_root = ro.leaf[ro.tree.parent[ro.leaf] < 6]
    options: dict[str, Any] = {"sigmas": ro.sigmas, "shape": SHAPE, "group_size": 2}
    x0 = sample_ode(model, model.encode(PROMPTS), generators=seeds(0, 1, 2), **options)
    assert torch.equal(ro.x[below_root], x0)


def test_without_noise_every_preview_of_a_comb_is_the_baseline() -> None:
    """As the level goes to 0 all rewards of a chain agree, so that no draw gets credit."""
    ro = run(COMB._replace(noise=COMB.noise * 2e-6), group_size=1)
    for prompt in range(3):
        mine = ro.x[ro.leaf[ro.tree.group[ro.leaf] == prompt]]
        assert len(mine) == 5
        torch.testing.assert_close(mine, mine[:1].expand_as(mine), atol=1e-4, rtol=0)


# ------------------------------------------------------------------------------ noise of siblings


def noise_of(ro: Rollout) -> Tensor:
    """Recover the standardised noise [N, D] of each decision from stored latents and means."""
    nodes = decision_nodes(ro)
    assert ro.mean is not None
    return (ro.x[nodes] - ro.mean[nodes]).flatten(1) / ro.tree.std[nodes, None]


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_sibling_noise_of_the_paper_is_standard_normal_and_correlated(spread: float) -> None:
    """BranchGRPO: variance 1 and covariance 1 / (1 + spread^2); 3 standard errors of 36,864 pairs
    of samples."""
    plan = tree(0, steps=2, noise_scale=0.5, splits=[0], ode_last=1, spread=spread)
    ro = run(plan, prompts=["a"], group_size=3072, generators=seeds(5), keep_mean=True)
    z = noise_of(ro).reshape(3072, 2, -1)
    n, rho = z[:, 0].numel(), 1 / (1 + spread**2)
    assert abs(float(z.square().mean()) - 1) < 3 * (2 * (1 + rho**2) / (2 * n)) ** 0.5
    assert abs(float((z[:, 0] * z[:, 1]).mean()) - rho) < 3 * ((1 + rho**2) / n) ** 0.5


def test_sibling_noise_of_the_code_is_stretched_but_scored_as_if_it_were_not() -> None:
    options: dict[str, Any] = {"ode_last": 1, "split_noise": "scaled", "spread": 4.0}
    plan = tree(0, steps=3, noise_scale=0.5, splits=[0], **options)
    ro = run(plan, group_size=500, keep_mean=True)
    z, nodes = noise_of(ro), decision_nodes(ro)
    step = ro.tree.step[nodes]
    assert float(z[step == 1].std()) == pytest.approx(4.0, rel=0.02)
    assert float(z[step == 2].std()) == pytest.approx(1.0, rel=0.02)
    expected = -0.5 * z.square().mean(1) - ro.tree.std[nodes].log() - 0.9189385332  # ln(2 pi) / 2
    torch.testing.assert_close(ro.log_prob[nodes].float(), expected, atol=1e-4, rtol=1e-4)


def test_a_tree_without_forks_is_a_chain_and_independent_noise_is_drawn_node_by_node() -> None:
    """One child at every step is DanceGRPO's trajectory; before the fork a tree has its noise."""
    plan = tree(0, steps=5, noise_scale=0.5, splits=[1], split_noise="independent")
    assert plan.share == 0 and plan.stretch == 1
    chain, forked = run(full(0, steps=5, noise_scale=0.5)), run(plan)
    assert torch.equal(chain.x[:12], forked.x[:12])  # roots and first draws, before the fork
    bare = run(tree(0, steps=5, noise_scale=0.5, splits=[]))
    for name in ("x", "log_prob", "noise_scale", "leaf"):
        assert torch.equal(getattr(bare, name), getattr(chain, name)), name
    assert all(torch.equal(one, two) for one, two in zip(bare.tree, chain.tree, strict=True))


@pytest.mark.parametrize(
    ("plan", "transition", "scales"),
    [
        (full(0, steps=5, noise_scale=0.5), dance_sde, [0.5] * 5),
        # one level for all would give another mean
        (
            window_tree(0, steps=6, size=3, noise_scale=0.4, growth=1.0),
            flow_sde,
            [0.4 * 4 / 3, 0.4 * 5 / 3, 0.4 * 6 / 3],
        ),
    ],
)
def test_kept_means_and_stds_are_the_transitions(
    plan: Plan, transition: Transition, scales: list[float]
) -> None:
    """Each draw against the transition itself, at its own noise scale; also in a joined forest."""
    ro, plain = run(plan, transition, keep_mean=True), run(plan, transition)
    assert plain.mean is None and torch.equal(ro.x, plain.x) and ro.mean is not None
    model, nodes = LinearFlow(), decision_nodes(ro)
    state, step = ro.tree.parent[nodes], ro.tree.step[nodes] - 1
    cond = {name: value[ro.tree.group[nodes]] for name, value in model.encode(PROMPTS).items()}
    sigma, after = ro.sigmas[step], ro.sigmas[step + 1]
    with torch.no_grad():
        v = model.velocity(ro.x[state], sigma, cond)
    one = transition(ro.x[state], v, sigma, after, torch.tensor(scales)[step])
    torch.testing.assert_close(ro.mean[nodes], one.mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(ro.tree.std[nodes], one.std)
    others = ro.tree._replace(group=ro.tree.group + 3)
    both, place, _ = merge([ro, ro._replace(group_ids=ro.group_ids + 3, tree=others)])
    assert both.mean is not None and torch.equal(both.mean[place[: len(ro.mean)]], ro.mean)


# -------------------------------------------------------------------------------- whole samplers


class Gauss(LinearFlow):
    """Data N(0, 1): E[eps - x0 | x] = (2 sigma - 1) / (sigma^2 + (1 - sigma)^2) x."""

    def velocity(self, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        s = sigma.reshape(-1, *[1] * (x.dim() - 1))
        return (2 * s - 1) / (s.square() + (1 - s).square()) * x


@pytest.mark.parametrize(
    ("transition", "noise_scale", "expected"),
    [(dance_sde, 0.0, 0.797), (flow_sde, 0.7, 0.874), (dance_sde, 0.3, 0.804), (cps, 0.8, 0.519)],
)
def test_variance_of_samples_of_gaussian_data(
    transition: Transition, noise_scale: float, expected: float
) -> None:
    """20,000 samples of 16 noisy steps: the reference's variances, within 3 SE, s sqrt(2 / n);
    seeded."""
    plan = full(0, steps=16, noise_scale=noise_scale)
    options: dict[str, Any] = {"shape": (1,), "group_size": 20_000, "generators": seeds(5)}
    ro = run(plan, transition, model=Gauss(), prompts=["a"], **options)
    values = ro.x[ro.leaf].flatten().double()
    error = 3 * expected * (2 / 20_000) ** 0.5 + 6e-4
    assert len(values) == 20_000 and float(values.var()) == pytest.approx(expected, abs=error)


def test_flash_is_closer_to_the_fine_ode_than_euler_on_its_grid() -> None:
    """What second order is for: behind the window, 400 Euler steps from the same states are the
    truth."""
    plan, far = flash_window(0, steps=20, noise_scale=0.3, size=2, ratio=0.9), []
    for solver in (plan.solver, None):
        ro, gaps = run(plan._replace(solver=solver), group_size=1), []
        fine = torch.linspace(float(ro.sigmas[2]), 0, 401)
        for leaf in ro.leaf.tolist():
            node, prompt = int(ro.tree.parent[leaf]), int(ro.tree.group[leaf])
            gaps.append(ro.x[leaf] - euler_walk(ro.x[node], range(401), fine, prompt))
        far.append(float(torch.stack(gaps).norm()))
    assert far[0] < 0.5 * far[1]


@settings(max_examples=100, deadline=None)
@given(random_forest(), st.integers(0, 99), st.sampled_from([2, 1000]))
def test_best_below_in_any_forest(drawn: Forest, seed: int, kinds: int) -> None:
    """Oracle: walk up from every leaf; few kinds of weights make many equal, the first stays."""
    (nodes, leaf), zero = drawn, torch.zeros(len(drawn[0].parent))
    weight = torch.randint(kinds, zero.shape, generator=torch.Generator().manual_seed(seed)).float()
    sigmas = torch.linspace(1, 0, int(nodes.step.max()) + 2)
    forest = Rollout(nodes, zero[:, None], zero, zero, leaf, sigmas, {}, torch.unique(nodes.group))
    best: dict[int, int] = {}
    for one in sorted(leaf.tolist()):
        for node in up(one, nodes):
            if weight[one] > weight[best.setdefault(node, one)]:
                best[node] = one
    assert dict(enumerate(best_below(forest, weight).tolist())) == best
