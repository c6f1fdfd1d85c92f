"""The public trainers that flowrl is run beside, and the small work that each is given by
default."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flux_trainers import FLUX, branch_grpo, dance_grpo, flowrl_on_flux, mix_grpo
from small_model import lengthened, random_flux
from trainers import HERE, Start, Work, flow_factory, flow_grpo, flowrl

SMALL = HERE.parents[2] / "assets" / "shapes-sd3"
SD3 = "diffusers:SD3Transformer2DModel"
SD3_WORK = Work(
    model="assets/shapes-sd3",
    prompts=4,
    group=8,
    steps=6,
    size=64,
    guidance=4.5,
    kl=0.01,
    batch=8,
    dtype="float32",
)
# one process' share of the published work, on a small network
FLUX_WORK = Work(
    model="random FLUX",
    prompts=1,
    group=12,
    steps=16,
    size=128,
    guidance=3.5,
    kl=0.0,
    batch=1,
    dtype="bfloat16",
    noise_scale=0.3,
    lr=1e-5,
    tokens=16,
)
MODELS: dict[str, Callable[[Path], Path]] = {  # made anew in each round
    SD3_WORK.model: partial(lengthened, SMALL),
    FLUX_WORK.model: partial(random_flux, SMALL),  # 128 wide, 3 blocks
    "wider random FLUX": partial(random_flux, SMALL, heads=8, double=2, single=4),
}


class Trainer(NamedTuple):
    """A public trainer: how it and flowrl are started on one work."""

    theirs: Callable[[Work, Path, Path], Start]
    ours: Callable[[Work, Path, str, int], Start]
    network: str  # module:class that is watched
    work: Work


def on_flux(theirs: Callable[[Work, Path, Path], Start], **work: int | float | str) -> Trainer:
    """Put together a trainer of FLUX."""
    values = {**vars(FLUX_WORK), **work}
    return Trainer(theirs, flowrl_on_flux, FLUX, Work(**values))


TRAINERS = {
    "flow_grpo": Trainer(flow_grpo, flowrl, SD3, SD3_WORK),
    "flow_factory": Trainer(flow_factory, flowrl, SD3, SD3_WORK),
    "dance_grpo": on_flux(dance_grpo, updates=3),
    "mix_grpo": on_flux(mix_grpo, steps=25, noise_scale=0.7, updates=4, window=4, every=25),
    "branch_grpo": on_flux(branch_grpo, group=16, steps=20, updates=19, splits="0,3,6,9"),
}
