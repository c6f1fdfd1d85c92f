"""Plans are data: where the noise is, how windows move, which sigmas are read, and which requests
are impossible."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sigmakit import dynamic_grid, static_grid
from torch import Tensor

from flowrl.algorithms.plans.trees import comb, rake, tree, window_tree
from flowrl.algorithms.plans.windows import (
    _window_start,
    flash_window,
    fork,
    full,
    random_window,
    sliding_window,
)
from flowrl.algorithms.rollout.plan_steps import (
    counts,
    flash_places,
    leaves_per_root,
    read_sigma_grid,
    roots_for,
    steps_of,
)
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid, shift_sigmas
from flowrl.core.types import Plan, SigmaGrid


def noisy(plan: Plan) -> list[int]:
    return plan.noise.nonzero().flatten().tolist()


def test_full() -> None:
    assert noisy(full(0, steps=4, noise_scale=0.7)) == [0, 1, 2, 3]
    assert noisy(full(9, steps=4, noise_scale=0.7, ode_last=1)) == [0, 1, 2]
    assert noisy(full(0, steps=4, noise_scale=0.0)) == []
    assert steps_of(full(0, steps=1, noise_scale=0.5)) == [(0.5, 1, 1, 0, 1)]


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


Pace = Literal["constant", "linear", "exponential"]


# 25 steps, size 4, the last two spared
MIX: dict[str, Any] = {"start": 0, "stride": 1, "last": 19, "steps": 25, "roll_back": True}


def starts(count: int, **options: Any) -> list[int]:
    return [_window_start(iteration, **options) for iteration in range(count)]


def slow(
    count: int, tau: list[int], *, start: int, stride: int, last: int, roll_back: bool
) -> list[int]:
    """Keep a position and a counter as the description says: tau[l] iterations at step l, then one
    stride."""
    at, waited, out = start, 0, []
    for _ in range(count):
        out.append(at)
        waited += 1
        if waited >= tau[at]:
            if stride and at + stride > last:
                at = 0 if roll_back else last
            else:
                at += stride
            waited = 0
    return out


def test_the_linear_pace_of_the_code() -> None:
    """By hand, 11 steps, so the line ends at step 9, with tau from 10 to 1: 10, 9, ..., 1
    iterations, 55 in all; then the round starts again."""
    options = {"every": 10, "pace": "linear", "start": 0, "stride": 1, "last": 9, "steps": 11}
    options["roll_back"] = True
    round_ = [step for step in range(10) for _ in range(10 - step)]
    assert starts(150, **options) == (round_ * 3)[:150]


def test_the_exponential_pace_of_the_code() -> None:
    """tau0 = 10 up to step 13, then ceil(10 exp(-0.1 (l - 13))): 10 10 9 8 7 7 6 at 13 to 19."""
    stays = [10] * 14 + [math.ceil(10 * math.exp(-0.1 * i)) for i in range(1, 7)]
    assert stays[13:] == [10, 10, 9, 8, 7, 7, 6]
    want = [step for step, stay in enumerate(stays) for _ in range(stay)]
    assert starts(len(want), every=10, pace="exponential", **MIX) == want
    assert starts(len(want) + 1, every=10, pace="exponential", **MIX)[-1] == 0


@pytest.mark.parametrize("roll_back", [True, False])
@pytest.mark.parametrize(
    ("start", "stride", "last"),
    [(0, 1, 19), (4, 1, 19), (3, 2, 18), (0, 4, 19), (7, 1, 7), (2, 0, 9)],
)
def test_every_pace_against_a_counter(start: int, stride: int, last: int, roll_back: bool) -> None:
    """The stays written out with fractions, 400 iterations, strides that miss the last start
    included."""
    line = [10 - 9 * Fraction(at, last + 2) for at in range(last + 1)]
    taus: dict[Pace, list[int]] = {
        "constant": [10] * (last + 1),
        "linear": [int(tau) for tau in line],
        "exponential": [math.ceil(10 * math.exp(-0.1 * max(0, at - 13))) for at in range(last + 1)],
    }
    for pace, tau in taus.items():
        options: dict[str, Any] = {"start": start, "stride": stride, "last": last}
        options["roll_back"] = roll_back
        wanted = slow(400, tau, **options)
        assert starts(400, every=10, pace=pace, steps=last + 4, **options) == wanted, pace


def test_the_knobs_of_the_exponential_pace() -> None:
    """decay 0 never shortens a stay; a large one leaves 1 iteration from the step after `hold` on,
    never 0."""
    assert starts(300, every=10, pace="exponential", decay=0.0, **MIX) == starts(
        300, every=10, **MIX
    )
    fast = starts(50, every=10, pace="exponential", hold=2, decay=50.0, **MIX)
    assert fast == [0] * 10 + [1] * 10 + [2] * 10 + [*range(3, 20), 0, 0, 0]


GRIDS = [linear_grid(16, 3.0), static_grid(16), dynamic_grid(16, 1024)]


GRIDS += [0.9 * linear_grid(16, 3.0) + 0.01]  # no S of an even time


def grid_c(steps: int) -> Tensor:
    return shift_sigmas(torch.linspace(1, 0, steps + 1, dtype=torch.float64), 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [1.0, 3.0, 0.4])
@pytest.mark.parametrize("sigmas", GRIDS)
def test_whole_places_give_the_models_own_values_to_the_bit(
    sigmas: Tensor, shift: float, dtype: torch.dtype
) -> None:
    """Whatever the shift that is undone between them."""
    places = torch.tensor([0.0, 1, 2.5, 3, 7, 15, 16], dtype=torch.float64)
    got = read_sigma_grid(sigmas.to(dtype), SigmaGrid(16, places, shift))
    whole = places == places.round()
    assert got.dtype == dtype
    assert torch.equal(got[whole], sigmas.to(dtype)[places[whole].long()])
    assert sigmas[3] < got[2] < sigmas[2]


@pytest.mark.parametrize(
    ("last", "ratio", "points"), [(3, 0.4, 8), (14, 0.4, 4), (3, 0.2, 4), (20, 0.4, 2), (0, 1, 25)]
)
def test_grid_c_is_the_published_coarse_grid(last: int, ratio: float, points: int) -> None:
    """S(linspace(u, 0, n); 3) from the time u of the step after the window; n by hand: int((25 -
    last) ratio)."""
    places = flash_places(25, last, ratio)
    u = 1 - (last + 1) / 25
    coarse = shift_sigmas(torch.linspace(u, 0, points, dtype=torch.float64), 3.0)
    want = torch.cat([grid_c(25)[: last + 1], coarse])
    assert len(places) == last + 1 + points and places.dtype == torch.float64
    got = read_sigma_grid(grid_c(25), SigmaGrid(25, places, 3.0))
    torch.testing.assert_close(got, want, atol=1e-14, rtol=0)
    single = read_sigma_grid(linear_grid(25, 3.0), SigmaGrid(25, places, 3.0))
    torch.testing.assert_close(single, want.float(), atol=2e-7, rtol=0)
    assert single[0] == 1 and single[-1] == 0


@pytest.mark.parametrize(
    ("sigmas", "places", "shift", "expected"),
    [  # by hand: steps of 0.5, 0.3 and 0.2, linear in sigma without a shift
        ([1, 0.5, 0.2, 0], [0, 0.5, 1.25, 2.9, 3], 1.0, [1, 0.75, 0.425, 0.02, 0]),
        # halfway in time: u = 0.75 and 0.25 -> S = 2.25 / 2.5 and 0.75 / 1.5
        (grid_c(2).tolist(), [0, 0.5, 1.5, 2], 3.0, [1, 0.9, 0.5, 0]),
    ],
)
def test_places_between(
    sigmas: list[float], places: list[float], shift: float, expected: list[float]
) -> None:
    model, at = (torch.tensor(row, dtype=torch.float64) for row in (sigmas, places))
    got = read_sigma_grid(model, SigmaGrid(len(model) - 1, at, shift))
    assert got.tolist() == pytest.approx(expected, abs=1e-14)


@given(st.integers(2, 200), st.data())
def test_places_always_end_at_the_end(steps: int, data: st.DataObject) -> None:
    """And whole places among the coarse ones are whole to the last bit, so that they read the
    model's own value."""
    last = data.draw(st.integers(0, steps - 2))
    ratio = data.draw(st.floats(2 / (steps - last), 1))
    points = int(max((steps - last) * ratio, 1))
    assume(points >= 2)  # 2 / n * n can round below 2
    places = flash_places(steps, last, ratio)
    assert len(places) == last + 1 + points and places[-1] == steps
    assert bool((places.diff() > 0).all())
    assert places[: last + 2].tolist() == list(range(last + 2))
    exact = [(steps - last - 1) * i % (points - 1) == 0 for i in range(points)]
    assert [place == round(place) for place in places[last + 1 :].tolist()] == exact


LATE = ["last=21", "steps=25", "ratio=0.4", "1.6", "place 22 of 25", "last <= 20", "ratio >= 2 / 4"]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [  # the first three are the edges of what works: one earlier does
        ((25, 21, 0.4), LATE),
        ((25, 16, 0.2), ["last=16", "ratio=0.2", "1.8", "place 17 of 25", "last <= 15"]),
        ((25, 24, 1.0), ["last=24", "one point", "last <= 23"]),
        ((25, 25, 0.4), ["last=25", "steps=25"]),
        ((25, -1, 0.4), ["last=-1"]),
        ((25, 3, 0.0), ["ratio=0"]),
        ((25, 3, 1.5), ["ratio=1.5"]),
        ((25, 3, float("nan")), ["ratio=nan"]),
    ],
)
def test_impossible_coarse_grids_name_the_numbers(
    numbers: tuple[int, int, float], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        flash_places(*numbers)
    assert [word for word in words if word not in str(error.value)] == []
    if "one point" in str(error.value):
        steps, last, ratio = numbers
        assert flash_places(steps, last - 1, ratio)[-2:].tolist() == [last, steps]


@pytest.mark.parametrize(
    ("sigmas", "places", "shift", "message"),
    [
        (5, [0.0, 4.0], 3.0, "of 3 steps needs 4 sigmas and places from 0 to 3"),
        (4, [0.0, 3.5], 3.0, "of 3 steps needs 4 sigmas and places from 0 to 3"),
        (4, [-0.5, 3.0], 3.0, "of 3 steps needs 4 sigmas and places from 0 to 3"),
        (4, [0.0, 1.5, 3.0], 0.0, "time shift"),
    ],
)
def test_a_grid_that_is_not_the_models(
    sigmas: int, places: list[float], shift: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sigma_grid(torch.linspace(1, 0, sigmas), SigmaGrid(3, torch.tensor(places), shift))
