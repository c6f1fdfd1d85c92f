"""Draw the checkpoints of a run side by side: the same as `flowrl grid`."""

from __future__ import annotations

import sys

from flowrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["grid", *sys.argv[1:]]))
