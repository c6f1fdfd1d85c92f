"""Try the collectives that several processes of a run use, in a group of this process alone: is
NCCL there, does it add up, how long does it take?

    python scripts/bench/collectives.py     # NCCL on a CUDA device, else gloo on the CPU

A group of one sends nothing to another card: what it shows is that the back end works with this
PyTorch, driver and device. Two processes on one device are refused by NCCL.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.processes import BUCKET, tried_alone

TOLD = {"rank": 0, "text": "a red square"}  # what processes tell each other


def measured(back_end: str, device: str) -> dict[str, Any]:
    """Sum a bucket of gradients and gather an object in a group of one -> seconds, and what was
    seen. The first sum sets the group up."""
    numbers = torch.arange(BUCKET, device=device, dtype=torch.float32)
    expected = numbers.clone()
    seconds, found = tried_alone(back_end, numbers, TOLD)
    right = bool(torch.equal(numbers, expected)) and found == TOLD
    return {
        "back_end": back_end,
        "device": device,
        "bytes": numbers.nbytes,
        "all_reduce_s": seconds,
        "right": right,
        "said": f"{back_end} on {device}: {'right' if right else 'WRONG'}",
        "environment": environment(),
    }


def main() -> int:
    """Try, print and write -> exit code: 1 if a sum was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a file for the result, as JSON")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    result = measured("nccl" if on_gpu else "gloo", "cuda" if on_gpu else "cpu")
    if args.out:
        write_json(args.out, result)
    print(result["said"])
    return 0 if result["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
