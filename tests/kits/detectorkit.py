"""Tiny random detectors of the classes that public weights have: Mask2Former, OWLv2, Grounding
DINO."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertTokenizerFast,
    CLIPTokenizer,
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


def _random(build: Any, seed: int) -> Any:
    """Make a network whose parameters are all random: no bias is 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = build().eval()
        with torch.no_grad():
            for value in network.parameters():
                value.add_(0.1 * torch.randn_like(value))
    return network


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
