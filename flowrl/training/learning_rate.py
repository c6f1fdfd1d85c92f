"""The course of the learning rate: a number of the optimizer step alone, so a resume goes on with
it."""

from __future__ import annotations

import math


def lr_share(update: int, *, warmup: int, decay: int, decay_to: float) -> float:
    """Return the share of the rate at optimizer step `update`, counted from 0.

    It rises linearly over `warmup` steps, ``(update + 1) / (warmup + 1)``. Then it falls along half
    a cosine from 1 to `decay_to` over `decay` steps, and stays there; with `decay` 0 it stays 1.

    AWM (2509.25050; scxue/advantage_weighted_matching be51372, train_sd3_awm.py): torch's
    CosineAnnealingLR from lr to lr / 3, then constant. Its shipped configs let that take 1e10
    steps.
    """
    rising = min(1.0, (update + 1) / (warmup + 1))
    if not decay:
        return rising
    gone = min(max(update - warmup, 0) / decay, 1.0)
    return rising * (decay_to + (1 - decay_to) * (1 + math.cos(math.pi * gone)) / 2)
