"""What a run keeps in memory, part by part, from the config and the settings of the model: no
weight is read.

`reward_networks` says what the networks of a config's rewards take, where their sizes are known.
Numbers of parameters are those of the public weights. tests/cost/test_reward_networks.py counts all
of them again, on networks built from settings that the libraries ship. The size of `step_aware` is
read from its file, if that is there.
"""

from __future__ import annotations

import json
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open
from torch import nn

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.devices import DTYPES
from flowrl.core.needs import needs_of
from flowrl.cost.architecture import (
    Architecture,
    architecture_of,
    build,
    called_architecture,
    count,
    experts_of,
    facts_of,
    latent_shape,
    text_shape,
    tuning_of,
)
from flowrl.models.tuning import Tuning, find_layers, fully_trained
from flowrl.training.method import method_of
from flowrl.training.rehearsal import RehearsedIteration
from flowrl.training.task import IterationCost

FLOAT = 4  # bytes of what is always float32: latents, trained weights and all that belongs to these
# bytes of one number; nf4 has a float32 for each block of 64
QUANTISED = {"int8": 1.0, "nf4": 0.5 + FLOAT / 64}
PHASES = ("sampling", "decode", "training", "optimizer step", "evaluation")
SIDE = "VAE, text encoders"
_ITERATION, _LEARNING, _SAMPLING = PHASES[:4], PHASES[2:4], PHASES[:2]

_VIT_L, _VIT_H = 427_616_513, 986_109_441  # CLIP ViT-L/14 and ViT-H/14, both towers
PARAMETERS = {
    "clip": _VIT_L,
    "clip_reference": _VIT_L,
    "aesthetic": _VIT_L + 769,  # and LAION's layers, multiplied out
    "pickscore": _VIT_H,
    "hpsv2": _VIT_H,
    "hpsv3": 7_748_610_610,  # Qwen2-VL-7B without its words' head, with scores' head
    "videoalign": 2_208_566_272,  # Qwen2-VL-2B, LoRA merged
    "pfc": 325_971_328,  # V-JEPA 2 ViT-L with its predictor
    "dino": 86_580_480,  # DINOv2 ViT-B/14
    "image_reward": 446_206_689,  # BLIP: ViT-L/16 and BERT-base, and a head
    "geneval": 68_741_083 + _VIT_L,  # Mask2Former with Swin-S, and the CLIP that tells colours
}
WITHOUT = ("jpeg", "shapes", "shapes_edit", "soft_shapes", "moving_shapes")  # no network at all
SCORING = "scoring"  # the moment at which a reward's network is there that otherwise rests


class MemoryPart(NamedTuple):
    """One line of the estimate."""

    name: str
    what: str  # how its size comes about
    bytes: int
    phases: tuple[str, ...] = PHASES  # those in which it is there


class WeightCounts(NamedTuple):
    """Numbers of a pipeline's weights."""

    trained: int
    frozen: int  # of the network that is trained
    tables: int  # buffers of that network, such as its table of positions
    linear: int  # of the network's, those in the weights of linear layers: what can be quantised
    others: dict[str, int]  # VAE and text encoders
    adapters: bool = False  # the trained weights are added to the network's own
    wide: int = 0  # of the frozen ones, those that the class keeps in float32

    @property
    def network(self) -> int:
        """Return the parameters of the released network."""
        if self.adapters:
            return self.frozen
        return self.frozen + self.trained


def kept_memory(config: Config, forecast: RehearsedIteration) -> tuple[list[MemoryPart], str]:
    """Return what a run keeps, part by part, and a note on what could not be counted (or an empty
    text).

    Raises ModelError for a model folder that does not fit the config, ConfigError for a wrong
    `tune`, `lora` or `dtype`.
    """
    # a model of one's own states nothing to count by
    work = forecast.work
    if facts_of(config) is None:
        return _of_another(config, work)
    # what follows from the settings alone
    architecture, tuning = architecture_of(config), tuning_of(config)
    parts = [
        *_stored(config, forecast, latent_shape(config, architecture)),
        _images(config, work),
    ]
    parts.append(_conditioning(config, work, architecture, tuning.dtype.itemsize))
    # what needs the shapes of the weights
    if not architecture.known:
        path = config.model.kwargs["path"]
        return parts, f"the weights of {path} are not on this machine: parameters not counted"
    return parts + _weights(config, count_weights(architecture, tuning), tuning), ""


def _of_another(config: Config, work: IterationCost) -> tuple[list[MemoryPart], str]:
    """Return what a run without an adapter keeps: of a pipeline that is here, its weights."""
    parts, name = [_images(config, work)], config.model.fn
    architecture = called_architecture(config)
    if architecture is None:
        return parts, f"latents and parameters of the model {name} are not counted"
    tuning = tuning_of(config)
    parts += _weights(config, count_weights(architecture, tuning), tuning)
    return parts, f"latents and activations of {name} are not counted: its own call is asked"


def count_weights(architecture: Architecture, tuning: Tuning) -> WeightCounts:
    """Count a pipeline's weights on networks that are built without them, once for each. Raises
    ModelError."""
    how = [tuning.tune, tuning.layers, tuning.targets, tuning.lora.rank]
    key = json.dumps([architecture.parts, architecture.network, *how])
    if key not in _known:
        _known[key] = _count_weights(architecture, tuning)
    return _known[key]


_known: dict[str, WeightCounts] = {}


def _count_weights(architecture: Architecture, tuning: Tuning) -> WeightCounts:
    # the network's numbers, and those of the parts beside it
    network = build(architecture, architecture.network)
    whole, tables = count(network), sum(buffer.numel() for buffer in network.buffers())
    linear = sum(m.weight.numel() for m in network.modules() if isinstance(m, nn.Linear))
    others = {}
    for name in architecture.others:
        others[name] = count(build(architecture, name))
    # a second expert has as many
    experts = experts_of(architecture)
    whole, tables, linear = experts * whole, experts * tables, experts * linear
    # LoRA trains two factors of each adapted layer, beside the whole network
    if tuning.tune == "lora":
        adapted = find_layers(network, tuning.targets, "lora.targets")
        trained = 0
        for layer in adapted:
            if isinstance(layer, nn.Linear):
                trained += tuning.lora.rank * (layer.in_features + layer.out_features)
        trained *= experts
        wide = experts * _kept_wide(network)
        return WeightCounts(trained, whole, tables, linear, others, adapters=True, wide=wide)
    # full tuning trains parameters of the network itself
    trained = 0
    if tuning.tune == "full":
        trained = experts * sum(map(count, fully_trained(network, tuning)))
    return WeightCounts(trained, whole - trained, tables, linear, others)


def _kept_wide(network: nn.Module) -> int:
    """Return how many numbers diffusers leaves in float32 whatever the dtype."""
    names = set(getattr(network, "_keep_in_fp32_modules", None) or ())
    found = [p.numel() for name, p in network.named_parameters() if names & set(name.split("."))]
    return sum(found)


def _stored(
    config: Config, forecast: RehearsedIteration, shape: tuple[int, ...]
) -> list[MemoryPart]:
    """Count the latents; those of the leaves of a part go once they are decoded, if nothing trains
    on them."""
    kept, leaves = forecast.nodes, 0
    if not method_of(config).reads_leaves:
        kept -= forecast.work.images
        leaves = images_of_part(config, forecast.work)
    parts = [_latents("latents", kept, shape, _ITERATION)]
    if leaves:
        parts.append(_latents("latents of leaves", leaves, shape, _SAMPLING))
    if "old_mean" in needs_of(config.loss.function):
        parts += [part._replace(name=part.name.replace("latents", "old means")) for part in parts]
    return parts


def _latents(name: str, count: int, shape: tuple[int, ...], phases: tuple[str, ...]) -> MemoryPart:
    what = f"{count:,} nodes x {' x '.join(map(str, shape))} x {FLOAT} bytes"
    return MemoryPart(name, what, count * prod(shape) * FLOAT, phases)


def images_of_part(config: Config, work: IterationCost) -> int:
    """Return the images that are sampled together, in one of `train.parts` turns."""
    return -(-work.prompts // config.train.parts) * work.group


def _images(config: Config, work: IterationCost) -> MemoryPart:
    """Count the images of an iteration: bytes on the host, so no phase of the device has them."""
    frames = int(config.model.kwargs.get("frames") or 1)
    shape: tuple[int, ...] = (3, config.image.height, config.image.width)
    if frames > 1:
        shape = (frames, *shape)
    what = f"{work.images:,} images x {' x '.join(map(str, shape))} x 1 byte, not on the device"
    return MemoryPart("images on the host", what, work.images * prod(shape), ())


def _conditioning(
    config: Config, work: IterationCost, architecture: Architecture, width: int
) -> MemoryPart:
    """Count `encode`'s output: one row per prompt, and one without the prompt under guidance."""
    tokens, dim, pooled = text_shape(config, architecture)
    rows = work.prompts
    if work.guided or work.twice:
        rows *= 2
    what = f"{rows:,} rows x ({tokens} x {dim} + {pooled}) x {width} bytes"
    return MemoryPart(
        "prompt conditioning", what, rows * (tokens * dim + pooled) * width, _ITERATION
    )


def _weights(config: Config, counted: WeightCounts, tuning: Tuning) -> list[MemoryPart]:
    trained, short = counted.trained, tuning.dtype.itemsize
    side, beside, runtime = dict(counted.others), SIDE, tuning.runtime
    if runtime.text_encoders == "cpu":
        side = {name: n for name, n in side.items() if not name.startswith("text_encoder")}
        beside = "VAE"
    others = sum(side.values())
    formula, taken = f"{others:,} numbers x {short} bytes", others * short
    facts = facts_of(config)
    wide = sum(count for name, count in side.items() if facts and name in facts.wide)
    if wide:
        what = "the VAE's and CLIP's" if "image_encoder" in side else "the VAE's"
        formula, taken = f"{formula}, {what} x {FLOAT}", taken + wide * (FLOAT - short)
    width = tuning.network_dtype.itemsize
    there = () if runtime.offload else PHASES  # offloaded ones come and go; see `estimate.phase`
    parts = [
        MemoryPart("trained weights", f"{trained:,} numbers x {FLOAT} bytes", trained * FLOAT),
        _frozen(counted, width, tuning.runtime.quantize),
        MemoryPart(
            "network's tables",
            f"{counted.tables:,} numbers x {width} bytes",
            counted.tables * width,
        ),
        MemoryPart(beside, formula, taken, there),
    ]
    average = config.train.ema > 0
    method = method_of(config)
    along = method.companions.values()
    base = "ref" in method.snapshots or any("ref" in role.looks_at for role in along)
    base = base or config.eval.tuned < 1
    copies = [
        ("gradients", FLOAT, True, _LEARNING),
        ("AdamW's moments", 2 * moment_bytes(config), True, PHASES),  # from the first step on
        ("averaged weights (EMA)", FLOAT, average, PHASES),
        ("base weights (KL, eval.tuned)", FLOAT, base, PHASES),
        ("weights that sample (old)", FLOAT, config.old is not None, PHASES),
        ("slow copy of the weights", FLOAT, config.slow is not None, PHASES),
        # each with two moments, and some with a copy that follows
        (
            "models that are trained along",
            sum(FLOAT * (4 if "slow" in role.looks_at else 3) for role in along),
            bool(method.companions),
            PHASES,
        ),
    ]
    for name, size, wanted, phases in copies:
        if wanted:
            what = f"{trained:,} numbers x {size} bytes"
            parts.append(MemoryPart(name, what, trained * size, phases))
    return [part for part in parts if part.bytes or part.name != "network's tables"]


def _frozen(counted: WeightCounts, width: int, quantize: str) -> MemoryPart:
    """Count the frozen weights; under LoRA those of linear layers may be quantised."""
    name, short = "frozen weights", QUANTISED.get(quantize)
    if short is None:
        what, more = f"{counted.frozen:,} numbers x {width} bytes", counted.wide * (FLOAT - width)
        if more:
            what += f", {counted.wide:,} of them x {FLOAT}"
        return MemoryPart(name, what, counted.frozen * width + more)
    rest = counted.frozen - counted.linear
    what = f"{counted.linear:,} numbers x {short} bytes ({quantize}) and {rest:,} x {width}"
    return MemoryPart(name, what, int(counted.linear * short) + rest * width)


def moment_bytes(config: Config) -> int:
    """Return the bytes of one number of each of AdamW's two moments: 4, or 1 with
    ``optimizer: {fn: adamw8bit}``."""
    return 1 if config.optimizer.fn == "adamw8bit" else FLOAT


class RewardNetwork(NamedTuple):
    """The network of one reward."""

    name: str  # of the reward in the config
    what: str  # how its size comes about, and where it is
    bytes: int  # on the run's own device or elsewhere
    always: bool  # it is on the run's own device the whole time
    guest: bool  # it is on the run's own device only while it scores


def reward_networks(config: Config) -> tuple[list[RewardNetwork], list[str]]:
    """Return the networks of a config's rewards, and the names of rewards that are not counted:
    these may have networks, or ask a server."""
    found: list[RewardNetwork] = []
    unknown: list[str] = []
    loaded: dict[str, str] = {}  # what is loaded once for all -> the reward that has it
    for name, call in config.rewards.items():
        if call.fn in WITHOUT:
            continue
        count = _count(call)
        if count is None:
            unknown.append(name)
            continue
        width = DTYPES[str(call.kwargs.get("dtype", "float32"))].itemsize
        what = f"{count:,} numbers x {width} bytes"
        # two verdicts of GenEval share detector and CLIP
        if call.fn == "geneval":
            first = loaded.setdefault(_shared(call), name)
            if first != name:
                count, what = 0, f"those of {first}"
        # where it is
        device = str(call.kwargs.get("device", "auto"))
        apart = device not in ("auto", "cuda", "cuda:0")
        if apart:
            what += f", on {device}"
        elif call.offload:
            what += ", offloaded: there only while it scores"
        guest = call.offload and not apart
        found.append(RewardNetwork(name, what, count * width, not apart and not guest, guest))
    return found, unknown


def staying(config: Config) -> int:
    """Return the bytes of counted networks that are on the run's own device the whole time."""
    return sum(one.bytes for one in reward_networks(config)[0] if one.always)


def guest(config: Config) -> RewardNetwork | None:
    """Return the largest counted network that is on the run's own device only while it scores."""
    guests = [one for one in reward_networks(config)[0] if one.guest]
    return max(guests, key=attrgetter("bytes"), default=None)


def can_rest(config: Config) -> list[str]:
    """List the options that let counted networks rest on the host, such as
    "rewards.pick.offload"."""
    found = [one for one in reward_networks(config)[0] if one.always]
    return [f"rewards.{one.name}.offload" for one in found]


def _count(call: Call) -> int | None:
    """Return how many numbers a reward's networks have; None: not known."""
    if call.fn == "step_aware":
        return _numbers_in(Path(str(call.kwargs["path"])) / "step_aware.safetensors")
    # other detectors have other sizes
    if call.fn == "geneval" and call.kwargs["detector"] != "mask2former":
        return None
    # clip and aesthetic are ViT-L/14 where no architecture is named
    if call.fn == "clip":
        named = call.kwargs.get("architecture") or "ViT-L-14"
        if named.startswith("ViT-H-14"):
            return _VIT_H
        if not named.startswith("ViT-L-14"):
            return None
    return PARAMETERS.get(call.fn)


def _shared(call: Call) -> str:
    """Say what decides whether two rewards of GenEval use the same networks."""
    keys = ("detector", "path", "clip", "clip_backend", "clip_architecture", "device", "dtype")
    return json.dumps([call.kwargs[key] for key in keys])


def _numbers_in(file: Path) -> int | None:
    """Count the numbers of a safetensors file by its header; None without the file."""
    if not file.is_file():
        return None
    with safe_open(str(file), framework="pt") as tensors:
        names = list(tensors.keys())
        return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
