"""Turn a YAML file into checked calls, before any weight is loaded. A method *is* such a list of named calls.

A file has call sections and plain sections. A call section names a function and its keyword arguments::

    plan: {fn: random_window, steps: 10, size: 3, low: 0, high: 5, level: 0.8}

============  ====================================================  =========================
call section  where a bare `fn` is looked up                        mixing weight in the YAML
============  ====================================================  =========================
model         flowrl/models/<fn>.py, the function <fn>
plan          any file of flowrl/samplers that has plans
transition    flowrl/transitions.py
rewards.NAME  rewards/<fn>.py, the function or class <fn>           weight (default 1.0)
aggregate     flowrl/credit/aggregate.py; the section is optional
credit        any other file of flowrl/credit
segment       flowrl/credit/segments.py; the section is optional
select        flowrl/credit/select.py; one call or a list, optional
likelihood    flowrl/likelihood.py
loss          any file of flowrl/losses but kl.py
kl            flowrl/losses/kl.py; the section is optional          beta (required)
============  ====================================================  =========================

A reward may also have a `transform`, a call or a list of calls of flowrl/credit/transforms.py, made on its values in
that order. A *mixing weight* is read by the training loop and never handed to the function: it is `Call.mix`, not in
`Call.kwargs`.
A dotted `fn` (``my_pkg.mod.fn``) is allowed inside the package of its own axis and inside the packages that the user
named as plugins, nowhere else: a config from a stranger must not be able to run code.

Only keyword-only parameters of types that YAML can hold can be set: positional ones, and keywords like
``segment: Tensor | None``, are what the loop hands over at run time. Classes and models have no such arguments, so
their positional parameters can be set too. Types come from the annotations; numbers
that YAML 1.1 reads as text (``1e-4``) become numbers where a number is expected. ``Annotated[int, Range(1)]`` limits
a value. Duplicate keys and YAML anchors are errors. The plain sections are the dataclasses below, one key per field.
"""

from __future__ import annotations

import collections.abc
import copy
import difflib
import functools
import importlib
import inspect
import math
import os
import pkgutil
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml

from flowrl.errors import ConfigError
from flowrl.resources import list_configs, resource


@dataclass(frozen=True)
class Range:
    """Limit a number to [low, high]; an `open` end is itself excluded. NaN is never inside."""

    low: float = -math.inf
    high: float = math.inf
    open: Literal["", "low", "high"] = ""

    def check(self, value: Any, where: str) -> None:
        """Raise ConfigError unless `value`, or each number of a sequence, is inside."""
        for number in value if isinstance(value, list | tuple) else [value]:
            above = number > self.low if self.open == "low" else number >= self.low
            below = number < self.high if self.open == "high" else number <= self.high
            if not (above and below):
                raise ConfigError(f"{where}: expected {self}, got {value!r}")

    def __str__(self) -> str:
        low = f"{'>' if self.open == 'low' else '>='} {self.low:g}" if self.low > -math.inf else ""
        high = f"{'<' if self.open == 'high' else '<='} {self.high:g}" if self.high < math.inf else ""
        return "a number " + (" and ".join(part for part in (low, high) if part) or "that is not NaN")


Positive = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 2.0**63, open="high")]
Decay = Annotated[float, Range(0, 1, open="high")]
Finite = Range(-1e300, 1e300)


@dataclass(frozen=True)
class PromptsConfig:
    """``prompts``: the lists of prompts, in any format of `flowrl.prompts.load_prompts`."""

    train: str  # file with the prompts to train on
    test: str  # file with the held-out prompts for evaluation and grids

    def __post_init__(self) -> None:
        _check_ranges(self, "prompts")


@dataclass(frozen=True)
class ImageConfig:
    """``image``: the size of the pictures, in pixels."""

    height: Positive
    width: Positive

    def __post_init__(self) -> None:
        _check_ranges(self, "image")


@dataclass(frozen=True)
class TrainConfig:
    """``train``: the training loop and its optimizer (AdamW)."""

    iterations: Positive  # rollouts, each followed by `updates` optimizer steps
    prompts: Positive  # prompts per iteration, over all ranks
    group: Positive  # images per prompt
    updates: Positive = 1  # optimizer steps per iteration
    order: Literal["random", "step"] = "random"  # of the decisions over them; step = the noisiest steps first
    micro_batch: Positive = 64  # states per network call while training; siblings share one
    rollout_batch: Positive = 256  # images per network call while sampling
    lr: Annotated[float, Range(0, 1e300, open="low")] = 3.0e-4  # learning rate after warm-up
    warmup: Count = 0  # optimizer steps of linear warm-up
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"  # adamw8bit: moments of 8 bits, by bitsandbytes
    weight_decay: Annotated[float, Range(0, 1e300)] = 1.0e-4
    betas: Annotated[tuple[float, float], Range(0, 1, open="high")] = (0.9, 0.999)  # AdamW's moments
    eps: Annotated[float, Range(0, 1e300, open="low")] = 1.0e-8  # AdamW's; far above the gradients it is momentum SGD
    max_grad_norm: Annotated[float, Range(0, open="low")] = 1.0  # the gradient is clipped to this norm; .inf = never
    ema: Decay = 0.9  # decay of the averaged weights per iteration; 0 = off
    max_unscored: Annotated[float, Range(0, 1)] = 0.0  # share of pictures a reward may leave unscored (NaN)
    parts: Positive = 1  # turns in which an iteration's prompts are sampled and scored
    overlap: bool = True  # with several parts: score one while the next is sampled
    same_noise: bool = False  # start all images of a prompt from the same noise
    threads: Count = 0  # CPU threads; 0 = leave as they are

    def __post_init__(self) -> None:
        _check_ranges(self, "train")


@dataclass(frozen=True)
class EvalConfig:
    """``eval``: held-out evaluation, always sampled without noise in the transitions."""

    steps: Positive = 10  # denoising steps
    every: Count = 0  # iterations between evaluations; 0 = before and after training only
    images: Positive = 4  # per prompt
    batch: Positive = 256  # images per network call
    seed: Seed = 1234  # of the initial noise, the same at every evaluation
    weights: Literal["ema", "current"] = "ema"  # which weights are evaluated
    tuned: Annotated[float, Range(0, 1)] = 1.0  # share of steps, from the noisy end, they take; the base model the rest
    score: str = ""  # name of the reward that is the headline; empty = the first in `rewards`

    def __post_init__(self) -> None:
        _check_ranges(self, "eval")


@dataclass(frozen=True)
class CheckpointConfig:
    """``checkpoint``: when to save, and how many to keep."""

    every: Count = 20  # iterations between checkpoints; 0 = only at the end
    keep: Positive = 3  # newest ones kept

    def __post_init__(self) -> None:
        _check_ranges(self, "checkpoint")


@dataclass(frozen=True)
class GridConfig:
    """``grid``: pictures of a few held-out prompts, for the eye."""

    every: Count = 20  # iterations between grids; 0 = before and after training only
    prompts: Positive = 8  # prompts in a grid
    seed: Seed = 7  # of the initial noise, the same in every grid

    def __post_init__(self) -> None:
        _check_ranges(self, "grid")


class Axis(NamedTuple):
    """Where the functions of a call section live, and how the loop calls them."""

    package: str
    lookup: Literal["file", "module", "package"]  # <package>.<fn>.<fn> | <package>.<fn> | <any module>.<fn>
    positional: int | None = None  # run-time arguments; None = differs from function to function
    skip: tuple[str, ...] = ()  # modules of the package that belong to another axis
    mix: str = ""  # key of the mixing weight
    mix_default: float | None = None  # None = must be given


AXES = {
    "model": Axis("flowrl.models", "file"),
    "plan": Axis("flowrl.samplers", "package", positional=1, skip=("rollout", "steps", "grids")),
    "transition": Axis("flowrl.transitions", "module", positional=5),
    "rewards": Axis("rewards", "file", mix="weight", mix_default=1.0),
    "transform": Axis("flowrl.credit.transforms", "module", positional=2),
    "aggregate": Axis("flowrl.credit.aggregate", "module", positional=2),
    "credit": Axis("flowrl.credit", "package", positional=3, skip=("transforms", "aggregate", "segments", "select")),
    "segment": Axis("flowrl.credit.segments", "module", positional=1),
    "select": Axis("flowrl.credit.select", "module", positional=1),
    "likelihood": Axis("flowrl.likelihood", "module"),
    "loss": Axis("flowrl.losses", "package", skip=("kl",)),
    "kl": Axis("flowrl.losses.kl", "module", positional=2, mix="beta"),
}


def _axis(key: str) -> Axis:
    """Return the axis of a call section: "plan", "rewards.shapes", "rewards.shapes.transform[0]", "select[1]"."""
    return AXES["transform" if re.fullmatch(r"rewards\.[\w-]+\.transform.*", key) else re.split(r"[.\[]", key)[0]]


SECTIONS: dict[str, type] = {
    "prompts": PromptsConfig,
    "image": ImageConfig,
    "train": TrainConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "grid": GridConfig,
}


@dataclass(frozen=True)
class Source:
    """Where values came from, for messages."""

    file: str = "config"
    overrides: tuple[str, ...] = ()

    def at(self, key: str) -> str:
        """Name the override that set `key`, or the file."""
        for text in reversed(self.overrides):
            name = text.partition("=")[0].strip()
            if key == name or key.startswith(name + "."):
                return f"override {text!r}: {key}"
        return f"{self.file}: {key}"


@dataclass(frozen=True)
class Call:
    """A function of one axis with its checked keyword arguments, defaults filled in."""

    key: str = field(compare=False)  # where it stands in the config: "plan", "rewards.shapes"; a list of one is one
    fn: str  # as written
    path: str  # as resolved: "flowrl.samplers.plans.random_window"
    kwargs: dict[str, Any]
    mix: float = 1.0  # the mixing weight: rewards' `weight`, kl's `beta`; 1 on other axes
    transform: tuple[Call, ...] = ()  # of a reward: what is done to its values, in this order
    function: Callable[..., Any] = field(default=lambda: None, compare=False, repr=False)

    @classmethod
    def bind(cls, key: str, raw: Any, *, source: Source | None = None, plugins: Sequence[str] = ()) -> Call:
        """Resolve and check one call section; `key` is the axis, or "rewards.<name>".

        Raises ConfigError for a path that is not allowed or cannot be imported, for unknown and missing arguments and
        for wrong types, with the nearest valid name.
        """
        source = source or Source()
        axis = _axis(key)
        if not isinstance(raw, dict) or not isinstance(raw.get("fn"), str):
            raise ConfigError(f"{source.at(key)}: expected a call like {{fn: name, argument: value}}, got {raw!r}")
        given = {name: value for name, value in raw.items() if name != "fn"}
        path, function = _resolve(axis, raw["fn"], source.at(f"{key}.fn"), plugins)
        mix, transform = 1.0, _transforms(key, given, source, plugins)
        if axis.mix:
            mix = _mixing_weight(axis, given.pop(axis.mix, axis.mix_default), source.at(f"{key}.{axis.mix}"))
        settable = _settable(function, everything=key == "model" or inspect.isclass(function))
        reserved = {"fn", axis.mix, *(["transform"] if axis is AXES["rewards"] else [])} & set(settable)
        if reserved:
            raise ConfigError(f"{path}: the parameter {reserved.pop()!r} has another meaning in a config; rename it")
        _check_switched(key, raw["fn"], given, settable, source)
        kwargs = _arguments(given, settable, key, path, source)
        _check_positional(axis, path, function, kwargs, source.at(key))
        return cls(key, raw["fn"], path, kwargs, mix, transform, function)

    def partial(self) -> functools.partial[Any]:
        """Return the function with its keyword arguments filled in."""
        return functools.partial(self.function, **copy.deepcopy(self.kwargs))

    def make(self) -> Any:
        """Return what the loop calls: an instance where `fn` is a class, the partial function otherwise."""
        return self.partial()() if inspect.isclass(self.function) else self.partial()

    def to_dict(self) -> dict[str, Any]:
        """Return the call as it would be written in YAML."""
        name = _axis(self.key).mix
        transform = {"transform": [call.to_dict() for call in self.transform]} if self.transform else {}
        return {"fn": self.fn, **({name: self.mix} if name else {}), **transform, **_plain(self.kwargs)}


@dataclass(frozen=True)
class Config:
    """A checked config file: everything that a run needs to know."""

    name: str  # of the run, letters, digits, "-", "_" and "."; names its folder
    model: Call
    prompts: PromptsConfig
    image: ImageConfig
    plan: Call
    transition: Call
    rewards: dict[str, Call]  # by name; the name is used in metrics
    credit: Call
    likelihood: Call
    loss: Call
    train: TrainConfig
    aggregate: Call = field(default_factory=lambda: Call.bind("aggregate", {"fn": "weighted_sum"}))
    seed: Seed = 0  # of everything random in training
    segment: Call | None = None  # which decisions move as one action
    select: tuple[Call, ...] = ()  # which decisions are trained, and how much each counts
    kl: Call | None = None
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    grid: GridConfig = field(default_factory=GridConfig)
    source: str = field(default="", compare=False)  # the file it came from
    plugins: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        where = self.source or "config"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise ConfigError(f"{where}: name: expected letters, digits, '-', '_' and '.', got {self.name!r}")
        if not self.rewards or not any(call.mix for call in self.rewards.values()):
            raise ConfigError(f"{where}: rewards: expected at least one reward whose weight is not 0")
        if self.eval.weights == "ema" and self.train.ema == 0:
            raise ConfigError(
                f"{where}: eval.weights is 'ema', but train.ema is 0 (off); set eval.weights to 'current'"
            )

        if self.eval.score and self.eval.score not in self.rewards:
            raise ConfigError(f"{where}: eval.score: {_unknown(self.eval.score, self.rewards, 'reward')}")

    @property
    def headline(self) -> str:
        """Return the name of the reward that evaluations report."""
        return self.eval.score or next(iter(self.rewards))

    def call(self, key: str) -> functools.partial[Any]:
        """Return the function of a call section ("plan", "rewards.shapes") with its keyword arguments filled in."""
        calls = {k: v for k, v in vars(self).items() if isinstance(v, Call)}
        calls |= {f"rewards.{name}": call for name, call in self.rewards.items()}
        if key not in calls:
            raise ConfigError(f"{self.source or 'config'}: there is no call {key!r}; there is {', '.join(calls)}")
        return calls[key].partial()

    @property
    def reward_weights(self) -> dict[str, float]:
        """Return the mixing weight of each reward."""
        return {name: call.mix for name, call in self.rewards.items()}

    @property
    def kl_beta(self) -> float:
        """Return the weight of the KL term; 0 without a `kl` section."""
        return self.kl.mix if self.kl else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config as plain data, in the order in which a file is written."""
        out: dict[str, Any] = {}
        order = ("name", "seed", "model", "prompts", "image", "plan", "transition", "rewards", "aggregate", "credit")
        rest = ("segment", "select", "likelihood", "loss", "kl", "train", "eval", "checkpoint", "grid")
        for key in (*order, *rest):
            value = getattr(self, key)
            if isinstance(value, Call):
                out[key] = value.to_dict()
            elif isinstance(value, tuple):
                out |= {key: [call.to_dict() for call in value]} if value else {}
            elif isinstance(value, dict):
                out[key] = {name: call.to_dict() for name, call in value.items()}
            elif value is not None:
                out[key] = _plain(vars(value)) if key in SECTIONS else value
        return out

    def dump(self) -> str:
        """Return YAML with every default filled in; it loads again to an equal config (name the same plugins)."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None)


def load_config(
    name_or_path: str | os.PathLike[str], overrides: Sequence[str] = (), plugins: Sequence[str] = ()
) -> Config:
    """Read, override and check a config.

    Args:
        name_or_path: a path, or the name of a shipped config: ``shapes/flow_grpo``.
        overrides: ``key.subkey=value`` with the value in YAML; null removes an optional section or a reward.
            Switching ``plan.fn`` keeps the arguments that the file gives; if some do not fit, the error says how to
            replace the whole call.
        plugins: top-level packages that dotted `fn` paths may name besides flowrl and rewards.
    Raises ConfigError that names the file or override, the dotted key, what was expected and what came.
    """
    path = _find(os.fspath(name_or_path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 config file: {error}") from error
    raw = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections like 'name:' and 'model:', got {_show(raw)}")
    for override in overrides:
        apply_override(raw, override)
    config = _build(raw, Source(str(path), tuple(overrides)), tuple(plugins))
    try:
        config.call("plan")(0)  # a window outside the steps is found here, not after the weights are loaded
    except Exception as error:  # also a helper or a plugin that is no plan, which may fail in any way
        kind = "" if isinstance(error, ConfigError) else f"{config.plan.path} failed with {type(error).__name__}: "
        raise ConfigError(f"{path}: plan: {kind}{error}") from error
    return config


def parse_yaml(text: str, where: str) -> Any:
    """Parse one YAML document into plain data; raise ConfigError for tags, anchors, duplicate or non-text keys."""
    try:
        return yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: not a config: nested too deeply") from error


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``key.subkey=value`` into (["key", "subkey"], value)."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise ConfigError(f"override {text!r}: expected key.subkey=value, for example train.lr=1e-4")
    return parts, parse_yaml(value, f"override {text!r}")


def apply_override(raw: dict[str, Any], text: str) -> None:
    """Set one value in the raw config, in place."""
    parts, value = parse_override(text)
    node = raw
    for depth, part in enumerate(parts[:-1], 1):
        if node.get(part) is None:
            node[part] = {}
        node = node[part]
        if not isinstance(node, dict):
            raise ConfigError(
                f"override {text!r}: {'.'.join(parts[:depth])} is {_show(node)} and has no keys of its own"
            )
    if value is None and parts[0] == "rewards" and len(parts) == 2:
        if parts[1] not in node:
            raise ConfigError(f"override {text!r}: {_unknown(parts[1], node, 'reward')}")
        del node[parts[1]]
    else:
        node[parts[-1]] = value


def convert(value: Any, hint: Any, where: str) -> Any:
    """Return `value` as the annotated type, or raise ConfigError with expected and got.

    A bool is no int, an int is a float, the text of a number is a number where one is expected.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    base = origin or hint
    if base in (Any, object, inspect.Parameter.empty):
        return value
    if base is Annotated:
        value = convert(value, args[0], where)
        for limit in args[1:]:
            if isinstance(limit, Range) and value is not None:
                limit.check(value, where)
        return value
    if base in (typing.Union, types.UnionType):
        return _convert_union(value, args, hint, where)
    if base is Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return value
        raise ConfigError(f"{where}: expected {describe(hint)}, got {_show(value)}{_near(value, map(str, args))}")
    if base in (list, tuple, collections.abc.Sequence):
        return _convert_sequence(value, base, args, hint, where)
    if base in (dict, collections.abc.Mapping) or typing.is_typeddict(base):
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected {describe(hint)}, got {_show(value)}")
        inner = args[1] if len(args) == 2 else Any
        return {name: convert(child, inner, f"{where}.{name}") for name, child in value.items()}
    return _convert_scalar(value, base, hint, where)


def describe(hint: Any) -> str:
    """Name a type in the words of someone who writes YAML."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(repr, args))
    if origin is Annotated:
        return describe(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(describe, args))
    if (origin or hint) in (list, tuple, collections.abc.Sequence):
        inner = [describe(arg) for arg in args if arg is not ...]
        return "a list" + (f" of {', '.join(inner)}" if inner else "")
    if (origin or hint) in (dict, collections.abc.Mapping) or typing.is_typeddict(hint):
        return "a mapping" + (f" to {describe(args[1])}" if len(args) == 2 else "")
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
    Path: "a path",
}
_YAML_TYPES = {*_WORDS, object, list, tuple, dict, collections.abc.Sequence, collections.abc.Mapping}
_YAML_TYPES |= {inspect.Parameter.empty}
_INT, _FLOAT = re.compile(r"[+-]?[0-9]+"), re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def _convert_union(value: Any, members: tuple[Any, ...], hint: Any, where: str) -> Any:
    exact = [m for m in members if (typing.get_origin(m) or m) is type(value)]  # so that "1" stays a text in int | str
    first: ConfigError | None = None
    for member in [*exact, *members]:
        try:
            return convert(value, member, where)
        except ConfigError as error:
            first = first or (error if exact else None)  # the exact member knows best what is wrong inside
    raise first or ConfigError(f"{where}: expected {describe(hint)}, got {_show(value)}")


def _convert_sequence(value: Any, base: Any, args: tuple[Any, ...], hint: Any, where: str) -> Any:
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: expected {describe(hint)}, got {_show(value)}")
    inner = [args[0] if args else Any] * len(value)
    if base is tuple and args and args[-1] is not ...:
        inner = list(args)
        if len(value) != len(inner):
            raise ConfigError(f"{where}: expected {len(inner)} values ({describe(hint)}), got {_show(value)}")
    out = [convert(child, kind, f"{where}[{n}]") for n, (child, kind) in enumerate(zip(value, inner, strict=True))]
    return tuple(out) if base is tuple else out


def _convert_scalar(value: Any, base: Any, hint: Any, where: str) -> Any:
    kind = type(value)
    if base is float and kind in (int, float, str):
        if (kind is not str or _FLOAT.fullmatch(value)) and not math.isnan(number := _to_float(value)):
            return number
    elif base is int and kind is str and _INT.fullmatch(value) and len(value) < 100:
        return int(value)
    elif base is Path and isinstance(value, str | Path):
        return Path(value)
    elif base in (int, str, bool) and kind is base:
        return value
    elif base in (None, type(None)) and value is None:
        return None
    elif base not in (int, float, str, bool, Path, None, type(None)):
        raise ConfigError(f"{where}: a value of type {describe(hint)} cannot be written in a config; leave it out")
    raise ConfigError(f"{where}: expected {describe(hint)}, got {_show(value)}")


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan


class _StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader without duplicate keys (the last one would win) and without aliases (which can explode)."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not allowed; write it out", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            problem = f"duplicate key {key!r}" if isinstance(key, str) and key in seen else ""
            if not isinstance(key, str):
                problem = f"expected a text as key, got {key!r}"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or os.path.isfile(name):
        return resource(name)
    shipped = name.removeprefix("configs/")
    if shipped in list_configs():
        return resource(f"configs/{shipped}.yaml")
    raise ConfigError(f"{_unknown(shipped, list_configs(), 'config')}; a file of your own must end in .yaml")


def _build(raw: dict[str, Any], source: Source, plugins: tuple[str, ...]) -> Config:
    known = [f.name for f in fields(Config) if f.name not in ("source", "plugins")]
    for key in raw:
        if key not in known:
            made = [text for text in source.overrides if text.lstrip().startswith(f"{key}.")]
            where = f"override {made[0]!r}: {key}" if made else source.at(key)
            raise ConfigError(f"{where}: {_unknown(key, known, 'section')}")
    raw = {key: value for key, value in raw.items() if value is not None}
    required = {f.name for f in fields(Config) if f.default is f.default_factory}  # both are MISSING
    missing = [key for key in known if key in required and key not in raw]
    if missing:
        raise ConfigError(f"{source.file}: missing section{'s' * (len(missing) > 1)}: {', '.join(missing)}")
    built: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "rewards":
            built[key] = _rewards(value, source, plugins)
        elif key == "select":
            built[key] = _listed(key, value, source, plugins)
        elif key in AXES:
            built[key] = Call.bind(key, value, source=source, plugins=plugins)
        elif key in SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(f"{source.at(key)}: expected keys and values, got {_show(value)}")
            section = SECTIONS[key]
            built[key] = section(**_arguments(value, _settable(section, everything=True), key, key, source))
        else:
            built[key] = convert(value, {"name": str, "seed": Seed}[key], source.at(key))
    return Config(**built, source=source.file, plugins=plugins)


def _transforms(key: str, given: dict[str, Any], source: Source, plugins: Sequence[str]) -> tuple[Call, ...]:
    """Take a reward's `transform` out of its arguments and bind it."""
    if _axis(key) is not AXES["rewards"] or given.get("transform") is None:
        given.pop("transform", None)
        return ()
    return _listed(f"{key}.transform", given.pop("transform"), source, plugins)


def _listed(key: str, raw: Any, source: Source, plugins: Sequence[str]) -> tuple[Call, ...]:
    """Bind one call or a list of calls."""
    rows = [(f"{key}[{n}]", call) for n, call in enumerate(raw)] if isinstance(raw, list) else [(key, raw)]
    return tuple(Call.bind(name, call, source=source, plugins=plugins) for name, call in rows)


def _rewards(raw: Any, source: Source, plugins: tuple[str, ...]) -> dict[str, Call]:
    if not isinstance(raw, dict):
        raise ConfigError(f"{source.at('rewards')}: expected names with a call each, got {_show(raw)}")
    for name in raw:
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"{source.at('rewards')}: expected a name of letters, digits, - and _, got {name!r}")
    return {n: Call.bind(f"rewards.{n}", call, source=source, plugins=plugins) for n, call in raw.items()}


def _resolve(axis: Axis, fn: str, where: str, plugins: Sequence[str]) -> tuple[str, Callable[..., Any]]:
    if not re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*", fn, re.ASCII):
        raise ConfigError(f"{where}: expected the name of a function, got {fn!r}")
    if "." in fn:
        top = fn.partition(".")[0]
        inside = ".".join(axis.package.split(".")[:2]) + "."
        if top not in plugins and not fn.startswith(inside):
            raise ConfigError(
                f"{where}: {fn!r} is neither in {inside[:-1]} nor in a package that you allowed; "
                f"if you trust {top!r}, allow it with --plugin {top}"
            )
        module, _, name = fn.rpartition(".")
        found = _functions(module, where, package=top if top in plugins else module)
        if name not in found:
            raise ConfigError(f"{where}: {module} {_unknown(name, found, 'public function of its own')}")
        return fn, found[name]
    if axis.lookup == "file":
        files = _modules(axis.package, where)
        if fn not in files:
            raise ConfigError(f"{where}: {axis.package} {_unknown(fn, files, 'file')}")
        modules = [f"{axis.package}.{fn}"]
    elif axis.lookup == "module":
        modules = [axis.package]
    else:
        modules = [f"{axis.package}.{name}" for name in _modules(axis.package, where) if name not in axis.skip]
    offers = {f"{module}.{n}": f for module in modules for n, f in _functions(module, where, module).items()}
    hits = [path for path in offers if path.rpartition(".")[2] == fn]
    if len(hits) > 1:
        raise ConfigError(f"{where}: {fn!r} is ambiguous; write {' or '.join(hits)}")
    if not hits:
        names = [path.rpartition(".")[2] for path, function in offers.items() if _fits(axis, function)]
        raise ConfigError(f"{where}: {axis.package} {_unknown(fn, names, 'function')}")
    return hits[0], offers[hits[0]]


def _import(module: str, where: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a plugin may fail in any way while it is imported
        raise ConfigError(f"{where}: cannot import {module}: {type(error).__name__}: {error}") from error


def _modules(package: str, where: str) -> list[str]:
    paths = getattr(_import(package, where), "__path__", [])
    return [info.name for info in pkgutil.iter_modules(paths) if not info.name.startswith("_")]


def _functions(module: str, where: str, package: str) -> dict[str, Callable[..., Any]]:
    # Only what `package` defines: through its imports a module would offer half of Python to a config.
    out: dict[str, Callable[..., Any]] = {}
    for name, thing in vars(_import(module, where)).items():
        home = str(getattr(thing, "__module__", ""))
        if callable(thing) and not name.startswith("_") and (home == package or home.startswith(package + ".")):
            out[name] = thing
    return out


def _settable(function: Callable[..., Any], *, everything: bool) -> dict[str, inspect.Parameter]:
    """Return the parameters that a config may set, with evaluated annotations (a text where that is impossible)."""
    kinds = [inspect.Parameter.KEYWORD_ONLY, *([inspect.Parameter.POSITIONAL_OR_KEYWORD] if everything else [])]
    names = vars(sys.modules[inspect.unwrap(function).__module__])
    out = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = _evaluated(parameter.annotation, names)
        if parameter.kind in kinds and _writable(hint):
            out[name] = parameter.replace(annotation=hint)
    return out


def _evaluated(annotation: Any, names: dict[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"it": annotation})
    try:
        return typing.get_type_hints(holder, names, include_extras=True)["it"]
    except (NameError, AttributeError):  # only a type checker can see that name; the value stays unchecked
        return annotation


def _writable(hint: Any) -> bool:
    """Say whether a config can hold the type; a keyword like ``segment: Tensor | None`` belongs to the loop."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType, Annotated):
        return all(map(_writable, args[:1] if origin is Annotated else args))
    return not inspect.isclass(origin or hint) or (origin or hint) in _YAML_TYPES or typing.is_typeddict(hint)


def _arguments(
    given: Mapping[str, Any], settable: Mapping[str, inspect.Parameter], key: str, owner: str, source: Source
) -> dict[str, Any]:
    for name in given:
        if name not in settable:
            raise ConfigError(f"{source.at(f'{key}.{name}')}: {owner} {_unknown(name, settable, 'argument')}")
    out: dict[str, Any] = {}
    missing: list[str] = []
    for name, parameter in settable.items():
        hint = Any if isinstance(parameter.annotation, str) else parameter.annotation
        if name in given:
            out[name] = _value(given[name], parameter.default, hint, source.at(f"{key}.{name}"))
        elif parameter.default is inspect.Parameter.empty:
            missing.append(name)
        else:
            try:
                _plain(parameter.default)
                out[name] = _value(parameter.default, parameter.default, hint, "")
            except TypeError:
                continue  # a default that YAML cannot hold stays with the function
    if missing:
        raise ConfigError(f"{source.at(key)}: {owner} needs {' and '.join(missing)}; it takes {', '.join(settable)}")
    return out


def _value(value: Any, default: Any, hint: Any, where: str) -> Any:
    try:
        return convert(value, hint, where)
    except ConfigError:
        # A default may break its own annotation (`size: int = None`); what dump() writes must still load.
        plain = list(default) if isinstance(default, tuple) else default
        if value is default or (type(value) is type(plain) and value == plain):
            return copy.deepcopy(default)
        raise


def _mixing_weight(axis: Axis, value: Any, where: str) -> float:
    if value is None:
        raise ConfigError(f"{where}: missing; expected the weight that the training loop gives this term")
    low = 0.0 if axis.mix == "beta" else Finite.low  # a reward may count against the picture, a KL may not
    return float(convert(value, Annotated[float, Range(low, Finite.high)], where))


def _check_switched(key: str, fn: str, given: dict[str, Any], settable: Mapping[str, Any], source: Source) -> None:
    names = [text.partition("=")[0].strip() for text in source.overrides]
    stale = [name for name in given if name not in settable and f"{key}.{name}" not in names]
    if stale and f"{key}.fn" in names:
        kept = {"fn": fn, **{name: value for name, value in given.items() if name in settable}}
        call = yaml.safe_dump(kept, default_flow_style=True, sort_keys=False, width=10**6).strip()
        raise ConfigError(
            f"{source.at(f'{key}.fn')}: {fn} does not take {', '.join(stale)} of the call that it replaces "
            f"(it takes {', '.join(settable) or 'no arguments'}); replace the whole call: {key}='{call}'"
        )


def _fits(axis: Axis, function: Callable[..., Any]) -> bool:
    """Say whether a function is worth offering: helpers that live in the same file take other arguments."""
    if axis.positional is None:
        return True
    kinds = [parameter.kind for parameter in inspect.signature(_called(function)).parameters.values()]
    positional = [kind for kind in kinds if kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return len(positional) == axis.positional + inspect.isclass(function)


def _called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the loop calls: a class is made once and its instance called."""
    return vars(function).get("__call__", lambda: None) if inspect.isclass(function) else function


def _check_positional(axis: Axis, path: str, function: Callable[..., Any], kwargs: dict[str, Any], where: str) -> None:
    if axis.positional is None:
        return
    made = inspect.isclass(function)
    try:
        inspect.signature(_called(function)).bind(*[None] * (axis.positional + made), **({} if made else kwargs))
    except TypeError as error:
        raise ConfigError(
            f"{where}: {path} does not belong here: it is called with {axis.positional} positional arguments, "
            f"but is {path.rpartition('.')[2]}{inspect.signature(function)}"
        ) from error


def _check_ranges(section: Any, key: str) -> None:
    for name, hint in typing.get_type_hints(type(section), include_extras=True).items():
        convert(getattr(section, name), hint, f"{key}.{name}")


def _plain(value: Any) -> Any:
    """Copy into what YAML can hold and compare; raise TypeError for anything else."""
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise TypeError("keys must be text")
        return {name: _plain(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(child) for child in value]
    if isinstance(value, Path):
        return str(value)
    if type(value) not in (str, int, float, bool, type(None)) or value != value:
        raise TypeError(f"{value!r} cannot be written in YAML")
    return value


def _unknown(name: str, known: Sequence[str] | Mapping[str, Any], kind: str) -> str:
    listed = ", ".join(sorted(known)) or "none"
    return f"has no {kind} {name!r}{_near(name, known)} (there is: {listed})"


def _near(name: Any, known: typing.Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({_WORDS.get(type(value), type(value).__name__)})"
