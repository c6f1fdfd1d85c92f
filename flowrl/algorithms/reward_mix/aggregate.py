"""Several rewards -> one advantage per node. All see raw values side by side; which of them count
is said by weights."""

from __future__ import annotations

from math import isnan
from typing import Literal

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.reward_mix._gate import doubt, most_doubted, next_share
from flowrl.algorithms.reward_mix._known import check_known
from flowrl.core.errors import ConfigError
from flowrl.core.types import Credit, Mixed, Scores


def weighted_sum(scores: Scores, credit: Credit) -> Mixed:
    """Add the raw rewards by weight, then give credit: ``credit(sum_k w_k r_k)``.

    The reward with the largest spread decides, whatever its weight says (Flow-GRPO's
    ``multi_score``).
    """
    return _summed(
        {name: scores.weights[name] * scores.values[name] for name in counting(scores)}, credit
    )


def advantage_sum(scores: Scores, credit: Credit) -> Mixed:
    """Give credit for each reward alone, then add by weight: ``sum_k w_k credit(r_k)``.

    Weights are then relative importances, whatever the scales. Source: MixGRPO (2507.21802) and its
    code. **Differs:** DanceGRPO adds one clipped loss per reward instead; the gradients agree while
    nothing is clipped.
    """
    nodes = {name: scores.weights[name] * credit(scores.values[name]) for name in counting(scores)}
    return Mixed(_total(nodes), {name: part[scores.leaf] for name, part in nodes.items()}, {})


def gdpo(scores: Scores, credit: Credit, *, eps: float = 1e-4) -> Mixed:
    """Whiten the sum of advantages over all images: ``(s - mean(s)) / (std(s) + eps)``, std with
    n - 1.

    GDPO (2601.05242, NVlabs/GDPO): ``s = sum_k w_k a_k`` with each a_k normalised in its group,
    which is `advantage_sum` with credit ``{fn: group_norm, ddof: 1}``. **Differs:** in the code a
    missing score is the reward 0 (`nan_to_num`), which moves its group's mean and std; here such an
    image counts nowhere and gets advantage 0. A reward that is constant in most groups inflates the
    others.

    Raises: ConfigError for a negative eps.
    """
    if not eps >= 0:
        raise ConfigError(f"gdpo: expected eps >= 0, got {eps}")
    raw = advantage_sum(scores, credit)
    scored = ~scores.values[counting(scores)[0]].isnan()
    known = raw.advantage[scores.leaf][scored].double()
    spread = known.std() if len(known) > 1 else known.new_zeros(())
    shift = known.mean() if len(known) else spread
    width = spread + eps
    white = (raw.advantage.double() - shift) / torch.where(width > 0, width, 1.0)
    empty = subtree_mean(torch.where(scored, 0.0, torch.nan), scores.leaf, scores.tree).isnan()
    return raw._replace(advantage=torch.where(empty, 0.0, white).float())


def log_tame(
    scores: Scores, credit: Credit, *, threshold: Literal["mean", "median"] | float = "mean"
) -> Mixed:
    """Replace rewards of large relative spread by ``ln(1 + r)``, then add by weight (PaCo-RL,
    2512.04784).

    ``h_k = std_k / (mean_k + 1e-6)`` over all images, std with n; reward k is tamed where h_k is
    above the mean or the median of the h's, or above a number. **Differs:** the code hands the sum
    on as the advantage; here `credit` centres and normalises it. ``median`` of an even number of
    rewards is the mean of the middle two.

    Raises: ConfigError for a tamed reward of -1 or less.
    """
    names = counting(scores)
    h = torch.stack([_relative_spread(scores.values[name]) for name in names])
    limit = {"mean": h.mean(), "median": h.quantile(0.5)}.get(str(threshold))
    wild = h > (limit if limit is not None else float(threshold))
    parts, metrics = {}, {}
    for name, tame in zip(names, wild.tolist(), strict=True):
        values = scores.values[name]
        if tame and bool((values <= -1).any()):
            raise ConfigError(
                f"log_tame: reward {name!r} gave {values.nan_to_num().min():g}; ln(1 + r) needs r "
                "> -1"
            )
        parts[name] = scores.weights[name] * (values.log1p() if tame else values)
        metrics[f"tamed/{name}"] = float(tame)
    return _summed(parts, credit)._replace(metrics=metrics)


def gated(
    scores: Scores, credit: Credit, *, above: dict[str, float], softness: float = 0.0
) -> Mixed:
    """Let a reward count only where every reward of higher priority passes its threshold, then add
    by weight.

    above: thresholds in order of priority, ``{strict: 0.5, clip: 0.2}``; rewards that are not named
    come last. With softness T > 0 each gate is ``sigmoid((r - threshold) / T)`` and has no jump. A
    gate may have weight 0. Source: G-RA (2508.10548), read second hand; the soft gate and more than
    one gate are ours.

    Raises: ConfigError for a threshold of an unknown reward, or softness < 0.
    """
    check_known("gated: above", above, scores)
    if not softness >= 0:
        raise ConfigError(f"gated: expected softness >= 0, got {softness}")
    # opened [L]: the product of the gates passed so far, from 0 to 1
    opened: Tensor | float = 1.0
    parts, metrics, last = {}, {}, [name for name in scores.values if name not in above]
    for name in [*above, *last]:
        values = scores.values[name]
        # a reward of weight 0 may be there as a gate only
        if scores.weights[name]:
            parts[name] = scores.weights[name] * values * opened
        if name in above:
            gate = (
                ((values - above[name]) / softness).sigmoid()
                if softness
                else (values > above[name]).to(values)
            )
            gate = torch.where(values.isnan(), torch.nan, gate)  # not scored is not refused
            metrics[f"gate/{name}"] = gate.nanmean().item()
            opened = opened * gate
    return _summed(parts, credit)._replace(metrics=metrics)


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
        return _summed(parts, credit)._replace(
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
    train.updates. **Differs:** the sign of the gap, see `doubt`; the penalty is averaged over the
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
        parts = {name: scores.weights[name] * scores.values[name] for name in counting(scores)}
        mixed = _summed(parts, credit)
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
        gate = most_doubted(self._gap(scores), share) if self.doubted_by else n > -torch.inf
        doubted = gate.double().mean()
        # over this the mean over all images is that over the doubted ones
        weight = gate / torch.where(doubted > 0, doubted, 1.0)
        whole = subtree_mean(weight, leaf, tree).nan_to_num().float()
        metrics = {"gate": doubted.item(), "gate_share": share}
        return mixed._replace(advantage=advantage, gate=whole, metrics=metrics)

    def update(self, scores: Scores) -> None:
        """Follow the mean gap of an iteration, if an image of it has every score."""
        level = self._level(scores)
        self.share = next_share(self.share, level, self.levels, self.least, self.most)
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
        main = _total({k: scores.weights[k] * scores.values[k] for k in counting(scores)})
        return doubt(main, [scores.values[name] for name in self.doubted_by])

    def _level(self, scores: Scores) -> float:
        gap = self._gap(scores) if self.doubted_by else torch.zeros(1)
        return gap[gap >= 0].mean().item()

    def _next(self, scores: Scores) -> float:
        return next_share(self.share, self._level(scores), self.levels, self.least, self.most)


def counting(scores: Scores) -> list[str]:
    """List the rewards that are not only watched."""
    return [name for name in scores.values if scores.weights[name]]


def _summed(parts: dict[str, Tensor], credit: Credit) -> Mixed:
    return Mixed(credit(_total(parts)), parts, {})


def _total(parts: dict[str, Tensor]) -> Tensor:
    first, *rest = parts.values()
    for part in rest:
        first = first + part
    return first


def _relative_spread(values: Tensor) -> Tensor:
    known = values[~values.isnan()].double()
    return known.std(correction=0) / (known.mean() + 1e-6)
