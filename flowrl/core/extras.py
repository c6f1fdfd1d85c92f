"""How to install what only some people need, in words."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that installs an extra; nothing is released, so it is for a checkout."""
    return f'pip install -e ".[{extra}]" in a checkout of flowrl'
