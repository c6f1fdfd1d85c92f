"""Losses of the forward process: the reference's numbers, closed forms, and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from losskit import loss_input
from torch import Tensor

from flowrl.algorithms.likelihoods.forward import Weight, _weighted
from flowrl.algorithms.losses._common import Labels, optimality
from flowrl.algorithms.losses.comparisons import diffusion_dpo
from flowrl.algorithms.losses.matching import awm, nft, regression
from flowrl.algorithms.penalties import velocity_kl, velocity_kl_both
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput


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
