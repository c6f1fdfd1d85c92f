"""Losses of group techniques: ratios, bounds and pairs against worked examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean
from typing import Any

import pytest
import torch
from losskit import loss_input
from torch import Tensor

from flowrl.algorithms.losses.elastic import elastic_clip, hybrid_ratio
from flowrl.algorithms.losses.groups import level_preference
from flowrl.algorithms.losses.preference import simple_preference
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput

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


def test_elastic_bounds_follow_advantage_and_variance() -> None:
    """.2 (1 + .5) (1 + .5 x 4 x 1/4) = .45 for |A| = 1 at the largest variance; .2 at A near 0 and
    no variance; the lower bound is .2 always."""
    variance = torch.tensor([0.25, 0.25, 0.0, 0.25, 0.25], dtype=F64)
    a = [1.0, 1.0, 1e-3, -1.0, -1.0]
    options = {"clip_low": 0.2, "clip_high": 0.2}
    found = slopes(
        elastic_clip, [1.44, 1.46, 1.21, 0.81, 0.79], a, reward_variance=variance, options=options
    )
    assert found == pytest.approx([1.44, 0, 0, 0.81, 0])
    with pytest.raises(ConfigError, match="variance"):
        slopes(elastic_clip, [1.0], [1.0], options=options)


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
