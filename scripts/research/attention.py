"""What attention costs on this CPU, by torch's fused kernel and in groups, in processor seconds.

    python scripts/research/attention.py    # writes assets/results/attention.json

The sizes are those of a training micro-batch of shapes/awm: 64 samples, 4 heads, 142 tokens.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from flowrl.core.files import write_json
from flowrl.models.runtime import attend_in_groups

SIZES = (64, 4, 142, 32)
WAYS = {"fused": scaled_dot_product_attention, "in groups": attend_in_groups}


def main() -> None:
    """Measure both ways in both kinds of numbers, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("assets/results/attention.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for way in WAYS:
            forward, both = seconds(way, dtype, args.repeats)
            row = {"dtype": str(dtype).removeprefix("torch."), "attention": way}
            found.append({**row, "forward": forward, "forward_and_backward": both})
            print(found[-1])
    command = "python scripts/research/attention.py"
    write_json(args.out, {"command": command, "sizes": SIZES, "processor_seconds": found})


def seconds(way: str, dtype: torch.dtype, repeats: int) -> tuple[float, float]:
    """Return the processor seconds of a forward pass, and of one with its backward pass."""
    attend = WAYS[way]
    q, k, v = (torch.randn(SIZES, dtype=dtype, requires_grad=True) for _ in range(3))
    weights = torch.randn_like(q)
    attend(q, k, v).backward(weights)  # what is done once
    began = time.process_time()
    with torch.no_grad():
        for _ in range(repeats):
            attend(q, k, v)
    middle = time.process_time()
    for _ in range(repeats):
        attend(q, k, v).backward(weights)
    return (middle - began) / repeats, (time.process_time() - middle) / repeats


if __name__ == "__main__":
    main()
