"""Which rules tell better from worse images: logistic regression with an l1 penalty."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus


def fit(features: Tensor, strength: float, *, tolerance: float = 1e-12) -> Tensor:
    """Minimise ``|w|_1 + C sum ln(1 + exp(-w . f))`` over w -> [R] float64; C is `strength`.

    features [N, R]: of each pair, what the better image's checks exceed the worse one's by. No
    intercept (AutoRubric-T2I, 2605.17602, in the form of scikit-learn's l1 logistic regression).
    Proximal gradient with steps 1/L, L = C/4 times the largest eigenvalue of F'F, accelerated
    (Beck and Teboulle 2009) and begun anew where the objective would rise.
    """
    f = features.double()
    # the steepest that the logistic loss can curve; no features, nothing to fit
    curvature = strength / 4 * torch.linalg.matrix_norm(f, 2).square()
    w = torch.zeros(f.shape[1], dtype=torch.float64)
    if not curvature > 0:
        return w
    ahead, pace, last = w, 1.0, objective(w, f, strength)
    # a gradient step on the logistic loss, then the l1 penalty pulls small weights to 0
    for _ in range(100_000):
        slope = -strength * f.T @ torch.sigmoid(-f @ ahead)
        step = ahead - slope / curvature
        new = step.sign() * (step.abs() - 1 / curvature).clamp_min(0)
        now = objective(new, f, strength)
        # momentum overshot: go back to the last point and begin anew without it
        if now > last and pace > 1:
            ahead, pace = w, 1.0
            continue
        # Nesterov's momentum, ever stronger; stop where weights hardly move
        faster = (1 + (1 + 4 * pace**2) ** 0.5) / 2
        ahead = new + (pace - 1) / faster * (new - w)
        moved = (new - w).abs().max()
        w, pace, last = new, faster, now
        if moved <= tolerance * (1 + w.abs().max()):
            break
    return w


def objective(w: Tensor, f: Tensor, strength: float) -> Tensor:
    """Return what `fit` minimises."""
    return w.abs().sum() + strength * softplus(-f @ w).sum()


def threshold(features: Tensor) -> float:
    """Return the strength up to which all weights are 0."""
    return float(2 / features.double().sum(0).abs().max())


def accuracy(w: Tensor, features: Tensor) -> float:
    """Return the share of pairs whose better image gets more; equal scores are half right."""
    gap = features.double() @ w
    return float(((gap > 0).double() + 0.5 * (gap == 0).double()).mean())
