"""The axes of a method: which package holds the functions that a call section can name, and what a
module offers to a config.

============  ====================================================  =========================
call section  where a bare `fn` is looked up                        mixing weight in the YAML
============  ====================================================  =========================
model         flowrl/models/<fn>.py, the function <fn>; left out, or auto: by the path
plan          any file of flowrl/algorithms/plans that has plans
transition    flowrl/algorithms/transitions.py
rewards.NAME  rewards/<fn>.py, the function or class <fn>           weight (default 1.0)
aggregate     any file of flowrl/algorithms/reward_mix but transforms; the section is optional
credit        any other file of flowrl/algorithms/credit
segment       flowrl/algorithms/selection/segments.py; the section is optional
select        any file of flowrl/algorithms/selection but segments; a call or a list, optional
likelihood    any file of flowrl/algorithms/likelihoods
loss          any file of flowrl/algorithms/losses
kl            flowrl/algorithms/penalties.py; the section is optional          beta (required)
old, slow     flowrl/algorithms/ema_decays.py; the sections are optional
fake          flowrl/algorithms/companions/fake.py; the section is optional
surrogate     flowrl/algorithms/companions/surrogate.py; the section is optional
sampler       flowrl/techniques/prompt_samplers.py; the section is optional
optimizer     flowrl/training/optimizer.py; `fn` may be left out: adamw
parts.NAME    a class of your own on `flowrl.Part`, in a file or package given as --plugin
============  ====================================================  =========================

A reward may also have a `transform`, a call or a list of calls of
flowrl/algorithms/reward_mix/transforms.py, made on its values in that order.

Functions that no shipped config names stand in flowrl/techniques; a config finds them by the same
bare `fn`, in the files that `AXES` gives as an axis' `techniques`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import re
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import NAME, import_rewards, name_is_ours


class Axis(NamedTuple):
    """Where the functions of a call section live, and how they are called."""

    package: str
    # <package>.<fn>.<fn> | <package>.<fn> | <any module of the package>.<fn>
    # | nowhere: only dotted names of plugins
    lookup: Literal["file", "module", "package", "plugin"]
    positional: int | None = None  # run-time arguments; None = differs from function to function
    last: str = ""  # name of the last of them, where helpers in the same file take as many
    mix: str = ""  # key of the mixing weight
    mix_default: float | None = None  # None = must be given
    default: str = ""  # the function where `fn` is left out
    # a function, as module:name, that says it of the call's arguments, also for `fn: auto`
    chosen_by: str = ""
    # files of the package that hold the functions of another axis; `fn` is not looked up in them
    files_of_other_axes: tuple[str, ...] = ()
    techniques: tuple[str, ...] = ()  # further modules in which `fn` is looked up

    def holds(self, path: str) -> bool:
        """Say whether a dotted path leads into the axis' own package or modules."""
        homes = (self.package, *self.techniques)
        return path.startswith(tuple(f"{home}." for home in homes))


AXES = {
    "model": Axis("flowrl.models", "file", chosen_by="flowrl.models.pipeline:fn_for"),
    "plan": Axis("flowrl.algorithms.plans", "package", positional=1),
    "transition": Axis("flowrl.algorithms.transitions", "module", positional=5, last="noise_scale"),
    "rewards": Axis("rewards", "file", mix="weight", mix_default=1.0),
    "transform": Axis(
        "flowrl.algorithms.reward_mix.transforms",
        "module",
        positional=2,
        techniques=("flowrl.techniques.verdicts",),
    ),
    "aggregate": Axis(
        "flowrl.algorithms.reward_mix",
        "package",
        positional=2,
        files_of_other_axes=("transforms",),
        techniques=("flowrl.techniques.reward_mixes",),
    ),
    "credit": Axis(
        "flowrl.algorithms.credit",
        "package",
        positional=3,
        techniques=("flowrl.techniques.group_credits", "flowrl.techniques.prompt_histories"),
    ),
    "segment": Axis("flowrl.algorithms.selection.segments", "module", positional=1),
    "select": Axis(
        "flowrl.algorithms.selection",
        "package",
        positional=1,
        files_of_other_axes=("segments",),
        techniques=("flowrl.techniques.selections",),
    ),
    "likelihood": Axis("flowrl.algorithms.likelihoods", "package"),
    "loss": Axis(
        "flowrl.algorithms.losses", "package", techniques=("flowrl.techniques.group_losses",)
    ),
    "kl": Axis("flowrl.algorithms.penalties", "module", positional=1, mix="beta"),
    "old": Axis("flowrl.algorithms.ema_decays", "module", positional=1),
    "slow": Axis("flowrl.algorithms.ema_decays", "module", positional=1),
    "fake": Axis("flowrl.algorithms.companions.fake", "module"),
    "surrogate": Axis("flowrl.algorithms.companions.surrogate", "module"),
    "sampler": Axis("flowrl.techniques.prompt_samplers", "module", positional=1, last="draw"),
    "optimizer": Axis(
        "flowrl.training.optimizer", "module", positional=1, last="params", default="adamw"
    ),
    "parts": Axis("", "plugin"),
}


def name_of(key: str) -> str:
    """Return the axis of a call section: "plan", "rewards.shapes", "select[1]" and
    "rewards.shapes.transform[0]" are of plan, rewards, select and transform."""
    if re.fullmatch(r"rewards\.[\w-]+\.transform.*", key):
        return "transform"
    return re.split(r"[.\[]", key)[0]


def axis_of(key: str) -> Axis:
    """Return where the functions of a call section live."""
    return AXES[name_of(key)]


# ----------------------------------------------------------------------------- what a module offers


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
