"""Sigma grids read at fractional places, and the places of MixGRPO-Flash."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.algorithms.rollout.sigma_grid import flash_places, read_sigma_grid
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import dynamic_grid, linear_grid, shift_sigmas, static_grid
from flowrl.core.types import SigmaGrid


def grid_c(steps: int) -> Tensor:
    return shift_sigmas(torch.linspace(1, 0, steps + 1, dtype=torch.float64), 3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whole_places_give_the_models_own_values_to_the_bit(dtype: torch.dtype) -> None:
    """Whatever the shift that is undone between them, and also on grids that are no S of an even
    time."""
    for sigmas in (
        linear_grid(16, 3.0),
        static_grid(16),
        dynamic_grid(16, 1024),
        0.9 * linear_grid(16, 3.0) + 0.01,
    ):
        for shift in (1.0, 3.0, 0.4):
            grid = SigmaGrid(
                16, torch.tensor([0.0, 1, 2.5, 3, 7, 15, 16], dtype=torch.float64), shift
            )
            got = read_sigma_grid(sigmas.to(dtype), grid)
            assert got.dtype == dtype and torch.equal(
                got[[0, 1, 3, 4, 5, 6]], sigmas.to(dtype)[[0, 1, 3, 7, 15, 16]]
            )
            assert sigmas[3] < got[2] < sigmas[2]


@pytest.mark.parametrize(
    ("last", "ratio", "points"), [(3, 0.4, 8), (14, 0.4, 4), (3, 0.2, 4), (20, 0.4, 2), (0, 1, 25)]
)
def test_grid_c_is_the_published_coarse_grid(last: int, ratio: float, points: int) -> None:
    """S(linspace(u, 0, n); 3) from the time u of the step after the window; n by hand: int((25 -
    last) ratio)."""
    places = flash_places(25, last, ratio)
    u = 1 - (last + 1) / 25
    want = torch.cat(
        [
            grid_c(25)[: last + 1],
            shift_sigmas(torch.linspace(u, 0, points, dtype=torch.float64), 3.0),
        ]
    )
    assert len(places) == last + 1 + points and places.dtype == torch.float64
    torch.testing.assert_close(
        read_sigma_grid(grid_c(25), SigmaGrid(25, places, 3.0)), want, atol=1e-14, rtol=0
    )
    single = read_sigma_grid(linear_grid(25, 3.0), SigmaGrid(25, places, 3.0))
    torch.testing.assert_close(single, want.float(), atol=2e-7, rtol=0)
    assert single[0] == 1 and single[-1] == 0


def test_without_a_shift_interpolation_is_linear_in_sigma() -> None:
    """By hand on a grid with steps of 0.5, 0.3 and 0.2."""
    sigmas = torch.tensor([1.0, 0.5, 0.2, 0.0], dtype=torch.float64)
    got = read_sigma_grid(sigmas, SigmaGrid(3, torch.tensor([0.0, 0.5, 1.25, 2.9, 3.0]), 1.0))
    torch.testing.assert_close(
        got, torch.tensor([1.0, 0.75, 0.425, 0.02, 0.0], dtype=torch.float64), atol=1e-7, rtol=0
    )


def test_the_place_between_is_halfway_in_time() -> None:
    """By hand on SigmaGrid C with 2 steps: u = 0.75 and 0.25 -> S = 2.25 / 2.5 and 0.75 / 1.5."""
    got = read_sigma_grid(grid_c(2), SigmaGrid(2, torch.tensor([0.0, 0.5, 1.5, 2.0]), 3.0))
    torch.testing.assert_close(
        got, torch.tensor([1, 0.9, 0.5, 0], dtype=torch.float64), atol=1e-15, rtol=0
    )


def test_places_of_flash() -> None:
    """25 steps, window 0 to 3, ratio 0.4: 4 + 7 = 11 steps, those behind the window of 3 model
    steps each."""
    assert flash_places(25, 3, 0.4).tolist() == [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25]
    assert flash_places(6, 2, 0.5).tolist() == [
        0,
        1,
        2,
        3,
        6,
    ]  # int(4 * 0.5) = 2 points: straight to the end
    assert flash_places(6, 2, 1.0).tolist() == [0, 1, 2, 3, 4, 5, 6]


@given(st.integers(2, 200), st.data())
def test_places_always_end_at_the_end(steps: int, data: st.DataObject) -> None:
    """And whole places among the coarse ones are whole to the last bit, so that they read the
    model's own value."""
    last = data.draw(st.integers(0, steps - 2))
    ratio = data.draw(st.floats(2 / (steps - last), 1))
    points = int(max((steps - last) * ratio, 1))
    if points < 2:  # 2 / n * n can round below 2
        return
    places = flash_places(steps, last, ratio)
    assert (
        len(places) == last + 1 + points and places[-1] == steps and bool((places.diff() > 0).all())
    )
    assert places[: last + 2].tolist() == list(range(last + 2))
    exact = [(steps - last - 1) * i % (points - 1) == 0 for i in range(points)]
    assert [place == round(place) for place in places[last + 1 :].tolist()] == exact


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            (25, 21, 0.4),
            [
                "last=21",
                "steps=25",
                "ratio=0.4",
                "1.6",
                "place 22 of 25",
                "last <= 20",
                "ratio >= 2 / 4",
            ],
        ),
        (
            (25, 16, 0.2),
            ["last=16", "steps=25", "ratio=0.2", "1.8", "place 17 of 25", "last <= 15"],
        ),
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
    """The first two are the edges of the published settings: one earlier works."""
    with pytest.raises(ConfigError) as error:
        flash_places(*numbers)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(("last", "ratio"), [(20, 0.4), (15, 0.2), (23, 1.0)])
def test_the_latest_window_that_works(last: int, ratio: float) -> None:
    assert flash_places(25, last, ratio)[-2:].tolist() == [last + 1, 25]


def test_a_grid_that_is_not_the_models() -> None:
    for sigmas, places in ((5, [0.0, 4.0]), (4, [0.0, 3.5]), (4, [-0.5, 3.0])):
        with pytest.raises(ConfigError, match="of 3 steps needs 4 sigmas and places from 0 to 3"):
            read_sigma_grid(torch.linspace(1, 0, sigmas), SigmaGrid(3, torch.tensor(places), 3.0))
    with pytest.raises(ConfigError, match="time shift"):
        read_sigma_grid(torch.linspace(1, 0, 4), SigmaGrid(3, torch.tensor([0.0, 1.5, 3.0]), 0.0))
