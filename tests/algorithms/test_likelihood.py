"""What a likelihood returns, beside the ratios that the rollout's tests cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rolloutkit import Counting, decisions, run, score_draws, take
from torch import Tensor
from torch.distributions import Normal

from flowrl.algorithms.likelihoods.forward import forward
from flowrl.algorithms.plans.windows import fork, full
from flowrl.algorithms.transitions import cps, dance_sde, euler
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Batch
from flowrl.models.toy import LinearFlow


def batch_of(model: LinearFlow, store: torch.dtype = torch.float32) -> Batch:
    ro = run(full(0, steps=4, noise_scale=0.5), dance_sde, model=model, store_dtype=store)
    return decisions(ro, torch.zeros(len(ro.x)))


def test_reverse_scores_the_stored_draw_under_the_present_weights() -> None:
    """Oracle: torch.distributions at the mean of the Dance step, written out."""
    model = LinearFlow()
    batch = batch_of(model)
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
    mean, std = mean.double(), std.double()
    oracle = Normal(mean, std.expand_as(mean)).log_prob(batch.target.double()).flatten(1).mean(1)
    torch.testing.assert_close(ev.log_prob, oracle, rtol=1e-5, atol=1e-6)
    change = (ev.log_prob - batch.old_log_prob).detach()
    assert float(change.abs().max()) > 1e-3  # the weights did move
    ev.log_prob.sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in model.parameters())


def test_latents_kept_in_half_and_networks_in_half_are_on_policy_in_float32() -> None:
    """A network's own rounding is the same in both phases."""
    for model, store in (
        (LinearFlow(), torch.bfloat16),
        (LinearFlow().to(torch.bfloat16), torch.float32),
    ):
        batch = batch_of(model, store)
        ev = score_draws(model, batch, dance_sde)
        assert batch.x.dtype == store and ev.mean.dtype == torch.float32
        assert ev.log_prob.dtype == batch.old_log_prob.dtype == torch.float64
        # to float32 rounding: other batches have other orders of sums on some processors
        torch.testing.assert_close(ev.log_prob, batch.old_log_prob, atol=1e-5, rtol=0)


@pytest.mark.parametrize("times", ["uniform", "logit_normal", "grid"])
def test_forward_noises_images_on_the_straight_path_and_matches_its_velocity(times: Any) -> None:
    """Closed form: with v = target one Euler step lands on the image, and an error
    of 1/2 has the log-prob -1/4."""
    ro = run(full(0, steps=4, noise_scale=0.0))
    score, streams = forward(draws=3, times=times), NodeStreams(ro.tree.group, 5)
    batch = score.batch(ro, torch.zeros(len(ro.x)), ro.leaf, streams)
    assert batch.node.tolist() == ro.leaf.repeat_interleave(3).tolist()
    clean = euler(batch.x, batch.target, batch.sigma, torch.zeros_like(batch.sigma))
    torch.testing.assert_close(clean, ro.x[batch.node], atol=1e-5, rtol=1e-5)

    class Exact(LinearFlow):
        def velocity(self, x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
            return batch.target + 0.5

    log_prob = score.evaluate(Exact(), batch, dance_sde).log_prob
    assert log_prob.tolist() == pytest.approx([-0.25] * len(batch.x), abs=1e-6)


def test_siblings_share_one_network_row_and_nothing_else_changes() -> None:
    """Oracle: the same decisions evaluated one at a time, where nothing can be shared."""
    model = LinearFlow()
    counting: Any = Counting(model)
    plan = fork(0, steps=5, noise_scale=0.5, branch=4, low=1, high=3)
    ro = run(plan, cps, model=model, prompts=["a", "b"])
    batch = decisions(ro, torch.randn(len(ro.x), generator=torch.Generator().manual_seed(5)))
    assert len(batch.x) == 16 and len(batch.parent.unique()) == 4
    together = score_draws(counting, batch, cps)
    assert (counting.calls, counting.nodes) == (1, 4)
    (together.log_prob * batch.advantage).sum().backward()
    shared = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for i in range(16):
        alone = score_draws(model, take(batch, torch.tensor([i])), cps)
        assert (alone.log_prob - together.log_prob[i]).abs() < 1e-5
        (alone.log_prob * batch.advantage[i]).sum().backward()
    single = [p.grad for p in model.parameters() if p.grad is not None]
    for one, two in zip(shared, single, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
