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

from flowrl.algorithms.losses import ratio_rules
from flowrl.algorithms.losses._common import probability_bounds
from flowrl.algorithms.losses.elastic import density_clip, elastic_clip, hybrid_ratio
from flowrl.algorithms.losses.groups import group_regression, level_preference
from flowrl.algorithms.losses.preference import simple_preference
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval, LossInput
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


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        # B 3.4, q = .9 .5 .1 .01: the text's ranges, and those of the released script
        (0.16, 0.2, [(0.7687, 1.1872), (0.5, 1.3062), (0.5, 2.0), (0.5, 5.0)]),
        (0.2, 0.28, [(0.6667, 1.2491), (0.5, 1.4), (0.5, 2.2464), (0.5, 5.8151)]),
    ],
)
def test_dcpo_bounds_are_the_reference_s(
    low: float, high: float, wanted: list[tuple[float, float]]
) -> None:
    """They solve |r - 1| q r = the range, where that has a solution; 10 is the most there is."""
    q = torch.tensor([0.9, 0.5, 0.1, 0.01], dtype=F64)
    found = torch.stack(probability_bounds(q, low, high), 1)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=F64), rtol=0, atol=6e-5)
    least, most = found[0].tolist()
    assert (1 - least) * 0.9 * least == pytest.approx(low)
    assert (most - 1) * 0.9 * most == pytest.approx(high)
    assert float(probability_bounds(torch.tensor([1e-4], dtype=F64), low, high)[1]) == 10


def drawn(ratio: list[float], a: list[float], square: list[float], dims: int) -> Any:
    """Rows of `dims` numbers whose draws have these mean squares, at std .5 -> log-prob, record."""
    old = [-s / 2 - math.log(0.5) - math.log(2 * math.pi) / 2 for s in square]
    before = torch.tensor(old, dtype=F64)
    now = (before + torch.tensor(ratio, dtype=F64).log()).requires_grad_()
    std, x = torch.full((len(a),), 0.5, dtype=F64), torch.zeros(len(a), dims)
    return now, loss_input(now, before, torch.tensor(a, dtype=F64), std=std, x=x)


def test_dcpo_lets_unlikely_draws_move_further() -> None:
    """8 numbers, mean squares 1 and 2: standing 0 and -2, so q = 1/2 and sigmoid(-2) = .1192. At
    range .2 the upper bounds are 1.3062 and 1.8882: a ratio of 1.6 is beyond the first only."""
    now, data = drawn([1.6, 1.6], [1.0, 1.0], [1.0, 2.0], 8)
    loss, metrics = density_clip(data, clip_low=0.16, clip_high=0.2)
    loss.sum().backward()
    assert metrics["probability"].tolist() == pytest.approx([0.5, 1 / (1 + math.exp(2))])
    wide = (1 + math.sqrt(1 + 0.8 * (1 + math.exp(2)))) / 2
    assert metrics["clip_range"].tolist() == pytest.approx([0.3062258, wide - 1])
    assert now.grad.tolist() == pytest.approx([0.0, -1.6])
    assert loss.tolist() == pytest.approx([-1.3062258, -1.6])
    assert metrics["clip_frac"].tolist() == [1, 0]


def test_dcpo_caps_bad_draws_that_became_likelier() -> None:
    """A = -1: ratio .4 is below 1/2, 3 has its gradient, 20 counts as 10 and has none."""
    now, data = drawn([0.4, 3.0, 20.0], [-1.0] * 3, [1.0] * 3, 8)
    loss, metrics = density_clip(data, clip_low=0.2, clip_high=0.28)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([0.5, 3.0, 10.0])
    assert now.grad.tolist() == pytest.approx([0.0, 3.0, 0.0])
    assert metrics["clip_frac"].tolist() == [1, 0, 1]
    with pytest.raises(ConfigError, match="cap > 1"):
        density_clip(data, clip_low=0.2, clip_high=0.28, cap=1.0)
    still = data._replace(now=data.now._replace(std=torch.zeros(3)))
    with pytest.raises(ConfigError, match="draws nothing"):
        density_clip(still, clip_low=0.2, clip_high=0.28)


def test_what_a_run_draws_is_half_likely(tmp_path: Path) -> None:
    """The standing of the toy's draws of 192 numbers has mean 0 and std 1: 480 draws, the mean of
    its sigmoid within 4 standard errors (.21 each, by a normal number's sigmoid) of 1/2."""
    loss = "loss={fn: density_clip, clip_low: 1.0e-3, clip_high: 1.0e-3}"
    trainer = Trainer(toy(tmp_path, loss, "train.group=80", "train.updates=1"))
    found = trainer.step()
    assert found["grad_norm"] > 0 and found["trained"] == 480
    assert abs(found["probability"] - 0.5) < 4 * 0.21 / 480**0.5


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
    call = on_tensors(ratio_rules.kept_gradient)
    options = {"clip_low": 0.2, "clip_high": 0.2, "keep_low": 0.5, "keep_high": 0.25}
    loss, metrics = call(log_prob, torch.zeros(5), advantage, **options)
    loss.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([-1.1, -0.3, 0.4, -0.5, 1.5])
    assert loss.tolist() == pytest.approx([-1.1, -1.2, 0.8, -0.5, 1.5])
    assert metrics["clip_frac"].tolist() == [0, 1, 1, 0, 0]
