"""A knock-out tournament of each prompt's images: their order for 2 (G - 1) questions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .pairs import ring_order

Ask = Callable[[Tensor, Tensor], Tensor]
"""Compare images at places first [P], second [P] -> share of the win that goes to first [P]."""


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
