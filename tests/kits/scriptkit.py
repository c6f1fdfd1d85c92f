"""Import a command of scripts/, which is no package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script_module(name: str) -> ModuleType:
    """Import scripts/<name>.py, or scripts/research/<name>.py, under a name of its own."""
    found = [folder / f"{name}.py" for folder in (SCRIPTS, SCRIPTS / "research")]
    file = next(file for file in found if file.exists())
    spec = importlib.util.spec_from_file_location(f"script_{name}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # scripts import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def module_of(folder: str, name: str) -> ModuleType:
    """Import <name>.py of scripts/research/<folder>, whose files import each other."""
    path = str(SCRIPTS / "research" / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)
