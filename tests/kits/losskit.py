"""Call losses with a few tensors, without a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rolloutkit import decisions, run
from torch import Tensor

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.transitions import flow_sde
from flowrl.core.types import Batch, Eval, LossInput
from flowrl.models.toy import LinearFlow

BATCH = ("x", "sigma", "sigma_next")
EVAL = ("mean", "std", "v")
REST = ("old_mean", "segment", "best_x0", "best_advantage")


def loss_input(
    log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, **tensors: Any
) -> LossInput:
    """Put tensors where a loss looks for them; what is not given is empty."""
    none = torch.zeros(len(log_prob), 0)
    if "sigma" in tensors:  # as under `forward`, whose rows go nowhere
        tensors = {"sigma_next": tensors["sigma"], **tensors}
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


def policies(count: int = 12, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Draw log-probs that differ by `spread`, the old ones, and advantages [count], in float64."""
    generator = torch.Generator().manual_seed(0)
    old, step, advantage = torch.randn(3, count, generator=generator, dtype=torch.float64)
    return (old + spread * step).requires_grad_(), old, advantage


def toy_batch() -> tuple[LinearFlow, Batch]:
    """A small network, and the decisions of a rollout in float64, with random advantages."""
    model = LinearFlow(scale=0.3).double()
    plan = full(0, steps=4, noise_scale=0.7)
    ro = run(plan, flow_sde, model=model, store_dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    return model, decisions(ro, torch.randn(len(ro.x), generator=generator, dtype=torch.float64))


def moved(model: LinearFlow, by: float = 0.1) -> LinearFlow:
    """Move all weights by random numbers."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def check_gradient(value: Callable[[], Tensor], model: LinearFlow) -> None:
    """Hold the gradient of every parameter against central differences, in float64."""
    value().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and bool((p.grad != 0).any()), name
        for i in range(p.numel()):
            values = []
            for h in (1e-6, -1e-6):
                with torch.no_grad():
                    p.view(-1)[i] += h
                    values.append(float(value()))
                    p.view(-1)[i] -= h
            numeric = (values[0] - values[1]) / 2e-6
            assert float(p.grad.view(-1)[i]) == pytest.approx(numeric, rel=1e-5, abs=1e-8), name


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fitting(error: Tensor, advantage: Tensor, group: Tensor, **under: Tensor) -> LossInput:
    """Rows whose velocity misses the target 0 by the root of their error [B]."""
    v = error.sqrt()[:, None]
    none = torch.zeros_like(error)
    data = loss_input(-error, none, advantage, mean=v, v=v, sigma=torch.full_like(none, 0.5))
    batch = data.batch._replace(target=torch.zeros_like(v), step=torch.zeros_like(group))
    size = torch.bincount(group)[group]
    weights = {}
    for name, other in under.items():
        root = other.sqrt()[:, None]
        weights[name] = Eval(-other, root, none, root)
    return data._replace(batch=batch, segment=group, siblings=size, under=weights)


# two prompts of two images, from the reference
D, D_REF = numbers(0.30, 0.32, 0.20, 0.25), numbers(0.31, 0.31, 0.22, 0.22)
A, PAIRS = numbers(1, -1, 0.5, -0.5), torch.tensor([0, 0, 1, 1])

# the reference's example of CRD: targets and rewards of its own, and the losses of its table, of
# which the first two were computed by two implementations
GOOD, OWN = numbers(0.9, 0.6, 0.4, 0.1), numbers(0.02, -0.01, 0.03, -0.02)
CRD_LOSSES: list[tuple[dict[str, Any], float]] = [
    ({}, 0.079425),
    ({"form": "bce"}, 0.6924632197),
    ({"centre": "soft"}, 0.1029569913),
    ({"centre": "soft", "form": "bce"}, 0.6922452673),
    ({"centre": "hard_published"}, 0.0826866577),
]
