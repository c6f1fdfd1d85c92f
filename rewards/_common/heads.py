"""Discriminators that are trained along: a small head, and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from flowrl.core.seeds import generator


def hinge(real: Tensor, fake: Tensor) -> Tensor:
    """Return the discriminator's loss 0.5 (mean relu(1 - real) + mean relu(1 + fake)) of logits of
    any shape -> [].

    Adv-GRPO's code (showlab/Adv-GRPO, scripts/train_sd3_fast_dino_patch.py). **Differs:** the paper
    has no factor 0.5.
    """
    return 0.5 * (relu(1 - real).mean() + relu(1 + fake).mean())


def make_head(width: int, hidden: int, seed: int) -> nn.Sequential:
    """Return Linear(width, hidden)-GELU-Linear(hidden, 1) with torch's own initial values, drawn
    from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator(seed, "head").get_state())
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))
