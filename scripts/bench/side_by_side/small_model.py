"""A small model for measuring time: public trainers pad every prompt to 77 tokens of CLIP, and the
shapes model reads 20, so it gets more places."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

PLACES = 77
WEIGHT = "text_model.embeddings.position_embedding.weight"


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
