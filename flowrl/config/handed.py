"""Calls of objects that a program hands over: in a config they are ``{fn: python}``.

No YAML file can name them, so that a run which is opened again without them says how to hand them
over, where they are needed and not before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from flowrl.config.calls import Call, bind_all, reserved
from flowrl.config.overrides import Source
from flowrl.core.errors import ConfigError

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
        kept = old is not None and old.path == PYTHON
        return replace(call, function=old.function) if kept and old else call
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
        same = before is not None and before.kwargs.get("path") == call.kwargs.get("path")
        same = same and before is not None and before.path == call.path
        return replace(call, function=before.function) if same and before else call
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
    frames = raw.get("frames") if isinstance(raw.get("frames"), str) else ""
    return Call(
        key, raw["fn"], raw["fn"], kwargs, float(mix), transform, _failing(why), str(frames)
    )
