"""Turn a YAML file into checked calls and sections, before any weight is loaded.

A method *is* such a list of named calls (`flowrl.config.calls`, `flowrl.config.axes`). Numbers of
the run stand in plain sections (`flowrl.config.sections`). What is wrong is collected, so that one
message has all mistakes. Duplicate keys and YAML anchors are errors.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from flowrl.config.absent_rewards import check_reward_name, reward_call
from flowrl.config.agreement import disagreements
from flowrl.config.axes import AXES
from flowrl.config.calls import Call, bind_all
from flowrl.config.mistakes import Collector, renamed, unknown_section
from flowrl.config.monitors import MonitorsConfig
from flowrl.config.overrides import Source, apply_override, tuple_of_texts
from flowrl.config.section import Section, Seed
from flowrl.config.section_values import make_section
from flowrl.config.sections import (
    SECTIONS,
    CheckpointConfig,
    EvalConfig,
    ImageConfig,
    PromptsConfig,
    SamplesConfig,
    ScoutConfig,
    TrainConfig,
)
from flowrl.config.values import convert, show
from flowrl.config.yaml_text import parse_yaml
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import config_file, resource

ORDER = (
    *("name", "seed", "model", "prompts", "sampler", "image", "plan", "transition", "rewards"),
    *("aggregate", "credit", "segment", "select", "likelihood", "loss", "kl", "old", "slow"),
    *("fake", "surrogate", "optimizer", "parts"),
    *("train", "scout", "eval", "checkpoint", "samples", "monitors"),
)
"""The sections, in the order in which a file is written."""


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
    optimizer: Call = field(default_factory=lambda: Call.bind("optimizer", {}))
    seed: Seed = 0  # of everything random in training
    segment: Call | None = None  # which decisions share one ratio
    select: tuple[Call, ...] = ()  # which decisions are trained, and how much each counts
    kl: Call | None = None
    old: Call | None = None  # how slowly the policy that samples follows; None: the current one
    slow: Call | None = None  # how slowly a copy follows that only loss or kl look at
    fake: Call | None = None  # a model that is trained along: of what the policy generates
    surrogate: Call | None = None  # a model that is trained along: of what is rewarded
    parts: dict[str, Call] = field(default_factory=dict)  # of a user's own, by name
    scout: ScoutConfig = field(default_factory=ScoutConfig)
    sampler: Call | None = None  # which prompts an iteration gets; None: shuffled epochs
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    source: str = field(default="", compare=False)  # the file it came from
    overrides: tuple[str, ...] = field(default=(), compare=False)  # of the command line
    plugins: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        found = Collector()
        found.lines += disagreements(vars(self), Source(self.source or "config", self.overrides).at)
        found.close()

    @property
    def headline(self) -> str:
        """Return the name of the reward that evaluations report."""
        return self.eval.score or next(iter(self.rewards))

    @property
    def eval_size(self) -> tuple[int, int]:
        """Return height and width of evaluated images, in pixels."""
        return self.eval.height or self.image.height, self.eval.width or self.image.width

    @property
    def lr(self) -> float:
        """Return the learning rate after warm-up."""
        return float(self.optimizer.kwargs["lr"])

    @property
    def reward_weights(self) -> dict[str, float]:
        """Return the mixing weight of each reward."""
        return {name: call.mix for name, call in self.rewards.items()}

    @property
    def kl_beta(self) -> float:
        """Return the weight of the KL term; 0 without a `kl` section."""
        return self.kl.mix if self.kl else 0.0

    def call(self, key: str) -> functools.partial[Any]:
        """Return the function of a call section ("plan", "rewards.shapes") with its keyword
        arguments filled in; a `seed` that is null is the run's."""
        calls = {k: v for k, v in vars(self).items() if isinstance(v, Call)}
        calls |= {f"rewards.{name}": call for name, call in self.rewards.items()}
        calls |= {f"parts.{name}": call for name, call in self.parts.items()}
        if key not in calls:
            where = self.source or "config"
            raise ConfigError(f"{where}: there is no call {key!r}; there is {', '.join(calls)}")
        return _filled(calls[key], self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config as plain data, in the order in which a file is written."""
        out: dict[str, Any] = {}
        for key in ORDER:
            value = getattr(self, key)
            if isinstance(value, Call):
                out[key] = value.to_dict()
            elif isinstance(value, tuple):
                out |= {key: [call.to_dict() for call in value]} if value else {}
            elif isinstance(value, dict):
                calls = {name: call.to_dict() for name, call in value.items()}
                out |= {key: calls} if calls else {}
            elif value is not None:
                out[key] = value.to_dict() if isinstance(value, Section) else value
        return out

    def dump(self) -> str:
        """Return YAML with every default filled in; it loads again to an equal config (name the
        same plugins)."""
        return yaml.safe_dump(
            self.to_dict(), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
        )


_DEFAULTS = {f.name: f.default_factory for f in fields(Config) if callable(f.default_factory)}
REQUIRED = [f.name for f in fields(Config) if f.default is f.default_factory is MISSING]


def load_config(
    name_or_path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    *,
    need_rewards: bool = True,
) -> Config:
    """Read, override and check a config.

    Args:
        name_or_path: a path, or the name of a shipped config: ``shapes/flow_grpo``.
        overrides: ``key.subkey=value`` with the value in YAML; null removes an optional section or
            a reward. Switching ``plan.fn`` keeps the arguments that the file gives; if some do not
            fit, the error says how to replace the whole call.
        plugins: top-level packages that dotted `fn` paths may name besides flowrl and rewards.
        need_rewards: without it a reward that cannot be found is an error only where it is made.
    Raises ConfigError with all mistakes: each with the file or override, the dotted key, what was
    expected and what came.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        expected = "expected the name of a shipped config or the path of a YAML file"
        raise ConfigError(f"{expected}, got {show(name_or_path)}")
    overrides, plugins = tuple_of_texts(overrides, "overrides"), tuple_of_texts(plugins, "plugins")
    path = _find(os.fspath(name_or_path))
    raw, found = _read(path), Collector()
    for override in overrides:
        with found.catch():
            apply_override(raw, override)
    with found.catch():
        source = Source(str(path), overrides)
        config = build_config(raw, source, plugins, need_rewards)
    found.close()
    return config


def _find(name: str) -> Path:
    if name.endswith((".yaml", ".yml")) or os.path.isfile(name):
        return resource(name)
    return config_file(name)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 config file: {error}") from error
    raw = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected sections like 'name:' and 'model:', got {show(raw)}")
    return raw


def build_config(
    raw: dict[str, Any], source: Source, plugins: tuple[str, ...], need_rewards: bool = True
) -> Config:
    """Check all sections of a config that was read. Raises Mistakes with those of all of them."""
    found = Collector()
    built: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in ORDER:
            says = renamed(key) or unknown_section(key, ORDER, raw, SECTIONS)
            found.add(f"{source.below(key)}: {says}")
        elif value is not None:  # null leaves a section out
            with found.catch():
                if key == "rewards":
                    built[key] = _rewards(value, source, plugins, need_rewards)
                elif key == "parts":
                    built[key] = _parts(value, source, plugins)
                else:
                    built[key] = _section(key, value, source, plugins)
    missing = [key for key in REQUIRED if raw.get(key) is None]
    if missing:
        plural = "s" * (len(missing) > 1)
        found.add(f"{source.file}: missing section{plural}: {', '.join(missing)}")
    # a window outside the steps is found here, not after the weights are loaded
    if "plan" in built:
        with found.catch():
            _try_plan(built["plan"], built.get("seed", 0), source.below("plan"))
    # the config itself compares its sections; beside other mistakes those that are right
    if found.lines:
        absent = {key: make() for key, make in _DEFAULTS.items() if raw.get(key) is None}
        wrong = {key: value for key, value in raw.items() if key == "kl"}
        found.lines += disagreements(absent | wrong | built, source.at)
    found.close()
    return Config(**built, source=source.file, overrides=source.overrides, plugins=plugins)


def _section(key: str, value: Any, source: Source, plugins: tuple[str, ...]) -> Any:
    if key == "select":
        return bind_all(key, value, source, plugins)
    if key in AXES:
        return Call.bind(key, value, source=source, plugins=plugins)
    if key not in SECTIONS:
        return convert(value, {"name": str, "seed": Seed}[key], key, source.at)
    return make_section(SECTIONS[key], value, key, source)


def _rewards(raw: Any, source: Source, plugins: tuple[str, ...], needed: bool) -> dict[str, Call]:
    if not isinstance(raw, dict):
        where = source.at("rewards")
        raise ConfigError(f"{where}: expected names with a call each, got {show(raw)}")
    found, calls = Collector(), {}
    for name, call in raw.items():
        with found.catch():
            check_reward_name(name, source.at("rewards"))
            key = f"rewards.{name}"
            calls[name] = reward_call(key, call, source, plugins, needed=needed)
    found.close()
    return calls


def _parts(raw: Any, source: Source, plugins: tuple[str, ...]) -> dict[str, Call]:
    if not isinstance(raw, dict):
        where = source.at("parts")
        raise ConfigError(f"{where}: expected names with a call each, got {show(raw)}")
    found, calls = Collector(), {}
    for name, call in raw.items():
        with found.catch():
            calls[name] = Call.bind(f"parts.{name}", call, source=source, plugins=plugins)
    found.close()
    return calls


def _filled(call: Call, seed: int) -> functools.partial[Any]:
    """Return the function of a call with its arguments; a `seed` that is null is the run's."""
    called, own = call.partial(), call.kwargs.get("seed", 0)
    return called if own is not None else functools.partial(called, seed=seed)


def _try_plan(plan: Call, seed: int, where: str) -> None:
    try:
        _filled(plan, seed)(0)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # a helper or a plugin that is no plan may fail in any way
        kind = f"{plan.path} failed with {type(error).__name__}"
        raise ConfigError(f"{where}: {kind}: {error}") from error
