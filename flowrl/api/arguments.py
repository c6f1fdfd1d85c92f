"""The one way in from Python: arguments of a call -> a checked config that carries the program's
own objects.

`config` is a name, a path, a mapping of sections or a Config. Beside it a call may have:

- `model`: a hub id or a folder, the name of a file of configs/models, a loaded pipeline of
  diffusers, or a FlowModel; with one of the first four `config` may be the name of a method, "awm";
- `prompts`, `test_prompts`: a path or the name of a list, texts or records in anything that can be
  gone through, a ``datasets.Dataset``;
- `rewards`: a function, the name of a shipped reward, a list of these, or a mapping by name;
- `overrides`: ``key=value`` texts or a mapping, and each section of a config as a keyword;
- `plugins`: packages that the config may name functions of;
- `profile`: the memory of a card that it has to fit, "24gb", "22.4gb" or "auto", as ``--profile``;
- `callbacks`: parts that join the training loop, where there is one;
- `track`: experiment trackers that are told of a run, or of an evaluation.

These stand in `config_of` once: the calls take ``**given: Unpack[Given]``, which editors and mypy
complete and check, and `takes_given` gives each of them the signature with all of it.

A wrong type is one ConfigError that names the argument and shows what it may be.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, TypeVar, Unpack

from flowrl.api.given import ModelLike, both_lists, is_pipeline, prompts_of, with_model
from flowrl.config.calls import PYTHON, Call, as_handed, check_reward_name
from flowrl.config.load import ORDER, Config, judged_by, load_config
from flowrl.config.overrides import override_texts, tuple_of_texts
from flowrl.config.sections import SECTIONS
from flowrl.config.values import show
from flowrl.core.abilities import judges_videos
from flowrl.core.errors import ConfigError, unknown
from flowrl.core.part import Part
from flowrl.core.processes import world
from flowrl.cost.fit_card import fitted
from flowrl.evaluation.reward_call import frames_of
from flowrl.runs.composed import composed, is_method, is_model_file
from flowrl.runs.trackers import trackers_given
from flowrl.training.parts import check_part

ConfigLike = str | os.PathLike[str] | Mapping[str, Any] | Config
PromptsLike = str | os.PathLike[str] | Iterable[Any] | Mapping[str, Any]
RewardLike = Callable[..., Any] | str
RewardsLike = RewardLike | Sequence[RewardLike] | Mapping[str, Any]
Overrides = Mapping[str, Any] | Sequence[str]
Values = Mapping[str, Any]
F = TypeVar("F", bound=Callable[..., Any])


class Sections(TypedDict, total=False):
    """The sections of a config that a call may change by keyword; docs/config.md has their keys.
    Those of models, prompts and rewards are arguments of their own."""

    name: str
    seed: int
    sampler: Values | None
    image: Values
    plan: Values
    transition: Values
    aggregate: Values
    credit: Values
    segment: Values | None
    select: Values | Sequence[Values] | None
    likelihood: Values
    loss: Values
    kl: Values | None
    old: Values | None
    slow: Values | None
    fake: Values | None
    surrogate: Values | None
    optimizer: Values
    parts: Values
    train: Values
    scout: Values
    eval: Values
    checkpoint: Values
    samples: Values
    monitors: Values


class Given(Sections, total=False):
    """What every call takes beside its config: the arguments of `config_of`."""

    model: ModelLike | None
    prompts: PromptsLike | None
    test_prompts: PromptsLike | None
    rewards: RewardsLike | None
    overrides: Overrides
    plugins: Sequence[str]
    callbacks: Sequence[Part]
    profile: str | None
    track: Sequence[str]


def config_of(
    config: ConfigLike,
    quiet: bool = True,
    /,
    *,
    model: ModelLike | None = None,
    prompts: PromptsLike | None = None,
    test_prompts: PromptsLike | None = None,
    rewards: RewardsLike | None = None,
    overrides: Overrides = (),
    plugins: Sequence[str] = (),
    callbacks: Sequence[Part] = (),
    profile: str | None = None,
    track: Sequence[str] = (),
    **sections: Unpack[Sections],
) -> Config:
    """Return the config that a call asks for. Without `quiet` what was decided is said on stderr.

    `callbacks` become parts of the config; the names of `track` are checked, here as in each call.
    Raises ConfigError for an argument of a wrong type, and as `load_config` does; DataError for a
    list of prompts that is none.
    """
    trackers_given(track)
    given: dict[str, Any] = {**sections}
    for name in given:
        if name not in ORDER:
            known = [*Given.__annotations__, *Sections.__annotations__]
            raise ConfigError(f"the call {unknown(name, known, 'argument')}{_in_a_section(name)}")
    if isinstance(model, Mapping):  # of a section only the keys that are given change
        given, model = {**given, "model": model}, None
    plugins = [plugins] if isinstance(plugins, str) else plugins
    config, model = _on_model(config, model)
    texts = [*_texts(overrides), *override_texts(given)]
    # a reward that is not at hand is no trouble where others take its place
    if isinstance(config, Config) and not texts and not plugins:
        made = config
    else:
        made = load_config(config, texts, plugins, need_rewards=rewards is None)
    if rewards is not None:
        made = _with_rewards(made, rewards)
    if model is not None:
        made = with_model(made, model)
    made = _of_frames(made, quiet=quiet)
    made = _with_parts(made, callbacks)
    made = _with_prompts(made, prompts, test_prompts, quiet=quiet)
    return made if profile is None else _fitting(made, profile, texts, quiet=quiet)


def _fitting(config: Config, profile: Any, given: Sequence[str], *, quiet: bool) -> Config:
    """Return the config as it fits a profile's card. Raises ConfigError."""
    if not isinstance(profile, str):
        raise ConfigError(f"profile: expected the memory of a card, '24gb', got {show(profile)}")
    found = fitted(config, profile, given)
    say(found.said, quiet=quiet)
    return load_config(config, found.overrides)


def takes_given(call: F) -> F:
    """Give a call that ends in ``**given: Unpack[Given]`` the signature that this stands for, with
    the arguments of `config_of` and the sections by name: what `help`, notebooks and
    `inspect.signature` show."""
    own = inspect.signature(call)
    shared = inspect.signature(config_of).parameters
    *mine, _ = own.parameters.values()
    # arguments of the call that come by place stand first, then the shared ones, then its own
    named = [one for one in mine if one.kind is one.KEYWORD_ONLY]
    first = [one for one in mine if one.kind is not one.KEYWORD_ONLY]
    middle = [shared[name] for name in shared if name in Given.__annotations__]
    call.__signature__ = own.replace(  # type: ignore[attr-defined]
        parameters=[*first, *middle, *named, shared["sections"]]
    )
    return call


def _with_parts(config: Config, callbacks: Any) -> Config:
    """Return the config with parts of the program, of which each run has a copy of its own. Raises
    ConfigError for what is no part."""
    calls = dict(config.parts)
    for part in parts_given(callbacks):
        name = plain = type(part).__name__
        while name in calls:
            name = f"{plain}-{sum(one.startswith(plain) for one in calls) + 1}"
        calls[name] = as_handed(f"parts.{name}", _copies_of(part))
    return replace(config, parts=calls) if len(calls) > len(config.parts) else config


def _copies_of(part: Part) -> type:
    """Return what makes a copy of a part where it is called, as the class of one does."""

    class Given:
        def __new__(cls) -> Any:
            return copy.deepcopy(part)

    return Given


def parts_given(callbacks: Any) -> Sequence[Part]:
    """Return the parts that join the loop; one alone is a list of one. Raises ConfigError."""
    given = [callbacks] if isinstance(callbacks, Part) else callbacks
    if not isinstance(given, list | tuple):
        raise ConfigError(
            "callbacks: expected a list of parts, objects of classes on flowrl.Part, got "
            f"{show(given)}"
        )
    for place, part in enumerate(given):
        check_part(part, f"callbacks[{place}]")
    return given


def _in_a_section(name: str) -> str:
    """Return where a key stands that was taken for an argument, "" for one of no section."""
    homes = [home for home, kind in SECTIONS.items() if name in kind.__dataclass_fields__]
    if not homes:
        return ""
    return f"; {name} is a key of {' and of '.join(homes)}: {homes[0]}={{{name!r}: ...}}"


def _on_model(config: Any, model: Any) -> tuple[Any, Any]:
    """Return a method that is named, or a config on a model of configs/models, as the sections that
    these two make, and what is left to be set. Raises ConfigError, ModelError."""
    if not isinstance(config, str | os.PathLike) or model is None:
        return config, model
    name = os.fspath(config)
    if isinstance(model, str | os.PathLike) and (is_method(name) or is_model_file(model)):
        return composed(name, model), None
    if is_method(name) and is_pipeline(model):
        path = str(model.name_or_path or type(model).__name__)
        return composed(name, path, type(model).__name__), model
    return config, model


def say(text: str, *, quiet: bool) -> None:
    """Say on stderr what a call has decided, in the first process."""
    if not quiet and world().main:
        print(text, file=sys.stderr)


def named_functions(rewards: Any) -> dict[str, Any]:
    """Return rewards by name: functions, and names or calls of those that a config knows. Raises
    ConfigError."""
    if isinstance(rewards, Mapping):
        return dict(rewards)
    if callable(rewards) or isinstance(rewards, str):
        rewards = [rewards]
    if not isinstance(rewards, list | tuple):
        raise ConfigError(
            "rewards: expected a function, the name of a shipped reward, a list of these, or a "
            f"mapping {{name: function}}, got {show(rewards)}"
        )
    found: dict[str, Any] = {}
    for reward in rewards:
        name = reward if isinstance(reward, str) else _name_of(reward)
        if name in found:
            raise ConfigError(
                f"rewards: two of them are called {name!r}; name them: rewards={{'one': ..., "
                "'other': ...}"
            )
        found[name] = reward
    return found


def _name_of(reward: Any) -> str:
    """Name a function; one without a name is the reward."""
    name = str(getattr(reward, "__name__", type(reward).__name__))
    return name if re.fullmatch(r"[\w-]+", name) else "reward"


def _texts(overrides: Any) -> list[str]:
    """Return overrides as texts. Raises ConfigError."""
    if isinstance(overrides, Mapping):
        return override_texts(overrides)
    if isinstance(overrides, str):
        overrides = [overrides]
    if isinstance(overrides, list | tuple):
        return [*tuple_of_texts(overrides, "overrides")]
    raise ConfigError(
        f"overrides: expected a list of texts like 'train.iterations=20', or a mapping like "
        f"{{'train': {{'iterations': 20}}}}, got {show(overrides)}"
    )


def _with_rewards(config: Config, rewards: Any) -> Config:
    """Return the config with these rewards in place of all that it names; one of a name that it
    has keeps its weight and its transforms."""
    calls: dict[str, Call | None] = {}
    named: dict[str, Any] = {}
    functions: dict[str, Any] = {}
    for name, reward in named_functions(rewards).items():
        check_reward_name(name, "rewards")
        if isinstance(reward, str | Mapping):
            call = {"fn": reward} if isinstance(reward, str) else dict(reward)
            if callable(call.get("fn")):  # with a weight or transforms of its own
                functions[name], call["fn"] = call["fn"], PYTHON
            named[name], calls[name] = call, None
        elif callable(reward):
            calls[name] = as_handed(f"rewards.{name}", reward, config.rewards.get(name))
        else:
            raise ConfigError(
                f"rewards.{name}: expected a function, the name of a shipped reward or a call like "
                f"{{'fn': 'pickscore', 'weight': 0.5}}, got {show(reward)}"
            )
    if not calls:
        raise ConfigError("rewards: expected at least one, got none")
    # those of a config are bound by it
    if named:
        whole = {"rewards": {**named}}
        texts = [f"rewards.{name}=null" for name in config.rewards if name not in named]
        # first the new ones: a config is never without rewards on its way
        bound = load_config(config, [*override_texts(whole), *texts, *_unscored(named)])
        for name in named:
            made = bound.rewards[name]
            calls[name] = replace(made, function=functions.get(name, made.function))
    return judged_by(config, {name: call for name, call in calls.items() if call is not None})


def _of_frames(config: Config, *, quiet: bool) -> Config:
    """Return the config in which functions of images judge the videos of a model frame by frame."""
    if frames_of(config) == 1:
        return config
    calls = dict(config.rewards)
    for name, call in config.rewards.items():
        if call.path == PYTHON and not call.frames and not judges_videos(call.function):
            calls[name] = replace(call, frames="mean")
            say(
                f"rewards.{name} judges the frames of a video one by one, and their mean counts; "
                "one that is to get whole videos says so: function.judges_videos = True",
                quiet=quiet,
            )
    return replace(config, rewards=calls)


def _unscored(named: Mapping[str, Any]) -> list[str]:
    """Return the overrides that let an evaluation's score be one of the rewards that are named."""
    return [f"eval.score={next(iter(named))}", "eval.best_by=''"]


def _with_prompts(config: Config, prompts: Any, test: Any, *, quiet: bool) -> Config:
    """Return the config with other lists; without test prompts a tenth is held out, or, of a
    mapping, the config's own stay."""
    if isinstance(prompts, Mapping):
        lists = dict(prompts)
        wrong = [key for key in lists if key not in ("train", "test")]
        if wrong or (test is not None and "test" in lists):
            raise ConfigError(
                "prompts: expected a list of prompts, or a mapping of the lists 'train' and "
                f"'test', got {show(prompts)}; a list of one record is [{{'prompt': ...}}]"
            )
        prompts, test = lists.get("train"), lists.get("test", test)
        files = {}
        for use, one in (("train", prompts), ("test", test)):
            if one is not None:
                files[use] = prompts_of(one, f"prompts.{use}")
        return replace(config, prompts=replace(config.prompts, **files))
    if prompts is None:
        if test is None:
            return config
        name = prompts_of(test, "test_prompts")
        return replace(config, prompts=replace(config.prompts, test=name))
    if test is not None:
        both = prompts_of(prompts, "prompts"), prompts_of(test, "test_prompts")
    else:
        both, said = both_lists(prompts)
        say(said, quiet=quiet)
    return replace(config, prompts=replace(config.prompts, train=both[0], test=both[1]))


def python_objects(config: Config) -> list[str]:
    """Name what of a config only this program has: "model", "rewards.mine"."""
    found = ["model"] if PYTHON in (config.model.path, config.model.kwargs.get("path")) else []
    found += [f"rewards.{name}" for name, call in config.rewards.items() if call.path == PYTHON]
    return found + [f"parts.{name}" for name, call in config.parts.items() if call.path == PYTHON]
