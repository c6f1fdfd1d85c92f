"""A plugin package with methods that are no policy gradients on draws: one small function each."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from flowrl.core.needs import needs
from flowrl.core.types import LossInput

Loss = tuple[Tensor, dict[str, Tensor]]


def matching(data: LossInput) -> Loss:
    """Match the velocity of good images and leave that of bad ones: A times the squared error."""
    error = -data.now.log_prob
    return data.batch.advantage * error, {"error": error.detach()}


@needs("ref")
def preference(data: LossInput, *, beta: float) -> Loss:
    """Diffusion-DPO's loss of a prompt's best against its worst image, at one noise for both."""
    assert data.segment is not None
    gain = data.now.log_prob - data.under["ref"].log_prob
    pair = data.segment * 1000 + data.batch.step
    index = torch.unique(pair, return_inverse=True)[1]
    margin = torch.zeros_like(gain).index_add(0, index, data.batch.advantage * gain)[index]
    return -logsigmoid(beta * margin) / 2, {"margin": margin.detach()}


def reinforce(data: LossInput) -> Loss:
    """Raise the log-prob of what was good."""
    return -data.batch.advantage * data.now.log_prob, {}


@needs("old", "zero_advantage")
def negative_aware(data: LossInput, *, beta: float) -> Loss:
    """DiffusionNFT's loss: good images pull the velocity, bad ones pull its mirror image at the old
    one."""
    old, now = data.under["old"].mean, data.now.mean
    good = (0.5 + 0.5 * data.batch.advantage.clamp(-1, 1))[:, None, None, None]
    plus = (1 - beta) * old + beta * now
    minus = (1 + beta) * old - beta * now
    target = data.batch.target
    loss = good * (plus - target).square() + (1 - good) * (minus - target).square()
    return loss.flatten(1).mean(1), {"drift": (now - old).square().flatten(1).mean(1).detach()}
