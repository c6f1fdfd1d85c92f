"""Files of a comparison that an earlier version wrote: what they lack because it came later."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from flowrl.config.load import Config, build_config
from flowrl.config.overrides import Source
from flowrl.core.errors import ConfigError

Found = dict[str, Any]
APART = ("model", "prompts", "image", "eval", "samples")  # what `setting` holds as sections


def config_then(there: Mapping[str, Any], now: Config, view: Callable[[Config], Found]) -> Found:
    """Return a config of a result file, as `view` gives it, with the keys that came later at their
    defaults; as it is if it cannot be loaded today."""
    raw = {"seed": now.seed, **there}
    raw.pop("monitors", None)  # in part there; absent ones are the defaults
    return _filled(there, raw, now, view)


def setting_then(there: Mapping[str, Any], now: Config, view: Callable[[Config], Found]) -> Found:
    """Return what has to be equal, as a file has it and `view` gives it, with the keys of its
    sections that came later at their defaults; as it is if it cannot be loaded today."""
    own = now.to_dict()
    sections = {key: there[key] for key in APART if isinstance(there.get(key), Mapping)}
    rewards = there.get("rewards")
    if isinstance(rewards, Mapping):
        sections["rewards"] = {**own["rewards"], **rewards}

    def shown(config: Config) -> Found:
        # sections that the file lacks are not filled: they differ from today's
        return {key: value for key, value in view(config).items() if key in sections}

    return _filled(there, {**own, **sections}, now, shown)


def _filled(
    there: Mapping[str, Any], raw: Mapping[str, Any], now: Config, view: Callable[[Config], Found]
) -> Found:
    source = Source("a file of an earlier version", ())
    # what files leave out, such as train.iterations, has to be there to load the rest
    own, whole = now.to_dict(), dict[str, Any]()
    for key, value in raw.items():
        sections = isinstance(value, Mapping) and isinstance(own.get(key), Mapping)
        left_out = _left_out(own[key], view(now).get(key)) if sections else {}
        whole[key] = {**left_out, **value} if sections else value
    try:
        built = build_config(whole, source, now.plugins)
    except ConfigError:
        return dict(there)
    filled: Found = _with_missing(there, json.loads(json.dumps(view(built))))
    return filled


def _left_out(own: Mapping[str, Any], seen: Any) -> Found:
    """Return the keys of a section that the view of a config does not show."""
    shown = seen if isinstance(seen, Mapping) else own
    return {key: value for key, value in own.items() if key not in shown}


def _with_missing(there: Any, whole: Any) -> Any:
    """Return `there` with the keys that only `whole` has, at all depths; entries of lists of one
    length belong together."""
    if isinstance(there, Mapping) and isinstance(whole, Mapping):
        filled = {key: _with_missing(there.get(key, value), value) for key, value in whole.items()}
        return {**there, **filled}
    lists = isinstance(there, list) and isinstance(whole, list)
    if lists and len(there) == len(whole):
        return [_with_missing(one, other) for one, other in zip(there, whole, strict=True)]
    return there
