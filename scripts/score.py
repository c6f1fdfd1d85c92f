"""Score pictures with rewards, or test the rewards: the same as `flowrl score`."""

from __future__ import annotations

import sys

from flowrl.cli import main

if __name__ == "__main__":
    sys.exit(main(["score", *sys.argv[1:]]))
