"""Rewards that a config names and that are not at hand: an error where they are made, and no
trouble before. So a run can be sampled and exported without them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from flowrl.config.calls import Call, bind_all, reserved
from flowrl.config.overrides import Source
from flowrl.core.errors import ConfigError

PYTHON = "python"  # `fn` of a reward that a program handed over, which no config can name


def check_reward_name(name: Any, where: str) -> None:
    """Raise ConfigError for a name of a reward that metrics and files could not have."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"{where}: expected a name of letters, digits, - and _, got {name!r}")


def reward_call(
    key: str, raw: Any, source: Source, plugins: Sequence[str], *, needed: bool
) -> Call:
    """Bind the call of a reward as `Call.bind` does; one that cannot be bound is an error at once
    only if it is `needed`.

    One with ``fn: python`` is an error where it is made, whether it is needed or not: the program
    may hand it over before that.
    """
    if isinstance(raw, dict) and raw.get("fn") == PYTHON:
        name = key.rpartition(".")[2]
        why = ConfigError(
            f"{source.at(key)}: this reward is a Python function of the program that trained the "
            "run. To go on, hand it over again: flowrl.train(config, run, resume=True, "
            f"rewards={{{name!r}: function}}). To evaluate from the command line, put it in a "
            f"file: --plugin my_file --set {key}.fn=my_file.function"
        )
        steps = raw.get("transform")
        return _absent(key, raw, why, bind_all(f"{key}.transform", steps or [], source, plugins))
    try:
        return Call.bind(key, raw, source=source, plugins=plugins)
    except ConfigError as error:
        if needed:
            raise
        return _absent(key, raw, error, ())


def _absent(key: str, raw: Any, why: ConfigError, transform: tuple[Call, ...]) -> Call:
    class Absent:
        def __init__(self, **_: Any) -> None:
            raise why

    if not isinstance(raw, dict) or not isinstance(raw.get("fn"), str):
        raise why
    mix = raw.get("weight", 1.0)
    if not isinstance(mix, int | float):
        raise why
    kwargs = {name: value for name, value in raw.items() if name not in reserved(key)}
    frames = raw.get("frames") if isinstance(raw.get("frames"), str) else ""
    return Call(key, raw["fn"], raw["fn"], kwargs, float(mix), transform, Absent, str(frames))
