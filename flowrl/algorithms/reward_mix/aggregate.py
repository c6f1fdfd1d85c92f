"""Several rewards -> one advantage per node. All see raw values side by side; which of them count
is said by weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.algorithms.forest import subtree_mean
from flowrl.core.errors import ConfigError, near
from flowrl.core.types import Credit, Mixed, Scores


def weighted_sum(scores: Scores, credit: Credit) -> Mixed:
    """Add the raw rewards by weight, then give credit: ``credit(sum_k w_k r_k)``.

    The reward with the largest spread decides, whatever its weight says (Flow-GRPO's
    ``multi_score``).
    """
    parts = weighted(scores)
    return Mixed(credit(total_of(parts)), parts, {})


def advantage_sum(scores: Scores, credit: Credit) -> Mixed:
    """Give credit for each reward alone, then add by weight: ``sum_k w_k credit(r_k)``.

    Weights are then relative importances, whatever the scales. Source: MixGRPO (2507.21802) and its
    code. **Differs:** DanceGRPO adds one clipped loss per reward instead; the gradients agree while
    nothing is clipped.
    """
    nodes = {name: scores.weights[name] * credit(scores.values[name]) for name in counting(scores)}
    return Mixed(total_of(nodes), {name: part[scores.leaf] for name, part in nodes.items()}, {})


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
    return Mixed(credit(total_of(parts)), parts, metrics)


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
    parts, metrics = {}, {}
    last = [name for name in scores.values if name not in above]
    for name in [*above, *last]:
        values = scores.values[name]
        # a reward of weight 0 may be there as a gate only
        if scores.weights[name]:
            parts[name] = scores.weights[name] * values * opened
        if name not in above:
            continue
        if softness:
            gate = ((values - above[name]) / softness).sigmoid()
        else:
            gate = (values > above[name]).to(values)
        gate = torch.where(values.isnan(), torch.nan, gate)  # not scored is not refused
        metrics[f"gate/{name}"] = gate.nanmean().item()
        opened = opened * gate
    return Mixed(credit(total_of(parts)), parts, metrics)


class by_field:
    """Give credit for each reward alone, then add with the weights of the prompt's own category:
    ``sum_k w_k(c) credit(r_k)``.

    A prompt's category is what its record has under the key `by`. `weights` has a row for each,
    ``{counting: {strict: 2.0, style: 0.0}}``; a reward that a row does not name has its own weight
    there. So a category decides which of its rewards matters, and no reward's scale does.

    Qwen-Image-2.0-RL (2606.27608): advantages of each reward in the prompt's group, weights per
    prompt category. Reconstruction: its weights were not found, nor whether the sum is whitened
    over the batch as in `gdpo`; here it is not.

    Raises: ConfigError for no category, a weight that is no finite number, a record without the
    key or of a category without weights, an unknown reward, one that is only watched, or a category
    in which no reward counts.
    """

    def __init__(self, *, weights: dict[str, dict[str, float]], by: str = "tag") -> None:
        bad = [name for name, row in weights.items() if not all(map(math.isfinite, row.values()))]
        if not weights or bad:
            raise ConfigError(
                "by_field: expected weights: {category: {reward: weight}} of finite numbers, got "
                f"{weights}"
            )
        self.weights, self.by = weights, by

    def check_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Raise ConfigError for a prompt whose record has no category with weights."""
        for number, record in enumerate(records, 1):
            self._category(record, f"training prompt {number} ({record.get('prompt', '')!r})")

    def __call__(self, scores: Scores, credit: Credit) -> Mixed:
        """Add by category; nothing is changed."""
        names = self._checked(scores)
        leaf, tree = scores.leaf, scores.tree
        found = [self._category(record, "a prompt") for record in scores.meta]
        group = torch.unique(tree.group, return_inverse=True)[1]
        nodes: dict[str, Tensor] = {}
        for name in names:
            own = scores.weights[name]
            mine = torch.tensor([self.weights[one].get(name, own) for one in found])
            # all images of a prompt have one weight, and so have the nodes above them
            of_prompt = torch.zeros(int(group.max()) + 1, device=leaf.device)
            of_prompt[group[leaf]] = mine.to(of_prompt)
            nodes[name] = of_prompt[group] * credit(scores.values[name])
        total = torch.stack([*nodes.values()]).sum(0)
        return Mixed(total, {name: part[leaf] for name, part in nodes.items()}, {})

    def _category(self, record: Mapping[str, Any], who: str) -> str:
        if self.by not in record:
            raise ConfigError(
                f"by_field: {who} has no {self.by!r} in its record, which says its category; it "
                f"has {', '.join(record)}{near(self.by, record)}. Set aggregate.by, or add the key"
            )
        value = str(record[self.by])
        if value not in self.weights:
            raise ConfigError(
                f"by_field: {who} is of the category {value!r} ({self.by}), which has no weights "
                f"(there are some for {', '.join(self.weights)}){near(value, self.weights)}; "
                f"add aggregate.weights.{value}"
            )
        return value

    def _checked(self, scores: Scores) -> list[str]:
        """Return the names of the rewards that count."""
        names = counting(scores)
        for category, row in self.weights.items():
            where = f"by_field: weights.{category}"
            check_known(where, row, scores)
            watched = [name for name in row if name not in names]
            if watched:
                raise ConfigError(
                    f"{where}: reward {watched[0]!r} has the weight 0, so it is only watched; set "
                    f"rewards.{watched[0]}.weight to another number, which categories that do not "
                    "name it will have"
                )
            if not any(row.get(name, scores.weights[name]) for name in names):
                raise ConfigError(
                    f"{where}: no reward counts, so its prompts could teach nothing; give one a "
                    "weight, or leave these prompts out of the list"
                )
        return names


def counting(scores: Scores) -> list[str]:
    """List the rewards that are not only watched."""
    return [name for name in scores.values if scores.weights[name]]


def weighted(scores: Scores) -> dict[str, Tensor]:
    """Return what each reward that counts brings to the weighted sum."""
    parts = {}
    for name, row in scores.values.items():
        if scores.weights[name]:
            parts[name] = scores.weights[name] * row
    return parts


def check_known(where: str, names: Iterable[str], scores: Scores) -> None:
    """Raise ConfigError for a name that no reward has."""
    strange = [name for name in names if name not in scores.values]
    if strange:
        raise ConfigError(
            f"{where}: there is no reward {strange[0]!r} (there is: {', '.join(scores.values)})"
        )


def total_of(parts: dict[str, Tensor]) -> Tensor:
    first, *rest = parts.values()
    for part in rest:
        first = first + part
    return first


def _relative_spread(values: Tensor) -> Tensor:
    known = values[~values.isnan()].double()
    return known.std(correction=0) / (known.mean() + 1e-6)
