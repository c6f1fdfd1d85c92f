"""Losses of group techniques: ratios, bounds and pairs against worked examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from losskit import loss_input, on_tensors
from torch import Tensor
from toykit import toy

from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput
from flowrl.techniques.group_losses import (
    group_regression,
    hybrid_ratio,
    kept_gradient,
    level_preference,
    simple_preference,
)
from flowrl.training.trainer import Trainer

NAN = float("nan")

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
