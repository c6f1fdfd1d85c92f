"""Losses of techniques: gradients, pulls and pairs against worked examples, and what every rule for
the ratio does at a ratio of 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
import torch
from losskit import loss_input, numbers
from torch import Tensor

from flowrl.algorithms.losses import policy
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput
from flowrl.techniques import group_losses
from flowrl.techniques.group_losses import (
    level_preference,
    simple_preference,
)

F64 = torch.float64


def rows(log_prob: Tensor, advantage: list[float], **fields: Any) -> LossInput:
    """Make what a loss sees of rows that were drawn with log-prob 0."""
    zero, a = torch.zeros_like(log_prob).detach(), torch.tensor(advantage, dtype=F64)
    return loss_input(log_prob, zero, a)._replace(**fields)


def slopes(
    loss: Callable[..., Any], ratio: list[float], a: list[float], **fields: Any
) -> list[float]:
    """Return d loss / d log-prob over -A."""
    now = torch.tensor(ratio, dtype=F64).log().requires_grad_()
    options = fields.pop("options")
    loss(rows(now, a, **fields), **options)[0].sum().backward()
    assert now.grad is not None
    return (now.grad / -torch.tensor(a, dtype=F64)).tolist()


def test_simpo_by_hand() -> None:
    """beta 2, log-probs -.2 and -.5, margin .3: -ln sigmoid(.6 - .3); no base model is asked."""
    sigma, one = torch.tensor([0.5, 0.5]), torch.zeros(2, dtype=torch.int64)
    data = rows(torch.tensor([-0.2, -0.5], dtype=F64), [1.0, -1.0], segment=one)
    data = data._replace(batch=data.batch._replace(sigma=sigma, step=one))
    loss, metrics = simple_preference(data, beta=2.0, margin=0.3)
    assert loss.tolist() == pytest.approx([math.log1p(math.exp(-0.3))] * 2)
    assert metrics["pair_accuracy"].tolist() == [1, 1]
    with pytest.raises(ConfigError, match="segment="):
        simple_preference(data._replace(segment=None), beta=2.0)


def test_trpa_by_hand() -> None:
    """Levels 2, 1, 0 with gains .2, -.1, .3 over the base: pairs (0, 1), (0, 2) at .25 and (1, 2)
    at .1; a prompt of one level has no gradient."""
    now = torch.tensor([0.2, -0.1, 0.3, 0.4, 0.5], dtype=F64).requires_grad_()
    prompt = torch.tensor([0, 0, 0, 1, 1])
    step = torch.zeros_like(prompt)
    zero = torch.zeros(5, dtype=F64)
    data = rows(
        now, [2.0, 1.0, 0.0, 1.0, 1.0], segment=prompt, under={"ref": Eval(zero, zero, zero)}
    )
    data = data._replace(
        batch=data.batch._replace(sigma=torch.zeros(5), step=step),
        siblings=torch.tensor([3, 3, 3, 2, 2]),
    )
    loss, metrics = level_preference(data)
    inside = [0.25 * 0.3, 0.25 * -0.1, 0.1 * -0.4]
    wanted = mean([math.log1p(math.exp(-h)) for h in inside])
    assert loss.tolist() == pytest.approx([wanted] * 3 + [0, 0])
    assert metrics["pairs"].tolist() == [3, 3, 3, 0, 0]
    loss.sum().backward()
    assert now.grad is not None and now.grad[3:].tolist() == [0, 0]
    with pytest.raises(ConfigError, match="torn"):
        level_preference(data._replace(siblings=torch.full((5,), 4)))


WIDE: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
RATIOS = [0.5, 0.9, 1.1, 1.3, 4.0]


@pytest.mark.parametrize(
    ("loss", "options", "ratio", "a", "wanted"),
    [
        # the reference's fixture, eps .2
        (group_losses.asymmetric_ratio, WIDE, RATIOS, 1.0, [2, 1 / 0.9, 1 / 1.1, 0, 0]),
        (group_losses.asymmetric_ratio, WIDE, RATIOS, -1.0, [0, 0.9, 1.1, 1.3, 3]),
        # 1 / .1 would be 10; the cap is 3
        (group_losses.asymmetric_ratio, WIDE, [0.1], 1.0, [3]),
        # the mask, without an importance weight
        (group_losses.one_sided, WIDE, RATIOS, 1.0, [1, 1, 1, 0, 0]),
        (group_losses.one_sided, WIDE, RATIOS, -1.0, [0, 1, 1, 1, 1]),
        # d/dl (-A l + tau l^2 / 2) = 0 at l = A / tau; (l / scale - A)^2 is least at l = scale A
        (group_losses.opmd, {"tau": 4.0}, [math.exp(0.5 / 4)], 0.5, [0]),
        (group_losses.ratio_regression, {"scale": 0.01}, [math.exp(0.005)], 0.5, [0]),
    ],
)
def test_weights_of_the_gradient(
    loss: Callable[..., Any], options: Any, ratio: list[float], a: float, wanted: list[float]
) -> None:
    """d loss / d log-prob over -A."""
    found = slopes(loss, ratio, [a] * len(ratio), options=options)
    assert found == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("loss", [policy.divergence_mask, group_losses.velocity_mask])
def test_masks_stop_what_is_far_and_moves_outward(loss: Any) -> None:
    """The reference's rows, whose distance is 2e-6, of transitions or of velocities: kept are 0, 1,
    1, 0, 1, and the mean of -A r over the five rows is .0040000667; below the threshold nothing is
    stopped."""
    now = numbers(0.01, 0.01, -0.01, -0.01, 0.0).requires_grad_()
    a, none = numbers(1, -1, 1, -1, 0), torch.zeros(5, dtype=F64)
    means = torch.full((5, 3), (2e-6 * 2 * 0.25) ** 0.5, dtype=F64)
    v = torch.zeros(5, 1, dtype=F64)
    half = torch.full((5,), 0.5, dtype=F64)
    data = loss_input(now, none, a, v=v, mean=means, old_mean=torch.zeros_like(means), std=half)
    data = data._replace(under={"old": Eval(none, v, none, v + 2e-6**0.5)})
    value, metrics = loss(data, most=1e-6)
    (gradient,) = torch.autograd.grad(value.sum(), now)
    assert (gradient != 0).tolist() == [False, True, True, False, False]  # A = 0 has no slope
    assert metrics["clip_frac"].tolist() == [1, 0, 0, 1, 0]
    torch.testing.assert_close(metrics["divergence"], torch.full_like(a, 2e-6))
    kept = value.detach() * (1 - metrics["clip_frac"])
    assert float(kept.mean()) == pytest.approx(0.0040000667, abs=1e-10)
    assert float(loss(data, most=3e-6)[1]["clip_frac"].sum()) == 0
    blind = data._replace(now=data.now._replace(v=None), old_mean=None)
    with pytest.raises(ConfigError, match="no velocity|transition means"):
        loss(blind, most=1e-6)
    with pytest.raises(ConfigError, match="most > 0"):
        loss(data, most=0.0)


@pytest.mark.parametrize(
    ("loss", "options", "words"),
    [
        ("one_sided", {"clip_low": 0.0, "clip_high": 0.1}, "clip_low"),
        ("opmd", {"tau": 0.0}, "tau > 0"),
        ("ratio_regression", {"scale": -1.0}, "scale > 0"),
        ("asymmetric_ratio", {**WIDE, "cap": 1.0}, "cap > 1"),
    ],
)
def test_bad_options_of_losses_are_named(loss: str, options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        slopes(getattr(group_losses, loss), [1.0], [1.0], options=options)


# -------------------------------------------------------------------------------- at a ratio of 1

CLIP: dict[str, Any] = {"clip_low": 1e-3, "clip_high": 1e-3}
# every rule for the ratio, and the factor of its gradient
RULES: dict[str, tuple[Callable[..., Any], dict[str, Any], float]] = {
    "ppo_clip": (policy.ppo_clip, CLIP, 1.0),
    "one_sided": (group_losses.one_sided, CLIP, 1.0),
    "clamped_ratio": (policy.clamped_ratio, CLIP | {"scale": 10.0}, 10.0),
    "opmd": (group_losses.opmd, {"tau": 100.0}, 1.0),
    # 2 / scale times the policy gradient
    "ratio_regression": (group_losses.ratio_regression, {"scale": 0.5}, 4.0),
    "asymmetric_ratio": (group_losses.asymmetric_ratio, CLIP, 1.0),
    "divergence_mask": (policy.divergence_mask, {"most": 1e-6}, 1.0),
    "velocity_mask": (group_losses.velocity_mask, {"most": 1e-6}, 1.0),
}


def on_policy() -> LossInput:
    """Four draws of two numbers under the weights that made them, each an image of its own."""
    now = torch.tensor([-0.9, -1.1, -1.4, -0.7], dtype=F64).requires_grad_()
    a = torch.tensor([0.7, -1.3, 0.0, 2.0], dtype=F64)
    v = torch.ones(4, 2, dtype=F64)
    tensors = {"x": v, "v": v, "mean": v, "std": torch.full((4,), 0.5, dtype=F64)}
    data = loss_input(now, now.detach().clone(), a, **tensors, old_mean=v)
    return data._replace(
        under={"old": Eval(now.detach(), v, tensors["std"], v)},
        segment=torch.arange(4),
    )


@pytest.mark.parametrize("name", RULES)
def test_at_a_ratio_of_one_every_rule_is_the_policy_gradient(name: str) -> None:
    """The ratio is 1 to the bit, nothing is stopped, and d loss / d log-prob is -A, but for a
    constant."""
    loss, options, factor = RULES[name]
    data = on_policy()
    value, metrics = loss(data, **options)
    value.sum().backward()
    slope = data.now.log_prob.grad
    assert slope is not None
    torch.testing.assert_close(slope, -factor * data.batch.advantage)
    assert metrics["ratio"].tolist() == [1.0] * 4 and metrics["clip_frac"].tolist() == [0.0] * 4
