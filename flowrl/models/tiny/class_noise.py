"""Tiny pipelines that predict noise or v, each of a class that is asked by its own call."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import diffusers
from transformers import BertConfig, BertModel, CLIPTextModel

from flowrl.models.by_call.options import pipeline_class
from flowrl.models.tiny.pieces import piece_file
from flowrl.models.tiny.readers import DIT, letters
from flowrl.models.tiny.stills import (
    EULER,
    clip_config,
    clip_encoder,
    clip_tokenizer,
    t5_encoder,
    t5_tokenizer,
    unet,
    vae,
)

BERT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.3,
}


def pixart(kind: str, **conditions: Any) -> Any:
    """Make a PixArt, which predicts noise beside its variance."""
    return getattr(diffusers, kind)(
        transformer=diffusers.PixArtTransformer2DModel(num_layers=2, **DIT, **conditions),
        scheduler=diffusers.DPMSolverMultistepScheduler(),
        vae=vae(4, shift=None),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def hunyuan_dit(kind: str) -> Any:
    """Make a HunyuanDiT, which predicts v."""
    return getattr(diffusers, kind)(
        transformer=diffusers.HunyuanDiT2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            in_channels=4,
            cross_attention_dim=32,
            cross_attention_dim_t5=32,
            pooled_projection_dim=16,
            hidden_size=24,
            activation_fn="gelu-approximate",
        ),
        scheduler=diffusers.DDPMScheduler(
            beta_end=0.03,
            beta_schedule="scaled_linear",
            prediction_type="v_prediction",
            clip_sample=False,
        ),
        vae=vae(4, shift=None),
        text_encoder=BertModel(BertConfig(**BERT)).eval(),
        tokenizer=letters(),
        text_encoder_2=t5_encoder(),
        tokenizer_2=t5_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def cogview3() -> Any:
    """Make a CogView 3 Plus, with the schedule of the released one."""
    return diffusers.CogView3PlusPipeline(
        transformer=diffusers.CogView3PlusTransformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=1,
            attention_head_dim=4,
            num_attention_heads=2,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=2,
            pos_embed_max_size=32,
            sample_size=8,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(
            snr_shift_scale=4.0,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            clip_sample=False,
        ),
        vae=vae(4, shift=None),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def kolors(kind: str) -> Any:
    """Make a Kolors, whose reader is a ChatGLM of diffusers' own. Raise ModelError where the
    package that reads its vocabulary is not installed."""
    made = pipeline_class(kind, "tiny")
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel
    from diffusers.pipelines.kolors.tokenizer import ChatGLMTokenizer

    folder = tempfile.mkdtemp()
    tokenizer = ChatGLMTokenizer(str(piece_file(Path(folder))))
    weakref.finalize(tokenizer, shutil.rmtree, folder)  # it is saved by copying its file
    reader = ChatGLMModel(
        ChatGLMConfig(
            num_layers=2,
            padded_vocab_size=256,
            hidden_size=32,
            ffn_hidden_size=32,
            kv_channels=16,
            num_attention_heads=2,
            seq_length=256,
            original_rope=True,
            add_qkv_bias=True,
            multi_query_attention=True,
            multi_query_group_num=1,
        ),
        empty_init=False,
    )
    for parameter in reader.parameters():
        parameter.data.normal_(0, 0.3)
    return made(
        unet=unet(
            cross_attention_dim=32,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 32,
            encoder_hid_dim=32,
            encoder_hid_dim_type="text_proj",
        ),
        scheduler=diffusers.EulerDiscreteScheduler(**EULER, timestep_spacing="leading"),
        vae=vae(4, shift=None, quant=True),
        text_encoder=reader.eval(),
        tokenizer=tokenizer,
    )


def kandinsky3() -> Any:
    """Make a Kandinsky 3, whose decoder is a MoVQ."""
    return diffusers.Kandinsky3Pipeline(
        unet=diffusers.Kandinsky3UNet(
            in_channels=4,
            time_embedding_dim=8,
            groups=2,
            attention_head_dim=4,
            layers_per_block=3,
            block_out_channels=(32, 64),
            cross_attention_dim=8,
            encoder_hid_dim=32,
        ),
        scheduler=diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=False),
        movq=diffusers.VQModel(
            block_out_channels=(32, 32, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            layers_per_block=1,
            norm_num_groups=8,
            latent_channels=4,
            num_vq_embeddings=12,
            vq_embed_dim=4,
            norm_type="spatial",
        ),
        text_encoder=t5_encoder(),
        tokenizer=t5_tokenizer(),
    )


def instruct_pix2pix() -> Any:
    """Make an InstructPix2Pix, which edits."""
    return diffusers.StableDiffusionInstructPix2PixPipeline(
        unet=unet(in_channels=8, cross_attention_dim=16),
        scheduler=diffusers.EulerAncestralDiscreteScheduler(**EULER),
        vae=vae(4, shift=None, quant=True),
        text_encoder=CLIPTextModel(clip_config()).eval(),
        tokenizer=clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def instruct_pix2pix_xl() -> Any:
    """Make an SDXL that edits by instructions."""
    return diffusers.StableDiffusionXLInstructPix2PixPipeline(
        unet=unet(
            in_channels=8,
            cross_attention_dim=32,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=6 * 8 + 16,
        ),
        scheduler=diffusers.EulerDiscreteScheduler(**EULER),
        vae=vae(4, shift=None, quant=True),
        text_encoder=CLIPTextModel(clip_config()).eval(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_encoder(),
        tokenizer_2=clip_tokenizer(),
    )
