"""The command ``flowrl estimate``: its arguments, and what it prints. Imports torch only to run."""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.config import load_config
from flowrl.errors import ConfigError

ABOUT = """Work out what a config takes before anything is loaded: parameters, memory by part and by phase, network
calls and floating-point work of an iteration, and whether it fits a card. No weight is read, and no GPU is needed."""
CARD = 24.0  # GB, where this machine has no GPU


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the arguments."""
    parser.add_argument("config", help="a YAML file or the name of a shipped config")
    parser.add_argument("overrides", nargs="*", help="key.subkey=value")
    parser.add_argument("--card", type=float, metavar="GB", help=f"memory to fit (default: this GPU's, else {CARD:g})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")


def run(args: argparse.Namespace) -> int:
    """Estimate and print -> 0."""
    from flowrl.advice import card_size
    from flowrl.estimate import estimate
    from flowrl.estimate_report import as_json, text
    from flowrl.loop import write_json

    gigabytes = args.card if args.card is not None else card_size() or CARD
    if not gigabytes > 0:
        raise ConfigError(f"--card: expected more than 0 GB, got {gigabytes:g}")
    found = estimate(load_config(args.config, args.overrides, args.plugin))
    print(text(found, gigabytes=gigabytes))
    if args.json:
        write_json(args.json, as_json(found))
        print(f"figures: {args.json}")
    return 0
