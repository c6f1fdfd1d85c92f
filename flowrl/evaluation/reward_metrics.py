"""Figures of an iteration's rewards and images: means, spread within prompts, how rewards relate;
and the look of images: how colourful, how sharp, how much of a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import KINDS

LOOKS = ("saturation", "sharpness", "grid")
PERIOD = 8  # pixels: of the autoencoders, and half of the networks' patches
MOST = 64  # prompts of a process that are looked at


def histogram(values: Tensor, bins: int = 24) -> dict[str, Any] | None:
    """Count the finite values [n] in `bins` equal parts of their range -> {"low", "high",
    "counts"}; None where there is none."""
    known = values.detach().double().cpu()
    known = known[known.isfinite()]
    if not len(known):
        return None
    low, high = known.min().item(), known.max().item()
    if low == high:
        return {"low": low, "high": high, "counts": [len(known)]}
    counts = torch.histc(known, bins, low, high)
    return {"low": low, "high": high, "counts": [int(count) for count in counts.tolist()]}


def distances(images: Tensor, group: Tensor) -> Tensor:
    """Return the root-mean-square distance of a prompt's images [G], by ascending group, on the
    CPU; NaN for one. Images [L, 3, H, W] in [0, 1], or uint8."""
    out = []
    for g in group.unique().tolist():
        pixels = images[(group == g).to(images.device)].flatten(1)
        out.append(_distance(pixels))
    return torch.tensor(out)


def _distance(pixels: Tensor) -> float:
    """Return the root-mean-square distance of rows [n, P]: twice the mean variance over rows.

    From sums of squares, which are exact for uint8, up to 65,000 rows of it.
    """
    count, scale = len(pixels), 255 if pixels.dtype == torch.uint8 else 1
    if count < 2:
        return math.nan
    values = pixels.float() if pixels.dtype == torch.uint8 else pixels.double()
    within = values.square().sum(dtype=torch.float64)
    common = values.sum(0).double().square().sum() / count
    variance = float((within - common).clamp_min(0)) / ((count - 1) * values.shape[1])
    return math.sqrt(2 * variance) / scale


def reward_metrics(
    values: Mapping[str, Tensor],
    weights: Mapping[str, float],
    distance: Tensor,
    group: Tensor,
    kind: Tensor,
) -> dict[str, float]:
    """Measure raw rewards {name: [L]}: the mean of each and of their weighted sum, and the spread.

    They are those of finished images. What else was scored has means under names of its own:
    ``preview/reward``. distance: the finished images' `distances` [G]; kind: the leaves' kinds [L],
    as `leaf_kinds` gives them.
    """
    total, kind = total_reward(values, weights), kind.cpu()
    done = kind == 0
    metrics = {f"reward/{name}": row[done].nanmean().item() for name, row in values.items()}
    metrics["reward"] = total[done].nanmean().item()
    metrics |= group_metrics(total[done], distance, group.cpu()[done])
    # what is not finished
    for place, name in enumerate(KINDS):
        mine = kind == place
        if place and bool(mine.any()):
            metrics[f"{name}/reward"] = total[mine].nanmean().item()
            metrics[f"{name}/images"] = float(mine.sum())
    return metrics


def finished_distances(images: Tensor, group: Tensor, kind: Tensor) -> Tensor:
    """Return the `distances` [G] of the finished images; kind [L] as `leaf_kinds` gives it."""
    done = kind == 0
    if bool(done.all()):
        return distances(images, group)
    return distances(images[done.to(images.device)], group[done.to(group.device)])


def total_reward(values: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Add rewards {name: [L]} by weight; one of weight 0 is left out, so that NaN
    in it does no harm."""
    total = torch.zeros_like(next(iter(values.values())))
    for name, row in values.items():
        if weights[name]:
            total = total + weights[name] * row
    return total


def group_metrics(reward: Tensor, distance: Tensor, group: Tensor) -> dict[str, float]:
    """Measure the spread within prompts: of rewards [L], and of images by their `distances`
    [G]."""
    stds, apart = [], []
    group = group.cpu()
    # prompts with fewer than two scored images have no spread
    for place, g in enumerate(group.unique().tolist()):
        mine = reward[group == g]
        mine = mine[mine.isfinite()]
        if len(mine) < 2:
            continue
        stds.append(mine.std(correction=0))
        apart.append(distance[place])
    if not stds:
        return {}
    # means over the others
    spread = torch.stack(stds)
    return {
        "reward_std": spread.mean().item(),
        "zero_std": (spread < 1e-8).float().mean().item(),
        "diversity": torch.stack(apart).mean().item(),
    }


def prompt_entropy(advantage: Tensor, group: Tensor) -> float:
    """Say how evenly the prompts teach: the entropy of their shares of the sum of absolute
    advantages [V], over the log of their number.

    1 where all teach alike, 0 where one does, or none; 1 where there is only one.
    """
    ids = torch.unique(group.cpu(), return_inverse=True)[1]
    prompts = int(ids.max()) + 1
    size = torch.zeros(prompts, dtype=torch.float64).index_add(
        0, ids, advantage.cpu().double().abs()
    )
    if prompts == 1 or not float(size.sum()) > 0:
        return float(prompts == 1)
    share = size / size.sum()
    return float(torch.special.entr(share).sum() / math.log(prompts))


def shares(parts: Mapping[str, Tensor], group: Tensor) -> dict[str, float]:
    """Say which reward decides: the share of each in the variance of the advantage within prompts.

    parts: {name: [L]}. Empty with one reward, or where no advantage differs within a prompt.
    """
    if len(parts) < 2:
        return {}
    mine = {name: _centred(part.cpu(), group) for name, part in parts.items()}
    total = torch.stack(list(mine.values())).sum(0)
    power = total.square().sum()
    if not float(power) > 0:
        return {}
    return {f"share/{name}": float((part * total).sum() / power) for name, part in mine.items()}


def correlations(values: Mapping[str, Tensor], group: Tensor) -> dict[str, float]:
    """Say how rewards {name: [L]} go together within prompts: Pearson's r of each two."""
    out: dict[str, float] = {}
    for (one, a), (two, b) in combinations(values.items(), 2):
        # images that one of both did not score count for neither
        gone = a.isnan() | b.isnan()
        a = _centred(torch.where(gone, torch.nan, a), group)
        b = _centred(torch.where(gone, torch.nan, b), group)
        size = (a.square().sum() * b.square().sum()).sqrt()
        if float(size) > 0:
            out[f"corr/{one}/{two}"] = float((a * b).sum() / size)
    return out


def _centred(values: Tensor, group: Tensor) -> Tensor:
    """Subtract from each value its prompt's mean; what was not scored becomes 0, which counts in no
    sum."""
    ids = torch.unique(group.cpu(), return_inverse=True)[1]
    known = ~values.isnan()
    clean = values.double().nan_to_num()
    zeros = torch.zeros(int(ids.max()) + 1, dtype=torch.float64)
    mean = zeros.index_add(0, ids, clean) / zeros.index_add(0, ids, known.double()).clamp_min(1)
    return torch.where(known, clean - mean[ids], 0.0)


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
