"""Does a config fit a card, and if not, which settings make it fit: what `--profile` sets. Every
number is worked out for the changed config."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import yaml

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.tables import size
from flowrl.cost.architecture import (
    architecture_of,
    called_architecture,
    facts_of,
    known_facts,
    tuning_of,
)
from flowrl.cost.estimate import ENCODERS_ALONE, Estimate, Phase, estimate
from flowrl.cost.memory import SCORING, can_rest, count_weights, reward_networks, staying

GIB = 2**30
# of a card: the CUDA context, libraries' workspaces, gaps between tensors; assumed, not measured
RESERVE = GIB
# GiB of common cards that are sold as larger: what nvidia-smi shows, 23,034 and 46,068 MiB
SMALLER: dict[float, tuple[float, str]] = {
    24: (22.4, "an L4 or A10G"),
    48: (44.9, "an L40S or A40"),
}
RANK = 16  # of adapters that still learn much, and take a quarter of the usual 64


class Profile(NamedTuple):
    """A card, and how much is computed on it at a time."""

    gigabytes: float  # of 2^30 bytes; some cards that are sold as so large have less, see SMALLER
    batch: int  # states or latents in one network call
    decode: int  # images that the VAE decodes at a time


PROFILES = {"24gb": Profile(24, 2, 1), "48gb": Profile(48, 4, 2), "80gb": Profile(80, 8, 4)}
AUTO = "auto"  # the profile of this machine's GPU


def verdict(found: Estimate, *, gigabytes: float) -> str:
    """Say in one line whether a config fits a card of so many gigabytes, with those networks of its
    rewards that are counted."""
    largest = found.largest
    if largest is None:
        return f"fits a {gigabytes:g} GB card: unknown, {found.note}"
    fits = "yes" if largest.bytes <= limit_of(gigabytes) else "no"
    stay = staying(found.config)
    networks = ""
    if stay:
        networks = f", {size(stay)} of it rewards' networks"
    return (
        f"fits a {gigabytes:g} GB card: {fits}, {size(largest.bytes)} in {largest.name}{networks}, "
        f"of {size(limit_of(gigabytes))} that are free"
    )


class Help(NamedTuple):
    """What is to be said below a verdict."""

    lines: list[str]
    profile: Fitted | None = None  # that was tried for a config that does not fit


def what_helps(found: Estimate, *, gigabytes: float) -> Help:
    """Try what makes a config fit a card of so many gigabytes: its profile, then what a profile
    leaves to the user. Of one that fits, say which cards of that name have less memory than it
    needs. Raises as `estimate` does."""
    # nothing to do, or nothing known
    largest = found.largest
    if largest is None:
        return Help([])
    if largest.bytes <= limit_of(gigabytes):
        return Help(_smaller_card(gigabytes, largest))
    if "runtime" not in found.config.model.kwargs:
        return Help([f"model {found.config.model.fn} has no profile"])
    tried = fitted(found.config, f"{gigabytes:g}gb")
    if tried.fits:
        return Help([tried.said], tried)
    # what is there in any case, and what would train something else
    lines, also = [tried.said, _kept(found, largest)], _lighter(found.config)
    if not also:
        return Help(lines, tried)
    with contextlib.suppress(ConfigError):  # too few states for its updates, say
        then = fitted(_overridden(found.config, also), tried.name)
        if then.phase is not None:
            fits = "fits" if then.fits else "does not fit either"
            needs = f"{size(then.phase.bytes)} in {then.phase.name}"
            lines.append(f"with {' '.join(also)}, which train otherwise, it {fits}: {needs}")
    return Help(lines, tried)


def _kept(found: Estimate, largest: Phase) -> str:
    """Say what the largest phase keeps whatever the batch, by its largest parts."""
    name = "decode" if largest.name == SCORING else largest.name
    there = [(part.bytes, part.name) for part in found.parts if name in part.phases]
    there.append((staying(found.config), "rewards' networks"))
    there.sort(reverse=True)
    parts = ", ".join(f"{part} {size(count)}" for count, part in there[:3] if count)
    return f"{largest.name} keeps {size(largest.kept)} as it is: {parts}"


def _lighter(config: Config) -> list[str]:
    """List what takes less and is no part of a profile, since it trains something else: overrides,
    to be typed as they stand."""
    kwargs, found = config.model.kwargs, list[str]()
    for one in reward_networks(config)[0]:
        here = one.always or one.guest
        if here and config.rewards[one.name].kwargs.get("dtype") == "float32":
            found.append(f"rewards.{one.name}.dtype=bfloat16")
    for key, value in known_facts(config).lighter.items():
        if kwargs.get(key) != value:
            found.append(f"model.{key}={json.dumps(value)}")
    if kwargs.get("tune") == "full":
        found += ["model.layers=null", "model.tune=lora"]
    if config.train.prompts > 1:
        found.append(f"train.prompts={config.train.prompts // 2}")
    return found


class Fitted(NamedTuple):
    """What a profile makes of a config."""

    name: str
    overrides: list[str]  # [] for a config that fits as it is
    before: Phase | None  # the largest one of the config as it is; None: not counted
    phase: Phase | None  # the largest one with the overrides
    limit: int  # bytes of the card that are free

    @property
    def fits(self) -> bool:
        """Say whether it is known to fit."""
        return self.phase is not None and self.phase.bytes <= self.limit

    @property
    def said(self) -> str:
        """Say what is set, and why."""
        free = f"the {size(self.limit)} that are free"
        sets = f"sets {' '.join(self.overrides) or 'nothing'}"
        if self.phase is None or self.before is None:
            return f"--profile {self.name} {sets}; what is needed is not counted"
        fits = f"{'fits' if self.fits else 'does not fit'} into {free}"
        needs = f"{size(self.phase.bytes)} in {self.phase.name}"
        if not self.overrides:
            return f"--profile {self.name} {sets}: {needs} {fits}"
        now = f"{size(self.before.bytes)} in {self.before.name}"
        return f"--profile {self.name} {sets}: {now} becomes {needs}, which {fits}"


def fitted(config: Config, name: str, given: Sequence[str] = ()) -> Fitted:
    """Choose what makes a config fit a profile's card: nothing if it fits as it is, else the
    profile's settings and what else is needed.

    Of keys that are `given` as overrides, and are in the config already, none is changed, but for
    the `offload` of a reward that is given as a whole. Raises as `profile_overrides` and
    `estimate` do.
    """
    # as it is
    name = _named(name)
    settings, limit = profile_overrides(config, name), limit_of(profile_of(name).gigabytes)
    before = estimate(config).largest
    if before is not None and before.bytes <= limit:
        return Fitted(name, [], before, before, limit)
    # with the profile's settings, then with what else is needed
    told = {text.partition("=")[0] for text in given}
    # rank and alpha go together
    told |= {"model.lora" for key in told if key.startswith("model.lora.")}
    settings = [text for text in settings if not _holders(text) & told]
    changed = _overridden(config, settings)
    rests = {key for key in told if "offload" in key}
    for text in what_fits(changed, name):
        held = told
        if text.startswith("rewards."):
            held = rests
        if not _holders(text) & held:
            settings.append(text)
    after = estimate(_overridden(config, settings)).largest
    return Fitted(name, settings, before, after, limit)


def _named(name: str) -> str:
    """Return a profile's name; "auto" is this GPU's. Raises ConfigError without one."""
    if name != AUTO:
        return name
    gigabytes = card_size()
    if gigabytes is None:
        raise ConfigError(
            "--profile auto: this machine has no GPU; name the card's memory, such as 24gb"
        )
    return f"{gigabytes:g}gb"


def profile_of(name: str) -> Profile:
    """Return a profile; of a size between those that are named with the batches of the next smaller
    one. Raises ConfigError."""
    size = re.fullmatch(r"(\d+(?:\.\d+)?)gb", _named(name))
    if size is None or not float(size[1]) > 0:
        raise ConfigError(
            f"--profile: expected the memory of a card, {', '.join(PROFILES)} or another number "
            f"such as 22.4gb, or {AUTO}, got {name!r}"
        )
    gigabytes, near = float(size[1]), PROFILES["24gb"]
    for one in PROFILES.values():
        if one.gigabytes <= gigabytes:
            near = one
    return near._replace(gigabytes=gigabytes)


def _holders(override: str) -> set[str]:
    """Return the key of an override and those that hold it: "a.b.c", "a.b", "a"."""
    parts = override.partition("=")[0].split(".")
    return {".".join(parts[: n + 1]) for n in range(len(parts))}


def _overridden(config: Config, overrides: list[str]) -> Config:
    for text in overrides:
        key, _, value = text.partition("=")
        config = change(config, key, yaml.safe_load(value))
    return config


def _smaller_card(gigabytes: float, largest: Phase) -> list[str]:
    """Say which card that is sold as so large has less, and less than is needed."""
    less, names = SMALLER.get(gigabytes, (gigabytes, ""))
    if largest.bytes <= limit_of(less):
        return []
    return [
        f"(not {names}, sold as {gigabytes:g} GB: there are {less:g} of 2^30 bytes; see --card "
        f"{less:g})"
    ]


def limit_of(gigabytes: float) -> int:
    """Return the bytes of a card that are left beside CUDA's own."""
    return int(gigabytes * GIB) - RESERVE


def card_size() -> float | None:
    """Return the memory of this machine's GPU in GB (2^30 bytes); None without one."""
    if not torch.cuda.is_available():
        return None
    return round(torch.cuda.get_device_properties(0).total_memory / GIB, 1)


def change(config: Config, key: str, value: Any) -> Config:
    """Return a config with one value of `train`, `eval` or `model` changed; "model.runtime.x"
    changes one option, "optimizer.fn" the optimizer, "rewards.x.offload" or "rewards.x.dtype" a
    reward."""
    section, name, *inner = key.split(".")
    if section == "optimizer":
        raw = {**config.optimizer.to_dict(), name: value}
        return replace(config, optimizer=Call.bind(section, raw))
    if section == "rewards":
        call = config.rewards[name]
        if inner == ["offload"]:
            changed = replace(call, offload=value)
        else:
            changed = replace(call, kwargs={**call.kwargs, inner[0]: value})
        return replace(config, rewards={**config.rewards, name: changed})
    if section != "model":
        return replace(config, **{section: replace(getattr(config, section), **{name: value})})
    if inner:
        value = {**(config.model.kwargs.get(name) or {}), inner[0]: value}
    return replace(config, model=replace(config.model, kwargs={**config.model.kwargs, name: value}))


def smaller_rank(config: Config) -> tuple[list[str], Config] | None:
    """Return overrides for LoRA of rank `RANK`, and the config with them; None where the rank is
    that already, or no LoRA is trained. alpha / rank, which scales the update, stays as it is."""
    if config.model.kwargs.get("tune") != "lora":
        return None
    lora = tuning_of(config).lora
    if lora.rank <= RANK:
        return None
    alpha = lora.alpha * RANK / lora.rank
    given = config.model.kwargs["lora"] or {}
    changed = change(config, "model.lora", {**given, "rank": RANK, "alpha": alpha})
    return [f"model.lora.rank={RANK}", f"model.lora.alpha={alpha:g}"], changed


def profile_overrides(config: Config, name: str) -> list[str]:
    """Return overrides that make a config for a pipeline of diffusers take less memory.

    Gradient checkpointing, offload unless there are CUDA graphs, batches of at most the profile's.
    What is trained stays as it is, but for LoRA on a network that in `model.dtype` takes more than
    half of the card: its frozen weights become nf4, which is another base. Full tuning is never
    quantised. Raise ConfigError for an unknown profile or a model without `runtime`, ModelError for
    a wrong one.
    """
    profile, kwargs = profile_of(name), config.model.kwargs
    if "runtime" not in kwargs:
        raise ConfigError(
            f"--profile: model {config.model.fn} has no runtime options; leave --profile out"
        )

    # what takes less and computes the same
    found = ["model.runtime.checkpointing=true"]
    if not (kwargs["runtime"] or {}).get("cuda_graphs"):  # which refuse offload
        found.append("model.runtime.offload=true")
    now = {
        "model.decode_batch": (kwargs["decode_batch"], profile.decode),
        "train.micro_batch": (config.train.micro_batch, profile.batch),
        "train.rollout_batch": (config.train.rollout_batch, profile.batch),
        "eval.batch": (config.eval.batch, profile.batch),
    }
    found += [f"{key}={most}" for key, (value, most) in now.items() if value > most]

    # what computes on other weights
    if kwargs["tune"] == "lora" and _network_bytes(config) > profile.gigabytes * 2**30 / 2:
        found.append("model.runtime.quantize=nf4")
    return found


def what_fits(config: Config, name: str) -> list[str]:
    """Return overrides that bring a config with a profile's settings below its card; [] if it is.

    First what leaves the training as it is: networks of rewards rest on the host while they do not
    score, text encoders that are too large even alone work on the CPU, and one state is trained at
    a time, each only where it is what is too large. If that is not enough, LoRA gets a smaller
    rank, at the same alpha / rank, and then AdamW moments of 8 bits, too: these train otherwise.
    All but the text encoders' place is there only if the config fits with it.
    """
    # nothing to do where the profile's settings are enough
    limit, found = limit_of(profile_of(name).gigabytes), []
    largest = estimate(config).largest
    if largest is None or largest.bytes <= limit:
        return []
    # first what leaves the training as it is
    config, largest, resting = _rested(config, largest)
    if largest is not None and largest.bytes > limit and largest.what == ENCODERS_ALONE:
        found.append("model.runtime.text_encoders=cpu")
        config = change(config, "model.runtime.text_encoders", "cpu")
        largest = estimate(config).largest
    # then what trains otherwise, step by step until it fits
    said: list[str] = []
    for words, changed in (([], config), *_trained_less(config)):
        said += words
        if words:
            largest = estimate(changed).largest
        if (batch := _one_state(changed, largest, limit)) is not None:
            return [*resting, *found, *said, *batch]
    return found


def _rested(config: Config, largest: Phase) -> tuple[Config, Phase | None, list[str]]:
    """Let the counted networks of rewards rest, if the largest phase then takes less -> the config,
    its largest phase and the overrides."""
    changed, rest = config, can_rest(config)
    for key in rest:
        changed = change(changed, key, True)
    then = estimate(changed).largest if rest else None
    if then is None or then.bytes >= largest.bytes:
        return config, largest, []
    return changed, then, [f"{key}=true" for key in rest]


def _trained_less(config: Config) -> Iterator[tuple[list[str], Config]]:
    """Yield overrides that train less under LoRA, each on top of those before, and the config with
    them all."""
    if config.model.kwargs["tune"] != "lora":
        return
    if smaller := smaller_rank(config):
        config = smaller[1]
        yield smaller
    if config.optimizer.fn == "adamw":
        yield ["optimizer.fn=adamw8bit"], change(config, "optimizer.fn", "adamw8bit")


def _one_state(config: Config, largest: Phase | None, limit: int) -> list[str] | None:
    """Return [] for a config that fits, what makes it fit if it is training one state at a time, or
    None."""
    batch = []
    if largest is not None and largest.bytes > limit and largest.name == "training":
        batch = ["train.micro_batch=1"]
        largest = estimate(change(config, "train.micro_batch", 1)).largest
    if largest is None or largest.bytes > limit:
        return None
    return batch


def _network_bytes(config: Config) -> int:
    """Return what the network's weights take, unquantised; 0 if they cannot be counted here."""
    called = facts_of(config) is None
    architecture = called_architecture(config) if called else architecture_of(config)
    if architecture is None or not architecture.known:
        return 0
    tuning = tuning_of(config)
    counted = count_weights(architecture, tuning)
    return counted.network * tuning.network_dtype.itemsize
