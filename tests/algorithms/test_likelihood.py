"""What a likelihood returns, beside the ratios that the rollout's tests cover."""

from __future__ import annotations

import torch
from rolloutkit import decisions, score_draws, take
from torch.distributions import Normal

from flowrl.algorithms.plans import windows as plans
from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps, dance_sde
from flowrl.core.noise_path import linear_grid
from flowrl.core.types import Batch
from flowrl.models.toy import LinearFlow


def batch_of(model: LinearFlow, store: torch.dtype) -> Batch:
    ro = rollout(
        model,
        model.encode(["red", "blue"]),
        full(0, steps=4, noise_scale=0.5),
        dance_sde,
        sigmas=linear_grid(4, 3.0),
        shape=(3, 2, 2),
        group_size=3,
        generators=[torch.Generator().manual_seed(i) for i in range(2)],
        store_dtype=store,
    )
    return decisions(ro, torch.zeros(len(ro.x)))


def test_reverse_scores_the_stored_draw_under_the_present_weights() -> None:
    """Oracle: torch.distributions at the mean of the Dance step, written out."""
    model = LinearFlow()
    batch = batch_of(model, torch.float32)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05)
    ev = score_draws(model, batch, dance_sde)
    s, n = batch.sigma[:, None, None, None], batch.sigma_next[:, None, None, None]
    v = model.velocity(batch.x, batch.sigma, batch.cond)
    mean = batch.x - (s - n) * v - 0.25 * (s - n) / (2 * s) * (batch.x + (1 - s) * v)
    std = 0.5 * (s - n).sqrt()
    torch.testing.assert_close(ev.mean, mean)
    torch.testing.assert_close(ev.std, std.flatten())
    oracle = Normal(mean, std.expand_as(mean)).log_prob(batch.target).flatten(1).mean(1)
    torch.testing.assert_close(ev.log_prob, oracle)
    assert (
        float((ev.log_prob - batch.old_log_prob).detach().abs().max()) > 1e-3
    )  # the weights did move
    ev.log_prob.sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in model.parameters())


def test_reverse_is_in_float32_for_latents_kept_in_half() -> None:
    model = LinearFlow()
    batch = batch_of(model, torch.bfloat16)
    ev = score_draws(model, batch, dance_sde)
    assert batch.x.dtype == torch.bfloat16 and ev.log_prob.dtype == ev.mean.dtype == torch.float32
    assert torch.equal(ev.log_prob, batch.old_log_prob)


def test_a_bf16_network_is_on_policy_too() -> None:
    """The network's own rounding is the same in both phases; only batch geometry can differ."""
    model = LinearFlow().to(torch.bfloat16)
    batch = batch_of(model, torch.float32)
    assert torch.equal(score_draws(model, batch, dance_sde).log_prob, batch.old_log_prob)


def test_rows_are_independent() -> None:
    model = LinearFlow()
    batch = batch_of(model, torch.float32)
    index = torch.tensor([7, 0, 3])
    part = score_draws(model, take(batch, index), dance_sde)
    torch.testing.assert_close(
        part.log_prob, score_draws(model, batch, dance_sde).log_prob[index], atol=1e-6, rtol=0
    )


def test_siblings_share_one_network_row_and_nothing_else_changes() -> None:
    # oracle: the same decisions evaluated one at a time, where nothing can be shared
    model = LinearFlow()
    cond, sigmas, shape = (
        model.encode(["a", "b"]),
        model.sigmas(5, 16, 16),
        model.latent_shape(16, 16),
    )
    plan = plans.fork(0, steps=5, noise_scale=0.5, branch=4, low=1, high=3)
    gens = [torch.Generator().manual_seed(i) for i in range(2)]
    ro = rollout(model, cond, plan, cps, sigmas=sigmas, shape=shape, group_size=2, generators=gens)
    batch = decisions(ro, torch.randn(len(ro.x), generator=torch.Generator().manual_seed(5)))
    assert len(batch.x) == 16 and len(batch.parent.unique()) == 4
    sizes: list[int] = []
    velocity = model.velocity

    def counting(
        x: torch.Tensor, sigma: torch.Tensor, cond: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        sizes.append(len(x))
        return velocity(x, sigma, cond)

    model.velocity = counting  # type: ignore[method-assign]
    together = score_draws(model, batch, cps)
    assert sizes == [4]
    (together.log_prob * batch.advantage).sum().backward()
    shared = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for i in range(16):
        alone = score_draws(model, take(batch, torch.tensor([i])), cps)
        assert (alone.log_prob - together.log_prob[i]).abs() < 1e-5
        (alone.log_prob * batch.advantage[i]).sum().backward()
    for grad, p in zip(shared, (p for p in model.parameters() if p.grad is not None), strict=True):
        assert torch.allclose(grad, p.grad, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
