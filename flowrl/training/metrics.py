"""From what losses return per row to one number per iteration and name."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.processes import World
from flowrl.core.types import concatenated

Rows = dict[str, Tensor]
Asked = tuple[tuple[Tensor, int], ...]
"""The states [b] that parts asked the network about, and how many calls each of them took."""
KL_TERM = "kl_term"  # of a row's loss, times its weight: becomes `kl_share`
# what a run measures itself: a loss has other names
RESERVED = frozenset(
    (
        *(
            "reward",
            "accuracy",
            "diversity",
            "loss",
            "kl",
            "kl_most",
            "kl_share",
            "kl_weight",
            KL_TERM,
        ),
        *(
            "velocity_grad",
            "velocity_length",
            "ratio_std",
            "on_policy_gap",
            "grad_norm",
            "grad_outliers",
        ),
        *("trained", "step", "update", "lr", "nfe", "backwards"),
    )
)
BY_STEP = ("ratio", "clip_frac", "approx_kl", "kl", "velocity_grad", "velocity_length")


class Trained(NamedTuple):
    """What one network call of training leaves behind."""

    metrics: Rows  # {name: [B]} of the loss, "kl" and its term if there is one, and "loss"
    node: Tensor  # [B] int64
    step: Tensor  # [B] int64
    state: Tensor  # [B] int64: rows with one id were one row of the network
    update: int  # number of the optimizer step within the iteration
    # of the network, and how many of them went backward, where rows took several steps
    calls: tuple[int, int] | None = None
    asked: Asked = ()  # of parts, such as teachers

    def network_rows(self) -> int:
        """Count the rows that the network was called with."""
        return len(torch.unique(self.state))

    def asked_calls(self) -> int:
        """Count the network calls of parts."""
        return sum(times * len(torch.unique(states)) for states, times in self.asked)


def check_names(metrics: Rows) -> None:
    """Raise ConfigError if a loss returns a metric under a name that the run has for its own."""
    taken = sorted(RESERVED & metrics.keys())
    if taken:
        raise ConfigError(
            f"loss: returns a metric {taken[0]!r}, which a run measures itself and would "
            "overwrite; give it another name"
        )


def reduce_metrics(seen: list[Trained], norms: list[float], world: World) -> dict[str, float]:
    """Reduce each metric of an iteration by its name, over all processes -> {name: number}.

    Every metric has its mean. `ratio` also has its spread, the largest distance from 1 before the
    first optimizer step (`on_policy_gap`), and the spread by denoising step; those of `BY_STEP`
    have their mean by denoising step. `kl_share` is the KL's part of the sizes of the loss's two
    terms. `grad_norm` is the mean over optimizer steps, `trained` the number of rows.
    """
    # all rows of all processes: a mean of means would weigh small calls too much
    rows = _all_rows(seen, world)
    if not rows:
        return {"trained": 0.0}
    # columns that sort the others, or are a part of one, are no metrics themselves
    step, update = rows.pop("step"), rows.pop("update")
    pull = rows.pop(KL_TERM, None)
    out = {name: values.mean().item() for name, values in rows.items()}
    if pull is not None:
        out["kl_share"] = _kl_share(rows["loss"], pull)
    # before the first update old and new weights are the same, so a ratio other than 1 is a fault
    if "ratio" in rows:
        out["ratio_std"] = _spread(rows["ratio"])
        first = rows["ratio"][update == 0]
        out["on_policy_gap"] = (first - 1).abs().max().item() if len(first) else 0.0
    # by denoising step: a mean over all would hide one step that is far off
    for k in step.unique().tolist():
        if "ratio" in rows:
            out[f"ratio_std/step{k}"] = _spread(rows["ratio"][step == k])
        for name in BY_STEP:
            if name in rows:
                out[f"{name}/step{k}"] = rows[name][step == k].mean().item()
    out["grad_norm"] = torch.tensor(norms).mean().item()
    out["trained"] = float(len(step))
    return out


def _kl_share(loss: Tensor, pull: Tensor) -> float:
    """Return what part the KL's term [N] has in the sizes of both terms of the loss [N]; 0 where
    there is neither. Sizes, since what a group's advantages do to the loss sums to about 0."""
    own, kl = (loss - pull).abs().sum().item(), pull.abs().sum().item()
    return kl / (own + kl) if own + kl > 0 else 0.0


def _spread(values: Tensor) -> float:
    return values.std(correction=0).item()


def _all_rows(seen: list[Trained], world: World) -> Rows:
    """Join the rows of all calls, and of all processes -> {metric, "step", "update": [N]}."""
    calls = []
    for part in seen:
        update = torch.full_like(part.step, part.update)
        calls.append({**part.metrics, "step": part.step, "update": update})
    rows = _joined(calls)
    if world.size == 1:
        return rows
    found = world.gather({name: values.cpu() for name, values in rows.items()})
    return _joined([row for row in found if row])


def _joined(parts: list[Rows]) -> Rows:
    return concatenated(parts) if parts else {}
