"""The share of a device's peak that a model's own floating-point work makes up: MFU.

After PaLM (2204.02311, appendix B): what gradient checkpointing computes again does not count,
though it takes time.
"""

from __future__ import annotations

import re
from typing import Any

import torch

# Dense matrix products in bfloat16 with sums in float32, TFLOP/s, without sparsity: NVIDIA's data
# sheets (H100, H200, A100, L40S, L4, A10) and white papers (Ada and Ampere GA102: GeForce, RTX
# A6000). By torch's name of the device.
PEAKS = {
    r"NVIDIA H100 80GB HBM3": 989.4,
    r"NVIDIA H100 PCIe": 756.0,
    r"NVIDIA H200": 989.4,
    r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe": 312.0,
    r"NVIDIA L40S": 362.05,
    r"NVIDIA L4": 121.0,
    r"NVIDIA A10": 125.0,
    r"NVIDIA RTX A6000": 154.8,
    r"NVIDIA GeForce RTX 4090": 165.2,
    r"NVIDIA GeForce RTX 3090": 71.0,
}


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s by torch's name of it; None if it is not
    in the table."""
    found = [peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, name)]
    return found[0] * 1e12 if found else None


def utilisation(
    flops: dict[str, int], seconds: dict[str, float], device: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Return the share of a device's peak that each phase's work is, or why none can be given."""
    peak = peak_flops(device)
    if peak is None or dtype.itemsize != 2:
        why = (
            f"no peak of {device} is in the table"
            if peak is None
            else f"the peak is of 16-bit products, not {dtype}"
        )
        return {"peak_flops": "unknown", "mfu": None, "why_no_mfu": why}
    return {
        "peak_flops": peak,
        "mfu": {phase: work / seconds[phase] / peak for phase, work in flops.items()},
    }
