"""Losses: what all promise, and clipping, segments and the KL against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from losskit import check_gradient, loss_input, moved, on_tensors, policies, toy_batch
from rolloutkit import score_draws
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowrl.algorithms.losses import policy
from flowrl.algorithms.penalties import transition_kl
from flowrl.algorithms.transitions import flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.types import Eval
from flowrl.models.toy import LinearFlow

ppo_clip = on_tensors(policy.ppo_clip)
CLIP: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.2}
RANGE: dict[str, Any] = {"clip_min": 0.1, "clip_max": 0.2, "eta": 1.0}
LOSSES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "ppo_clip": (ppo_clip, CLIP),
    "dynamic_clip": (on_tensors(policy.dynamic_clip), RANGE | {"sft": 0.4}),
    "guard": (on_tensors(policy.guard), CLIP),
}
battery = pytest.mark.parametrize("name", LOSSES)

# --------------------------------------------------------------------------- what all promise


def states(count: int) -> dict[str, Tensor]:
    """Draw what some losses look at beside the log-probs, in float64."""
    generator = torch.Generator().manual_seed(1)
    names = ("x", "v", "best_x0", "mean", "old_mean")
    drawn = torch.randn(5, count, 3, generator=generator, dtype=torch.float64)
    found = dict(zip(names, drawn, strict=True))
    found["mean"] = found["old_mean"] + 0.1 * found["mean"]
    sigma = torch.linspace(1, 0.2, count, dtype=torch.float64)
    more = {"sigma": sigma, "sigma_next": 0.9 * sigma, "std": 0.5 * sigma}
    more["best_advantage"] = sigma.clone()
    return found | more


@battery
def test_only_the_new_policy_gets_a_gradient_and_metrics_are_values(name: str) -> None:
    (loss, options), (log_prob, old, advantage) = LOSSES[name], policies()
    rest = {key: value.requires_grad_() for key, value in states(12).items()}
    kept = ("x", "best_x0", "best_advantage", "old_mean")
    old, advantage = old.requires_grad_(), advantage.requires_grad_()
    value, metrics = loss(log_prob, old, advantage, **options, **rest)
    value.sum().backward()
    assert log_prob.grad is not None and old.grad is None and advantage.grad is None
    assert [key for key in kept if rest[key].grad is not None] == []
    assert value.shape == (12,) and {"ratio", "clip_frac", "clip_high_frac"} <= set(metrics)
    assert all(one.shape == (12,) and not one.requires_grad for one in metrics.values())


@battery
def test_rows_depend_on_nothing_but_themselves_and_the_bound_is_pessimistic(name: str) -> None:
    """Any order and any micro-batches; never below the unclipped -A r (over delta for GRPO-Guard,
    below the pull for dynamic_clip)."""
    (loss, options), policy_, rest = LOSSES[name], policies(60), states(60)
    value, metrics = loss(*policy_, **options, **rest)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    for rows in (order, torch.arange(7), torch.arange(7, 60)):
        some = {key: one[rows] for key, one in rest.items()}
        part = loss(*(one[rows] for one in policy_), **options, **some)[0]
        torch.testing.assert_close(part, value[rows], rtol=1e-12, atol=0)
    whole = value.detach() - metrics.get("sft", 0.0)
    whole = whole * (rest["sigma"] - rest["sigma_next"] if name == "guard" else 1.0)
    assert bool((whole >= -policy_[2] * metrics["ratio"] - 1e-12).all())
    assert 0 < float(metrics["clip_frac"].mean()) < 1


@battery
def test_on_policy_the_ratio_is_exactly_one(name: str) -> None:
    """In float32, as in a run; nothing is clipped, and advantage 0 has no gradient at all."""
    loss, options = LOSSES[name]
    _, old, advantage = policies()
    rest = {key: value.float() for key, value in states(12).items()}
    rest["mean"] = rest["old_mean"].clone()
    options = options | ({"sft": 0.0} if "sft" in options else {})
    for weight in (advantage.float(), torch.zeros(12)):
        log_prob = old.float().requires_grad_()
        value, metrics = loss(log_prob, old.float(), weight, **options, **rest)
        value.sum().backward()
        assert torch.equal(metrics["ratio"], torch.ones(12))
        assert float(metrics["clip_frac"].sum()) == float(metrics["approx_kl"].sum()) == 0
        assert log_prob.grad is not None and torch.equal(log_prob.grad == 0, weight == 0)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("ppo_clip", {"clip_low": 0}, "ppo_clip needs .* clip_low=0"),
        ("ppo_clip", {"max_advantage": -1}, "max_advantage=-1"),
        ("guard", {"clip_high": 0}, "guard needs .* clip_high=0"),
        ("guard", {"bias": "all"}, "'all'"),
        ("dynamic_clip", {"clip_min": 0.0}, "clip_min=0.0"),
        ("dynamic_clip", {"clip_max": 0.05}, "clip_max=0.05"),
        ("dynamic_clip", {"clip_max": 1.5}, "clip_max=1.5"),
        ("dynamic_clip", {"max_advantage": 0.0}, "max_advantage=0.0"),
        ("dynamic_clip", {"sft": -1.0}, "sft=-1.0"),
    ],
)
def test_wrong_options_are_named(name: str, wrong: Any, message: str) -> None:
    loss, options = LOSSES[name]
    with pytest.raises(ConfigError, match=message):
        loss(*policies(), **(options | wrong), **states(12))


# ---------------------------------------------------------------------------------- ppo_clip


def test_gradient_at_ratio_one_is_that_of_reinforce() -> None:
    """d/dl of -A exp(l - l_old) at l = l_old is -A, the gradient of -A l."""
    _, old, weight = policies()
    log_prob = old.clone().requires_grad_()
    loss, _ = ppo_clip(log_prob, old, weight, **CLIP)
    loss.sum().backward()
    assert log_prob.grad is not None and torch.equal(log_prob.grad, -weight)
    assert torch.equal(loss, -weight)


@pytest.mark.parametrize(
    ("ratio", "a", "loss", "slope", "clipped", "high"),
    [  # by hand, from max(-A r, -A clip(r, .9, 1.2)) and d r / d log r = r
        (1.5, 2.0, -2.4, 0.0, 1, 1),
        (1.5, -2.0, 3.0, 3.0, 0, 0),
        (0.5, 2.0, -1.0, -1.0, 0, 0),
        (0.5, -2.0, 1.8, 0.0, 1, 0),
        (1.1, 2.0, -2.2, -2.2, 0, 0),
        (1.1, 9.0, -5.5, -5.5, 0, 0),  # weights are cut at 5
        (1.1, -9.0, 5.5, 5.5, 0, 0),
        (1.5, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_clipping(
    ratio: float, a: float, loss: float, slope: float, clipped: int, high: int
) -> None:
    one = torch.ones(1, dtype=torch.float64)
    log_prob = (ratio * one).log().requires_grad_()
    got, metrics = ppo_clip(log_prob, torch.zeros(1), a * one, **CLIP)
    got.sum().backward()
    assert log_prob.grad is not None
    assert (float(got.detach()), float(log_prob.grad)) == pytest.approx((loss, slope))
    assert (float(metrics["clip_frac"]), float(metrics["clip_high_frac"])) == (clipped, high)
    assert float(metrics["approx_kl"]) == pytest.approx(ratio - 1 - float(log_prob.detach()))


def test_approx_kl_survives_tiny_log_ratios_in_float32() -> None:
    """k3 = x + x^2/2 ... - x, so x^2/2 to leading order; r - 1 - log r in float32 would be all
    rounding."""
    log_prob = torch.tensor([1e-4, -1e-4])
    _, metrics = ppo_clip(log_prob, torch.zeros(2), torch.ones(2), **CLIP)
    assert metrics["approx_kl"].tolist() == pytest.approx([5e-9, 5e-9], rel=1e-2)


def test_segments_of_size_one_are_single_steps() -> None:
    log_prob, old, weight = policies()
    ids = torch.tensor([40, 3, 17, 5, 2, 90, 1, 0, 33, 8, 71, 64])
    (plain, one), (single, two) = (
        ppo_clip(log_prob, old, weight, segment=segment, **CLIP) for segment in (None, ids)
    )
    assert torch.equal(single, plain) and all(torch.equal(two[k], v) for k, v in one.items())
    gradients = [torch.autograd.grad(loss.sum(), log_prob)[0] for loss in (plain, single)]
    assert torch.equal(*gradients)


def test_segment_ratio_is_the_geometric_mean_and_counts_once() -> None:
    """Oracle: each chunk by itself, (prod r)^(1/n), one clipped loss per chunk (Chunk-GRPO)."""
    log_prob, old, _ = policies()
    ids = torch.tensor([5, 2, 5, 9, 2, 5, 9, 2, 2, 5, 9, 1])
    worth = {5: 0.7, 2: -1.2, 9: 0.4, 1: 1.5}
    weight = torch.tensor([worth[chunk] for chunk in ids.tolist()], dtype=torch.float64)
    loss, metrics = ppo_clip(log_prob, old, weight, segment=ids, **CLIP)
    total = torch.zeros((), dtype=torch.float64)
    for chunk, a in worth.items():
        mine = ids == chunk
        ratio = (log_prob[mine] - old[mine]).exp().prod() ** (1 / int(mine.sum()))
        wanted = [float(ratio.detach())] * int(mine.sum())
        assert metrics["ratio"][mine].tolist() == pytest.approx(wanted, abs=1e-7)
        one = torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.2))
        torch.testing.assert_close(loss[mine].sum(), one, atol=1e-7, rtol=0)
        total = total + one
    (gradient,) = torch.autograd.grad(total, log_prob)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), log_prob)[0], gradient)


# -------------------------------------------------------------------------------------- the KL


def kl(now: Eval, ref: Eval, *, delta: Tensor | None = None, **options: Any) -> Tensor:
    """Call the penalty on two evaluations; delta = sigma - sigma_next [B]."""
    data = loss_input(now.log_prob, now.log_prob, now.log_prob)
    if delta is not None:
        batch = data.batch._replace(sigma=delta, sigma_next=torch.zeros_like(delta))
        data = data._replace(batch=batch)
    return transition_kl(data._replace(now=now, under={"ref": ref}), **options)


def test_transition_kl() -> None:
    """Oracle: torch.distributions for "std"; "g" is Flow-GRPO's later formula mean(gap^2) / (2
    g^2)."""
    torch.manual_seed(0)
    mean, other = torch.randn(2, 4, 3, 2)
    std, zero = torch.tensor([0.1, 0.4, 0.7, 2.0]), torch.zeros(4)
    ev, ref = Eval(zero, mean, std), Eval(zero, other.clone().requires_grad_(), std)
    wide = std[:, None, None].expand_as(mean)
    oracle = kl_divergence(Normal(mean, wide), Normal(other, wide)).flatten(1).mean(1)
    torch.testing.assert_close(kl(ev, ref), oracle)
    assert not kl(ev, ref).requires_grad
    delta = torch.tensor([0.1, 0.2, 0.3, 0.4])
    g = std / delta.sqrt()
    wanted = (mean - other).square().flatten(1).mean(1) / (2 * g.square())
    torch.testing.assert_close(kl(ev, ref, divide_by="g", delta=delta), wanted)
    assert torch.equal(kl(ev, Eval(*ev)), zero)
    with pytest.raises(ConfigError, match="'x'"):
        kl(ev, ev, divide_by="x")


def test_gradient_of_the_loss_by_finite_differences() -> None:
    """Through loss, KL, log-prob, transition and network, off policy."""
    model, batch = toy_batch()
    with torch.no_grad():
        ref = score_draws(LinearFlow(scale=0.3, seed=5).double(), batch, flow_sde)
    old = batch.old_log_prob.double()

    def loss() -> Tensor:
        ev = score_draws(model, batch, flow_sde)
        surrogate, metrics = ppo_clip(
            ev.log_prob, old, batch.advantage, clip_low=0.01, clip_high=0.02
        )
        assert 0 < float(metrics["clip_frac"].mean()) < 1  # both sides of the clip take part
        return (surrogate + 0.3 * kl(ev, ref)).mean()

    check_gradient(loss, moved(model))
