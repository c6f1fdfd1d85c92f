"""Stage `text`: both CLIP encoders learn to say what stands where, from captions alone."""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from common import GRID, NOTHING, TOKENS, WORK, Log, set_lr, warm_cosine
from safetensors.torch import save_file
from scenes import Batches
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer
from words import build_tokenizer


def build_text_encoder(
    tokenizer: CLIPTokenizer, width: int, layers: int
) -> CLIPTextModelWithProjection:
    """Make one untrained encoder, with heads of 32 channels.

    Attention is written out: on a CPU in bfloat16 several times faster than the fused kernel.
    """
    # untrained, but of the real class, so that pipelines load it as they load CLIP
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        max_position_embeddings=TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attention_dropout=0.0,
    )
    model = CLIPTextModelWithProjection(config)
    model.set_attn_implementation("eager")
    return model


class TextStack(nn.Module):
    """Both CLIP encoders, joined the way the pipeline joins them."""

    def __init__(self, tokenizer: CLIPTokenizer, width: int, layers: int) -> None:
        super().__init__()
        self.one = build_text_encoder(tokenizer, width, layers)
        self.two = build_text_encoder(tokenizer, width, layers)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Encode ids [B, TOKENS] -> tokens [B, TOKENS + 1, 2 width], pooled [B, 2 width].

        The last token is zero, as where T5 would stand.
        """
        a = self.one(ids, output_hidden_states=True)
        b = self.two(ids, output_hidden_states=True)
        hidden = torch.cat([a.hidden_states[-2], b.hidden_states[-2]], dim=-1)
        pooled = torch.cat([a.text_embeds, b.text_embeds], dim=-1)
        return F.pad(hidden, (0, 0, 0, 1)), pooled


class Reader(nn.Module):
    """Read off a caption's tokens what stands in each latent cell. Serves the stage `text` only."""

    def __init__(self, width: int, inner: int = 96) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.randn(GRID**2, inner) * 0.3)
        self.into, self.norm = nn.Linear(width, inner), nn.LayerNorm(inner)
        self.attention = nn.MultiheadAttention(inner, 3, batch_first=True)
        wide, narrow = nn.Linear(inner, 2 * inner), nn.Linear(2 * inner, inner)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)
        self.out = nn.Linear(inner, NOTHING + 1)

    def forward(self, hidden: Tensor) -> Tensor:
        """Read tokens [B, TOKENS, width] -> logits of the layout [B, 64, 25]."""
        text, cells = self.into(hidden), self.cells.expand(len(hidden), -1, -1)
        cells = cells + self.attention(self.norm(cells), text, text, need_weights=False)[0]
        return self.out(cells + self.mlp(cells))


def layout_loss(logits: Tensor, layout: Tensor) -> Tensor:
    """Cross-entropy of logits [B, 64, 25] against the layout [B, 64], a mean over cells."""
    return F.cross_entropy(logits.float().flatten(0, 1), layout.flatten().long())


def train_text(args: argparse.Namespace) -> None:
    """Train both encoders on `--steps` batches of captions to say what stands where."""
    torch.manual_seed(args.seed + 1)
    tokenizer = build_tokenizer(args.out / "tokenizer")
    batches = Batches(args.out, tokenizer)
    text = TextStack(tokenizer, args.text_width, args.text_layers)
    reader = Reader(2 * args.text_width)
    both = nn.ModuleDict({"text": text, "reader": reader}).to(args.device)
    adam = torch.optim.AdamW(both.parameters(), lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))
    log, began, running = Log(args.out / "text_log.jsonl"), time.time(), 0.0
    for step in range(args.steps):
        # one batch
        set_lr(adam, args.lr * warm_cosine(step, args.steps, 100))
        ids, layout = _batch(batches, args, step)
        with torch.autocast(args.device.type, torch.bfloat16):
            logits = reader(text(ids)[0][:, :-1])
        loss = layout_loss(logits, layout)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        adam.step()
        running += (loss.item() - running) / min(step + 1, 100)
        if (step + 1) % 100 == 0 or step == args.steps - 1:
            log(step=step + 1, loss=running, seconds=time.time() - began)
    save_file(text.state_dict(), args.out / WORK / "text.safetensors")


def _batch(batches: Batches, args: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Draw the captions of a step -> ids [batch, TOKENS], layout [batch, 64]."""
    rng = torch.Generator().manual_seed(args.seed * 1_000_003 + 500_000 + step)
    rows, slots = batches.draw(args.batch // 2, args.prompts, rng)
    layout = batches.layout[rows].flatten(0, 1)
    return batches.ids(rows, slots).to(args.device), layout.to(args.device)
