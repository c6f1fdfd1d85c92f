"""Train a config: the same as `flowrl train`."""

from __future__ import annotations

import sys

from flowrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
