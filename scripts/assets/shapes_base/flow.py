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
from common import (
    CHANNELS,
    GRID,
    NOTHING,
    WORK,
    Log,
    load_state,
    pack_optimizer,
    part,
    prefixed,
    save_state,
    set_lr,
    unpack_optimizer,
    warm_cosine,
)
from curves import plot
from diffusers import AutoencoderKL
from muon import Muon, split_parameters
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
        learnt = load_file(args.out / WORK / "text.safetensors")
        self.text.load_state_dict(part("model.text", learnt))
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

    Times are logit-normal, but for the share `--high`, which is drawn evenly from 0.6 to 1.
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


class Training:
    """Weights, their running average, and both optimizers."""

    def __init__(self, args: argparse.Namespace, text: TextStack) -> None:
        """Take up the state in `--out`, where there is one."""
        # weights and optimizers
        self.args, self.network = args, Network(args, text).to(args.device)
        self.average = copy.deepcopy(self.network).eval().requires_grad_(False)
        hidden, rest = split_parameters(self.network)
        self.muon = Muon(hidden, lr=args.lr, weight_decay=args.weight_decay)
        self.adam = torch.optim.AdamW(rest, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98))
        # as they were left
        tensors, self.start = load_state(args.out / WORK, "flow")
        if self.start:
            self.network.load_state_dict(part("model", tensors))
            self.average.load_state_dict(part("ema", tensors))
            unpack_optimizer(self.muon, "muon", tensors)
            unpack_optimizer(self.adam, "adam", tensors)

    def step(self, batch: Batch, step: int) -> tuple[float, float]:
        """Train on one batch -> its two losses.

        The layout's loss has the weight `--reading` at first, which goes to 0.
        """
        args = self.args
        # gradient
        loss, reading = losses(self.network, batch, args.tap)
        self.adam.zero_grad(set_to_none=True)
        self.muon.zero_grad(set_to_none=True)
        (loss + args.reading * (1 - step / args.steps) * reading).backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        # step
        for optimizer in (self.muon, self.adam):
            set_lr(optimizer, args.lr * warm_cosine(step, args.steps, 200))
            optimizer.step()
        # average
        decay = min(args.ema, (1 + step) / (10 + step))
        old: list[Tensor] = [*self.average.parameters()]
        new: list[Tensor] = [*self.network.parameters()]
        with torch.no_grad():
            torch._foreach_lerp_(old, new, 1 - decay)
        return loss.item(), reading.item()

    def save(self, steps: int) -> None:
        """Write all of it, for resuming after so many steps."""
        tensors = prefixed("model", self.network.state_dict())
        tensors |= prefixed("ema", self.average.state_dict())
        tensors |= pack_optimizer(self.muon, "muon") | pack_optimizer(self.adam, "adam")
        save_state(self.args.out / WORK, "flow", tensors, steps)


def train_flow(args: argparse.Namespace) -> None:
    """Train transformer and text encoders on `--steps` batches; write the pipeline folder."""
    # what the earlier stages made
    torch.manual_seed(args.seed)
    vae = AutoencoderKL.from_pretrained(args.out / "vae").eval().to(args.device)
    tokenizer = build_tokenizer(args.out / "tokenizer")
    batches = Batches(args, tokenizer)
    # weights, as new or as they were left
    training = Training(args, TextStack(tokenizer, args.text_width, args.text_layers))
    log = Log(args.out / "flow_log.jsonl", training.start)
    _prepare(training.network, args.compile)
    began, running = time.time(), [0.0, 0.0]
    for step in range(training.start, args.steps):
        # one batch
        now = training.step(draw(batches, args, step), step)
        seen = min(step - training.start + 1, 100)
        running = [a + (b - a) / seen for a, b in zip(running, now, strict=True)]
        # log
        last, scored = step == args.steps - 1, (step + 1) % args.eval_every == 0
        row = {"loss": running[0], "reading": running[1], "seconds": time.time() - began}
        if scored or last:
            log(step=step + 1, **row, **evaluate(training.average, vae, tokenizer, args))
        elif (step + 1) % 100 == 0:
            log(step=step + 1, **row)
        # state and pipeline
        if (step + 1) % args.save_every == 0 or last:
            training.save(step + 1)
            write_pipeline(copy.deepcopy(training.average).cpu(), vae, tokenizer, args)
    plot(args.out)


def _prepare(network: Network, compiled: bool) -> None:
    """Print the sizes of transformer and text encoders; compile the blocks, if asked for."""
    transformer, text = _size(network.model), _size(network.text)
    print(f"{transformer:,} + {text:,} parameters")
    if compiled:
        for block in network.model.transformer_blocks:
            block.compile()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
