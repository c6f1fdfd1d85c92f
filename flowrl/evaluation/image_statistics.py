"""The look of images in three numbers: how colourful, how sharp, how much of a grid."""

from __future__ import annotations

import torch
from torch import Tensor

LOOKS = ("saturation", "sharpness", "grid")
PERIOD = 8  # pixels: of the autoencoders, and half of the networks' patches
MOST = 64  # prompts of a process that are looked at


def looks_of(images: Tensor, group: Tensor, kind: Tensor) -> Tensor:
    """Look at the first finished image of each prompt, of `MOST` prompts -> [G, 3] as `LOOKS`.

    Images uint8 [L, 3, H, W], or videos [L, T, 3, H, W]; kind [L] as `leaf_kinds` gives it, 0 =
    finished.
    """
    done = (kind.cpu() == 0).nonzero().flatten()
    prompt = torch.unique(group.cpu()[done], return_inverse=True)[1]
    first = torch.full((int(prompt.max()) + 1,), len(images))
    first = first.scatter_reduce(0, prompt, done, "amin")[:MOST]
    # one at a time: floats of all of them would be several times what an iteration keeps
    rows = []
    for place in first.tolist():
        one = images[place].cpu().float().reshape(-1, *images.shape[-3:]) / 255
        each = torch.stack([saturation(one), sharpness(one), grid_energy(one)])
        rows.append(each.mean(1))  # over the frames of a video
    return torch.stack(rows)


def saturation(images: Tensor) -> Tensor:
    """Return the mean distance of the strongest and the weakest channel [B], in [0, 1]."""
    return (images.amax(1) - images.amin(1)).mean((1, 2))


def sharpness(images: Tensor) -> Tensor:
    """Return the mean absolute Laplacian of the grey images [B]: 0 for a plane."""
    grey = images.mean(1)
    inside = grey[:, 1:-1, 1:-1]
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return (around - 4 * inside).abs().mean((1, 2))


def grid_energy(images: Tensor) -> Tensor:
    """Return how much of the edges repeats every `PERIOD` pixels [B], in [0, 1].

    The absolute differences of neighbouring pixels, averaged along the other axis, make a profile
    along each axis. It is the share of that profile's energy without its mean which lies at the
    multiples of 1 / `PERIOD`, averaged over both axes; 0 without edges.
    """
    grey = images.mean(1)
    both = [_periodic(grey), _periodic(grey.transpose(1, 2))]
    return torch.stack(both).mean(0)


def _periodic(grey: Tensor) -> Tensor:
    """Return the share along the last axis [B] of images [B, H, W]."""
    # around the edge, so that the profile has whole periods
    profile = (grey - grey.roll(1, -1)).abs().mean(1)
    length = profile.shape[1] // PERIOD * PERIOD
    if not length:
        return torch.zeros(len(grey))
    power = torch.fft.rfft(profile[:, :length].double()).abs().square()[:, 1:]
    step = length // PERIOD
    total = power.sum(1)
    share = power[:, step - 1 :: step].sum(1) / total.clamp_min(1e-12)
    return torch.where(total > 1e-9, share, 0.0).float()
