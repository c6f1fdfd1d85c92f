"""What single steps are worth and how strongly they pull: the reference's worked numbers."""

from __future__ import annotations

import pytest
import torch
from rolloutkit import euler_walk, run
from torch import Tensor

from flowrl.algorithms.credit.single_draws import step_gain
from flowrl.algorithms.plans.trees import comb
from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.plan_steps import counts
from flowrl.algorithms.selection.select import gradient_scale
from flowrl.algorithms.transitions import dance_sde, flow_sde, linear_sde, stepwise_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import shift_sigmas
from flowrl.core.types import SelectInput


def gains(rewards: list[list[float]], **options: str | float) -> Tensor:
    """Credit the draws of one prompt's chains; a row has R_0, R_1 .. in time order."""
    plan = comb(0, steps=4, noise_scale=0.5, size=len(rewards[0]) - 1, baseline=True)
    ro = run(plan, flow_sde, prompts=["a"], group_size=len(rewards))
    # leaves stand in the order of their step, then of their sample
    order = {}
    tree, leaf = ro.tree, ro.leaf.tolist()
    for place, node in enumerate(leaf):
        above = node
        draws = 0
        while int(tree.parent[above]) >= 0:
            draws += int(tree.std[above] > 0)
            above = int(tree.parent[above])
        order[place] = (above, draws)
    roots = sorted({root for root, _ in order.values()})
    reward = torch.tensor([rewards[roots.index(root)][draws] for root, draws in order.values()])
    found = step_gain(reward, ro.leaf, tree, eps=0.0, **options)  # type: ignore[arg-type]
    nodes = (tree.std > 0).nonzero().flatten()
    return found[nodes[tree.step[nodes].argsort(stable=True)]].view(-1, len(rewards)).T


ROWS = [[0.1, 0.3, 0.2, 0.5], [0.2, 0.25, 0.4, 0.4]]


def test_gains_are_normalised_by_step_or_together() -> None:
    """The reference's example, computed in numpy: gains (.2, -.1, .3) and (.05, .15, 0)."""
    torch.testing.assert_close(gains(ROWS), torch.tensor([[1.0, -1, 1], [-1, 1, -1]]))
    joint = [[0.7559289, -1.5118579, 1.5118579], [-0.3779645, 0.3779645, -0.7559289]]
    torch.testing.assert_close(gains(ROWS, among="prompt"), torch.tensor(joint))


def test_a_gain_that_was_not_seen_counts_nothing() -> None:
    found = gains([[0.1, float("nan"), 0.2, 0.5], [0.2, 0.25, 0.4, 0.4]], among="prompt")
    assert found[0, :2].tolist() == [0, 0] and bool((found[1] != 0).any())


def one(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_the_step_of_stepwise_flow_grpo() -> None:
    """The reference's fixture: x=.8, v=-.5, s=.7, s'=.5, eta=.7."""
    made = stepwise_sde(one(0.8)[:, None], one(-0.5)[:, None], one(0.7), one(0.5), one(0.7))
    assert float(made.std) == pytest.approx(0.1917029, abs=1e-7)
    assert float(made.mean) == pytest.approx(0.8751635, abs=1e-7)


def test_a_step_from_pure_noise_draws_nothing_on_wan_s_grid_either() -> None:
    """Its first sigma is 0.999999, where std would be 7e-4 by the formula alone."""
    args = (one(0.8)[:, None], one(-0.5)[:, None])
    pure = stepwise_sde(*args, one(1.0), one(0.96), one(0.7))
    wan = stepwise_sde(*args, one(0.999999), one(0.96), one(0.7))
    assert float(wan.std) == float(pure.std) == 0
    assert float(wan.mean) == pytest.approx(float(pure.mean), abs=1e-5)
    assert float(stepwise_sde(*args, one(0.9998), one(0.96), one(0.7)).std) > 0


def test_previews_of_a_few_steps() -> None:
    """8 steps with 2 draws: the chain and the baseline of 5 steps share the first velocity, 8 + 4;
    the preview after the first draw takes 5 steps of the 7, its first velocity is the chain's
    next."""
    plan = comb(0, steps=8, noise_scale=0.5, size=2, baseline=True, preview_steps=5)
    assert counts(plan).nfe == 8 + 4 + 4
    with pytest.raises(ConfigError, match="preview_steps"):
        comb(0, steps=8, noise_scale=0.5, size=2, preview="x0", preview_steps=5)


def test_a_baseline_takes_the_steps_of_the_previews() -> None:
    """Stepwise-Flow-GRPO (2603.28718) denoises every state, that without a draw too, in as many
    steps. By hand: Euler over places 0, 2, 4, 6 of six steps, and over all of them else."""
    for short, places in ((3, [0, 2, 4, 6]), (0, range(7))):
        plan = comb(0, steps=6, noise_scale=0.5, size=3, baseline=True, preview_steps=short)
        ro = run(plan, dance_sde)
        parent, group = ro.tree.parent, ro.tree.group
        starts = [leaf for leaf in ro.leaf.tolist() if parent[parent[leaf]] < 0]
        assert len(starts) == 6  # two of each of three prompts
        for leaf in starts:
            wanted = euler_walk(ro.x[parent[leaf]], places, ro.sigmas, int(group[leaf]))
            torch.testing.assert_close(ro.x[leaf], wanted, atol=1e-6, rtol=0)


def scales(sigmas: Tensor, noise_scale: float, transition: object, high: int) -> Tensor:
    """Return the factor of each step of a full chain."""
    steps = len(sigmas) - 1
    plan = full(0, steps=steps, noise_scale=noise_scale)
    ro = run(plan, flow_sde, prompts=["a"], group_size=1)._replace(sigmas=sigmas)
    data = SelectInput(
        ro,
        torch.ones(len(ro.x)),
        None,
        0,
        torch.Generator(),
        transition,  # type: ignore[arg-type]
    )
    found = gradient_scale(data, high=high)
    nodes = (ro.tree.std > 0).nonzero().flatten()
    return found[nodes[ro.tree.step[nodes].argsort()]]


def test_flash_grpo_has_the_published_table() -> None:
    """The code's table of ten steps of a grid of 20, base linspace(.999, 0, 21), shift 3."""
    grid = shift_sigmas(torch.linspace(0.999, 0, 21, dtype=torch.float64), 3.0)
    table = torch.tensor(
        [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    )
    found = scales(grid, float(grid[1]), linear_sde, 10)[:10]
    torch.testing.assert_close(found, table / table.mean(), atol=2e-5, rtol=0)


def test_the_scale_is_that_of_the_gradient() -> None:
    """The fixture s=.7, s'=.5, q=.6874: lambda 1.3957480; and autograd of the mean agrees."""
    v = one(0.3)[:, None].requires_grad_()
    made = linear_sde(one(0.8)[:, None], v, one(0.7), one(0.5), one(0.982))
    (slope,) = torch.autograd.grad(made.mean.sum(), v)
    assert float(made.std / slope.abs()) == pytest.approx(1.3957480, abs=1e-7)


def test_steps_that_are_not_there() -> None:
    grid = torch.linspace(1, 0, 5)
    with pytest.raises(ConfigError, match="low to high - 1 of the sampler's 4"):
        scales(grid, 0.5, flow_sde, 9)
