"""Calls: the sections of a config that name a function and its keyword arguments.

::

    plan: {fn: random_window, steps: 10, size: 3, low: 0, high: 5, noise_scale: 0.8}

A dotted `fn` (``my_pkg.mod.fn``) is allowed inside the package of its own axis and inside the
packages that the user named as plugins, nowhere else: a config from a stranger must not be able to
run code.

Only keyword-only parameters of types that YAML can hold can be set: positional ones, and keywords
like ``segment: Tensor | None``, are what the training loop hands over. Classes and models have no
such arguments, so their positional parameters can be set too. A *mixing weight* is read by the
training loop and never handed to the function: it is `Call.mix`, not in `Call.kwargs`.

Objects that a program hands over are ``{fn: python}``: no YAML file can name them, so a run that is
opened again without them says how to hand them over, where they are needed and not before.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Interval

from flowrl.config.axes import (
    Axis,
    Functions,
    axis_of,
    functions_of,
    modules_in,
    name_of,
    named_file,
    of_your_own,
    taken_name,
)
from flowrl.config.overrides import Source
from flowrl.config.section import arguments, settable
from flowrl.config.values import MOST, Collector, convert, plain
from flowrl.core.errors import ConfigError, unknown

AUTO = "auto"  # `fn` of a call whose function follows from its arguments
FrameWay = Literal["mean", "min", "first", "last"]
"""How an image reward judges a video: by all of its frames, or by one."""


@dataclass(frozen=True)
class Call:
    """A function of one axis with its checked keyword arguments, defaults filled in."""

    # where it stands in the config: "plan", "rewards.shapes"; a list of one is one
    key: str = field(compare=False)
    fn: str  # as written
    path: str  # as resolved: "flowrl.algorithms.plans.windows.random_window"
    kwargs: dict[str, Any]
    mix: float = 1.0  # the mixing weight: rewards' `weight`, kl's `beta`; 1 on other axes
    transform: tuple[Call, ...] = ()  # of a reward: what is done to its values, in this order
    function: Callable[..., Any] = field(default=lambda: None, compare=False, repr=False)
    frames: str = ""  # of a reward: how one that judges images judges a video
    offload: bool = False  # of a reward: its networks are on their device only while it scores

    @classmethod
    def bind(
        cls, key: str, raw: Any, *, source: Source | None = None, plugins: Sequence[str] = ()
    ) -> Call:
        """Resolve and check one call section; `key` is the axis, or "rewards.<name>".

        Raises ConfigError for a path that is not allowed or cannot be imported, and for unknown,
        missing and wrong arguments, all of them at once, with the nearest valid name.
        """
        source, axis = source or Source(), axis_of(key)
        given = _call_of(axis, key, raw, source, plugins)
        path, function = resolve(axis, given["fn"], source.at(f"{key}.fn"), plugins)
        known = settable_of(key, path, function)
        _check_switched(key, given, [*known, *reserved(key)], source)

        # everything that is wrong with the arguments is collected
        found, mix = Collector(), 1.0
        transform: tuple[Call, ...] = ()
        kwargs: dict[str, Any] = {}
        rest = {name: value for name, value in given.items() if name not in reserved(key)}
        if given.get("transform") is not None and "transform" in reserved(key):
            with found.catch():
                transform = bind_all(f"{key}.transform", given["transform"], source, plugins)
        own: dict[str, Any] = {}
        for name, kind in (("frames", FrameWay), ("offload", bool)):
            if given.get(name) is not None and name in reserved(key):
                with found.catch():
                    own[name] = convert(given[name], kind, f"{key}.{name}", source.at)
        if axis.mix:
            with found.catch():
                mix = _mixing_weight(axis, given, f"{key}.{axis.mix}", source)
        with found.catch():
            kwargs = arguments(rest, known, key, path, source, reserved(key)[1:])
        found.close()
        _check_positional(axis, path, function, kwargs, source.at(key))
        return cls(key, given["fn"], path, kwargs, mix, transform, function, **own)

    def partial(self) -> functools.partial[Any]:
        """Return the function with its keyword arguments filled in."""
        return functools.partial(self.function, **copy.deepcopy(self.kwargs))

    def make(self) -> Any:
        """Return what is called: an instance where `fn` is a class, else the function, with its
        arguments if there are any."""
        if inspect.isclass(self.function):
            return self.partial()()
        if self.kwargs:
            return self.partial()
        return self.function

    def to_dict(self) -> dict[str, Any]:
        """Return the call as it would be written in YAML."""
        name = axis_of(self.key).mix
        out: dict[str, Any] = {"fn": self.fn}
        if name:
            out[name] = self.mix
        if self.transform:
            out["transform"] = [call.to_dict() for call in self.transform]
        if self.frames:
            out["frames"] = self.frames
        if self.offload:
            out["offload"] = True
        return {**out, **plain(self.kwargs)}


def bind_all(key: str, raw: Any, source: Source, plugins: Sequence[str]) -> tuple[Call, ...]:
    """Bind one call or a list of calls. Raises Mistakes with those of all of them."""
    rows = [(key, raw)]
    if isinstance(raw, list):
        rows = [(f"{key}[{n}]", call) for n, call in enumerate(raw)]
    found, calls = Collector(), []
    for name, call in rows:
        with found.catch():
            calls.append(Call.bind(name, call, source=source, plugins=plugins))
    found.close()
    return tuple(calls)


def reserved(key: str) -> list[str]:
    """Return the keys of a call that are no arguments of its function, `fn` first."""
    found = ["fn"]
    mix = axis_of(key).mix
    if mix:
        found.append(mix)
    if name_of(key) == "rewards":
        found += ["transform", "frames", "offload"]
    return found


def settable_of(key: str, path: str, function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return what a config may set of a function of an axis. Raises ConfigError."""
    known = settable(function, everything=name_of(key) == "model" or inspect.isclass(function))
    taken = [name for name in reserved(key) if name in known]
    if taken:
        raise ConfigError(
            f"{path}: the parameter {taken[0]!r} has another meaning in a config; rename it"
        )
    return known


def resolve(
    axis: Axis, fn: str, where: str, plugins: Sequence[str]
) -> tuple[str, Callable[..., Any]]:
    """Find the function that `fn` names -> (dotted path, function). Raises ConfigError."""
    if fn.endswith(".py"):
        raise ConfigError(f"{where}: {fn!r} is a file: name a function in it, {of_your_own(fn)}")
    if not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*", fn, re.ASCII):
        raise ConfigError(f"{where}: expected the name of a function, got {fn!r}")
    if "." in fn:
        return _resolve_dotted(axis, fn, where, plugins)
    if axis.lookup == "plugin":
        raise ConfigError(f"{where}: expected a class of your own, {of_your_own(fn)}; got {fn!r}")
    files = None
    if axis.lookup == "file":
        files = [fn]
    found = offers(axis, where, files)
    hits = [path for path in found if path.rpartition(".")[2] == fn]
    if len(hits) > 1:
        raise ConfigError(f"{where}: {fn!r} is ambiguous; write {' or '.join(hits)}")
    if not hits:
        names = [path.rpartition(".")[2] for path, thing in found.items() if fits(axis, thing)]
        why = f"{unknown(fn, names, 'function')}; for one of your own, {of_your_own(fn)}"
        raise ConfigError(f"{where}: {axis.package} {why}")
    return hits[0], found[hits[0]]


def offers(axis: Axis, where: str, files: Sequence[str] | None = None) -> Functions:
    """Return {dotted path: function} of what a bare `fn` can name, helpers beside them included.

    `files` limits it to some modules of the package. Raises ConfigError.
    """
    if axis.lookup == "plugin":
        return Functions()
    if axis.lookup == "module":
        modules = [axis.package]
    else:
        there = modules_in(axis.package, where)
        for name in files or ():
            if name not in there:
                why = f"{unknown(name, there, 'file')}; for one of your own, {of_your_own(name)}"
                raise ConfigError(f"{where}: {axis.package} {why}")
        if files is None:
            files = [name for name in there if name not in axis.files_of_other_axes]
        modules = [f"{axis.package}.{name}" for name in files]
    modules += axis.techniques
    found = {}
    for module in modules:
        for name, function in functions_of(module, where).items():
            if axis.lookup != "file" or name == module.rpartition(".")[2]:
                found[f"{module}.{name}"] = function
    return found


def fits(axis: Axis, function: Callable[..., Any]) -> bool:
    """Say whether a function is worth offering: helpers in the same file take other arguments."""
    if axis.positional is None:
        return True
    parameters = inspect.signature(_called(function)).parameters.values()
    taken = [p.name for p in parameters if p.kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    right = len(taken) == axis.positional + inspect.isclass(function)
    return right and axis.last in ("", *taken[-1:])


def _call_of(
    axis: Axis, key: str, raw: Any, source: Source, plugins: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a call section as it was written, with the default `fn`. Raises ConfigError."""
    call = raw
    if axis.default and isinstance(raw, dict):
        call = {"fn": axis.default, **raw}
    if axis.chosen_by and isinstance(raw, dict) and raw.get("fn", AUTO) == AUTO and "path" in raw:
        for plugin in plugins:  # one of them may be chosen
            functions_of(plugin, source.at(key), plugin)
        module, _, name = axis.chosen_by.partition(":")
        call = {**raw, "fn": functions_of(module, source.at(key))[name](raw["path"])}
    if not isinstance(call, dict) or not isinstance(call.get("fn"), str):
        expected = "expected a call like {fn: name, argument: value}"
        raise ConfigError(f"{source.at(key)}: {expected}, got {raw!r}")
    return call


def _resolve_dotted(
    axis: Axis, fn: str, where: str, plugins: Sequence[str]
) -> tuple[str, Callable[..., Any]]:
    top = fn.partition(".")[0]
    if top not in plugins and not axis.holds(fn):
        raise ConfigError(
            f"{where}: {fn!r} is neither in {axis.package or 'flowrl'} nor in a package that you "
            "allowed; "
            f"if you trust {top!r}, allow it with --plugin {top}"
        )
    module, _, name = fn.rpartition(".")
    found = functions_of(module, where, top if top in plugins else "")
    if name not in found:
        kind = "public function of its own"
        why = f"{unknown(name, found, kind)}{named_file(fn)}{taken_name(top)}"
        raise ConfigError(f"{where}: {module} {why}")
    return fn, found[name]


def _mixing_weight(axis: Axis, given: Mapping[str, Any], key: str, source: Source) -> float:
    value = given.get(axis.mix, axis.mix_default)
    if value is None:
        expected = "expected the weight that the training loop gives this term"
        raise ConfigError(f"{source.at(key)}: missing; {expected}")
    # a reward may count against the image, a KL may not
    low = 0.0 if axis.mix == "beta" else -MOST
    return float(convert(value, Annotated[float, Interval(ge=low, le=MOST)], key, source.at))


def _check_switched(key: str, given: dict[str, Any], known: Sequence[str], source: Source) -> None:
    """Raise ConfigError if an override of `fn` left arguments that the new function lacks."""
    if f"{key}.fn" not in source.names:
        return
    stale = [n for n in given if n not in known and f"{key}.{n}" not in source.names]
    if stale:
        kept = {name: value for name, value in given.items() if name in known}
        call = yaml.safe_dump(kept, default_flow_style=True, sort_keys=False, width=10**6).strip()
        takes = ", ".join(name for name in known if name != "fn") or "no arguments"
        raise ConfigError(
            f"{source.at(f'{key}.fn')}: {given['fn']} does not take {', '.join(stale)} of the call "
            f"that it replaces (it takes {takes}); replace the whole call: {key}='{call}'"
        )


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the loop calls: a class is made once and its instance called."""
    if not inspect.isclass(function):
        return function
    for owner in function.__mro__:
        if "__call__" in vars(owner):
            called: Callable[..., Any] = vars(owner)["__call__"]
            return called
    return lambda: None


def _check_positional(
    axis: Axis, path: str, function: Callable[..., Any], kwargs: dict[str, Any], where: str
) -> None:
    if axis.positional is None:
        return
    handed = [None] * axis.positional
    if inspect.isclass(function):  # an instance is called, which has its arguments already
        handed, kwargs = [None, *handed], {}
    try:
        inspect.signature(_called(function)).bind(*handed, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{where}: {path} does not belong here: it is called with {axis.positional} positional "
            f"arguments, but is {path.rpartition('.')[2]}{inspect.signature(function)}"
        ) from error


# ---------------------------------------------------------------- objects that a program hands over


PYTHON = "python"  # `fn` of what a program handed over


def check_reward_name(name: Any, where: str) -> None:
    """Raise ConfigError for a name of a reward that metrics and files could not have."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"{where}: expected a name of letters, digits, - and _, got {name!r}")


def as_handed(key: str, made: Any, old: Call | None = None) -> Call:
    """Return the call of an object of the program; `old` is one of a reward whose weight and
    transforms stay."""
    call = old or Call(key, PYTHON, PYTHON, {})
    return replace(call, fn=PYTHON, path=PYTHON, kwargs={}, function=made)


def reward_call(
    key: str,
    raw: Any,
    source: Source,
    plugins: Sequence[str],
    *,
    needed: bool,
    before: Mapping[str, Call],
) -> Call:
    """Bind the call of a reward as `Call.bind` does; one that cannot be bound is an error at once
    only if it is `needed`.

    One with ``fn: python`` has the function of the same name in `before`. Where there is none, it
    is an error where it is made, whether it is needed or not: the program may hand it over before
    that.
    """
    name = key.rpartition(".")[2]
    old = before.get(name)
    if isinstance(raw, dict) and raw.get("fn") == PYTHON:
        why = ConfigError(
            f"{source.at(key)}: this reward is a Python function of the program that trained the "
            f"run. Hand it over again: flowrl.open(run, rewards={{{name!r}: function}}), and then "
            "evaluate() or resume(). To evaluate from the command line, put it in a file: "
            f"--plugin my_file --set {key}.fn=my_file.function"
        )
        steps = raw.get("transform")
        call = _absent(key, raw, why, bind_all(f"{key}.transform", steps or [], source, plugins))
        if old is not None and old.path == PYTHON:
            call = replace(call, function=old.function)
        return call
    # one that nobody has changed is as good, or as absent, as before
    if old is not None and old.to_dict() == raw:
        return old
    try:
        return Call.bind(key, raw, source=source, plugins=plugins)
    except ConfigError as error:
        if needed:
            raise
        return _absent(key, raw, error, ())


def model_call(raw: Any, source: Source, plugins: Sequence[str], before: Call | None) -> Call:
    """Bind the call of a model.

    One with ``fn: python``, and one whose ``path: python`` says that its weights are a pipeline in
    memory, are made as `before` is; where there is none, it is an error where it is made.
    """
    why = ConfigError(
        f"{source.at('model')}: this model is a Python object of the program that trained the run. "
        "Hand it over again: flowrl.open(run, model=model). On a command line, name the folder "
        "that its weights are in: --set model.path=FOLDER"
    )
    if not isinstance(raw, dict) or raw.get("fn") != PYTHON:
        call = Call.bind("model", raw, source=source, plugins=plugins)
        handed = before is not None and before.function not in (None, call.function)
        if call.kwargs.get("path") == PYTHON and not (handed and before):
            return replace(call, function=_failing(why))
        called = call.path, call.kwargs.get("path")
        if before is not None and (before.path, before.kwargs.get("path")) == called:
            call = replace(call, function=before.function)
        return call
    more = [name for name in raw if name != "fn"]
    if more:
        raise ConfigError(
            f"{source.at(f'model.{more[0]}')}: the model is an object of the program, which has "
            "its options already; set them where it is made"
        )
    if before is not None and before.path == PYTHON:
        return before
    return _absent("model", raw, why, ())


def part_call(
    key: str, raw: Any, source: Source, plugins: Sequence[str], before: Mapping[str, Call]
) -> Call:
    """Bind the call of a part. One with ``fn: python`` is made as the one of the same name in
    `before`; where there is none, it is an error where it is made."""
    if not isinstance(raw, dict) or raw.get("fn") != PYTHON:
        return Call.bind(key, raw, source=source, plugins=plugins)
    old = before.get(key.rpartition(".")[2])
    if old is not None and old.path == PYTHON:
        return old
    why = ConfigError(
        f"{source.at(key)}: this part is a Python object of the program that trained the run. Hand "
        "it over again: callbacks=[...]; or put its class in a file: --plugin my_file --set "
        f"{key}.fn=my_file.MyPart"
    )
    return _absent(key, raw, why, ())


def _failing(why: ConfigError) -> type:
    """Return what raises an error where it is called."""

    class Absent:
        def __init__(self, **_: Any) -> None:
            raise why

    return Absent


def _absent(key: str, raw: Any, why: ConfigError, transform: tuple[Call, ...]) -> Call:
    if not isinstance(raw, dict) or not isinstance(raw.get("fn"), str):
        raise why
    mix = raw.get("weight", 1.0)
    if not isinstance(mix, int | float):
        raise why
    kwargs = {name: value for name, value in raw.items() if name not in reserved(key)}
    frames = raw.get("frames")
    if not isinstance(frames, str):
        frames = ""
    return Call(key, raw["fn"], raw["fn"], kwargs, float(mix), transform, _failing(why), frames)
