"""Published solvers beside ours: the latents at which they end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gaps import Gaps, forest, gap
from torch import Tensor

from flowrl.algorithms.plans.solvers import ode, sa_solver
from flowrl.algorithms.rollout.plan_steps import read_sigma_grid
from flowrl.algorithms.transitions import flow_sde
from flowrl.core.noise_path import linear_grid


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


def mix_grpo_solver(code: dict[str, Any]) -> Gaps:
    """MixGRPO's solver of second order over 25 steps without noise, on a toy field."""
    sigmas = linear_grid(25, 3.0)
    plan = ode(0, steps=25, order=2, last_order=2)
    model, made = forest(plan, flow_sde, prompts=3, group=2, sigmas=sigmas)
    cond = {name: value[made.tree.group[made.leaf]] for name, value in made.cond.items()}
    kinds = {"dpm_algorithm_type": "dpmsolver++", "dpm_solver_type": "midpoint"}
    args, state = SimpleNamespace(dpm_solver_order=2, **kinds), code["DPMState"](order=2)
    x = made.x[made.tree.parent < 0]
    for k in range(25):
        v = model.velocity(x, sigmas[k].expand(len(x)), cond)
        x = code["dpm_step"](args, v, x, k, sigmas[:-1], sigmas, dpm_state=state)[0]
    return {"latent": gap(made.x[made.leaf], x)}
