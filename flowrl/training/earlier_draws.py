"""What was drawn at each prompt's last visit, and how far the policy has moved on it since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.nodes import decision_nodes, root_above
from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.types import Batch, Rollout
from flowrl.training.method import Method

Draws = dict[str, Tensor]
"""The draws of one image: these fields of a `Batch`, [n, ...] each, on the host."""
FIELDS = ("x", "target", "sigma", "sigma_next", "noise_scale", "old_log_prob")


class EarlierDraws:
    """The trained draws of the first image of each prompt's last visit; the same in all
    processes."""

    def __init__(self) -> None:
        self.kept: dict[int, Draws] = {}  # by row of the training list
        self.calls = 0  # network rows that this process asked about in the last iteration

    def moved(
        self, ro: Rollout, rows: list[int], score: Callable[[Batch], Tensor], size: int
    ) -> dict[int, float]:
        """Score what was kept of the prompts of a rollout -> by place in the iteration, the mean
        absolute change of its log-prob; nothing for a prompt without any.

        rows: training row of each place. score: log-prob [B] of a batch under the weights of now.
        size: rows of a network call.
        """
        at = {place: row for row, place in enumerate(ro.group_ids.tolist())}
        places = [place for place in at if rows[place] in self.kept]
        kept = [self.kept[rows[place]] for place in places]
        counts = [len(draws["sigma"]) for draws in kept]
        self.calls = sum(counts)
        if not self.calls:
            return {}
        # all draws of these prompts, in calls as large as those of training
        fields = {}
        for name in FIELDS:
            fields[name] = torch.cat([draws[name] for draws in kept])
        owner = torch.tensor(places).repeat_interleave(torch.tensor(counts))
        cond = torch.tensor([at[place] for place in owner.tolist()])
        gaps = []
        for part in torch.arange(self.calls).split(size):
            batch = _batch(ro, {name: row[part] for name, row in fields.items()}, cond[part])
            gaps.append((score(batch) - batch.old_log_prob).abs().cpu())
        gap = torch.cat(gaps)
        return {place: float(gap[owner == place].mean()) for place in places}

    def state_dict(self) -> dict[str, Tensor]:
        """Return {"row.field": [n, ...]}."""
        return {f"{row}.{name}": v for row, part in self.kept.items() for name, v in part.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` gave."""
        self.kept = {}
        for key, value in state.items():
            row, _, name = key.partition(".")
            self.kept.setdefault(int(row), {})[name] = value.cpu().clone()


def draws_of(ro: Rollout, rows: list[int]) -> dict[int, Draws]:
    """Copy the trained draws of the first image of each prompt of a rollout -> by row of the
    training list; rows: that of each place."""
    tree, nodes = ro.tree, decision_nodes(ro)
    root, group = root_above(ro)[nodes], tree.group[nodes]
    found = {}
    for place in ro.group_ids.tolist():
        mine = nodes[(group == place) & (root == root[group == place].min())]
        above = tree.parent[mine]
        ends = (tree.step[above], tree.step[mine])
        fields = [ro.x[above], ro.x[mine], *(ro.sigmas[step] for step in ends)]
        fields += [ro.noise_scale[mine], ro.log_prob[mine]]
        named = zip(FIELDS, fields, strict=True)
        found[rows[place]] = {name: field.cpu().clone() for name, field in named}
    return found


def earlier_draws(config: Config, method: Method, *, sharded: bool) -> EarlierDraws | None:
    """Return an empty memory where the credit asks how far the policy has moved. Raises ConfigError
    for a likelihood that trains no draws, or under FSDP."""
    if "moved" not in needs_of(method.credit):
        return None
    reason = ""
    if method.likelihood.trains != "draws":
        reason = f"likelihood {config.likelihood.fn} trains no draws"
    elif sharded:
        reason = "under FSDP all processes call the network in step, which they could not there"
    if reason:
        raise ConfigError(
            f"credit {config.credit.fn}: asks how likely what was drawn at a prompt's last visit "
            f"has become, and {reason}; leave credit.half out"
        )
    return EarlierDraws()


def _batch(ro: Rollout, fields: Draws, cond: Tensor) -> Batch:
    """Put draws [B] on the model's device, each with row `cond` [B] of the conditioning."""
    there: dict[str, Any] = {name: field.to(ro.x.device) for name, field in fields.items()}
    row = torch.arange(len(cond), device=ro.x.device)
    there |= {"advantage": torch.zeros_like(there["sigma"]), "node": row, "parent": row}
    at = cond.to(ro.x.device)
    return Batch(**there, step=row, cond={name: value[at] for name, value in ro.cond.items()})
