"""Read functions out of published code at a fixed commit, without installing it.

A repository is cloned by git, bare, under `--clones`; a clone that is there is used. Of a file only
the functions and classes that are named are run, in a namespace of their own, with torch, numpy and
math in it: nothing of ours, and nothing else of theirs.
"""

from __future__ import annotations
import __future__

import ast
import math
import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import DDIMScheduler
from diffusers.utils.torch_utils import randn_tensor


class Source(NamedTuple):
    """Functions of one published file."""

    repository: str  # owner/name on github.com
    commit: str  # 40 digits
    path: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.repository} {self.commit[:7]} {self.path}"


def load(source: Source, clones: Path) -> dict[str, Any]:
    """Run the named functions and classes of a file -> them by name.

    Raises LookupError for one that is not there, and what git raises.
    """
    tree = ast.parse(_text(source, clones))
    kinds = (ast.FunctionDef, ast.ClassDef)
    body = [node for node in tree.body if isinstance(node, kinds) and node.name in source.names]
    missing = set(source.names) - {node.name for node in body}
    if missing:
        raise LookupError(f"{source}: has no {', '.join(sorted(missing))}")
    # their annotations name what is not here, so they stay texts
    module = ast.Module(list(body), [])
    code = compile(
        module, str(source), "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True
    )
    space: dict[str, Any] = {"torch": torch, "np": np, "math": math, "dataclass": dataclass}
    # stands for torch.distributed with one process
    alone = SimpleNamespace(
        is_initialized=lambda: False,
        all_reduce=lambda _x, op: None,
        ReduceOp=SimpleNamespace(SUM=0),
    )
    space |= {"deque": deque, "randn_tensor": randn_tensor, "dist": alone}
    space |= {"DDIMScheduler": DDIMScheduler}  # an assertion names it
    space |= {"tqdm": lambda steps, **_: steps, "main_print": lambda *_: None}
    exec(code, space)
    return {name: space[name] for name in source.names}


def _text(source: Source, clones: Path) -> str:
    """Read a file at its commit, from a clone that is made where it is not there."""
    folder = clones / source.repository.replace("/", "+")
    place = folder / "repo" if (folder / "repo").is_dir() else folder
    if not place.is_dir():
        address = f"https://github.com/{source.repository}"
        subprocess.run(["git", "clone", "--quiet", "--bare", address, str(place)], check=True)
    shown = ["git", f"--git-dir={place}", "show", f"{source.commit}:{source.path}"]
    return subprocess.run(shown, check=True, capture_output=True, text=True).stdout
