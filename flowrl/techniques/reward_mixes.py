"""Rewards that depend on another one, or on how training goes: compared apart, paid extra, held
above a bound, or made stricter."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.reward_mix.aggregate import check_known, total_of, weighted
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
    parts = weighted(scores)
    total, metric = total_of(parts), scores.values[by]
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
    parts = {**weighted(scores), "bonus": paid}
    return Mixed(credit(total_of(parts)), parts, {"bonus": paid.mean().item()})


class constrained:
    """Maximise the weighted sum subject to ``mean(r_k) >= b_k``: rewards are added with dual
    variables lambda_k.

    ``credit(sum_k w_k r_k + sum_k lambda_k r_k)``; after each iteration ``lambda_k <- clip(lambda_k
    + lr (b_k - mean(r_k)), 0, max_dual)``, dual ascent on the Lagrangian (Boyd and Vandenberghe,
    Convex Optimization, section 5). A constrained reward usually has weight 0. Duals are logged as
    ``dual/NAME`` and saved in checkpoints.

    Raises: ConfigError for an unknown reward, no constraint, or a rate that is not positive.
    """

    def __init__(
        self, *, at_least: dict[str, float], lr: float = 0.1, max_dual: float = 100.0
    ) -> None:
        if not at_least or not lr > 0 or not max_dual > 0:
            raise ConfigError(
                "constrained: expected at_least: {reward: bound}, lr > 0 and max_dual > 0, got "
                f"at_least={at_least}, lr={lr}, max_dual={max_dual}"
            )
        self.at_least, self.lr, self.max_dual = at_least, lr, max_dual
        self.dual = dict.fromkeys(at_least, 0.0)

    def __call__(self, scores: Scores, credit: Credit) -> Mixed:
        """Add with the duals of now; nothing is changed."""
        check_known("constrained: at_least", self.at_least, scores)
        force = {name: scores.weights[name] + self.dual.get(name, 0.0) for name in scores.values}
        parts = {name: force[name] * scores.values[name] for name in force if force[name]}
        if not parts:
            parts = {name: 0.0 * scores.values[name] for name in self.at_least}
        slack = {f"slack/{name}": self._slack(scores, name) for name in self.at_least}
        return Mixed(credit(total_of(parts)), parts, {})._replace(
            metrics={**slack, **{f"dual/{k}": v for k, v in self.dual.items()}}
        )

    def update(self, scores: Scores) -> None:
        """Raise the duals of constraints that were missed, lower the others."""
        for name in self.at_least:
            slack = self._slack(scores, name)
            if slack == slack:
                self.dual[name] = min(max(self.dual[name] - self.lr * slack, 0.0), self.max_dual)

    def state_dict(self) -> dict[str, Tensor]:
        """Return {reward: its dual []}, float64."""
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.dual.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back the duals {reward: []}."""
        self.dual = {name: state[name].item() for name in self.at_least}

    def _slack(self, scores: Scores, name: str) -> float:
        return scores.values[name].nanmean().item() - self.at_least[name]


def _prompts(scores: Scores, known: Tensor) -> list[Tensor]:
    """Return the places [n] of the known images of each prompt."""
    group = scores.tree.group[scores.leaf]
    return [((group == one) & known).nonzero().flatten() for one in group.unique().tolist()]
