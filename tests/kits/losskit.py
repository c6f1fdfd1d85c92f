"""Call losses with a few tensors, without a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import Batch, Eval, LossInput

BATCH = ("x", "sigma", "sigma_next")
EVAL = ("mean", "std", "v")
REST = ("old_mean", "segment", "best_x0", "best_advantage")


def loss_input(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, **tensors: Any
) -> LossInput:
    """Put tensors where a loss looks for them; what is not given is empty."""
    none = torch.zeros(len(log_prob), 0)
    index = torch.arange(len(log_prob))
    batch = Batch(
        x=none,
        sigma=none,
        sigma_next=none,
        noise_scale=none,
        target=none,
        old_log_prob=old_log_prob,
        advantage=advantage,
        node=index,
        parent=index,
        step=index,
        cond={},
    )
    batch = batch._replace(**{name: tensors[name] for name in BATCH if name in tensors})
    now = Eval(log_prob, none, none)
    now = now._replace(**{name: tensors[name] for name in EVAL if name in tensors})
    rest = {name: tensors[name] for name in REST if name in tensors}
    return LossInput(batch, now, old_log_prob, **rest)


def on_tensors(loss: Callable[..., Any]) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """Return the loss as a function of log_prob, old_log_prob, advantage [B], its options and, by
    name, what else it looks at."""

    def called(log_prob: Tensor, old: Tensor, advantage: Tensor, **rest: Any) -> Any:
        known = {name: rest.pop(name) for name in (*BATCH, *EVAL, *REST) if name in rest}
        return loss(loss_input(log_prob, old, advantage, **known), **rest)

    return called
