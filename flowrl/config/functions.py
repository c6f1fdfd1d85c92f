"""What a module offers to a config: the functions that it defines itself."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import types
from collections.abc import Callable
from typing import Any

from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import NAME, import_rewards, name_is_ours

Functions = dict[str, Callable[..., Any]]


def modules_in(package: str, where: str) -> list[str]:
    """Return the names of a package's public modules. Raises ConfigError."""
    paths = getattr(_import(package, where), "__path__", [])
    return [info.name for info in pkgutil.iter_modules(paths) if not info.name.startswith("_")]


def functions_of(module: str, where: str, plugin: str = "") -> Functions:
    """Return what a module, or the `plugin` that it belongs to, itself defines: through its imports
    it would offer half of Python to a config. Raises ConfigError."""
    found = _import(module, where, theirs=bool(plugin))
    package, out = plugin or found.__name__, Functions()
    for name, thing in vars(found).items():
        home = f"{getattr(thing, '__module__', '')}."
        if callable(thing) and not name.startswith("_") and home.startswith(f"{package}."):
            out[name] = thing
    return out


def taken_name(package: str) -> str:
    """Say that a package of this name is flowrl's, where a user's file was meant; "" for others."""
    if package != NAME or not name_is_ours():
        return ""
    return f"; {NAME!r} is flowrl's own package: give a file of yours another name"


def named_file(fn: str) -> str:
    """Say how to name what is in a file, where the file was named instead."""
    try:
        file = importlib.util.find_spec(fn)
    except (ImportError, ValueError):
        return ""
    hint = f"; {fn} is a file: name what is in it, such as {fn}.{fn.rpartition('.')[2]}"
    return hint if file else ""


def of_your_own(fn: str) -> str:
    """Say how a config names a function of a user's file."""
    if fn.endswith(".py"):
        file = re.split(r"[\\/]", fn.removesuffix(".py"))[-1]
        return f"such as fn: {file}.bright, and allow the file: --plugin {file.partition('.')[0]}"
    return f"fn: my_file.{fn} with --plugin my_file"


def _import(module: str, where: str, *, theirs: bool = False) -> types.ModuleType:
    """Import a module; ``rewards`` is our own package, unless the user meant `theirs`."""
    top, _, rest = module.partition(".")
    ours = top == "rewards" and not theirs
    try:
        return import_rewards(rest) if ours else importlib.import_module(module)
    except Exception as error:  # a plugin may fail in any way while it is imported
        problem = f"cannot import {module}: {type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {problem}") from error
