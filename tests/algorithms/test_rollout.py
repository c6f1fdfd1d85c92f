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

from flowrl.algorithms.nodes import decision_nodes
from flowrl.algorithms.plans.trees import tree
from flowrl.algorithms.plans.windows import full, random_window
from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.algorithms.rollout.plan_steps import counts
from flowrl.algorithms.transitions import cps, dance_sde, flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import FlowModel, Plan, Transition
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


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_noise_that_is_too_small_to_matter_takes_the_same_path(transition: Transition) -> None:
    """With std 1e-6 the stochastic branch of the engine must land next to the deterministic one."""
    small, ode = (run(full(0, steps=6, noise_scale=a), transition) for a in (1e-6, 0.0))
    torch.testing.assert_close(small.x[small.leaf], ode.x[ode.leaf], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("splits", "nodes", "edges"),
    [([0, 3, 6, 9], 203, 218), ([0, 4, 8, 12], 169, 184), ([0, 5, 10, 15], 135, 150)],
)
def test_branchgrpo_tree_counts(splits: list[int], nodes: int, edges: int) -> None:
    """Reference counts for 20 steps and 16 leaves; one network call per step for the frontier."""
    ro, counting = counted(tree(0, steps=20, noise_scale=0.3, splits=splits), group_size=1)
    assert (counting.nodes, counting.calls) == (3 * nodes, 20)
    assert int((ro.tree.parent >= 0).sum()) == int((ro.tree.std > 0).sum()) == 3 * edges
    assert len(ro.leaf) == 3 * 16
    assert len(decision_nodes(ro)) == 3 * (edges - 16)  # those of the last step are not trained


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
