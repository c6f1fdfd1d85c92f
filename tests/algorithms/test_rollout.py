"""The forest engine: what is stored, what is evaluated, whose noise it is; rakes, combs, sibling
noise and coarse grids."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from forests import Forest, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import (
    PROMPTS,
    SHAPE,
    check_forest,
    counted,
    decisions,
    euler_walk,
    ratios,
    run,
    score_draws,
    seeds,
    take,
)
from slowcredits import up
from torch import Tensor

from flowrl.algorithms.forest import best_below, decision_nodes, merge, states_of
from flowrl.algorithms.plans.trees import comb, rake, tree, window_tree
from flowrl.algorithms.plans.windows import flash_window, full, random_window
from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.algorithms.rollout.plan_steps import counts
from flowrl.algorithms.transitions import cps, dance_sde, flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import FlowModel, Plan, Rollout, Transition
from flowrl.models.toy import GaussianFlow, LinearFlow

TRANSITIONS = [flow_sde, dance_sde, cps]
FULL = full(0, steps=3, noise_scale=0.5)


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("model", [LinearFlow(), GaussianFlow(mean=0.5, variance=0.3)])
def test_level_zero_is_the_euler_ode_to_the_bit(model: FlowModel, transition: Transition) -> None:
    """sample_ode and an Euler loop written out here; without noise, one edge goes to the image."""
    ro = run(full(0, steps=6, noise_scale=0.0), transition, model=model)
    sigmas, cond = linear_grid(6, 3.0), model.encode(PROMPTS)
    options: dict[str, Any] = {"sigmas": sigmas, "shape": SHAPE, "group_size": 2}
    x0 = sample_ode(model, cond, generators=seeds(0, 1, 2), **options)
    assert torch.equal(ro.x[ro.leaf], x0)
    x = torch.cat([torch.randn((2, *SHAPE), generator=g) for g in seeds(0, 1, 2)])
    each = {name: value.repeat_interleave(2, 0) for name, value in cond.items()}
    for k in range(6):
        with torch.no_grad():
            x = x + (sigmas[k + 1] - sigmas[k]) * model.velocity(x, sigmas[k].expand(6), each)
    assert torch.equal(x, x0)
    assert ro.tree.parent.tolist() == [-1] * 6 + list(range(6))
    assert ro.tree.step.tolist() == [0] * 6 + [6] * 6


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro_batch", [None, 4, 1])
@pytest.mark.parametrize("transition", TRANSITIONS)
def test_ratio_is_exactly_one_with_the_same_network_calls(
    transition: Transition, micro_batch: int | None, store: torch.dtype
) -> None:
    model = LinearFlow(scale=0.5)
    options: dict[str, Any] = {"micro_batch": micro_batch, "group_size": 4, "store_dtype": store}
    ro = run(full(0, steps=5, noise_scale=0.4), transition, model=model, **options)
    got = ratios(model, ro, transition, micro_batch or 12)
    # cps draws nothing at its last step
    assert len(got) == 12 * (4 if transition is cps else 5) and ro.x.dtype == store
    assert torch.equal(got, torch.ones_like(got))
    for chunk in (1, 5, 60):
        assert float((ratios(model, ro, transition, chunk) - 1).abs().max()) < 1e-5


def test_a_window_stores_roots_decisions_and_leaves_only() -> None:
    """6 steps, noise on steps 2 and 3: per sample noise -> 2 -> 3 -> 4 -> clean, by hand."""
    plan = random_window(0, steps=6, noise_scale=0.5, size=2, low=2, high=4)
    one: dict[str, Any] = {"group_size": 1, "prompts": PROMPTS[:1], "generators": seeds(5)}
    ro = run(plan, group_ids=torch.tensor([70]), **one)
    assert ro.tree.parent.tolist() == [-1, 0, 1, 2, 3]
    assert ro.tree.step.tolist() == [0, 2, 3, 4, 6]
    assert (ro.tree.std > 0).tolist() == [False, False, True, True, False]
    assert ro.noise_scale.tolist() == [0, 0, 0.5, 0.5, 0]
    assert (ro.tree.group.tolist(), ro.leaf.tolist()) == ([70] * 5, [4])
    batch = decisions(ro, torch.arange(5.0))
    assert batch.node.tolist() == batch.step.tolist() == batch.advantage.tolist() == [2, 3]
    assert torch.equal(batch.x, ro.x[1:3]) and torch.equal(batch.target, ro.x[2:4])
    assert torch.equal(batch.sigma, ro.sigmas[2:4])
    assert torch.equal(batch.sigma_next, ro.sigmas[3:5])
    assert torch.equal(euler_walk(ro.x[3], [4, 5, 6], ro.sigmas, 0), ro.x[4])


def test_no_two_draws_share_their_noise() -> None:
    """Recover z = (x_next - mean) / std of every draw; all must differ, with mean 0 and variance 1
    (4 SD)."""
    model = LinearFlow()
    ro = run(tree(0, steps=6, noise_scale=0.5, splits=[0, 2]), model=model, group_size=4)
    batch = decisions(ro, torch.zeros(len(ro.x)), nodes=ro.tree.std.nonzero().flatten())
    with torch.no_grad():
        ev = score_draws(model, batch, dance_sde)
    z = (batch.target - ev.mean).flatten(1) / ev.std[:, None]
    noise = torch.cat([z, ro.x[ro.tree.step == 0].flatten(1)])
    assert len((noise * 1e3).round().unique(dim=0)) == len(noise)
    assert abs(float(noise.mean())) < 4 / noise.numel() ** 0.5
    assert abs(float(noise.var()) - 1) < 4 * (2 / noise.numel()) ** 0.5


def test_a_prompt_is_the_same_alone_and_in_company() -> None:
    """All its noise comes from its own generator. Exact, since GaussianFlow works element by
    element."""
    model, plan = GaussianFlow(variance=0.5), tree(0, steps=5, noise_scale=0.4, splits=[1])
    plan = plan._replace(tail=torch.tensor([0, 2, 0, 0, 0]))
    together = run(plan, flow_sde, model=model, generators=seeds(3, 4, 5))
    for i, prompt in enumerate(PROMPTS):
        alone = run(plan, flow_sde, model=model, prompts=[prompt], generators=seeds(3 + i))
        mine = together.tree.group == i
        assert torch.equal(together.x[mine], alone.x)
        assert torch.equal(together.log_prob[mine], alone.log_prob)
    chunked = run(plan, flow_sde, model=model, generators=seeds(3, 4, 5), micro_batch=5)
    assert torch.equal(chunked.x, together.x)


@pytest.mark.parametrize(
    ("tail", "calls", "places"),
    [(1, 4, [1, 4]), (2, 5, [1, 2, 4]), (4, 6, [1, 2, 3, 4])],  # 1 + floor(3 j / 2) = 1, 2, 4
)
def test_previews(tail: int, calls: int, places: list[int]) -> None:
    """tail 1 is the x0 estimate of the child, tail S its ODE to the end; neither costs the trunk a
    second call."""
    plan = full(0, steps=4, noise_scale=0.5, ode_last=3)
    ro, counting = counted(plan._replace(tail=torch.tensor([tail, 0, 0, 0])))
    check_forest(ro)
    assert counting.calls == calls and len(ro.leaf) == 12
    for child, preview, end in zip(range(6, 12), ro.leaf[:6], ro.leaf[6:], strict=True):
        assert ro.tree.parent[preview] == ro.tree.parent[end] == child
        wanted = euler_walk(ro.x[child], places, ro.sigmas, int(ro.tree.group[child]))
        torch.testing.assert_close(ro.x[preview], wanted, atol=1e-6, rtol=1e-6)
        assert torch.equal(ro.x[preview], ro.x[end]) == (tail == 4)


def test_dead_ends_are_scored_but_do_not_go_on() -> None:
    """3 children, 1 kept, one root: by hand."""
    plan = FULL._replace(branch=torch.tensor([3, 1, 1]), tail=torch.tensor([1, 0, 0]))
    ro = run(plan, group_size=1, prompts=PROMPTS[:1])
    assert ro.tree.parent.tolist() == [-1, 0, 0, 0, 1, 1, 2, 3, 4]
    assert ro.tree.step.tolist() == [0, 1, 1, 1, 2, 3, 3, 3, 3]
    assert ro.leaf.tolist() == [5, 6, 7, 8]


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    run(FULL, progress=lambda done, steps: seen.append((done, steps)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generators": seeds(0, 1)}, "2 generators"),
        ({"micro_batch": 0}, "micro_batch must be at least 1, got 0"),
        ({"group_size": 0}, "group_size=0"),
        ({"sigmas": linear_grid(5)}, "a plan of 3 steps needs 4 sigmas, got 6"),
    ],
)
def test_bad_requests(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(FULL, **options)


def test_conditioning_follows_its_prompt() -> None:
    """With group ids in any order, each decision gets the row of its own prompt."""
    ro = run(tree(0, steps=3, noise_scale=0.5, splits=[0]), group_ids=torch.tensor([9, 2, 5]))
    batch = decisions(ro, torch.zeros(len(ro.x)))
    expected = {9: 0, 2: 1, 5: 2}
    for group, row in zip(ro.tree.group[batch.node].tolist(), batch.cond["text"], strict=True):
        assert torch.equal(row, ro.cond["text"][expected[group]])
    some = decision_nodes(ro)[[3, 1]]
    few, same = decisions(ro, torch.zeros(len(ro.x)), nodes=some), take(batch, torch.tensor([3, 1]))
    for a, b in zip(few[:10], same[:10], strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert torch.equal(few.cond["text"], same.cond["text"])


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Draw any mixture of noise, forks, dead ends, previews of any length, and a baseline."""
    size, rows = draw(st.integers(1, 5)), []
    for k in range(size):
        noise = draw(st.sampled_from([0.0, 0.2, 0.6]))
        branch = draw(st.integers(1, 3)) if noise else 1
        last = k + 1 == size
        keep = draw(st.integers(0 if noise and not last else 1, branch))
        tail = draw(st.integers(0, 6)) if noise and keep else 0 if keep else size
        rows.append((noise, branch, keep, tail))
    noises, branches, keeps, tails = (torch.tensor(row) for row in zip(*rows, strict=True))
    return Plan(noises, branches, keeps, tails, baseline=draw(st.booleans()))


@settings(max_examples=60, deadline=None)
@given(
    plans(),
    st.sampled_from(TRANSITIONS),
    st.integers(1, 3),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_any_plan_grows_a_sound_forest_and_costs_what_is_counted(
    plan: Plan,
    transition: Transition,
    group_size: int,
    micro_batch: int | None,
    store: torch.dtype,
    same: bool,
) -> None:
    """The engine's rows, leaves and decisions against `counts`; the ratio is 1."""
    options: dict[str, Any] = {"micro_batch": micro_batch, "store_dtype": store}
    ro, model = counted(plan, transition, group_size=group_size, same_noise=same, **options)
    check_forest(ro)
    one = counts(plan)
    assert ro.tree.group[ro.leaf].bincount().tolist() == [group_size * one.leaves] * 3
    together = counts(plan, group_size) if same else one
    if transition is not cps:  # cps may have std 0 at the last step
        assert model.nodes == 3 * together.nfe * (1 if same else group_size)
        assert len(decision_nodes(ro)) == 3 * group_size * one.decisions
    if bool((ro.tree.std > 0).any()):
        assert float((ratios(LinearFlow(), ro, transition) - 1).abs().max()) < 1e-5


def test_the_engine_reads_no_tensor_values() -> None:
    """On the meta device tensors have no values, so any hidden .item(), bool() or .cpu() raises."""
    cond = {"text": torch.zeros(3, 4, device="meta")}
    plan = tree(0, steps=6, noise_scale=0.5, splits=[1, 3], ode_last=1)
    plan = plan._replace(tail=torch.tensor([0, 2, 0, 0, 0, 0]))
    ro = run(plan, model=LinearFlow().to("meta"), cond=cond, micro_batch=5)
    assert ro.x.is_meta and ro.x.shape[1:] == SHAPE
    with pytest.raises(RuntimeError):
        ro.x.sum().item()  # the check itself works


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_denoising_loop_never_waits_for_the_device() -> None:
    """torch's own sync debugger raises on any hidden .item() between two steps."""
    model = LinearFlow().cuda()
    generators = [torch.Generator("cuda").manual_seed(i) for i in range(3)]

    def watch(done: int, steps: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if done < steps else "default")

    plan = tree(0, steps=6, noise_scale=0.5, splits=[1, 3])
    ro = run(plan, model=model, generators=generators, progress=watch)
    assert float((ratios(model, ro, dance_sde) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("first", "std"), [(1.0, 1.0), (0.9, math.hypot(0.1, 0.9)), (0.5, math.sqrt(0.5))]
)
def test_the_first_level_sets_the_std_of_the_roots(first: float, std: float) -> None:
    """Unit data on the path, (1 - sigma) x0 + sigma eps; at sigma 1 the generator's own noise."""
    sigmas, model = first * linear_grid(4, 3.0), LinearFlow()
    noisy, ode = (run(full(0, steps=4, noise_scale=a), cps, sigmas=sigmas) for a in (0.5, 0.0))
    raw = torch.cat([torch.randn((2, *SHAPE), generator=g) for g in seeds(0, 1, 2)])
    roots = noisy.x[noisy.tree.parent < 0]
    assert torch.equal(roots, raw) if first == 1 else torch.allclose(roots, std * raw, rtol=1e-6)
    options: dict[str, Any] = {"sigmas": sigmas, "shape": SHAPE, "group_size": 2}
    x0 = sample_ode(model, model.encode(PROMPTS), generators=seeds(0, 1, 2), **options)
    assert torch.equal(ode.x[ode.leaf], x0)
    assert torch.equal(ode.x[ode.tree.parent < 0], roots)


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
def test_every_plan_is_a_sound_forest_costs_what_is_counted_and_has_ratio_one(name: str) -> None:
    ro, model = counted(PLANS[name])
    check_forest(ro)
    one = counts(PLANS[name])
    assert model.nodes == 6 * one.nfe and len(ro.leaf) == 6 * one.leaves  # 3 prompts x 2 roots
    trained = decision_nodes(ro)
    assert len(trained) == 6 * one.decisions
    assert len(ro.tree.parent[trained].unique()) == 6 * one.states
    assert float((ratios(LinearFlow(), ro, dance_sde) - 1).abs().max()) < 1e-5


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
