"""A random ImageReward made of other people's modules, in the layout of the public file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import timm
import torch
from torch import Tensor, nn
from transformers import BlipTextConfig, BlipTextModel

WORDS = {
    "a": 1037,
    "red": 2417,
    "blue": 2630,
    "circle": 4418,
    "square": 2675,
    "##s": 2015,
    "[UNK]": 100,
}
CLS, SEP, PAD = 101, 102, 0  # as in bert-base-uncased


class Public(NamedTuple):
    """A random model made of other people's modules, and its file and tokenizer on disk."""

    vision: nn.Module  # timm
    text: nn.Module  # transformers
    state: dict[str, Tensor]
    file: Path
    tokenizer: Path


def _randomize(module: nn.Module, generator: torch.Generator) -> None:
    for name, value in module.named_parameters():
        scale = 0.1 if value.dim() < 2 else 1.5 / value.shape[-1] ** 0.5
        value.data = scale * torch.randn(value.shape, generator=generator) + (
            name.lower().find("norm") >= 0
        )


def _other_peoples_modules() -> tuple[nn.Module, nn.Module]:
    vision = timm.models.VisionTransformer(
        img_size=224,
        patch_size=16,
        embed_dim=192,
        depth=2,
        num_heads=3,
        num_classes=0,
        global_pool="",
    )
    config = BlipTextConfig(
        vocab_size=30524,
        encoder_hidden_size=192,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        is_decoder=True,  # builds the cross-attention; the calls below turn the causal mask off
    )
    return vision.eval(), BlipTextModel(config, add_pooling_layer=False).eval()


def head_shapes(width: int) -> dict[str, tuple[int, int]]:
    """Return the head's shapes as the public file names them."""
    return {"0": (1024, width), "2": (128, 1024), "4": (64, 128), "6": (16, 64), "7": (1, 16)}


def save_image_reward(folder: Path) -> Public:
    """Write the weights and a tokenizer of a few words into a folder."""
    generator = torch.Generator().manual_seed(0)
    vision, text = _other_peoples_modules()
    _randomize(vision, generator)
    _randomize(text, generator)
    state = {f"blip.visual_encoder.{k}": v for k, v in vision.state_dict().items()}
    state |= {f"blip.text_encoder.{k}": v for k, v in text.state_dict().items()}
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(512)[None]
    for name, width in (("vision_proj", 192), ("text_proj", 128)):
        state |= {
            f"blip.{name}.weight": torch.zeros(256, width),
            f"blip.{name}.bias": torch.zeros(256),
        }
    for place, (rows, columns) in head_shapes(128).items():
        state[f"mlp.layers.{place}.weight"] = (
            1.6 * torch.randn(rows, columns, generator=generator) / columns**0.5
        )
        state[f"mlp.layers.{place}.bias"] = torch.randn(rows, generator=generator)
    torch.save(state, folder / "ImageReward.pt")
    words = {
        0: "[PAD]",
        CLS: "[CLS]",
        SEP: "[SEP]",
        103: "[MASK]",
        **{place: word for word, place in WORDS.items()},
    }
    lines = [words.get(place, f"[unused{place}]") for place in range(30522)]
    (folder / "bert").mkdir()
    (folder / "bert/vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Public(vision, text, state, folder / "ImageReward.pt", folder / "bert")
