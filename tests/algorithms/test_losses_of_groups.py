"""Losses that compare the images of a prompt, against the published numbers; also beside an image
without a score."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import pytest
import torch
from losskit import CRD_LOSSES, D_REF, GOOD, OWN, PAIRS, A, D, fitting, loss_input, numbers
from torch import Tensor

from flowrl.algorithms.companions.surrogate import preference
from flowrl.algorithms.losses.comparisons import crd, dgpo
from flowrl.algorithms.penalties import velocity_kl_by_advantage
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput
from flowrl.techniques.group_losses import level_preference


@pytest.mark.parametrize(
    ("beta", "weights", "value"),
    [
        # the reference's table, computed with the published code's formula
        (10, (0.4750208, 0.4687906), -0.0053050455),
        (100, (0.2689414, 0.2227001), -0.0027365830),
        (2000, (2.06e-9, 1.39e-11), 0.0),
    ],
)
def test_dgpo_has_the_published_numbers(
    beta: float, weights: tuple[float, float], value: float
) -> None:
    loss, metrics = dgpo(fitting(D, A, PAIRS, ref=D_REF, old=D), beta=beta)
    expected = numbers(*weights)[PAIRS]
    torch.testing.assert_close(metrics["weight"], expected, atol=1e-7, rtol=5e-3)
    assert float(loss.mean()) == pytest.approx(value, abs=1e-9)


def test_dgpo_at_the_base_weights() -> None:
    """S = 0, so w = 1/2, whatever the advantages; equal errors and centred advantages: loss 0."""
    flat = torch.full_like(D, 0.3)
    loss, metrics = dgpo(fitting(flat, A, PAIRS, ref=flat, old=flat), beta=100)
    torch.testing.assert_close(metrics["weight"], torch.full_like(D, 0.5))
    assert float(loss.sum()) == pytest.approx(0, abs=1e-12)


def test_dgpo_against_the_sampling_weights() -> None:
    """Closed form: S compares with d_old = .31, .31 | .22, .22 in place of d_ref, so the numbers
    are those of the table above, whatever the base model's errors are."""
    data = fitting(D, A, PAIRS, ref=D + 1, old=D_REF)
    loss, metrics = dgpo(data, beta=10, clip=1.0, reference="old")
    torch.testing.assert_close(metrics["margin"], numbers(0.1, 0.125)[PAIRS])
    assert float(loss.mean()) == pytest.approx(-0.0053050455, abs=1e-9)


def test_dgpo_stops_what_has_moved_far_enough() -> None:
    """exp(d_old - d) by hand: e^.1 above 1.05 with A > 0 and e^-.1 below .95 with A < 0 stop; the
    same moves with the other advantage do not. The gradient by d is w A elsewhere."""
    d, old = numbers(0.3, 0.5, 0.3, 0.5), numbers(0.4, 0.4, 0.4, 0.4)
    error = d.clone().requires_grad_()
    one_group = torch.zeros(4, dtype=torch.int64)
    a = numbers(1, -1, -1, 1)
    loss, metrics = dgpo(fitting(error, a, one_group, ref=old, old=old), beta=1.0, clip=0.05)
    (gradient,) = torch.autograd.grad(loss.sum(), error)
    assert metrics["clip_frac"].tolist() == [1, 1, 0, 0]
    torch.testing.assert_close(gradient, metrics["weight"] * a * (1 - metrics["clip_frac"]))


def test_a_torn_group_is_an_error() -> None:
    whole = fitting(D, A, PAIRS, ref=D_REF, old=D)
    assert whole.siblings is not None
    torn = whole._replace(siblings=whole.siblings + 1)
    for loss in (lambda data: dgpo(data, beta=1.0), crd):
        if loss is crd:
            torn = torn._replace(under={"slow": whole.under["old"]})
        with pytest.raises(ConfigError, match="torn: 2 of its 3 images"):
            loss(torn)
        with pytest.raises(ConfigError, match="segment={fn: prompt}"):
            loss(torn._replace(segment=None))
    apart = whole.batch._replace(sigma=numbers(0.5, 0.4, 0.5, 0.5))
    with pytest.raises(ConfigError, match="likelihood.shared=true"):
        dgpo(whole._replace(batch=apart), beta=1.0)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"clip": 0.0}, {"max_advantage": -1.0}])
def test_numbers_of_dgpo_are_above_0(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="> 0"):
        dgpo(fitting(D, A, PAIRS, ref=D_REF, old=D), **{"beta": 1.0, **wrong})


# ------------------------------------------------------------------------------------------ CRD

SLOW = torch.full_like(OWN, 0.5)


def distilled(own: Tensor, group: Tensor, **options: Any) -> Tensor:
    """Average CRD's loss for rewards of its own [B] and targets GOOD, before the factor 5."""
    data = fitting(SLOW - own, (GOOD - 0.5) * 10, group, slow=SLOW)
    return crd(data, beta=1.0, normalize=False, **options)[0].mean() / 5


@pytest.mark.parametrize(("options", "expected"), CRD_LOSSES, ids=str)
def test_crd_has_the_published_numbers(options: dict[str, Any], expected: float) -> None:
    one_group = torch.zeros(4, dtype=torch.int64)
    assert float(distilled(OWN, one_group, **options)) == pytest.approx(expected, abs=1e-9)
    assert float(distilled(OWN, one_group, among="call", **options)) == pytest.approx(expected)


@pytest.mark.parametrize(("form", "expected"), [("mse", 0.1471509158), ("bce", 0.6920058333)])
def test_crd_as_published_has_no_bad_images(form: Any, expected: float) -> None:
    """An advantage at the lower bound has q = 0, which the published split at 0 leaves out of both
    halves; the published function (Flow-Factory a0b2bc5) run on q = (1, .6, .4, 0)."""
    q, one_group = numbers(1.0, 0.6, 0.4, 0.0), torch.zeros(4, dtype=torch.int64)
    data = fitting(SLOW - OWN, (q - 0.5) * 10, one_group, slow=SLOW)
    loss, _ = crd(data, normalize=False, centre="hard_published", form=form)
    assert float(loss.mean()) / 5 == pytest.approx(expected, abs=1e-9)


def test_crd_gradient_and_hard_centre() -> None:
    """By its own reward: (-.1925, -.0575, .0625, .1875), the reference's. hard, by hand: the halves
    are centred at (.9 e^.9 + .6 e^.6) / (e^.9 + e^.6) and the like for .4 and .1 with e^-q."""
    own, one_group = OWN.clone().requires_grad_(), torch.zeros(4, dtype=torch.int64)
    (gradient,) = torch.autograd.grad(distilled(own, one_group), own)
    torch.testing.assert_close(gradient, numbers(-0.1925, -0.0575, 0.0625, 0.1875))
    total = 0.0
    for rows, sign in ((slice(0, 2), 1), (slice(2, 4), -1)):
        p = (sign * GOOD[rows]).softmax(0)
        gap = OWN - (p * OWN[rows]).sum() - GOOD + (p * GOOD[rows]).sum()
        total += float(gap.square().mean()) / 2
    assert float(distilled(OWN, one_group, centre="hard")) == pytest.approx(total, abs=1e-12)


def test_crd_centres_prompts_apart() -> None:
    """Two prompts in one call: each loss is that of the prompt alone; the published way mixes
    them."""
    groups = torch.tensor([0, 0, 1, 1])
    data = fitting(SLOW - OWN, (GOOD - 0.5) * 10, groups, slow=SLOW)
    both = crd(data, normalize=False)[0]
    for rows in (slice(0, 2), slice(2, 4)):
        alone = fitting(
            (SLOW - OWN)[rows],
            (GOOD[rows] - 0.5) * 10,
            torch.zeros(2, dtype=torch.int64),
            slow=SLOW[rows],
        )
        torch.testing.assert_close(both[rows], crd(alone, normalize=False)[0])
    mixed = crd(data, normalize=False, among="call")[0]
    assert not torch.allclose(mixed, both)


def test_crd_own_reward_on_the_flow_toy() -> None:
    """x0, eps, v, v_old of the reference's flow toy: .1392156863 with the divisors .1875 and .2125,
    .035 without."""
    u, v, old = (
        numbers(0.5, 1, -0.75, -1.5),
        numbers(0.4, 0.8, -0.6, -1.2),
        numbers(0.3, 0.9, -0.7, -1),
    )
    zero, group = numbers(0), torch.zeros(1, dtype=torch.int64)
    data = loss_input(zero, zero, zero, mean=v[None], v=v[None], sigma=zero)
    data = data._replace(
        batch=data.batch._replace(target=u[None]),
        segment=group,
        siblings=group + 1,
        under={"slow": Eval(zero, old[None], zero, old[None])},
    )
    for normalize, expected in ((True, 0.1392156863), (False, 0.035)):
        found = crd(data, normalize=normalize)[1]["implicit_reward"]
        assert float(found) == pytest.approx(expected, abs=1e-9)


def test_the_penalty_of_good_images() -> None:
    """q = 1, 1/2 and 0 for advantages 5, 0 and -5; the distance of 1 and 0.5 is .25."""
    v, ref, a = torch.ones(3, 1), torch.full((3, 1), 0.5), torch.tensor([5.0, 0.0, -9.0])
    none = torch.zeros(3)
    data = loss_input(none, none, a, v=v)._replace(under={"ref": Eval(none, ref, none, ref)})
    found = velocity_kl_by_advantage(data, least=0.1)
    torch.testing.assert_close(found, torch.tensor([0.25, 0.25 * 0.55, 0.025]))
    with pytest.raises(ConfigError, match="least"):
        velocity_kl_by_advantage(data, least=2.0)


SCORED = torch.tensor([True, True, False, True, True])


def with_one(values: Tensor, other: float) -> Tensor:
    """Put an image in the middle of four."""
    return torch.cat([values[:2], numbers(other), values[2:]])


def drawn(log_prob: Tensor, a: Tensor, scored: Tensor) -> LossInput:
    """Make what a loss sees of images of one prompt, drawn with log-prob 0 at one time."""
    zero, one = torch.zeros_like(log_prob).detach(), torch.zeros(len(a), dtype=torch.int64)
    data = loss_input(log_prob, zero, a, sigma=torch.full_like(zero, 0.5))
    data = data._replace(batch=data.batch._replace(step=one), under={"ref": Eval(zero, zero, zero)})
    return data._replace(segment=one, siblings=torch.full_like(one, len(a)), scored=scored)


@pytest.mark.parametrize("who", ["dgpo", "surrogate"])
def test_dgpo_divides_by_the_scored_images(who: str) -> None:
    """The reference's two prompts of two images, each with a third: S is a mean over two, .4750208
    and .4687906, and the mean loss of the four is -.0053050455. TDM-R1's surrogate without an
    anchor has the same loss."""
    groups, scored = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([True, True, False] * 2)
    rows = torch.tensor([0, 1, 0, 2, 3, 2])
    a = torch.where(scored, A[rows], 0.0)
    error = torch.where(scored, D[rows], 0.9).requires_grad_()
    before = {"old": error.detach(), "slow": error.detach()}
    data = fitting(error, a, groups, ref=D_REF[rows], **before)._replace(scored=scored)
    surrogate = preference(anchor=0.0, weigh="even")
    loss, metrics = surrogate.loss(data) if who == "surrogate" else dgpo(data, beta=10)
    expected = numbers(0.4750208, 0.4687906)[groups]
    torch.testing.assert_close(metrics["weight"], expected, atol=1e-7, rtol=0)
    assert float(loss.detach().sum()) / 4 == pytest.approx(-0.0053050455, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss.sum(), error)
    assert loss[~scored].tolist() == gradient[~scored].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("options", "expected"), [*CRD_LOSSES, ({"among": "call"}, CRD_LOSSES[0][1])], ids=str
)
def test_crd_centres_by_the_scored_images(options: dict[str, Any], expected: float) -> None:
    """The reference's four images, and one with q = 1/2 and an own reward of .3."""
    slow = torch.full((5,), 0.5, dtype=torch.float64)
    error = (slow - with_one(OWN, 0.3)).requires_grad_()
    a = with_one((GOOD - 0.5) * 10, 0.0)
    data = fitting(error, a, torch.zeros(5, dtype=torch.int64), slow=slow)
    loss, _ = crd(data._replace(scored=SCORED), normalize=False, **options)
    assert float(loss.detach().sum()) / 4 / 5 == pytest.approx(expected, abs=1e-9)
    (gradient,) = torch.autograd.grad(loss.sum(), error)
    assert float(loss[2].detach()) == float(gradient[2]) == 0


def test_trpa_has_pairs_of_scored_images_alone() -> None:
    """Levels 2, 1 and -1 with gains .2, -.1, .3, and an image without a score, whose advantage 0 is
    above the last: 3 pairs, (0, 1) and (0, 2) at .25 and (1, 2) at .1."""
    now = numbers(0.2, -0.1, 0.4, 0.3).requires_grad_()
    scored = torch.tensor([True, True, False, True])
    loss, metrics = level_preference(drawn(now, numbers(2, 1, 0, -1), scored))
    wanted = mean([math.log1p(math.exp(-h)) for h in (0.25 * 0.3, 0.25 * -0.1, 0.1 * -0.4)])
    assert loss.tolist() == pytest.approx([wanted, wanted, 0, wanted])
    assert metrics["pairs"].tolist() == [3] * 4
    loss.sum().backward()
    assert now.grad is not None and float(now.grad[2]) == 0 and bool(now.grad[[0, 1, 3]].all())
    # where all others are below the mean, it is not the best either
    best = level_preference(drawn(now, numbers(-1, -2, 0, -3), scored))[0]
    torch.testing.assert_close(best, loss)


def test_a_prompt_without_any_score_has_no_loss() -> None:
    """Nor a NaN in the gradient."""
    none, a = torch.zeros(3, dtype=torch.bool), numbers(0, 0, 0)
    now = numbers(0.1, 0.2, 0.4).requires_grad_()
    group = torch.zeros(3, dtype=torch.int64)
    under = {name: numbers(0.3, 0.3, 0.3) for name in ("ref", "old", "slow")}
    fitted = fitting(now, a, group, **under)._replace(scored=none)
    losses = [dgpo(fitted, beta=1.0), level_preference(drawn(now, a, none))]
    for centre in ("mean", "soft", "hard", "hard_published"):
        losses.append(crd(fitted, centre=centre))
    for loss, _ in losses:
        (gradient,) = torch.autograd.grad(loss.sum(), now, retain_graph=True)
        assert loss.tolist() == gradient.tolist() == [0, 0, 0]
