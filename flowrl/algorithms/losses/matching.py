"""Losses of the forward process: images are noised anew, and the velocity there is pulled towards
good ones. Unreduced: one value per row; only the training loop divides."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.algorithms.losses._common import (
    Labels,
    check_clip,
    check_velocity,
    optimality,
    ratio_metrics,
    segment_mean,
    surrogate,
)
from flowrl.core.devices import refuse_if
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.noise_path import per_sample
from flowrl.core.types import LossInput


@needs("old_log_prob")
def awm(
    data: LossInput,
    *,
    clip_low: float = 1.0,
    clip_high: float = 1.0,
    max_advantage: float = 5.0,
    advantage_scale: float = 0.2,
    ratio: Literal["exp_first", "sum_first"] = "exp_first",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))`` [B] and metrics [B], with the
    matching loss of likelihood `forward` as minus the log-prob: Advantage Weighted Matching.

    ``r = exp(log_prob - old_log_prob)``, A the advantage within ±max_advantage, times
    advantage_scale. ratio "exp_first": a ratio for each time of an image; "sum_first": one ratio
    per image, of its log-prob averaged over times. On policy r is 1, and the gradient is A times
    that of the weighted matching loss. Source: AWM (2509.25050) and its code: clip 1, which caps
    the ratio of good images at 2 and is no trust region; A within ±5, divided by 5.

    Metrics: those of `ppo_clip`, of this ratio, which is of densities only up to the bound.

    Raises: ConfigError for a clip range or scale that is not positive.
    """
    check_clip("awm", clip_low, clip_high, max_advantage)
    if not advantage_scale > 0:
        raise ConfigError(f"awm: expected advantage_scale > 0, got {advantage_scale}")
    log_ratio = data.now.log_prob - data.old_log_prob.detach()
    if ratio == "sum_first":
        log_ratio, _ = segment_mean(log_ratio, data.batch.node)
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage) * advantage_scale
    loss, stopped = surrogate(log_ratio, a, clip_low, clip_high)
    return loss, ratio_metrics(log_ratio.detach(), stopped)


@needs("old", "zero_advantage")
def nft(
    data: LossInput,
    *,
    beta: float,
    max_advantage: float = 5.0,
    labels: Labels = "all",
    normalize: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``max_advantage (o L+ + (1 - o) L-) / beta`` [B] and metrics [B]: good images pull the
    velocity, bad ones pull its mirror image at the old one.

    ``o`` in [0, 1] is the probability of being good, `optimality` of the advantage. ``v+ = beta v +
    (1 - beta) v_old`` and ``v- = (1 + beta) v_old - beta v``; x+ and x- are their x0 estimates, and
    ``L = mean((x± - x0)^2) / max(mean |x± - x0|, 1e-5)``, the divisor in float64 and without a
    gradient. normalize off: the mean squared error of v± itself. Then the optimum is closed,
    ``v = v_old + (2 o - 1) / beta (u - v_old)`` for the target u. Source: DiffusionNFT (2509.16117)
    and its code.

    **Differs:** the paper has no divisor, its code has. An image that was not scored has o = 1/2.

    Metrics: `optimality`, `drift` = mean (v - v_old)^2, `loss_good` and `loss_bad`, L of each side.

    Raises: ConfigError for beta or max_advantage not above 0, or a likelihood other than `forward`.
    """
    if not (beta > 0 and max_advantage > 0):
        raise ConfigError(
            "nft: beta says how far v+ and v- are from the old velocity, and the loss is divided "
            f"by it: expected beta > 0 and max_advantage > 0, got {beta=}, {max_advantage=}"
        )
    check_velocity("nft", data)
    now, old = data.now.mean, data.under["old"].mean.detach()
    target, sigma = data.batch.target, data.batch.sigma
    good = optimality(data.batch.advantage.detach(), max_advantage, labels)
    # the x0 estimate of v is off by sigma (u - v)
    move = beta * (now - old)
    gaps = [old + move - target, old - move - target]
    plus, minus = (_side(gap, sigma, normalize=normalize) for gap in gaps)
    loss = max_advantage / beta * (good * plus + (1 - good) * minus)
    drift = (now - old).detach().square().flatten(1).mean(1)
    sides = {"loss_good": plus.detach(), "loss_bad": minus.detach()}
    return loss, {"optimality": good, "drift": drift, **sides}


@needs("ref", "old", "zero_advantage")
def ram(data: LossInput, *, advantage_scale: float = 100.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``mean((v - t)^2)`` [B] and metrics [B], where the target ``t = v_ref +
    advantage_scale A (u - v_old)`` has no gradient: Reinforce Adjoint Matching.

    u is the velocity of the straight path to the image, A its advantage, v_ref the base model's
    velocity, v_old that of the weights that sampled. The anchor v_ref is the only penalty: where A
    is 0 the velocity is pulled back to it, and a larger scale pulls less. On policy, v = v_old, the
    gradient is that of ``mean((v - v_ref)^2) + advantage_scale A mean((v - u)^2)``, AWM without
    time weights and with a velocity penalty of 1 / advantage_scale. Source: RAM (2605.10759),
    equation 17, and its code, both by ports that agree: A is centred per prompt and divided by the
    std of all rewards; scale 100 for GenEval and OCR, 1000 for PickScore.

    **Differs:** the equation has v itself, without a gradient, in the place of v_old; the code, an
    averaged copy that also samples. So does flowrl, with the section `old`; without it v_old is the
    policy of the iteration. The code samples with guidance and trains without.

    Metrics: `error` = mean (v - u)^2, `from_base` = mean (v - v_ref)^2, `drift` = mean (v -
    v_old)^2.

    Raises: ConfigError for a scale that is not above 0, or a likelihood other than `forward`.
    """
    if not advantage_scale > 0:
        raise ConfigError(f"ram: expected advantage_scale > 0, got {advantage_scale}")
    check_velocity("ram", data)
    now = data.now.mean
    ref, old = data.under["ref"].mean.detach(), data.under["old"].mean.detach()
    u = data.batch.target
    a = per_sample(advantage_scale * data.batch.advantage.detach().to(now), now)
    gap = (now - (ref + a * (u - old))).double()
    gaps = {"error": now - u, "from_base": now - ref, "drift": now - old}
    metrics = {name: value.detach().square().flatten(1).mean(1) for name, value in gaps.items()}
    return gap.square().flatten(1).mean(1), metrics


def regression(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """Return ``-w log_prob`` [B], the matching loss weighted by an advantage w >= 0.

    Reward-weighted regression with credit `reward_softmax` (the RWR of DDPO, 2305.13301, section
    4.2); fine-tuning on the best images with credit `best_of`.

    Metrics: `error`, minus the log-prob.

    Raises: ConfigError for a negative advantage, whose loss has no minimum.
    """
    w = data.batch.advantage.detach()

    def negative() -> ConfigError:
        return ConfigError(
            f"regression: expected advantages of at least 0, got {w.min().item():g}; take credit "
            "reward_softmax or best_of, or for advantages of both signs the loss awm or nft"
        )

    refuse_if((w < 0).any(), negative)
    return -w * data.now.log_prob, {"error": -data.now.log_prob.detach()}


def _side(gap: Tensor, sigma: Tensor, *, normalize: bool) -> Tensor:
    """Return L [B] of a velocity that misses the target by gap [B, *]."""
    if not normalize:
        return gap.double().square().flatten(1).mean(1)
    miss = gap.double() * per_sample(sigma.double(), gap.double())
    size = miss.detach().abs().flatten(1).mean(1).clamp_min(1e-5)
    return miss.square().flatten(1).mean(1) / size
