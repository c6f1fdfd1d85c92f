"""Train a base model for the shapes benchmark from scratch, a StableDiffusion3Pipeline.

Stage `vae`: AutoencoderKL by the evidence lower bound with a fixed decoder std.
Stage `scenes`: the training set, rendered and encoded once. Every scene has its true benchmark
prompt and seven true dense captions. Scenes come in twins that differ in word order only: places
swapped, or colours swapped.
Stage `text`: both CLIP encoders learn to say what stands where, from captions alone.
Stage `flow`: SD3 transformer and both CLIP encoders by rectified-flow matching. Twins share noise
and time, and a head on the middle of the transformer, dropped at the end, reads what stands where
off the noisy latents.

All are seeded. `vae`, `text` and `flow` go on where they stopped (same command again), and write
their curves beside the weights.

    for stage in vae scenes text flow; do
        python scripts/assets/shapes_base/main.py $stage --out FOLDER
    done
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import KINDS
from flow import train_flow
from scenes import make_scenes
from text import train_text
from vae import train_vae

SHARES = [0.05, 0.09, 0.16, 0.08, 0.25, 0.27, 0.10]
STAGES = {"vae": train_vae, "scenes": make_scenes, "text": train_text, "flow": train_flow}


def main() -> None:
    """Run one stage."""
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    STAGES[args.stage](args)


def parser() -> argparse.ArgumentParser:
    """Describe the stages and their settings."""
    # a stage each, and what all have
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = made.add_subparsers(dest="stage", required=True)
    defaults = argparse.ArgumentDefaultsHelpFormatter
    parts = {name: stages.add_parser(name, formatter_class=defaults) for name in STAGES}
    for part in parts.values():
        _common(part)
    # what is their own
    _training(parts["vae"], steps=3000, batch=32, lr=1e-3)
    _vae(parts["vae"])
    parts["scenes"].add_argument("--pairs", type=int, default=80000, help="twins to render")
    _training(parts["text"], steps=800, batch=128, lr=2e-3)
    _training(parts["flow"], steps=9000, batch=64, lr=2e-3)
    _flow(parts["flow"])
    # what some share
    for name in ("scenes", "text", "flow"):
        shares = f"of {', '.join(KINDS)}"
        parts[name].add_argument(
            "--shares", type=float, nargs=len(KINDS), default=SHARES, help=shares
        )
    for name, prompts in (("text", 0.3), ("flow", 0.5)):
        add = parts[name].add_argument
        add("--text-width", type=int, default=64)
        add("--text-layers", type=int, default=4)
        add("--prompts", type=float, default=prompts, help="share of prompts among captions")
    return made


def _common(part: argparse.ArgumentParser) -> None:
    add = part.add_argument
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--out", type=Path, required=True, help="folder of the model")
    add("--seed", type=int, default=0)
    add("--threads", type=int, default=1, help="of the CPU; another number rounds differently")
    add("--device", type=torch.device, default=device)


def _training(part: argparse.ArgumentParser, steps: int, batch: int, lr: float) -> None:
    part.add_argument("--steps", type=int, default=steps)
    part.add_argument("--batch", type=int, default=batch)
    part.add_argument("--lr", type=float, default=lr)


def _vae(part: argparse.ArgumentParser) -> None:
    add = part.add_argument
    add("--clip", type=float, default=0.05, help="gradient norm")
    add("--decoder-std", type=float, default=0.02, help="pixel noise of the bound, in [0, 1]")


def _flow(part: argparse.ArgumentParser) -> None:
    add = part.add_argument
    # the network
    add("--width", type=int, default=128)
    add("--layers", type=int, default=6)
    add("--patch", type=int, default=1, choices=[1])
    # its training
    add("--reading", type=float, default=0.2, help="weight of the layout's loss; goes to 0")
    add("--tap", type=int, default=3, help="block after which the layout is read")
    add("--high", type=float, default=0.3, help="share of times drawn evenly from 0.6 to 1")
    add("--weight-decay", type=float, default=0.01)
    add("--dropout", type=float, default=0.1, help="share of empty captions")
    add("--ema", type=float, default=0.999)
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    # what is written when
    add("--save-every", type=int, default=100)
    add("--eval-every", type=int, default=1500)
    add("--eval-images", type=int, default=100, help="per task")
    add("--eval-steps", type=int, default=10)
    add("--eval-guidance", type=float, nargs="*", default=[1.0, 2.5])


if __name__ == "__main__":
    main()
