"""Tiny pipelines that predict noise or v, for tinypipelines.py, and its tokenizer of letters."""

from __future__ import annotations

import string
from typing import Any

import diffusers
from tiny import t5_encoder, t5_tokenizer, vae
from tokenizers import Tokenizer, models, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content[0].text }}{% endif %}<|im_end|>{% endfor %}"
)
BERT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.3,
}


def letters() -> PreTrainedTokenizerFast:
    """Make a tokenizer of single letters, with the marks that templates put around prompts."""
    marks = ["<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>"]
    known = [*marks, *string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
    base = Tokenizer(models.BPE({one: i for i, one in enumerate(known)}, [], unk_token="<unk>"))
    base.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", known.index("<bos>"))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=base,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="right",
        model_max_length=512,
    )
    made.add_tokens(marks[4:], special_tokens=True)
    made.chat_template = CHAT
    return made


def pixart(kind: str, **conditions: Any) -> Any:
    """Make a PixArt, which predicts noise beside its variance."""
    return getattr(diffusers, kind)(
        transformer=diffusers.PixArtTransformer2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
            **conditions,
        ),
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
