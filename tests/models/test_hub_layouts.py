"""Folders as the hub has them: tensors under names of other libraries, tied weights stored once.

Each is a tiny pipeline whose file is rewritten into a released model's layout; what it encodes and
decodes must stay the same to the bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from adapterkit import PROMPTS, Folders, load_folder
from modelkit import edit, noise
from safetensors.torch import load_file, save_file

Change = Callable[[str], str | None]  # of a tensor's name; None: it is not stored


def renamed(*pairs: tuple[str, str]) -> Change:
    """Return what replaces patterns in a name, one after the other."""

    def change(name: str) -> str:
        for old, new in pairs:
            name = re.sub(old, new, name)
        return name

    return change


def without(gone: str) -> Change:
    """Return what leaves a tensor out."""
    return lambda name: None if name == gone else name


# label -> pipeline, part, settings of its config.json, change of names
LAYOUTS: dict[str, tuple[str, str, dict[str, bool], Change]] = {
    # stable-diffusion-v1-5: names of transformers 4
    "clip": ("sd15", "text_encoder", {}, renamed((r"^(?!text_model\.)", "text_model."))),
    # stable-diffusion-v1-5: the VAE's attention before diffusers 0.18
    "old vae": (
        "sd15",
        "vae",
        {},
        renamed(
            (r"(attentions\.0)\.to_q", r"\1.query"),
            (r"(attentions\.0)\.to_k", r"\1.key"),
            (r"(attentions\.0)\.to_v", r"\1.value"),
            (r"(attentions\.0)\.to_out\.0", r"\1.proj_attn"),
        ),
    ),
    # Wan: the settings say that nothing is tied, and the embedding is stored once all the same
    "umt5": (
        "wan",
        "text_encoder",
        {"tie_word_embeddings": False},
        without("encoder.embed_tokens.weight"),
    ),
    # Qwen2.5-VL as later transformers save it; the tiny one is in the names of Qwen-Image
    "new qwen": (
        "qwen_image",
        "text_encoder",
        {},
        renamed(
            (r"^model\.(?!visual|language_model)", "model.language_model."),
            (r"^visual\.", "model.visual."),
        ),
    ),
    # Mistral-3 likewise; the tiny one has the older names
    "new mistral": (
        "flux2",
        "text_encoder",
        {},
        renamed(
            (r"^language_model\.model\.", "model.language_model."),
            (r"^language_model\.lm_head", "lm_head"),
            (r"^(vision_tower|multi_modal)", r"model.\1"),
        ),
    ),
    # FLUX.2 klein: Qwen3-4B ties its output layer to the embedding
    "qwen3": (
        "flux2_klein",
        "text_encoder",
        {"tie_word_embeddings": True},
        without("lm_head.weight"),
    ),
}


@pytest.mark.parametrize("label", LAYOUTS)
def test_a_released_layout_is_read(folders: Folders, tmp_path: Path, label: str) -> None:
    name, part, settings, change = LAYOUTS[label]
    folder = copytree(folders[name], tmp_path / "model")
    edit(f"{part}/config.json", **settings)(folder)
    (file,) = (folder / part).glob("*.safetensors")
    stored = {}
    for old, tensor in load_file(file).items():
        new = change(old)
        if new is not None:
            stored[new] = tensor
    if label == "clip":  # transformers kept it before 4.31
        stored["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(stored, file, metadata={"format": "pt"})

    found, expected = load_folder(name, folder), folders.load(name)
    mine, theirs = found.encode(PROMPTS[:2]), expected.encode(PROMPTS[:2])
    assert all(torch.equal(mine[key], rows) for key, rows in theirs.items())
    x = noise(expected, 1, 32, 32)
    assert torch.equal(found.decode(x), expected.decode(x))
