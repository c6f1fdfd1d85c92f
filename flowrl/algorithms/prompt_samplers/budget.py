"""Share an iteration's images out over its prompts: more where they can teach more."""

from __future__ import annotations

from collections.abc import Sequence

from flowrl.algorithms.prompt_samplers._table import PromptTable
from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import ConfigError


class knapsack(PromptTable):
    """Give the prompts of an iteration different numbers of images, from `least` to `most` times
    `train.group`, so that the sum of their values is largest.

    Knapsack RL (2509.25849): a prompt of success rate p with N images is worth ``(1 - p^N -
    (1-p)^N) p (1-p)^2``, the chance of a gradient times what it would gain; the numbers that
    maximise the sum are found by dynamic programming. An iteration has ``train.prompts / mean``
    different prompts, in shuffled epochs; a prompt's places are one group for credit, segments and
    selections. p is ``(successes + 1) / (images + 2)`` of the prompt's last visit, 1/2 before it.

    **Differs:** numbers of images are multiples of `train.group`; the estimate of p and the limits
    are ours; the paper's fallback for tasks without any success is `least`. Rewards and transforms
    that compare images (`win_rate`, `rank`) compare those of one place.

    Raises: ConfigError for numbers out of range, a `train.prompts` that `mean` does not divide; in
    a run for mean rewards outside [0, 1].
    """

    joins = True

    def __init__(self, *, mean: int = 2, least: int = 1, most: int = 4) -> None:
        if not 1 <= least <= mean <= most:
            raise ConfigError(
                f"knapsack: expected 1 <= least <= mean <= most, got {least=}, {mean=}, {most=}"
            )
        super().__init__("rate")
        self.mean, self.least, self.most = mean, least, most

    def __call__(self, draw: PromptDraw) -> list[int]:
        """Return each row as often as it has places."""
        if draw.places % self.mean:
            raise ConfigError(
                f"sampler knapsack: train.prompts={draw.places} are shared out over prompts with "
                f"{self.mean} places on average; take a multiple of {self.mean}"
            )
        different = draw.places // self.mean
        rows = draw.stream(draw.iteration * different, different)
        rates = self.column("rate").nan_to_num(nan=0.5)[rows].tolist()
        places = shared_out(rates, draw.places, self.least, self.most, draw.group)
        chosen = []
        for row, times in zip(rows, places, strict=True):
            chosen += [row] * times
        return chosen

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Remember the success rate of each prompt."""
        for visit in self.rates(visits):
            successes = visit.images * visit.mean
            self.column("rate")[visit.row] = (successes + 1) / (visit.images + 2)


def value(images: int, rate: float) -> float:
    """Say what a prompt of a success rate is worth with so many images."""
    return (1 - rate**images - (1 - rate) ** images) * rate * (1 - rate) ** 2


def shared_out(rates: Sequence[float], total: int, least: int, most: int, group: int) -> list[int]:
    """Share `total` places of `group` images out over prompts of these success rates, from `least`
    to `most` each, for the largest sum of values."""
    # best[t]: the largest value of t places over the prompts so far, and how they are shared out
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}
    for rate in rates:
        after: dict[int, tuple[float, list[int]]] = {}
        for spent, (worth, places) in best.items():
            for more in range(least, most + 1):
                found = worth + value(more * group, rate)
                old = after.get(spent + more)
                if spent + more <= total and (old is None or found > old[0]):
                    after[spent + more] = found, [*places, more]
        best = after
    return best[total][1]
