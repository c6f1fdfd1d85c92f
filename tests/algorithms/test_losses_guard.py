"""GRPO-Guard: what the correction does to the ratio's distribution, its gradient, and the bias of
the code; what all losses promise is in test_losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from losskit import check_gradient, moved, on_tensors, toy_batch
from rolloutkit import score_draws
from torch import Tensor
from torch.distributions import Normal

from flowrl.algorithms.losses import policy
from flowrl.algorithms.losses import policy as guard_file
from flowrl.algorithms.transitions import flow_sde
from flowrl.models.toy import LinearFlow

guard = on_tensors(guard_file.guard)
ppo_clip = on_tensors(policy.ppo_clip)
WIDE: dict[str, Any] = {"clip_low": 0.9, "clip_high": 0.9}


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
    _, metrics = guard(*made.policy, **WIDE, **made.tensors)
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
    loss, metrics = guard(*made.policy, **WIDE, **made.tensors)
    ratio = (made.z * (mean - old_mean)).mean(1).exp().detach()
    delta = made.tensors["sigma"] - made.tensors["sigma_next"]
    torch.testing.assert_close(metrics["ratio"], ratio)
    torch.testing.assert_close(loss.detach(), -advantage * ratio / delta)
    (gradient,) = torch.autograd.grad(loss.sum(), mean, retain_graph=True)
    torch.testing.assert_close(gradient, -(advantage * ratio / delta)[:, None] * made.z / 32)
    whole, _ = guard(*made.policy, **WIDE, **made.tensors, divide_by_delta=False)
    torch.testing.assert_close(whole, loss * delta)


def test_the_reference_s_ratio() -> None:
    """B 6.4: log-probs -.52 and -.50, a mean that moved by .01 in every number, std .478191: the
    exp of (-.02 + .0001 / (2 std^2)) std is .9905853."""
    one = torch.ones(1, dtype=torch.float64)
    tensors = {"mean": 0.01 * one.expand(1, 4), "old_mean": torch.zeros(1, 4)}
    tensors |= {"std": 0.478191 * one, "sigma": 0.7 * one, "sigma_next": 0.5 * one}
    found = guard(-0.52 * one, -0.50 * one, one, **WIDE, **tensors)[1]["ratio"]
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
        for value in (loss, ppo_clip(*both, **WIDE)[0])
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
        got[bias] = guard(*made.policy, **WIDE, **made.tensors, bias=bias)[1]["ratio"]
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
        return guard(*policy_, **WIDE, **tensors, mean=now.mean, std=now.std)[0].sum()

    check_gradient(value, moved(model))
