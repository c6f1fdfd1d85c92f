"""Build StableDiffusion3Pipeline folders with random weights, small enough for one CPU core and without a network."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

WIDTH = 16  # hidden size of every text encoder
LETTERS = string.ascii_lowercase + string.digits


def tiny_sd3(
    folder: Path,
    *,
    t5: bool = False,
    seed: int = 0,
    dynamic_shift: bool = False,
    layers: int = 2,
    dual: bool = False,
    sample_size: int = 8,
) -> Path:
    """Save a tiny real SD3 pipeline (16 latent channels, VAE factor 8, patch 2, shift 3) and return its folder.

    ``dual`` adds SD3.5's second attention to the first block and its query/key norm; pictures are ``8 * sample_size``
    pixels by default and at most twice that.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(layers, dual, sample_size),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=dynamic_shift),
            vae=_vae(),
            text_encoder=_clip(),
            tokenizer=_clip_tokenizer(),
            text_encoder_2=_clip(),
            tokenizer_2=_clip_tokenizer(),
            text_encoder_3=_t5() if t5 else None,
            tokenizer_3=_t5_tokenizer() if t5 else None,
        )
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def _transformer(layers: int, dual: bool, sample_size: int) -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=sample_size,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=layers,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=16,
        pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=sample_size,  # in patches of 2 latents
        dual_attention_layers=(0,) if dual else (),
        qk_norm="rms_norm" if dual else None,
    )


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=16,
        sample_size=64,
        scaling_factor=1.5305,
        shift_factor=0.0609,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _clip_vocabulary() -> dict[str, int]:
    pieces = [*LETTERS, *(letter + "</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    return {piece: index for index, piece in enumerate(pieces)}


def _clip_tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_clip_vocabulary(), merges=[], model_max_length=77)


def _clip() -> CLIPTextModelWithProjection:
    vocabulary = _clip_vocabulary()
    config = CLIPTextConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        # The pooled state is read at the first end token; the default ids belong to the full vocabulary.
        bos_token_id=vocabulary["<|startoftext|>"],
        eos_token_id=vocabulary["<|endoftext|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
    )
    return CLIPTextModelWithProjection(config).eval()


def _t5_tokenizer() -> T5TokenizerFast:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *LETTERS]
    return T5TokenizerFast(vocab=[(piece, -float(i)) for i, piece in enumerate(pieces)], extra_ids=0)


def _t5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=4 + len(LETTERS),
        d_model=2 * WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config).eval()
