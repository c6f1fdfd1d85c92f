"""Plans are data: where the noise is, and which requests are impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.plans import windows as plans
from flowrl.algorithms.plans.trees import tree
from flowrl.algorithms.plans.windows import full, random_window, sliding_window
from flowrl.algorithms.rollout.plan_steps import counts, leaves_per_root, roots_for, steps_of
from flowrl.core.errors import ConfigError
from flowrl.core.types import Plan


def noisy(plan: Plan) -> list[int]:
    return plan.noise.nonzero().flatten().tolist()


def test_full() -> None:
    assert noisy(full(0, steps=4, noise_scale=0.7)) == [0, 1, 2, 3]
    assert noisy(full(9, steps=4, noise_scale=0.7, ode_last=1)) == [0, 1, 2]
    assert noisy(full(0, steps=4, noise_scale=0.0)) == []
    assert steps_of(full(0, steps=1, noise_scale=0.5)) == [(0.5, 1, 1, 0, 1)]


def test_sliding_window_of_the_shipped_mixgrpo_run() -> None:
    """300 iterations, 25 steps, size 4, every 25: the code's start is floor(iteration / 25), no
    roll-back."""
    plans = [sliding_window(i, steps=25, noise_scale=0.7, size=4) for i in range(300)]
    assert [noisy(p) for p in plans] == [[i // 25 + k for k in range(4)] for i in range(300)]


def test_sliding_window_rolls_back_or_stays() -> None:
    """By hand: 8 steps, size 3, the last two without noise -> starts 0 to 3."""

    def starts(**options: Any) -> list[int]:
        plans = [
            sliding_window(i, steps=8, noise_scale=1.0, size=3, every=1, **options)
            for i in range(7)
        ]
        assert all(len(noisy(p)) == 3 for p in plans)
        return [noisy(p)[0] for p in plans]

    assert starts() == [0, 1, 2, 3, 0, 1, 2]
    assert starts(start=2) == [2, 3, 0, 1, 2, 3, 0]
    assert starts(stride=2) == [0, 2, 0, 2, 0, 2, 0]
    assert starts(roll_back=False) == [0, 1, 2, 3, 3, 3, 3]
    assert starts(roll_back=False, spare=0) == [0, 1, 2, 3, 4, 5, 5]
    assert starts(stride=0, start=1) == [1] * 7


def test_random_window_is_stateless_and_uniform() -> None:
    options = {"steps": 10, "noise_scale": 0.8, "size": 3, "low": 1, "high": 7}
    starts = [noisy(random_window(i, **options))[0] for i in range(800)]  # type: ignore[arg-type]
    assert starts == [noisy(random_window(i, **options))[0] for i in range(800)]  # type: ignore[arg-type]
    often = torch.bincount(torch.tensor(starts), minlength=10).tolist()
    assert often[0] == 0 and sum(often[5:]) == 0
    assert all(
        abs(c - 200) < 4 * (800 * 0.25 * 0.75) ** 0.5 for c in often[1:5]
    )  # 4 SD of a binomial
    assert starts != [noisy(random_window(i, **options, seed=1))[0] for i in range(800)]  # type: ignore[arg-type]


def test_random_window_is_the_same_everywhere() -> None:
    """The draw must not change between Python versions: starts recorded once, with CPython 3.11."""
    starts = [noisy(random_window(i, steps=10, noise_scale=0.8, size=2))[0] for i in range(6)]
    assert starts == [0, 7, 8, 6, 6, 0]


def test_tree() -> None:
    plan = tree(0, steps=20, noise_scale=0.3, splits=[0, 3, 6, 9])
    assert (plan.branch == 2).nonzero().flatten().tolist() == [0, 3, 6, 9]
    assert torch.equal(plan.keep, plan.branch)
    assert leaves_per_root(plan) == 16
    assert roots_for(plan, 32) == 2


def test_leaves_count_previews_and_dead_ends() -> None:
    """By hand: step 0 gives 3 children with previews, 2 go on, each ends in one leaf: 3 + 2."""
    plan = full(0, steps=3, noise_scale=0.5, ode_last=2)._replace(
        branch=torch.tensor([3, 1, 1]), keep=torch.tensor([2, 1, 1]), tail=torch.tensor([1, 0, 0])
    )
    assert leaves_per_root(plan) == 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sliding_window(0, steps=10, noise_scale=1, size=9),
            ["size=9", "start=0", "steps=10", "spare=2"],
        ),
        (
            lambda: sliding_window(0, steps=10, noise_scale=1, size=4, start=5),
            ["start=5", "start <= 4"],
        ),
        (lambda: sliding_window(0, steps=10, noise_scale=1, size=0), ["size=0"]),
        (lambda: sliding_window(0, steps=10, noise_scale=1, size=2, every=0), ["every=0"]),
        (
            lambda: random_window(0, steps=10, noise_scale=1, size=4, low=7),
            ["size=4", "low=7", "high=10"],
        ),
        (
            lambda: random_window(0, steps=10, noise_scale=1, size=2, high=11),
            ["high=11", "steps=10"],
        ),
        (lambda: tree(0, steps=5, noise_scale=1, splits=[0, 5]), ["[0, 5]", "0 to 4"]),
        (lambda: tree(0, steps=5, noise_scale=1, splits=[1, 1]), ["[1, 1]", "twice"]),
        (lambda: tree(0, steps=5, noise_scale=1, splits=[4], ode_last=1), ["[4]", "0 to 3"]),
        (lambda: tree(0, steps=5, noise_scale=1, splits=[0], branch=1), ["branch=1"]),
        (lambda: full(0, steps=5, noise_scale=1, ode_last=5), ["ode_last=5", "steps=5"]),
        (lambda: full(0, steps=0, noise_scale=1), ["steps=0"]),
        (lambda: full(0, steps=5, noise_scale=-1), ["noise_scale=-1"]),
        (lambda: full(0, steps=5, noise_scale=float("nan")), ["noise_scale=nan"]),
        (
            lambda: roots_for(tree(0, steps=5, noise_scale=1, splits=[0, 1]), 10),
            ["10 images", "4 leaves", "8 or 12"],
        ),
        (
            lambda: roots_for(tree(0, steps=5, noise_scale=1, splits=[0, 1]), 2),
            ["2 images", "4 leaves"],
        ),
        (lambda: steps_of(tree(0, steps=5, noise_scale=0, splits=[0])), ["step 0", "need noise"]),
        (
            lambda: steps_of(full(0, steps=2, noise_scale=1)._replace(keep=torch.tensor([1, 2]))),
            ["step 1", "keep <= branch"],
        ),
        (
            lambda: steps_of(full(0, steps=2, noise_scale=1)._replace(keep=torch.tensor([1]))),
            ["lengths [2, 2, 1, 2]"],
        ),
    ],
)
def test_impossible_plans_name_the_numbers(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_a_possible_window_always_has_its_size(data: st.DataObject) -> None:
    steps = data.draw(st.integers(3, 30))
    spare = data.draw(st.integers(0, 2))
    size = data.draw(st.integers(1, steps - spare))
    start = data.draw(st.integers(0, steps - spare - size))
    stride, every, iteration = (data.draw(st.integers(low, 50)) for low in (0, 1, 0))
    plan = sliding_window(
        iteration,
        steps=steps,
        noise_scale=0.5,
        size=size,
        start=start,
        stride=stride,
        every=every,
        spare=spare,
    )
    where = noisy(plan)
    assert where == list(range(where[0], where[0] + size)) and where[-1] < steps - spare


def test_fork_draws_siblings_at_one_step_inside_the_range() -> None:
    starts = set()
    for iteration in range(60):
        plan = plans.fork(iteration, steps=6, noise_scale=0.5, branch=4, low=1, high=4, seed=3)
        (k,) = plan.noise.nonzero().flatten().tolist()
        starts.add(k)
        assert plan.branch.tolist() == plan.keep.tolist() == [4 if i == k else 1 for i in range(6)]
        assert leaves_per_root(plan) == 4
        assert torch.equal(
            plan.noise,
            plans.fork(iteration, steps=6, noise_scale=0.5, branch=4, low=1, high=4, seed=3).noise,
        )
    assert starts == {1, 2, 3}  # 60 draws miss one of three with probability 3 (2/3)^60 < 1e-10


def test_fork_in_fast_s_first_form_parts_once_and_draws_twice() -> None:
    """9 copies of one state, two noisy steps each: 9 leaves, 18 draws from 1 + 9 states."""
    plan = plans.fork(0, steps=10, noise_scale=0.8, branch=9, size=2, low=3, high=5)
    assert plan.noise.tolist() == pytest.approx([0, 0, 0, 0.8, 0.8, 0, 0, 0, 0, 0])
    assert plan.branch.tolist() == plan.keep.tolist() == [9 if k == 3 else 1 for k in range(10)]
    one = counts(plan)
    assert (one.leaves, one.decisions, one.states, one.nfe) == (9, 18, 10, 4 + 9 * 6)


@pytest.mark.parametrize(
    "options",
    [
        {"branch": 1},
        {"branch": 4, "low": 6},
        {"branch": 4, "high": 9},
        {"branch": 4, "low": 5, "size": 2},
    ],
)
def test_impossible_forks(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="fork|window"):
        plans.fork(0, **{"steps": 6, "noise_scale": 0.5, **options})  # type: ignore[arg-type]
