"""Small models for measuring time: nothing needs to be learnt of them.

Public trainers pad every prompt to 77 tokens of CLIP; the shapes model reads 20, so it gets more
places. FLUX is a small network of the real class with random weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
from diffusers import FluxTransformer2DModel as Network
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, T5EncoderModel

PLACES = 77
WEIGHT = "text_model.embeddings.position_embedding.weight"
HEAD = 32  # numbers in an attention head of the FLUX


def lengthened(source: Path, target: Path) -> Path:
    """Copy the folder of an SD3 pipeline and give its CLIPs 77 places -> the copy."""
    shutil.copytree(source, target)
    for number in ("", "_2"):
        encoder, tokenizer = target / f"text_encoder{number}", target / f"tokenizer{number}"
        change(encoder / "config.json", max_position_embeddings=PLACES)
        change(tokenizer / "tokenizer_config.json", model_max_length=PLACES)
        tensors = load_file(encoder / "model.safetensors")
        known = tensors[WEIGHT]
        more = torch.zeros(PLACES - len(known), known.shape[1], dtype=known.dtype)
        tensors[WEIGHT] = torch.cat([known, more])
        save_file(tensors, encoder / "model.safetensors", metadata={"format": "pt"})
    return target


def change(file: Path, **values: int) -> None:
    """Set values in a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values, indent=2))


def random_flux(
    source: Path, target: Path, *, heads: int = 4, double: int = 1, single: int = 2
) -> Path:
    """Save a FLUX of so many attention heads and blocks, with random weights; VAE, tokenizers and
    T5 are those of the SD3 pipeline in `source` -> its folder."""
    encoder = T5EncoderModel.from_pretrained(source / "text_encoder_3")
    words = CLIPTextConfig.from_pretrained(source / "text_encoder")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network(
            in_channels=64,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=HEAD,
            num_attention_heads=heads,
            joint_attention_dim=encoder.config.d_model,
            pooled_projection_dim=words.hidden_size,
            guidance_embeds=True,
            axes_dims_rope=(8, 12, 12),
        )
        pipeline = FluxPipeline(
            transformer=network,
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
            vae=AutoencoderKL.from_pretrained(source / "vae", sample_size=1024),  # none is tiled
            text_encoder=CLIPTextModel(words).eval(),
            tokenizer=AutoTokenizer.from_pretrained(source / "tokenizer"),
            text_encoder_2=encoder.eval(),
            tokenizer_2=AutoTokenizer.from_pretrained(source / "tokenizer_3"),
        )
    pipeline.save_pretrained(target, safe_serialization=True)
    return target
