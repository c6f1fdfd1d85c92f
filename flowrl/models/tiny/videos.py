"""Build folders of real Wan pipelines with random weights, for one CPU core and without a
network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    UMT5Config,
    UMT5EncoderModel,
)

from flowrl.models.tiny.stills import WIDTH, t5_settings, t5_tokenizer

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
            tokenizer=t5_tokenizer(),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_ti2v(folder: Path, *, seed: int = 5) -> Path:
    """Save a tiny Wan 2.2 TI2V pipeline (12 latent channels, VAE factors 4 in time and 16 in space,
    a time for each token) and return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(
            transformer=wan_transformer(in_channels=12, out_channels=12),
            scheduler=UniPCMultistepScheduler(**(UNIPC | {"flow_shift": 5.0})),
            vae=_residual_vae(),
            text_encoder=umt5(),
            tokenizer=t5_tokenizer(),
            expand_timesteps=True,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_wan22(folder: Path, *, seed: int = 3, boundary: float | None = 0.875) -> Path:
    """Save a tiny Wan 2.2 text-to-video pipeline of two experts and return its folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = WanPipeline(
            transformer=wan_transformer(),
            transformer_2=wan_transformer(),
            boundary_ratio=boundary,
            scheduler=UniPCMultistepScheduler(**UNIPC),
            vae=wan_vae(),
            text_encoder=umt5(),
            tokenizer=t5_tokenizer(),
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def tiny_i2v(folder: Path, *, experts: bool, clip: Any = None, seed: int = 4) -> Path:
    """Save a tiny Wan image-to-video pipeline, of 2.2's two experts or with 2.1's image encoder, by
    default of the class that the released indexes name, and return its folder."""
    given: dict[str, Any] = {"in_channels": 36}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if experts:
            own: dict[str, Any] = {"transformer_2": wan_transformer(**given), "boundary_ratio": 0.9}
        else:
            given |= {"image_dim": WIDTH, "added_kv_proj_dim": 24}
            own = {"image_encoder": _clip_vision(clip), "image_processor": _clip_processor()}
        pipeline = WanImageToVideoPipeline(
            transformer=wan_transformer(**given),
            scheduler=UniPCMultistepScheduler(**UNIPC),
            vae=wan_vae(),
            text_encoder=umt5(),
            tokenizer=t5_tokenizer(),
            **own,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _clip_vision(kind: Any = None) -> Any:
    config = CLIPVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
        projection_dim=6,
    )
    return (kind or CLIPVisionModelWithProjection)(config).eval()


def _clip_processor() -> CLIPImageProcessor:
    side = {"height": 32, "width": 32}
    return CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side)


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


def _residual_vae() -> AutoencoderKLWan:
    """Make a VAE of Wan 2.2 TI2V-5B's structure."""
    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=12,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=[0.02 * i - 0.1 for i in range(12)],
        latents_std=[0.5 + 0.1 * i for i in range(12)],
    )


def umt5() -> UMT5EncoderModel:
    """Make a text encoder."""
    return UMT5EncoderModel(UMT5Config(**t5_settings())).eval()
