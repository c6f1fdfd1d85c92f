"""Train a base model for the shapes benchmark from scratch, a StableDiffusion3Pipeline.

Stage `vae`: AutoencoderKL by the evidence lower bound with a fixed decoder std.
Stage `scenes`: the training set, rendered and encoded once. Every scene has its true benchmark
prompt and seven true dense captions. Scenes come in twins that differ in word order only: places
swapped, or colours swapped.
Stage `text`: both CLIP encoders learn to say what stands where, from captions alone.
Stage `flow`: SD3 transformer and both CLIP encoders by rectified-flow matching. Twins share noise
and time, and a head on the middle of the transformer, dropped at the end, reads what stands where
off the noisy latents.

All are seeded, and write their losses beside the weights.

    for stage in vae scenes text flow; do
        python scripts/assets/shapes_base/main.py $stage --out FOLDER
    done
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from flow import train_flow
from scenes import make_scenes
from text import train_text
from vae import train_vae

TEXT = {"text_width": 64, "text_layers": 4}
STAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "vae": (
        train_vae,
        # decoder_std: pixel noise of the bound, in [0, 1]
        {"steps": 3000, "batch": 32, "lr": 1e-3, "clip": 0.05, "decoder_std": 0.02},
    ),
    "scenes": (make_scenes, {"pairs": 80000}),
    # prompts: their share among captions
    "text": (train_text, {"steps": 800, "batch": 128, "lr": 2e-3, **TEXT, "prompts": 0.3}),
    "flow": (
        train_flow,
        {"steps": 9000, "batch": 64, "lr": 2e-3, "ema": 0.999, **TEXT, "prompts": 0.5}
        | {"width": 128, "layers": 6, "patch": 1, "dropout": 0.1, "high": 0.3}
        | {"reading": 0.2, "tap": 3, "eval_every": 1500, "eval_images": 100, "eval_steps": 10},
    ),
}
"""Each stage with its settings. Of `flow`: a share `dropout` of captions is empty, a share `high`
of times is drawn evenly from 0.6 to 1; the layout is read after block `tap` with weight `reading`,
which goes to 0; it is judged every `eval_every` batches."""


def main() -> None:
    """Run one stage."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = made.add_subparsers(dest="stage", required=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, (_, settings) in STAGES.items():
        add = stages.add_parser(name).add_argument
        add("--out", type=Path, required=True, help="folder of the model")
        add("--seed", type=int, default=0)
        add("--threads", type=int, default=1, help="of the CPU; another number rounds differently")
        add("--device", type=torch.device, default=device)
        for key, value in settings.items():
            add(f"--{key.replace('_', '-')}", type=type(value), default=value)
    args = made.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    STAGES[args.stage][0](args)


if __name__ == "__main__":
    main()
