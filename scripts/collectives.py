"""Try the collectives that several processes of a run use, in a group of this process alone: is
NCCL there, does it add up, how long does it take?

    python scripts/collectives.py                    # NCCL on a CUDA device, else gloo on the CPU

A group of one sends nothing to another card: what it shows is that the back end works with this
PyTorch, driver and device. Two processes on one device are refused by NCCL.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from flowrl.core.environment import environment
from flowrl.core.files import write_json
from flowrl.core.processes import BUCKET


def tried(back_end: str, device: str) -> dict[str, Any]:
    """Sum a bucket of gradients and gather objects in a group of one -> seconds, and what was
    seen."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(back_end, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            return _collectives(device)
        finally:
            dist.destroy_process_group()


def _collectives(device: str) -> dict[str, Any]:
    # a bucket of gradients is summed; the first time sets the group up
    numbers = torch.arange(BUCKET, device=device, dtype=torch.float32)
    expected, seconds = numbers.clone(), []
    for _ in range(3):
        began = time.perf_counter()
        dist.all_reduce(numbers)
        same = bool(torch.equal(numbers, expected))  # waits for the device
        seconds.append(time.perf_counter() - began)
    # what processes tell each other
    found: list[Any] = [None]
    dist.all_gather_object(found, {"rank": 0, "text": "a red square"})
    right = same and found == [{"rank": 0, "text": "a red square"}]
    return {
        "back_end": dist.get_backend(),
        "device": device,
        "bytes": numbers.nbytes,
        "all_reduce_s": seconds,
        "right": right,
        "said": f"{dist.get_backend()} on {device}: {'right' if right else 'WRONG'}",
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
    result = tried("nccl" if on_gpu else "gloo", "cuda" if on_gpu else "cpu")
    if args.out:
        write_json(args.out, result)
    print(result["said"])
    return 0 if result["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
