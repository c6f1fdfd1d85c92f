"""A random ImageReward made of other people's modules, in the layout of the public file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from transformers import (
    BertTokenizerFast,
    BlipConfig,
    BlipForQuestionAnswering,
    BlipTextConfig,
    BlipTextModel,
)

WORDS = {"a": 1037, "red": 2417, "blue": 2630, "circle": 4418, "square": 2675, "##s": 2015}
WORDS["[UNK]"] = 100
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


def _other_peoples_modules(
    *, width: int, depth: int, text: int, inner: int, layers: int
) -> tuple[nn.Module, nn.Module]:
    """Return timm's ViT/16 at 224 px and transformers' BERT of BLIP; heads are 64 wide."""
    options: dict[str, Any] = {
        "img_size": 224,
        "patch_size": 16,
        "num_classes": 0,
        "global_pool": "",
    }
    options |= {"embed_dim": width, "depth": depth, "num_heads": width // 64}
    vision = timm.models.VisionTransformer(**options)
    config = BlipTextConfig(
        vocab_size=30524,
        encoder_hidden_size=width,
        hidden_size=text,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=text // 64,
        max_position_embeddings=512,
        is_decoder=True,  # builds the cross-attention; the tests turn the causal mask off
    )
    return vision.eval(), BlipTextModel(config, add_pooling_layer=False).eval()


def _state(vision: nn.Module, text: nn.Module) -> dict[str, Tensor]:
    state = {f"blip.visual_encoder.{k}": v for k, v in vision.state_dict().items()}
    return state | {f"blip.text_encoder.{k}": v for k, v in text.state_dict().items()}


def public_state() -> dict[str, Tensor]:
    """Return the public model's tensors without memory: ViT-L/16, BERT-base, and the head."""
    with torch.device("meta"):
        state = _state(
            *_other_peoples_modules(width=1024, depth=24, text=768, inner=3072, layers=12)
        )
        for place, (rows, columns) in head_shapes(768).items():
            state[f"mlp.layers.{place}.weight"] = torch.empty(rows, columns)
            state[f"mlp.layers.{place}.bias"] = torch.empty(rows)
    return state


def head_shapes(width: int) -> dict[str, tuple[int, int]]:
    """Return the head's shapes as the public file names them."""
    return {"0": (1024, width), "2": (128, 1024), "4": (64, 128), "6": (16, 64), "7": (1, 16)}


def save_image_reward(folder: Path) -> Public:
    """Write the weights and a tokenizer of a few words into a folder."""
    generator = torch.Generator().manual_seed(0)
    vision, text = _other_peoples_modules(width=192, depth=2, text=128, inner=256, layers=2)
    _randomize(vision, generator)
    _randomize(text, generator)
    state = _state(vision, text)
    state["blip.text_encoder.embeddings.position_ids"] = torch.arange(512)[None]
    for name, width in (("vision_proj", 192), ("text_proj", 128)):
        state[f"blip.{name}.weight"] = torch.zeros(256, width)
        state[f"blip.{name}.bias"] = torch.zeros(256)
    for place, (rows, columns) in head_shapes(128).items():
        draws = torch.randn(rows, columns, generator=generator)
        state[f"mlp.layers.{place}.weight"] = 1.6 * draws / columns**0.5
        state[f"mlp.layers.{place}.bias"] = torch.randn(rows, generator=generator)
    torch.save(state, folder / "ImageReward.pt")
    words = {0: "[PAD]", CLS: "[CLS]", SEP: "[SEP]", 103: "[MASK]"}
    words |= {place: word for word, place in WORDS.items()}
    lines = [words.get(place, f"[unused{place}]") for place in range(30522)]
    (folder / "bert").mkdir()
    (folder / "bert/vocab.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Public(vision, text, state, folder / "ImageReward.pt", folder / "bert")


def tiny_blip_vqa(folder: Path, *, seed: int = 0) -> Path:
    """Save a random BlipForQuestionAnswering of 32 px with a tokenizer of single letters, yes and
    no."""
    letters = [*"abcdefghijklmnopqrstuvwxyz?"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "yes", "no", *letters]
    words += [f"##{letter}" for letter in letters]
    BertTokenizerFast(vocab={word: place for place, word in enumerate(words)}).save_pretrained(
        folder
    )
    shared = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = {**shared, "num_hidden_layers": 2, "max_position_embeddings": 64}
    text |= {"encoder_hidden_size": 32, "vocab_size": len(words) + 2, "projection_dim": 16}
    text |= {"bos_token_id": len(words), "sep_token_id": 3, "pad_token_id": 0}
    vision = {**shared, "num_hidden_layers": 2, "image_size": 32, "patch_size": 16}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = BlipForQuestionAnswering(
            BlipConfig(text_config=text, vision_config=vision, projection_dim=16)
        )
        with torch.no_grad():
            for value in network.parameters():
                value.add_(0.3 * torch.randn_like(value))
    network.save_pretrained(folder)
    return folder
