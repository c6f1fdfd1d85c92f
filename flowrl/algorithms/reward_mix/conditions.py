"""A reward that depends on another one: compared apart, paid extra, or made finer where it says
nothing."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.reward_mix._known import check_known
from flowrl.algorithms.reward_mix.aggregate import counting
from flowrl.core.errors import ConfigError
from flowrl.core.types import Credit, Mixed, Scores


def conditional(scores: Scores, credit: Credit, *, by: str, inter: float = 0.5) -> Mixed:
    """Compare each image with those of its prompt that are on the other side of the median of a
    watched reward `by`, and with those on its own: ``inter (r - mean_other) + (1 - inter) (r -
    mean_own)``, r the weighted sum.

    CANON (2509.23962), its code (biuboomc/CANON at 7d6f814) with alpha 1 and beta 0: of n images
    the ``n // 2`` lowest by the metric are one side. It finds out whether more or less of the
    metric is better. Half of each (`inter` 0.5) is Dr.GRPO for even n. Take credit `mean_centred`,
    which leaves these values as they are for even n. **Differs:** the code divides by the longest
    length of a text; there the metric is entropy or length.

    Raises: ConfigError for an unknown reward, or inter outside [0, 1].
    """
    check_known("conditional: by", [by], scores)
    if not 0 <= inter <= 1:
        raise ConfigError(f"conditional: expected inter from 0 to 1, got {inter}")
    parts = _parts(scores)
    total, metric = _total(parts), scores.values[by]
    value, gaps = torch.full_like(total, torch.nan), []
    # prompt by prompt, over the places [n] of its images that have both scores
    for mine in _prompts(scores, ~(total.isnan() | metric.isnan())):
        if len(mine) < 2:
            continue
        # halves by the watched reward; of an odd number the upper one has one more
        order = mine[torch.argsort(metric[mine], stable=True)]
        low, high = order[: len(order) // 2], order[len(order) // 2 :]
        means = total[low].mean(), total[high].mean()
        # each side against the other's mean and its own
        for side, own, other in ((low, *means), (high, *means[::-1])):
            value[side] = total[side] - inter * other - (1 - inter) * own
        gaps.append(float(means[1] - means[0]))
    metrics = {f"gap/{by}": sum(gaps) / len(gaps)} if gaps else {}
    return Mixed(credit(value), parts, metrics)


def consistency_bonus(
    scores: Scores,
    credit: Credit,
    *,
    right: str,
    sure: str,
    bonus: float = 0.5,
    margin: float = 0.01,
    least: float = 0.1,
    among: Literal["batch", "prompt"] = "batch",
) -> Mixed:
    """Pay images extra that are right and of which another reward is sure: ``+ bonus right``.

    GRPO-CARE, its code (TencentARC/GRPO-CARE at b0628fc): right means above `least` and at least
    the mean; of these an image gets the bonus whose `sure` is at least their mean less `margin`.
    bonus 0.5, margin 0 or 0.01, means over the images of one process; here `among` all images, or
    those of the prompt. **Differs:** there the confidence is the likelihood of the answer under a
    slow copy of the policy, here it is any watched reward.

    Raises: ConfigError for an unknown reward, another `among`, or a negative bonus.
    """
    check_known("consistency_bonus", [right, sure], scores)
    if among not in ("batch", "prompt") or not bonus >= 0:
        raise ConfigError(
            'consistency_bonus: expected among "batch" or "prompt" and bonus >= 0, got '
            f"{among=}, {bonus=}"
        )
    correct, confident = scores.values[right], scores.values[sure]
    known, paid = ~(correct.isnan() | confident.isnan()), torch.zeros_like(correct)
    # among whom "the mean" is meant; images without a score are in no family
    families = [known.nonzero().flatten()] if among == "batch" else _prompts(scores, known)
    for mine in families:
        # the right ones, and of these the sure ones
        good = mine[(correct[mine] > least) & (correct[mine] >= correct[mine].mean())]
        if len(good):
            sound = good[confident[good] >= confident[good].mean() - margin]
            paid[sound] = bonus * correct[sound]
    parts = {**_parts(scores), "bonus": paid}
    return Mixed(credit(_total(parts)), parts, {"bonus": paid.mean().item()})


def tie_break(
    scores: Scores, credit: Credit, *, by: str, below: float = 1.0, scale: float = 0.5
) -> Mixed:
    """Add ``scale`` times a finer reward `by` to the images of a prompt that all failed alike: all
    have one weighted sum, below `below`.

    Spectral Policy Optimisation, now Stepwise Guided Policy Optimisation (2505.11595), tells wrong
    answers apart where all of a prompt are wrong. Reconstruction: its formula was not found; a
    judge grades steps there, here it is a reward of the config, usually of weight 0.

    Raises: ConfigError for an unknown reward, or a scale that is not above 0.
    """
    check_known("tie_break: by", [by], scores)
    if not scale > 0:
        raise ConfigError(f"tie_break: expected scale > 0, got {scale}")
    parts = _parts(scores)
    total, finer = _total(parts), scores.values[by]
    added, prompts = torch.zeros_like(total), _prompts(scores, ~(total.isnan() | finer.isnan()))
    broken = 0
    for mine in prompts:
        values = total[mine]
        if len(mine) and float(values.max() - values.min()) <= 1e-8 and float(values[0]) < below:
            added[mine] = scale * finer[mine]
            broken += 1
    parts["tie"] = added
    return Mixed(credit(total + added), parts, {"ties": broken / max(1, len(prompts))})


class tightening:
    """Make one reward yes or no at a threshold that rises as the model gets better: 1 where it is
    at least `start`, later up to `target`; then add by weight.

    MedLoc-R1 (2603.28120), as reading notes have it: over the last `window` iterations, the share
    of images that pass is at least `hit`, its std at most `spread`, and the mean reward at least
    `margin` above the threshold; then it rises by ``step (target - t) / (target - start)``, the
    linear decay, at least `least`, and the older half of the window is forgotten. Published: start
    0.3, target 0.8, first step 0.15, window 30, margin 0.1. Reconstruction: `hit`, `spread`,
    `least`, that they do not move with the threshold, and that the std is that of iterations.

    The threshold is logged as ``threshold/NAME`` and saved in checkpoints.

    Raises: ConfigError for an unknown reward or numbers out of range.
    """

    def __init__(
        self,
        *,
        reward: str,
        start: float = 0.3,
        target: float = 0.8,
        step: float = 0.15,
        least: float = 0.05,
        window: int = 30,
        hit: float = 0.7,
        spread: float = 0.15,
        margin: float = 0.1,
    ) -> None:
        if not (start < target and step > 0 and least > 0 and window >= 2 and 0 <= hit <= 1):
            raise ConfigError(
                "tightening: expected start < target, step and least > 0, window >= 2 and hit in "
                f"[0, 1], got {start=}, {target=}, {step=}, {least=}, {window=}, {hit=}"
            )
        self.reward, self.start, self.target = reward, start, target
        self.step, self.least, self.window = step, least, window
        self.hit, self.spread, self.margin = hit, spread, margin
        self.threshold = start
        self.hits: list[float] = []
        self.means: list[float] = []

    def __call__(self, scores: Scores, credit: Credit) -> Mixed:
        """Add with the threshold of now; nothing is changed."""
        check_known("tightening: reward", [self.reward], scores)
        values = {**scores.values, self.reward: self._passed(scores)}
        parts = _parts(scores._replace(values=values))
        return Mixed(credit(_total(parts)), parts, {f"threshold/{self.reward}": self.threshold})

    def update(self, scores: Scores) -> None:
        """Watch an iteration, and raise the threshold if the model is ready."""
        passed = self._passed(scores)
        if bool(passed.isnan().all()):
            return
        self.hits.append(passed.nanmean().item())
        self.means.append(scores.values[self.reward].nanmean().item())
        self.hits, self.means = self.hits[-self.window :], self.means[-self.window :]
        if len(self.hits) == self.window and self._ready():
            left = (self.target - self.threshold) / (self.target - self.start)
            self.threshold = min(self.threshold + max(self.step * left, self.least), self.target)
            half = self.window // 2
            self.hits, self.means = self.hits[half:], self.means[half:]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the threshold [1], and of the window's iterations hits and mean rewards [n]."""
        numbers = {"threshold": [self.threshold], "hits": self.hits, "means": self.means}
        return {name: torch.tensor(row, dtype=torch.float64) for name, row in numbers.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back the threshold [1], hits and means [n]."""
        self.threshold = float(state["threshold"])
        self.hits, self.means = state["hits"].tolist(), state["means"].tolist()

    def _ready(self) -> bool:
        hits = torch.tensor(self.hits, dtype=torch.float64)
        margin = sum(self.means) / len(self.means) - self.threshold
        steady = float(hits.std(correction=0)) <= self.spread
        return float(hits.mean()) >= self.hit and steady and margin >= self.margin

    def _passed(self, scores: Scores) -> Tensor:
        values = scores.values[self.reward]
        return torch.where(values.isnan(), values, (values >= self.threshold).to(values.dtype))


def _parts(scores: Scores) -> dict[str, Tensor]:
    """Return what each reward that counts brings to the weighted sum."""
    return {name: scores.weights[name] * scores.values[name] for name in counting(scores)}


def _total(parts: dict[str, Tensor]) -> Tensor:
    return torch.stack([*parts.values()]).sum(0)


def _prompts(scores: Scores, known: Tensor) -> list[Tensor]:
    """Return the places [n] of the known images of each prompt."""
    group = scores.tree.group[scores.leaf]
    return [((group == one) & known).nonzero().flatten() for one in group.unique().tolist()]
