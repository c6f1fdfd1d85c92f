"""Losses of the forward process: the reference's numbers, closed forms, and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from losskit import loss_input, numbers
from torch import Tensor

from flowrl.algorithms.likelihoods.forward import Weight, _by_size, _weighted, forward
from flowrl.algorithms.losses._common import Labels, optimality
from flowrl.algorithms.losses.comparisons import diffusion_dpo
from flowrl.algorithms.losses.matching import awm, nft, ram, regression
from flowrl.algorithms.losses.policy import bound_gradient, penalty_alone
from flowrl.algorithms.penalties import data_velocity, velocity_kl, velocity_kl_both
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.types import Eval, LossInput, RealRows


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float64)


# One image of four numbers, its noise, and the velocities of four policies there, at sigma 0.6.
X0, EPS, SIGMA = row(0.5, -1, 0.25, 2), row(1, 0, -0.5, 0.5), 0.6
TARGET = EPS - X0
V, V_OLD = row(0.4, 0.8, -0.6, -1.2), row(0.3, 0.9, -0.7, -1)
V_REF, V_SLOW = row(0.2, 1.1, -0.8, -1.4), row(0.35, 0.85, -0.65, -1.1)
LOG_PROBS: dict[Weight, float] = {
    # by hand from L = 0.040625; numpy in float64
    "one": -0.040625,
    "sigma": -0.024375,
    "sigma2": -0.014625,
    "huber": -0.1209278664,
    "ghuber": -1.0698914463,
}


def evaluated(v: Tensor, weight: Weight = "one") -> Eval:
    """Evaluate a velocity [B, D] as likelihood `forward` does."""
    error = (v - TARGET).square().mean(1)
    log_prob = -_weighted(error, torch.full_like(error, SIGMA), weight)
    return Eval(log_prob, v, torch.zeros_like(error), v)


def seen(advantage: float, v: Tensor = V, weight: Weight = "one") -> LossInput:
    """Put the image where a loss looks for it, under all policies."""
    one = torch.ones(len(v), dtype=torch.float64)
    under = {"old": V_OLD, "ref": V_REF, "slow": V_SLOW}
    others = {name: evaluated(u, weight) for name, u in under.items()}
    data = loss_input(one, one, advantage * one, sigma=SIGMA * one)
    batch = data.batch._replace(target=TARGET)
    now = evaluated(v, weight)
    return data._replace(batch=batch, now=now, under=others, old_log_prob=others["old"].log_prob)


def gradient(loss: Any, advantage: float, weight: Weight = "one", **options: Any) -> Tensor:
    """Differentiate a loss by the velocity V."""
    v = V.clone().requires_grad_()
    loss(seen(advantage, v, weight), **options)[0].sum().backward()
    assert v.grad is not None
    return v.grad


@pytest.mark.parametrize("weight", LOG_PROBS)
def test_log_probs_of_all_weightings(weight: Weight) -> None:
    assert evaluated(V, weight).log_prob.item() == pytest.approx(LOG_PROBS[weight], abs=1e-10)


@pytest.mark.parametrize("sign", [1, -1])
def test_awm_by_hand(sign: int) -> None:
    """A = +-0.4: minus A times the ratio exp(0.1810899), inside the clip; numpy in float64."""
    options: dict[str, Any] = {"advantage_scale": 1.0}
    loss, metrics = awm(seen(0.4 * sign, weight="ghuber"), **options)
    assert loss.item() == pytest.approx(-0.4794090754 * sign, abs=1e-9)
    assert metrics["ratio"].item() == pytest.approx(1.1985226886, abs=1e-9)


def test_awm_on_policy_is_the_weighted_matching_loss() -> None:
    """d loss / dv = A sigma (L + e)^(p - 1) 2 (v - u) / D, the factor 6.6306517540 by numpy; a
    sign of A turns exactly."""

    def on_policy(data: LossInput) -> Any:
        return awm(data._replace(old_log_prob=data.now.log_prob.detach()))

    found = [gradient(on_policy, a, "ghuber") for a in (2.0, -2.0)]
    torch.testing.assert_close(found[0], 2 / 5 * 6.6306517540 * 2 * (V - TARGET) / 4)
    assert torch.equal(found[0], -found[1])
    # the advantage is cut at 5 before it is scaled to at most 1
    torch.testing.assert_close(gradient(on_policy, 99.0), gradient(on_policy, 5.0))


def test_awm_clips_good_images_at_two() -> None:
    """Ratios e^0.5 and e^1 (above 2), of an image's two times: 2 stops the gradient of the second
    alone, or of neither where both have the mean e^0.75 = 2.117 > 2 both."""
    log_ratio = torch.tensor([0.5, 1.0], dtype=torch.float64, requires_grad=True)
    one = torch.ones(2, dtype=torch.float64)
    data = loss_input(log_ratio, 0 * one, one)
    data = data._replace(batch=data.batch._replace(node=torch.zeros(2, dtype=torch.int64)))
    loss, metrics = awm(data, advantage_scale=1.0)
    torch.testing.assert_close(-loss.detach(), one.new_tensor([math.exp(0.5), 2.0]))
    assert metrics["clip_frac"].tolist() == [0, 1]
    loss, metrics = awm(data, advantage_scale=1.0, ratio="sum_first")
    assert metrics["ratio"].tolist() == pytest.approx([math.exp(0.75)] * 2)
    assert (-loss).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("advantage", "beta", "expected"),
    [
        # numpy in float64, with 5 / beta
        (2.0, 1.0, 0.9542857143),
        (2.0, 0.1, 10.4477906977),
        (-3.0, 1.0, 1.4614285714),
        (-3.0, 0.1, 11.0631561464),
        (7.0, 1.0, 0.65),
        (7.0, 0.1, 10.0785714286),
    ],
)
def test_nft_by_hand(advantage: float, beta: float, expected: float) -> None:
    loss, metrics = nft(seen(advantage), beta=beta)
    sides = {1.0: (0.13, 0.3328571429), 0.1: (0.2015714286, 0.2261860465)}
    assert loss.item() == pytest.approx(expected, abs=1e-9)
    found = (metrics["loss_good"].item(), metrics["loss_bad"].item())
    assert found == pytest.approx(sides[beta], abs=1e-9)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        # A = 2, -3, 0, 9 by hand: cut at 5, changed, a / 10 + 1 / 2
        ("all", [0.7, 0.2, 0.5, 1.0]),
        ("positive_only", [0.7, 0.5, 0.5, 1.0]),
        ("negative_only", [0.5, 0.2, 0.5, 0.5]),
        ("one_only", [0.6, 0.5, 0.5, 0.6]),
        ("binary", [0.6, 0.4, 0.5, 0.6]),
    ],
)
def test_labels(labels: Labels, expected: list[float]) -> None:
    found = optimality(torch.tensor([2.0, -3.0, 0.0, 9.0]), 5.0, labels)
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("advantage", "beta", "pull"), [(2, 1, 0.4), (2, 0.1, 4), (-3, 1, -0.6)])
def test_the_optimum_of_nft_is_closed(advantage: float, beta: float, pull: float) -> None:
    """Without the divisor the gradient vanishes at v_old + (2 o - 1) / beta (u - v_old), nowhere
    near it; above o = 1/2 the step goes towards the target."""
    best = V_OLD + pull * (TARGET - V_OLD)
    for v, flat in ((best, True), (best + 0.1, False)):
        v = v.clone().requires_grad_()
        nft(seen(advantage, v=v), beta=beta, normalize=False)[0].sum().backward()
        assert v.grad is not None and bool((v.grad.abs() < 1e-12).all()) == flat
    v = V_OLD.clone().requires_grad_()
    nft(seen(advantage, v=v), beta=beta)[0].sum().backward()
    assert v.grad is not None
    step = -(v.grad * (TARGET - V_OLD)).sum()
    assert step.sign() == math.copysign(1, advantage)


def test_undecided_images_do_not_move_nft_and_the_divisor_has_no_gradient() -> None:
    """At v = v_old both sides are alike, so o = 1/2 leaves exactly 0. The gradient with o = 1 is
    that of a constant divisor, mean |x+ - x0| = 0.6 mean |v - u| = 0.105 by hand."""
    v = V_OLD.clone().requires_grad_()
    nft(seen(0.0, v=v), beta=1.0)[0].sum().backward()
    assert v.grad is not None and bool((v.grad == 0).all())
    size = SIGMA * (V - TARGET).abs().mean()
    wanted = 5 * SIGMA**2 * 2 * (V - TARGET) / 4 / size
    torch.testing.assert_close(gradient(nft, 9.0, beta=1.0), wanted)


def test_distances_of_velocities() -> None:
    """mean (v - v_ref)^2 and mean (v - v_slow)^2 by hand."""
    assert velocity_kl(seen(0.0)).item() == pytest.approx(0.0525)
    both = velocity_kl_both(seen(0.0), ref=2.0, slow=10.0).item()
    assert both == pytest.approx(2 * 0.0525 + 10 * 0.004375)


@pytest.mark.parametrize(
    ("beta", "z", "expected"),
    [(5000, 1, 0.3132617), (2000, 0.4, 0.5130153), (100, 0.02, 0.6831972)],
)
def test_diffusion_dpo_by_hand(beta: float, z: float, expected: float) -> None:
    """Errors .1000 and .1010 now, .1002 and .1008 at the base: z = beta / 2 * 0.0004; numpy."""
    now = torch.tensor([-0.1000, -0.1010], dtype=torch.float64, requires_grad=True)
    base = torch.tensor([-0.1002, -0.1008], dtype=torch.float64)
    data = pair(now, base)
    loss, metrics = diffusion_dpo(data, beta=beta)
    assert loss.tolist() == pytest.approx([expected] * 2, abs=1e-7)
    assert metrics["margin"].tolist() == pytest.approx([z] * 2)
    # the mean over both rows: -sigmoid(-z) beta / 2 for the preferred image, the opposite for the
    # other
    loss.mean().backward()
    slope = beta / 2 / (1 + math.exp(z))
    assert now.grad is not None and now.grad.tolist() == pytest.approx([-slope, slope])
    at_base, _ = diffusion_dpo(pair(base, base), beta=beta)
    assert at_base.tolist() == pytest.approx([math.log(2)] * 2)


def pair(now: Tensor, base: Tensor) -> LossInput:
    """Two images of prompt 7, the first preferred."""
    sigma = torch.full((2,), 0.5)
    data = loss_input(now, 0 * base, torch.tensor([1.0, -1.0]), sigma=sigma)
    batch = data.batch._replace(step=torch.zeros(2, dtype=torch.int64))
    under = {"ref": Eval(base, sigma, sigma)}
    return data._replace(batch=batch, under=under, segment=torch.tensor([7, 7]))


def test_regression_is_the_weighted_error() -> None:
    loss, metrics = regression(seen(3.0, weight="sigma"))
    assert loss.item() == pytest.approx(3 * 0.024375) == 3 * metrics["error"].item()


WRONG: list[tuple[Any, str]] = [
    (lambda: nft(seen(1.0), beta=0.0), "beta > 0"),
    (lambda: nft(seen(1.0), beta=1.0, labels="some"), "labels"),  # type: ignore[arg-type]
    (lambda: awm(seen(1.0), advantage_scale=0.0), "advantage_scale"),
    (lambda: awm(seen(1.0), clip_low=0.0), "clip_low"),
    (lambda: regression(seen(-1.0)), "at least 0"),
    (lambda: velocity_kl_both(seen(1.0), ref=-1.0, slow=1.0), "weights of at least 0"),
    (lambda: diffusion_dpo(seen(1.0), beta=1.0), "segment"),
    (lambda: diffusion_dpo(seen(1.0), beta=0.0), "beta > 0"),
    (lambda: ram(ram_seen(1.0), advantage_scale=0.0), "advantage_scale > 0"),
    (lambda: forward(times="power_law", exponent=-0.5), "at least 0"),
    (lambda: forward(times="uniform", exponent=2.0), "belongs to times: power_law"),
    (lambda: forward(times="power_law", last=3), "belong to times: grid"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_said(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_pair_is_noised_alike() -> None:
    now = torch.zeros(2, dtype=torch.float64)
    data = pair(now, now)
    batch = data.batch._replace(sigma=torch.tensor([0.5, 0.6]))
    with pytest.raises(ConfigError, match="likelihood.shared=true"):
        diffusion_dpo(data._replace(batch=batch), beta=1.0)


X0_EPG, EPS_EPG, SIGMA_EPG = numbers(0.5, -1), numbers(1, 0.25), 0.6
V_EPG, V_OLD_EPG = numbers(0.3, 1), numbers(0.2, 1.1)


def bound(v: Tensor, weight: Weight) -> Tensor:
    """The log-prob of likelihood `forward` at one place."""
    gap = (v - (EPS_EPG - X0_EPG))[None]
    sigma = numbers(SIGMA_EPG)
    if weight == "size":
        return -_by_size(gap, sigma)
    return -_weighted(gap.square().mean(1), sigma, weight)


@pytest.mark.parametrize(
    ("weight", "now", "old"),
    [
        # the reference's table of EPG's code
        ("size", -0.1366666667, -0.15),
        ("sigma2", -0.01845, -0.02025),
        ("one", -0.05125, -0.05625),
        ("snr", -0.0341098170, -0.0374376040),
    ],
)
def test_bounds_have_the_published_numbers(weight: Weight, now: float, old: float) -> None:
    assert float(bound(V_EPG, weight)) == pytest.approx(now, abs=1e-9)
    assert float(bound(V_OLD_EPG, weight)) == pytest.approx(old, abs=1e-9)


@pytest.mark.parametrize(
    ("form", "value", "gradient"),
    [
        # the published functions of c2570002 run on these numbers; the reference has these values,
        # and gradients that also go through the divisor, which theirs do not
        ("epg", 0.0069250546, (-0.0270246032, -0.0337807540)),
        ("pepg", 0.0050783733, (-0.0198180423, -0.0247725529)),
        ("par", 0.0006812452, (-0.0198180423, -0.0247725529)),
    ],
)
def test_bound_gradients_have_the_published_numbers(
    form: Any, value: float, gradient: tuple[float, float]
) -> None:
    """A = .05; pepg and par have one gradient, in which the divisor of `size` is a constant."""
    v = V_EPG.clone().requires_grad_()
    now, old = bound(v, "size"), bound(V_OLD_EPG, "size")
    loss, _ = bound_gradient(loss_input(now, old, numbers(0.5)), form=form, advantage_scale=0.1)
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, abs=1e-9)
    assert v.grad is not None and v.grad.tolist() == pytest.approx(gradient, abs=1e-9)
    # without the ratio: by hand
    plain, _ = bound_gradient(
        loss_input(now, old, numbers(0.5)), form="epg", ratio=False, advantage_scale=0.1
    )
    assert plain.item() == pytest.approx(-0.05 * now.item())
    with pytest.raises(ConfigError, match="advantage_scale > 0"):
        bound_gradient(loss_input(now, old, numbers(0.5)), advantage_scale=0.0)


def test_rows_without_an_advantage_are_pulled_back() -> None:
    """By hand: with A = 0 pepg is ``rho D l``, and par has its gradient ``rho D``; none for epg. So
    the loop must not leave such rows out."""
    old = numbers(0.2)
    cases: list[tuple[Any, float]] = [("epg", 0.0), ("pepg", 0.3), ("par", 0.3)]
    for form, expected in cases:
        now = numbers(0.5).requires_grad_()
        loss, _ = bound_gradient(loss_input(now, old, numbers(0.0)), form=form)
        loss.sum().backward()
        assert now.grad is not None
        assert now.grad.item() == pytest.approx(math.exp(0.3) * expected)
    assert "zero_advantage" in needs_of(bound_gradient)


X0_RAM, EPS_RAM = numbers(0.5, -1), numbers(1, 0.25)
TARGET_RAM = (EPS_RAM - X0_RAM)[None]
V_RAM, V_OLD_RAM, V_REF_RAM = (
    numbers(0.3, 1)[None],
    numbers(0.2, 1.1)[None],
    numbers(0.25, 1.05)[None],
)
ONE = torch.ones(1, dtype=torch.float64)


def ram_seen(advantage: float, v: Tensor = V_RAM, old: Tensor = V_OLD_RAM) -> LossInput:
    """Put one image of two numbers where the loss looks for it."""
    under = {"old": Eval(ONE, old, ONE), "ref": Eval(ONE, V_REF_RAM, ONE)}
    data = loss_input(ONE, ONE, advantage * ONE, mean=v)
    return data._replace(batch=data.batch._replace(target=TARGET_RAM), under=under)


def ram_gradient(loss: Tensor, v: Tensor) -> Tensor:
    """Differentiate a loss by the velocity."""
    (found,) = torch.autograd.grad(loss.sum(), v)
    return found


def test_it_has_the_published_number() -> None:
    """The published loss was run on these numbers, with a scaled advantage of .5: target (.4,
    1.125), loss .0128125. Metrics by hand."""
    loss, metrics = ram(ram_seen(0.25), advantage_scale=2.0)
    assert loss.item() == pytest.approx(0.0128125, abs=1e-12)
    wanted = {"error": 0.05125, "from_base": 0.0025, "drift": 0.01}
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(wanted)


@pytest.mark.parametrize("advantage", [2.0, -0.5, 0.0])
def test_the_optimum_is_closed_and_without_advantage_the_base_model(advantage: float) -> None:
    """The gradient vanishes at v_ref + scale A (u - v_old), and nowhere near it."""
    best = V_REF_RAM + 3.0 * advantage * (TARGET_RAM - V_OLD_RAM)
    for v, flat in ((best, True), (best + 0.1, False)):
        v = v.clone().requires_grad_()
        found = ram_gradient(ram(ram_seen(advantage, v), advantage_scale=3.0)[0], v)
        assert bool((found.abs() < 1e-12).all()) == flat


@pytest.mark.parametrize("advantage", [2.0, -0.5])
def test_on_policy_it_moves_as_awm_with_a_penalty_towards_the_base_model(advantage: float) -> None:
    """By autograd, of mean (v - v_ref)^2 + scale A mean (v - u)^2."""
    v = V_OLD_RAM.clone().requires_grad_()
    found = ram_gradient(ram(ram_seen(advantage, v), advantage_scale=3.0)[0], v)
    plain = (v - V_REF_RAM).square().mean() + 3.0 * advantage * (v - TARGET_RAM).square().mean()
    torch.testing.assert_close(found, ram_gradient(plain, v))


def test_neither_base_nor_old_velocity_has_a_gradient() -> None:
    v, old = V_RAM.clone().requires_grad_(), V_OLD_RAM.clone().requires_grad_()
    loss, _ = ram(ram_seen(1.0, v, old))
    loss.sum().backward()
    assert v.grad is not None and old.grad is None


@pytest.mark.parametrize("exponent", [0.0, 1.0, 3.0])
def test_levels_have_a_density_that_is_a_power(exponent: float) -> None:
    """The share below t on [.2, .9] is (t^p - .2^p) / (.9^p - .2^p) with p = exponent + 1: one in
    each of four parts of it, and evenly inside these, within 4 standard errors."""
    options: dict[str, Any] = {"times": "power_law", "exponent": exponent, "low": 0.2, "high": 0.9}
    sampler = forward(draws=4, **options).times
    streams = (torch.Generator().manual_seed(seed) for seed in range(300))
    found = torch.stack([sampler.draw(stream, torch.empty(0)) for stream in streams]).double()
    power = exponent + 1
    share = (found**power - 0.2**power) / (0.9**power - 0.2**power)
    places = (share.flip(1) * 4 - torch.arange(4)).flatten()
    assert -1e-5 < places.min() < 0.01 and 0.99 < places.max() < 1 + 1e-5
    assert abs(places.mean() - 0.5) < 4 * (1 / 12 / 1200) ** 0.5


def data_seen(v: Tensor, target: Tensor, sigma: Tensor) -> LossInput:
    """A batch whose own velocity says nothing, and real images."""
    rows = torch.zeros(len(v), dtype=torch.float64)
    data = loss_input(rows, rows, rows, v=torch.full_like(v, 7.0))
    return data._replace(data=RealRows(v, target, sigma))


@pytest.mark.parametrize(
    ("sigma", "edm", "one"),
    [
        (0.2, 0.7188203225, 1.0570887095),
        (0.5, 0.4349390961, 0.8698781922),
        (0.9, 0.5411489361, 0.6599377269),
    ],
)
def test_the_published_numbers(sigma: float, edm: float, one: float) -> None:
    """`compute_loss_with_epsilon_and_sigma` of cosmos-rl at 89f2e5b, run in float64 with its
    rectified-flow scaling on these eight numbers, a network `.3 x + .2 t - .1` and its noise level
    `s / (1 - s)`; `one` is its squared x0 error times the weight of that scaling, which DDRL does
    not use."""
    x0 = torch.linspace(-1, 1, 8, dtype=torch.float64)[None]
    eps = torch.arange(8, dtype=torch.float64).cos()[None]
    v = 0.3 * ((1 - sigma) * x0 + sigma * eps) + 0.2 * sigma - 0.1
    data = data_seen(v, eps - x0, numbers(sigma))
    assert float(data_velocity(data)) == pytest.approx(edm, abs=1e-9)
    assert float(data_velocity(data, weight="one")) == pytest.approx(one, abs=1e-9)


def test_by_hand() -> None:
    """Errors (1, 2) and (0, -2) have the mean squares 2.5 and 2; at .5 and .2 the weights are
    .25 + .25 and .04 + .64. The gradient of the first row is 2 (1, 2) / 2 times its weight."""
    target = torch.tensor([[1.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    v = torch.tensor([[2.0, 3.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    data = data_seen(v, target, numbers(0.5, 0.2))
    assert data_velocity(data, weight="one").tolist() == pytest.approx([2.5, 2.0])
    loss = data_velocity(data)
    assert loss.tolist() == pytest.approx([1.25, 1.36])
    loss[0].backward()
    assert v.grad is not None and v.grad.tolist() == [[0.5, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({"data": None}, {}, "likelihood has no velocity"),
        ({}, {"weight": "two"}, 'weight "edm" or "one"'),
        ({}, {"fresh": "sigma"}, "fresh='sigma'"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], options: dict[str, Any], words: str) -> None:
    one = torch.ones(1, 2, dtype=torch.float64)
    with pytest.raises(ConfigError, match=words):
        data_velocity(data_seen(one, one, numbers(0.5))._replace(**change), **options)


def test_a_loss_that_leaves_all_to_the_penalty() -> None:
    """0 with a gradient of 0, so that a backward pass finds its way; rows of advantage 0 count."""
    log_prob = numbers(-1.0, -2.0).requires_grad_()
    loss, metrics = penalty_alone(loss_input(log_prob, log_prob.detach(), numbers(3.0, 0.0)))
    assert loss.tolist() == [0, 0] and metrics == {}
    (grad,) = torch.autograd.grad(loss.sum(), log_prob)
    assert grad.tolist() == [0, 0]
    assert {"zero_advantage"} == needs_of(penalty_alone) and "data" in needs_of(data_velocity)
