"""``python -m flowrl``, the same as the command ``flowrl``."""

from __future__ import annotations

import sys

from flowrl.cli.main import command

if __name__ == "__main__":
    sys.exit(command())
