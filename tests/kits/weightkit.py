"""Files of random weights in the public layouts, each made once."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from clipkit import (
    add_architecture,
    save_open_clip,
    save_transformers,
    tiny_open_clip,
)
from qwenkit import save_hpsv3
from tinyscorers import (
    Public,
    save_dinov2,
    save_image_reward,
    tiny_blip_vqa,
    tiny_grounding_dino,
    tiny_mask2former,
)
from torch import Tensor

from rewards.aesthetic import FILE, layered
from rewards.hpsv2 import FILES


class Clip:
    """One random CLIP in the layouts of open_clip and of transformers."""

    def __init__(self, folder: Path, name: str, *, seed: int = 0, **architecture: Any) -> None:
        folder.mkdir()
        self.quick = bool(architecture.get("quick_gelu"))
        self.architecture = add_architecture(folder, name, **architecture)
        self.model = tiny_open_clip(name, seed=seed)
        self.file = save_open_clip(self.model, folder / "open_clip_model.safetensors")
        self.open_clip: dict[str, Any] = {"path": str(self.file), "backend": "open_clip"}
        self.open_clip["architecture"] = name

    @cached_property
    def folder(self) -> Path:
        return save_transformers(self.model, self.file.parent / "hf", quick_gelu=self.quick)

    @property
    def parts(self) -> dict[str, Any]:
        return {"path": str(self.folder), "processor": str(self.folder)}


class Weights:
    """All networks, each saved when it is first needed."""

    def __init__(self, folder: Path) -> None:
        self.root = folder

    @cached_property
    def clip(self) -> Clip:
        return Clip(self.root / "clip", "tiny-clip")

    @cached_property
    def quick(self) -> Clip:
        return Clip(self.root / "quick", "tiny-quick", seed=3, quick_gelu=True)

    @cached_property
    def wide(self) -> Clip:
        return Clip(self.root / "wide", "tiny-wide", dimensions=768, quick_gelu=True)

    @cached_property
    def hps(self) -> dict[str, Any]:
        """Both versions in the published container; the older is `clip`, the newer `quick`."""
        folder = self.root / "hps"
        folder.mkdir()
        for name, kit in zip(FILES.values(), (self.clip, self.quick), strict=True):
            torch.save({"state_dict": kit.model.state_dict()}, folder / name)
        return {"path": str(folder), "architecture": self.clip.architecture}

    @cached_property
    def mlp(self) -> dict[str, Tensor]:
        """Weights of about the published size."""
        state, generator = layered().state_dict(), torch.Generator().manual_seed(0)
        for name, value in state.items():
            noise = torch.randn(value.shape, generator=generator)
            state[name] = noise * 1.8 / value.shape[-1] ** 0.5 if value.dim() > 1 else noise
        return state

    @cached_property
    def aesthetic(self) -> dict[str, Any]:
        torch.save(self.mlp, self.wide.file.parent / FILE)
        given = {"clip": str(self.wide.file), "architecture": self.wide.architecture}
        return {"path": str(self.wide.file.parent), "verify": False, **given}

    @cached_property
    def public_blip(self) -> Public:
        (self.root / "blip").mkdir()
        return save_image_reward(self.root / "blip")

    @cached_property
    def image_reward(self) -> dict[str, Any]:
        return {"path": str(self.public_blip.file), "tokenizer": str(self.public_blip.tokenizer)}

    @cached_property
    def geneval(self) -> dict[str, Any]:
        detector = tiny_mask2former(self.root / "mask2former")
        return {"path": str(detector), "clip": str(self.clip.folder)}

    @cached_property
    def t2i_compbench(self) -> dict[str, Any]:
        given = {"vqa": str(tiny_blip_vqa(self.root / "vqa")), "vqa_size": 48, "threshold": 0.1}
        detector = tiny_grounding_dino(self.root / "grounding_dino")
        return {**given, "path": str(detector), "clip": str(self.clip.folder)}

    @cached_property
    def hpsv3(self) -> dict[str, Any]:
        (self.root / "hpsv3").mkdir()
        return save_hpsv3(self.root / "hpsv3")[2]

    @cached_property
    def dino(self) -> str:
        return save_dinov2(self.root / "dino")
