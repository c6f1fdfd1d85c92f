"""Policy losses: what all promise, and clipping, segments, dynamic bounds, GRPO-Guard's ratio and
the KL against closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from losskit import check_gradient, loss_input, moved, on_tensors, policies, toy_batch
from rolloutkit import score_draws
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from flowrl.algorithms.losses import policy
from flowrl.algorithms.losses import policy as guard_file
from flowrl.algorithms.penalties import norm_guard, transition_kl, velocity_kl
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


def test_penalties_on_velocities() -> None:
    """v_ref = (3, 4), v = 1.2 v_ref: mean((v - v_ref)^2) = .5, (1.2 - 1)^2 = .04; .9 v_ref: 0."""
    ref = torch.tensor([[3.0, 4.0], [3.0, 4.0]])
    zero = torch.zeros(2)
    data = loss_input(zero, zero, zero, v=ref * torch.tensor([[1.2], [0.9]]))
    data = data._replace(under={"ref": Eval(zero, ref, zero, ref)})
    torch.testing.assert_close(velocity_kl(data), torch.tensor([0.5, 0.125]))
    torch.testing.assert_close(norm_guard(data), torch.tensor([0.04, 0.0]))
    blind = data._replace(now=data.now._replace(v=None))
    with pytest.raises(ConfigError, match="has no velocity"):
        norm_guard(blind)


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


dynamic_clip = on_tensors(policy.dynamic_clip)
COUNT = 40
WIDE: dict[str, Any] = {"clip_min": 0.1, "clip_max": 0.3, "eta": 1.0}


def pulled() -> dict[str, Any]:
    """Draw states, velocities and best leaves, in float64."""
    g = torch.Generator().manual_seed(1)
    v, x, best = torch.randn(3, COUNT, 3, 2, generator=g, dtype=torch.float64)
    sigma = torch.linspace(1, 0.05, COUNT, dtype=torch.float64)
    weight = torch.randn(COUNT, generator=g, dtype=torch.float64)
    pull = {"v": v.requires_grad_(), "x": x, "best_x0": best, "best_advantage": weight}
    return pull | {"sigma": sigma}


@pytest.mark.parametrize("segment", [None, torch.arange(COUNT) // 3], ids=["steps", "chunks"])
def test_without_eta_and_sft_it_is_ppo_with_the_middle_range(segment: Tensor | None) -> None:
    """Value, gradient and metrics to the bit; (1/8 + 1/4) / 2 = 3/16 is exact in binary."""
    log_prob, old, weight = policies(COUNT)
    both: dict[str, Any] = {"clip_low": 3 / 16, "clip_high": 3 / 16, "segment": segment}
    plain, wanted = ppo_clip(log_prob, old, weight, **both)
    bounds: dict[str, Any] = {"clip_min": 1 / 8, "clip_max": 1 / 4, "eta": 0.0, "segment": segment}
    got, metrics = dynamic_clip(log_prob, old, weight, **bounds, **pulled())
    assert torch.equal(got, plain) and 0 < float(metrics["clip_frac"].mean()) < 1
    gradients = [torch.autograd.grad(loss.sum(), log_prob)[0] for loss in (got, plain)]
    assert torch.equal(*gradients)
    wanted |= {"clip_range": torch.full((COUNT,), 3 / 16), "sft": torch.zeros(COUNT)}
    assert metrics.keys() == wanted.keys()
    for name, one in wanted.items():
        assert metrics[name].tolist() == one.tolist(), name


@pytest.mark.parametrize("eta", [0.5, -20.0])
def test_bounds_by_hand(eta: float) -> None:
    """e = .1 + .2 / (1 + exp(-eta A)), A cut at 5, so from .1 to .3; each row against ppo_clip with
    that very range."""
    log_prob, old, weight = policies(COUNT)
    weight = 4 * weight
    loss, metrics = dynamic_clip(log_prob, old, weight, **(WIDE | {"eta": eta}), **pulled())
    cut = [max(-5.0, min(5.0, a)) for a in weight.tolist()]
    wanted = [0.1 + 0.2 / (1 + math.exp(-eta * a)) for a in cut]
    assert 5 in cut and -5 in cut and metrics["clip_range"].tolist() == pytest.approx(wanted)
    for row, e in enumerate(wanted):
        one = [value[row : row + 1] for value in (log_prob, old, weight)]
        alone, found = ppo_clip(*one, clip_low=e, clip_high=e)
        assert float(loss[row].detach()) == pytest.approx(float(alone.detach()))
        assert float(metrics["clip_frac"][row]) == float(found["clip_frac"])


def test_pull_towards_the_best_leaf() -> None:
    """Value and gradient by the formula, on top of the clipped loss."""
    log_prob, old, weight = policies(COUNT)
    state = pulled()
    plain, _ = dynamic_clip(log_prob, old, weight, **WIDE, **state)
    loss, metrics = dynamic_clip(log_prob, old, weight, **WIDE, sft=0.4, **state)
    away = state["v"].detach() - (state["x"] - state["best_x0"]) / state["sigma"][:, None, None]
    scale = 0.4 / (1 + torch.exp(-state["best_advantage"]))
    wanted = scale * away.square().sum((1, 2)) / 6
    torch.testing.assert_close((loss - plain).detach(), wanted)
    torch.testing.assert_close(metrics["sft"], wanted)
    loss.sum().backward()
    torch.testing.assert_close(state["v"].grad, scale[:, None, None] * 2 * away / 6)


def test_the_velocity_of_the_straight_path_is_not_pulled() -> None:
    """x = (1 - sigma) x0 + sigma eps has v = eps - x0, so a model that says so has nothing to
    learn."""
    state = pulled()
    x0, eps, sigma = state["best_x0"], state["x"], state["sigma"][:, None, None]
    state |= {"x": (1 - sigma) * x0 + sigma * eps, "v": eps - x0}
    _, metrics = dynamic_clip(*policies(COUNT), **WIDE, sft=1.0, **state)
    assert float(metrics["sft"].max()) < 1e-24


def test_without_sft_the_states_are_not_looked_at() -> None:
    state = {name: torch.full_like(value, torch.nan) for name, value in pulled().items()}
    assert bool(dynamic_clip(*policies(COUNT), **WIDE, **state)[0].isfinite().all())


def test_narrow_latents_are_compared_in_float32() -> None:
    """bfloat16 holds 8 bits: 256 + 1 is 256 there, so a distance of (257 - 256) would be 0."""
    narrow, zero = torch.ones(1, 1).bfloat16(), torch.zeros(1)
    state: dict[str, Any] = {"v": 256 * narrow, "x": 256 * narrow, "best_x0": -narrow}
    state |= {"sigma": torch.ones(1), "best_advantage": zero}
    _, metrics = dynamic_clip(zero, zero, zero, **WIDE, sft=2.0, **state)
    assert metrics["sft"].tolist() == [1.0]


guard = on_tensors(guard_file.guard)
GUARD_RANGE: dict[str, Any] = {"clip_low": 0.9, "clip_high": 0.9}


class Rows(NamedTuple):
    """Draws x_next = old_mean + std z, scored under old_mean and under mean = old_mean + shift."""

    policy: tuple[Tensor, Tensor, Tensor]  # log_prob, old_log_prob, advantage
    z: Tensor
    tensors: dict[str, Any]  # what the loop hands over


def rows(count: int, dims: int, std: Tensor, *, shift: float) -> Rows:
    """Make draws in float64; `shift` is the rms of mean - old_mean, a random direction for each
    row."""
    g = torch.Generator().manual_seed(0)
    z, old_mean, turn = torch.randn(3, count, dims, generator=g, dtype=torch.float64)
    mean = (old_mean + shift * turn / turn.square().mean(1, keepdim=True).sqrt()).requires_grad_()
    x_next, wide = old_mean + std[:, None] * z, std[:, None].expand_as(z)
    log_prob, old = (Normal(m, wide).log_prob(x_next).mean(1) for m in (mean, old_mean))
    sigma = torch.linspace(0.9, 0.5, count, dtype=torch.float64)
    advantage = torch.randn(count, generator=g, dtype=torch.float64)
    tensors = {"mean": mean, "old_mean": old_mean, "std": std, "sigma": sigma}
    tensors["sigma_next"] = sigma - 0.1 * sigma**2
    return Rows((log_prob, old, advantage), z, tensors)


@pytest.mark.parametrize("std", [0.05, 0.3, 0.7])
def test_the_corrected_log_ratio_has_no_drift_and_one_spread(std: float) -> None:
    """E[ln r] = 0 and SD = rms(shift) / sqrt(D) whatever std; the plain difference has mean -m/2,
    SD sqrt(m/D), m = (rms / std)^2. 3000 draws of 512 dimensions: each within 3 standard errors."""
    count, dims, rms = 3000, 512, 0.02
    made = rows(count, dims, torch.full((count,), std, dtype=torch.float64), shift=rms)
    _, metrics = guard(*made.policy, **GUARD_RANGE, **made.tensors)
    log_ratio, plain = metrics["ratio"].log(), (made.policy[0] - made.policy[1]).detach()
    wanted, m = rms / dims**0.5, (rms / std) ** 2
    assert abs(log_ratio.mean().item()) < 3 * wanted / count**0.5
    assert log_ratio.std().item() == pytest.approx(wanted, abs=3 * wanted / (2 * count) ** 0.5)
    spread = (m / dims) ** 0.5
    assert plain.mean().item() == pytest.approx(-m / 2, abs=3 * spread / count**0.5)
    assert plain.std().item() == pytest.approx(spread, abs=3 * spread / (2 * count) ** 0.5)
    if std < 0.5:  # so the plain one would fail the first line
        assert m / 2 > 3 * spread / count**0.5


def test_ratio_loss_and_gradient_in_closed_form() -> None:
    """log r = mean(z shift), so d loss / d mean = -A r z / (D delta), also far off policy, with a
    std for each row."""
    made = rows(50, 32, torch.linspace(0.1, 0.8, 50, dtype=torch.float64), shift=0.3)
    mean, old_mean, advantage = made.tensors["mean"], made.tensors["old_mean"], made.policy[2]
    loss, metrics = guard(*made.policy, **GUARD_RANGE, **made.tensors)
    ratio = (made.z * (mean - old_mean)).mean(1).exp().detach()
    delta = made.tensors["sigma"] - made.tensors["sigma_next"]
    torch.testing.assert_close(metrics["ratio"], ratio)
    torch.testing.assert_close(loss.detach(), -advantage * ratio / delta)
    (gradient,) = torch.autograd.grad(loss.sum(), mean, retain_graph=True)
    torch.testing.assert_close(gradient, -(advantage * ratio / delta)[:, None] * made.z / 32)
    whole, _ = guard(*made.policy, **GUARD_RANGE, **made.tensors, divide_by_delta=False)
    torch.testing.assert_close(whole, loss * delta)


def test_the_reference_s_ratio() -> None:
    """B 6.4: log-probs -.52 and -.50, a mean that moved by .01 in every number, std .478191: the
    exp of (-.02 + .0001 / (2 std^2)) std is .9905853."""
    one = torch.ones(1, dtype=torch.float64)
    tensors = {"mean": 0.01 * one.expand(1, 4), "old_mean": torch.zeros(1, 4)}
    tensors |= {"std": 0.478191 * one, "sigma": 0.7 * one, "sigma_next": 0.5 * one}
    found = guard(-0.52 * one, -0.50 * one, one, **GUARD_RANGE, **tensors)[1]["ratio"]
    assert float(found) == pytest.approx(0.9905853, abs=5e-8)


@pytest.mark.parametrize("bias", ["sample", "batch"])
def test_on_policy_the_gradient_is_that_of_ppo_times_std_over_delta(bias: str) -> None:
    """torch's own autograd of ppo_clip; the published clip range of 2e-6 stops nothing."""
    made = rows(40, 16, torch.linspace(0.1, 0.8, 40, dtype=torch.float64), shift=0.0)
    tensors = {key: value.detach().float() for key, value in made.tensors.items()}
    log_prob = made.policy[0].float().detach().requires_grad_()
    both = (log_prob, log_prob.detach().clone(), made.policy[2].float())
    loss, metrics = guard(*both, clip_low=2e-6, clip_high=2e-6, bias=bias, **tensors)
    assert torch.equal(metrics["ratio"], torch.ones(40)) and float(metrics["clip_frac"].sum()) == 0
    got, wanted = (
        torch.autograd.grad(value.sum(), log_prob)[0]
        for value in (loss, ppo_clip(*both, **GUARD_RANGE)[0])
    )
    delta = tensors["sigma"] - tensors["sigma_next"]
    torch.testing.assert_close(got, wanted * tensors["std"] / delta)


def test_the_bias_of_the_code_is_shared_by_the_batch() -> None:
    """bias "batch": every row gets the mean of all rows' b; by hand from the two means. "sample"
    differs."""
    made = rows(6, 64, torch.full((6,), 0.4, dtype=torch.float64), shift=0.1)
    scale = torch.linspace(0, 2, 6, dtype=torch.float64)[:, None]  # rows move by different amounts
    shift = scale * (made.tensors["mean"] - made.tensors["old_mean"]).detach()
    made.tensors["mean"] = made.tensors["old_mean"] + shift
    gap, plain, got = shift.square().mean(1), made.policy[0] - made.policy[1], {}
    for bias, b in (("sample", gap / (2 * 0.16)), ("batch", gap.mean() / (2 * 0.16))):
        got[bias] = guard(*made.policy, **GUARD_RANGE, **made.tensors, bias=bias)[1]["ratio"]
        torch.testing.assert_close(got[bias], ((plain + b) * 0.4).exp().detach())
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
    tensors: dict[str, Any] = {"mean": 2 * one[:, None], "old_mean": 0 * one[:, None]}
    tensors |= {"std": 0.5 * one, "sigma": one, "sigma_next": one / 2}
    options: dict[str, Any] = {"clip_low": 0.1, "clip_high": 0.2, "max_advantage": 2.0}
    got, metrics = guard(log_prob, 0 * one, a * one, **options, **tensors)
    got.sum().backward()
    assert float(got.detach()) == pytest.approx(loss) and float(metrics["clip_frac"]) == clipped
    assert log_prob.grad is not None and (float(log_prob.grad) == 0) == bool(clipped)


def test_gradient_through_network_and_transition_by_finite_differences() -> None:
    """Off policy: the bias' own gradient is part of it."""
    model, batch = toy_batch()
    with torch.no_grad():
        before = score_draws(LinearFlow(scale=0.3, seed=4).double(), batch, flow_sde)
    tensors: dict[str, Any] = {"old_mean": before.mean, "sigma": batch.sigma.double()}
    tensors["sigma_next"] = batch.sigma_next.double()

    def value() -> Tensor:
        now = score_draws(model, batch, flow_sde)
        policy_ = (now.log_prob, before.log_prob, batch.advantage)
        return guard(*policy_, **GUARD_RANGE, **tensors, mean=now.mean, std=now.std)[0].sum()

    check_gradient(value, moved(model))
