"""A network that is trained from nothing, by two optimizers on one schedule, and its average over
steps."""

from __future__ import annotations

import argparse
import copy
from typing import Generic, TypeVar

import torch
from common import set_lr, warm_cosine
from muon import Muon
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


class Averaged(Generic[Network]):
    """The network and its average; of `args` it needs lr, steps and ema."""

    def __init__(self, args: argparse.Namespace, network: Network) -> None:
        self.args, self.network = args, network
        self.average = copy.deepcopy(network).requires_grad_(False).eval()
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, p in network.named_parameters():
            hidden = "transformer_blocks" in name and "norm" not in name and p.ndim == 2
            (matrices if hidden else rest).append(p)
        self.optimizers = (
            Muon(matrices, lr=args.lr, weight_decay=0.01),
            torch.optim.AdamW(rest, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.98)),
        )

    def descend(self, loss: Tensor, step: int) -> float:
        """Take one step down a loss -> it as a number."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        # Muon for the matrices of attention blocks, AdamW for the rest, by one schedule
        for optimizer in self.optimizers:
            set_lr(optimizer, self.args.lr * warm_cosine(step, self.args.steps, 100))
            optimizer.step()
        # averaged weights: short memory at first, long later
        decay = min(self.args.ema, (1 + step) / (10 + step))
        with torch.no_grad():
            ours: list[Tensor] = [*self.average.parameters()]
            theirs: list[Tensor] = [*self.network.parameters()]
            torch._foreach_lerp_(ours, theirs, 1 - decay)
        return loss.item()
