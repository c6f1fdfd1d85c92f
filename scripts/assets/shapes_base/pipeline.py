"""The pipeline folder: the model as diffusers loads it, with no code of flowrl."""

from __future__ import annotations

import argparse
from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from torch import nn
from transformer import build_transformer
from transformers import CLIPTokenizer, T5Config, T5EncoderModel, T5TokenizerFast


def write_pipeline(
    network: Any, vae: AutoencoderKL, tokenizer: CLIPTokenizer, args: argparse.Namespace
) -> None:
    """Write averaged weights, on the CPU, as the StableDiffusion3Pipeline folder `--out`."""
    # a transformer with the attention of diffusers
    plain = build_transformer(args).eval()
    plain.load_state_dict(network.model.state_dict())
    # all parts; the VAE without the path that it was read from
    autoencoder = AutoencoderKL.from_config(vae.config, _name_or_path="")
    autoencoder.load_state_dict(vae.state_dict())
    t5, t5_tokenizer = build_t5(tokenizer, 2 * args.text_width)
    StableDiffusion3Pipeline(
        transformer=plain,
        # the last step of a plain grid, from sigma 0.001 to 0, would do nothing
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, shift_terminal=0.1),
        vae=autoencoder.cpu(),
        text_encoder=network.text.one,
        tokenizer=tokenizer,
        text_encoder_2=network.text.two,
        tokenizer_2=tokenizer,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    ).save_pretrained(args.out)


def build_t5(tokenizer: CLIPTokenizer, width: int) -> tuple[T5EncoderModel, T5TokenizerFast]:
    """Make the smallest T5 that diffusers accepts; its final norm is 0, so it adds zero tokens.

    The pipeline class demands the part. Zero tokens are what it puts where a T5 is left out.
    """
    # one piece for each word
    whole = [symbol for symbol in tokenizer.get_vocab() if symbol.endswith("</w>")]
    words = sorted({symbol.removesuffix("</w>") for symbol in whole})
    pieces = ["<pad>", "</s>", "<unk>", "▁", *("▁" + word for word in words)]
    scored = [(piece, -float(i)) for i, piece in enumerate(pieces)]
    # one layer
    config = T5Config(
        vocab_size=len(pieces),
        d_model=width,
        d_kv=8,
        d_ff=8,
        num_layers=1,
        num_heads=1,
        is_encoder_decoder=False,
    )
    encoder = T5EncoderModel(config)
    nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder, T5TokenizerFast(vocab=scored, extra_ids=0)
