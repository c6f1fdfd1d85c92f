"""Weights of rewards that depend on the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.reward_mix._known import check_known
from flowrl.algorithms.reward_mix.aggregate import counting
from flowrl.core.errors import ConfigError, near
from flowrl.core.types import Credit, Mixed, Scores


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
