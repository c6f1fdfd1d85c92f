"""Import a command of scripts/, which is no package."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script_module(name: str) -> ModuleType:
    """Import "assets/shapes_pairs", a file below scripts/, under a name of its own."""
    file = SCRIPTS / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent))  # scripts of a folder import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def module_of(folder: str, name: str) -> ModuleType:
    """Import <name>.py of a folder below scripts/, whose files import each other, once."""
    path = str(SCRIPTS / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)
