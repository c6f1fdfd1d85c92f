"""Published functions beside ours, on the same random numbers: one function here for each.

A case returns what differs: {what: (largest difference, largest value of theirs)}. What is compared
is theirs as it is, in float32 or float64 as it computes by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from torch import Tensor

from flowrl.algorithms.credit.advantages import depth_norm, group_norm
from flowrl.algorithms.plans.solvers import ode, sa_solver
from flowrl.algorithms.plans.trees import tree as tree_plan
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.sigma_grid import read_sigma_grid
from flowrl.algorithms.transitions import (
    dance_sde,
    flow_sde,
    gaussian_log_prob,
    linear_sde,
)
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Plan, Rollout, Transition
from flowrl.models.toy import LinearFlow

Gaps = dict[str, tuple[float, float]]
SHAPE = (4, 8, 8)


def gap(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest value."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    return float((ours - theirs.reshape(ours.shape)).abs().max()), float(theirs.abs().max())


def worst(gaps: list[Gaps]) -> Gaps:
    """Join the gaps of several steps: the largest of each."""
    out: Gaps = {}
    for one in gaps:
        for name, (difference, value) in one.items():
            before = out.get(name, (0.0, 0.0))
            out[name] = (max(before[0], difference), max(before[1], value))
    return out


def step_gaps(
    theirs: Callable[[Tensor, Tensor, Tensor], Tensor],
    ours: Callable[[Tensor, Tensor], Any],
    seed: int,
) -> Gaps:
    """Compare the log-prob of a step, and its gradient by the velocity, at random states.

    theirs(x, v, x_next) -> log-prob [B]; ours(x, v) -> mean and std.
    """
    draw = torch.Generator().manual_seed(seed)
    x, v, noise = torch.randn(3, 5, *SHAPE, generator=draw)
    with torch.no_grad():
        mean, std = ours(x, v)
    after = mean + std.view(-1, 1, 1, 1) * noise
    values, slopes = [], []
    for called in (lambda v: gaussian_log_prob(after, *ours(x, v)), lambda v: theirs(x, v, after)):
        v_ = v.clone().requires_grad_()
        value = called(v_)
        value.double().sum().backward()
        values.append(value)
        slopes.append(v_.grad)
    return {"log-prob": gap(*values), "its gradient": gap(*slopes)}


def forest(
    plan: Plan, transition: Transition, *, prompts: int, group: int, sigmas: Tensor | None = None
) -> tuple[LinearFlow, Rollout]:
    """Sample from a toy field along a plan."""
    model = LinearFlow(channels=SHAPE[0])
    cond = model.encode([f"prompt {i}" for i in range(prompts)])
    streams = [torch.Generator().manual_seed(i) for i in range(prompts)]
    grid = linear_grid(len(plan.noise), 3.0) if sigmas is None else sigmas
    made = rollout(
        model, cond, plan, transition, group_size=group, generators=streams, sigmas=grid,
        shape=SHAPE,
    )  # fmt: skip
    return model, made


def flow_grpo_step(code: dict[str, Any]) -> Gaps:
    """Flow-GRPO's step at all noisy steps of ten, as Stable Diffusion 3 has them."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    sigmas, gaps = scheduler.sigmas, []
    for k in range(9):
        one, after, scale = (torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], 0.7))

        def theirs(x: Tensor, v: Tensor, to: Tensor, k: int = k) -> Tensor:
            time = scheduler.timesteps[k].expand(5)
            return code["sde_step_with_logprob"](scheduler, v, time, x, 0.7, prev_sample=to)[1]

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, scale)) -> Any:
            return flow_sde(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def dance_grpo_step(code: dict[str, Any]) -> Gaps:
    """DanceGRPO's step at all steps but the last of 16, on its grid for FLUX."""
    sigmas, gaps = linear_grid(16, 3.0), []
    for k in range(15):
        one, after, scale = (torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], 0.3))

        def theirs(x: Tensor, v: Tensor, to: Tensor, k: int = k) -> Tensor:
            return code["flux_step"](v, x, 0.3, sigmas, k, to, True, True)[2]

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, scale)) -> Any:
            return dance_sde(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def flash_grpo_step(code: dict[str, Any]) -> Gaps:
    """Flash-GRPO's step at the first ten of twenty, on UniPC's grid for Wan. Its own video latents
    have five dimensions."""
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )
    scheduler.set_timesteps(20)
    sigmas, gaps = scheduler.sigmas, []
    first = float(sigmas[1])
    for k in range(10):
        one, after, scale = (torch.full((5,), float(s)) for s in (sigmas[k], sigmas[k + 1], first))

        def theirs(x: Tensor, v: Tensor, to: Tensor, k: int = k) -> Tensor:
            time = scheduler.timesteps[k].expand(5)
            x, v, to = x[:, :, None], v[:, :, None], to[:, :, None]
            return code["sde_step_with_logprob"](scheduler, v, time, x, prev_sample=to)[1]

        def ours(x: Tensor, v: Tensor, at: Any = (one, after, scale)) -> Any:
            return linear_sde(x, v, *at)

        gaps.append(step_gaps(theirs, ours, k))
    return worst(gaps)


def prompt_statistics(code: dict[str, Any]) -> Gaps:
    """Flow-GRPO's advantages, by the std of a prompt and of all, with a group of equal rewards."""
    _, made = forest(ode(0, steps=2), flow_sde, prompts=5, group=6)
    prompt = made.tree.group[made.leaf]
    reward = torch.randn(30, generator=torch.Generator().manual_seed(0))
    reward[prompt == 2] = 0.5
    gaps: Gaps = {}
    for std in ("group", "global"):
        tracker = code["PerPromptStatTracker"](global_std=std == "global")
        theirs = tracker.update([str(int(p)) for p in prompt], reward.numpy())
        ours = group_norm(reward, made.leaf, made.tree, std=std, eps=1e-4)  # type: ignore[arg-type]
        gaps[f"advantage, std of {std}"] = gap(ours[made.leaf], torch.from_numpy(theirs))
    return gaps


def branch_advantages(code: dict[str, Any]) -> Gaps:
    """BranchGRPO's values and advantages on a tree of ours, in both fusions."""
    plan = tree_plan(0, steps=6, noise_scale=0.3, splits=[0, 1, 3], ode_last=1)
    _, made = forest(plan, dance_sde, prompts=1, group=1)  # one root, eight leaves
    reward = torch.randn(len(made.leaf), generator=torch.Generator().manual_seed(0))
    gaps: Gaps = {}
    for fusion in ("mean", "softmax"):
        nodes = _nodes(code["TreeNode"], made)
        leaves = [nodes[int(v)] for v in made.leaf]
        _, by_depth = code["compute_node_rewards_from_leaves"](
            nodes[0], reward, leaves, fusion == "softmax"
        )
        found = code["compute_hierarchical_advantages_by_depth"](by_depth)
        theirs = torch.stack([found[str(v)].reshape(()) for v in range(len(nodes))])
        ours = depth_norm(
            reward, made.leaf, made.tree, fusion=fusion,  # type: ignore[arg-type]
            eps=1e-8, ddof=1, log_prob=made.log_prob,
        )  # fmt: skip
        drawn = made.tree.std > 0
        gaps[f"advantage, fusion {fusion}"] = gap(ours[drawn], theirs[drawn])
    return gaps


def _nodes(kind: Any, made: Rollout) -> list[Any]:
    """Set a forest of one tree as theirs."""
    nodes: list[Any] = []
    for v, parent in enumerate(made.tree.parent.tolist()):
        above = None if parent < 0 else nodes[parent]
        node = kind(str(v), torch.zeros(1), parent=above, step=int(made.tree.step[v]))
        node.log_prob = made.log_prob[v].float()
        if above is not None:
            above.add_child(node)
        nodes.append(node)
    return nodes


def nft_solver(code: dict[str, Any]) -> Gaps:
    """DiffusionNFT's dpm2 of ten steps, with the order of its last but one, on a toy field."""
    sigmas = linear_grid(10, 3.0)
    plan = ode(0, steps=10, order=2, last_order=2)
    model, made = forest(plan, flow_sde, prompts=3, group=2, sigmas=sigmas)
    cond = {name: value[made.tree.group[made.leaf]] for name, value in made.cond.items()}
    start = made.x[made.tree.parent < 0]

    def velocity(z: Tensor, sigma: Tensor) -> Tensor:
        return model.velocity(z, sigma.expand(len(z)), cond)

    end, _, _ = code["run_sampling"](velocity, start, sigmas, solver="dpm2", determistic=True)
    return {"latent": gap(made.x[made.leaf], end)}


def awm_solver(code: dict[str, Any]) -> Gaps:
    """AWM's SA-Solver of 14 steps, without noise, on a toy field."""
    plan = sa_solver(0, steps=14, noise_scale=0.0, form="published")
    assert plan.sigma_grid is not None
    sigmas = read_sigma_grid(linear_grid(14, 3.0), plan.sigma_grid)
    model, made = forest(plan, flow_sde, prompts=3, group=2, sigmas=sigmas)
    cond = {name: value[made.tree.group[made.leaf]] for name, value in made.cond.items()}

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return model.velocity(x, t.float().expand(len(x)), cond)

    solver = code["SASolver"](velocity, code["NoiseScheduleFlowMatching"]())
    start, grid = made.x[made.tree.parent < 0].double(), sigmas.double()
    end = solver.sample(start, lambda t: 0.0 * t, grid, predictor_order=2, corrector_order=2)
    return {"latent": gap(made.x[made.leaf], end)}
