"""Architectures of the released models: one that is not on this machine can be counted all the
same, or built.

Settings are facts of each repository's config.json files, by the names that diffusers and
transformers give them; what a class has by default is left out. Sources: diffusers' classes and
conversion scripts (convert_sd3_to_diffusers.py, convert_flux_to_diffusers.py,
convert_original_stable_diffusion_to_diffusers.py), the model cards, and the config.json files of
Qwen2.5-VL, Qwen3 and Mistral Small 3. FLUX.2 klein's blocks are reconstructed: they are what gives
4 and 9 billion parameters. tests/cost/test_estimate.py checks the parameters that they give against
the published numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class WeightlessPart(NamedTuple):
    """One part of a pipeline, without weights."""

    library: str  # diffusers or transformers
    kind: str  # name of the class
    settings: dict[str, Any]  # its config.json


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

EULER = "FlowMatchEulerDiscreteScheduler"
_QWEN = {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}


def _qwen3(width: int, inner: int, *, tied: bool) -> WeightlessPart:
    settings = {
        **_QWEN,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 36,
        "tie_word_embeddings": tied,
    }
    return WeightlessPart("transformers", "Qwen3ForCausalLM", settings)


QWEN3_4B = _qwen3(2560, 9728, tied=True)
QWEN3_8B = _qwen3(4096, 12288, tied=False)
QWEN_VL_7B = WeightlessPart(
    "transformers",
    "Qwen2_5_VLForConditionalGeneration",
    {
        "text_config": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
        },
        "tie_word_embeddings": False,
    },
)
MISTRAL_24B = WeightlessPart(
    "transformers",
    "Mistral3ForConditionalGeneration",
    {
        "text_config": {
            "model_type": "mistral",
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "head_dim": 64,
            "patch_size": 14,
            "image_size": 1540,
        },
        "tie_word_embeddings": False,
    },
)


def _qwen_image(**more: Any) -> dict[str, WeightlessPart]:
    transformer = {"in_channels": 64, "out_channels": 16, "joint_attention_dim": 3584, **more}
    shifts = {
        # the scheduler's settings: noise levels shift with the number of image tokens
        "use_dynamic_shifting": True,
        "base_shift": 0.5,
        "max_shift": 0.9,
        "base_image_seq_len": 256,
        "max_image_seq_len": 8192,
        "shift_terminal": 0.02,
    }
    vae = {"z_dim": 16, "temperal_downsample": [False, True, True]}
    return {
        "transformer": WeightlessPart("diffusers", "QwenImageTransformer2DModel", transformer),
        "scheduler": WeightlessPart("diffusers", EULER, shifts),
        "vae": WeightlessPart("diffusers", "AutoencoderKLQwenImage", vae),
        "text_encoder": QWEN_VL_7B,
    }


def _z_image(shift: float, vae: WeightlessPart) -> dict[str, WeightlessPart]:
    transformer = {"in_channels": 16, "cap_feat_dim": 2560}
    return {
        "transformer": WeightlessPart("diffusers", "ZImageTransformer2DModel", transformer),
        "scheduler": WeightlessPart("diffusers", EULER, {"shift": shift}),
        "vae": vae,
        "text_encoder": QWEN3_4B,
    }


def _flux2(
    encoder: WeightlessPart, layers: int, single: int, heads: int, text: int, *, guidance: bool
) -> dict[str, WeightlessPart]:
    transformer: dict[str, Any] = {
        "in_channels": 128,
        "num_layers": layers,
        "num_single_layers": single,
        "num_attention_heads": heads,
        "joint_attention_dim": text,
        "guidance_embeds": guidance,
    }
    vae = {"block_out_channels": [128, 256, 512, 512], "latent_channels": 32}
    return {
        "transformer": WeightlessPart("diffusers", "Flux2Transformer2DModel", transformer),
        "scheduler": WeightlessPart("diffusers", EULER, {"use_dynamic_shifting": True}),
        "vae": WeightlessPart("diffusers", "AutoencoderKLFlux2", vae),
        "text_encoder": encoder,
    }


def parts_with_language_model(flux_vae: WeightlessPart) -> dict[str, dict[str, WeightlessPart]]:
    """Return the parts of each model by its hub id; Z-Image's VAE is FLUX.1's."""
    # two sizes of klein; each has the same shapes distilled and as a base model
    four = _flux2(QWEN3_4B, 5, 20, 24, 3 * 2560, guidance=False)
    nine = _flux2(QWEN3_8B, 8, 24, 32, 3 * 4096, guidance=False)
    return {
        "Qwen/Qwen-Image": _qwen_image(),
        "Qwen/Qwen-Image-2512": _qwen_image(),
        "Qwen/Qwen-Image-Edit": _qwen_image(),
        "Qwen/Qwen-Image-Edit-2509": _qwen_image(),
        "Qwen/Qwen-Image-Edit-2511": _qwen_image(zero_cond_t=True),
        "Tongyi-MAI/Z-Image": _z_image(6.0, flux_vae),
        "Tongyi-MAI/Z-Image-Turbo": _z_image(3.0, flux_vae),
        "black-forest-labs/FLUX.2-dev": _flux2(MISTRAL_24B, 8, 48, 48, 3 * 5120, guidance=True),
        "black-forest-labs/FLUX.2-klein-4B": four,
        "black-forest-labs/FLUX.2-klein-base-4B": four,
        "black-forest-labs/FLUX.2-klein-9B": nine,
        "black-forest-labs/FLUX.2-klein-base-9B": nine,
    }


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
    **parts_with_language_model(_vae(16, scale=0.3611, shift=0.1159)),
    **wan_parts(),
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
