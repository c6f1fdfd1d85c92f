"""What was drawn at each prompt's last visit, and how far the policy has moved on it since."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import decision_nodes, root_above, trained_nodes
from flowrl.core.errors import ConfigError
from flowrl.core.part import Part, PartState
from flowrl.core.types import Batch, Plan, Rollout

Draws = dict[str, Tensor]
"""The draws of one image: these fields of a `Batch`, [n, ...] each, on the host."""
FIELDS = ("x", "target", "sigma", "sigma_next", "noise_scale", "old_log_prob")


class EarlierDraws(Part):
    """The trained draws of the first image of each prompt's last visit, the same in all processes,
    and how far the policy has moved on them since (``moved``)."""

    name = "earlier draws"
    rank = 60  # before the credit learns
    when = ("credit.moved",)
    fsdp = "a credit that asks how far the policy has moved"

    def __init__(self) -> None:
        self.kept: dict[int, Draws] = {}  # by row of the training list
        self.rows_asked = 0  # network rows that this process asked about in the last iteration

    def check(self, task: Any, plan: Plan) -> None:
        """Refuse a likelihood that trains no draws."""
        config, likelihood = task.config, task.method.likelihood
        if likelihood.trains != "draws":
            raise ConfigError(
                f"credit {config.credit.fn}: asks how likely what was drawn at a prompt's last "
                f"visit has become, and likelihood {config.likelihood.fn} trains no draws; leave "
                "credit.half out"
            )

    def calls(self, task: Any, made: Rollout, iteration: int) -> int:
        """Count the draws of one image: what was drawn at the last visit."""
        trained = len(trained_nodes(made, task.method.likelihood.trains))
        return trained // int((made.tree.parent < 0).sum())

    def credited(self, run: Any, it: Any) -> None:
        """Ask how far the policy has moved since the last visit of each leaf's prompt [L] float64
        on the CPU, NaN at a first one; then keep the draws of this visit in their place."""
        likelihood, transition, ro = run.method.likelihood, run.method.transition, it.found.rollout

        def score(batch: Batch) -> Tensor:
            found: Tensor = likelihood.evaluate(run.model, batch, transition).log_prob
            return found

        # each process asks about its own prompts, and all keep what any of them has drawn
        with run.sampling_policy(), torch.no_grad():
            mine = self.moved(ro, it.rows, score, run.config.train.micro_batch)
        known: dict[int, float] = {}
        for found, drawn in run.world.gather((mine, draws_of(ro, it.rows))):
            known |= found
            self.kept |= drawn
        whole = it.forest.whole
        places = whole.tree.group[whole.leaf].tolist()
        moved = [known.get(place, torch.nan) for place in places]
        it.extra["moved"] = torch.tensor(moved, dtype=torch.float64)
        it.metrics["moved"] = float(it.extra["moved"].nanmean().nan_to_num())

    def after_iteration(self, run: Any, it: Any) -> None:
        """Count the network calls."""
        it.metrics["nfe"] += run.world.totals([[self.rows_asked]], 1)[0]

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
        self.rows_asked = sum(counts)
        if not self.rows_asked:
            return {}
        # all draws of these prompts, in calls as large as those of training
        fields = {}
        for name in FIELDS:
            fields[name] = torch.cat([draws[name] for draws in kept])
        owner = torch.tensor(places).repeat_interleave(torch.tensor(counts))
        cond = torch.tensor([at[place] for place in owner.tolist()])
        gaps = []
        for part in torch.arange(self.rows_asked).split(size):
            batch = _batch(ro, {name: row[part] for name, row in fields.items()}, cond[part])
            gaps.append((score(batch) - batch.old_log_prob).abs().cpu())
        gap = torch.cat(gaps)
        return {place: float(gap[owner == place].mean()) for place in places}

    def state_dict(self, run: Any) -> PartState:
        """Return {"row.field": [n, ...]}."""
        rows: dict[str, Tensor] = {}
        for row, draws in self.kept.items():
            rows |= {f"{row}.{name}": value for name, value in draws.items()}
        return PartState({"earlier": rows})

    def load_state_dict(self, run: Any, state: PartState, where: Path) -> None:
        """Put back what `state_dict` gave."""
        self.kept = {}
        for key, value in state.files["earlier"].items():
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


def _batch(ro: Rollout, fields: Draws, cond: Tensor) -> Batch:
    """Put draws [B] on the model's device, each with row `cond` [B] of the conditioning."""
    there: dict[str, Any] = {name: field.to(ro.x.device) for name, field in fields.items()}
    row = torch.arange(len(cond), device=ro.x.device)
    there |= {"advantage": torch.zeros_like(there["sigma"]), "node": row, "parent": row}
    at = cond.to(ro.x.device)
    return Batch(**there, step=row, cond={name: value[at] for name, value in ro.cond.items()})
