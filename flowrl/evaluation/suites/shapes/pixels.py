"""Read images of shapes as arrays of 256 levels, and refuse what is none."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.evaluation.suites.shapes.scene import SIZE


def quantised(images: Tensor) -> np.ndarray:
    """Check images [N, 3, 64, 64] in [0, 1] and round them to 8 bits -> float32. Raises
    DataError."""
    # a batch of floats of the right size
    wanted = (3, SIZE, SIZE)
    if not isinstance(images, Tensor) or images.ndim != 4 or tuple(images.shape[1:]) != wanted:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(
            f"the shapes checker reads a tensor of images [N, 3, {SIZE}, {SIZE}]; got {got}. "
            f"Sample at {SIZE}x{SIZE} pixels."
        )
    if not images.is_floating_point():
        raise DataError(
            f"the shapes checker reads float images in [0, 1]; got {images.dtype}. Divide bytes by "
            "255."
        )
    # finite
    values = images.detach().to("cpu", torch.float32)
    finite = torch.isfinite(values).flatten(1).all(1)
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise DataError(
            f"images must be finite; got NaN or infinity in image(s) {bad[:8]}. Check the decoder."
        )
    # in [0, 1], but for rounding errors of up to 1e-3
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    if low < -1e-3 or high > 1 + 1e-3:
        raise DataError(
            f"images must lie in [0, 1]; got [{low:.4g}, {high:.4g}]. Map [-1, 1] by (x + 1) / 2."
        )
    return (torch.round(values.clamp(0, 1) * 255) / 255).numpy()
