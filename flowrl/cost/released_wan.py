"""Architectures of the released Wan models.

Settings are facts of each repository's config.json files, by the names that diffusers and
transformers give them; what a class has by default, which is Wan 2.1 14B, is left out.
tests/cost/test_estimate.py checks the parameters against the published numbers.
"""

from __future__ import annotations

from typing import Any

from flowrl.cost.pipeline_part import WeightlessPart

UMT5_XXL = WeightlessPart(
    "transformers",
    "UMT5EncoderModel",
    {
        "vocab_size": 256384,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
    },
)
CLIP = WeightlessPart(
    "transformers",
    "CLIPVisionModelWithProjection",
    {
        "hidden_size": 1280,
        "projection_dim": 1024,
        "intermediate_size": 5120,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "image_size": 224,
        "patch_size": 14,
        "hidden_act": "gelu",
    },
)
# of Wan 2.2 TI2V-5B: a time for each token, and a VAE of its own
HYBRID: dict[str, Any] = {
    "num_attention_heads": 24,
    "ffn_dim": 14336,
    "num_layers": 30,
    "in_channels": 48,
    "out_channels": 48,
}
HYBRID_VAE: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "in_channels": 12,
    "out_channels": 12,
    "is_residual": True,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}  # of 1.3B


def _wan(
    settings: dict[str, Any],
    *,
    shift: float,
    experts: int = 1,
    vae: dict[str, Any] | None = None,
    sees: bool = False,
) -> dict[str, WeightlessPart]:
    transformer = {"text_dim": 4096, "rope_max_seq_len": 1024, **settings}
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    parts = {"transformer": WeightlessPart("diffusers", "WanTransformer3DModel", transformer)}
    if experts > 1:
        parts["transformer_2"] = parts["transformer"]
    return {
        **parts,
        "scheduler": WeightlessPart("diffusers", "UniPCMultistepScheduler", flow),
        "vae": WeightlessPart("diffusers", "AutoencoderKLWan", vae or {}),
        "text_encoder": UMT5_XXL,
        **({"image_encoder": CLIP} if sees else {}),
    }


def wan_parts() -> dict[str, dict[str, WeightlessPart]]:
    """Return the parts of each model by its hub id; of the VAE of TI2V-5B not what latents are
    scaled by."""
    return {
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": _wan(SMALL, shift=3.0),
        "Wan-AI/Wan2.1-T2V-14B-Diffusers": _wan({}, shift=5.0),
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers": _wan({}, shift=3.0, experts=2),
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers": _wan(HYBRID, shift=5.0, vae=HYBRID_VAE),
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": _wan(
            {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}, shift=3.0, sees=True
        ),
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers": _wan({"in_channels": 36}, shift=5.0, experts=2),
    }
