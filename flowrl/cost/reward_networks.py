"""What the networks of a config's rewards take, where their sizes are known.

Numbers of parameters are those of the public weights. tests/cost/test_reward_networks.py counts all
of them again, on networks built from settings that the libraries ship. The size of `step_aware` is
read from its file, if that is there.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.devices import DTYPES

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
        first = loaded.setdefault(_shared(call), name) if call.fn == "geneval" else name
        if first != name:
            count, what = 0, f"those of {first}"
        # where it is
        device = str(call.kwargs.get("device", "auto"))
        apart = device not in ("auto", "cuda", "cuda:0")
        where = "offloaded: there only while it scores" if call.offload else ""
        where = f"on {device}" if apart else where
        what += f", {where}" if where else ""
        guest = call.offload and not apart
        found.append(RewardNetwork(name, what, count * width, not apart and not guest, guest))
    return found, unknown


def staying(config: Config) -> int:
    """Return the bytes of counted networks that are on the run's own device the whole time."""
    return sum(one.bytes for one in reward_networks(config)[0] if one.always)


def guest(config: Config) -> RewardNetwork | None:
    """Return the largest counted network that is on the run's own device only while it scores."""
    guests = [one for one in reward_networks(config)[0] if one.guest]
    return max(guests, key=lambda one: one.bytes, default=None)


def can_rest(config: Config) -> list[str]:
    """List the options that let counted networks rest on the host, such as
    "rewards.pick.offload"."""
    found = [one for one in reward_networks(config)[0] if one.always]
    return [f"rewards.{one.name}.offload" for one in found]


def _count(call: Call) -> int | None:
    """Return how many numbers a reward's networks have; None: not known."""
    if call.fn == "step_aware":
        return _stored(Path(str(call.kwargs["path"])) / "step_aware.safetensors")
    # other detectors have other sizes
    if call.fn == "geneval" and call.kwargs["detector"] != "mask2former":
        return None
    # clip and aesthetic are ViT-L/14 where no architecture is named
    named = call.kwargs.get("architecture") if call.fn == "clip" else None
    if named and not named.startswith("ViT-L-14"):
        return _VIT_H if named.startswith("ViT-H-14") else None
    return PARAMETERS.get(call.fn)


def _shared(call: Call) -> str:
    """Say what decides whether two rewards of GenEval use the same networks."""
    keys = ("detector", "path", "clip", "clip_backend", "clip_architecture", "device", "dtype")
    return json.dumps([call.kwargs[key] for key in keys])


def _stored(file: Path) -> int | None:
    """Count the numbers of a safetensors file by its header; None without the file."""
    if not file.is_file():
        return None
    with safe_open(str(file), framework="pt") as tensors:
        names = list(tensors.keys())
        return sum(prod(tensors.get_slice(name).get_shape()) for name in names)
