"""Tiny pipelines of families that edit images, and their siblings that make them, each of a class
that is asked by its own call."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import AutoencoderKLWan
from transformers import (
    ByT5Tokenizer,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    GlmImageImageProcessor,
    GlmImageProcessor,
    Mistral3Config,
    Mistral3Model,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
    Siglip2ImageProcessor,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from flowrl.models.tiny.language import VISION, flux2_vae, qwen_tokenizer
from flowrl.models.tiny.readers import (
    CHAT,
    FLUX,
    WIDTH,
    flow,
    language,
    letters,
    qwen3_vl,
    qwen3_vl_processor,
    qwen_vl,
    qwen_vl_processor,
    seeing_tokenizer,
)
from flowrl.models.tiny.stills import t5_encoder, vae
from flowrl.models.tiny.videos import wan_vae


def longcat(kind: str = "LongCatImagePipeline") -> Any:
    """Make a LongCat-Image, or the one that edits."""
    return getattr(diffusers, kind)(
        transformer=diffusers.LongCatImageTransformer2DModel(
            pooled_projection_dim=WIDTH, axes_dims_rope=[4, 6, 6], **FLUX
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=qwen_vl(),
        tokenizer=seeing_tokenizer(),
        text_processor=qwen_vl_processor(),
    )


def bria_fibo(kind: str = "BriaFiboPipeline") -> Any:
    """Make a FIBO, or the one that edits."""
    reader = SmolLM3Config(
        **{name: value for name, value in language(3).items() if name != "vocab_size"},
        vocab_size=128008,  # an empty prompt is a token with the number 128000
    )
    return getattr(diffusers, kind)(
        transformer=diffusers.BriaFiboTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            text_encoder_dim=WIDTH,
            axes_dims_rope=[0, 4, 4],
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=AutoencoderKLWan(
            base_dim=8,
            decoder_base_dim=8,
            dim_mult=[1, 1, 1, 1],
            in_channels=12,
            out_channels=12,
            is_residual=True,
            num_res_blocks=1,
            patch_size=2,
            scale_factor_spatial=16,
            z_dim=16,
        ),
        text_encoder=SmolLM3ForCausalLM(reader).eval(),
        tokenizer=letters(),
    )


def joy_edit() -> Any:
    """Make a JoyImage-Edit."""
    return diffusers.JoyImageEditPipeline(
        transformer=diffusers.JoyImageEditTransformer3DModel(
            in_channels=16,
            hidden_size=32,
            num_attention_heads=2,
            text_dim=WIDTH,
            num_layers=1,
            rope_dim_list=[4, 6, 6],
        ),
        scheduler=flow(),
        vae=wan_vae(),
        text_encoder=Qwen3VLForConditionalGeneration(qwen3_vl()).eval(),
        tokenizer=seeing_tokenizer(),
        processor=qwen3_vl_processor(),
    )


def qwen_image21() -> Any:
    """Make a Qwen-Image 2.1, which makes and edits images."""
    return diffusers.QwenImage21Pipeline(
        transformer=diffusers.QwenImage21Transformer2DModel(
            in_channels=8,
            out_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage21(
            base_dim=8,
            decoder_base_dim=8,
            z_dim=8,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[0.1 * i - 0.3 for i in range(8)],
            latents_std=[0.5 + 0.1 * i for i in range(8)],
        ),
        text_encoder=Qwen3VLForConditionalGeneration(qwen3_vl()).eval(),
        processor=qwen3_vl_processor(),
    )


def z_image_omni() -> Any:
    """Make a Z-Image that makes and edits images."""
    sight = Siglip2VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_patches=16,
        vision_use_head=False,
    )
    return diffusers.ZImageOmniPipeline(
        transformer=diffusers.ZImageTransformer2DModel(
            dim=WIDTH,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            siglip_feat_dim=16,
            axes_dims=[4, 6, 6],
        ),
        scheduler=flow(shift=6.0),
        vae=vae(),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**language())).eval(),
        tokenizer=seeing_tokenizer(),
        siglip=Siglip2VisionModel(sight).eval(),
        siglip_processor=Siglip2ImageProcessor(max_num_patches=16),
    )


def ideogram4() -> Any:
    """Make an Ideogram 4, whose branch without a prompt has a network of its own."""
    network: dict[str, Any] = {
        "in_channels": 128,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": 13 * WIDTH,  # of 13 layers
        "mrope_section": (4, 2, 2),
    }
    return diffusers.Ideogram4Pipeline(
        transformer=diffusers.Ideogram4Transformer2DModel(**network),
        unconditional_transformer=diffusers.Ideogram4Transformer2DModel(**network),
        scheduler=flow(),
        vae=flux2_vae(),
        text_encoder=Qwen3VLForConditionalGeneration(qwen3_vl(36)).eval().model,
        tokenizer=seeing_tokenizer(),
    )


def nucleus_moe() -> Any:
    """Make a NucleusMoE-Image, a mixture of experts."""
    made = diffusers.NucleusMoEImagePipeline(
        transformer=diffusers.NucleusMoEImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=5,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
            num_experts=4,
            moe_intermediate_dim=16,
            capacity_factors=[4.0] * 5,
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1),
        text_encoder=Qwen3VLForConditionalGeneration(qwen3_vl(8)).eval(),
        processor=qwen3_vl_processor(),
    )
    for name, parameter in made.transformer.named_parameters():
        if "experts." in name:  # whatever was in memory
            parameter.data.normal_(0, 0.05)
    return made


def ernie() -> Any:
    """Make an ERNIE-Image, without the language model that rewrites prompts."""
    reader = Mistral3Config(
        text_config=language() | {"model_type": "mistral"},
        vision_config=VISION | {"model_type": "pixtral", "image_size": 28, "patch_size": 14},
    )
    return diffusers.ErnieImagePipeline(
        transformer=diffusers.ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=2,
            ffn_hidden_size=32,
            text_in_dim=WIDTH,
            rope_axes_dim=(4, 6, 6),
        ),
        scheduler=flow(shift=4.0),
        vae=flux2_vae(),
        text_encoder=Mistral3Model(reader).eval(),
        tokenizer=qwen_tokenizer(),
        pe=None,
        pe_tokenizer=None,
    )


def glm_image() -> Any:
    """Make a GLM-Image, whose language model writes tokens that the network starts from."""
    marks = {"image_token": "<|image|>", "grid_bos_token": "<sop>", "grid_eos_token": "<eop>"}
    tokenizer = letters(extra_special_tokens=marks)
    rope = {"rope_type": "default", "mrope_section": (4, 2, 2), "rope_theta": 1e4}
    text = {name: v for name, v in language().items() if name not in ("head_dim", "eos_token_id")}
    reader = GlmImageConfig(
        text_config=text | {"vision_vocab_size": 128, "rope_parameters": rope},
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "num_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "intermediate_size": 16,
        },
        vq_config={"embed_dim": 16, "num_embeddings": 128, "latent_channels": 16},
    )
    return diffusers.GlmImagePipeline(
        transformer=diffusers.GlmImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=WIDTH,
            time_embed_dim=16,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=128,
        ),
        scheduler=flow(use_dynamic_shifting=True, time_shift_type="linear"),
        vae=vae(4, shift=None, latents_mean=[0.1] * 4, latents_std=[0.8] * 4),
        text_encoder=t5_encoder(vocab_size=400),
        tokenizer=ByT5Tokenizer(),
        vision_language_encoder=GlmImageForConditionalGeneration(reader).eval(),
        processor=GlmImageProcessor(
            image_processor=GlmImageImageProcessor(), tokenizer=tokenizer, chat_template=CHAT
        ),
    )
