"""Methods that follow the reward's own gradient: through the sampler, and from any noise level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from losskit import loss_input
from rolloutkit import run
from torch import Tensor

from flowrl.algorithms.forest import trained_nodes
from flowrl.algorithms.likelihoods.through_sampler import (
    _sampled,
    align_prop,
    align_prop_each,
    direct_align,
    draft,
    draft_lv,
    refl,
)
from flowrl.algorithms.losses.reward_gradient import relative_ascent, reward_ascent
from flowrl.algorithms.plans.solvers import ode
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import eps_from, interpolate, per_sample
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch, Cond, LossInput, Rollout
from flowrl.models.toy import LinearFlow

STEPS = 5


class Plain(LinearFlow):
    """A linear field in float64 whose images are its latents."""

    def __init__(self) -> None:
        super().__init__(scale=0.3)
        self.double()

    def decode(self, x0: Tensor) -> Tensor:
        return x0


class Deep(Plain):
    """A field with a wide layer, whose activations take memory."""

    WIDTH = 512

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        shape = (self.WIDTH, 12)
        weights = 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
        self.inner = torch.nn.Parameter(weights)

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        hidden = torch.tanh(x.flatten(1) @ self.inner.T)
        return super().velocity(x, sigma, cond) + (hidden @ self.inner).view_as(x)


def forest(model: LinearFlow, steps: int = STEPS) -> Rollout:
    """Two images of three prompts, by Euler steps, in float64."""
    plan = ode(0, steps=steps, order=1)
    return run(plan, cps, model=model, store_dtype=torch.float64)


def batch_of(likelihood: Any, ro: Rollout, key: str = "") -> Batch:
    nodes = trained_nodes(ro, likelihood.trains)
    streams = NodeStreams(ro.tree.group, "test", key)
    made: Batch = likelihood.batch(ro, torch.zeros(len(ro.x)), nodes, streams)
    return made


def gradient(model: LinearFlow, images: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Differentiate ``-|image - target|^2``, summed over rows."""
    names, params = zip(*model.trainable().items(), strict=True)
    found = torch.autograd.grad(-(images - target).square().sum(), params)
    return dict(zip(names, found, strict=True))


def of(likelihood: Any, model: LinearFlow, ro: Rollout) -> dict[str, Tensor]:
    made = likelihood.evaluate(model, batch_of(likelihood, ro), cps)
    return gradient(model, made.images, torch.full_like(made.images, 0.3))


def by_hand(model: LinearFlow, ro: Rollout) -> dict[str, Tensor]:
    """The chain rule of the last step: with ``x0 = x - s v`` the gradient by v is 2 s (x0 - t),
    and v = mix x + text c + time s."""
    roots = trained_nodes(ro, "roots")
    x, cond = ro.x[roots], ro.cond["text"][ro.tree.group[roots]].double()
    with torch.no_grad():
        for k in range(STEPS):
            s, there = ro.sigmas[k].double(), ro.sigmas[k + 1].double()
            v = model.velocity(x, s.expand(len(x)), {"text": cond})
            before, x = x, x - (s - there) * v
    by_v = 2 * float(ro.sigmas[-2]) * (x - 0.3)
    pixels = by_v.sum((2, 3))
    return {
        "mix": torch.einsum("bdhw,bchw->dc", by_v, before),
        "text": pixels.T @ cond,
        "time": pixels.sum(0) * float(ro.sigmas[-2]),
    }


@pytest.mark.parametrize(
    "likelihood",
    [draft(last=1), draft(last=1, checkpoint=False), align_prop(draw="fixed", mean=0.8)],
    ids=["draft", "stored", "align_prop K = S - 1"],
)
def test_one_step_is_the_chain_rule(likelihood: Any) -> None:
    """AlignProp with K = S - 1 cuts off all velocities but the last, so it is DRaFT-1."""
    model = Plain()
    ro = forest(model)
    found, expected = of(likelihood, model, ro), by_hand(model, ro)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], atol=1e-10, rtol=1e-6)


def test_draft_lv_from_the_same_state_is_draft_1() -> None:
    """x0 noised to the last level with the noise that its own state predicts is that state:
    ``(1 - s) x0 + s eps = x``."""
    model = Plain()
    ro = forest(model)
    likelihood = draft_lv(draws=1)
    batch = batch_of(likelihood, ro)
    # the state before the last step, and the noise that it predicts
    first = batch_of(draft(last=1), ro)
    assert first.unrolled is not None
    cut = first.unrolled._replace(open=first.unrolled.open[:, :-1])
    state = _sampled(model, first._replace(unrolled=cut)).detach()
    s = ro.sigmas[-2].double().expand(len(state))
    v = model.velocity(state, s, batch.cond).detach()
    eps = eps_from(state, v, s)
    there = interpolate(ro.x[ro.leaf], eps, s)
    torch.testing.assert_close(there, state, atol=1e-6, rtol=1e-6)  # the grid is float32
    images = likelihood.evaluate(model, batch._replace(x=there), cps).images
    assert images is not None
    found = gradient(model, images, torch.full_like(images, 0.3))
    for name, value in by_hand(model, ro).items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)


def test_draft_lv_noises_to_the_last_level_with_noise_of_its_own() -> None:
    """(x - (1 - s) x0) / s of 2 x 6 rows is standard normal: mean within 5 / sqrt(n), and the two
    draws of a leaf differ."""
    model = Plain()
    ro = forest(model)
    batch = batch_of(draft_lv(draws=500), ro)
    x0 = ro.x[batch.node]
    s = per_sample(batch.sigma, x0)
    eps = (batch.x - (1 - s) * x0) / s
    assert float(batch.sigma[0]) == float(ro.sigmas[-2]) and batch.node.bincount().max() == 500
    assert abs(float(eps.mean())) < 5 / eps.numel() ** 0.5
    assert abs(float(eps.std()) - 1) < 5 / eps.numel() ** 0.5


def cut_loop(model: LinearFlow, batch: Batch, opened: Tensor) -> Tensor:
    """Sample with v cut off where a row's step is not open, in a loop over rows."""
    assert batch.unrolled is not None
    rows = []
    for i in range(len(batch.x)):
        x = batch.x[i : i + 1]
        cond = {name: value[i : i + 1] for name, value in batch.cond.items()}
        for k in range(opened.shape[1]):
            s, there = batch.unrolled.sigmas[k : k + 2].double()
            v = model.velocity(x, s[None], cond)
            x = x - (s - there) * (v if opened[i, k] else v.detach())
        rows.append(x)
    return torch.cat(rows)


@pytest.mark.parametrize(
    "likelihood",
    [draft(last=0), draft(last=3), align_prop(draw="uniform"), align_prop_each()],
    ids=["all", "last 3", "one K", "a K per step"],
)
def test_gradients_are_those_of_a_loop_with_detach(likelihood: Any) -> None:
    model = Deep()
    ro = forest(model)
    batch = batch_of(likelihood, ro)
    assert batch.unrolled is not None
    images = cut_loop(model, batch, batch.unrolled.open)
    expected = gradient(model, images, torch.full_like(images, 0.3))
    for name, value in of(likelihood, model, ro).items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


def test_images_are_those_of_the_rollout() -> None:
    """Without a jump the sampler ends where the rollout ended, whatever carries a gradient."""
    model = Plain()
    ro = forest(model)
    for likelihood in (draft(last=0), align_prop(), align_prop_each()):
        images = likelihood.evaluate(model, batch_of(likelihood, ro), cps).images
        assert images is not None
        torch.testing.assert_close(images, ro.x[ro.leaf], atol=1e-6, rtol=1e-6)


def test_refl_stops_at_its_step_with_the_x0_estimate() -> None:
    """``x - s v`` at the step that was drawn, with a gradient of that step alone."""
    model = Plain()
    ro = forest(model)
    likelihood = refl(first=2)
    batch = batch_of(likelihood, ro)
    path = batch.unrolled
    assert path is not None and set(path.last.tolist()) <= {2, 3, 4}
    assert torch.equal(path.open.nonzero()[:, 1], path.last)
    images = likelihood.evaluate(model, batch, cps).images
    for i, stop in enumerate(path.last.tolist()):
        x, cond = batch.x[i : i + 1], {"text": batch.cond["text"][i : i + 1]}
        for k in range(stop + 1):
            s, there = ro.sigmas[k : k + 2].double()
            v = model.velocity(x, s[None], cond)
            x = x - (s if k == stop else s - there) * v
        assert images is not None
        torch.testing.assert_close(images[i : i + 1], x, atol=1e-6, rtol=1e-6)


def first_open(likelihood: Any, count: int = 400) -> Tensor:
    streams = [torch.Generator().manual_seed(i) for i in range(count)]
    opened: Tensor = likelihood.paths(streams, 50)[0]
    return opened


def test_where_the_gradient_begins() -> None:
    """AlignProp's laws at 50 steps, within 5 standard errors: a normal number of mean 42 and std 5
    cut to whole numbers has mean 41.5; uniform from 1 to 49 has 25; fixed is 49. With a K per step,
    step i is open in (i + 1) / 50 of rows."""
    gaussian, uniform = (
        (~first_open(align_prop(draw=draw))).sum(1).double() for draw in ("gaussian", "uniform")
    )
    assert abs(float(gaussian.mean()) - 41.5) < 5 * 5 / 20
    assert float(uniform.min()) >= 1 and float(uniform.max()) <= 49
    assert abs(float(uniform.mean()) - 25) < 5 * 14.2 / 20
    fixed = first_open(align_prop(draw="fixed", mean=0.98), 3)
    assert torch.equal((~fixed).sum(1), torch.full((3,), 49))
    share = first_open(align_prop_each(), 2000).double().mean(0)
    expected = torch.arange(1, 51) / 50
    assert float((share - expected).abs().max()) < 5 * 0.5 / 2000**0.5
    stops = refl(first=30, last=39).paths(
        [torch.Generator().manual_seed(i) for i in range(400)], 40
    )[1]
    assert (int(stops.min()), int(stops.max())) == (30, 39)


def stored(work: Callable[[], Any]) -> int:
    """Count the bytes that autograd stores."""
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    return total


def test_checkpointing_bounds_the_memory() -> None:
    """Stored, each step adds its wide layer, at least 512 float64 per row; computed again, it adds
    latents of 12 numbers and indices: less than a tenth of that."""
    model, bytes_of = Deep(), {}
    for again in (False, True):
        for steps in (4, 12):
            ro = forest(model, steps)
            likelihood = draft(last=0, checkpoint=again)
            batch = batch_of(likelihood, ro)
            bytes_of[again, steps] = stored(lambda: likelihood.evaluate(model, batch, cps))  # noqa: B023
    wide = len(ro.leaf) * Deep.WIDTH * 8
    grows = {again: (bytes_of[again, 12] - bytes_of[again, 4]) / 8 for again in (False, True)}
    assert grows[False] >= wide and grows[True] < wide / 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: draft(last=-1), "last >= 0"),
        (lambda: batch_of(draft(last=6), forest(Plain())), "the plan has 5"),
        (lambda: align_prop(mean=1.0), "0 < mean < 1"),
        (lambda: align_prop(std=-0.1), "std >= 0"),
        (lambda: batch_of(align_prop(draw="fixed", mean=0.1), forest(Plain())), "is step 0"),
        (lambda: batch_of(align_prop(), forest(Plain(), 1)), "at least 2 steps"),
        (lambda: batch_of(align_prop(mean=0.01, std=0.0), forest(Plain())), "widen std"),
        (lambda: draft_lv(draws=0), "draws >= 1"),
        (lambda: refl(first=-1), "count steps from 0"),
        (lambda: batch_of(refl(first=2, last=5), forest(Plain())), "must be steps of the plan"),
    ],
)
def test_bad_options_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


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


def align_forest() -> Rollout:
    """Two images of three prompts by five Euler steps."""
    return run(ode(0, steps=5, order=1), cps, model=Constant(), store_dtype=torch.float64)


def align_batch(likelihood: direct_align, ro: Rollout) -> Batch:
    nodes = trained_nodes(ro, "leaves")
    streams = NodeStreams(ro.tree.group, "test")
    return likelihood.batch(ro, torch.zeros(len(ro.x)), nodes, streams)


def one_step(start: float, end: float) -> Batch:
    """x0 = .2 and noise 1, noised to `start`, for a step to `end`."""
    ro = align_forest()
    made = align_batch(direct_align(), ro)
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
    ro = align_forest()
    batch = align_batch(direct_align(low=0.1, high=0.95, jump=0.3, sides="both", noise=noise), ro)
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
    ro = align_forest()
    likelihood = direct_align(low=0.4, high=0.9, jump=0.2, sides="both")
    batch = align_batch(likelihood, ro)
    assert len(batch.x) == 2 * len(ro.leaf) == 12
    assert torch.equal(batch.sigma_next[::2], batch.sigma_next[1::2])
    assert len(batch.sigma_next.unique()) == 6
    assert (batch.sigma[::2] > batch.sigma_next[::2]).all() and not batch.step[::2].any()
    assert (batch.sigma[1::2] < batch.sigma_next[1::2]).all() and batch.step[1::2].all()
    assert batch.sigma.min() >= 0.4 and batch.sigma.max() <= 0.9
    assert batch.query is not None and (batch.query >= 0).all() and (batch.query <= 1).all()
    # one side alone has the same levels: they come from the image's own stream
    alone = align_batch(direct_align(low=0.4, high=0.9, jump=0.2, sides="inverse"), ro)
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
def test_bad_options_of_direct_align_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
