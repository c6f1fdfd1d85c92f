"""Draw pictures of prompts: the same as `flowrl sample`."""

from __future__ import annotations

import sys

from flowrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["sample", *sys.argv[1:]]))
