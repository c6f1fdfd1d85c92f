"""Plans are data: where the noise is, and which requests are impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.algorithms.plans.trees import comb, rake, tree, window_tree
from flowrl.algorithms.plans.windows import flash_window, fork, full, random_window, sliding_window
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
    for i in range(300):
        first = i // 25
        assert noisy(sliding_window(i, steps=25, noise_scale=0.7, size=4)) == [
            *range(first, first + 4)
        ]


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


RAKE = rake(0, steps=10, noise_scale=0.7, branch=6)
TWIG: dict[str, Any] = {"steps": 10, "noise_scale": 0.7}
FLASH: dict[str, Any] = {"steps": 25, "noise_scale": 0.7, "size": 4}
DEAD = full(0, steps=3, noise_scale=0.5, ode_last=2)._replace(
    branch=torch.tensor([3, 1, 1]), keep=torch.tensor([2, 1, 1]), tail=torch.tensor([1, 0, 0])
)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [  # by hand, or as the reference counts
        (tree(0, steps=20, noise_scale=0.3, splits=[0, 3, 6, 9]), {"leaves": 16}),
        (DEAD, {"leaves": 3 + 2}),  # 3 children with previews, of which 2 go on to one leaf each
        # one TempFlow seed: 10 + 6 x 45 calls in its code; one less here, the trunk's end
        (RAKE, {"nfe": 279, "leaves": 54, "decisions": 54, "states": 9}),
        # TP: 64 there; here every preview's first velocity is the trunk's next: 10 + 9 + (8 .. 1)
        (comb(0, size=9, baseline=True, **TWIG), {"nfe": 55, "leaves": 10}),
        (comb(0, size=10, preview="x0", **TWIG), {"nfe": 10}),  # no call of their own
        # Fast: 9 copies of one state, two noisy steps each: draws from 1 + 9 states
        (
            fork(0, steps=10, noise_scale=0.8, branch=9, size=2, low=3, high=5),
            {"leaves": 9, "decisions": 18, "states": 10, "nfe": 4 + 9 * 6},
        ),
        (flash_window(0, **FLASH), {"nfe": 4 + 7}),  # window 0 to 3, ratio .4 (section 4.2)
        (flash_window(0, stride=0, ratio=0.2, **FLASH), {"nfe": 4 + 3}),
    ],
)
def test_what_plans_cost(plan: Plan, expected: dict[str, int]) -> None:
    found = counts(plan)
    assert {name: getattr(found, name) for name in expected} == expected
    assert leaves_per_root(plan) == found.leaves and roots_for(plan, 2 * found.leaves) == 2


def test_tree_and_fork() -> None:
    plan = tree(0, steps=20, noise_scale=0.3, splits=[0, 3, 6, 9])
    assert (plan.branch == 2).nonzero().flatten().tolist() == [0, 3, 6, 9]
    assert torch.equal(plan.keep, plan.branch)
    fast = fork(0, steps=10, noise_scale=0.8, branch=9, size=2, low=3, high=5)
    assert fast.noise.tolist() == pytest.approx([0, 0, 0, 0.8, 0.8, 0, 0, 0, 0, 0])
    assert fast.branch.tolist() == fast.keep.tolist() == [9 if k == 3 else 1 for k in range(10)]


def test_noise_of_a_window_tree_grows_with_depth_and_slides() -> None:
    """level (1 + growth k / size) at the k-th step of the window; without growth the window's."""
    options: dict[str, Any] = {"steps": 9, "size": 4, "noise_scale": 0.5, "every": 10}
    for first in (0, 1):
        plan, expected = window_tree(10 * first, growth=0.8, **options), torch.zeros(9)
        expected[first : first + 4] = torch.tensor([0.6, 0.7, 0.8, 0.9])
        torch.testing.assert_close(plan.noise, expected)
        assert plan.branch.tolist() == [2 if noise else 1 for noise in expected]
    plain = window_tree(10, **options)
    assert torch.equal(plain.noise, sliding_window(10, **options).noise)


def test_flash_star_never_slides() -> None:
    """Stride 0: the code's spared steps change nothing."""
    star: dict[str, Any] = {"stride": 0, "ratio": 0.2, **FLASH}
    one, late, spared = (
        flash_window(0, **star),
        flash_window(99, **star),
        flash_window(0, spare=2, **star),
    )
    assert torch.equal(one.noise, late.noise) and torch.equal(one.noise, spared.noise)


ONE: dict[str, Any] = {"steps": 5, "noise_scale": 1}
TEN: dict[str, Any] = {"steps": 10, "noise_scale": 1}


def plan_steps(**change: Any) -> Any:
    """Read a plan of three steps in which something was changed."""
    return steps_of(full(0, steps=3, noise_scale=1)._replace(**change))


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        (sliding_window, TEN | {"size": 9}, ["size=9", "start=0", "steps=10", "spare=2"]),
        (sliding_window, TEN | {"size": 4, "start": 5}, ["start=5", "start <= 4"]),
        (sliding_window, TEN | {"size": 0}, ["size=0"]),
        (sliding_window, TEN | {"size": 2, "every": 0}, ["every=0"]),
        (random_window, TEN | {"size": 4, "low": 7}, ["size=4", "low=7", "high=10"]),
        (random_window, TEN | {"size": 2, "high": 11}, ["high=11", "steps=10"]),
        (tree, ONE | {"splits": [0, 5]}, ["[0, 5]", "0 to 4"]),
        (tree, ONE | {"splits": [1, 1]}, ["[1, 1]", "twice"]),
        (tree, ONE | {"splits": [4], "ode_last": 1}, ["[4]", "0 to 3"]),
        (tree, ONE | {"splits": [0], "branch": 1}, ["branch=1"]),
        (tree, ONE | {"splits": [0], "spread": 0.0}, ["spread=0.0"]),
        (tree, ONE | {"splits": [0], "block": 31}, ["block=31", "block_every=30"]),
        (full, ONE | {"ode_last": 5}, ["ode_last=5", "steps=5"]),
        (full, ONE | {"steps": 0}, ["steps=0"]),
        (full, ONE | {"noise_scale": -1}, ["noise_scale=-1"]),
        (full, ONE | {"noise_scale": float("nan")}, ["noise_scale=nan"]),
        (rake, ONE | {"branch": 4, "high": 5}, ["high=5", "<= 4", "steps=5"]),
        (rake, ONE | {"branch": 4, "low": 3, "high": 3}, ["low=3", "high=3"]),
        (rake, ONE | {"branch": 4, "noise_scale": 0.0}, ["noise_scale=0.0"]),
        (rake, ONE | {"branch": 1}, ["branch=1"]),
        (rake, ONE | {"branch": 2, "strides": [0, 1]}, ["[0, 1]"]),
        (comb, ONE | {"size": 6}, ["size=6", "steps=5"]),
        (comb, ONE | {"size": 3, "noise_scale": 0.0}, ["noise_scale=0.0"]),
        (window_tree, ONE | {"size": 2, "splits": [2]}, ["[2]", "0 to 1", "size=2"]),
        (window_tree, ONE | {"size": 4}, ["size=4", "steps=5"]),
        (flash_window, ONE | {"steps": 8, "size": 3, "spare": 2}, ["one point", "ratio=0.4"]),
        (fork, ONE | {"branch": 1}, ["fork", "branch=1"]),
        (fork, ONE | {"branch": 4, "low": 5}, ["low=5"]),
        (fork, ONE | {"branch": 4, "high": 9}, ["high=9"]),
        (fork, ONE | {"branch": 4, "low": 4, "size": 2}, ["low=4", "size=2"]),
    ],
)
def test_impossible_plans_name_the_numbers(make: Any, options: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make(0, **options)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


BINARY = tree(0, steps=5, noise_scale=1, splits=[0, 1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: roots_for(BINARY, 10), ["10 images", "4 leaves", "8 or 12"]),
        (lambda: roots_for(BINARY, 2), ["2 images", "4 leaves"]),
        (lambda: roots_for(rake(0, branch=4, **ONE), 10), ["10 images", "16 leaves"]),
        (lambda: steps_of(BINARY._replace(noise=torch.zeros(5))), ["step 0", "need noise"]),
        (lambda: plan_steps(keep=torch.tensor([1, 2, 1])), ["step 1", "keep <= branch"]),
        (lambda: plan_steps(keep=torch.tensor([1])), ["lengths [3, 3, 1, 3]"]),
        (lambda: plan_steps(solver=torch.tensor([1, 3, 1])), ["step 1", "got 3"]),
    ],
)
def test_plans_that_cannot_be_read_name_the_numbers(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)


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
    options: dict[str, Any] = {"steps": 6, "noise_scale": 0.5, "branch": 4, "low": 1, "high": 4}
    starts = set()
    for iteration in range(60):
        plan = fork(iteration, seed=3, **options)
        (k,) = noisy(plan)
        starts.add(k)
        assert plan.branch.tolist() == plan.keep.tolist() == [4 if i == k else 1 for i in range(6)]
        assert torch.equal(plan.noise, fork(iteration, seed=3, **options).noise)
    assert starts == {1, 2, 3}  # 60 draws miss one of three with probability 3 (2/3)^60 < 1e-10
