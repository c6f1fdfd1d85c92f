"""Pairs of images: which ones to compare, what a verdict is, win rates from verdicts, and a knock-
out tournament: an order of a prompt's images for 2 (G - 1) questions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError

from .scorer import to_pil

Ask = Callable[[Tensor, Tensor], Tensor]
"""Compare images at places first [P], second [P] -> share of the win that goes to first [P]."""


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


def tournament(group: Tensor, images: Tensor, seed: int, ask: Ask) -> Tensor:
    """Rank the images of each group [L] -> [L] float32 from 0 (last) to 1; a group sums to G/2.

    First each image meets one of its group, the anchor, which a hash of `seed` and the pixels
    picks; those outcomes seed the bracket. Then winners meet winners, the best seeded the worst,
    until one is left; who has the best seed of an odd number waits, and goes on after a tie or a
    missing answer. An image's place is how far it came, then its seed: a winner stands one round
    above whom it beat, so that waiting costs nothing. A tie is won by neither, so that images that
    are all alike get one place. Equal ones share the mean place. Without any answer it is NaN.
    """
    rounds = [_Bracket((group == g).nonzero().flatten(), images, seed) for g in group.unique()]
    _play(rounds, ask, [bracket.opening() for bracket in rounds])
    while any(len(bracket.alive) > 1 for bracket in rounds):
        _play(rounds, ask, [bracket.pairs() for bracket in rounds])
    out = torch.full((len(group),), torch.nan)
    for bracket in rounds:
        for place, value in bracket.standing().items():
            out[place] = value
    return out


def _play(rounds: list[_Bracket], ask: Ask, pairs: list[list[tuple[int, int]]]) -> None:
    """Ask about the pairs of all groups at once, and tell each its answers."""
    flat = [pair for some in pairs for pair in some]
    answers: list[float] = []
    if flat:
        rows = torch.tensor(flat)
        answers = ask(rows[:, 0], rows[:, 1]).tolist()
    for bracket, some in zip(rounds, pairs, strict=True):
        bracket.take(some, answers[: len(some)])
        answers = answers[len(some) :]


class _Bracket:
    """One group's tournament."""

    def __init__(self, places: Tensor, images: Tensor, seed: int) -> None:
        self.alive: list[int] = places[ring_order(images[places], seed)].tolist()
        self.anchor = self.alive[0]
        self.seeded = dict.fromkeys(self.alive, 0.5)
        self.reached = dict.fromkeys(self.alive, 0)
        self.answered: set[int] = set()
        self.open = True  # the bracket is not seeded yet

    def opening(self) -> list[tuple[int, int]]:
        """Pair every other image with the anchor."""
        return [(place, self.anchor) for place in self.alive[1:]]

    def pairs(self) -> list[tuple[int, int]]:
        """Pair the best seeded of those left with the worst."""
        order = self.alive[len(self.alive) % 2 :]
        return [(order[k], order[-1 - k]) for k in range(len(order) // 2)]

    def take(self, pairs: list[tuple[int, int]], answers: list[float]) -> None:
        """Seed the bracket, or drop who lost."""
        # NaN = the judge gave no answer
        out = set()
        for (first, second), share in zip(pairs, answers, strict=True):
            known = share == share
            self.answered |= {first, second} if known else set()
            # in the opening round a share is a seed, and nobody is out
            if self.open:
                self.seeded[first] = share if known else 0.5
                continue
            # without an answer the worse seeded one is out, and nobody gets a round further
            lost = first if known and share < 0.5 else second
            kept = first + second - lost
            if known and share != 0.5:
                self.reached[kept] = max(self.reached[kept], self.reached[lost]) + 1
            out.add(lost)
        # after the opening the bracket is in the order of the seeds
        if self.open:
            self.open = False
            self.alive.sort(key=lambda place: -self.seeded[place])
        self.alive = [place for place in self.alive if place not in out]

    def standing(self) -> dict[int, float]:
        """Return each image's place, from 0 to 1."""
        key = {place: (self.reached[place], self.seeded[place]) for place in self.seeded}
        others = max(1, len(key) - 1)
        found = {}
        for place, mine in key.items():
            below = sum(other < mine for other in key.values())
            beside = sum(other == mine for other in key.values()) - 1
            known = place in self.answered
            found[place] = (below + beside / 2) / others if known else float("nan")
        return found
