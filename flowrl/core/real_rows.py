"""What a network says of real images, as a loss or a penalty sees it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RealRows(NamedTuple):
    """A noised real image of the prompt of each row of a batch, and the velocity there."""

    v: Tensor  # [B, *]  velocity under the current weights, with its gradient
    target: Tensor  # [B, *]  eps - x0: that of the straight path to the image
    sigma: Tensor  # [B]  noise level of the image, in (0, 1]
