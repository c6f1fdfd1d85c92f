"""What a likelihood returns, beside the ratios that the rollout's tests cover; noise levels of
forward methods, and how fast slow copies follow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rolloutkit import Counting, decisions, run, score_draws, take
from torch import Tensor
from torch.distributions import Normal

from flowrl.algorithms.ema_decays import ramp
from flowrl.algorithms.likelihoods.forward import forward
from flowrl.algorithms.plans.windows import fork, full
from flowrl.algorithms.transitions import cps, dance_sde, euler
from flowrl.core.errors import ConfigError
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch
from flowrl.models.toy import LinearFlow


def batch_of(model: LinearFlow, store: torch.dtype = torch.float32) -> Batch:
    ro = run(full(0, steps=4, noise_scale=0.5), dance_sde, model=model, store_dtype=store)
    return decisions(ro, torch.zeros(len(ro.x)))


def test_reverse_scores_the_stored_draw_under_the_present_weights() -> None:
    """Oracle: torch.distributions at the mean of the Dance step, written out."""
    model = LinearFlow()
    batch = batch_of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05)
    ev = score_draws(model, batch, dance_sde)
    s, n = batch.sigma[:, None, None, None], batch.sigma_next[:, None, None, None]
    v = model.velocity(batch.x, batch.sigma, batch.cond)
    mean = batch.x - (s - n) * v - 0.25 * (s - n) / (2 * s) * (batch.x + (1 - s) * v)
    std = 0.5 * (s - n).sqrt()
    torch.testing.assert_close(ev.mean, mean)
    torch.testing.assert_close(ev.std, std.flatten())
    mean, std = mean.double(), std.double()
    oracle = Normal(mean, std.expand_as(mean)).log_prob(batch.target.double()).flatten(1).mean(1)
    torch.testing.assert_close(ev.log_prob, oracle, rtol=1e-5, atol=1e-6)
    change = (ev.log_prob - batch.old_log_prob).detach()
    assert float(change.abs().max()) > 1e-3  # the weights did move
    ev.log_prob.sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in model.parameters())


def test_latents_kept_in_half_and_networks_in_half_are_on_policy_in_float32() -> None:
    """A network's own rounding is the same in both phases."""
    for model, store in (
        (LinearFlow(), torch.bfloat16),
        (LinearFlow().to(torch.bfloat16), torch.float32),
    ):
        batch = batch_of(model, store)
        ev = score_draws(model, batch, dance_sde)
        assert batch.x.dtype == store and ev.mean.dtype == torch.float32
        assert ev.log_prob.dtype == batch.old_log_prob.dtype == torch.float64
        # to float32 rounding: other batches have other orders of sums on some processors
        torch.testing.assert_close(ev.log_prob, batch.old_log_prob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("times", ["uniform", "logit_normal", "grid"])
def test_forward_noises_images_on_the_straight_path_and_matches_its_velocity(times: Any) -> None:
    """Closed form: with v = target one Euler step lands on the image, and an error
    of 1/2 has the log-prob -1/4."""
    ro = run(full(0, steps=4, noise_scale=0.0))
    score, streams = forward(draws=3, times=times), NodeStreams(ro.tree.group, 5)
    batch = score.batch(ro, torch.zeros(len(ro.x)), ro.leaf, streams)
    assert batch.node.tolist() == ro.leaf.repeat_interleave(3).tolist()
    clean = euler(batch.x, batch.target, batch.sigma, torch.zeros_like(batch.sigma))
    torch.testing.assert_close(clean, ro.x[batch.node], atol=1e-5, rtol=1e-5)

    class Exact(LinearFlow):
        def velocity(self, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return batch.target + 0.5

    log_prob = score.evaluate(Exact(), batch, dance_sde).log_prob
    assert log_prob.tolist() == pytest.approx([-0.25] * len(batch.x), abs=1e-6)


def test_siblings_share_one_network_row_and_nothing_else_changes() -> None:
    """Oracle: the same decisions evaluated one at a time, where nothing can be shared."""
    model = LinearFlow()
    counting: Any = Counting(model)
    plan = fork(0, steps=5, noise_scale=0.5, branch=4, low=1, high=3)
    ro = run(plan, cps, model=model, prompts=["a", "b"])
    batch = decisions(ro, torch.randn(len(ro.x), generator=torch.Generator().manual_seed(5)))
    assert len(batch.x) == 16 and len(batch.parent.unique()) == 4
    together = score_draws(counting, batch, cps)
    assert (counting.calls, counting.nodes) == (1, 4)
    (together.log_prob * batch.advantage).sum().backward()
    shared = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for i in range(16):
        alone = score_draws(model, take(batch, torch.tensor([i])), cps)
        assert (alone.log_prob - together.log_prob[i]).abs() < 1e-5
        (alone.log_prob * batch.advantage[i]).sum().backward()
    single = [p.grad for p in model.parameters() if p.grad is not None]
    for one, two in zip(shared, single, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "steps", "expected"),
    [
        # DiffusionNFT types 0, 1 and 2, and AWM's slow copy, as published
        ({"slope": 0.0, "limit": 0.0}, (0, 100, 800), (0, 0, 0)),
        ({"slope": 0.001, "limit": 0.5}, (0, 100, 500, 800), (0, 0.1, 0.5, 0.5)),
        (
            {"wait": 75, "slope": 0.0075, "limit": 0.999},
            (0, 75, 100, 200, 300),
            (0, 0, 0.1875, 0.9375, 0.999),
        ),
        ({"slope": 0.001, "limit": 0.3}, (0, 100, 400), (0, 0.1, 0.3)),
        ({"slope": 0.005, "limit": 0.999, "start": 0.25}, (50, 100, 200), (0.5, 0.75, 0.999)),
    ],
)
def test_decays(options: Any, steps: tuple[int, ...], expected: tuple[float, ...]) -> None:
    assert [ramp(count, **options) for count in steps] == pytest.approx([*expected])


def times(draws: int, many: int = 300, **options: Any) -> Tensor:
    """Draw the times of many images on a grid of 14 steps -> [many, draws]."""
    grid = torch.linspace(1, 0, 15)
    streams = (torch.Generator().manual_seed(seed) for seed in range(many))
    sampler = forward(draws=draws, **options).times
    return torch.stack([sampler.draw(stream, grid) for stream in streams])


@pytest.mark.parametrize(
    ("options", "bins"),
    [
        # AWM's edges int(linspace(first, 12, 7)) of 14 steps; all steps but the last of NFT
        ({"draws": 6, "first": 1, "last": 12}, [1, 2, 4, 6, 8, 10, 12]),
        ({"draws": 6, "last": 12}, [0, 2, 4, 6, 8, 10, 12]),
        ({"draws": 3, "last": 13, "with_first": True}, [0, 1, 7, 13]),
        ({"draws": 13, "last": 13}, list(range(14))),
    ],
)
def test_steps_of_the_grid_are_drawn_from_bins(options: Any, bins: list[int]) -> None:
    """One step in each bin, each of its steps in some of 300 images."""
    found = ((1 - times(times="grid", **options)) * 14).round().long()
    for k in range(len(bins) - 1):
        assert set(found[:, k].tolist()) == set(range(bins[k], bins[k + 1]))


@pytest.mark.parametrize("with_first", [False, True])
def test_any_steps_are_drawn_without_replacement(with_first: bool) -> None:
    """4 of the first 7 steps, as `random.sample(range(7), 4)` of DGPO's code: different ones,
    ascending, each step in 4 / 7 of 3000 images, within 4 standard errors of a binomial share."""
    found = times(4, 3000, times="any_steps", last=7, with_first=with_first)
    steps = ((1 - found) * 14).round().long()
    assert bool((steps.diff(dim=1) > 0).all())
    assert bool((steps[:, 0] == 0).all()) == with_first
    share = torch.bincount(steps.flatten(), minlength=14) / 3000
    expected = torch.tensor([1.0] + [0.5] * 6) if with_first else torch.full((7,), 4 / 7)
    bound = 4 * (expected * (1 - expected) / 3000).sqrt() + 1e-6
    assert bool(((share[:7] - expected).abs() < bound).all()) and float(share[7:].sum()) == 0


@pytest.mark.parametrize("kind", ["uniform", "logit_normal"])
def test_times_have_one_in_each_stratum(kind: Any) -> None:
    """By torch.distributions' quantiles: u in [k / 4, (k + 1) / 4], moved by S(.; 3); the range."""
    found = times(4, times=kind, shift=3.0, low=0.2 if kind == "uniform" else 0.01)
    assert bool((found.diff(dim=1) < 0).all())
    unshifted = found.double() / (3 - 2 * found.double())
    normal = torch.distributions.Normal(0.0, 1.0)
    u = (unshifted - 0.2) / 0.8 if kind == "uniform" else normal.cdf(unshifted.logit())
    places = (u.flip(1) * 4 - torch.arange(4)).flatten()
    assert -1e-5 < places.min() < 0.01 and 0.99 < places.max() < 1 + 1e-5
    assert abs(places.mean() - 0.5) < 4 * (1 / 12 / 1200) ** 0.5


def test_low_times_of_logit_normal_are_raised_to_the_floor() -> None:
    found = times(1, times="logit_normal", low=0.4)
    assert found.min() == pytest.approx(0.4) and (found == found.min()).sum() > 50


@pytest.mark.parametrize("kind", ["uniform", "logit_normal", "power_law"])
@pytest.mark.parametrize("shift", [1.0, 1000.0])
@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_random_times_stay_inside_whatever_is_drawn(
    kind: Any, shift: float, u: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the ends of what torch.rand can return, with a shift that rounds to 1; the range is 1e-6
    from 0 and 1, in float32."""
    monkeypatch.setattr(torch, "rand", lambda n, **_: torch.full((n,), u))
    found = times(3, 1, times=kind, shift=shift)
    assert float(found.min()) >= 9.9e-7 and float(found.max()) <= 0.9999991


def test_times_of_a_grid_are_the_sampler_s() -> None:
    """Its first is 1: pure noise, from which every image starts. 0 and 1 written out, as resolved
    configs once had them, are no limits of it."""
    assert times(1, 1, times="grid", last=1).item() == 1
    assert times(1, 1, times="grid", last=1, low=0.0, high=1.0).item() == 1


WRONG: list[tuple[Any, str]] = [
    (lambda: ramp(1, slope=0.1, limit=1.5), "limit <= 1"),
    (lambda: forward(low=0.5, high=1.2), "0 < low < high < 1.*high=1.2; leave out"),
    (lambda: forward(low=0.5, high=0.5), "low < high < 1"),
    (lambda: forward(low=-0.1), "low=-0.1"),
    (lambda: forward(low=0.0), "low=0.0, high=None"),
    (lambda: forward(high=1.0), "low=None, high=1.0"),
    (lambda: forward(times="logit_normal", high=1.0), "low=None, high=1.0"),
    (lambda: forward(times="power_law", low=0.0), "low=0.0, high=None"),
    (lambda: forward(times="grid", high=0.9), "belong to times: grid"),
    (lambda: forward(times="grid", shift=3.0), "belong to times: grid"),
    (lambda: forward(first=1), "belong to times: grid"),
    (lambda: times(5, times="any_steps", first=1, last=5), "5 different times"),
    (lambda: forward(weight="ghuber", power=0.0), "0 < power"),
    (lambda: times(13, times="grid", first=2), "13 different times"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_said(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(("shared", "times"), [(False, False), (False, True), (True, True)])
def test_what_the_images_of_a_prompt_share(shared: bool, times: bool) -> None:
    """Levels, and with `shared` the noise as well; other prompts have others."""
    made = run(full(0, steps=6, noise_scale=0.5), group_size=3)
    streams = NodeStreams(made.tree.group, "matching")
    advantage = torch.zeros(len(made.tree.group))
    likelihood = forward(draws=2, shared=shared, shared_times=times)
    batch = likelihood.batch(made, advantage, made.leaf, streams)
    order = made.tree.group[batch.node].argsort(stable=True)
    level = batch.sigma[order].view(-1, 3, 2)
    noise = (batch.target + made.x[batch.node])[order].flatten(1).view(-1, 3, 2, 12)
    assert bool((level[:, :1] == level).all()) == times
    assert bool((level[0, 0] != level[1, 0]).all())
    alike = torch.isclose(noise[:, :1], noise, atol=1e-5).all(-1)
    assert bool(alike.all()) == shared and bool(alike[:, 1:].any()) == shared
    # the levels are those of sharing all, or nothing
    plain = forward(draws=2, shared=times).batch(made, advantage, made.leaf, streams)
    assert torch.equal(batch.sigma, plain.sigma)
