"""The forest engine: what is stored, what is evaluated, whose noise it is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rolloutkit import (
    PROMPTS,
    SHAPE,
    Counting,
    check_forest,
    decisions,
    ratios,
    run,
    score_draws,
    seeds,
    take,
)

from flowrl.algorithms.nodes import decision_nodes
from flowrl.algorithms.plans.trees import tree
from flowrl.algorithms.plans.windows import full, random_window
from flowrl.algorithms.rollout.engine import rollout, sample_ode
from flowrl.algorithms.rollout.plan_steps import leaves_per_root
from flowrl.algorithms.transitions import cps, dance_sde, flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import FlowModel, Plan, Transition
from flowrl.models.toy import GaussianFlow, LinearFlow


@pytest.mark.parametrize("transition", [flow_sde, dance_sde, cps])
@pytest.mark.parametrize("model", [LinearFlow(), GaussianFlow(mean=0.5, variance=0.3)])
def test_level_zero_is_the_euler_ode_to_the_bit(model: FlowModel, transition: Transition) -> None:
    """sample_ode and an Euler loop written out here."""
    ro = run(full(0, steps=6, noise_scale=0.0), transition, model=model)
    sigmas, cond = linear_grid(6, 3.0), model.encode(PROMPTS)
    x0 = sample_ode(
        model, cond, sigmas=sigmas, shape=SHAPE, group_size=2, generators=seeds(0, 1, 2)
    )
    assert torch.equal(ro.x[ro.leaf], x0)
    x = torch.cat([torch.randn((2, *SHAPE), generator=g) for g in seeds(0, 1, 2)])
    each = {name: value.repeat_interleave(2, 0) for name, value in cond.items()}
    for k in range(6):
        with torch.no_grad():
            x = x + (sigmas[k + 1] - sigmas[k]) * model.velocity(x, sigmas[k].expand(6), each)
    assert torch.equal(x, x0)
    assert ro.tree.parent.tolist() == [-1] * 6 + list(range(6))  # one edge from noise to image
    assert ro.tree.step.tolist() == [0] * 6 + [6] * 6


def test_noise_that_is_too_small_to_matter_takes_the_same_path() -> None:
    """With std 1e-6 the stochastic branch of the engine must land next to the deterministic one."""
    for transition in (flow_sde, dance_sde, cps):
        small = run(full(0, steps=6, noise_scale=1e-6), transition)
        ode = run(full(0, steps=6, noise_scale=0.0), transition)
        torch.testing.assert_close(small.x[small.leaf], ode.x[ode.leaf], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("splits", "nodes", "edges"),
    [([0, 3, 6, 9], 203, 218), ([0, 4, 8, 12], 169, 184), ([0, 5, 10, 15], 135, 150)],
)
def test_branchgrpo_tree_counts(splits: list[int], nodes: int, edges: int) -> None:
    """Reference counts for 20 steps, 16 leaves per tree; one network call per step for the whole
    frontier."""
    model = LinearFlow()
    counting = Counting(model)
    plan = tree(0, steps=20, noise_scale=0.3, splits=splits)
    ro = rollout(
        counting,  # type: ignore[arg-type]
        model.encode(PROMPTS),
        plan,
        dance_sde,
        sigmas=linear_grid(20, 3.0),
        shape=SHAPE,
        group_size=1,
        generators=seeds(0, 1, 2),
    )
    check_forest(ro)
    assert (counting.nodes, counting.calls) == (3 * nodes, 20)
    assert int((ro.tree.parent >= 0).sum()) == int((ro.tree.std > 0).sum()) == 3 * edges
    assert len(ro.leaf) == 3 * 16
    batch = decisions(ro, torch.zeros(len(ro.x)))
    assert len(batch.x) == 3 * (edges - 16)  # the 16 draws of the last step are not trained
    torch.testing.assert_close(
        ratios(model, ro, dance_sde), torch.ones(3 * edges), atol=1e-5, rtol=0
    )


def test_siblings_share_their_parent_and_nothing_else() -> None:
    ro = run(tree(0, steps=6, noise_scale=0.5, splits=[0, 2], branch=3), group_size=1)
    for k in (0, 2):
        parents = ro.tree.parent[(ro.tree.step == k + 1)]
        assert parents.bincount().max() == 3
    drawn = ro.tree.std > 0
    assert len(ro.x[drawn].flatten(1).unique(dim=0)) == int(drawn.sum())


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("micro_batch", [None, 4, 1])
@pytest.mark.parametrize("transition", [flow_sde, dance_sde, cps])
def test_ratio_is_exactly_one_with_the_same_network_calls(
    transition: Transition, micro_batch: int | None, store: torch.dtype
) -> None:
    model = LinearFlow(scale=0.5)
    ro = run(
        full(0, steps=5, noise_scale=0.4),
        transition,
        model=model,
        micro_batch=micro_batch,
        group_size=4,
        store_dtype=store,
    )
    got = ratios(model, ro, transition, micro_batch or 12)
    # cps draws nothing at its last step
    assert len(got) == 12 * (4 if transition is cps else 5) and ro.x.dtype == store
    assert torch.equal(got, torch.ones_like(got))
    for chunk in (1, 5, 60):
        assert float((ratios(model, ro, transition, chunk) - 1).abs().max()) < 1e-5


def test_a_window_stores_roots_decisions_and_leaves_only() -> None:
    """6 steps, noise on steps 2 and 3: per sample noise -> 2 -> 3 -> 4 -> clean, by hand."""
    plan = random_window(0, steps=6, noise_scale=0.5, size=2, low=2, high=4)
    model = LinearFlow()
    ro = run(
        plan,
        model=model,
        group_size=1,
        prompts=PROMPTS[:1],
        generators=seeds(5),
        group_ids=torch.tensor([70]),
    )
    assert ro.tree.parent.tolist() == [-1, 0, 1, 2, 3]
    assert ro.tree.step.tolist() == [0, 2, 3, 4, 6]
    assert (ro.tree.std > 0).tolist() == [False, False, True, True, False]
    assert (
        ro.noise_scale.tolist() == [0, 0, 0.5, 0.5, 0]
        and ro.tree.group.tolist() == [70] * 5
        and ro.leaf.tolist() == [4]
    )
    weight = torch.arange(5.0)
    batch = decisions(ro, weight)
    assert (
        batch.node.tolist() == [2, 3]
        and batch.step.tolist() == [2, 3]
        and batch.advantage.tolist() == [2, 3]
    )
    assert torch.equal(batch.x, ro.x[1:3]) and torch.equal(batch.target, ro.x[2:4])
    assert torch.equal(batch.sigma, ro.sigmas[2:4]) and torch.equal(
        batch.sigma_next, ro.sigmas[3:5]
    )
    # the stretches without noise are the plain ODE
    x = ro.x[3:4]
    for k in (4, 5):
        with torch.no_grad():
            v = model.velocity(x, ro.sigmas[k : k + 1], ro.cond)
        x = x - (ro.sigmas[k] - ro.sigmas[k + 1]) * v
    assert torch.equal(x, ro.x[4:5])


def test_std_in_the_tree_is_the_transitions() -> None:
    """dance_sde: std = noise_scale sqrt(sigma - sigma_next)."""
    ro = run(full(0, steps=4, noise_scale=0.3))
    drawn = ro.tree.std > 0
    step = ro.tree.step[drawn]
    torch.testing.assert_close(
        ro.tree.std[drawn], 0.3 * (ro.sigmas[step - 1] - ro.sigmas[step]).sqrt()
    )


def test_group_shares_the_path_up_to_the_window() -> None:
    """same_noise: bit-identical before the first draw, different after."""
    plan = random_window(0, steps=6, noise_scale=0.5, size=2, low=2, high=4)
    ro = run(plan, same_noise=True, group_size=3)
    x = [ro.x[ro.tree.step == k].reshape(3, 3, -1) for k in (0, 2, 3)]
    assert torch.equal(x[0], x[0][:, :1].expand_as(x[0])) and torch.equal(
        x[1], x[1][:, :1].expand_as(x[1])
    )
    assert len(x[0].flatten(0, 1).unique(dim=0)) == 3  # prompts differ
    assert len(x[2].flatten(0, 1).unique(dim=0)) == 9
    assert len(run(plan).x[:6].flatten(1).unique(dim=0)) == 6  # without it, all roots differ


def test_no_two_draws_share_their_noise() -> None:
    """Recover z = (x_next - mean) / std of every draw; all must differ, with mean 0 and variance 1
    (4 SD)."""
    model = LinearFlow()
    ro = run(tree(0, steps=6, noise_scale=0.5, splits=[0, 2]), model=model, group_size=4)
    batch = decisions(ro, torch.zeros(len(ro.x)), skip_last=False)
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


def test_previews() -> None:
    """tail 1 is the x0 estimate of the child, tail S its ODE to the end; neither costs the trunk a
    second call."""
    model, sigmas = LinearFlow(), linear_grid(4, 3.0)
    for tail, wanted in ((1, 1), (2, 2), (4, 3)):
        counting = Counting(model)
        plan = full(0, steps=4, noise_scale=0.5, ode_last=3)._replace(
            tail=torch.tensor([tail, 0, 0, 0])
        )
        ro = run(plan, model=model)
        rollout(
            counting,  # type: ignore[arg-type]
            model.encode(PROMPTS),
            plan,
            dance_sde,
            sigmas=sigmas,
            shape=SHAPE,
            group_size=2,
            generators=seeds(0, 1, 2),
        )
        check_forest(ro)
        assert counting.calls == 4 + wanted - 1 and len(ro.leaf) == 12
        child, preview, end = 6 + torch.arange(6), ro.leaf[:6], ro.leaf[6:]
        assert torch.equal(ro.tree.parent[preview], child) and torch.equal(
            ro.tree.parent[end], child
        )
        x = ro.x[child]
        each = {name: value.repeat_interleave(2, 0) for name, value in ro.cond.items()}
        stops = {1: [1, 4], 2: [1, 2, 4], 4: [1, 2, 3, 4]}[tail]  # 1 + floor(3 j / 2) = 1, 2, 4
        for here, there in zip(stops, stops[1:], strict=False):
            with torch.no_grad():
                v = model.velocity(x, sigmas[here].expand(6), each)
            x = x - (sigmas[here] - sigmas[there]) * v
        assert torch.equal(x, ro.x[preview])
        assert torch.equal(ro.x[preview], ro.x[end]) == (tail == 4)


def test_dead_ends_are_scored_but_do_not_go_on() -> None:
    """3 children, 1 kept, one root: by hand."""
    plan = full(0, steps=3, noise_scale=0.5)._replace(
        branch=torch.tensor([3, 1, 1]), tail=torch.tensor([1, 0, 0])
    )
    ro = run(plan, group_size=1, prompts=PROMPTS[:1], generators=seeds(0))
    check_forest(ro)
    assert ro.tree.parent.tolist() == [-1, 0, 0, 0, 1, 2, 3, 1, 7]
    assert ro.tree.step.tolist() == [0, 1, 1, 1, 3, 3, 3, 2, 3]
    assert ro.leaf.tolist() == [4, 5, 6, 8]


def test_progress_and_bad_requests() -> None:
    seen: list[tuple[int, int]] = []
    run(full(0, steps=3, noise_scale=0.5), progress=lambda done, steps: seen.append((done, steps)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(ConfigError, match="2 generators"):
        run(full(0, steps=3, noise_scale=0.5), generators=seeds(0, 1))
    with pytest.raises(ConfigError, match="micro_batch must be at least 1, got 0"):
        run(full(0, steps=3, noise_scale=0.5), micro_batch=0)
    with pytest.raises(ConfigError, match="group_size=0"):
        run(full(0, steps=3, noise_scale=0.5), group_size=0)
    model = LinearFlow()
    with pytest.raises(ConfigError, match="a plan of 3 steps needs 4 sigmas, got 6"):
        options: dict[str, Any] = {
            "sigmas": linear_grid(5),
            "shape": SHAPE,
            "group_size": 1,
            "generators": seeds(0, 1, 2),
        }
        rollout(
            model, model.encode(PROMPTS), full(0, steps=3, noise_scale=0.5), dance_sde, **options
        )


def test_conditioning_follows_its_prompt() -> None:
    """With group ids in any order, each decision gets the row of its own prompt."""
    model = LinearFlow()
    ro = run(
        tree(0, steps=3, noise_scale=0.5, splits=[0]),
        model=model,
        group_ids=torch.tensor([9, 2, 5]),
    )
    batch = decisions(ro, torch.zeros(len(ro.x)))
    expected = {9: 0, 2: 1, 5: 2}
    for group, row in zip(ro.tree.group[batch.node].tolist(), batch.cond["text"], strict=True):
        assert torch.equal(row, ro.cond["text"][expected[group]])
    some = decision_nodes(ro)[[3, 1]]
    few, same = decisions(ro, torch.zeros(len(ro.x)), nodes=some), take(batch, torch.tensor([3, 1]))
    assert all(torch.equal(a, b) for a, b in zip(few[:-1], same[:-1], strict=True))
    assert torch.equal(few.cond["text"], same.cond["text"])


@st.composite
def plans(data: st.DrawFn) -> Plan:
    steps = data(st.integers(1, 5))
    rows = []
    for _ in range(steps):
        noise_scale = data(st.sampled_from([0.0, 0.2, 0.6]))
        branch = data(st.integers(1, 3)) if noise_scale else 1
        rows.append(
            (
                noise_scale,
                branch,
                data(st.integers(1, branch)),
                data(st.integers(0, 6)) if noise_scale else 0,
            )
        )
    noise, branch_, keep, tail = zip(*rows, strict=True)
    return Plan(torch.tensor(noise), torch.tensor(branch_), torch.tensor(keep), torch.tensor(tail))


@settings(max_examples=40, deadline=None)
@given(
    plans(),
    st.sampled_from([flow_sde, dance_sde, cps]),
    st.integers(1, 3),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_any_plan_grows_a_sound_forest(
    plan: Plan,
    transition: Transition,
    group_size: int,
    micro_batch: int | None,
    store: torch.dtype,
    same: bool,
) -> None:
    model = LinearFlow()
    ro = run(
        plan,
        transition,
        model=model,
        group_size=group_size,
        micro_batch=micro_batch,
        store_dtype=store,
        same_noise=same,
    )
    check_forest(ro)
    assert len(ro.leaf) == 3 * group_size * leaves_per_root(plan)
    assert ro.tree.group[ro.leaf].bincount().tolist() == [group_size * leaves_per_root(plan)] * 3
    if bool((ro.tree.std > 0).any()):
        assert float((ratios(model, ro, transition) - 1).abs().max()) < 1e-5


def test_the_engine_reads_no_tensor_values() -> None:
    """On the meta device tensors have no values, so any hidden .item(), bool() or .cpu() raises."""
    model = LinearFlow().to("meta")
    cond = {"text": torch.zeros(3, 4, device="meta")}
    plan = tree(0, steps=6, noise_scale=0.5, splits=[1, 3], ode_last=1)._replace(
        tail=torch.tensor([0, 2, 0, 0, 0, 0])
    )
    options: dict[str, Any] = {"sigmas": linear_grid(6, 3.0), "shape": SHAPE, "group_size": 2}
    ro = rollout(model, cond, plan, dance_sde, generators=seeds(0, 1, 2), micro_batch=5, **options)
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

    ro = run(
        tree(0, steps=6, noise_scale=0.5, splits=[1, 3]),
        model=model,
        generators=generators,
        progress=watch,
    )
    batch = decisions(ro, torch.zeros(len(ro.x), device="cuda"), skip_last=False)
    with torch.no_grad():
        ratio = (score_draws(model, batch, dance_sde).log_prob - batch.old_log_prob).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("first", "std"), [(1.0, 1.0), (0.9, math.hypot(0.1, 0.9)), (0.5, math.sqrt(0.5))]
)
def test_the_first_level_sets_the_std_of_the_roots(first: float, std: float) -> None:
    """Unit data on the path, (1 - sigma) x0 + sigma eps; at sigma 1 the generator's noise to the
    bit."""
    model, sigmas = LinearFlow(), first * linear_grid(4, 3.0)
    options: dict[str, Any] = {"sigmas": sigmas, "shape": SHAPE, "group_size": 2}
    ro = rollout(
        model,
        model.encode(PROMPTS),
        full(0, steps=4, noise_scale=0.5),
        cps,
        generators=seeds(0, 1, 2),
        **options,
    )
    raw = torch.cat([torch.randn((2, *SHAPE), generator=g) for g in seeds(0, 1, 2)])
    roots = ro.x[ro.tree.parent < 0]
    assert torch.equal(roots, raw) if first == 1 else torch.allclose(roots, std * raw, rtol=1e-6)
    ode = rollout(
        model,
        model.encode(PROMPTS),
        full(0, steps=4, noise_scale=0.0),
        cps,
        generators=seeds(0, 1, 2),
        **options,
    )
    x0 = sample_ode(model, model.encode(PROMPTS), generators=seeds(0, 1, 2), **options)
    assert torch.equal(ode.x[ode.leaf], x0) and torch.equal(ode.x[ode.tree.parent < 0], roots)
