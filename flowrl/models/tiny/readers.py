"""What the tiny pipelines of `flowrl.models.tiny.classes` have in common: tokenizers, readers of
prompts, schedulers, decoders, and sizes of networks of one structure."""

from __future__ import annotations

import string
from typing import Any

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from tokenizers import Tokenizer, models, processors
from transformers import (
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from flowrl.models.tiny.language import SIGHT, VISION, qwen_tokenizer

WIDTH = 32  # hidden size of every language model
SIZE = 64  # pixels
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% if m.content is string %}{{ m.content }}"
    "{% else %}{{ m.content[0].text }}{% endif %}<|im_end|>{% endfor %}"
)
FLUX: dict[str, Any] = {  # of networks of FLUX's structure
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": WIDTH,
}
DIT: dict[str, Any] = {  # of networks of PixArt's structure
    "sample_size": 8,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "caption_channels": WIDTH,
    "in_channels": 4,
    "cross_attention_dim": 24,
    "out_channels": 8,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
}


def letters(**named: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer of single letters, with the marks that templates put around prompts;
    ``named``: more of the tokenizer's settings."""
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
        **named,
    )
    made.add_tokens(marks[4:], special_tokens=True)
    made.chat_template = CHAT
    return made


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


def qwen_vae() -> AutoencoderKLQwenImage:
    """Make the VAE of Qwen-Image and its kin."""
    return AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1)


def seeing_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer of letters that knows the marks of images."""
    made = qwen_tokenizer()
    made.add_tokens(SIGHT, special_tokens=True)
    made.chat_template = CHAT
    return made


def sight_ids() -> dict[str, int]:
    """Return the ids of the marks of images, by the names that language models give them."""
    ids = seeing_tokenizer().convert_tokens_to_ids(SIGHT)
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, ids, strict=True))


def qwen_vl(layers: int = 2) -> Qwen2_5_VLForConditionalGeneration:
    """Make a Qwen 2.5 that sees."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    text = language(layers) | {"rope_parameters": rope}
    del text["head_dim"]
    config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION, **sight_ids())
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen_vl_processor() -> Qwen2VLProcessor:
    """Make what shows it images, which become few tokens."""
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=56 * 56),
        tokenizer=seeing_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT,
    )


def qwen3_vl(layers: int = 4) -> Any:
    """Return the settings of a Qwen 3 that sees."""
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "deepstack_visual_indexes": [0],
    }
    return Qwen3VLConfig(
        text_config=language(layers) | {"rope_parameters": rope},
        vision_config=vision,
        **sight_ids(),
    )


def qwen3_vl_processor() -> Qwen3VLProcessor:
    """Make what shows it images, which become few tokens."""
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            patch_size=16, min_pixels=64 * 64, max_pixels=64 * 64
        ),
        tokenizer=seeing_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=CHAT,
    )
