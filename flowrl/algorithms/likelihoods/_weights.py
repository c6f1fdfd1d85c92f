"""How the squared error of a velocity makes a log-prob."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Weight = Literal["one", "sigma", "sigma2", "huber", "ghuber", "snr", "size", "epsilon"]


def weighted(error: Tensor, sigma: Tensor, weight: Weight, power: float = 0.25) -> Tensor:
    """Return ``w(error, sigma)`` [B] of squared errors [B] as `forward` says, but for "size", which
    needs more: it raises ValueError. float64 wanted: in float32 ``error^power`` near 0 loses the
    difference of two policies."""
    tiny = 1e-10
    if weight == "snr":
        return (1 - sigma) / (sigma + 1e-3) * error
    if weight == "epsilon":
        return (1 - sigma) ** 2 * error
    if weight == "huber":
        return sigma * ((error + tiny).sqrt() - tiny**0.5)
    if weight == "ghuber":
        return sigma / power * ((error + tiny) ** power - tiny**power)
    if weight == "size":
        raise ValueError("weight size is made of the velocity itself: see by_size")
    exponent = {"one": 0, "sigma": 1, "sigma2": 2}[weight]
    return sigma**exponent * error


def by_size(gap: Tensor, sigma: Tensor) -> Tensor:
    """Return the squared error of the x0 estimate over its mean size, ``sigma mean(gap^2) / mean
    |gap|`` [B], of velocity errors gap [B, *]; the size is at least 1e-5 and has no gradient."""
    miss = gap.flatten(1) * sigma[:, None]
    size = miss.detach().abs().mean(1).clamp_min(1e-5)
    return miss.square().mean(1) / size
