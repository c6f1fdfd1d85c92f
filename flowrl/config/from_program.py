"""What a program hands over: a config, and rewards that are functions of its own. A mistake in it
is one message, as in a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.config.absent_rewards import PYTHON, check_reward_name
from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.config.values import show
from flowrl.core.errors import ConfigError


def check_config(config: Any) -> None:
    """Raise ConfigError for what is no config, such as the name of one."""
    if isinstance(config, Config):
        return
    named = isinstance(config, str | os.PathLike)
    hint = f"flowrl.load_config({os.fspath(config)!r})" if named else "flowrl.load_config"
    raise ConfigError(f"expected a config, as {hint} gives it, got {show(config)}")


def folder_of(path: Any, what: str) -> Path:
    """Return a path as a Path. Raises ConfigError for an empty text, which would be the working
    folder, and for what is no path."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{what}: expected the path of a folder, got {show(path)}")
    return Path(path)


def with_rewards(config: Config, rewards: Mapping[str, Any]) -> Config:
    """Return the config with other rewards: functions or objects of the program, by name.

    They take the place of all that the config names; one of a name that the config has keeps its
    weight and its transforms. In the run's ``config.yaml`` they are ``{fn: python}``. Raises
    ConfigError for what cannot be called, and as a config does.
    """
    if not isinstance(rewards, Mapping):
        raise ConfigError(f"rewards: expected {{name: function}}, got {show(rewards)}")
    calls = {}
    for name, reward in rewards.items():
        check_reward_name(name, "rewards")
        if not callable(reward):
            raise ConfigError(f"rewards.{name}: expected something to call, got {show(reward)}")
        old = config.rewards.get(name) or Call(f"rewards.{name}", PYTHON, PYTHON, {})
        calls[name] = replace(old, fn=PYTHON, path=PYTHON, kwargs={}, function=reward)
    score = config.eval.score if config.eval.score in calls else ""
    return replace(config, rewards=calls, eval=replace(config.eval, score=score))
