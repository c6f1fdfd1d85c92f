"""The arithmetic of one iteration against what a rollout really does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainkit import TREE, trainer_for

from flowrl.algorithms.forest import decision_nodes
from flowrl.algorithms.plans.solvers import pairs
from flowrl.algorithms.plans.trees import tree
from flowrl.algorithms.plans.windows import full, random_window, sliding_window
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.rollout.plan_steps import leaves_per_root
from flowrl.algorithms.transitions import dance_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Cond, Plan, Rollout
from flowrl.models.toy import LinearFlow
from flowrl.training.parts.stored_images import StoredImages
from flowrl.training.task import IterationCost, iteration_cost


class Counting(LinearFlow):
    """Note how many latents each network call gets."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        self.sizes.append(len(x))
        return super().velocity(x, sigma, cond)


def count(plan: Plan, work: IterationCost) -> tuple[Rollout, list[int]]:
    """Sample with the cost's numbers -> what came out, and the size of each network call."""
    model = Counting()
    ro = rollout(
        model,
        model.encode([f"prompt {i}" for i in range(work.prompts)]),
        plan,
        dance_sde,
        sigmas=linear_grid(len(plan.noise), 3.0),
        shape=(3, 1, 1),
        group_size=work.roots,
        generators=[torch.Generator().manual_seed(i) for i in range(work.prompts)],
        micro_batch=work.rollout_batch,
    )
    return ro, model.sizes


def cost(plan: Plan, group: int, **changes: Any) -> IterationCost:
    numbers: dict[str, Any] = {
        "prompts": 2,
        "updates": 1,
        "micro_batch": 4,
        "rollout_batch": 5,
    } | changes
    return iteration_cost(plan, group=group, **numbers)


def check(plan: Plan, group: int, *, updates: int = 1, micro_batch: int = 4) -> IterationCost:
    """Oracle: calls and nodes of a real rollout, its decisions split as training does it."""
    work = cost(plan, group, updates=updates, micro_batch=micro_batch)
    ro, sizes = count(plan, work)
    assert work.nfe == sum(sizes) and max(sizes) <= 5
    assert work.images == len(ro.leaf) == 2 * group
    assert work.roots * 2 == int((ro.tree.parent < 0).sum())
    nodes = decision_nodes(ro)
    states = ro.tree.parent[nodes].unique()
    assert work.decisions == len(nodes) and work.states == len(states)
    parts = states.split(work.per_update)
    assert len(parts) <= updates and work.passes == len(parts[0].split(micro_batch))
    return work


@pytest.mark.parametrize(
    ("plan", "group", "nfe", "decisions"),
    [
        # the last step's noise is not trained
        (full(0, steps=5, noise_scale=0.4), 3, 2 * 3 * 5, 2 * 3 * 4),
        (full(0, steps=5, noise_scale=0.4, ode_last=1), 3, 2 * 3 * 5, 2 * 3 * 4),
        (random_window(3, steps=8, noise_scale=0.4, size=3, high=6), 4, 2 * 4 * 8, 2 * 4 * 3),
        (sliding_window(30, steps=8, noise_scale=0.4, size=2), 1, 2 * 8, 2 * 2),
        (tree(0, steps=4, noise_scale=0.4, splits=[0, 2]), 8, 2 * 2 * 9, 2 * 2 * (2 + 2 + 4)),
        (tree(0, steps=20, noise_scale=0.3, splits=[0, 3, 6, 9]), 16, 2 * 203, 2 * (218 - 16)),
    ],
)
def test_shipped_plans(plan: Plan, group: int, nfe: int, decisions: int) -> None:
    """Counted by hand; BranchGRPO's 203 calls and 218 edges are those of its paper's setting."""
    work = check(plan, group)
    assert (work.nfe, work.decisions) == (nfe, decisions)


step = st.tuples(
    st.sampled_from([0.0, 0.4]), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4)
)
steps_of = st.lists(step, min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(steps_of, st.integers(1, 2), st.integers(1, 3), st.integers(1, 7))
def test_any_plan(
    steps: list[tuple[float, int, int, int]], roots: int, updates: int, micro_batch: int
) -> None:
    """Steps without noise neither fork nor preview; keep is at most branch."""
    rows: list[tuple[float, int, int, int]] = []
    for scale, branch, keep, tail in steps:
        rows.append((scale, branch, min(keep, branch), tail) if scale else (0.0, 1, 1, 0))
    noise, *rest = zip(*rows, strict=True)
    branches, keeps, tails = (torch.tensor(column) for column in rest)
    plan = Plan(torch.tensor(noise), branches, keeps, tails)
    group = roots * leaves_per_root(plan)
    if not any(noise[:-1]):
        with pytest.raises(ConfigError, match="gives 0"):
            cost(plan, group)
        return
    check(plan, group, updates=min(updates, cost(plan, group).states), micro_batch=micro_batch)


@pytest.mark.parametrize(
    ("options", "nfe", "states", "decisions", "calls"),
    [
        (("train.micro_batch=5",), 8 * 4, 8 * 3, 8 * 3, [2, 2, 5, 5, 5, 5]),
        # siblings stay together: 2 prompts x (1 + 2 + 2) states, in 2 optimizer steps of 5
        ((TREE, "train.micro_batch=2"), 2 * 9, 2 * 5, 2 * 8, [1, 1, 2, 2, 2, 2]),
    ],
)
def test_a_training_iteration_costs_what_was_counted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    nfe: int,
    states: int,
    decisions: int,
    calls: list[int],
) -> None:
    """Calls of a real iteration's model: sampling without a gradient, training with one."""
    trainer = trainer_for(tmp_path, *options)
    seen: dict[bool, list[int]] = {False: [], True: []}
    velocity = trainer.model.velocity

    def counting(x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        seen[torch.is_grad_enabled()].append(len(x))
        return velocity(x, sigma, cond)

    monkeypatch.setattr(trainer.model, "velocity", counting)
    work, metrics = trainer.cost, trainer.step()
    assert sum(seen[False]) == work.nfe == nfe
    assert work.states == states and work.decisions == metrics["trained"] == decisions
    assert sorted(seen[True]) == calls and len(calls) == work.updates * work.passes


def test_the_lines_say_the_numbers() -> None:
    plan, sizes = full(0, steps=4, noise_scale=0.4), {"updates": 2, "micro_batch": 5}
    text = "\n".join(cost(plan, 4, rollout_batch=8, **sizes).lines())
    assert "2 prompts x 4 images = 8 images from 8 initial noises, 4 steps" in text
    assert "32 NFE in batches of 8\n" in text
    dealt = "24 states / 2 updates = 12 states per update, in 3 micro-batches of up to 5"
    assert f"24 decisions from {dealt}" in text
    assert "each with and without the prompt (guidance)" not in text
    guided = cost(plan, 4, guided=True)
    assert "each with and without the prompt (guidance)" in "\n".join(guided.lines())


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
        ({"prompts": 10**12}, "4,000,000,000,000 images in an iteration; expected at most"),
    ],
)
def test_impossible_numbers(change: dict[str, int], message: str) -> None:
    """4 leaves, 1 trained state per root with 2 draws: those of the last step are not."""
    plan = tree(0, steps=2, noise_scale=0.4, splits=[0, 1])
    good = {"prompts": 6, "group": 4, "updates": 6}
    assert cost(plan, **good).decisions == 12
    with pytest.raises(ConfigError, match=message):
        cost(plan, **{**good, **change})


def test_stored_images_are_read_not_sampled() -> None:
    """Pairs of offline preferences: the dry run speaks of files, and of no noise or NFE."""
    task: Any = None
    plain = cost(pairs(0), 2, trains="leaves", rollout_batch=8)
    stored = StoredImages().work(task, pairs(0), plain)
    first = stored.lines()[0]
    assert first == "images     2 prompts x 2 images = 4 images from files, encoded 8 at a time"
    assert "sampling" not in "\n".join(stored.lines()) and stored.nfe == 0
