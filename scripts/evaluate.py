"""Score held-out prompts: the same as `flowrl eval`."""

from __future__ import annotations

import sys

from flowrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
