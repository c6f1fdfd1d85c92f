"""How the squared error of a velocity makes a log-prob."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Weight = Literal["one", "sigma", "sigma2", "huber", "ghuber"]


def weighted(error: Tensor, sigma: Tensor, weight: Weight, power: float = 0.25) -> Tensor:
    """Return ``w(error, sigma)`` [B] of squared errors [B] as `forward` says; float64 wanted: in
    float32 ``error^power`` near 0 loses the difference of two policies."""
    tiny = 1e-10
    if weight == "huber":
        return sigma * ((error + tiny).sqrt() - tiny**0.5)
    if weight == "ghuber":
        return sigma / power * ((error + tiny) ** power - tiny**power)
    exponent = {"one": 0, "sigma": 1, "sigma2": 2}[weight]
    return sigma**exponent * error
