"""The SD3 transformer, its attention, and its forward pass with a tap on the middle."""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from common import CHANNELS, GRID
from diffusers import SD3Transformer2DModel
from torch import Tensor


def build_transformer(args: argparse.Namespace) -> SD3Transformer2DModel:
    """Make the untrained transformer, with heads of 32 channels."""
    return SD3Transformer2DModel(
        sample_size=GRID,
        patch_size=args.patch,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=args.layers,
        attention_head_dim=32,
        num_attention_heads=args.width // 32,
        caption_projection_dim=args.width,
        joint_attention_dim=2 * args.text_width,
        pooled_projection_dim=2 * args.text_width,
        pos_embed_max_size=2 * GRID,
        qk_norm="rms_norm",
    )


class CountedJointAttention:
    """Joint attention in which the last text token counts `copies` times, as that many equal ones.

    Where there is no T5, or one that says nothing, the pipeline's text ends in
    `max_sequence_length` zero tokens. They stay equal through every layer, so one token with
    log(copies) added to its attention logits computes the same. Training with 1 and with 256 copies
    makes the model work at the pipeline's default length as well as at length 1, which samples
    several times faster.

    The product is written out: on a CPU in bfloat16 five times faster than the fused kernel there.
    """

    copies = 1

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor]:
        """Attend over image tokens [B, I, C] and text tokens [B, T, C] together -> both, new."""
        # queries, keys and values of both, image first
        image, text = hidden_states, encoder_hidden_states
        query, key, value = _joined(attn, image, text)
        # weights; the last token counts several times
        key = key.to(value.dtype) * key.shape[-1] ** -0.5
        scores = query.to(value.dtype) @ key.transpose(-1, -2)
        if self.copies > 1:
            mask = torch.zeros(key.shape[2], dtype=value.dtype, device=value.device)
            mask[-1] = math.log(self.copies)
            scores = scores + mask
        out = scores.softmax(-1).to(value.dtype) @ value
        # apart again
        out = out.transpose(1, 2).flatten(2)
        image, text = out.split([image.shape[1], text.shape[1]], dim=1)
        return attn.to_out[0](image), text if attn.context_pre_only else attn.to_add_out(text)


def _joined(attn: Any, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project both kinds of tokens -> query, key, value [B, heads, I + T, 32]."""

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (attn.heads, -1)).transpose(1, 2)

    query = [attn.norm_q(heads(attn.to_q(image))), attn.norm_added_q(heads(attn.add_q_proj(text)))]
    key = [attn.norm_k(heads(attn.to_k(image))), attn.norm_added_k(heads(attn.add_k_proj(text)))]
    value = [heads(attn.to_v(image)), heads(attn.add_v_proj(text))]
    return torch.cat(query, dim=2), torch.cat(key, dim=2), torch.cat(value, dim=2)


def velocity_and_middle(
    model: SD3Transformer2DModel,
    x: Tensor,
    hidden: Tensor,
    pooled: Tensor,
    time: Tensor,
    tap: int = -1,
) -> tuple[Tensor, Tensor]:
    """Run the transformer as its own forward does -> velocity, image tokens after block `tap`.

    Args:
        x: latents [B, 16, 8, 8]. hidden, pooled: what `TextStack` returns. time: [B], from 0 to
        1000. tap: number of a block; -1 returns the tokens before the first.
    """
    # tokens and time
    image, text = model.pos_embed(x), model.context_embedder(hidden)
    emb = model.time_text_embed(time, pooled)
    # blocks
    middle = image
    for i, block in enumerate(model.transformer_blocks):
        text, image = block(hidden_states=image, encoder_hidden_states=text, temb=emb)
        middle = image if i == tap else middle
    # velocity
    out = model.proj_out(model.norm_out(image, emb))
    return out.transpose(1, 2).unflatten(2, x.shape[-2:]), middle
