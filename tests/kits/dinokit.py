"""A tiny random DINOv2, its tokens by the library's own model, and images with references."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from flowrl.core.types import RewardBatch

TINY: Any = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
# ImageNet's, from torchvision's docs
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def save_dinov2(folder: Path, *, scale: float = 1.0) -> str:
    """Save a random Dinov2Model whose features are `scale` times those of scale 1."""
    torch.manual_seed(3)
    config = Dinov2Config(image_size=42, patch_size=14, mlp_ratio=2, **TINY)
    network = Dinov2Model(config)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.3 * torch.randn_like(p))
        network.layernorm.weight.mul_(scale)  # the last operation of the network is linear in both
        network.layernorm.bias.mul_(scale)
    network.save_pretrained(folder, safe_serialization=True)
    return str(folder)


def with_references(images: Tensor, references: Sequence[Any]) -> RewardBatch:
    """Put each image together with the references of its record."""
    n = len(images)
    meta = [{"prompt": f"p{i}", "references": r} for i, r in enumerate(references)]
    return RewardBatch(images, [m["prompt"] for m in meta], torch.arange(n), meta, torch.zeros(n))


def tokens_of(network: Any, images: Tensor, side: int) -> np.ndarray:
    """Compute all tokens by the library's own model, one image at a time, with numpy
    preprocessing."""
    out = []
    for image in images:
        one = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).contiguous().numpy())
        pixels = np.asarray(one.resize((side, side), Image.Resampling.BICUBIC), np.float64) / 255
        shown = torch.from_numpy(((pixels - MEAN) / STD).transpose(2, 0, 1)[None]).float()
        with torch.no_grad():
            out.append(network(shown).last_hidden_state[0].double().numpy())
    return np.stack(out)
