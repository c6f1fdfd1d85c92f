"""What the shapes editor is made of: a FLUX.1-Kontext with text encoders of one layer, in which
each word is a token."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
)
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from flowrl.evaluation.suites.shapes.edits import edit_words
from flowrl.models.adapter import pack
from flowrl.models.flux import image_ids

sys.path.insert(0, str(Path(__file__).parents[1] / "shapes_base"))
from common import TOKENS as CLIP_TOKENS  # noqa: E402
from words import build_tokenizer  # noqa: E402

TOKENS = 6  # of T5: five words and the end
TEXT = 96  # width of the text encoders
_attend = F.scaled_dot_product_attention


class Network(nn.Module):
    """All that is trained."""

    def __init__(self, width: int, double: int, single: int) -> None:
        super().__init__()
        self.t5_tokenizer, self.clip_tokenizer = _tokenizers()
        self.t5 = _reader(self.t5_tokenizer)
        self.clip = _pooled_reader(self.clip_tokenizer)
        self.model = FluxTransformer2DModel(
            in_channels=64,
            num_layers=double,
            num_single_layers=single,
            attention_head_dim=32,
            num_attention_heads=width // 32,
            joint_attention_dim=TEXT,
            pooled_projection_dim=TEXT,
            guidance_embeds=False,
            axes_dims_rope=(4, 14, 14),
        )

    def forward(
        self, x: Tensor, source: Tensor, sigma: Tensor, ids: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the velocity [B,N,64] of tokens x at sigma [B], given the source's [B,N,64] and
        the words for T5 [B,6] and CLIP [B,20]."""
        t5, clip = ids
        return self.model(
            hidden_states=torch.cat([x, source], 1),
            timestep=sigma,
            pooled_projections=self.clip(clip).pooler_output,
            encoder_hidden_states=self.t5(t5).last_hidden_state,
            txt_ids=torch.zeros(t5.shape[1], 3),
            img_ids=_places(math.isqrt(x.shape[1])),
            return_dict=False,
        )[0][:, : x.shape[1]]

    def read(self, texts: list[str]) -> tuple[Tensor, Tensor]:
        """Return the words of prompts as numbers for T5 [B,6] and for CLIP [B,20]."""
        how: dict[str, Any] = {
            "padding": "max_length",
            "truncation": True,
            "return_tensors": "pt",
        }
        t5 = self.t5_tokenizer(texts, max_length=TOKENS, **how).input_ids
        return t5, self.clip_tokenizer(texts, max_length=CLIP_TOKENS, **how).input_ids


def _places(side: int) -> Tensor:
    target = image_ids(side, side, torch.device("cpu"))
    source = target.clone()
    source[:, 0] = 1
    return torch.cat([target, source])


def _tokenizers() -> tuple[T5TokenizerFast, CLIPTokenizer]:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *("▁" + word for word in edit_words())]
    scored = [(piece, -float(place)) for place, piece in enumerate(pieces)]
    longest_first = sorted(edit_words(), key=lambda word: (-len(word), word))
    with TemporaryDirectory() as folder:
        clip = build_tokenizer(Path(folder), longest_first)
    return T5TokenizerFast(vocab=scored, extra_ids=0), clip


def _reader(tokenizer: T5TokenizerFast) -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(tokenizer.get_vocab()),
        d_model=TEXT,
        d_kv=24,
        d_ff=2 * TEXT,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.0,
    )
    return T5EncoderModel(config)


def _pooled_reader(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    vocab = tokenizer.get_vocab()
    config = CLIPTextConfig(
        vocab_size=max(vocab.values()) + 1,
        hidden_size=TEXT,
        intermediate_size=2 * TEXT,
        projection_dim=TEXT,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=vocab["<|startoftext|>"],
        eos_token_id=vocab["<|endoftext|>"],
        pad_token_id=vocab["<|endoftext|>"],
    )
    return CLIPTextModel(config)


def attention(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
    """Attend as written where all see all: on a CPU in bfloat16 a whole step takes two thirds of
    its time so."""
    if any(how.get(name) for name in ("is_causal", "scale", "enable_gqa")):
        return _attend(query, key, value, **how)
    if how.get("attn_mask") is not None:
        return _attend(query, key, value, **how)
    scores = query.to(value.dtype) @ key.to(value.dtype).mT * query.shape[-1] ** -0.5
    return scores.float().softmax(-1).to(value.dtype) @ value


@torch.no_grad()
def tokens_of(vae: AutoencoderKL, images: Tensor) -> Tensor:
    """Return tokens [N,16,64] of images [N,3,64,64] in [0,1], 36 at 96 pixels: the mode of the
    posterior, scaled."""
    rows = []
    for part in images.split(256):
        found = vae.encode(2 * part - 1).latent_dist.mode()
        rows.append(pack((found - vae.config.shift_factor) * vae.config.scaling_factor))
    return torch.cat(rows)


def write(network: Network, vae: AutoencoderKL, out: Path) -> None:
    """Write the pipeline's folder; what was trained in bfloat16, for half of the megabytes."""
    copied = copy.deepcopy(network).bfloat16()
    FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=copied.clip,
        tokenizer=copied.clip_tokenizer,
        text_encoder_2=copied.t5,
        tokenizer_2=copied.t5_tokenizer,
        transformer=copied.model,
    ).save_pretrained(out, safe_serialization=True)
