"""``python -m flowrl``, and the command ``flowrl``."""

from __future__ import annotations

import sys

from flowrl.cli.start_up import end_quietly_on_interrupt, end_silently_on_interrupt


def command() -> int:
    """Run the command of this process -> exit code."""
    end_quietly_on_interrupt()
    from flowrl.cli.main import command as run

    code = run()
    end_silently_on_interrupt(code)
    return code


if __name__ == "__main__":
    sys.exit(command())
