"""How a reward wants to be called: with a whole `RewardBatch`, or by the names of its arguments.

A function names what it looks at: ``images`` [L, 3, H, W], ``prompts``, ``source``, and keys of the
prompts' records, each a list with one entry per image. Any other name is an error: a function of
another library, such as TRL's ``f(prompts, completions)``, would learn from the wrong things.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

from flowrl.core.errors import ConfigError, near
from flowrl.core.types import RewardBatch

BATCH = "batch"  # the name of an argument that is a whole `RewardBatch`
OURS = ("images", "prompts", "source")
FORM = "f(images, prompts, **record), or f(batch) for a whole RewardBatch"

# rewards whose names were looked up in whole lists: a batch may lack a key that others have
_checked: WeakSet[Any] = WeakSet()


def named_arguments(reward: Callable[..., Any], batch: RewardBatch) -> dict[str, Any] | None:
    """Return what a function gets by name; None where it takes the batch itself. Raises ConfigError
    for a name that nothing has."""
    parameters = _named(reward)
    if parameters is None:
        return None
    columns = dict.fromkeys(key for record in batch.meta for key in record)
    if not _is_checked(reward):
        _check_names(parameters, columns)
    # all there is, one entry per image
    known: dict[str, Any] = {}
    for key in [*columns, *_needed(parameters)]:
        known[key] = [record.get(key) for record in batch.meta]
    known |= {"images": batch.images, "prompts": batch.prompts}
    known.pop("prompt", None)
    if batch.source:
        known["source"] = list(batch.source)
    # of it what the function takes
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return known
    return {key: value for key, value in known.items() if key in parameters}


def check_arguments(rewards: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> None:
    """Check before anything is sampled that each argument of a reward is known: a name of ours, or
    a key of one of the prompts' records. Raises ConfigError that shows the right form."""
    columns = dict.fromkeys(key for record in records for key in record)
    for name, reward in rewards.items():
        parameters = _named(reward)
        if parameters is None:
            continue
        try:
            _check_names(parameters, columns)
        except ConfigError as error:
            raise ConfigError(f"reward {name!r}: {error}") from None
        try:
            _checked.add(reward)
        except TypeError:  # an object that cannot be remembered is checked again
            continue


def _is_checked(reward: Any) -> bool:
    try:
        return reward in _checked
    except TypeError:
        return False


def _named(reward: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a reward that is called by their names; None where it takes a
    `RewardBatch`: its only argument is named `batch`, or annotated so, or is any."""
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # written in C
        return None
    if set(parameters).isdisjoint(OURS):
        first = next(iter(parameters.values()), None)
        if first is None or first.kind is first.VAR_POSITIONAL:
            return None
        if first.name == BATCH or RewardBatch.__name__ in str(first.annotation):
            return None
    return parameters


def _needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names that a function has to be given."""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters.values() if p.kind not in various and p.default is p.empty]


def _check_names(parameters: Mapping[str, inspect.Parameter], columns: Iterable[str]) -> None:
    keys = [key for key in columns if key != "prompt"]
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"its argument {parameter.name!r} has a place and no name, and a reward is called "
                f"by names; write {FORM}"
            )
    for name in _needed(parameters):
        if name not in (*OURS, *keys):
            there = ", ".join([*OURS[:2], *keys])
            raise ConfigError(
                f"its argument {name!r} is nothing that a reward gets{near(name, [*OURS, *keys])}; "
                f"a reward is called by the names of its arguments, here of {there}. Write {FORM}"
            )
