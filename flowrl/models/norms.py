"""Root mean square norms of diffusers in one pass on CUDA."""

from __future__ import annotations

from typing import Any

from diffusers.models.normalization import RMSNorm
from torch import Tensor
from torch.nn.functional import rms_norm


class OnePassRMSNorm(RMSNorm):  # type: ignore[misc]
    """x [..., D] -> x / sqrt(mean(x^2) + eps) * weight, in the dtype of x.

    **Differs:** diffusers widens, squares, averages, scales, narrows and weighs in passes of their
    own over x, and rounds to a short dtype twice; PyTorch's kernel reads x once, computes in
    float32 and rounds once.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalise the last dimension; diffusers' own way where the weight has another dtype than
        x, whose result has that of the weight or is wider."""
        weight: Tensor = self.weight
        if weight.dtype != hidden_states.dtype:
            found: Tensor = super().forward(hidden_states)
            return found
        return rms_norm(hidden_states, weight.shape, weight, self.eps)


def fuse_norms(network: Any) -> None:
    """Let the RMS norms of a diffusers network take one pass; those of `torch.nn` do so already."""
    for module in network.modules():
        if type(module) is RMSNorm and module.weight is not None and module.bias is None:
            module.__class__ = OnePassRMSNorm
