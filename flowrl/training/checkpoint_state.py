"""What the ``state.json`` of a run's checkpoint holds, checked before any of it is used; and what
the checkpoint belongs to: settings that change what its tensors mean without changing a shape, and
what a run's draws follow from.

Whoever reads its tensors into a model compares these settings: what an adapter adds is scaled by
alpha / rank, a network with other heads or another base computes something else with the same
numbers, and a copy or companion was made by its own settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from annotated_types import Interval

from flowrl.config.load import Config, flat
from flowrl.config.values import convert, show
from flowrl.core.abilities import ExtendsModel
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.files import is_finite_number, shortened
from flowrl.core.part import PartState
from flowrl.core.prompts import PromptSet, prompts_hash
from flowrl.training.method import Method

MOST_ITERATIONS = 2**31  # no config trains for longer


class CheckpointState(NamedTuple):
    """What a run saves beside its tensors."""

    iteration: int
    optimizer: dict[str, Any]  # as `optimizer_to_tensors` gives it
    parts: dict[str, PartState]  # what each part keeps; its files by name alone
    monitors: dict[str, Any]
    seed: int | None = None  # None: of a checkpoint that does not say it
    prompts_hash: str | None = None  # of the training list, as `prompts_hash` makes it


def checked_state(found: Any, file: Path) -> CheckpointState:
    """Check what was read from `file`. Raises CheckpointError that names the file, the key, what
    was expected there and what came."""
    iteration = checked_iteration(found, file)
    _need(type(found.get("config", "")) is str, file, "config", "a text", found.get("config"))
    seed, prompts = found.get("seed"), found.get("prompts_hash")
    known = "seed" not in found or type(seed) is int
    _need(known, file, "seed", "a whole number", seed)
    known = "prompts_hash" not in found or type(prompts) is str
    _need(known, file, "prompts_hash", "a text", prompts)
    check_optimizer(found.get("optimizer"), file, "optimizer")
    # the parts: which files are theirs, and what is no tensor
    listed, parts = found.get("parts"), {}
    _need(isinstance(listed, dict), file, "parts", "an object", listed)
    for name, kept in listed.items():
        where = f"parts.{name}"
        _need(isinstance(kept, dict), file, where, "an object", kept)
        files, plain = kept.get("files"), kept.get("state")
        texts = isinstance(files, list) and all(isinstance(each, str) for each in files)
        _need(texts, file, f"{where}.files", "a list of names", files)
        _need(isinstance(plain, dict), file, f"{where}.state", "an object", plain)
        parts[name] = PartState(dict.fromkeys(files, {}), plain)
    # the monitors' memory
    try:
        monitors = checked_memory(found.get("monitors", {}))
    except ValueError as error:
        raise CheckpointError(_said(file, f"{error}")) from error
    return CheckpointState(iteration, found["optimizer"], parts, monitors, seed, prompts)


def checked_iteration(found: Any, file: Path) -> int:
    """Return the number of finished iterations of what was read from `file`. Raises
    CheckpointError."""
    if not isinstance(found, Mapping):
        raise CheckpointError(_said(file, f"expected an object, got {show(found)}"))
    iteration = found.get("iteration")
    known = type(iteration) is int and 0 <= iteration <= MOST_ITERATIONS
    _need(known, file, "iteration", f"a whole number from 0 to {MOST_ITERATIONS}", iteration)
    return int(found["iteration"])


def check_optimizer(found: Any, file: Path, key: str) -> None:
    """Check the JSON of an optimizer, {"scalars": {name: number}, "groups": [{"params": count,
    setting: value}]}."""
    # the two parts
    _need(isinstance(found, dict), file, key, "an object", found)
    scalars, groups = found.get("scalars"), found.get("groups")
    _need(isinstance(scalars, dict), file, f"{key}.scalars", "an object", scalars)
    _need(isinstance(groups, list), file, f"{key}.groups", "a list of objects", groups)
    # what they hold
    for name, value in scalars.items():
        known = isinstance(value, bool) or is_finite_number(value)
        _need(known, file, f"{key}.scalars.{name}", "a finite number or a switch", value)
    for place, group in enumerate(groups):
        where = f"{key}.groups[{place}]"
        _need(isinstance(group, dict), file, where, "an object", group)
        count = group.get("params")
        _need(type(count) is int and count >= 0, file, f"{where}.params", "a count", count)
        for name, value in group.items():
            expected = "finite numbers, a switch or a text"
            _need(_is_setting(value), file, f"{where}.{name}", expected, value)


def _is_setting(value: Any) -> bool:
    """Say whether a value may be a setting of an optimizer, also of a user's own: plain JSON whose
    numbers are finite."""
    if isinstance(value, list):
        return all(map(_is_setting, value))
    return value is None or isinstance(value, bool | str) or is_finite_number(value)


def _need(good: bool, file: Path, key: str, expected: str, found: Any) -> None:
    if not good:
        raise CheckpointError(_said(file, f"{key}: expected {expected}, got {show(found)}"))


def _said(file: Path, what: str) -> str:
    return f"{file}: {what}: it is not what a run saves; go on from another checkpoint"


MOST_KL = 1e3  # of the factor of the kl section's weight, and of its inverse

Count = Annotated[int, Interval(ge=0, lt=2**31)]
Norm = Annotated[float, Interval(ge=0)]
KINDS: dict[str, Any] = {
    "kl_factor": Annotated[float, Interval(gt=0, le=MOST_KL)],
    "lr_factor": Annotated[float, Interval(gt=0, le=1)],
    "rollbacks": Count,
    "norms": list[Norm],
    "start": dict[str, list[float]],
    "lasting": dict[str, Count],
    "rewards": dict[str, float],
    "stretch": list[float],
    "judged": Annotated[int, Interval(ge=-1, lt=2**31)],
    "findings": Count,
    "firing": list[str],
    "rest": dict[str, Count],
    "refreshed": dict[str, Count],
    "told": list[str],
}
"""Keys of the memory and what they hold."""


def checked_memory(found: Any) -> dict[str, Any]:
    """Return a memory as it was read from JSON. Raises ValueError that names the key of what is
    none."""
    if not isinstance(found, Mapping):
        raise ValueError(f"monitors: expected an object, got {found!r}")
    try:
        for key, kind in KINDS.items():
            if key in found:
                convert(found[key], kind, f"monitors.{key}")
    except ConfigError as error:
        raise ValueError(str(error)) from error
    # what ended the run names its monitor
    stopped = found.get("stopped")
    known = isinstance(stopped, dict) and isinstance(stopped.get("monitor"), str)
    if stopped is not None and not known:
        raise ValueError(f"monitors.stopped: expected an object with a monitor, got {stopped!r}")
    return dict(found)


# --------------------------------------------------------------------- what a checkpoint belongs to


KEY = "meaning"  # in a checkpoint's state
COPIES = ("old", "slow", "fake", "surrogate")  # copies of the weights, and models trained along
# where a model is, and how it computes; LoRA's size and scale are in the model's own words
FREE = ("path", "device", "dtype", "seed", "runtime", "decode_batch", "lora", "layers")
OF_MODEL = ("network.", "scheduler.", "vae.", "base model")
_NOTHING = object()


def meaning_of(config: Config, method: Method, model: Any) -> dict[str, Any]:
    """Return the settings that a run's tensors depend on, by dotted key, as plain JSON."""
    found, data = identity_of(model), config.to_dict()
    options = {key: value for key, value in data["model"].items() if key not in FREE}
    found |= flat({"model": options})
    for section in COPIES:
        rows = flat({section: data.get(section)})
        found |= {key: value for key, value in rows.items() if not key.endswith(".lr")}
    found["train.ema"] = config.train.ema
    found["loss.teachers"] = config.loss.kwargs.get("teachers")
    if isinstance(method.likelihood, ExtendsModel):  # it has parameters of its own
        found |= flat({"likelihood": data["likelihood"]})
    return dict(json.loads(json.dumps(found, default=str)))


def identity_of(model: Any) -> dict[str, Any]:
    """Return what a model says of its trained numbers; {} of one around no pipeline."""
    return dict(getattr(model, "identity", {}))


def check_meaning(state: Mapping[str, Any], now: Mapping[str, Any], where: Path | str) -> None:
    """Raise CheckpointError if tensors of a checkpoint with that state would mean something else
    under the settings `now`. Settings of a network that the state does not have are not compared:
    another version of diffusers may know more."""
    if KEY not in state:
        return
    kept = state[KEY]
    if not isinstance(kept, Mapping):
        raise CheckpointError(f"{where}: {KEY}: expected an object, got {_shown(kept)}")
    for key, value in now.items():
        own = key.startswith(OF_MODEL)
        then = kept.get(key, value if own else _NOTHING)
        if then is _NOTHING and any(name.startswith(f"{key}.") for name in kept):
            raise CheckpointError(
                f"{where} was trained with the section {key}, which the config has not: set it "
                "back, or train anew"
            )
        if then is _NOTHING:
            raise CheckpointError(f"{where}: {KEY}: {key} is missing; take another checkpoint")
        if then != value or isinstance(then, bool) != isinstance(value, bool):
            raise CheckpointError(
                f"{key}: {'the model' if own else 'the config'} says {_shown(value)}, and {where} "
                f"was trained with {_shown(then)}: its numbers would mean something else; set it "
                "back, or train anew"
            )


def draws_of(config: Config, train: PromptSet) -> dict[str, Any]:
    """Return what all draws of a run follow from, beside the iteration."""
    return {"seed": config.seed, "prompts_hash": prompts_hash(train)}


def check_draws(state: CheckpointState, config: Config, train: PromptSet, where: Path) -> None:
    """Raise CheckpointError where a run would go on with the draws of another one."""
    now, other = draws_of(config, train), "begin a new run from these weights with train.start"
    if state.seed not in (None, now["seed"]):
        raise CheckpointError(
            f"seed: {where} was trained with {state.seed}, and the config says {now['seed']}: the "
            f"run would be neither of the two; give the seed back, or {other}"
        )
    if state.prompts_hash not in (None, now["prompts_hash"]):
        raise CheckpointError(
            f"prompts.train: {train.path} is another list than that which {where} was trained on "
            f"(prompts_hash was {state.prompts_hash}, and is {now['prompts_hash']}): bring the "
            f"list back, or {other}"
        )


def _shown(value: Any) -> str:
    return shortened(json.dumps(value, default=str))
