"""How long the network's velocity is beside that of the weights from before training."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flowrl.core.noise_path import length_ratio
from flowrl.core.types import Eval


def velocity_length(
    now: Eval, under: Mapping[str, Eval], likelihood: object = None
) -> dict[str, Tensor]:
    """Return {"velocity_length": |v| / |v_ref| [B]}, detached, where both are there, else {}.

    What NormGuard (2606.27771) watches: some losses make velocities 5 to 15 % longer. Nothing is
    read on the host. A `likelihood` with `judge` has others see another state than its own: {}.
    """
    if hasattr(likelihood, "judge"):
        return {}
    ref = under["ref"].v if "ref" in under else None
    if now.v is None or ref is None:
        return {}
    return {"velocity_length": length_ratio(now.v.detach(), ref.detach())}
