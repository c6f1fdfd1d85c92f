"""Find our own package ``rewards`` by its place, whatever else has that name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from flowrl.core.shipped_files import PACKAGE

NAME = "rewards"
ALIAS = "flowrl_rewards"  # ours, where the user has a module of our name
PLACE = PACKAGE.parent / NAME


def import_rewards(module: str = "") -> ModuleType:
    """Import a module of our package, given by its name below it: "remote.server"; "" is the
    package.

    A ``rewards.py`` or ``rewards/`` of the user's, in the working folder or imported already, stays
    theirs: ours then goes by another name. Raises what the module raises.
    """
    package = NAME if name_is_ours() else ALIAS
    if package == ALIAS and ALIAS not in sys.modules:
        _load_by_place()
    return importlib.import_module(f"{package}.{module}" if module else package)


def name_is_ours() -> bool:
    """Say whether ``import rewards`` gives our package."""
    loaded = sys.modules.get(NAME)
    if loaded is not None:
        return _is_at_our_place(getattr(loaded, "__file__", None))
    try:
        spec = importlib.util.find_spec(NAME)
    except (ImportError, ValueError):
        return False
    return spec is not None and _is_at_our_place(spec.origin)


def _is_at_our_place(file: str | None) -> bool:
    return file is not None and Path(file).resolve() == PLACE / "__init__.py"


def _load_by_place() -> None:
    places = [str(PLACE)]
    file = PLACE / "__init__.py"
    spec = importlib.util.spec_from_file_location(ALIAS, file, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot read {file}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[ALIAS] = package
    spec.loader.exec_module(package)
