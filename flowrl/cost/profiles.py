"""Settings that make a config fit a card of some size, by name: what `--profile` sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.cost.architecture import architecture_of, tuning_of
from flowrl.cost.estimate import ENCODERS_ALONE, Phase, estimate
from flowrl.cost.fit_card import change, limit_of, smaller_rank
from flowrl.cost.memory import count_weights
from flowrl.cost.reward_networks import can_rest


class Profile(NamedTuple):
    """A card, and how much is computed on it at a time."""

    gigabytes: float  # of 2^30 bytes; some cards that are sold as so large have less, see SMALLER
    batch: int  # states or latents in one network call
    decode: int  # images that the VAE decodes at a time


PROFILES = {"24gb": Profile(24, 2, 1), "48gb": Profile(48, 4, 2), "80gb": Profile(80, 8, 4)}
BATCHES = ("train.micro_batch", "train.rollout_batch", "eval.batch")
RUNTIME = ("checkpointing", "offload")


def profile_overrides(config: Config, name: str) -> list[str]:
    """Return overrides that make a config for a pipeline of diffusers take less memory.

    Gradient checkpointing, offload unless there are CUDA graphs, batches of at most the profile's.
    What is trained stays as it is, but for LoRA on a network that in `model.dtype` takes more than
    half of the card: its frozen weights become nf4, which is another base. Full tuning is never
    quantised. Raise ConfigError for an unknown profile or a model without `runtime`, ModelError for
    a wrong one.
    """
    if name not in PROFILES:
        raise ConfigError(f"--profile: expected one of {', '.join(PROFILES)}, got {name!r}")
    kwargs = config.model.kwargs
    if "runtime" not in kwargs:
        raise ConfigError(
            f"--profile: model {config.model.fn} has no runtime options; leave --profile out"
        )

    # what takes less and computes the same
    graphs = (kwargs["runtime"] or {}).get("cuda_graphs")
    options = RUNTIME[:1] if graphs else RUNTIME  # CUDA graphs refuse offload
    profile, found = PROFILES[name], [f"model.runtime.{option}=true" for option in options]
    now = {
        "model.decode_batch": (kwargs["decode_batch"], profile.decode),
        **{key: (getattr(*_place(config, key)), profile.batch) for key in BATCHES},
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
    limit, found = limit_of(PROFILES[name].gigabytes), []
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
        largest = estimate(changed).largest if words else largest
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
    if largest is not None and largest.bytes > limit and largest.name == "training":
        largest = estimate(change(config, "train.micro_batch", 1)).largest
        return None if largest is None or largest.bytes > limit else ["train.micro_batch=1"]
    return None if largest is None or largest.bytes > limit else []


def _place(config: Config, key: str) -> tuple[object, str]:
    section, _, name = key.partition(".")
    return getattr(config, section), name


def _network_bytes(config: Config) -> int:
    """Return what the network's weights take, unquantised; 0 if they cannot be counted here."""
    architecture, tuning = architecture_of(config), tuning_of(config)
    if not architecture.known:
        return 0
    counted = count_weights(architecture, config.model.fn, tuning)
    return counted.network * tuning.network_dtype.itemsize
