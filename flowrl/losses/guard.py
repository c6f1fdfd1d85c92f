"""GRPO-Guard: a ratio without the drift that squared distances bring in, on one scale for all noise levels.

With ``x_next = old_mean + std z``, the plain log-ratio is ``mean(z (mean - old_mean)) / std - b``, where b is half the
mean squared shift in stds. `guard` adds b and multiplies by std: ``log r = mean(z (mean - old_mean))``. Its mean is 0,
and its spread ``rms(mean - old_mean) / sqrt(D)`` does not depend on std, so that one clip range fits all steps.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.errors import ConfigError
from flowrl.losses._common import check_clip, ratio_metrics, surrogate


def guard(
    log_prob: Tensor,
    old_log_prob: Tensor,
    weight: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    max_weight: float = 5.0,
    bias: Literal["sample", "batch"] = "sample",
    divide_by_delta: bool = True,
    mean: Tensor,
    old_mean: Tensor,
    std: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate of ``r = exp((log_prob - old_log_prob + b) std)``, over delta, [B] and metrics [B].

    ``b = mean((mean - old_mean)^2) / (2 std^2)`` over latent dimensions, ``delta = sigma - sigma_next``; mean and
    old_mean [B, *] are those of the transition, std [B] its std above 0. GRPO-Guard (2510.22319) and its code, whose
    clip ranges are 2e-6 to 4e-6. The gradient flows through b as well: log r is then linear in the mean.

    **Differs:** the code averages over the whole micro-batch, so that all its rows share one b; that is bias "batch",
    and "sample" is the paper. A micro-batch of the code has one noise level, one of flowrl may have several.
    Flow-Factory has the same ratio without the division by delta (`divide_by_delta` off).

    Metrics as in `ppo_clip`, of this ratio: approx_kl is half its squared logarithm, which is no KL.

    Raises: ConfigError for a clip range that is not positive, or another `bias`.
    """
    check_clip("guard", clip_low, clip_high, max_weight)
    if bias not in ("sample", "batch"):
        raise ConfigError(f'guard: bias must be "sample" or "batch", got {bias!r}')
    b = (mean - old_mean.detach()).square().flatten(1).mean(1) / (2 * std.square())
    log_ratio = (log_prob - old_log_prob.detach() + (b.mean() if bias == "batch" else b)) * std
    loss, stopped = surrogate(log_ratio, weight.detach().clamp(-max_weight, max_weight), clip_low, clip_high)
    metrics = ratio_metrics(log_ratio.detach(), stopped)
    return (loss / (sigma - sigma_next) if divide_by_delta else loss), metrics
