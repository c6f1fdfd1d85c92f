"""Architectures of the released models whose prompts are read by a language model.

Settings are facts of each repository's config.json files, by the names that diffusers and
transformers give them; what a class has by default is left out. Sources: diffusers' classes, whose
defaults are those of Qwen-Image, Z-Image and FLUX.2-dev, and the config.json files of Qwen2.5-VL,
Qwen3 and Mistral Small 3. FLUX.2 klein's blocks are reconstructed: they are what gives 4 and 9
billion parameters. tests/cost/test_estimate.py checks the parameters against the published
numbers.
"""

from __future__ import annotations

from typing import Any

from flowrl.cost.pipeline_part import WeightlessPart

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
