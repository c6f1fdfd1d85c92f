"""Run a program that is written for a cluster in one process, unchanged.

    python alone.py PROGRAM [ARGUMENT...]

It is for the FLUX trainers that descend from FastVideo: DanceGRPO, MixGRPO and BranchGRPO. Their
file is executed as it is, and all of their modules that the work needs. What is not needed, or is
not of theirs, has a stand-in that holds nothing of theirs:

- trackers: what they are told is lost,
- the networks of video models, other rewards, and packages that only those need: names,
- HPSv2: the size of the image's JPEG file.

Without a GPU the process group is gloo's, "cuda" in autocast means the CPU, the current device is
the CPU, and batches of the data loader are lists, as pinned ones are.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from types import ModuleType
from typing import Any

import torch
from jpeg import kilobytes
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

VIDEO = (  # networks that load.py of theirs can load, beside FLUX
    "mochi_hf.modeling_mochi",
    "mochi_hf.pipeline_mochi",
    "hunyuan.modules.models",
    "hunyuan.text_encoder",
    "hunyuan.vae.autoencoder_kl_causal_3d",
    "hunyuan_hf.modeling_hunyuan",
)
REWARDS = ("image_reward", "pick_score", "unified_reward", "clip_score")
NEVER_NEEDED = (
    *(f"fastvideo.models.{name}" for name in VIDEO),
    *(f"fastvideo.models.reward_model.{name}" for name in REWARDS),
)
PACKAGES = ("einops", "decord", "cv2")  # imported, and used for videos only
SCORER = ("hpsv2.src.open_clip", "HPSv2.hpsv2.src.open_clip")


class Names(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Scorer:
    """HPSv2's network as the programs call it, with the size of a JPEG file for a score."""

    def to(self, device: Any) -> Scorer:
        """Stay where it is."""
        return self

    def eval(self) -> None:
        """Change nothing."""

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Hold no weights."""

    def __call__(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Return features whose product is the score; image [1, 1] is the score itself."""
        return {"image_features": image, "text_features": torch.ones_like(image)}


def scored(image: Image.Image) -> Tensor:
    """Return -kB / 500 of an image, [1], as `jpeg` of flowrl."""
    return torch.tensor([-kilobytes(image) / 500])


def ignored(*_: Any, **__: Any) -> None:
    """Do nothing with what a tracker is told."""


def put_in(name: str, module: ModuleType, **members: Any) -> None:
    """Let a module be imported by a name, with all folders above it."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        sys.modules.setdefault(".".join(parts[:end]), Names(".".join(parts[:end])))
    vars(module).update(members)
    sys.modules[name] = module


def stand_in() -> None:
    """Put every stand-in into its place."""
    for name in NEVER_NEEDED:
        sys.modules[name] = Names(name)  # the folders above it are theirs
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            put_in(name, Names(name))
    for name in SCORER:
        tools = {
            "create_model_and_transforms": lambda *_, **__: (Scorer(), None, scored),
            "get_tokenizer": lambda _: lambda texts: torch.zeros(len(texts)),
        }
        put_in(name, ModuleType(name), **tools)
    put_in("hpsv2.utils", Names("hpsv2.utils"))
    nothing = dict.fromkeys(("init", "log", "login"), ignored)
    util = ModuleType("wandb.util")
    put_in("wandb.util", util, generate_id=lambda: "alone")
    put_in("wandb", ModuleType("wandb"), util=util, **nothing)


def on_the_cpu() -> None:
    """Let "cuda" and "nccl" mean what there is in their place."""
    processes = torch.distributed
    begin, reduce, total = (
        processes.init_process_group,
        processes.all_reduce,
        processes.ReduceOp.SUM,
    )

    class Autocast(torch.autocast):
        """Autocast of the CPU."""

        def __init__(self, device_type: str, *args: Any, **named: Any) -> None:
            super().__init__("cpu", *args, **named)

    class Loader(DataLoader[Any]):
        """A loader that makes lists of tuples, as one that pins memory does on a GPU."""

        def __iter__(self) -> Any:
            for batch in super().__iter__():
                yield [list(part) if isinstance(part, tuple) else part for part in batch]

    def all_reduce(tensor: Tensor, op: Any = total, **named: Any) -> Any:
        return reduce(tensor, op=total, **named)  # gloo has no mean; of one it is that

    anything: Any = torch
    anything.autocast = Autocast
    anything.utils.data.DataLoader = Loader
    anything.cuda.set_device = lambda device: None
    anything.cuda.current_device = lambda: "cpu"
    anything.distributed.init_process_group = lambda backend: begin("gloo")
    anything.distributed.all_reduce = all_reduce


def main() -> None:
    """Run the program that the arguments name."""
    stand_in()
    if not torch.cuda.is_available():
        on_the_cpu()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
