"""GRPO-Guard: what the correction does to the ratio's distribution, its gradient, and the bias of
the code."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from losskit import on_tensors
from rolloutkit import score_draws
from torch import Tensor
from torch.distributions import Normal

from flowrl.algorithms.losses import guard as guard_file
from flowrl.algorithms.losses import policy
from flowrl.algorithms.transitions import flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.types import Batch
from flowrl.models.toy import LinearFlow

guard = on_tensors(guard_file.guard)
ppo_clip = on_tensors(policy.ppo_clip)
WIDE: dict[str, Any] = {"clip_low": 0.9, "clip_high": 0.9}


class Rows(NamedTuple):
    """Draws x_next = old_mean + std z, scored under old_mean and under mean = old_mean + shift."""

    log_prob: Tensor
    old_log_prob: Tensor
    advantage: Tensor
    z: Tensor
    tensors: dict[str, Any]  # what the loop hands over


def rows(count: int, dims: int, std: Tensor, *, shift: float, seed: int = 0) -> Rows:
    """Make draws in float64; `shift` is the rms of mean - old_mean, a random direction for each
    row."""
    g = torch.Generator().manual_seed(seed)
    z, old_mean, turn = (
        torch.randn(count, dims, generator=g, dtype=torch.float64) for _ in range(3)
    )
    mean = (old_mean + shift * turn / turn.square().mean(1, keepdim=True).sqrt()).requires_grad_()
    x_next, wide = old_mean + std[:, None] * z, std[:, None].expand_as(z)
    log_prob, old = (Normal(m, wide).log_prob(x_next).mean(1) for m in (mean, old_mean))
    sigma = torch.linspace(0.9, 0.5, count, dtype=torch.float64)
    advantage = torch.randn(count, generator=g, dtype=torch.float64)
    tensors = {
        "mean": mean,
        "old_mean": old_mean,
        "std": std,
        "sigma": sigma,
        "sigma_next": sigma - 0.1 * sigma**2,
    }
    return Rows(log_prob, old, advantage, z, tensors)


@pytest.mark.parametrize("std", [0.05, 0.3, 0.7])
def test_the_corrected_log_ratio_has_no_drift_and_one_spread(std: float) -> None:
    """E[ln r] = 0 and SD = rms(shift) / sqrt(D) whatever std; the plain difference has mean -m/2,
    SD sqrt(m/D), m = (rms / std)^2. 4000 draws of 1024 dimensions: each within 3 standard
    errors."""
    count, dims, rms = 4000, 1024, 0.02
    made = rows(count, dims, torch.full((count,), std, dtype=torch.float64), shift=rms)
    _, metrics = guard(made.log_prob, made.old_log_prob, made.advantage, **WIDE, **made.tensors)
    log_ratio, plain = metrics["ratio"].log(), (made.log_prob - made.old_log_prob).detach()
    wanted, m = rms / dims**0.5, (rms / std) ** 2
    assert abs(log_ratio.mean().item()) < 3 * wanted / count**0.5
    assert log_ratio.std().item() == pytest.approx(wanted, abs=3 * wanted / (2 * count) ** 0.5)
    assert plain.mean().item() == pytest.approx(-m / 2, abs=3 * (m / dims / count) ** 0.5)
    assert m / 2 > 3 * (m / dims / count) ** 0.5  # so the plain one would fail the first line
    assert plain.std().item() == pytest.approx(
        (m / dims) ** 0.5, abs=3 * (m / dims / 2 / count) ** 0.5
    )


def test_ratio_loss_and_gradient_in_closed_form() -> None:
    """log r = mean(z shift), so d loss / d mean = -A r z / (D delta), also far off policy, with a
    std for each row."""
    made = rows(50, 32, torch.linspace(0.1, 0.8, 50, dtype=torch.float64), shift=0.3)
    mean, old_mean = made.tensors["mean"], made.tensors["old_mean"]
    loss, metrics = guard(made.log_prob, made.old_log_prob, made.advantage, **WIDE, **made.tensors)
    ratio = (made.z * (mean - old_mean)).mean(1).exp().detach()
    delta = made.tensors["sigma"] - made.tensors["sigma_next"]
    torch.testing.assert_close(metrics["ratio"], ratio)
    torch.testing.assert_close(loss.detach(), -made.advantage * ratio / delta)
    (gradient,) = torch.autograd.grad(loss.sum(), mean, retain_graph=True)
    torch.testing.assert_close(gradient, -(made.advantage * ratio / delta)[:, None] * made.z / 32)
    whole, _ = guard(
        made.log_prob,
        made.old_log_prob,
        made.advantage,
        **WIDE,
        **made.tensors,
        divide_by_delta=False,
    )
    torch.testing.assert_close(whole, loss * delta)


def test_on_policy_the_ratio_is_exactly_one() -> None:
    """In float32 as in a run; there the gradient is that of ppo_clip, times std / delta (torch's
    own autograd)."""
    made = rows(40, 16, torch.linspace(0.1, 0.8, 40, dtype=torch.float64), shift=0.0)
    tensors = {k: v.detach().float() for k, v in made.tensors.items()} | {
        "mean": made.tensors["mean"].float()
    }
    log_prob = made.log_prob.float().detach().requires_grad_()
    old = log_prob.detach().clone()
    for bias in ("sample", "batch"):
        loss, metrics = guard(
            log_prob,
            old,
            made.advantage.float(),
            clip_low=2e-6,
            clip_high=2e-6,
            bias=bias,
            **tensors,
        )  # type: ignore[arg-type]
        assert (
            torch.equal(metrics["ratio"], torch.ones(40)) and float(metrics["clip_frac"].sum()) == 0
        )
        (got,) = torch.autograd.grad(loss.sum(), log_prob)
        plain, _ = ppo_clip(log_prob, old, made.advantage.float(), **WIDE)
        (wanted,) = torch.autograd.grad(plain.sum(), log_prob)
        delta = tensors["sigma"] - tensors["sigma_next"]
        torch.testing.assert_close(got, wanted * tensors["std"] / delta)


def test_the_bias_of_the_code_is_shared_by_the_batch() -> None:
    """bias "batch": every row gets the mean of all rows' b; by hand from the two means. "sample"
    differs."""
    std = torch.full((6,), 0.4, dtype=torch.float64)
    made = rows(6, 64, std, shift=0.1)
    scale = torch.linspace(0, 2, 6, dtype=torch.float64)[:, None]  # rows move by different amounts
    made.tensors["mean"] = (
        made.tensors["old_mean"]
        + scale * (made.tensors["mean"] - made.tensors["old_mean"]).detach()
    )
    gap = (made.tensors["mean"] - made.tensors["old_mean"]).square().mean(1)
    got = {
        bias: guard(
            made.log_prob, made.old_log_prob, made.advantage, **WIDE, **made.tensors, bias=bias
        )[1]["ratio"]  # type: ignore[arg-type]
        for bias in ("sample", "batch")
    }
    for bias, b in (("sample", gap / (2 * 0.16)), ("batch", gap.mean() / (2 * 0.16))):
        wanted = ((made.log_prob - made.old_log_prob + b) * 0.4).exp().detach()
        torch.testing.assert_close(got[bias], wanted)
    assert float((got["sample"] - got["batch"]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("log_ratio", "a", "loss", "clipped"),
    [  # by hand: max(-A r, -A clip(r, .9, 1.2)) / 0.5 with A cut at 2
        (0.3, 1.0, -1.2 / 0.5, 1),
        (0.3, -1.0, 1.3498588 / 0.5, 0),
        (-0.3, -1.0, 0.9 / 0.5, 1),
        (0.1, 9.0, -2 * 1.1051709 / 0.5, 0),
    ],
)
def test_the_corrected_ratio_is_what_is_clipped(
    log_ratio: float, a: float, loss: float, clipped: int
) -> None:
    """log_prob is chosen so that (log_prob - 0 + b) std is the wanted log-ratio: b = 2^2 / (2 *
    .5^2) = 8, std .5."""
    one = torch.ones(1, dtype=torch.float64)
    log_prob = (one * log_ratio / 0.5 - 8).requires_grad_()
    tensors: dict[str, Any] = {
        "mean": 2 * one[:, None],
        "old_mean": 0 * one[:, None],
        "std": 0.5 * one,
    }
    got, metrics = guard(
        log_prob,
        0 * one,
        a * one,
        clip_low=0.1,
        clip_high=0.2,
        max_advantage=2.0,
        sigma=one,
        sigma_next=one / 2,
        **tensors,
    )
    got.sum().backward()
    assert float(got.detach()) == pytest.approx(loss) and float(metrics["clip_frac"]) == clipped
    assert log_prob.grad is not None and (float(log_prob.grad) == 0) == bool(clipped)


def test_gradient_through_network_and_transition_by_finite_differences() -> None:
    """Central differences in float64, off policy: the bias' own gradient is part of it."""
    model, old = LinearFlow(scale=0.3).double(), LinearFlow(scale=0.3, seed=4).double()
    g = torch.Generator().manual_seed(1)
    x, target = (torch.randn(5, 3, 2, 2, generator=g, dtype=torch.float64) for _ in range(2))
    sigma = torch.linspace(0.9, 0.4, 5, dtype=torch.float64)
    index, noise_scale = torch.arange(5), torch.full((5,), 0.7, dtype=torch.float64)
    cond = model.encode(["red", "blue", "red", "green", "blue"])
    advantage = torch.randn(5, generator=g, dtype=torch.float64)
    batch = Batch(
        x, sigma, sigma - 0.2, noise_scale, target, 0 * sigma, advantage, index, index, index, cond
    )
    with torch.no_grad():
        before = score_draws(old, batch, flow_sde)

    def value() -> Tensor:
        now = score_draws(model, batch, flow_sde)
        tensors: dict[str, Any] = {"mean": now.mean, "old_mean": before.mean, "std": now.std}
        loss, _ = guard(
            now.log_prob,
            before.log_prob,
            advantage,
            **WIDE,
            **tensors,
            sigma=batch.sigma,
            sigma_next=batch.sigma_next,
        )
        return loss.sum()

    value().backward()
    checked = 0
    for p in model.parameters():
        if p.grad is None:
            continue
        flat = p.data.flatten()  # a view
        for at in range(0, len(flat), max(1, len(flat) // 5)):
            keep, h = float(flat[at]), 1e-6
            flat[at] = keep + h
            up = float(value().detach())
            flat[at] = keep - h
            down = float(value().detach())
            flat[at] = keep
            assert float(p.grad.flatten()[at]) == pytest.approx(
                (up - down) / (2 * h), rel=1e-5, abs=1e-7
            )
            checked += float(p.grad.flatten()[at]) != 0
    assert checked > 5


def test_only_the_new_policy_gets_a_gradient_and_metrics_are_those_of_ppo() -> None:
    made = rows(8, 4, torch.full((8,), 0.3, dtype=torch.float64), shift=0.1)
    made.tensors["old_mean"].requires_grad_()
    advantage, old = made.advantage.requires_grad_(), made.old_log_prob.requires_grad_()
    loss, metrics = guard(made.log_prob, old, advantage, **WIDE, **made.tensors)
    loss.sum().backward()
    assert advantage.grad is None and made.tensors["old_mean"].grad is None
    assert made.tensors["mean"].grad is not None
    assert loss.shape == (8,) and all(
        v.shape == (8,) and not v.requires_grad for v in metrics.values()
    )
    assert set(metrics) == set(ppo_clip(made.log_prob, old, advantage, **WIDE)[1])


def test_wrong_options_are_named() -> None:
    made = rows(2, 2, torch.ones(2, dtype=torch.float64), shift=0.1)
    with pytest.raises(ConfigError, match="guard needs .* clip_high=0"):
        guard(
            made.log_prob,
            made.old_log_prob,
            made.advantage,
            clip_low=0.1,
            clip_high=0,
            **made.tensors,
        )
    with pytest.raises(ConfigError, match="'all'"):
        guard(made.log_prob, made.old_log_prob, made.advantage, **WIDE, **made.tensors, bias="all")  # type: ignore[arg-type]
