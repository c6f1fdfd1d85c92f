"""Tiny pipelines that make videos, each of a class that is asked by its own call."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.guiders import ClassifierFreeGuidance
from transformers import (
    ByT5Tokenizer,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2Encoder, T5Gemma2EncoderConfig

from flowrl.models.tiny.readers import (
    DIT,
    SIZE,
    WIDTH,
    flow,
    gemma2,
    language,
    letters,
    qwen_vl,
    qwen_vl_processor,
    seeing_tokenizer,
    sight_ids,
)
from flowrl.models.tiny.stills import clip_config, clip_tokenizer, t5_encoder, t5_tokenizer, vae
from flowrl.models.tiny.videos import UNIPC, umt5, wan_transformer, wan_vae

# networks of Wan's structure
WAN_LIKE: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": WIDTH,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
}


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


def hunyuan_vae() -> diffusers.AutoencoderKLHunyuanVideo:
    """Make the VAE of HunyuanVideo and its kin."""
    return diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
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
        vae=hunyuan_vae(),
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
        transformer=diffusers.AnyFlowTransformer3DModel(**WAN_LIKE),
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(),
        vae=wan_vae(),
        text_encoder=umt5(),
        tokenizer=t5_tokenizer(),
    )


def skyreels() -> Any:
    """Make a SkyReels V2, with its own solver."""
    return diffusers.SkyReelsV2Pipeline(
        transformer=diffusers.SkyReelsV2Transformer3DModel(**WAN_LIKE),
        scheduler=diffusers.UniPCMultistepScheduler(**UNIPC),
        vae=wan_vae(),
        text_encoder=umt5(),
        tokenizer=t5_tokenizer(),
    )


def allegro() -> Any:
    """Make an Allegro, which predicts noise, and whose decoder works in tiles alone."""
    return diffusers.AllegroPipeline(
        transformer=diffusers.AllegroTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            cross_attention_dim=24,
            sample_width=8,
            sample_height=8,
            sample_frames=8,
            caption_channels=WIDTH,
        ),
        scheduler=diffusers.EulerAncestralDiscreteScheduler(
            beta_start=0.0001, beta_end=0.02, timestep_spacing="leading", steps_offset=1
        ),
        vae=diffusers.AutoencoderKLAllegro(
            down_block_types=("AllegroDownBlock3D",) * 4,
            up_block_types=("AllegroUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def latte() -> Any:
    """Make a Latte, which predicts noise."""
    return diffusers.LattePipeline(
        transformer=diffusers.LatteTransformer3DModel(num_layers=1, video_length=4, **DIT),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, beta_schedule="linear"),
        vae=vae(4, shift=None),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def cogvideox() -> Any:
    """Make a CogVideoX, which predicts v, with the schedule of the released 2B."""
    return diffusers.CogVideoXPipeline(
        transformer=diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=8,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=WIDTH,
            num_layers=1,
            sample_width=8,
            sample_height=8,
            sample_frames=9,
            patch_size=2,
            temporal_compression_ratio=4,
            max_text_seq_length=32,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            beta_start=0.00085,
            beta_end=0.012,
            beta_schedule="scaled_linear",
            snr_shift_scale=3.0,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            clip_sample=False,
        ),
        vae=diffusers.AutoencoderKLCogVideoX(
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def hunyuan_video15() -> Any:
    """Make a HunyuanVideo 1.5, whose scale of guidance is a part's."""
    text = language() | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}
    del text["head_dim"]
    return diffusers.HunyuanVideo15Pipeline(
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=WIDTH,
            text_embed_2_dim=WIDTH,
            image_embed_dim=12,
            rope_axes_dim=(2, 2, 4),
            target_size=SIZE,
            task_type="t2v",
        ),
        scheduler=flow(shift=7.0),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        text_encoder=Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**text)).eval(),
        tokenizer=seeing_tokenizer(),
        text_encoder_2=t5_encoder(vocab_size=400),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
    )


def motif_video() -> Any:
    """Make a Motif-Video, whose guidance is a part's."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    reader = T5Gemma2EncoderConfig(
        text_config=language() | {"dropout_rate": 0.0}, vision_config=vision
    )
    return diffusers.MotifVideoPipeline(
        transformer=diffusers.MotifVideoTransformer3DModel(
            in_channels=33,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_single_layers=1,
            patch_size=1,
            patch_size_t=1,
            qk_norm="rms_norm",
            text_embed_dim=WIDTH,
            rope_axes_dim=(4, 4, 4),
        ),
        scheduler=flow(use_dynamic_shifting=True),
        vae=wan_vae(),
        text_encoder=T5Gemma2Encoder(reader).eval(),
        tokenizer=letters(),
        guider=ClassifierFreeGuidance(guidance_scale=3.0),
    )


def kandinsky5(kind: str = "Kandinsky5T2VPipeline") -> Any:
    """Make a Kandinsky 5, with room for images in its network's input where the released have."""
    video, edit = "V" in kind[-10:], "I2" in kind
    return getattr(diffusers, kind)(
        transformer=diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4 if video else 16,
            out_visual_dim=4 if video else 16,
            in_text_dim=WIDTH,
            in_text_dim2=16,
            time_dim=16,
            patch_size=(1, 2, 2),
            model_dim=16,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=(1, 1, 2),
            visual_cond=video or edit,
            attention_type="regular",
        ),
        scheduler=flow(shift=5.0),
        vae=hunyuan_vae() if video else vae(shift=None),
        text_encoder=qwen_vl(),
        tokenizer=qwen_vl_processor(),
        text_encoder_2=CLIPTextModel(clip_config()).eval(),
        tokenizer_2=clip_tokenizer(),
    )


def sana_video() -> Any:
    """Make a SANA-Video."""
    return diffusers.SanaVideoPipeline(
        transformer=diffusers.SanaVideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=1,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=WIDTH,
            mlp_ratio=2.5,
            sample_size=8,
            patch_size=(1, 2, 2),
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ),
        scheduler=diffusers.DPMSolverMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=8.0
        ),
        vae=wan_vae(),
        text_encoder=gemma2(),
        tokenizer=letters(),
    )


def easyanimate() -> Any:
    """Make an EasyAnimate."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    text = language() | {"rope_parameters": rope}
    del text["head_dim"]
    sight = {"depth": 1, "embed_dim": 16, "hidden_size": WIDTH, "num_heads": 2}
    config = Qwen2VLConfig(text_config=text, vision_config=sight, **sight_ids())
    return diffusers.EasyAnimatePipeline(
        transformer=diffusers.EasyAnimateTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=4,
            text_embed_dim=WIDTH,
            num_layers=1,
            sample_width=16,
            sample_height=16,
            patch_size=2,
        ),
        scheduler=flow(shift=5.0),
        vae=diffusers.AutoencoderKLMagvit(
            down_block_types=("SpatialDownBlock3D", *("SpatialTemporalDownBlock3D",) * 3),
            up_block_types=("SpatialUpBlock3D", *("SpatialTemporalUpBlock3D",) * 3),
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            spatial_group_norm=False,
        ),
        text_encoder=Qwen2VLForConditionalGeneration(config).eval(),
        tokenizer=seeing_tokenizer(),
    )


def ltx_image() -> Any:
    """Make an LTX-Video that starts from an image."""
    return diffusers.LTXImageToVideoPipeline(**ltx().components)


class Passing(torch.nn.Module):
    """Stands in for Cosmos's guards of texts and videos, which are large."""

    def check_text_safety(self, text: str) -> bool:
        """Pass."""
        return True


def cosmos() -> Any:
    """Make a Cosmos, whose scheduler scales what the network sees."""
    return diffusers.Cosmos2TextToImagePipeline(
        transformer=diffusers.CosmosTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=1,
            mlp_ratio=2,
            text_embed_dim=WIDTH,
            adaln_lora_dim=4,
            max_size=(4, 32, 32),
        ),
        scheduler=flow(use_karras_sigmas=True),
        vae=wan_vae(),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
        safety_checker=Passing(),
    )
