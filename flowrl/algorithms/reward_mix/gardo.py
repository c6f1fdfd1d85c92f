"""GARDO: good images that look unlike the others are paid more, and those whose reward is doubted
stay near the reference."""

from __future__ import annotations

from math import isnan

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.reward_mix.aggregate import check_known, total_of, weighted
from flowrl.core.errors import ConfigError
from flowrl.core.types import Credit, Mixed, Scores


class gardo:
    """Pay good images more the less they look like the others of their prompt, and keep near the
    reference only where the reward is doubted.

    ``a n / mean(n)`` for images of advantage a >= 0, a for the others; n is the reward `novelty`,
    usually of weight 0, its mean that of the prompt's scored images; where all of these are
    alike, n counts nothing. The penalty `kl` counts for images alone that rank better by the sum of
    the rewards than by the mean of the `doubted_by` rewards, and of these for the share with the
    largest gap: it is averaged over these. The share follows the mean gap, between `least` and
    `most`.

    Source: GARDO (2512.24138) and its code, with credit `mean_centred` and a reference that is
    refreshed: `kl: {fn: transition_kl_slow}`, `slow: {fn: reset}` with `every` 16 times
    train.updates. **Differs:** the sign of the gap, see `_doubt`; the penalty is averaged over the
    doubted images of an iteration, in the code over those of each network call; where no image is
    doubted there is no penalty, in the code of its NFT there is all of it.

    Raises: ConfigError for an unknown reward, or a share outside [least, most].
    """

    def __init__(
        self,
        *,
        novelty: str,
        doubted_by: list[str],
        share: float = 0.1,
        least: float = 0.02,
        most: float = 0.2,
        window: int = 20,
    ) -> None:
        if not (0 <= least <= share <= most <= 1 and window >= 1):
            raise ConfigError(
                "gardo: expected 0 <= least <= share <= most <= 1 and window >= 1, got "
                f"{least=}, {share=}, {most=}, {window=}"
            )
        self.novelty, self.doubted_by = novelty, doubted_by
        self.share, self.least, self.most, self.window = share, least, most, window
        self.levels: list[float] = []

    def __call__(self, scores: Scores, credit: Credit) -> Mixed:
        """Give credit, and say where the penalty counts; nothing is changed."""
        check_known("gardo", [self.novelty, *self.doubted_by], scores)
        parts = weighted(scores)
        mixed = Mixed(credit(total_of(parts)), parts, {})
        # how much good images differ from the others of their prompt
        leaf, tree = scores.leaf, scores.tree
        a, n = mixed.advantage[leaf].double(), scores.values[self.novelty].double()
        group = torch.unique(tree.group[leaf], return_inverse=True)[1]
        total = torch.zeros(int(group.max()) + 1, dtype=torch.float64, device=n.device)
        size = total.index_add(0, group, (~n.isnan()).to(n))
        mean = total.index_add(0, group, n.nan_to_num())[group] / size[group]
        good = (a >= 0) & (mean > 0)
        paid = torch.where(good, a * n / torch.where(good, mean, 1.0), a)
        advantage = subtree_mean(paid, leaf, tree).nan_to_num().float()
        # where the reward is doubted
        share = self._next(scores)
        gate = _most_doubted(self._gap(scores), share) if self.doubted_by else n > -torch.inf
        doubted = gate.double().mean()
        # over this the mean over all images is that over the doubted ones
        weight = gate / torch.where(doubted > 0, doubted, 1.0)
        whole = subtree_mean(weight, leaf, tree).nan_to_num().float()
        metrics = {"gate": doubted.item(), "gate_share": share}
        return mixed._replace(advantage=advantage, gate=whole, metrics=metrics)

    def update(self, scores: Scores) -> None:
        """Follow the mean gap of an iteration, if an image of it has every score."""
        level = self._level(scores)
        self.share = _next_share(self.share, level, self.levels, self.least, self.most)
        if not isnan(level):
            self.levels = [*self.levels, level][-self.window :]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the share [1], and the mean gaps of the last iterations [n] that it follows."""
        numbers = {"share": [self.share], "levels": self.levels}
        return {name: torch.tensor(row, dtype=torch.float64) for name, row in numbers.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back the share [1] and the gaps [n]."""
        self.share, self.levels = float(state["share"]), state["levels"].tolist()

    def _gap(self, scores: Scores) -> Tensor:
        main = total_of(weighted(scores))
        return _doubt(main, [scores.values[name] for name in self.doubted_by])

    def _level(self, scores: Scores) -> float:
        gap = self._gap(scores) if self.doubted_by else torch.zeros(1)
        return gap[gap >= 0].mean().item()

    def _next(self, scores: Scores) -> float:
        return _next_share(self.share, self._level(scores), self.levels, self.least, self.most)


def _doubt(main: Tensor, others: list[Tensor]) -> Tensor:
    """Return how much better images [L] rank by `main` than by the mean of `others` -> [L] float64,
    NaN where one of them is. Rank 1 is the best; equal values share the mean of their ranks.

    GARDO (2512.24138). **Differs:** its code has the opposite sign, and so doubts images that its
    main reward likes less than the others do; it ranks equal values by their place in the batch,
    which is chance where a reward is 0 or 1.
    """
    known = torch.stack([main, *others]).isnan().any(0)
    ranks = [_rank(torch.where(known, -torch.inf, values)) for values in (main, *others)]
    gap = torch.stack(ranks[1:]).mean(0) - ranks[0]
    return torch.where(known, torch.nan, gap)


def _most_doubted(gap: Tensor, share: float) -> Tensor:
    """Return which images [L] have a gap above the ``100 (1 - share)`` percentile of those that are
    not negative -> bool [L]."""
    high = gap[gap >= 0]
    if not len(high):
        return torch.zeros_like(gap, dtype=torch.bool)
    return gap > high.quantile(1 - share)


def _next_share(
    share: float, level: float, history: list[float], least: float, most: float
) -> float:
    """Return the share after a mean gap `level`: a tenth larger above all of the history, a tenth
    smaller below all of it, within [least, most]."""
    if not history or level != level:
        return share
    if level > max(history):
        share *= 1.1
    elif level < min(history):
        share *= 0.9
    return min(max(share, least), most)


def _rank(values: Tensor) -> Tensor:
    """Rank values [L], the largest 1; equal ones share the mean of their ranks -> [L] float64."""
    _, place, equal = values.unique(return_inverse=True, return_counts=True)
    better = len(values) - equal.cumsum(0)  # than each value, of which the last is the best
    return (better + (equal.double() + 1) / 2)[place]
