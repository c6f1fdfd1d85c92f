"""A CLIP whose vision tower knows how noisy a state the image was estimated from."""

from __future__ import annotations

import math
import re
from typing import Any, Literal

import torch
from torch import Tensor, nn

SINES = 256


class Clock(nn.Module):
    """A time in [0, 1000) -> a vector [B, D]: cosines and sines, then two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SINES, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time: Tensor) -> Tensor:
        """time [B] -> [B, D]."""
        half = torch.arange(SINES // 2, device=time.device)
        speed = torch.exp(-math.log(10000.0) * half / (SINES // 2))
        angle = time.float()[:, None] * speed
        waves = torch.cat([angle.cos(), angle.sin()], 1)
        first = next(self.layers.parameters())
        made: Tensor = self.layers(waves.to(first.dtype))
        return made


def _still(width: int, biases: list[int]) -> nn.Sequential:
    """Make a layer that says the same at every time, as many vectors as there are biases."""
    layer = nn.Linear(width, len(biases) * width)
    nn.init.zeros_(layer.weight)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor(biases).repeat_interleave(width))
    return nn.Sequential(nn.SiLU(), layer)


class StepClip(nn.Module):
    """SPO's step-aware preference model (2406.04314): transformers' CLIPModel with a shift, scale
    and gate of each vision layer's two parts that follow from the time, and a shift and scale of
    the pooled vector.

    At the start all of that changes nothing: its layers are 0 but for the gates' biases, 1.
    """

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.clip = clip
        config = clip.config.vision_config
        width = config.hidden_size
        self.clock = Clock(width)
        # shift, scale, gate of the attention; shift, scale, gate of the MLP
        gates = [0, 0, 1, 0, 0, 1]
        self.parts = nn.ModuleList(_still(width, gates) for _ in range(config.num_hidden_layers))
        self.end = _still(width, [0, 0])

    def see(self, pixels: Tensor, time: Tensor) -> Tensor:
        """Embed prepared images [B, 3, H, W] at times [B] in [0, 1000) -> [B, D]."""
        vision, now = self.clip.vision_model, self.clock(time)
        x = vision.pre_layrnorm(vision.embeddings(pixels))
        for layer, part in zip(vision.encoder.layers, self.parts, strict=True):
            shift, scale, gate, shift2, scale2, gate2 = part(now)[:, None].chunk(6, -1)
            seen = layer.layer_norm1(x) * (1 + scale) + shift
            x = x + gate * layer.self_attn(seen, attention_mask=None)[0]
            x = x + gate2 * layer.mlp(layer.layer_norm2(x) * (1 + scale2) + shift2)
        shift, scale = self.end(now).chunk(2, -1)
        pooled = vision.post_layernorm(x[:, 0]) * (1 + scale) + shift
        embedding: Tensor = self.clip.visual_projection(pooled)
        return embedding

    def read(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Embed tokens [B, T] -> [B, D]."""
        embedding: Tensor = self.clip.get_text_features(ids, attention_mask=mask).pooler_output
        return embedding

    def score(self, seen: Tensor, read: Tensor) -> Tensor:
        """Return ``exp(logit_scale) cos`` of image and text embeddings [B, D] -> [B]."""
        cosine = nn.functional.cosine_similarity(seen, read, dim=-1)
        value: Tensor = self.clip.logit_scale.exp() * cosine
        return value


def from_published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the weights of SPO's code the names of `StepClip`; weights that have these names already
    stay as they are.

    There the model is below ``model.``, the clock is ``t_embedder.mlp``, and the layers that follow
    from the time stand inside of the tower's, each as ``adaLN_modulation``. Positions, which are
    counted and not learned, are left out (RockeyCoss/SPO at 27a8642, time_conditioned_clip.py).
    """
    if not any(name.startswith("model.t_embedder.") for name in state):
        return state
    found = {}
    for name, value in state.items():
        if name.endswith(".position_ids"):
            continue
        new = name.replace("model.t_embedder.mlp.", "clock.layers.")
        layer = r"^model\.vision_model\.encoder\.layers\.(\d+)\.adaLN_modulation"
        new = re.sub(layer, r"parts.\1", new)
        new = re.sub(r"^model\.vision_model\.adaLN_modulation", "end", new)
        found[re.sub(r"^model\.", "clip.", new)] = value
    return found


def times(sigma: Tensor, clock: Literal["flow", "sd"]) -> Tensor:
    """Turn sigmas [B] of the flow path into times [B] from 0 to 999, as the model was trained with.

    "sd": the step t of Stable Diffusion's schedule (betas from 0.00085 to 0.012, linear in their
    roots) with the nearest ``sigma = s / (a + s)``, a^2 + s^2 = 1.
    """
    if clock == "flow":
        return (sigma * 1000).clamp(0, 999)
    roots = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64)
    kept = (1 - roots.square()).cumprod(0)
    a, s = kept.sqrt(), (1 - kept).sqrt()
    known = s / (a + s)
    place: Tensor = (sigma.double()[:, None] - known).abs().argmin(1)
    return torch.where(sigma > 0, place.float(), 0.0)
