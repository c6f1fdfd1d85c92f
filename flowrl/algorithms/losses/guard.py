"""GRPO-Guard: a ratio without the drift that squared distances bring in, on one scale for all noise
levels.

With ``x_next = old_mean + std z``, the plain log-ratio is ``mean(z (mean - old_mean)) / std - b``,
where b is half the mean squared shift in stds. `guard` adds b and multiplies by std: ``log r =
mean(z (mean - old_mean))``. Its mean is 0, and its spread ``rms(mean - old_mean) / sqrt(D)`` does
not depend on std, so that one clip range fits all steps.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from flowrl.algorithms.losses._common import (
    check_clip,
    check_transition,
    ratio_metrics,
    surrogate,
)
from flowrl.core.errors import ConfigError
from flowrl.core.host_copies import refuse_if
from flowrl.core.needs import needs
from flowrl.core.types import LossInput


@needs("old_log_prob", "old_mean")
def guard(
    data: LossInput,
    *,
    clip_low: float,
    clip_high: float,
    max_advantage: float = 5.0,
    bias: Literal["sample", "batch"] = "sample",
    divide_by_delta: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate of ``r = exp((log_prob - old_log_prob + b) std)``, over delta,
    [B] and metrics [B].

    ``b = mean((mean - old_mean)^2) / (2 std^2)`` over latent dimensions, ``delta = sigma -
    sigma_next``; mean and old_mean [B, *] are those of the transition, std [B] its std above 0.
    GRPO-Guard (2510.22319) and its code, whose clip ranges are 2e-6 to 4e-6. The gradient flows
    through b as well: log r is then linear in the mean.

    **Differs:** the code averages over the whole micro-batch, so that all its rows share one b;
    that is bias "batch", and "sample" is the paper. A micro-batch of the code has one noise level,
    one of flowrl may have several. Flow-Factory has the same ratio without the division by delta
    (`divide_by_delta` off).

    Metrics as in `ppo_clip`, of this ratio: approx_kl is half its squared logarithm, which is no
    KL.

    Raises: ConfigError for a clip range that is not positive, another `bias`, a segment, or a
    likelihood without a std, or without steps to divide by.
    """
    check_clip("guard", clip_low, clip_high, max_advantage)
    if bias not in ("sample", "batch"):
        raise ConfigError(f'guard: bias must be "sample" or "batch", got {bias!r}')
    if data.old_mean is None:
        raise ConfigError("guard: needs the transition means of the sampling policy, got none")
    if data.segment is not None:
        raise ConfigError("guard: its ratio is that of a single step; leave out `segment`")
    check_transition("guard", data)
    delta = data.batch.sigma - data.batch.sigma_next
    if divide_by_delta:
        still = ConfigError(
            "guard: divides by what a step takes off the noise level, and this likelihood takes no "
            "steps; take likelihood reverse, or loss ppo_clip"
        )
        refuse_if((delta == 0).any(), lambda: still)
    std = data.now.std
    # the log-ratio without its bias, on the scale of one std
    gap = (data.now.mean - data.old_mean.detach()).square().flatten(1).mean(1)
    b = gap / (2 * std.square())
    plain = data.now.log_prob - data.old_log_prob.detach()
    log_ratio = (plain + (b.mean() if bias == "batch" else b)) * std
    # clipped as in PPO
    a = data.batch.advantage.detach().clamp(-max_advantage, max_advantage)
    loss, stopped = surrogate(log_ratio, a, clip_low, clip_high)
    if divide_by_delta:
        loss = loss / delta
    return loss, ratio_metrics(log_ratio.detach(), stopped)
