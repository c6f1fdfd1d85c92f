"""Tiny random networks of scorers, made of other people's modules in the layouts of public files:
ImageReward, BLIP, Mask2Former, OWLv2, Grounding DINO and DINOv2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    BertTokenizerFast,
    BlipConfig,
    BlipForQuestionAnswering,
    BlipTextConfig,
    BlipTextModel,
    CLIPTokenizer,
    Dinov2Config,
    Dinov2Model,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessor,
    GroundingDinoProcessor,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessor,
    Owlv2Config,
    Owlv2ForObjectDetection,
    Owlv2ImageProcessor,
    Owlv2Processor,
    SwinConfig,
)

from flowrl.core.prompt_lists import CLASSES, COCO_NAMES
from flowrl.core.types import RewardBatch


def _random(build: Any, seed: int, scale: float = 0.1) -> Any:
    """Make a network whose parameters are all random: no bias is 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build().eval()
        with torch.no_grad():
            for value in network.parameters():
                value.add_(scale * torch.randn_like(value))
    return network


# ----------------------------------------------------------------------------- ImageReward and BLIP


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
    options: dict[str, Any] = {"img_size": 224, "patch_size": 16, "num_classes": 0}
    options |= {"global_pool": ""}
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
    tokenizer = BertTokenizerFast(vocab={word: place for place, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    shared = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = {**shared, "num_hidden_layers": 2, "max_position_embeddings": 64}
    text |= {"encoder_hidden_size": 32, "vocab_size": len(words) + 2, "projection_dim": 16}
    text |= {"bos_token_id": len(words), "sep_token_id": 3, "pad_token_id": 0}
    vision = {**shared, "num_hidden_layers": 2, "image_size": 32, "patch_size": 16}
    config = BlipConfig(text_config=text, vision_config=vision, projection_dim=16)
    _random(lambda: BlipForQuestionAnswering(config), seed, 0.3).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------------------------- detectors


SIDE = 64  # of the images that the networks are shown


def _swin(stages: list[str]) -> SwinConfig:
    return SwinConfig(
        image_size=SIDE,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=stages,
    )


def tiny_mask2former(folder: Path, *, seed: int = 0, sure: float = 20.0) -> Path:
    """Save a Mask2Former with COCO's labels; `sure` stretches its classes, so that some are
    likely."""
    names = [COCO_NAMES.get(name, name) for name in CLASSES]
    config = Mask2FormerConfig(
        backbone_config=_swin(["stage1", "stage2", "stage3", "stage4"]),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=12,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    network = _random(lambda: Mask2FormerForUniversalSegmentation(config), seed)
    with torch.no_grad():
        network.class_predictor.weight.mul_(sure)
        network.class_predictor.bias[-1] = -sure  # hardly ever "nothing"
    network.save_pretrained(folder)
    images = Mask2FormerImageProcessor(size={"height": SIDE, "width": SIDE}, num_labels=80)
    images.save_pretrained(folder)
    return folder


def tiny_owl(folder: Path, tokenizer: CLIPTokenizer, *, seed: int = 0) -> Path:
    """Save an OWLv2 that reads with a CLIP tokenizer."""
    shared = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    shared |= {"num_attention_heads": 2}
    config = Owlv2Config(
        text_config={**shared, "vocab_size": len(tokenizer), "max_position_embeddings": 16},
        vision_config={**shared, "image_size": SIDE, "patch_size": 16},
        projection_dim=16,
    )
    _random(lambda: Owlv2ForObjectDetection(config), seed).save_pretrained(folder)
    images = Owlv2ImageProcessor(size={"height": SIDE, "width": SIDE})
    Owlv2Processor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def tiny_grounding_dino(folder: Path, *, seed: int = 0) -> Path:
    """Save a Grounding DINO whose BERT knows single letters."""
    letters = [*"abcdefghijklmnopqrstuvwxyz.?"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters]
    words += [f"##{letter}" for letter in letters]
    tokenizer = BertTokenizerFast(vocab={word: place for place, word in enumerate(words)})
    config = GroundingDinoConfig(
        backbone_config=_swin(["stage2", "stage3", "stage4"]),
        text_config={
            "model_type": "bert",
            "vocab_size": len(words),
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        d_model=32,
        num_queries=6,
        encoder_layers=1,
        encoder_ffn_dim=16,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_ffn_dim=16,
        decoder_attention_heads=2,
        num_feature_levels=4,
    )
    _random(lambda: GroundingDinoForObjectDetection(config), seed).save_pretrained(folder)
    images = GroundingDinoImageProcessor(size={"shortest_edge": 2 * SIDE, "longest_edge": 2 * SIDE})
    GroundingDinoProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


# --------------------------------------------------------------------------------------------- DINO


TINY: Any = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
# ImageNet's, from torchvision's docs
MEANS, SPREADS = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def save_dinov2(folder: Path, *, scale: float = 1.0) -> str:
    """Save a random Dinov2Model whose features are `scale` times those of scale 1."""
    config = Dinov2Config(image_size=42, patch_size=14, mlp_ratio=2, **TINY)
    network = _random(lambda: Dinov2Model(config), 3, 0.3)
    with torch.no_grad():
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
        shown = torch.from_numpy(((pixels - MEANS) / SPREADS).transpose(2, 0, 1)[None]).float()
        with torch.no_grad():
            out.append(network(shown).last_hidden_state[0].double().numpy())
    return np.stack(out)
