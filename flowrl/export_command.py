"""``flowrl export``: its arguments, and what it prints."""

from __future__ import annotations

import argparse
from pathlib import Path

FORMATS = ("lora", "peft", "kohya", "merged")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.description = "Write what a run trained as files for other programs, with a model card."
    parser.add_argument("run", type=Path, help="a run, or a checkpoint of one")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="new or empty (default: <run>/export)")
    parser.add_argument(
        "--format", action="append", choices=FORMATS, help="repeatable (default: lora; without LoRA merged)"
    )
    parser.add_argument(
        "--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="auto rounds nothing"
    )
    parser.add_argument("--weights", choices=["ema", "current"], help="default: the run's eval.weights")
    parser.add_argument("--iteration", type=int, help="the checkpoint to take (default: the newest)")
    parser.add_argument("--base-model", default="", metavar="ID", help="hub id of a base model that was in a folder")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override of the config")


def run(args: argparse.Namespace) -> int:
    """Export, and name the files -> exit code 0."""
    from flowrl.export import export, run_of

    out: Path = args.out or run_of(args.run) / "export"
    files = export(
        args.run,
        out,
        formats=args.format or (),
        weights=args.weights,
        iteration=args.iteration,
        dtype=args.dtype,
        base_model=args.base_model,
        overrides=args.set,
        plugins=args.plugin,
    )
    print("\n".join(f"{out / name}" for name in files))
    return 0
