"""Hold the files of rewards packages to their contract: ``python contractkit.py PACKAGE FOLDER
[PACKAGE FOLDER ...]``, answers in JSON.

A process of its own, since what an import brings along can only be seen where nothing was imported
before. Each file is looked at in a fork of it, so that one file's imports do not hide another's.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy  # noqa: F401 - what every reward may import comes first, so that the rest stands out
import torch  # noqa: F401

from flowrl.config.calls import Call
from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch

LIGHT = {"numpy", "PIL", "torch", "flowrl", "rewards"}
# what is loaded before: the checker of the embedded benchmark needs scipy, files know safetensors
CHECKER = "flowrl.evaluation.suites.shapes.checker"
EXTRA = dict.fromkeys(("shapes", "shapes_edit", "soft_shapes"), CHECKER)
JUDGES = ("vlm", "questions", "votes", "consistency", "edit_verifier", "rubric")
EXTRA |= dict.fromkeys(JUDGES, "flowrl.core.files")
ARGUMENTS = {
    "__call__": ("batch",),
    "check_record": ("record", "where"),
    "check_records": ("records", "places"),
    "probe": (),
    "update": ("batch",),
    "state_dict": (),
    "load_state_dict": ("state",),
    "trains_policy": ("iteration",),
    "compare": ("first", "second", "prompts", "meta"),
}
LEARNED = ("update", "state_dict", "load_state_dict", "trains_policy")
DEFAULTS: dict[str, Any] = {"device": "auto", "dtype": "float32"}
# an arXiv number, authors with a year, a public repository or a commit of one, or flowrl's own
# protocol
SOURCE = re.compile(
    r"\b\d{4}\.\d{4,5}\b|et al\. \(?\d{4}|\b[A-Za-z][\w-]+/[A-Za-z][\w.-]+\b"
    r"| at [0-9a-f]{7}\b|`flowrl [a-z-]+`"
)


def wrongs(package: str, name: str) -> Iterator[str]:
    """Yield what is wrong with the file `name` of a package."""
    if name in EXTRA:
        importlib.import_module(EXTRA[name])
    before = {module.partition(".")[0] for module in sys.modules}
    try:
        module = importlib.import_module(f"{package}.{name}")
    except Exception as error:
        yield f"cannot be imported: {type(error).__name__}: {error}"
        return
    after = {module.partition(".")[0] for module in sys.modules}
    allowed = {*before, *LIGHT, *sys.stdlib_module_names, package}
    heavy = sorted(top for top in after - allowed if not top.startswith("_"))
    if heavy:
        yield f"importing it imports {', '.join(heavy)}: move that into the method that needs it"
    cls = vars(module).get(name)
    if not inspect.isclass(cls) or not f"{cls.__module__}.".startswith(f"{module.__name__}."):
        yield f"has no class {name} of its own"
        return
    yield from _documented(sys.modules[cls.__module__], cls)
    yield from _callable(cls)
    yield from _settable(package, name, cls)


def _documented(module: types.ModuleType, cls: type) -> Iterator[str]:
    own, whole = cls.__doc__ or "", f"{module.__doc__ or ''}\n{cls.__doc__ or ''}"
    if not (module.__doc__ or "").strip():
        yield "has no module docstring"
    if not re.search(r"\[[^\]]+\]", own):
        yield "the class docstring names neither shapes nor a range, such as [L] or [0, 1]"
    if not SOURCE.search(whole):
        yield "no docstring names a source: an arXiv number, authors and year, or owner/repository"
    for name, method in vars(cls).items():
        public = name == "__call__" or not name.startswith("_")
        if public and inspect.isfunction(method) and not (method.__doc__ or "").strip():
            yield f"{name} has no docstring"


def _callable(cls: type) -> Iterator[str]:
    methods = {name: method for name, method in vars(cls).items() if inspect.isfunction(method)}
    if "__call__" not in methods:
        yield "has no __call__(self, batch)"
    else:
        hints = typing.get_type_hints(methods["__call__"])
        if (hints.get("batch"), hints.get("return")) != (RewardBatch, torch.Tensor):
            yield "__call__ is not annotated as (self, batch: RewardBatch) -> Tensor"
    for name, expected in ARGUMENTS.items():
        if (
            name in methods
            and (got := tuple(inspect.signature(methods[name]).parameters)[1:]) != expected
        ):
            yield f"{name} takes ({', '.join(got)}), the loop calls it with ({', '.join(expected)})"
    if set(LEARNED) & set(methods) and not set(LEARNED) <= set(methods):
        yield f"a reward that is trained along needs all of {', '.join(LEARNED)}"


def _settable(package: str, name: str, cls: type) -> Iterator[str]:
    parameters = inspect.signature(cls).parameters
    other = [
        str(p).partition(":")[0]
        for p in parameters.values()
        if p.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    if other:
        yield f"arguments that are not keyword-only: {', '.join(other)}"
        return
    try:
        hints = typing.get_type_hints(cls.__init__) if "__init__" in vars(cls) else {}  # type: ignore[misc]
    except Exception as error:
        yield f"annotations of __init__ cannot be evaluated: {error}"
        return
    bad = [key for key in parameters if key not in hints or not _yaml(hints[key])]
    for key in bad:
        hint = hints.get(key, "none is given")
        yield f"a config cannot hold the type of the argument {key}: {hint}"
    for key, default in DEFAULTS.items():
        if key in parameters and parameters[key].default != default:
            got = parameters[key].default
            yield f"the default of {key} is {got!r}, not {default!r} as everywhere"
    if not bad:
        given = {
            k: _sample(hints[k])
            for k, p in parameters.items()
            if p.default is inspect.Parameter.empty
        }
        yield from _bound({"fn": f"{package}.{name}.{name}", **given}, package, set(parameters))


def _bound(raw: dict[str, Any], package: str, parameters: set[str]) -> Iterator[str]:
    try:
        call = Call.bind("rewards.it", raw, plugins=[package])
        again = Call.bind("rewards.it", call.to_dict(), plugins=[package])
    except ConfigError as error:
        yield f"a config cannot name it: {error}"
        return
    if set(call.kwargs) != parameters:
        left = sorted(parameters - set(call.kwargs))
        yield f"a config does not reach the arguments {', '.join(left)}"
    if again != call:
        yield "what a config says of it does not load again to the same"


def _yaml(hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return all(_yaml(arg) for arg in args)
    if origin is Literal:
        return True
    if origin is list:
        return all(_yaml(arg) for arg in args)
    if origin is dict:
        return args[0] is str and (args[1] is Any or _yaml(args[1]))
    return hint in (int, float, str, bool, type(None))


def _sample(hint: Any) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _sample(args[0])
    if origin is Literal:
        return args[0]
    return {int: 1, float: 1.0, str: "x", bool: True, list: [], dict: {}}.get(origin or hint)


def main(*pairs: str) -> int:
    """Print a JSON list with one object per package: {file or folder: what is wrong with it}."""
    found = [inspect_package(*pair) for pair in zip(pairs[::2], pairs[1::2], strict=True)]
    print(json.dumps(found))
    return 0


def inspect_package(package: str, folder: str) -> dict[str, list[str]]:
    """Look at each file or folder of a package in a fork of its own."""
    sys.path.insert(0, folder)
    found: dict[str, list[str]] = {}
    names = [module.name for module in pkgutil.iter_modules([str(Path(folder) / package)])]
    for name in sorted(name for name in names if not name.startswith("_")):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            answer = json.dumps(list(wrongs(package, name))).encode()
            with os.fdopen(write, "wb") as pipe:
                pipe.write(answer)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        found[name] = json.loads(text) if text else ["the process ended while it was imported"]
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
