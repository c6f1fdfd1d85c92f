"""Which prompts an iteration gets: each is a class that is made once and called every iteration.

It keeps numbers for each row of the training list, which checkpoints hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.abilities import PromptDraw, Visit
from flowrl.core.errors import ConfigError
from flowrl.techniques.prompt_histories import first_beliefs


class PromptTable(PromptMemory):
    """A float64 column [N] for each name, NaN where nothing is known, kept in checkpoints.

    Unlike a credit's, its rows are those of the list, equal texts included.
    """

    needs: frozenset[str] = frozenset()
    kind = "sampler"
    joins = False

    def __init__(self, *columns: str) -> None:
        super().__init__(dict.fromkeys(columns, 1))

    def start(self, prompts: list[str]) -> None:
        """Know nothing of any prompt."""
        super().start([f"{row} {text}" for row, text in enumerate(prompts)])

    def column(self, name: str) -> Tensor:
        """Return one column [N]; what is written into it is kept."""
        return self.kept[name][:, 0]

    def rates(self, visits: Sequence[Visit]) -> list[Visit]:
        """Return the visits with scored images. Raises ConfigError for a mean outside [0, 1]."""
        known = [visit for visit in visits if visit.images]
        for visit in known:
            if not -1e-6 <= visit.mean <= 1 + 1e-6:
                raise ConfigError(
                    f"sampler {type(self).__name__}: expected rewards from 0 to 1, whose mean is a "
                    f"rate of success, got a mean of {visit.mean:.4g}; map the reward to [0, 1] by "
                    "a transform, such as threshold, or take sampler variance_weighted"
                )
        return known


class _weighted(PromptTable):
    """Draw a share of the prompts by weight, the others in shuffled epochs."""

    def __init__(self, *columns: str, share: float) -> None:
        check_share(type(self).__name__, "share", share)
        super().__init__(*columns)
        self.share = share

    def __call__(self, draw: PromptDraw) -> list[int]:
        """Return first those drawn by weight, then the next ones of the epochs."""
        weighted = int(draw.places * self.share)
        plain = draw.places - weighted
        rows = drawn_by(self.weights(), weighted, draw)
        return rows + draw.stream(draw.iteration * plain, plain) if plain else rows

    def weights(self) -> Tensor:
        """Return the weight of each prompt [N]."""
        raise NotImplementedError


class variance_weighted(_weighted):
    """Draw a share of the prompts with odds of the variance of their rewards, the others evenly.

    MMR1's variance-aware sampling (2509.21268) and its code (LengSicong/MMR1 at d8161a0):
    ``int(share count)`` with replacement, weights ``p (1 - p)`` scaled so that the least is 0 and
    the largest 1, `momentum` of the older weight; share 0.5 and momentum 0 there. The variance of
    rewards (divisor n) is ``p (1 - p)`` for rewards of 0 and 1, and fits any other reward.

    **Differs:** the code measures all prompts again every 4 iterations, with 8 images each; here a
    weight is what the prompt's own images said when it was last trained on, which costs nothing,
    and a prompt that was never drawn weighs as much as the mean. The paper's second part of the
    weight, the diversity of texts, is not in the code either.

    Raises: ConfigError for share outside [0, 1], or momentum outside [0, 1).
    """

    def __init__(self, *, share: float = 0.5, momentum: float = 0.0) -> None:
        super().__init__("variance", share=share)
        if not 0 <= momentum < 1:
            raise ConfigError(f"variance_weighted: expected 0 <= momentum < 1, got {momentum}")
        self.momentum = momentum

    def weights(self) -> Tensor:
        """Return the scaled variances [N]."""
        variance = self.column("variance")
        known = variance[~variance.isnan()]
        if not len(known):
            return torch.ones_like(variance)
        scaled = (variance - known.min()) / (known.max() - known.min() + 1e-8)
        return torch.where(scaled.isnan(), scaled.nanmean(), scaled)

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Remember how much the rewards of each prompt differed."""
        variance = self.column("variance")
        for visit in visits:
            if visit.images > 1:
                new, old = visit.std**2, float(variance[visit.row])
                kept = new if old != old else self.momentum * old + (1 - self.momentum) * new
                variance[visit.row] = kept


class success_spread(_weighted):
    """Draw prompts with odds ``sqrt(v (1 - v)) / n^gamma + floor``, the spread of a success that is
    worth v by what was seen of the prompt so far.

    Single-stream policy optimisation (2509.13232), its prompt sampler, and its code (verl-recipe at
    48ea0a7, `spo`): ``v = alpha / (alpha + beta)`` and ``n = alpha + beta`` of the belief that
    credit `single_stream` keeps, with the same update and start; floor 0.05.

    Args:
        keep: how much of what was known stays at a visit.
        gamma: how much less a prompt weighs that much is known of. 0, the code's, leaves n out;
            the paper divides by n^gamma, whose gamma was not found.
        floor: what is added to each weight: a prompt that always succeeds comes again at times.
        scores: rewards that were made beforehand, as for credit `single_stream`.
        share: of the places that are drawn by weight; the others come in shuffled epochs.

    **Differs:** a sampler sees rewards alone, so the belief forgets by `keep`, not by how far the
    policy has moved; take the credit's `keep` for both, or what its `half` comes to. Equal texts in
    the list are rows of their own. Drawn with replacement.

    Raises: ConfigError for `keep` outside (0, 1), `gamma` or `floor` below 0, share outside [0, 1],
    or a prompt that `scores` does not have; in a run for mean rewards outside [0, 1]. DataError for
    scores that are none.
    """

    def __init__(
        self,
        *,
        keep: float = 0.9,
        gamma: float = 0.0,
        floor: float = 0.05,
        scores: str = "",
        share: float = 1.0,
    ) -> None:
        super().__init__("alpha", "beta", share=share)
        if not (0 < keep < 1 and gamma >= 0 and floor >= 0):
            raise ConfigError(
                "success_spread: expected 0 < keep < 1, gamma >= 0 and floor >= 0, got "
                f"{keep=}, {gamma=}, {floor=}"
            )
        self.keep, self.gamma, self.floor, self.scores = keep, gamma, floor, scores

    def start(self, prompts: list[str]) -> None:
        """Know of each prompt what `scores` says."""
        super().start(prompts)
        begun = first_beliefs(prompts, self.scores, self.keep, "sampler success_spread")
        self.kept["alpha"][:, 0], self.kept["beta"][:, 0] = begun

    def weights(self) -> Tensor:
        """Return the odds of each prompt [N]."""
        alpha, beta = self.column("alpha"), self.column("beta")
        known = alpha + beta
        return (alpha * beta).sqrt() / known / known**self.gamma + self.floor

    def update(self, draw: PromptDraw, visits: Sequence[Visit]) -> None:
        """Forget a part of each visited prompt once, and add its rewards."""
        known = self.rates(visits)
        for row in {visit.row for visit in known}:
            for name in ("alpha", "beta"):
                self.column(name)[row] *= self.keep
        for visit in known:
            right = visit.images * min(max(visit.mean, 0.0), 1.0)
            self.column("alpha")[visit.row] += right
            self.column("beta")[visit.row] += visit.images - right


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


def check_share(who: str, name: str, value: float) -> None:
    """Raise ConfigError for a share outside [0, 1]."""
    if not 0 <= value <= 1:
        raise ConfigError(f"sampler {who}: expected {name} from 0 to 1, got {value}")


def drawn_by(weights: Tensor, count: int, draw: PromptDraw) -> list[int]:
    """Draw `count` rows with odds of weights [N], with replacement; all alike where none is above
    0."""
    if not count:
        return []
    odds = weights if bool((weights > 0).any()) else torch.ones_like(weights)
    found: list[int] = torch.multinomial(
        odds, count, replacement=True, generator=draw.generator
    ).tolist()
    return found
