"""The path's algebra and the sigma grids; streams by what they are for, which keys alone decide."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch
from sigmakit import dynamic_grid, static_grid

from flowrl.algorithms.transitions import euler, gaussian_log_prob
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import (
    eps_from,
    flow_from_vp,
    interpolate,
    linear_grid,
    shift_sigmas,
    velocity_from_eps,
    vp_from_flow,
    wide,
)
from flowrl.core.noise_path import x0_from as clean
from flowrl.core.seeds import generator, seed_of
from flowrl.core.types import concatenated, medians


def test_the_true_velocity_recovers_both_ends() -> None:
    """x = (1-s) x0 + s eps with v = eps - x0 is solved for x0 and eps by algebra."""
    torch.manual_seed(0)
    x0, eps, sigma = (
        torch.randn(5, 2, 3).double(),
        torch.randn(5, 2, 3).double(),
        torch.linspace(0, 1, 5).double(),
    )
    x = interpolate(x0, eps, sigma)
    torch.testing.assert_close(clean(x, eps - x0, sigma), x0)
    torch.testing.assert_close(eps_from(x, eps - x0, sigma), eps)
    torch.testing.assert_close(x[0], x0[0])
    torch.testing.assert_close(x[-1], eps[-1])
    torch.testing.assert_close(velocity_from_eps(x[:-1], eps[:-1], sigma[:-1]), (eps - x0)[:-1])


@pytest.mark.parametrize(
    ("grid", "expected"),
    [  # reference values, computed with numpy float64 from the published formulas
        (
            static_grid(14),
            [1, 0.973058, 0.943048, 0.909412, 0.871453, 0.828280, 0.778738, 0.721306]
            + [0.653936, 0.573805, 0.476909, 0.357368, 0.206198, 0.008929, 0],
        ),
        (
            dynamic_grid(10, 4096),
            [1, 0.966, 0.9266, 0.8805, 0.8257, 0.7595, 0.678, 0.5751, 0.4412, 0.2598, 0],
        ),
        (
            linear_grid(16, 3.0),
            [1, 0.9783, 0.9545, 0.9286, 0.9, 0.8684, 0.8333, 0.7941, 0.75, 0.7]
            + [0.6429, 0.5769, 0.5, 0.4091, 0.3, 0.1667, 0],
        ),
    ],
)  # fmt: skip
def test_grids_match_published_values(grid: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(grid, torch.tensor(expected), atol=5.1e-5, rtol=0)
    assert grid.dtype == torch.float32 and float(grid[0]) == 1 and float(grid[-1]) == 0


def test_grids_and_euler_step_are_those_of_diffusers() -> None:
    """Oracle: diffusers' own scheduler, called with the arguments that its SD3 and FLUX pipelines
    pass."""
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    torch.testing.assert_close(static_grid(10), scheduler.sigmas, atol=2e-7, rtol=0)
    x, v = torch.randn(1, 3, 4, 4), torch.randn(1, 3, 4, 4)
    theirs = scheduler.step(v, scheduler.timesteps[0], x, return_dict=False)[0]
    assert torch.equal(euler(x, v, scheduler.sigmas[0:1], scheduler.sigmas[1:2]), theirs)

    flux = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    flux.set_timesteps(sigmas=torch.linspace(1, 1 / 6, 6).tolist(), mu=0.63)  # mu of 1024 tokens
    torch.testing.assert_close(dynamic_grid(6, 1024), flux.sigmas, atol=2e-7, rtol=0)


def test_shift_keeps_the_ends_and_has_an_inverse() -> None:
    """S(.; 1/s) undoes S(.; s): algebra."""
    u = torch.linspace(0, 1, 11).double()
    assert torch.equal(shift_sigmas(u, 1.0), u)
    torch.testing.assert_close(shift_sigmas(shift_sigmas(u, 3.0), 1 / 3.0), u)
    with pytest.raises(ConfigError, match="got 0"):
        shift_sigmas(u, 0)
    with pytest.raises(ConfigError, match="steps=0"):
        linear_grid(0)


def test_vp_latents_are_rescaled_there_and_back() -> None:
    """sigma is the share of noise, s / (alpha + s), and x = x_vp / (alpha + s): algebra."""
    alpha_bar = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    alpha, s = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    x_vp = torch.tensor([[0.3], [-1.2], [2.0]], dtype=torch.float64)
    x, sigma = flow_from_vp(x_vp, alpha, s)
    torch.testing.assert_close(sigma, s / (alpha + s))
    torch.testing.assert_close(x[:, 0], x_vp[:, 0] / (alpha + s))
    torch.testing.assert_close(vp_from_flow(x, sigma), x_vp)


def test_log_ratios_do_not_depend_on_the_coordinates() -> None:
    """A common rescale shifts both log-densities by log(scale), so their difference stays: change
    of variables."""
    torch.manual_seed(1)
    drawn, new, old = torch.randn(3, 4, 6).double()
    std = torch.full((4,), 0.3).double()
    ratios = []
    for k in (1.0, 1.37):
        log_probs = [gaussian_log_prob(k * drawn, k * mean, k * std) for mean in (new, old)]
        ratios.append(log_probs[0] - log_probs[1])
    torch.testing.assert_close(*ratios)


def test_wide_never_narrows() -> None:
    assert [
        wide(torch.zeros(1, dtype=d)).dtype for d in (torch.bfloat16, torch.float16, torch.float32)
    ] == [torch.float32] * 3
    assert wide(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64


# ------------------------------------------------------------------------------------------ streams


def test_a_stream_is_the_mersenne_twister_from_all_of_its_hash() -> None:
    """The standard library's Mersenne Twister, set to the SHAKE-128 digest of the text of the keys,
    gives the numbers expected; torch puts two of them, the upper half first, into one of 64 bits.
    """
    digest = hashlib.shake_128(b"7/rollout/3").digest(4 * 624)
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]
    twister = random.Random()
    twister.setstate((3, (*words, 624), None))
    expected = []
    for _ in range(2000):
        upper, lower = twister.getrandbits(32), twister.getrandbits(32)
        expected.append((upper << 32 | lower) % 2**62)
    drawn = torch.randint(2**62, (2000,), generator=generator(7, "rollout", 3))
    assert drawn.tolist() == expected


def test_seeds_that_share_their_lower_32_bits_draw_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own `manual_seed` is blind to what is above; the seeds are set by hand."""
    a, b = (torch.Generator().manual_seed(s) for s in (5, 5 + 2**40))
    assert torch.randn(8, generator=a).equal(torch.randn(8, generator=b))
    monkeypatch.setattr("flowrl.core.seeds.seed_of", lambda *keys: 5)
    assert not torch.randn(8, generator=generator("a")).equal(
        torch.randn(8, generator=generator("b"))
    )


def test_a_stream_begins_as_fresh_and_repeats() -> None:
    """Nothing of an earlier normal draw, which torch keeps in pairs, is left in a new stream."""
    first = torch.randn(3, generator=generator(1, "x"))
    assert torch.randn(3, generator=generator(1, "x")).equal(first)
    assert generator(1, "x").initial_seed() == seed_of(1, "x")


def test_normal_draws_are_standard() -> None:
    """The first draw of each of 40,000 streams: mean and spread within five of their standard
    errors (.005 and .0035), neighbours uncorrelated within five of .005."""
    x = torch.cat([torch.randn(1, generator=generator(0, "n", i)) for i in range(40_000)])
    assert abs(float(x.mean())) < 0.025
    assert abs(float(x.std()) - 1) < 0.018
    assert abs(float(torch.corrcoef(torch.stack([x[1:], x[:-1]]))[0, 1])) < 0.025


def test_rows_stand_behind_each_other_under_their_names() -> None:
    parts = [
        {"a": torch.tensor([1, 2]), "b": torch.tensor([[1.0]])},
        {"b": torch.tensor([[2.0], [3.0]]), "a": torch.tensor([], dtype=torch.int64)},
    ]
    found = concatenated(parts)
    assert list(found) == ["a", "b"]
    assert found["a"].tolist() == [1, 2] and found["b"].tolist() == [[1.0], [2.0], [3.0]]


def test_medians_are_taken_number_by_number() -> None:
    """By hand: the middle of three, and the mean of the middle two."""
    rows = [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 4.0}]
    assert medians(rows) == {"a": 3.0, "b": 2.0}
    assert medians(rows[:2]) == {"a": 2.0, "b": 1.5}
