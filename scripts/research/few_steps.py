"""What few sampling steps cost the shapes model: how far its latents spread, and how many images
are right, beside true scenes.

    python scripts/research/few_steps.py

Each number of steps draws the same images of the validation prompts, from the same noise, without
guidance, as the evaluation does. True scenes of the same prompts are rendered and encoded: their
spread is what a perfect sampler of a perfect model would have. Writes assets/results/few-steps.json
in about seven minutes of one core.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.config.load import load_config
from flowrl.core.files import write_json
from flowrl.core.installation import environment
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import load_prompts
from flowrl.core.seeds import generator
from flowrl.evaluation.suites.shapes.checker import check
from flowrl.evaluation.suites.shapes.prompts import scenes_for
from flowrl.evaluation.suites.shapes.scene import render

PROMPTS = Path("assets/shapes/validation.jsonl")
STEPS = (5, 6, 10, 20, 40)
SIZE, BATCH = 64, 66


@torch.no_grad()
def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=8, help="of each prompt")
    parser.add_argument("--seed", type=int, default=270051)
    parser.add_argument("--out", type=Path, default=Path("assets/results/few-steps.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts = load_prompts(str(PROMPTS))
    model: Any = load_config("shapes/awm").call("model")()
    # true scenes first
    records = [record for record in prompts.records for _ in range(args.images)]
    true = model.latents(render(scenes_for(records, np.random.default_rng(args.seed))))
    rows = [{"steps": "true scenes", **measured(model, true, records)}]
    print(rows[-1], flush=True)
    for steps in STEPS:
        cond = model.encode(prompts.texts)
        x0 = sample_ode(
            model,
            cond,
            sigmas=model.sigmas(steps, SIZE, SIZE),
            shape=model.latent_shape(SIZE, SIZE),
            group_size=args.images,
            generators=[generator(args.seed, "steps", place) for place in range(len(prompts))],
            micro_batch=BATCH,
        )
        rows.append({"steps": steps, **measured(model, x0, records)})
        print(rows[-1], flush=True)
    result = {
        "kind": "flowrl few steps",
        "command": shlex.join(["python", *sys.argv]),
        "prompts": str(PROMPTS),
        "images": len(records),
        "rows": rows,
        "environment": environment(),
    }
    write_json(args.out, result)


def measured(model: Any, x0: Tensor, records: list[dict[str, Any]]) -> dict[str, float]:
    """Return the std of latents [N, C, h, w] over all their numbers, and the share of right
    images."""
    right: Tensor = check(round_8bit(model.decode(x0)), records).strict
    return {
        "std": round(x0.float().std().item(), 4),
        "right": round(right.float().mean().item(), 4),
    }


if __name__ == "__main__":
    main()
