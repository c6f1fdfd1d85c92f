"""Root mean square norms of diffusers in one pass on CUDA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from diffusers.models.normalization import RMSNorm
from torch import Tensor

# PyTorch's own kernel; before, its RMS norm on CUDA is written out as well
KERNEL: bool = torch.__version__ >= "2.9"  # as versions, not as texts


class OnePassRMSNorm(RMSNorm):  # type: ignore[misc]
    """x [..., D] -> x / sqrt(mean(x^2) + eps) * weight, in the dtype of x.

    **Differs:** diffusers widens, squares, averages, scales, narrows and weighs in passes of their
    own over x, rounds to a short dtype twice and keeps float32 copies for the backward pass.
    PyTorch's kernel for CUDA, there from 2.9 on, reads x once, computes in float32, rounds once and
    keeps x and a float32 number for each of its rows.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension; diffusers' own way where the weight has another dtype than
        x, whose result has that of the weight or is wider, and under an autocast that would widen
        both."""
        x, weight = hidden_states, self.weight
        if weight.dtype != x.dtype or _widens(x):
            own: Tensor = super().forward(x)
            return own
        # heads [B, H, L, D] cut from rows [B, L, H D]: as they lie, for the kernel copies what is
        # not contiguous; the result lies as x does
        if x.ndim == 4 and not x.is_contiguous():
            return F.rms_norm(x.transpose(1, 2), weight.shape, weight, self.eps).transpose(1, 2)
        return F.rms_norm(x, weight.shape, weight, self.eps)


def one_pass(network: Any) -> None:
    """Let the RMS norms of a diffusers network take one pass; those of `torch.nn` do so already."""
    for module in network.modules():
        plain = type(module) is RMSNorm and module.bias is None
        if plain and module.weight is not None and module.weight.ndim == 1:
            module.__class__ = OnePassRMSNorm


def _widens(x: Tensor) -> bool:
    """Tell whether CUDA's autocast would compute the norm in float32 and leave the result in it."""
    return x.dtype != torch.float32 and torch.is_autocast_enabled("cuda")
