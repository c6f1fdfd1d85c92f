"""The arithmetic of one iteration against what a rollout really does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toykit import toy

from flowrl.algorithms.nodes import decision_nodes
from flowrl.algorithms.plans.trees import tree
from flowrl.algorithms.plans.windows import full, random_window, sliding_window
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.plan_steps import leaves_per_root
from flowrl.algorithms.transitions import dance_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Cond, Plan, Rollout
from flowrl.models.toy import LinearFlow
from flowrl.training.iteration_cost import IterationCost, iteration_cost
from flowrl.training.trainer import Trainer


class Counting:
    """Note how many latents each network call gets."""

    def __init__(self) -> None:
        self.model = LinearFlow()
        self.sizes: list[int] = []

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        self.sizes.append(len(x))
        return self.model.velocity(x, sigma, cond)


def count(plan: Plan, work: IterationCost) -> tuple[Rollout, list[int]]:
    """Sample with the budget's numbers; -> what came out and the size of each network call."""
    counting = Counting()
    prompts = [f"prompt {i}" for i in range(work.prompts)]
    ro = rollout(
        counting,  # type: ignore[arg-type]
        counting.model.encode(prompts),
        plan,
        dance_sde,
        sigmas=linear_grid(len(plan.noise), 3.0),
        shape=(3, 1, 1),
        group_size=work.roots,
        generators=[torch.Generator().manual_seed(i) for i in range(work.prompts)],
        micro_batch=work.rollout_batch,
    )
    return ro, counting.sizes


def check(
    plan: Plan, group: int, *, prompts: int = 2, updates: int = 1, micro_batch: int = 4
) -> IterationCost:
    """Oracle: the calls and nodes of a real rollout, and the splitting of its decisions as training
    does it."""
    work = iteration_cost(
        plan,
        prompts=prompts,
        group=group,
        updates=updates,
        micro_batch=micro_batch,
        rollout_batch=5,
    )
    ro, sizes = count(plan, work)
    assert work.nfe == sum(sizes) and max(sizes) <= 5
    assert work.images == len(ro.leaf) == prompts * group
    assert work.roots * prompts == int((ro.tree.parent < 0).sum())
    nodes = decision_nodes(ro)
    assert work.decisions == len(nodes)
    states = ro.tree.parent[nodes].unique()
    assert work.states == len(states)
    parts = states.split(work.per_update)
    assert len(parts) <= updates and work.passes == len(parts[0].split(micro_batch))
    return work


@pytest.mark.parametrize(
    ("plan", "group", "nfe", "decisions"),
    [
        (
            full(0, steps=5, noise_scale=0.4),
            3,
            2 * 3 * 5,
            2 * 3 * 4,
        ),  # the last step's noise is not trained
        (full(0, steps=5, noise_scale=0.4, ode_last=1), 3, 2 * 3 * 5, 2 * 3 * 4),
        (random_window(3, steps=8, noise_scale=0.4, size=3, high=6), 4, 2 * 4 * 8, 2 * 4 * 3),
        (sliding_window(30, steps=8, noise_scale=0.4, size=2), 1, 2 * 8, 2 * 2),
        (
            tree(0, steps=4, noise_scale=0.4, splits=[0, 2], branch=2),
            8,
            2 * 2 * (1 + 2 + 2 + 4),
            2 * 2 * (2 + 2 + 4),
        ),
        (tree(0, steps=20, noise_scale=0.3, splits=[0, 3, 6, 9]), 16, 2 * 203, 2 * (218 - 16)),
    ],
)
def test_shipped_plans(plan: Plan, group: int, nfe: int, decisions: int) -> None:
    """The numbers are counted by hand; BranchGRPO's 203 calls and 218 edges are those of its
    paper's setting."""
    work = check(plan, group)
    assert (work.nfe, work.decisions) == (nfe, decisions)


def tails(*counts: int) -> Plan:
    """A plan with two noisy children at every step, one goes on, and previews of these many
    steps."""
    ones = torch.ones(len(counts), dtype=torch.int64)
    return Plan(torch.full((len(counts),), 0.4), 2 * ones, ones, torch.tensor(counts))


@pytest.mark.parametrize(
    ("counts", "leaves", "nfe"),
    [
        ((0, 0, 0), 2, 3),  # one live sample per step; both children of the last step are images
        (
            (1, 0, 0),
            4,
            1 + 2 + 1,
        ),  # 2 previews share their one call with the next step of the one that goes on
        ((2, 0, 0), 4, 1 + 4 + 1),
        ((9, 0, 0), 4, 1 + 4 + 1),  # only 2 steps are left
        ((2, 2, 2), 6, 1 + 4 + 2),  # at the last step nothing is left to preview
    ],
)
def test_previews(counts: tuple[int, ...], leaves: int, nfe: int) -> None:
    """Counted by hand, per root."""
    plan = tails(*counts)
    assert leaves_per_root(plan) == leaves
    work = check(plan, leaves)
    assert work.nfe == 2 * nfe and work.roots == 1


step = st.tuples(
    st.sampled_from([0.0, 0.4]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4)
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(step, min_size=2, max_size=4), st.integers(1, 2), st.integers(1, 3), st.integers(1, 7)
)
def test_any_plan(
    steps: list[tuple[float, int, int, int]], roots: int, updates: int, micro_batch: int
) -> None:
    """Steps without noise neither fork nor preview; keep is at most branch."""
    rows = [
        (noise_scale, *((branch, min(keep, branch), tail) if noise_scale else (1, 1, 0)))
        for noise_scale, branch, keep, tail in steps
    ]
    noise, *rest = zip(*rows, strict=True)
    branch, keep, tail = (torch.tensor(column) for column in rest)
    plan = Plan(torch.tensor(noise), branch, keep, tail)
    if not any(noise[:-1]):
        with pytest.raises(ConfigError, match="gives 0"):
            iteration_cost(
                plan,
                prompts=1,
                group=leaves_per_root(plan),
                updates=1,
                micro_batch=1,
                rollout_batch=1,
            )
        return
    group = roots * leaves_per_root(plan)
    states = iteration_cost(
        plan, prompts=2, group=group, updates=1, micro_batch=1, rollout_batch=1
    ).states
    check(plan, group, updates=min(updates, states), micro_batch=micro_batch)


def test_a_training_iteration_costs_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls counted on the model of a real iteration: sampling without a gradient, training with
    one."""
    trainer = Trainer(toy(tmp_path, "train.micro_batch=5"))
    calls: dict[bool, list[int]] = {False: [], True: []}
    velocity = trainer.model.velocity

    def counting(x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        calls[torch.is_grad_enabled()].append(len(x))
        return velocity(x, sigma, cond)

    monkeypatch.setattr(trainer.model, "velocity", counting)
    work = trainer.cost
    metrics = trainer.step()
    assert sum(calls[False]) == work.nfe == 8 * 4
    assert sum(calls[True]) == work.decisions == metrics["trained"] == 8 * 3
    assert len(calls[True]) == work.updates * work.passes == 2 * 3 and max(calls[True]) == 5
    text = "\n".join(work.lines())
    assert "2 prompts x 4 images = 8 images from 8 initial noises, 4 steps" in text
    assert "32 velocity evaluations in batches of 8\n" in text
    assert (
        "24 decisions from 24 states / 2 updates = 12 states per update, in 3 micro-batches of up "
        "to 5" in text
    )


def test_guidance_is_said() -> None:
    plan = full(0, steps=3, noise_scale=0.4)
    work = iteration_cost(
        plan, prompts=1, group=2, updates=1, micro_batch=4, rollout_batch=2, guided=True
    )
    assert "each with and without the prompt (guidance)" in "\n".join(work.lines())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group": 6}, "6 images per prompt is not a multiple of the 4 leaves .*use 4 or 8"),
        ({"group": 0}, "group of 0 images"),
        ({"updates": 7}, "train.updates=7 .* gives 6"),
        ({"updates": 0}, "train.updates: expected at least 1, got 0"),
        ({"micro_batch": 0}, "train.micro_batch: expected at least 1, got 0"),
        ({"rollout_batch": -1}, "train.rollout_batch: expected at least 1, got -1"),
        ({"prompts": 0}, "train.prompts: expected at least 1, got 0"),
    ],
)
def test_impossible_numbers(change: dict[str, int], message: str) -> None:
    """A tree with forks at steps 0 and 1 of 2: 4 leaves, 1 trained state per root with 2 draws (the
    last are not)."""
    plan = tree(0, steps=2, noise_scale=0.4, splits=[0, 1])
    good = {"prompts": 6, "group": 4, "updates": 6, "micro_batch": 4, "rollout_batch": 4}
    assert iteration_cost(plan, **good).decisions == 12  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        iteration_cost(plan, **{**good, **change})  # type: ignore[arg-type]
