"""Sigma grids read at fractional places, and the places of MixGRPO-Flash."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sigmakit import dynamic_grid, static_grid
from torch import Tensor

from flowrl.algorithms.rollout.plan_steps import flash_places, read_sigma_grid
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid, shift_sigmas
from flowrl.core.types import SigmaGrid

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


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [  # 25 steps, window 0 to 3, ratio 0.4: 4 + 7 steps, those behind it of 3 model steps each
        ((25, 3, 0.4), [0, 1, 2, 3, 4, 7, 10, 13, 16, 19, 22, 25]),
        ((6, 2, 0.5), [0, 1, 2, 3, 6]),  # int(4 * 0.5) = 2 points: straight to the end
        ((6, 2, 1.0), [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_places_of_flash(numbers: tuple[int, int, float], expected: list[int]) -> None:
    assert flash_places(*numbers).tolist() == expected


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
