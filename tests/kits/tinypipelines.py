"""Make tiny pipelines of diffusers' classes in memory, with random weights, local tokenizers and
random text encoders: for a pipeline that is asked by its own call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import torch
from diffusers import AutoencoderDC, AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from tiny import (
    clip_config,
    clip_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
    tiny_flux,
    tiny_sd3,
    tiny_sd15,
    tiny_sdxl,
    vae,
)
from tinylm import qwen_tokenizer, tiny_flux2, tiny_klein, tiny_qwen_image, tiny_z_image
from tinynoise import cogview3, hunyuan_dit, letters, pixart
from tinywan import UNIPC, umt5, wan_transformer, wan_vae
from transformers import (
    CLIPTextModel,
    Gemma2Config,
    Gemma2Model,
    GemmaConfig,
    GemmaModel,
    GlmConfig,
    GlmModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3Config,
    Qwen3Model,
    Qwen3VLConfig,
    Qwen3VLModel,
    T5GemmaConfig,
)
from transformers.models.t5gemma.modeling_t5gemma import T5GemmaEncoder

WIDTH = 32  # hidden size of every language model
SIZE = 64  # pixels


class TinyPipeline(NamedTuple):
    """How to make one, and what to ask of it."""

    make: Callable[[], Any]
    options: dict[str, Any] = {}  # of `flowrl.models.pipeline.from_pipeline`
    size: tuple[int, int] = (SIZE, SIZE)


def language(layers: int = 2) -> dict[str, Any]:
    """Return the settings that all language models take."""
    return {
        "vocab_size": 256,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.3,  # so that prompts differ
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def gemma2() -> Gemma2Model:
    """Make SANA's and Lumina's kind of reader."""
    return Gemma2Model(Gemma2Config(**language(), query_pre_attn_scalar=16)).eval()


def flow(**settings: Any) -> FlowMatchEulerDiscreteScheduler:
    """Make the scheduler that most have."""
    return FlowMatchEulerDiscreteScheduler(**settings)


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
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
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


def qwen_vae() -> AutoencoderKLQwenImage:
    """Make the VAE of Qwen-Image and its kin."""
    return AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def qwen3_vl() -> Any:
    """Return the settings of a language model that sees, which sees nothing."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(text_config=language(4) | {"rope_parameters": rope}, vision_config=vision)


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
            in_channels=64,
            out_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 4, 8),
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(),
        text_encoder=Qwen3Model(Qwen3Config(**language())).eval(),
        tokenizer=qwen_tokenizer(),
    )


def wan() -> Any:
    """Make a Wan 2.1, with its own solver."""
    return diffusers.WanPipeline(
        transformer=wan_transformer(),
        scheduler=diffusers.UniPCMultistepScheduler(**UNIPC),
        vae=wan_vae(),
        text_encoder=umt5(),
        tokenizer=t5_tokenizer(),
    )


def ltx() -> Any:
    """Make an LTX-Video."""
    return diffusers.LTXPipeline(
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=32,
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False, False, False, False, False),
            upsample_residual=(False, False, False, False),
            upsample_factor=(1, 1, 1, 1),
            timestep_conditioning=False,
            patch_size=1,
            patch_size_t=1,
        ),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def hunyuan_video() -> Any:
    """Make a HunyuanVideo."""
    return diffusers.HunyuanVideoPipeline(
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=1,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=WIDTH,
            pooled_projection_dim=16,
            rope_axes_dim=(2, 4, 4),
        ),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        scheduler=flow(shift=7.0),
        text_encoder=LlamaModel(LlamaConfig(**language(4))).eval(),
        tokenizer=letters(),
        text_encoder_2=CLIPTextModel(clip_config()).eval(),
        tokenizer_2=clip_tokenizer(),
    )


def mochi() -> Any:
    """Make a Mochi, whose noise runs the other way."""
    return diffusers.MochiPipeline(
        transformer=diffusers.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            pooled_projection_dim=16,
            in_channels=12,
            text_embed_dim=32,
            time_embed_dim=4,
        ),
        scheduler=flow(invert_sigmas=True),
        vae=diffusers.AutoencoderKLMochi(
            latent_channels=12,
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def anyflow() -> Any:
    """Make an AnyFlow, whose network is told two times."""
    return diffusers.AnyFlowPipeline(
        transformer=diffusers.AnyFlowTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=WIDTH,
            freq_dim=256,
            ffn_dim=32,
            num_layers=2,
        ),
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
        vae=wan_vae(),
        text_encoder=umt5(),
        tokenizer=t5_tokenizer(),
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


def skyreels() -> Any:
    """Make a SkyReels V2, with its own solver."""
    return diffusers.SkyReelsV2Pipeline(
        transformer=diffusers.SkyReelsV2Transformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=WIDTH,
            freq_dim=256,
            ffn_dim=32,
            num_layers=2,
        ),
        scheduler=diffusers.UniPCMultistepScheduler(**UNIPC),
        vae=wan_vae(),
        text_encoder=umt5(),
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


def prx() -> Any:
    """Make a PRX."""
    inner = language() | {"model_type": "t5_gemma_module"}
    config = T5GemmaConfig(encoder=inner, decoder=inner, is_encoder_decoder=True)
    return diffusers.PRXPipeline(
        transformer=diffusers.PRXTransformer2DModel(
            in_channels=4,
            patch_size=2,
            context_in_dim=WIDTH,
            hidden_size=16,
            mlp_ratio=2.0,
            num_heads=2,
            depth=1,
            axes_dim=[4, 4],
        ),
        scheduler=flow(),
        vae=vae(4),
        text_encoder=T5GemmaEncoder(config.encoder).eval(),
        tokenizer=letters(),
    )


def saved(make: Callable[[Path], Path], kind: str = "", **nothing: Any) -> Callable[[], Any]:
    """Return how to load what another kit writes into a folder; as another class of equal parts."""

    def load() -> Any:
        loader = getattr(diffusers, kind or "DiffusionPipeline")
        with tempfile.TemporaryDirectory() as folder:
            made = loader.from_pretrained(make(Path(folder)), **nothing)
        # it is in memory now
        made.register_to_config(_name_or_path="")
        return made

    return load


NO_BINS: dict[str, Any] = {"guidance_scale": 3.0, "use_resolution_binning": False}
NO_T5: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
VIDEO: dict[str, Any] = {"frames": 5}
TINY: dict[str, TinyPipeline] = {
    "StableDiffusion3Pipeline": TinyPipeline(
        saved(tiny_sd3, **NO_T5), {"call": {"guidance_scale": 3.0}}
    ),
    "StableDiffusion3PAGPipeline": TinyPipeline(
        saved(tiny_sd3, "StableDiffusion3PAGPipeline", **NO_T5), {"call": {"guidance_scale": 3.0}}
    ),
    "FluxPipeline": TinyPipeline(saved(tiny_flux), {"call": {"guidance_scale": 3.0}}),
    "Flux2Pipeline": TinyPipeline(saved(tiny_flux2), {"call": {"guidance_scale": 3.0}}),
    "Flux2KleinPipeline": TinyPipeline(saved(tiny_klein), {"call": {"guidance_scale": 3.0}}),
    "QwenImagePipeline": TinyPipeline(
        saved(tiny_qwen_image), {"call": {"true_cfg_scale": 3.0}, "negative_prompt": "dull"}
    ),
    "ZImagePipeline": TinyPipeline(saved(tiny_z_image), {"call": {"guidance_scale": 3.0}}),
    "FluxKontextPipeline": TinyPipeline(
        saved(partial(tiny_flux, kontext=True)),
        {"sources": 1, "call": {"guidance_scale": 3.0, "max_area": 4096, "_auto_resize": False}},
    ),
    "LuminaPipeline": TinyPipeline(lumina, {"tune": "full", "call": {"guidance_scale": 3.0}}),
    "PRXPipeline": TinyPipeline(
        prx,
        {"tune": "full", "call": {"guidance_scale": 3.0, "use_resolution_binning": False}},
    ),
    "StableDiffusionPAGPipeline": TinyPipeline(
        saved(tiny_sd15, "StableDiffusionPAGPipeline", safety_checker=None, image_encoder=None),
        {"call": {"guidance_scale": 3.0}},
    ),
    "StableDiffusionXLPAGPipeline": TinyPipeline(
        saved(tiny_sdxl, "StableDiffusionXLPAGPipeline"), {"call": {"guidance_scale": 3.0}}
    ),
    "SanaPAGPipeline": TinyPipeline(
        sana_pag,
        {"call": NO_BINS | {"complex_human_instruction": None}},
    ),
    "PixArtSigmaPAGPipeline": TinyPipeline(
        partial(pixart, "PixArtSigmaPAGPipeline"), {"tune": "full", "call": NO_BINS}
    ),
    "HunyuanDiTPAGPipeline": TinyPipeline(
        partial(hunyuan_dit, "HunyuanDiTPAGPipeline"), {"tune": "full", "call": NO_BINS}
    ),
    "PixArtAlphaPipeline": TinyPipeline(
        partial(pixart, "PixArtAlphaPipeline", use_additional_conditions=False),
        {"tune": "full", "call": NO_BINS},
    ),
    "PixArtSigmaPipeline": TinyPipeline(
        partial(pixart, "PixArtSigmaPipeline"), {"tune": "full", "call": NO_BINS}
    ),
    "HunyuanDiTPipeline": TinyPipeline(
        partial(hunyuan_dit, "HunyuanDiTPipeline"), {"tune": "full", "call": NO_BINS}
    ),
    "CogView3PlusPipeline": TinyPipeline(
        cogview3, {"tune": "full", "call": {"guidance_scale": 3.0}}
    ),
    "Lumina2Pipeline": TinyPipeline(lumina2, {"call": {"guidance_scale": 3.0}}),
    "ChromaPipeline": TinyPipeline(
        chroma, {"call": {"guidance_scale": 3.0, "max_sequence_length": 64}}
    ),
    "AuraFlowPipeline": TinyPipeline(auraflow, {"call": {"guidance_scale": 3.0}}),
    "CogView4Pipeline": TinyPipeline(cogview4, {"call": {"guidance_scale": 3.0}}),
    "SanaPipeline": TinyPipeline(
        sana,
        {
            "call": {
                "guidance_scale": 3.0,
                "use_resolution_binning": False,
                "complex_human_instruction": None,
            }
        },
    ),
    "Krea2Pipeline": TinyPipeline(krea2, {"call": {"guidance_scale": 3.0}}),
    "OvisImagePipeline": TinyPipeline(ovis, {"call": {"guidance_scale": 3.0}}),
    "HiDreamImagePipeline": TinyPipeline(
        hidream, {"call": {"guidance_scale": 3.0, "max_sequence_length": 64}}
    ),
    "BriaPipeline": TinyPipeline(bria, {"call": {"guidance_scale": 3.0}}),
    "WanPipeline": TinyPipeline(wan, VIDEO | {"call": {"guidance_scale": 3.0}}),
    "LTXPipeline": TinyPipeline(ltx, {"frames": 9, "call": {"guidance_scale": 3.0}}),
    "HunyuanVideoPipeline": TinyPipeline(hunyuan_video, VIDEO | {"call": {"guidance_scale": 3.0}}),
    "MochiPipeline": TinyPipeline(mochi, {"frames": 7, "call": {"guidance_scale": 3.0}}),
    "SkyReelsV2Pipeline": TinyPipeline(skyreels, VIDEO | {"call": {"guidance_scale": 3.0}}),
    "AnyFlowPipeline": TinyPipeline(anyflow, VIDEO | {"call": {"guidance_scale": 3.0}}),
}


def tiny_pipeline(name: str, *, seed: int = 0) -> Any:
    """Make one, its weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = TINY[name].make()
    for part in made.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval()
            _wake(part)
    return made


def _wake(part: torch.nn.Module) -> None:
    """Draw weights that are made of zeros, so that everything has an effect."""
    stream = torch.Generator().manual_seed(1)
    for parameter in part.parameters():
        if not bool(parameter.any()):
            parameter.data.normal_(0, 0.05, generator=stream)


def save(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Save one -> its folder."""
    tiny_pipeline(name, seed=seed).save_pretrained(folder, safe_serialization=True)
    return folder
