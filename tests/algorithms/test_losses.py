"""Losses: gradients, clipping, segments, penalties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from losskit import loss_input, on_tensors
from rolloutkit import decisions, score_draws
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowrl.algorithms.losses import policy
from flowrl.algorithms.penalties import transition_kl
from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import flow_sde
from flowrl.core.errors import ConfigError
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Batch, Eval
from flowrl.models.toy import LinearFlow

ppo_clip = on_tensors(policy.ppo_clip)
CLIP: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.2}


def inputs(count: int = 12, spread: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old, step, weight = (
        torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    return (old + spread * step).requires_grad_(), old, weight


def test_gradient_at_ratio_one_is_that_of_reinforce() -> None:
    """d/dl of -A exp(l - l_old) at l = l_old is -A, the gradient of -A l."""
    _, old, weight = inputs()
    log_prob = old.clone().requires_grad_()
    loss, metrics = ppo_clip(log_prob, old, weight, **CLIP)
    loss.sum().backward()
    assert log_prob.grad is not None and torch.equal(log_prob.grad, -weight)
    assert torch.equal(loss, -weight)
    assert torch.equal(metrics["ratio"], torch.ones_like(old))
    assert float(metrics["clip_frac"].sum()) == float(metrics["approx_kl"].sum()) == 0


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
    log_prob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    got, metrics = ppo_clip(
        log_prob, torch.zeros(1), torch.tensor([a], dtype=torch.float64), **CLIP
    )
    got.sum().backward()
    assert log_prob.grad is not None
    assert (float(got.detach()), float(log_prob.grad)) == pytest.approx((loss, slope))
    assert (float(metrics["clip_frac"]), float(metrics["clip_high_frac"])) == (clipped, high)
    assert float(metrics["approx_kl"]) == pytest.approx(ratio - 1 - float(log_prob.detach()))


def test_approx_kl_survives_tiny_log_ratios_in_float32() -> None:
    """k3 = x + x^2/2 ... - x, so x^2/2 to leading order; r - 1 - log r in float32 would be all
    rounding."""
    log_prob = torch.tensor([1e-4, -1e-4])
    _, metrics = ppo_clip(log_prob, torch.zeros(2), torch.ones(2), clip_low=1e-3, clip_high=1e-3)
    assert metrics["approx_kl"].tolist() == pytest.approx([5e-9, 5e-9], rel=1e-2)


def test_loss_is_never_below_the_unclipped_one_and_is_per_sample() -> None:
    """A pessimistic bound; order and micro-batching change nothing."""
    log_prob, old, weight = inputs(60)
    loss, metrics = ppo_clip(log_prob, old, weight, **CLIP)
    assert bool((loss >= -weight * (log_prob - old).exp() - 1e-12).all())
    assert 0 < float(metrics["clip_frac"].mean()) < 1
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    assert torch.equal(ppo_clip(log_prob[order], old[order], weight[order], **CLIP)[0], loss[order])
    halves = [
        ppo_clip(*(t[i] for t in (log_prob, old, weight)), **CLIP)[0]
        for i in (slice(0, 7), slice(7, 60))
    ]
    assert torch.equal(torch.cat(halves), loss)
    assert all(value.shape == (60,) and not value.requires_grad for value in metrics.values())


def test_gradient_does_not_reach_the_old_policy_or_the_weights() -> None:
    log_prob, old, weight = inputs()
    old, weight = old.requires_grad_(), weight.requires_grad_()
    ppo_clip(log_prob, old, weight, **CLIP)[0].sum().backward()
    assert log_prob.grad is not None and old.grad is None and weight.grad is None


def test_segments_of_size_one_are_single_steps() -> None:
    log_prob, old, weight = inputs()
    plain, plain_metrics = ppo_clip(log_prob, old, weight, **CLIP)
    ids = torch.tensor([40, 3, 17, 5, 2, 90, 1, 0, 33, 8, 71, 64])
    single, single_metrics = ppo_clip(log_prob, old, weight, segment=ids, **CLIP)
    assert torch.equal(single, plain) and all(
        torch.equal(single_metrics[k], v) for k, v in plain_metrics.items()
    )
    (gradient,) = torch.autograd.grad(plain.sum(), log_prob)
    assert torch.equal(torch.autograd.grad(single.sum(), log_prob)[0], gradient)


def test_segment_ratio_is_the_geometric_mean_and_counts_once() -> None:
    """Oracle: each chunk by itself, (prod r)^(1/n), one clipped loss per chunk (Chunk-GRPO)."""
    log_prob, old, _ = inputs()
    ids = torch.tensor([5, 2, 5, 9, 2, 5, 9, 2, 2, 5, 9, 1])
    weight = torch.tensor([0.7, -1.2, 0.4, 1.5], dtype=torch.float64)[
        torch.tensor([0, 1, 0, 2, 1, 0, 2, 1, 1, 0, 2, 3])
    ]
    loss, metrics = ppo_clip(log_prob, old, weight, segment=ids, **CLIP)
    total = torch.zeros((), dtype=torch.float64)
    for chunk in (1, 2, 5, 9):
        mine = ids == chunk
        ratio = (log_prob[mine] - old[mine]).exp().prod() ** (1 / int(mine.sum()))
        torch.testing.assert_close(
            metrics["ratio"][mine], ratio.detach().expand(int(mine.sum())), atol=1e-7, rtol=0
        )
        a = weight[mine][0]
        one = torch.maximum(-a * ratio, -a * ratio.clamp(0.9, 1.2))
        torch.testing.assert_close(loss[mine].sum(), one, atol=1e-7, rtol=0)
        total = total + one
    (wanted,) = torch.autograd.grad(total, log_prob)
    torch.testing.assert_close(torch.autograd.grad(loss.sum(), log_prob)[0], wanted)


def kl(now: Eval, ref: Eval, *, delta: Tensor | None = None, **options: Any) -> Tensor:
    """Call the penalty on two evaluations; delta = sigma - sigma_next [B]."""
    data = loss_input(now.log_prob, now.log_prob, now.log_prob)
    if delta is not None:
        batch = data.batch._replace(sigma=delta, sigma_next=torch.zeros_like(delta))
        data = data._replace(batch=batch)
    return transition_kl(data._replace(now=now, under={"ref": ref}), **options)


def toy() -> tuple[LinearFlow, Batch]:
    """A rollout in float64 and its decisions, with random weights."""
    model = LinearFlow(scale=0.3).double()
    ro = rollout(
        model,
        model.encode(["red", "blue"]),
        full(0, steps=4, noise_scale=0.7),
        flow_sde,
        sigmas=linear_grid(4, 3.0),
        shape=(3, 2, 2),
        group_size=3,
        generators=[torch.Generator().manual_seed(i) for i in range(2)],
        store_dtype=torch.float64,
    )
    weight = torch.randn(len(ro.x), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return model, decisions(ro, weight)


def test_gradient_of_the_loss_by_finite_differences() -> None:
    """Central differences in float64 through loss, log-prob, transition and network, off policy."""
    model, batch = toy()
    reference = LinearFlow(scale=0.3, seed=5).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
        ref = score_draws(reference, batch, flow_sde)

    def loss() -> Tensor:
        ev = score_draws(model, batch, flow_sde)
        surrogate, metrics = ppo_clip(
            ev.log_prob, batch.old_log_prob.double(), batch.advantage, clip_low=0.01, clip_high=0.02
        )
        assert 0 < float(metrics["clip_frac"].mean()) < 1  # both sides of the clip take part
        return (surrogate + 0.3 * kl(ev, ref)).mean()

    loss().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        for i in range(p.numel()):
            values = []
            for h in (1e-6, -1e-6):
                with torch.no_grad():
                    p.view(-1)[i] += h
                    values.append(float(loss()))
                    p.view(-1)[i] -= h
            numeric = (values[0] - values[1]) / 2e-6
            assert float(p.grad.view(-1)[i]) == pytest.approx(numeric, rel=1e-5, abs=1e-8), name


def test_equal_rewards_give_exactly_no_gradient() -> None:
    model, batch = toy()
    ev = score_draws(model, batch, flow_sde)
    ppo_clip(ev.log_prob, batch.old_log_prob, torch.zeros(len(batch.x)), **CLIP)[0].sum().backward()
    assert all(
        p.grad is not None and torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters()
    )


def test_transition_kl() -> None:
    """Oracle: torch.distributions for "std"; "g" is Flow-GRPO's later formula mean(gap^2) / (2
    g^2)."""
    torch.manual_seed(0)
    mean, other, std = (
        torch.randn(4, 3, 2),
        torch.randn(4, 3, 2),
        torch.tensor([0.1, 0.4, 0.7, 2.0]),
    )
    ev, ref = (
        Eval(torch.zeros(4), mean, std),
        Eval(torch.zeros(4), other.clone().requires_grad_(), std),
    )
    wide = std[:, None, None].expand_as(mean)
    oracle = kl_divergence(Normal(mean, wide), Normal(other, wide)).flatten(1).mean(1)
    torch.testing.assert_close(kl(ev, ref), oracle)
    assert not kl(ev, ref).requires_grad
    delta = torch.tensor([0.1, 0.2, 0.3, 0.4])
    g = std / delta.sqrt()
    wanted = (mean - other).square().flatten(1).mean(1) / (2 * g.square())
    torch.testing.assert_close(kl(ev, ref, divide_by="g", delta=delta), wanted)
    assert torch.equal(kl(ev, Eval(*ev)), torch.zeros(4))


def test_wrong_options_are_named() -> None:
    _, old, weight = inputs()
    with pytest.raises(ConfigError, match="clip_low=0"):
        ppo_clip(old, old, weight, clip_low=0, clip_high=0.1)
    with pytest.raises(ConfigError, match="max_advantage=-1"):
        ppo_clip(old, old, weight, clip_low=0.1, clip_high=0.1, max_advantage=-1)
    ev = Eval(torch.zeros(1), torch.zeros(1, 2), torch.ones(1))
    with pytest.raises(ConfigError, match="'x'"):
        kl(ev, ev, divide_by="x")
