"""Build folders of real Wan pipelines with random weights, for one CPU core and without a
network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tiny import LETTERS, WIDTH, _t5_tokenizer
from transformers import UMT5Config, UMT5EncoderModel

# what the scheduler's file of the released models sets
UNIPC: dict[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "num_train_timesteps": 1000,
}


def tiny_wan(folder: Path, *, seed: int = 0, scheduler: Any = None) -> Path:
    """Save a tiny real Wan 2.1 text-to-video pipeline (16 latent channels, VAE factors 4 in time
    and 8 in space, patch 2) and return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(
            transformer=wan_transformer(),
            scheduler=scheduler or UniPCMultistepScheduler(**UNIPC),
            vae=wan_vae(),
            text_encoder=umt5(),
            tokenizer=_t5_tokenizer(),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def wan_transformer(**more: Any) -> WanTransformer3DModel:
    """Make a network of two blocks."""
    sizes: dict[str, Any] = {"in_channels": 16, "out_channels": 16, "text_dim": 2 * WIDTH}
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=64,
        **(sizes | more),
    )


def wan_vae() -> AutoencoderKLWan:
    """Make a VAE of Wan 2.1's structure."""
    return AutoencoderKLWan(base_dim=4, num_res_blocks=1)


def umt5() -> UMT5EncoderModel:
    """Make a text encoder."""
    config = UMT5Config(
        vocab_size=4 + len(LETTERS),
        d_model=2 * WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return UMT5EncoderModel(config).eval()
