"""The optimizer Muon."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.models.tuning import pick_dtype

STACK = 12
"""Matrices that are made orthogonal together."""

Step = tuple[nn.Parameter, Tensor]  # a matrix and its update, which has no more rows than columns


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for matrices, with steps as long as AdamW's.

    A step has the factor 0.2 sqrt(max(rows, columns)) of Liu et al. (2502.16982). Matrices
    of equal shape are made orthogonal together.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move every parameter once along its orthogonal update."""
        for group in self.param_groups:
            alike: dict[tuple[int, ...], list[Step]] = {}
            for p in group["params"]:
                update = self._momentum(p, group["momentum"])
                update = update if p.shape[0] <= p.shape[1] else update.T
                alike.setdefault(tuple(sorted(p.shape)), []).append((p, update))
            for rows in alike.values():
                for first in range(0, len(rows), STACK):
                    _move(rows[first : first + STACK], group)

    def _momentum(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Average the gradient over steps; return Nesterov's look ahead."""
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        assert p.grad is not None
        state["momentum"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["momentum"], momentum)


def _move(rows: list[Step], group: dict[str, Any]) -> None:
    """Decay parameters of one shape and move them along their updates, made orthogonal."""
    updates = orthogonal(torch.stack([update for _, update in rows]))
    for (p, _), update in zip(rows, updates, strict=True):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        update = update if p.shape[0] <= p.shape[1] else update.T
        p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape)))


def orthogonal(x: Tensor) -> Tensor:
    """Bring the singular values of matrices [N, A, B], A <= B, close to 1 by five Newton steps, in
    bfloat16 where the processor multiplies in it."""
    x = x.to(pick_dtype("auto", x.device))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        square = x @ x.mT
        cubic = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, cubic, x, beta=3.4445)
    return x.float()
