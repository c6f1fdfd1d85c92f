"""Policy gradients on the evidence bound of an image, likelihood `forward`. Unreduced: one value
per row; only the training loop divides."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs
from flowrl.core.types import LossInput


@needs("old_log_prob", "zero_advantage")
def bound_gradient(
    data: LossInput,
    *,
    form: Literal["epg", "pepg", "par"] = "pepg",
    ratio: bool = True,
    advantage_scale: float = 0.1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a surrogate [B] whose gradient is a policy gradient on the bound l, and metrics [B].

    ``D = l - l_old`` and ``rho = exp(D)``, both without a gradient, rho 1 without `ratio`; A the
    advantage times advantage_scale. epg: ``-rho A l``. pepg: ``-rho (A - D) l``, which also pulls
    back to the old policy. par: ``rho (A - (l - l_old))^2 / 2``, a regression of the log-ratio to
    A, with the gradient of pepg. Source: EPG, PEPG and PAR (2602.04663), their code: A is
    ``0.1 (r - mean)`` without a std, which is credit `mean_centred` and the scale 0.1.

    **Differs:** in the code one number is the scale of A and the weight of the penalty, so that
    without a penalty the scale is another one; here these are two.

    Rows of advantage 0 are pulled back as well.

    Metrics: `log_ratio`, D; `error`, -l.

    Raises: ConfigError for a scale that is not above 0.
    """
    if not advantage_scale > 0:
        raise ConfigError(f"bound_gradient: expected advantage_scale > 0, got {advantage_scale}")
    bound, old = data.now.log_prob, data.old_log_prob.detach()
    gap = bound.detach() - old
    rho = gap.exp() if ratio else torch.ones_like(gap)
    a = advantage_scale * data.batch.advantage.detach()
    if form == "epg":
        loss = -rho * a * bound
    elif form == "pepg":
        loss = -rho * (a - gap) * bound
    else:
        loss = rho * (a - (bound - old)).square() / 2
    return loss, {"log_ratio": gap, "error": -bound.detach()}
