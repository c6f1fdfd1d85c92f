"""Advantages by what is remembered of each prompt, or of all of them: running numbers that an
iteration moves, and that checkpoints keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.credit._groups import check_unit, sample_std
from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.losses._groups import check_positive
from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.prompts import load_prompts
from flowrl.core.types import Tree


class smooth_norm(PromptMemory):
    """Mix the advantage within the images of now with that among all images of the prompt so far,
    from rewards [L] -> advantage per node [V] float32.

    DCPO's smooth advantage standardisation (2509.02333) and its code. At the N-th visit ``a =
    (r - mean) / std`` of now (std of n - 1) and ``b`` the same with running mean and std; of ``b/N
    + (1 - 1/N) a`` and ``a/N + (1 - 1/N) b`` the one nearer to 0. A prompt whose images are all
    equal still learns from its earlier visits. A std of 0 gives 0; NaN = not scored: advantage 0.
    """

    def __init__(self) -> None:
        super().__init__({"visits": 1, "mean": 1, "std": 1})

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str] = ()
    ) -> Tensor:
        """Compare each reward; prompts [L]: the text of each leaf."""
        out = torch.full_like(reward, torch.nan, dtype=torch.float64)
        for prompt, mine, values in self.visited(reward, prompts):
            out[mine] = self._mixed(prompt, values)
        return subtree_mean(out, leaf, tree).nan_to_num().float()

    def update(self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str]) -> None:
        """Count the visit of each prompt with scored rewards [L], and move its running numbers."""
        for prompt, _, new in self.visited(reward.cpu(), prompts):
            for name, number in zip(self.kept, self._moved(prompt, new), strict=True):
                self.kept[name][prompt, 0] = number

    def _moved(self, prompt: int, new: Tensor) -> tuple[float, float, float]:
        """Return visits, mean and std with the rewards [n] of now."""
        n, mean, std = (float(rows[prompt, 0].nan_to_num()) for rows in self.kept.values())
        here, spread = float(new.mean()), float(sample_std(new))
        count = n + 1
        moved = (n * std**2 + spread**2 + n / count * (here - mean) ** 2) / count
        return count, (n * mean + here) / count, moved**0.5

    def _mixed(self, prompt: int, new: Tensor) -> Tensor:
        count, mean, std = self._moved(prompt, new)
        now, total = (
            _standard(new, float(new.mean()), float(sample_std(new))),
            _standard(new, mean, std),
        )
        if count == 1:
            return now
        first = total / count + (1 - 1 / count) * now
        second = now / count + (1 - 1 / count) * total
        return torch.where(first.abs() <= second.abs(), first, second)


class risk_bundles:
    """Judge sums over bundles of prompts, those in the lower tail most, from rewards [L] ->
    advantage per node [V] float32.

    RiskPO and its code (RTkenny/RiskPO at 65ec40c), without its division by each prompt's std:
    `size` prompts are a bundle; the i-th images of them add up to S. With the running quantiles
    q_low, q_high of S at levels `low` and `high` an image has ``(1.5 CVaR + RVaR) / 2.5`` of its
    sum, see `risk_value`, over the std of its bundle's sums. Quantiles move by ``0.1 (level - share
    of S below)``. It is at most 0: the best sums have 0. NaN = not scored: its sum is left out,
    advantage 0.

    Raises: ConfigError for a size below 1, levels out of order, or prompts with different numbers
    of images or that do not fill bundles.
    """

    needs = frozenset({"prompts"})

    def __init__(self, *, size: int = 5, low: float = 0.2, high: float = 0.8) -> None:
        if size < 1 or not 0 < low < high < 1:
            raise ConfigError(
                "risk_bundles: expected size >= 1 and 0 < low < high < 1, got "
                f"{size=}, {low=}, {high=}"
            )
        self.size, self.levels = size, torch.tensor([low, high], dtype=torch.float64)
        self.quantiles = torch.full((2,), torch.nan, dtype=torch.float64)

    def start(self, prompts: list[str]) -> None:
        """Nothing is kept of single prompts."""

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str] = ()
    ) -> Tensor:
        """Judge each image's sum."""
        sums, index = self._sums(reward, leaf, tree)
        known = sums[~sums.isnan()]
        out = torch.full_like(sums, torch.nan)
        if len(known):
            low, high = self._quantiles(known).tolist()
            value = risk_value(sums, low, high, *self.levels.tolist())
            for bundle in range(len(sums)):
                inside = sums[bundle][~sums[bundle].isnan()]
                spread = float(sample_std(inside)) if len(inside) else 0.0
                out[bundle] = value[bundle] / spread if spread > 0 else 0.0
        each = torch.where(reward.isnan(), torch.nan, out.flatten().to(reward.device)[index])
        return subtree_mean(each, leaf, tree).nan_to_num().float()

    def update(self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str]) -> None:
        """Move the quantiles by the sums of rewards [L]. Raises ConfigError for prompts that do not
        fill bundles."""
        sums = self._sums(reward, leaf, tree)[0]
        known = sums[~sums.isnan()].cpu()
        if len(known):
            now = self._quantiles(known)
            below = (known[:, None] < now).double().mean(0)
            self.quantiles = now + 0.1 * (self.levels - below)

    def state_dict(self) -> dict[str, Tensor]:
        """Return {"quantiles": [2] float64}, the lower one first."""
        return {"quantiles": self.quantiles.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back quantiles [2]."""
        self.quantiles = state["quantiles"].cpu().double().clone()

    def _quantiles(self, sums: Tensor) -> Tensor:
        first = bool(self.quantiles.isnan().any())
        return sums.cpu().quantile(self.levels) if first else self.quantiles

    def _sums(self, reward: Tensor, leaf: Tensor, tree: Tree) -> tuple[Tensor, Tensor]:
        """Add up the i-th images of each bundle -> sums [bundles, G], and the sum of each leaf."""
        # bundles need prompts with equally many images, or the i-th of some would be missing
        group = torch.unique(tree.group[leaf], return_inverse=True)[1]
        counts = torch.bincount(group)
        images = int(counts[0])
        if len(counts) % self.size or not bool((counts == images).all()):
            raise ConfigError(
                f"risk_bundles: bundles of {self.size} prompts with equally many images are "
                f"needed, got {len(counts)} prompts with {counts.unique().tolist()} images; make "
                "train.prompts a multiple of credit.size"
            )
        # place [L]: which of its prompt's images each leaf is, counted from 0
        order = torch.argsort(group, stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) % images
        # neighbouring prompts are one bundle: their i-th images share a sum
        index = group // self.size * images + place
        sums = torch.zeros(len(counts) // self.size * images, dtype=torch.float64)
        sums = sums.to(reward.device).index_add(0, index, reward.double())
        return sums.view(-1, images), index


def risk_value(sums: Tensor, q_low: float, q_high: float, low: float, high: float) -> Tensor:
    """Return ``(1.5 CVaR + RVaR) / 2.5`` of sums S [...]: CVaR ``-(q_low - S)+ / low``, RVaR
    ``((S - q_low)+ - (S - q_high)+ + q_low - q_high) / (high - low)``."""
    above, beyond = (sums - q_low).clamp_min(0), (sums - q_high).clamp_min(0)
    middle = (above - beyond + q_low - q_high) / (high - low)
    tail = -(q_low - sums).clamp_min(0) / low
    return (1.5 * tail + middle) / 2.5


def _standard(values: Tensor, mean: float, std: float) -> Tensor:
    return (values - mean) / std if std > 0 else torch.zeros_like(values)


class single_stream(PromptMemory):
    """Subtract from rewards in [0, 1] [L] what their prompt was worth so far, and standardise over
    the batch -> advantage per node [V] float32; `train.group` may be 1.

    Single-stream policy optimisation (2509.13232) and its code: a prompt is worth ``alpha / (alpha
    + beta)``; a visit adds its rewards to ``keep alpha`` and what they lack of 1 to ``keep beta``.
    With N = 1 / (1 - keep) and scores of n images that were made beforehand, which sum to k, they
    start at ``N (k + 1/2) / (n + 1)`` and ``N (n - k + 1/2) / (n + 1)``; the code has n = 8.

    Args:
        keep: how much of what was known stays, where `half` is not given.
        half: forget by how far the policy has moved: ``keep = 2^(-D / half)`` within `least` and
            `most`, and 1 / (1 - least) is N. D is the mean absolute change of the log-prob of what
            was drawn at the prompt's last visit; a first visit has none and takes `least`. In the
            code 0.06 for the log-probs of words. Those of latents are means over so many numbers
            that their changes are far smaller: the metric `moved` is the mean D.
        least, most: with `half`, the range of `keep`.
        scores: a list of prompts, as `prompts.train`, whose records have `scores`, the rewards of
            images of the model that training starts from; "": none, n = 0, so that every prompt is
            worth 1/2 at first.

    Its other half, which prompts are drawn, is the sampler `success_spread`.

    **Differs:** without `half` the number `keep` stands for it; D is of one image, and the code has
    its answer's words. NaN = not scored: advantage 0.

    Raises: ConfigError for `keep`, `least` or `most` outside (0, 1), `half` not above 0, rewards
    outside [0, 1], or a prompt that `scores` does not have; DataError for scores that are none.
    """

    def __init__(
        self,
        *,
        keep: float = 0.9,
        half: float | None = None,
        least: float = 0.875,
        most: float = 0.96,
        scores: str = "",
    ) -> None:
        if not (0 < keep < 1 and 0 < least <= most < 1):
            raise ConfigError(
                "single_stream: expected 0 < keep < 1 and 0 < least <= most < 1, got "
                f"{keep=}, {least=}, {most=}"
            )
        if half is not None:
            check_positive("single_stream", half=half)
            self.needs = self.needs | {"moved"}
        super().__init__({"alpha": 1, "beta": 1})
        self.keep, self.half, self.least, self.most = keep, half, least, most
        self.scores = scores

    def start(self, prompts: list[str]) -> None:
        """Know of each prompt what `scores` says."""
        super().start(prompts)
        keep = self.keep if self.half is None else self.least
        begun = first_beliefs(list(self._row), self.scores, keep, "credit single_stream")
        self.kept["alpha"][:, 0], self.kept["beta"][:, 0] = begun

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str] = ()
    ) -> Tensor:
        """Compare each reward; prompts [L]: the text of each leaf."""
        value, place = reward.double(), self.places(prompts)
        check_unit("single_stream", value[~value.isnan()])
        alpha, beta = (self.kept[name][place, 0] for name in ("alpha", "beta"))
        gap = value - (alpha / (alpha + beta)).to(value.device)
        known = gap[~gap.isnan()]
        if len(known):
            gap = (gap - known.mean()) / (sample_std(known) + 1e-8)
        return subtree_mean(gap, leaf, tree).nan_to_num().float()

    def update(
        self,
        reward: Tensor,
        leaf: Tensor,
        tree: Tree,
        *,
        prompts: Sequence[str],
        moved: Tensor | None = None,
    ) -> None:
        """Add the rewards [L] of an iteration, from 0 to 1; NaN = not scored. moved [L]: how far
        the policy has moved since the prompt's last visit, NaN at a first one."""
        for prompt, mine, new in self.visited(reward.cpu(), prompts):
            keep = self.keep
            if self.half is not None and moved is not None:
                keep = forgetting(float(moved[mine][0]), self.half, self.least, self.most)
            for name, add in (("alpha", new.sum()), ("beta", (1 - new).sum())):
                self.kept[name][prompt, 0] = keep * self.kept[name][prompt, 0] + add


def forgetting(moved: float, half: float, least: float, most: float) -> float:
    """Return ``2^(-moved / half)`` within `least` and `most`; `least` for NaN."""
    return least if moved != moved else min(max(2 ** (-moved / half), least), most)


def first_beliefs(texts: list[str], scores: str, keep: float, who: str) -> tuple[Tensor, Tensor]:
    """Return alpha and beta [N] float64 of N prompts before a visit, as `single_stream` says.

    Raises: ConfigError for a prompt that the file `scores` does not have; DataError as `scores_of`.
    """
    known = scores_of(scores) if scores else {}
    strange = next((text for text in texts if known and text not in known), None)
    if strange is not None:
        raise ConfigError(
            f"{who}: {scores} has no scores of {strange!r}, which is in prompts.train; score "
            "images of every prompt, or leave `scores` out"
        )
    seen = [known.get(text, []) for text in texts]
    count = torch.tensor([len(rewards) for rewards in seen], dtype=torch.float64)
    right = torch.tensor([sum(rewards) for rewards in seen], dtype=torch.float64)
    share = 1 / (1 - keep) / (count + 1)
    return share * (right + 0.5), share * (count - right + 0.5)


def scores_of(path: str) -> dict[str, list[float]]:
    """Read the rewards of images that were made beforehand -> {prompt: rewards in [0, 1]}, those of
    records with one prompt together. Raises DataError with file and line, or as `load_prompts`."""
    found: dict[str, list[float]] = {}
    listed = load_prompts(path)
    for text, record, where in zip(listed.texts, listed.records, listed.places, strict=True):
        scores = record.get("scores")
        if not (isinstance(scores, list) and all(map(_is_score, scores))):
            raise DataError(
                f"{where}: expected `scores`, a list of numbers from 0 to 1, the rewards of images "
                f"of this prompt; got {scores!r}"
            )
        found.setdefault(text, []).extend(map(float, scores))
    return found


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
