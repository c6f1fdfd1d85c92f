"""Turn a YAML file into a checked config, before any weight is loaded.

A method *is* a list of named calls (`flowrl.config.calls`, `flowrl.config.axes`). Numbers of the
run stand in plain sections (`flowrl.config.sections`). What is wrong is collected, so that one
message has all mistakes; `disagreements` says what sections must agree on after each was checked by
itself.

Rewards that are not at hand are an error where they are made, and no trouble before, so that a run
can be sampled and exported without them. A model trained on small images may be judged on large
ones (PaCo-RL, 2512.04784): `check_eval_size`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flowrl.config.axes import AXES
from flowrl.config.calls import (
    Call,
    bind_all,
    check_reward_name,
    model_call,
    part_call,
    reward_call,
)
from flowrl.config.overrides import (
    Source,
    apply_override,
    dotted,
    override_texts,
    parse_yaml,
    tuple_of_texts,
)
from flowrl.config.section import Section, Seed, make_section
from flowrl.config.sections import (
    SECTIONS,
    CheckpointConfig,
    EvalConfig,
    ImageConfig,
    MonitorsConfig,
    PromptsConfig,
    SamplesConfig,
    ScoutConfig,
    TrainConfig,
)
from flowrl.config.values import Collector, convert, plain, show
from flowrl.core.errors import ConfigError, FlowRLError, unknown
from flowrl.core.shipped_files import config_file, resource

if TYPE_CHECKING:
    from flowrl.core.types import FlowModel

ORDER = (
    *("name", "seed", "model", "prompts", "sampler", "image", "plan", "transition", "rewards"),
    *("aggregate", "credit", "segment", "select", "likelihood", "loss", "kl", "old", "slow"),
    *("fake", "surrogate", "optimizer", "parts"),
    *("train", "scout", "eval", "checkpoint", "samples", "monitors"),
)
"""The sections, in the order in which a file is written."""

MOST_DRAWN = 100_000  # of one prompt: they are decoded together
MOST_IMAGES = 10**8  # of one evaluation: their scores are held in memory
REPORT_KEYS = {
    *("score", "interval", "images", "tasks", "seen", "held_out", "rewards", "setting"),
    *("outcomes", "unscored", "by_prompt", "iteration", "drift", "marks"),
    *("budget", "nfe", "seconds"),
}
"""Keys of an evaluation's line, which the headline reward cannot be named like."""

_MOST_MEANT = 3  # keys of sections that are named for one that stands alone
_NO_VALUE = "(none)"
_FORMS = (
    "expected the name of a shipped config, the path of a YAML file, a mapping of sections or a "
    "Config"
)


@dataclass(frozen=True, repr=False)
class Config:
    """A checked config file: everything that a run needs to know.

    Change one with `replace`; ``print(config.dump())`` shows all of it.
    """

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
        for kind, named in (("rewards", self.rewards), ("parts", self.parts)):
            for name, call in named.items():
                calls[f"{kind}.{name}"] = call
        if key not in calls:
            where = self.source or "config"
            raise ConfigError(f"{where}: there is no call {key!r}; there is {', '.join(calls)}")
        return _filled(calls[key], self.seed)

    def to_dict(self) -> dict[str, Any]:
        """Return the resolved config as plain data, in the order in which a file is written."""
        out: dict[str, Any] = {}
        for key in ORDER:
            value = getattr(self, key)
            if isinstance(value, Call | Section):
                out[key] = value.to_dict()
            elif isinstance(value, tuple):
                if value:
                    out[key] = [call.to_dict() for call in value]
            elif isinstance(value, dict):
                if value:
                    out[key] = {name: call.to_dict() for name, call in value.items()}
            elif value is not None:
                out[key] = value
        return out

    def replace(self, *overrides: str, **sections: Any) -> Config:
        """Return the config with other values, checked: ``config.replace(train={"iterations": 20},
        seed=3)``, or texts as on the command line, ``config.replace("train.iterations=20")``.

        What a section does not name stays; a section with its `fn` is replaced as a whole. Objects
        that a program handed over stay. Raises ConfigError as `load_config` does.
        """
        return load_config(self, [*overrides, *override_texts(sections)])

    def __repr__(self) -> str:
        """Name what tells configs apart."""
        model, path = self.model.fn, self.model.kwargs.get("path")
        if path:
            model += f" {path}"
        return (
            f"Config({self.name!r}: model {model}, rewards {', '.join(self.rewards)}, "
            f"{self.train.iterations} iterations of {self.train.prompts} x {self.train.group} "
            f"images, seed {self.seed})"
        )

    def dump(self) -> str:
        """Return YAML with every default filled in; it loads again to an equal config (name the
        same plugins)."""
        return yaml.safe_dump(
            self.to_dict(), sort_keys=False, allow_unicode=True, width=120, default_flow_style=None
        )


_DEFAULTS = {f.name: f.default_factory for f in fields(Config) if callable(f.default_factory)}
REQUIRED = [f.name for f in fields(Config) if f.default is f.default_factory is MISSING]


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    overrides: Sequence[str] = (),
    plugins: Sequence[str] = (),
    *,
    need_rewards: bool = True,
) -> Config:
    """Read, override and check a config.

    Args:
        config: a path, the name of a shipped config (``shapes/flow_grpo``), a mapping of all
            sections as YAML would give it, or a config, whose plugins and Python objects stay.
        overrides: ``key.subkey=value`` with the value in YAML; null removes an optional section or
            a reward. Switching ``plan.fn`` keeps the arguments that the file gives; if some do not
            fit, the error says how to replace the whole call.
        plugins: top-level packages that dotted `fn` paths may name besides flowrl and rewards.
        need_rewards: without it a reward that cannot be found is an error only where it is made.
    Raises ConfigError with all mistakes: each with the file or override, the dotted key, what was
    expected and what came.
    """
    overrides, plugins = tuple_of_texts(overrides, "overrides"), tuple_of_texts(plugins, "plugins")
    raw, source, before = _raw(config)
    found = Collector()
    for override in overrides:
        with found.catch():
            apply_override(raw, override)
    if before is not None:
        plugins = tuple(dict.fromkeys([*before.plugins, *plugins]))
    with found.catch():
        source = replace(source, overrides=(*source.overrides, *overrides))
        built = build_config(raw, source, plugins, need_rewards, before)
    found.close()
    return built


def _raw(config: Any) -> tuple[dict[str, Any], Source, Config | None]:
    """Return a config's sections as plain data of our own, where they are from, and the config
    itself if it is one. Raises ConfigError for what is no config."""
    if isinstance(config, Config):
        return config.to_dict(), Source(config.source or "config", config.overrides), config
    if isinstance(config, Mapping):
        try:
            return dict(plain({**config})), Source(getattr(config, "source", "config")), None
        except TypeError as error:
            raise ConfigError(f"config: {error}; {_FORMS}") from error
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"{_FORMS}, got {show(config)}")
    path = _find(os.fspath(config))
    return _read(path), Source(str(path)), None


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
    raw: dict[str, Any],
    source: Source,
    plugins: tuple[str, ...],
    need_rewards: bool = True,
    before: Config | None = None,
) -> Config:
    """Check all sections of a config that was read; Python objects are those of `before`. Raises
    Mistakes with those of all of them."""
    found = Collector()
    built: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in ORDER:
            says = _unknown_section(key, raw)
            found.add(f"{source.below(key)}: {says}")
        elif value is not None:  # null leaves a section out
            with found.catch():
                if key == "rewards":
                    kept = before.rewards if before else {}
                    built[key] = _rewards(value, source, plugins, need_rewards, kept)
                elif key == "model":
                    model = before.model if before else None
                    built[key] = model_call(value, source, plugins, model)
                elif key == "parts":
                    built[key] = _parts(value, source, plugins, before.parts if before else {})
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
        beside = {key: make() for key, make in _DEFAULTS.items() if raw.get(key) is None}
        if "kl" in raw:
            beside["kl"] = raw["kl"]
        found.lines += disagreements(beside | built, source.at)
    found.close()
    return Config(**built, source=source.file, overrides=source.overrides, plugins=plugins)


def _unknown_section(key: str, raw: Mapping[str, Any]) -> str:
    """Say that a config has no such section; a few sections that have a key of that name are named
    in place of all sections."""
    owners = [name for name in ORDER if isinstance(raw.get(name), dict) and key in raw[name]]
    for name, section in SECTIONS.items():
        if key in {each.name for each in fields(section)}:
            owners.append(name)
    meant = [f"{name}.{key}" for name in dict.fromkeys(owners)]
    if 0 < len(meant) <= _MOST_MEANT:
        return f"the config has no section {key!r}; did you mean {' or '.join(meant)}?"
    return f"the config {unknown(key, ORDER, 'section')}"


def _section(key: str, value: Any, source: Source, plugins: tuple[str, ...]) -> Any:
    if key == "select":
        return bind_all(key, value, source, plugins)
    if key in AXES:
        return Call.bind(key, value, source=source, plugins=plugins)
    if key not in SECTIONS:
        return convert(value, {"name": str, "seed": Seed}[key], key, source.at)
    return make_section(SECTIONS[key], value, key, source)


def _rewards(
    raw: Any,
    source: Source,
    plugins: tuple[str, ...],
    needed: bool,
    before: Mapping[str, Call],
) -> dict[str, Call]:
    if not isinstance(raw, dict):
        where = source.at("rewards")
        raise ConfigError(f"{where}: expected names with a call each, got {show(raw)}")
    found, calls = Collector(), {}
    for name, call in raw.items():
        with found.catch():
            check_reward_name(name, source.at("rewards"))
            key = f"rewards.{name}"
            calls[name] = reward_call(key, call, source, plugins, needed=needed, before=before)
    found.close()
    return calls


def _parts(
    raw: Any, source: Source, plugins: tuple[str, ...], before: Mapping[str, Call]
) -> dict[str, Call]:
    if not isinstance(raw, dict):
        where = source.at("parts")
        raise ConfigError(f"{where}: expected names with a call each, got {show(raw)}")
    found, calls = Collector(), {}
    for name, call in raw.items():
        with found.catch():
            calls[name] = part_call(f"parts.{name}", call, source, plugins, before)
    found.close()
    return calls


def _filled(call: Call, seed: int) -> functools.partial[Any]:
    """Return the function of a call with its arguments; a `seed` that is null is the run's."""
    called = call.partial()
    if call.kwargs.get("seed", 0) is None:
        called = functools.partial(called, seed=seed)
    return called


def _try_plan(plan: Call, seed: int, where: str) -> None:
    try:
        _filled(plan, seed)(0)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:  # a helper or a plugin that is no plan may fail in any way
        kind = f"{plan.path} failed with {type(error).__name__}"
        raise ConfigError(f"{where}: {kind}: {error}") from error


def disagreements(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    """Return what is wrong between the sections that are there; a section that is missing, or that
    is wrong by itself, is compared with nothing. at: a key -> where its value came from."""
    return [
        *_wrong_names(built, at),
        *_wrong_training(built, at),
        *_wrong_headline(built, at),
        *_drawn_too_many(built, at),
    ]


def _wrong_names(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    said, name, rewards = [], built.get("name"), built.get("rewards")
    if name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        said.append(f"{at('name')}: expected letters, digits, '-', '_' and '.', got {name!r}")
    if rewards is not None and not any(call.mix for call in rewards.values()):
        said.append(f"{at('rewards')}: expected at least one reward whose weight is not 0")
    return said


def _wrong_training(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    said, optimizer, monitors = [], built.get("optimizer"), built.get("monitors")
    evaluation, train = built.get("eval"), built.get("train")
    # averaged weights are evaluated, but nothing averages
    averaged = evaluation is not None and evaluation.weights == "ema"
    if averaged and train is not None and train.ema == 0:
        mend = "set eval.weights to 'current'"
        both = "eval.weights is 'ema', but train.ema is 0 (off)"
        said.append(f"{at('train.ema')}: {both}; {mend}")
    # the warm-up sets the learning rate of every step
    if optimizer is not None and "lr" not in optimizer.kwargs:
        lacks = f"{optimizer.path} has no argument 'lr', which the warm-up sets"
        said.append(f"{at('optimizer')}: {lacks}")
    # monitors that change the weight of a KL need one
    if monitors is not None and built.get("kl") is None:
        asking = monitors.asks_for("raise_kl")
        if monitors.adaptive_kl:
            asking.append("adaptive_kl")
        for name in asking:
            said.append(f"{at(f'monitors.{name}')}: needs a kl section, whose weight it changes")
    return said


def _drawn_too_many(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    evaluation = built.get("eval")
    if evaluation is None or evaluation.images * evaluation.best_of <= MOST_DRAWN:
        return []
    product = f"{evaluation.images:,} x eval.best_of {evaluation.best_of:,}"
    return [
        f"{at('eval.images')}: expected at most {MOST_DRAWN:,} images drawn of a prompt, got "
        f"{product}"
    ]


def _wrong_headline(built: Mapping[str, Any], at: Callable[[str], str]) -> list[str]:
    said: list[str] = []
    evaluation, rewards = built.get("eval"), built.get("rewards")
    if evaluation is None or rewards is None:
        return said
    score = evaluation.score or next(iter(rewards), "")
    if evaluation.score and evaluation.score not in rewards:
        says = unknown(evaluation.score, rewards, "reward")
        said.append(f"{at('eval.score')}: the config {says}")
    elif score in REPORT_KEYS:
        taken = f"{score!r} is a key of an evaluation's line; name the reward otherwise"
        said.append(f"{at('rewards')}: {taken}, or let eval.score name another")
    if evaluation.best_by and evaluation.best_by not in rewards:
        says = unknown(evaluation.best_by, rewards, "reward")
        said.append(f"{at('eval.best_by')}: the config {says}")
    return said


def check_eval_count(config: Config, prompts: int) -> None:
    """Raise ConfigError if an evaluation of so many prompts would draw more images than can be."""
    images, best_of = config.eval.images, config.eval.best_of
    drawn = images * best_of * prompts
    if drawn > MOST_IMAGES:
        of_each = f"{images:,} images"
        if best_of > 1:
            of_each += f", each the best of {best_of:,},"
        raise ConfigError(
            f"eval.images, eval.best_of: {of_each} of each of {prompts:,} prompts are {drawn:,} to "
            f"draw, and an evaluation draws at most {MOST_IMAGES:,}"
        )


def check_eval_size(model: FlowModel, config: Config) -> None:
    """Raise ConfigError if the images that are evaluated have another size than those that are
    trained on, and the model cannot make both."""
    height, width = config.eval_size
    if (height, width) == (config.image.height, config.image.width):
        return
    # learned noise has the shape of the latents that it was learned with
    if hasattr(model, "initial_log_prob"):
        raise ConfigError(
            f"eval.height, eval.width: {height} x {width} is another size than image's, but "
            f"likelihood {config.likelihood.fn} learns noise of one size; leave them out"
        )
    try:
        # the model itself knows its sizes: ask before anything is trained
        model.latent_shape(height, width)
        model.sigmas(config.eval.steps, height, width)
    except FlowRLError as error:
        raise ConfigError(
            f"eval.height, eval.width: {type(model).__name__} cannot make images of {height} x "
            f"{width} pixels: {error}"
        ) from error


def check_config(config: Any) -> None:
    """Raise ConfigError for what is no config, such as the name of one."""
    if isinstance(config, Config):
        return
    hint = "flowrl.load_config"
    if isinstance(config, str | os.PathLike):
        hint += f"({os.fspath(config)!r})"
    raise ConfigError(f"expected a config, as {hint} gives it, got {show(config)}")


def folder_of(path: Any, what: str) -> Path:
    """Return a path as a Path. Raises ConfigError for an empty text, which would be the working
    folder, and for what is no path."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(f"{what}: expected the path of a folder, got {show(path)}")
    return Path(path)


def judged_by(config: Config, calls: Mapping[str, Call]) -> Config:
    """Return the config with other calls of rewards; an evaluation's score and choice that name
    none of them follow the default."""
    score = config.eval.score if config.eval.score in calls else ""
    best_by = config.eval.best_by if config.eval.best_by in calls else ""
    judging = replace(config.eval, score=score, best_by=best_by)
    return replace(config, rewards=dict(calls), eval=judging)


def flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return nested data by dotted key: ``{"train": {"group": 8}}`` as ``{"train.group": 8}``; a
    list is one value."""
    if not isinstance(value, Mapping):
        return {key: value}
    found: dict[str, Any] = {}
    for name, inside in value.items():
        found |= flat(inside, dotted(key, name))
    return found


def differences(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Return the keys of two flat configs whose values differ, or that one of them lacks."""
    every = dict.fromkeys([*one, *two])
    return [key for key in every if one.get(key, _NO_VALUE) != two.get(key, _NO_VALUE)]
