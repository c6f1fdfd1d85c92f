"""Stage `flow`: SD3 transformer and both CLIP encoders by rectified-flow matching.

Twins share noise and time. A head on the middle of the transformer, dropped at the end, reads what
stands where off the noisy latents.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accuracy import evaluate
from common import CHANNELS, GRID, NOTHING, WORK, Averaged, Log
from diffusers import AutoencoderKL
from pipeline import write_pipeline
from safetensors.torch import load_file
from scenes import Batches
from text import TextStack, layout_loss
from torch import Tensor, nn
from transformer import CountedJointAttention, build_transformer, velocity_and_middle
from words import build_tokenizer


class Network(nn.Module):
    """All that is trained: text encoders, transformer, and the head that reads the layout."""

    def __init__(self, args: argparse.Namespace, text: TextStack) -> None:
        super().__init__()
        self.text, self.model = text, build_transformer(args)
        self.text.load_state_dict(load_file(args.out / WORK / "text.safetensors"))
        self.head = nn.Linear(args.width, NOTHING + 1)
        self.attention = CountedJointAttention()
        self.model.set_attn_processor(self.attention)


class Batch(NamedTuple):
    """2n latents with captions, noise and times; twins lie side by side."""

    ids: Tensor  # [2n, TOKENS]
    x0: Tensor  # [2n, 16, 8, 8]
    eps: Tensor  # [2n, 16, 8, 8]
    sigma: Tensor  # [2n], from 0 to 1
    layout: Tensor  # [2n, 64]
    copies: int  # of the zero token


def draw(batches: Batches, args: argparse.Namespace, step: int) -> Batch:
    """Draw the batch of a step; it depends on seed and step alone.

    Times are logit-normal, but for the share `high`, which is drawn evenly from 0.6 to 1.
    """
    n, rng = args.batch // 2, torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    # latents and captions
    rows, slots = batches.draw(n, args.prompts, rng)
    ids = batches.ids(rows, slots, torch.rand(n, generator=rng) < args.dropout)
    # times and noise, which twins share
    sigma = torch.sigmoid(torch.randn(n, generator=rng))
    high = torch.rand(n, generator=rng) < args.high
    sigma = torch.where(high, 0.6 + 0.4 * torch.rand(n, generator=rng), sigma)
    eps = torch.randn(n, CHANNELS, GRID, GRID, generator=rng)
    copies = 256 if torch.rand((), generator=rng) < 0.2 else 1
    return Batch(
        ids.to(args.device),
        batches.latents[rows].flatten(0, 1).to(args.device).float(),
        eps.repeat_interleave(2, 0).to(args.device),
        sigma.repeat_interleave(2, 0).to(args.device),
        batches.layout[rows].flatten(0, 1).to(args.device),
        copies,
    )


def losses(network: Network, batch: Batch, tap: int) -> tuple[Tensor, Tensor]:
    """Return the squared error of the velocity, and how badly the layout is read off block `tap`.

    The velocity is eps - x0, at x = (1 - sigma) x0 + sigma eps.
    """
    network.attention.copies = batch.copies
    x = batch.x0 + batch.sigma[:, None, None, None] * (batch.eps - batch.x0)
    with torch.autocast(x.device.type, torch.bfloat16):
        hidden, pooled = network.text(batch.ids)
        time = batch.sigma * 1000
        v, middle = velocity_and_middle(network.model, x, hidden, pooled, time, tap)
        reading = layout_loss(network.head(middle), batch.layout)
    return F.mse_loss(v.float(), batch.eps - batch.x0), reading


def train_flow(args: argparse.Namespace) -> None:
    """Train transformer and text encoders on `--steps` batches; write the pipeline folder."""
    # what the earlier stages made
    torch.manual_seed(args.seed)
    vae = AutoencoderKL.from_pretrained(args.out / "vae").eval().to(args.device)
    tokenizer = build_tokenizer(args.out / "tokenizer")
    batches = Batches(args.out, tokenizer)
    network = Network(args, TextStack(tokenizer, args.text_width, args.text_layers))
    training = Averaged(network.to(args.device), args.lr, args.steps, args.ema, warmup=200)
    log, began, running = Log(args.out / "flow_log.jsonl"), time.time(), [0.0, 0.0]
    for block in network.model.transformer_blocks:
        block.compile()
    for step in range(args.steps):
        # one batch; the layout's loss counts less and less
        loss, reading = losses(network, draw(batches, args, step), args.tap)
        training.descend(loss + args.reading * (1 - step / args.steps) * reading, step)
        now, seen = (loss.item(), reading.item()), min(step + 1, 100)
        running = [a + (b - a) / seen for a, b in zip(running, now, strict=True)]
        # log, and now and then judge and write the averaged weights
        row = {"loss": running[0], "reading": running[1], "seconds": time.time() - began}
        if (step + 1) % args.eval_every == 0 or step == args.steps - 1:
            log(step=step + 1, **row, **evaluate(training.average, vae, tokenizer, args))
            write_pipeline(copy.deepcopy(training.average).cpu(), vae, tokenizer, args)
        elif (step + 1) % 100 == 0:
            log(step=step + 1, **row)
