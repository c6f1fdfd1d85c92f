"""Architectures of the released models: one that is not on this machine can be counted all the
same, or built.

Settings are facts of each repository's config.json files, by the names that diffusers and
transformers give them. Sources: diffusers' conversion scripts (convert_sd3_to_diffusers.py,
convert_flux_to_diffusers.py, convert_original_stable_diffusion_to_diffusers.py), the model cards,
and the classes' defaults where a file keeps to them. tests/cost/test_estimate.py checks the
parameters that they give against the published numbers.
"""

from __future__ import annotations

from flowrl.cost import released_lm, released_wan
from flowrl.cost.pipeline_part import WeightlessPart


def _sd3(
    layers: int, table: int, *, dual: int = 0, norm: str | None = None
) -> dict[str, WeightlessPart]:
    """Return SD3's parts; width and number of heads follow from the layers, ``dual`` first blocks
    attend twice."""
    settings = {
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": layers,
        "attention_head_dim": 64,
        "num_attention_heads": layers,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 64 * layers,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": table,
        "dual_attention_layers": list(range(dual)),
        "qk_norm": norm,
    }
    # three text encoders: two CLIPs and T5
    return {
        "transformer": WeightlessPart("diffusers", "SD3Transformer2DModel", settings),
        "scheduler": WeightlessPart("diffusers", "FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        "vae": _vae(16, scale=1.5305, shift=0.0609),
        "text_encoder": _clip("CLIPTextModelWithProjection", 768, 12, 12),
        "text_encoder_2": _clip("CLIPTextModelWithProjection", 1280, 32, 20),
        "text_encoder_3": T5_XXL,
    }


def _flux(*, guidance: bool) -> dict[str, WeightlessPart]:
    settings = {
        "patch_size": 1,
        "in_channels": 64,
        "num_layers": 19,
        "num_single_layers": 38,
        "attention_head_dim": 128,
        "num_attention_heads": 24,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": guidance,
        "axes_dims_rope": [16, 56, 56],
    }
    # dev shifts its noise levels with the number of image tokens, schnell does not
    shifts = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256}
    scheduler = {**shifts, "max_image_seq_len": 4096, "shift": 3.0 if guidance else 1.0}
    return {
        "transformer": WeightlessPart("diffusers", "FluxTransformer2DModel", settings),
        "scheduler": WeightlessPart(
            "diffusers",
            "FlowMatchEulerDiscreteScheduler",
            {**scheduler, "use_dynamic_shifting": guidance},
        ),
        "vae": _vae(16, scale=0.3611, shift=0.1159),
        "text_encoder": _clip("CLIPTextModel", 768, 12, 12),
        "text_encoder_2": T5_XXL,
    }


def _vae(channels: int, *, scale: float, shift: float | None) -> WeightlessPart:
    old = shift is None  # the VAEs of Stable Diffusion 1, 2 and XL
    # as the released config.json files have them
    settings = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "block_out_channels": [128, 256, 512, 512],
        "layers_per_block": 2,
        "latent_channels": channels,
        "norm_num_groups": 32,
        "scaling_factor": scale,
        "shift_factor": shift,
        "use_quant_conv": old,
        "use_post_quant_conv": old,
    }
    return WeightlessPart("diffusers", "AutoencoderKL", settings)


def _clip(kind: str, width: int, layers: int, heads: int) -> WeightlessPart:
    settings = {
        "vocab_size": 49408,
        "max_position_embeddings": 77,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "projection_dim": width,
        "hidden_act": "quick_gelu" if width == 768 else "gelu",
    }
    return WeightlessPart("transformers", kind, settings)


T5_XXL = WeightlessPart(
    "transformers",
    "T5EncoderModel",
    {
        "vocab_size": 32128,
        "d_model": 4096,
        "d_kv": 64,
        "d_ff": 10240,
        "num_layers": 24,
        "num_heads": 64,
        "feed_forward_proj": "gated-gelu",
    },
)

_NOISE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
_SD15 = {
    "unet": WeightlessPart(
        "diffusers",
        "UNet2DConditionModel",
        {
            "sample_size": 64,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
            "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
            "block_out_channels": [320, 640, 1280, 1280],
            "layers_per_block": 2,
            "attention_head_dim": 8,
            "cross_attention_dim": 768,
        },
    ),
    "scheduler": WeightlessPart(
        "diffusers", "PNDMScheduler", {**_NOISE, "skip_prk_steps": True, "set_alpha_to_one": False}
    ),
    "vae": _vae(4, scale=0.18215, shift=None),
    "text_encoder": _clip("CLIPTextModel", 768, 12, 12),
}
_SDXL = {
    "unet": WeightlessPart(
        "diffusers",
        "UNet2DConditionModel",
        {
            "sample_size": 128,
            "in_channels": 4,
            "out_channels": 4,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "block_out_channels": [320, 640, 1280],
            "layers_per_block": 2,
            "attention_head_dim": [5, 10, 20],
            "transformer_layers_per_block": [1, 2, 10],
            "cross_attention_dim": 2048,
            "use_linear_projection": True,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
        },
    ),
    "scheduler": WeightlessPart(
        "diffusers", "EulerDiscreteScheduler", {**_NOISE, "timestep_spacing": "leading"}
    ),
    "vae": _vae(4, scale=0.13025, shift=None),
    "text_encoder": _clip("CLIPTextModel", 768, 12, 12),
    "text_encoder_2": _clip("CLIPTextModelWithProjection", 1280, 32, 20),
}

RELEASED: dict[str, dict[str, WeightlessPart]] = {
    "stabilityai/stable-diffusion-3-medium-diffusers": _sd3(24, 192),
    "stabilityai/stable-diffusion-3.5-medium": _sd3(24, 384, dual=13, norm="rms_norm"),
    "stabilityai/stable-diffusion-3.5-large": _sd3(38, 192, norm="rms_norm"),
    "black-forest-labs/FLUX.1-dev": _flux(guidance=True),
    "black-forest-labs/FLUX.1-schnell": _flux(guidance=False),
    "black-forest-labs/FLUX.1-Kontext-dev": _flux(guidance=True),
    "CompVis/stable-diffusion-v1-4": _SD15,
    "stable-diffusion-v1-5/stable-diffusion-v1-5": _SD15,
    "stabilityai/stable-diffusion-xl-base-1.0": _SDXL,
    **released_lm.parts_with_language_model(_vae(16, scale=0.3611, shift=0.1159)),
    **released_wan.wan_parts(),
}

# For a model of one kind of adapter that is neither here nor in the table: the sizes of latents and
# embeddings, which all models of the kind share, are taken from this one; its weights are not
# counted.
TYPICAL = {
    "sd3": "stabilityai/stable-diffusion-3-medium-diffusers",
    "flux": "black-forest-labs/FLUX.1-dev",
    "flux_kontext": "black-forest-labs/FLUX.1-Kontext-dev",
    "sd15": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "qwen_image": "Qwen/Qwen-Image",
    "qwen_edit": "Qwen/Qwen-Image-Edit",
    "qwen_edit_plus": "Qwen/Qwen-Image-Edit-2509",
    "z_image": "Tongyi-MAI/Z-Image",
    "flux2": "black-forest-labs/FLUX.2-dev",
    "flux2_klein": "black-forest-labs/FLUX.2-klein-base-4B",
    "wan": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "wan_i2v": "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
}
