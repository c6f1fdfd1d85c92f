"""Another package of the name ``flowrl``, whose files would be mixed with ours."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

DISTRIBUTION = "flowrl-diffusion"
COMMAND = "flowrl.__main__:command"
EARLIER = {COMMAND, "flowrl.cli.main:command"}


def other_package() -> str | None:
    """Say what to do about an installed distribution ``flowrl`` that is not this project; None if
    there is none.

    It has the same import name: one of the two overwrites files of the other, or hides it. An
    installation of this project from before its distribution was called ``flowrl-diffusion`` is
    known by its command.
    """
    try:
        other = importlib.metadata.distribution("flowrl")
    except importlib.metadata.PackageNotFoundError:
        return None
    commands = {e.value for e in other.entry_points if e.group == "console_scripts"}
    if commands & EARLIER:
        return None
    where = Path(str(other.locate_file("flowrl")))
    return (
        f"another package called flowrl ({other.version}) is installed in {where}. It has the same "
        f"import name, and files of the two get mixed: run `pip uninstall flowrl`, then `pip "
        "install --force-reinstall --no-deps -e .` in a checkout of this project"
    )
