"""Losses of techniques: gradients, pulls and pairs against worked examples, and what every rule for
the ratio does at a ratio of 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from losskit import loss_input, numbers, on_tensors
from torch import Tensor
from toykit import toy

from flowrl.algorithms.losses import policy
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput
from flowrl.techniques import group_losses
from flowrl.techniques.group_losses import (
    group_regression,
    hybrid_ratio,
    kept_gradient,
    level_preference,
    simple_preference,
)
from flowrl.training.trainer import Trainer

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


def regressed(log_ratio: list[float], a: list[float], siblings: int, **options: Any) -> Any:
    """Call Reg-GRPO on the images of one prompt, at one step each -> log-ratios, loss, metrics."""
    now = torch.tensor(log_ratio, dtype=F64).requires_grad_()
    prompt = torch.zeros(len(a), dtype=torch.int64)
    data = rows(now, a, segment=prompt, siblings=torch.full_like(prompt, siblings))
    data = data._replace(batch=data.batch._replace(step=prompt))
    return now, *group_regression(data, **options)


def test_reg_grpo_has_the_reference_s_numbers() -> None:
    """B 3.9: log-ratios .01 -.02 .03 0 are predictions .277350 -1.386750 1.386750 -.277350 (std of
    n); their mean squared distance to 1 -1 .5 -.5 is .3769246."""
    a = [1.0, -1.0, 0.5, -0.5]
    _, loss, metrics = regressed([0.01, -0.02, 0.03, 0.0], a, 4, eps=1e-12)
    assert float(loss.detach().mean()) == pytest.approx(0.3769246, abs=5e-8)
    predicted = torch.tensor([0.277350, -1.386750, 1.386750, -0.277350], dtype=F64)
    wanted = (predicted - torch.tensor(a, dtype=F64)).square()
    torch.testing.assert_close(loss.detach(), wanted, rtol=0, atol=2e-6)
    assert float(metrics["ratio"][1].log()) == pytest.approx(-0.02)


def test_reg_grpo_on_policy_is_the_centred_regression() -> None:
    """All log-ratios 0: the predictions are (l - mean l) / eps, so the gradient of the sum is
    -2 (A - mean A) / eps, and finite although the std has none there."""
    now, loss, _ = regressed([0.0] * 3, [1.0, -0.5, 0.2], 3, eps=0.01)
    loss.sum().backward()
    middle = 0.7 / 3
    wanted = [-200 * (a - middle) for a in (1.0, -0.5, 0.2)]
    assert now.grad.tolist() == pytest.approx(wanted)
    assert loss.tolist() == pytest.approx([1.0, 0.25, 0.04])


def test_reg_grpo_standardises_each_step_of_whole_prompts() -> None:
    """Two images with two steps each are four trained draws of a prompt, standardised by step: a
    pair is 1 and -1 whatever its size. A node with two rows counts once; a torn group is named."""
    now = torch.tensor([0.1, 0.3, -0.2, -0.1], dtype=F64)
    prompt, step = torch.zeros(4, dtype=torch.int64), torch.tensor([0, 0, 1, 1])
    data = rows(now, [0.0] * 4, segment=prompt, siblings=torch.full((4,), 4))
    data = data._replace(batch=data.batch._replace(step=step))
    assert group_regression(data, eps=1e-9)[0].tolist() == pytest.approx([1.0] * 4)
    twice = data.batch._replace(node=torch.tensor([5, 6, 5, 6]))
    data = data._replace(batch=twice, siblings=torch.full((4,), 2))
    assert group_regression(data, eps=1e-9)[0].tolist() == pytest.approx([1.0] * 4)
    with pytest.raises(ConfigError, match="torn: 2 of its 3"):
        group_regression(data._replace(siblings=torch.full((4,), 3)))
    with pytest.raises(ConfigError, match="segment="):
        group_regression(data._replace(segment=None))
    with pytest.raises(ConfigError, match="eps > 0"):
        group_regression(data, eps=0.0)


@pytest.mark.parametrize("likelihood", ["{fn: reverse}", "{fn: forward, draws: 2, shared: true}"])
def test_reg_grpo_trains_in_a_run(tmp_path: Path, likelihood: str) -> None:
    """Three steps of four images of two prompts, in calls that are smaller than a prompt; two
    updates."""
    options = ("segment={fn: prompt}", "train.micro_batch=2", f"likelihood={likelihood}")
    trainer = Trainer(toy(tmp_path, "loss={fn: group_regression}", *options))
    metrics = trainer.step()
    assert metrics["grad_norm"] > 0 and metrics["ratio"] != 1
    with pytest.raises(ConfigError, match="segment="):
        Trainer(toy(tmp_path, "loss={fn: group_regression}", f"likelihood={likelihood}"))


def test_a_hybrid_mixes_the_ratios_of_steps_and_images() -> None:
    """Two steps of one image: .3 of each step's ratio, .7 of their geometric mean; the second step
    is beyond its own range, the image is not."""
    ratio, mean_ratio = [1.1, 1.3], math.sqrt(1.1 * 1.3)
    wide = {"clip_low": 0.2, "clip_high": 0.2, "image_low": 0.25, "image_high": 0.25, "mix": 0.3}
    segment = torch.tensor([4, 4])
    found = slopes(hybrid_ratio, ratio, [1.0, 1.0], segment=segment, options=wide)
    assert found == pytest.approx([0.3 * 1.1 + 0.7 * mean_ratio, 0.7 * mean_ratio])
    with pytest.raises(ConfigError, match="no segment"):
        slopes(hybrid_ratio, ratio, [1.0, 1.0], options=wide)


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


def test_a_share_of_the_gradient_is_kept_outside_of_the_range() -> None:
    """CE-GPPO in closed form: the gradient of log r is -A w with w = r inside, keep times the end
    of the range outside; on the other side PPO has a gradient of its own, r."""
    ratio = torch.tensor([1.1, 1.5, 0.5, 0.5, 1.5], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    log_prob = ratio.log().requires_grad_()
    call = on_tensors(kept_gradient)
    options = {"clip_low": 0.2, "clip_high": 0.2, "keep_low": 0.5, "keep_high": 0.25}
    loss, metrics = call(log_prob, torch.zeros(5), advantage, **options)
    loss.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([-1.1, -0.3, 0.4, -0.5, 1.5])
    assert loss.tolist() == pytest.approx([-1.1, -1.2, 0.8, -0.5, 1.5])
    assert metrics["clip_frac"].tolist() == [0, 1, 1, 0, 0]


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
IMAGE: dict[str, Any] = {"image_low": 1e-3, "image_high": 1e-3}


# every rule for the ratio, and the factor of its gradient
RULES: dict[str, tuple[Callable[..., Any], dict[str, Any], float]] = {
    "ppo_clip": (policy.ppo_clip, CLIP, 1.0),
    "one_sided": (group_losses.one_sided, CLIP, 1.0),
    "clamped_ratio": (policy.clamped_ratio, CLIP | {"scale": 10.0}, 10.0),
    "opmd": (group_losses.opmd, {"tau": 100.0}, 1.0),
    # 2 / scale times the policy gradient
    "ratio_regression": (group_losses.ratio_regression, {"scale": 0.5}, 4.0),
    "asymmetric_ratio": (group_losses.asymmetric_ratio, CLIP, 1.0),
    "kept_gradient": (group_losses.kept_gradient, CLIP | {"keep_low": 0.5, "keep_high": 0.5}, 1.0),
    "divergence_mask": (policy.divergence_mask, {"most": 1e-6}, 1.0),
    "velocity_mask": (group_losses.velocity_mask, {"most": 1e-6}, 1.0),
    "hybrid_ratio": (group_losses.hybrid_ratio, CLIP | IMAGE, 1.0),
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
