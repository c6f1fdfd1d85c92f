"""Direct-Align against hand-computed steps, and SRPO's loss of two rewards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from losskit import loss_input
from rolloutkit import run
from torch import Tensor

from flowrl.algorithms.likelihoods.through_sampler import direct_align
from flowrl.algorithms.losses.reward_gradient import relative_ascent, reward_ascent
from flowrl.algorithms.nodes import trained_nodes
from flowrl.algorithms.plans.solvers import ode
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Cond, LossInput, Rollout
from flowrl.models.toy import LinearFlow


class Constant(LinearFlow):
    """A velocity that is one number everywhere, in float64; images are latents."""

    def __init__(self, value: float = 0.6) -> None:
        super().__init__()
        self.double()
        self.value = torch.nn.Parameter(torch.tensor(value, dtype=torch.float64))

    def slope(self) -> float:
        """Return the gradient that the velocity got."""
        assert self.value.grad is not None
        return float(self.value.grad)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        return self.value * torch.ones_like(x)

    def decode(self, x0: Tensor) -> Tensor:
        return x0


def forest() -> Rollout:
    """Two images of three prompts by five Euler steps."""
    return run(ode(0, steps=5, order=1), cps, model=Constant(), store_dtype=torch.float64)


def batch_of(likelihood: direct_align, ro: Rollout) -> Batch:
    nodes = trained_nodes(ro, "leaves")
    streams = NodeStreams(ro.tree.group, "test")
    return likelihood.batch(ro, torch.zeros(len(ro.x)), nodes, streams)


def one_step(start: float, end: float) -> Batch:
    """x0 = .2 and noise 1, noised to `start`, for a step to `end`."""
    ro = forest()
    made = batch_of(direct_align(), ro)
    noise = torch.ones_like(made.x)
    levels = torch.full_like(made.sigma, start), torch.full_like(made.sigma, end)
    x = (1 - start) * 0.2 * noise + start * noise
    return made._replace(x=x, sigma=levels[0], sigma_next=levels[1], target=noise)


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(0.7, 0.5, 0.28), (0.5, 0.7, 0.2 / 3)], ids=["down", "up"]
)
def test_a_step_both_ways_by_hand(start: float, end: float, expected: float) -> None:
    """x0 = .2, e = 1, v = .6. Down: x = .76, .76 - .2 * .6 = .64, (.64 - .5) / .5 = .28. Up: .6,
    .72, (.72 - .7) / .3 = .0666667. The published code's lines, executed on these numbers, give the
    same. The gradient of the image by v is (end - start) / (1 - end)."""
    model = Constant()
    batch = one_step(start, end)
    made = direct_align(checkpoint=False).evaluate(model, batch, cps)
    assert made.images is not None
    torch.testing.assert_close(
        made.images, torch.full_like(made.images, expected), rtol=1e-6, atol=0
    )
    made.images.mean().backward()
    slope = (end - start) / (1 - end)
    assert model.slope() == pytest.approx(slope, rel=1e-6)
    again = direct_align().evaluate(model, batch, cps).images
    assert again is not None and torch.equal(again, made.images)


@pytest.mark.parametrize("noise", ["initial", "fresh"])
def test_the_right_velocity_gives_the_image_back(noise: Any) -> None:
    """With v = e - x0 every step is exact, from any level to any other."""
    ro = forest()
    batch = batch_of(direct_align(low=0.1, high=0.95, jump=0.3, sides="both", noise=noise), ro)
    x0 = ro.x[batch.node]

    class Right(Constant):
        def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
            return batch.target - x0

    images = direct_align().evaluate(Right(), batch, cps).images
    torch.testing.assert_close(images, x0, atol=1e-5, rtol=1e-5)  # levels are float32
    root = ro.x[(ro.tree.parent < 0).nonzero().flatten()]
    same = torch.equal(batch.target[::2], root)
    assert same == (noise == "initial") and torch.equal(batch.target[::2], batch.target[1::2])


def test_levels_are_those_of_the_published_code() -> None:
    """Its interval has 1000 parts from high (0) to low (999). For a level drawn at part T - m, m
    from 5 to 995, k = min(T - m, m, 100): it denoises from part T - m - k, and goes back from part
    T - m + k; both end at T - m. The reward's k is read at m, and at m - k. A part is 1/999 of the
    interval there and 1/1000 here."""
    likelihood = direct_align(sides="both")
    width = likelihood.high - likelihood.low
    grid = torch.linspace(likelihood.high, likelihood.low, 1000, dtype=torch.float64)
    for m in (5, 60, 100, 500, 900, 995):
        k = min(1000 - m, m, 100)
        # the number in [0, 1) that draws this level
        drawn = torch.tensor([(m / 1000 - 0.005) / 0.99], dtype=torch.float64)
        start, end, place = likelihood._steps(drawn)
        far = grid[[1000 - m - k, min(1000 - m + k, 999)]]
        torch.testing.assert_close(start, far, atol=1.5e-3 * width, rtol=0)
        torch.testing.assert_close(end, grid[[1000 - m] * 2], atol=1.5e-3 * width, rtol=0)
        torch.testing.assert_close(place, torch.tensor([m, m - k]).double() / 1000)


def test_each_image_has_its_own_level_and_both_sides_share_it() -> None:
    ro = forest()
    likelihood = direct_align(low=0.4, high=0.9, jump=0.2, sides="both")
    batch = batch_of(likelihood, ro)
    assert len(batch.x) == 2 * len(ro.leaf) == 12
    assert torch.equal(batch.sigma_next[::2], batch.sigma_next[1::2])
    assert len(batch.sigma_next.unique()) == 6
    assert (batch.sigma[::2] > batch.sigma_next[::2]).all() and not batch.step[::2].any()
    assert (batch.sigma[1::2] < batch.sigma_next[1::2]).all() and batch.step[1::2].all()
    assert batch.sigma.min() >= 0.4 and batch.sigma.max() <= 0.9
    assert batch.query is not None and (batch.query >= 0).all() and (batch.query <= 1).all()
    # one side alone has the same levels: they come from the image's own stream
    alone = batch_of(direct_align(low=0.4, high=0.9, jump=0.2, sides="inverse"), ro)
    assert torch.equal(alone.sigma, batch.sigma[1::2])


def empty() -> LossInput:
    return loss_input(*torch.ones(3, 1))


def pair(good: list[float], bad: list[float], start: float, end: float, place: float) -> LossInput:
    """Rows whose steps go from `start` to `end`, with two rewards."""
    level = torch.ones(len(good))
    data = loss_input(level, level, level)
    batch = data.batch._replace(
        sigma=start * level, sigma_next=end * level, query=place * level.double()
    )
    values = {"wanted": torch.tensor(good), "unwanted": torch.tensor(bad)}
    return data._replace(batch=batch, reward=values["wanted"], rewards=values)


def test_the_relative_loss_by_hand() -> None:
    """At place .4 the denoising k is .1 + .4 * .15 = .16 and the other .3 - .4 * .29 = .184. wanted
    .3, unwanted .2: denoise 1.16 * .3 - .2 = .148, loss .552; inverse 1.184 * .2 - .3 = -.0632,
    loss .7632. Enough is enough; what was not scored has loss 0."""
    down = relative_ascent(pair([0.3], [0.2], 0.8, 0.7, 0.4))
    up = relative_ascent(pair([0.3], [0.2], 0.6, 0.7, 0.4))
    assert float(down[0]) == pytest.approx(0.552) and float(up[0]) == pytest.approx(0.7632)
    assert float(down[1]["relative"]) == pytest.approx(0.1)
    assert float(down[1]["image_reward"]) == pytest.approx(0.148)
    rich = relative_ascent(pair([2.0, torch.nan], [0.2, 0.2], 0.8, 0.7, 0.4))
    assert rich[0].tolist() == [0.0, 0.0] and rich[1]["satisfied"].tolist() == [1.0, 0.0]
    ever = relative_ascent(pair([0.3], [0.2], 0.8, 0.7, 0.4), enough=None, scale=2.0)
    assert float(ever[0]) == pytest.approx(-0.296)


def test_ascent_pulls_the_velocity_the_same_way_from_both_sides() -> None:
    """With r = the image's mean, a row that denoises from .7 to .5 has d r / d v = -.4 and loss -r,
    so .4; one back from .5 to .7 has .2 / .3 and loss r, so .6666667."""
    for start, end, slope in ((0.7, 0.5, 0.4), (0.5, 0.7, 0.2 / 0.3)):
        model = Constant()
        batch = one_step(start, end)
        images = direct_align().evaluate(model, batch, cps).images
        assert images is not None
        reward = images.flatten(1).mean(1)
        loss, metrics = reward_ascent(empty()._replace(batch=batch, reward=reward))
        loss.mean().backward()
        assert model.slope() == pytest.approx(slope, rel=1e-6)
        torch.testing.assert_close(metrics["image_reward"], reward.detach())


def test_enough_stops_both_ways() -> None:
    """With enough .5: r .2 has loss .3 forth and .7 back, r .6 none; the gradients of loss by r are
    -1, 1 and 0."""
    values = [0.2, 0.6]
    for start, losses, slopes in ((0.8, [0.3, 0.0], [-1.0, 0.0]), (0.6, [0.7, 0.0], [1.0, 0.0])):
        data = pair(values, values, start, 0.7, 0.4)
        reward = torch.tensor(values, requires_grad=True)
        loss, metrics = reward_ascent(data._replace(reward=reward), enough=0.5)
        loss.sum().backward()
        assert loss.tolist() == pytest.approx(losses) and metrics["satisfied"].tolist() == [0, 1]
        assert reward.grad is not None and reward.grad.tolist() == slopes


def test_what_both_rewards_like_cancels() -> None:
    """Where wanted and unwanted grow alike, by dW = dU, a denoising step earns k dW and a step back
    k' dW: without stretch (k = 0) nothing; of opposite directions where only one of them grows."""
    keys = ("denoise_low", "denoise_high", "inverse_low", "inverse_high")
    flat: dict[str, Any] = dict.fromkeys(keys, 0.0)
    losses = []
    for start in (0.8, 0.6):
        data = pair([0.3], [0.2], start, 0.7, 0.4)
        values = {name: value.requires_grad_() for name, value in data.rewards.items()}
        loss, _ = relative_ascent(data._replace(rewards=values), **flat)
        losses.append(torch.autograd.grad(loss.sum(), list(values.values())))
    down, up = (torch.cat(found).tolist() for found in losses)
    assert down == [-1.0, 1.0] and up == [1.0, -1.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: direct_align(low=0.9, high=0.8), "0 <= low < high <= 1"),
        (lambda: direct_align(jump=0.0), "0 < jump <= 1"),
        (lambda: direct_align(margin=0.5), "0 <= margin < 0.5"),
        (lambda: direct_align(high=1.0, margin=0.0), "pure noise"),
        (lambda: direct_align(sides="left"), "denoise, inverse or both"),  # type: ignore[arg-type]
        (lambda: relative_ascent(pair([1.0], [1.0], 0.8, 0.7, 0.4), scale=0.0), "scale > 0"),
        (lambda: relative_ascent(pair([1.0], [1.0], 0.8, 0.7, 0.4), wanted="hps"), "'hps'"),
        (
            lambda: relative_ascent(pair([1.0], [1.0], 0.8, 0.7, 0.4), unwanted="wanted"),
            "two of the rewards",
        ),
        (lambda: relative_ascent(empty()), "needs likelihood direct_align"),
        (lambda: reward_ascent(empty()), "or direct_align"),
    ],
)
def test_bad_options_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
