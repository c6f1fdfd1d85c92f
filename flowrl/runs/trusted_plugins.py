"""Which plugins a user has allowed for a run: the first command names them with ``--plugin``, and
those after it need not, as long as the plugin's files are the same.

What is kept lies in the user's own folder and not in the run's, so that a run of somebody else
brings no trust along: a file for each run folder, with the hash of each plugin's content.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from pathlib import Path

from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.files import write_json


def trust(run: Path, plugins: Sequence[str]) -> None:
    """Keep the content of plugins that the user named for a run. Where it cannot be kept, they are
    named again the next time."""
    hashes = {name: _content(name) for name in plugins}
    known = _kept(run) | {name: text for name, text in hashes.items() if text}
    if known:
        with contextlib.suppress(OSError, FlowRLError):
            write_json(_file(run), {"run": f"{run.resolve()}", "plugins": known})


def trusted(run: Path, plugins: Sequence[str]) -> list[str]:
    """Return the plugins that are named now, which are trusted from now on, and those that were
    allowed for this run before. Raises ConfigError for one of these whose files have changed."""
    kept = _kept(run)
    for name in kept.keys() - set(plugins):
        if _content(name) != kept[name]:
            raise ConfigError(
                f"{run}: the plugin {name} is not what it was when it was allowed for this run; "
                f"look at what has changed, then allow it again: --plugin {name}"
            )
    if plugins and run.is_dir():
        trust(run, plugins)
    return [*plugins, *sorted(kept.keys() - set(plugins))]


def allowed_before(run: Path) -> list[str]:
    """Return the plugins that were allowed for a run before, whatever is in them now."""
    return sorted(_kept(run))


def _content(name: str) -> str:
    """Return the hash of a plugin's source files, by their names; "" where there are none."""
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        if spec is None:
            return ""
        files = [Path(spec.origin)] if spec.origin else []
        for folder in spec.submodule_search_locations or ():
            files += Path(folder).rglob("*.py")
        found = hashlib.sha256()
        for file in sorted(set(files)):
            found.update(f"{file.name} {file.stat().st_size}\n".encode() + file.read_bytes())
        return found.hexdigest() if files else ""
    return ""


def _file(run: Path) -> Path:
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    key = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:32]
    return Path(home) / "flowrl" / "plugins" / f"{key}.json"


def _kept(run: Path) -> dict[str, str]:
    """Read what was allowed for a run; a file that is damaged allows nothing."""
    try:
        found = json.loads(_file(run).read_text(encoding="utf-8"))["plugins"]
        return {f"{name}": f"{text}" for name, text in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError):
        return {}
