"""An image without a score beside those of the published examples: their numbers stay as they are,
and it has no loss and no gradient."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import pytest
import torch
from losskit import CRD_LOSSES, D_REF, GOOD, OWN, A, D, fitting, loss_input, numbers
from torch import Tensor

from flowrl.algorithms.companions.surrogate import preference
from flowrl.algorithms.losses.comparisons import crd, dgpo
from flowrl.core.types import Eval, LossInput
from flowrl.techniques.group_losses import group_regression, level_preference

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


def test_reg_grpo_standardises_by_the_scored_images() -> None:
    """B 3.9 beside a log-ratio of .5: the mean squared distance of the four is .3769246."""
    now = with_one(numbers(0.01, -0.02, 0.03, 0.0), 0.5).requires_grad_()
    loss, _ = group_regression(drawn(now, with_one(numbers(1, -1, 0.5, -0.5), 0), SCORED), eps=1e-9)
    loss.sum().backward()
    assert float(loss.detach().sum()) / 4 == pytest.approx(0.3769246, abs=5e-7)
    assert now.grad is not None and float(loss[2].detach()) == float(now.grad[2]) == 0


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
    losses = [dgpo(fitted, beta=1.0), group_regression(drawn(now, a, none))]
    losses += [level_preference(drawn(now, a, none))]
    for centre in ("mean", "soft", "hard", "hard_published"):
        losses.append(crd(fitted, centre=centre))
    for loss, _ in losses:
        (gradient,) = torch.autograd.grad(loss.sum(), now, retain_graph=True)
        assert loss.tolist() == gradient.tolist() == [0, 0, 0]
