"""What the networks of a config's rewards take, where their sizes are known.

Numbers of parameters are those of the public weights, counted on networks built from the settings
that the libraries ship; tests/cost/test_estimate.py counts them again.
"""

from __future__ import annotations

from typing import NamedTuple

from flowrl.config.load import Config
from flowrl.core.devices import DTYPES

_VIT_L, _VIT_H = 427_616_513, 986_109_441  # CLIP ViT-L/14 and ViT-H/14, both towers
PARAMETERS = {
    "clip": _VIT_L,
    "clip_reference": _VIT_L,
    "aesthetic": _VIT_L + 928_705,  # and LAION's layers
    "pickscore": _VIT_H,
    "hpsv2": _VIT_H,
    "hpsv3": 7_748_610_610,  # Qwen2-VL-7B without its words' head, with scores' head
    "videoalign": 2_208_566_272,  # Qwen2-VL-2B, LoRA merged
    "pfc": 325_971_328,  # V-JEPA 2 ViT-L with its predictor
    "dino": 86_580_480,  # DINOv2 ViT-B/14
}


class RewardNetwork(NamedTuple):
    """The network of one reward."""

    name: str  # of the reward in the config
    what: str  # how its size comes about, and where it is
    bytes: int
    always: bool  # it is on the run's own device the whole time


def reward_networks(config: Config) -> tuple[list[RewardNetwork], list[str]]:
    """Return the networks of a config's rewards, and the names of rewards that are not counted:
    other ones may have networks, or ask a server."""
    found, unknown = [], []
    for name, call in config.rewards.items():
        count = PARAMETERS.get(call.fn)
        if count is None:
            unknown.append(name)
            continue
        width = DTYPES[str(call.kwargs.get("dtype", "float32"))].itemsize
        device = str(call.kwargs.get("device", "auto"))
        apart = device not in ("auto", "cuda", "cuda:0")
        where = "offloaded: there only while it scores" if call.offload else ""
        where = f"on {device}" if apart else where
        what = f"{count:,} numbers x {width} bytes{', ' if where else ''}{where}"
        found.append(RewardNetwork(name, what, count * width, not apart and not call.offload))
    return found, unknown
