"""Pairs of images: which ones to compare, what a verdict is, and win rates from verdicts."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError

from .scorer import to_pil


def verdict(first: Tensor, second: Tensor, tie: float = 0.0) -> Tensor:
    """Compare scores [P] with scores [P] -> [P] float32: 1 first higher, 0 second higher, .5 where
    they differ by at most `tie`, NaN one missing."""
    won = (first > second).float()
    won = torch.where((first - second).abs() <= tie, 0.5, won)
    return torch.where(first.isnan() | second.isnan(), torch.nan, won)


def both_orders(forward: Tensor, backward: Tensor) -> Tensor:
    """Average the verdicts of both orders [P], each "the first shown is better" -> [P] for the
    first of `forward`.

    Orders that name different winners make a tie, .5; a pair with one order missing is missing.
    """
    mirrored = 1 - backward
    disagree = (forward - 0.5) * (mirrored - 0.5) < 0
    return torch.where(disagree, 0.5, (forward + mirrored) / 2)


def win_rates(outcome: Tensor, first: Tensor, second: Tensor, count: int) -> Tensor:
    """Average each image's outcomes over its answered pairs -> [count] float32; NaN without one.

    outcome [P]: share of the win that goes to `first` [P]; the rest goes to `second` [P]. NaN =
    pair without answer.
    """
    known = ~outcome.isnan()
    place = torch.cat([first[known], second[known]])
    won = torch.cat([outcome[known], 1 - outcome[known]]).double()
    total = torch.zeros(count, dtype=torch.float64).index_add(0, place, won)
    pairs = torch.zeros(count, dtype=torch.float64).index_add(0, place, torch.ones_like(won))
    return (total / pairs).float()  # 0 / 0 is the NaN that is wanted


def all_pairs(group: Tensor) -> tuple[Tensor, Tensor]:
    """Return every pair (i, j), i < j, of places with the same group [L] -> first [P], second [P]
    int64."""
    first, second = (group[:, None] == group[None, :]).triu(1).nonzero(as_tuple=True)
    return first, second


def some_pairs(
    group: Tensor, images: Tensor, limit: int, seed: int, *, option: str
) -> tuple[Tensor, Tensor]:
    """Return at most `limit` pairs of each group, spread evenly over its images -> first [P],
    second [P] int64.

    A group's images stand in a ring, ordered by a hash of `seed` and their pixels; neighbours are
    compared first, then images two places apart, and so on. So the choice depends on the
    images, not on their order in the batch or on an earlier call. Raises ConfigError where
    `limit` leaves an image without a pair; it names the `option` that the limit comes from.
    """
    chosen = [torch.zeros(0, 2, dtype=torch.int64)]
    for number in group.unique().tolist():
        # enough pairs for every image
        places = (group == number).nonzero()[:, 0]
        size = len(places)
        if size > 1 and limit < (size + 1) // 2:
            raise ConfigError(
                f"{option}: expected at least {(size + 1) // 2} for groups of {size} images, so "
                f"that each image is in a pair, got {limit}"
            )
        # all pairs, or the first ones of the ring
        if limit >= size * (size - 1) // 2:
            chosen.append(torch.combinations(places, 2))
        else:
            ring = places[ring_order(images[places], seed)]
            chosen.append(ring[torch.tensor(_ring(size)[:limit])])
    pairs = torch.cat(chosen)
    return pairs[:, 0], pairs[:, 1]


def ring_order(images: Tensor, seed: int) -> Tensor:
    """Order images [N, 3, H, W] by a hash of `seed` and their pixels -> places [N] int64."""
    start = f"{seed}:".encode()
    keys = [hashlib.sha256(start + image.tobytes()).digest() for image in to_pil(images)]
    return torch.tensor(sorted(range(len(keys)), key=keys.__getitem__))


def _ring(size: int) -> list[tuple[int, int]]:
    """Return every pair of a ring of `size` once: by distance, at each distance every other start
    first."""
    out = []
    for distance in range(1, size // 2 + 1):
        starts = size // 2 if 2 * distance == size else size
        out += [(i, (i + distance) % size) for i in (*range(0, starts, 2), *range(1, starts, 2))]
    return out
