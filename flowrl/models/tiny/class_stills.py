"""Tiny pipelines that make images, each of a class that is asked by its own call."""

from __future__ import annotations

from typing import Any

import diffusers
from diffusers import AutoencoderDC
from diffusers.guiders import AdaptiveProjectedMixGuidance
from transformers import (
    ByT5Tokenizer,
    GemmaConfig,
    GemmaModel,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLModel,
    T5GemmaConfig,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

from flowrl.models.tiny.language import qwen_tokenizer
from flowrl.models.tiny.readers import (
    FLUX,
    SIZE,
    WIDTH,
    flow,
    gemma2,
    language,
    letters,
    qwen3_vl,
    qwen_vae,
    qwen_vl,
    seeing_tokenizer,
)
from flowrl.models.tiny.stills import clip_encoder, clip_tokenizer, t5_encoder, t5_tokenizer, vae
from flowrl.models.tiny.videos import umt5


def lumina2() -> Any:
    """Make a Lumina 2."""
    return diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=8,
            in_channels=16,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(512, 64, 64),
            cap_feat_dim=WIDTH,
        ),
        scheduler=flow(shift=6.0),
        vae=vae(),
        text_encoder=gemma2(),
        tokenizer=letters(),
    )


def chroma() -> Any:
    """Make a Chroma."""
    return diffusers.ChromaPipeline(
        transformer=diffusers.ChromaTransformer2DModel(
            axes_dims_rope=(4, 4, 8),
            **FLUX,
            approximator_num_channels=64,
            approximator_hidden_dim=32,
            approximator_layers=1,
        ),
        scheduler=flow(use_beta_sigmas=False, use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def auraflow() -> Any:
    """Make an AuraFlow."""
    return diffusers.AuraFlowPipeline(
        transformer=diffusers.AuraFlowTransformer2DModel(
            sample_size=8,
            in_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=WIDTH,
            pos_embed_max_size=64,
        ),
        scheduler=flow(shift=1.73),
        vae=vae(4, shift=None),
        text_encoder=umt5(),
        tokenizer=t5_tokenizer(),
    )


def cogview4() -> Any:
    """Make a CogView 4."""
    return diffusers.CogView4Pipeline(
        transformer=diffusers.CogView4Transformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=4,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=WIDTH,
            time_embed_dim=8,
            condition_dim=4,
        ),
        scheduler=flow(
            base_shift=0.25, max_shift=0.75, use_dynamic_shifting=True, time_shift_type="linear"
        ),
        vae=vae(4, shift=None),
        text_encoder=GlmModel(GlmConfig(**language())).eval(),
        tokenizer=letters(),
    )


def sana(scheduler: Any = None) -> Any:
    """Make a SANA, with the solver of the released ones."""
    return diffusers.SanaPipeline(
        transformer=diffusers.SanaTransformer2DModel(
            patch_size=1,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_attention_heads=2,
            attention_head_dim=4,
            num_cross_attention_heads=2,
            cross_attention_head_dim=4,
            cross_attention_dim=8,
            caption_channels=WIDTH,
            sample_size=SIZE // 2,
        ),
        scheduler=scheduler
        or diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=AutoencoderDC(
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=("ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8),
            decoder_block_out_channels=(8, 8),
            encoder_qkv_multiscales=((), (5,)),
            decoder_qkv_multiscales=((), (5,)),
            encoder_layers_per_block=(1, 1),
            decoder_layers_per_block=(1, 1),
            scaling_factor=0.41407,
        ),
        text_encoder=gemma2(),
        tokenizer=letters(),
    )


def sana_pag() -> Any:
    """Make a SANA with perturbed attention."""
    return diffusers.SanaPAGPipeline(**sana().components)


def krea2() -> Any:
    """Make a Krea 2."""
    return diffusers.Krea2Pipeline(
        transformer=diffusers.Krea2Transformer2DModel(
            in_channels=64,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=WIDTH,
            num_text_layers=2,
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=qwen_vae(),
        text_encoder=Qwen3VLModel(qwen3_vl()).eval(),
        tokenizer=qwen_tokenizer(),
        text_encoder_select_layers=(1, 3),
    )


def ovis() -> Any:
    """Make an Ovis-Image."""
    return diffusers.OvisImagePipeline(
        transformer=diffusers.OvisImageTransformer2DModel(
            out_channels=64, axes_dims_rope=(4, 4, 8), **FLUX
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=Qwen3Model(Qwen3Config(**language())).eval(),
        tokenizer=qwen_tokenizer(),
    )


def hidream() -> Any:
    """Make a HiDream-I1, whose images are small: it scales every size to its own area."""
    made = diffusers.HiDreamImagePipeline(
        transformer=diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=[32, WIDTH],
            text_emb_dim=2 * 16,
            num_routed_experts=2,
            num_activated_experts=2,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(32, 32),
            llama_layers=[0, 1],
        ),
        scheduler=flow(shift=3.0),
        vae=vae(4),
        text_encoder=clip_encoder(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_encoder(),
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(),
        tokenizer_3=t5_tokenizer(),
        text_encoder_4=LlamaForCausalLM(
            LlamaConfig(**language(), output_hidden_states=True)
        ).eval(),
        tokenizer_4=letters(),
    )
    made.default_sample_size = SIZE // 8
    return made


def bria() -> Any:
    """Make a Bria 3."""
    return diffusers.BriaPipeline(
        transformer=diffusers.BriaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=[0, 4, 4],
        ),
        scheduler=flow(),
        vae=vae(4, shift=None),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def lumina() -> Any:
    """Make the first Lumina."""
    return diffusers.LuminaPipeline(
        transformer=diffusers.LuminaNextDiT2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=2,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            cross_attention_dim=WIDTH,
        ),
        scheduler=flow(),
        vae=vae(4, shift=None),
        text_encoder=GemmaModel(GemmaConfig(**language())).eval(),
        tokenizer=letters(),
    )


PRX: dict[str, Any] = {
    "context_in_dim": WIDTH,
    "hidden_size": 16,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 1,
    "axes_dim": [4, 4],
}


def prx() -> Any:
    """Make a PRX."""
    inner = language() | {"model_type": "t5_gemma_module"}
    config = T5GemmaConfig(encoder=inner, decoder=inner, is_encoder_decoder=True)
    reader = T5GemmaEncoder(config.encoder).eval()
    # its folders have the settings of encoder and decoder; the encoder looks for its own among them
    for name, value in vars(config.encoder).items():
        if not hasattr(config, name):
            setattr(config, name, value)
    reader.config = config
    return diffusers.PRXPipeline(
        transformer=diffusers.PRXTransformer2DModel(in_channels=4, patch_size=2, **PRX),
        scheduler=flow(),
        vae=vae(4),
        text_encoder=reader,
        tokenizer=letters(),
    )


def omnigen() -> Any:
    """Make an OmniGen, whose network reads the prompt itself."""
    return diffusers.OmniGenPipeline(
        transformer=diffusers.OmniGenTransformer2DModel(
            hidden_size=16,
            num_attention_heads=4,
            num_key_value_heads=4,
            intermediate_size=32,
            num_layers=1,
            in_channels=4,
            time_step_dim=4,
            pad_token_id=0,
            vocab_size=256,
            rope_scaling={"long_factor": [1, 2], "short_factor": [1, 2]},
        ),
        scheduler=flow(invert_sigmas=True, num_train_timesteps=1),
        vae=vae(4, shift=None),
        tokenizer=letters(),
    )


def prx_pixel() -> Any:
    """Make a PRX of pixels."""
    return diffusers.PRXPixelPipeline(
        transformer=diffusers.PRXTransformer2DModel(
            in_channels=3, patch_size=8, bottleneck_size=8, resolution_embeds=True, **PRX
        ),
        scheduler=flow(),
        text_encoder=Qwen3Model(Qwen3Config(**language())).eval(),
        tokenizer=qwen_tokenizer(),
        prompt_max_tokens=64,
    )


def hunyuan_image() -> Any:
    """Make a HunyuanImage, whose guidance remembers earlier steps."""
    return diffusers.HunyuanImagePipeline(
        transformer=diffusers.HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=WIDTH,
            text_embed_2_dim=WIDTH,
            rope_axes_dim=(4, 4),
        ),
        scheduler=flow(shift=5.0),
        vae=diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=8,
            sample_size=SIZE,
            scaling_factor=0.75289,
        ),
        text_encoder=qwen_vl(4),
        tokenizer=seeing_tokenizer(),
        text_encoder_2=t5_encoder(vocab_size=400),
        tokenizer_2=ByT5Tokenizer(),
        guider=AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2),
        ocr_guider=AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2),
    )
