"""The gradient of an iteration against plain autograd, and what leaves it unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rolloutkit import decisions
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from trainkit import (
    KL,
    ONE,
    TREE,
    flat,
    gradients,
    shift,
    trainer_for,
    unchanged,
    weighed,
    weights_of,
)

from flowrl.algorithms.forest import decision_nodes, state_rows, states_of
from flowrl.core.errors import RunError
from flowrl.core.seeds import NodeStreams
from flowrl.core.types import Rollout
from flowrl.models.toy import LinearFlow
from flowrl.training.batches import NetworkCall
from flowrl.training.learn import LocalData, backward, node_table
from flowrl.training.trainer import Trainer

near = torch.testing.assert_close


def backward_of(trainer: Trainer, ro: Rollout, weight: Tensor) -> Tensor:
    """Add the gradient of all decisions of a rollout in one call -> the loss of each."""
    local = LocalData(ro, node_table(trainer, ro, weight), NodeStreams(ro.tree.group, "test"))
    nodes = decision_nodes(ro)
    call = NetworkCall(nodes, state_rows(states_of(ro, nodes)))
    return backward(trainer, local, call, len(nodes), 0).metrics["loss"]


def group_norm(reward: Tensor, group: Tensor) -> Tensor:
    """Normalise by mean and population std + 1e-4 of each prompt, GRPO as published."""
    out = torch.zeros_like(reward)
    for g in group.unique():
        mine = reward[group == g]
        out[group == g] = (mine - mine.mean()) / (mine.std(correction=0) + 1e-4)
    return out


def reinforce(model: LinearFlow, ro: Rollout, advantage: Tensor, noise_scale: float) -> Tensor:
    """Average -A log p over decisions, A the mean over the leaves below; by torch's Normal."""
    below: dict[int, list[Tensor]] = {}
    for leaf, a in zip(ro.leaf.tolist(), advantage, strict=True):
        node = int(ro.tree.parent[leaf])  # the leaf was made by the last step, an ODE step
        while ro.tree.parent[node] >= 0:
            below.setdefault(node, []).append(a)
            node = int(ro.tree.parent[node])
    terms = []
    for node, values in below.items():
        above = int(ro.tree.parent[node])
        x, s, n = ro.x[above], ro.sigmas[ro.tree.step[above]], ro.sigmas[ro.tree.step[node]]
        offset = model.text @ ro.cond["text"][int(ro.tree.group[node])] + model.time * s
        v = torch.tensordot(model.mix, x, dims=1) + offset[:, None, None]
        mean = x - (s - n) * v - noise_scale**2 * (s - n) / (2 * s) * (x + (1 - s) * v)
        log_prob = Normal(mean, noise_scale * (s - n).sqrt()).log_prob(ro.x[node]).mean()
        terms.append(-torch.stack(values).mean() * log_prob)
    return torch.stack(terms).mean()


@pytest.mark.parametrize(("plan", "trained"), [((), 2 * 4 * 3), ((TREE,), 2 * (2 + 2 + 4))])
def test_gradient_of_one_update_is_reinforce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: tuple[str, ...], trained: int
) -> None:
    """At ratio 1, grad of -A ratio is grad of -A log p; autograd through a loss written here."""
    trainer = trainer_for(tmp_path, *ONE, *plan)
    model = trainer.model
    assert isinstance(model, LinearFlow)
    ro = trainer.sample(trainer.rows())
    # one value per latent, as 8x8 pixels are equal
    images = ((ro.x[ro.leaf] * 0.5 + 0.5).clamp(0, 1) * 255).round() / 255
    reward = images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))
    loss = reinforce(model, ro, group_norm(reward, ro.tree.group[ro.leaf]), noise_scale=0.5)
    wanted = torch.autograd.grad(loss, list(trainer.params.values()))
    (got,), metrics = gradients(trainer, monkeypatch)
    assert metrics["trained"] == trained and float(flat(wanted).abs().max()) > 0.01
    assert metrics["reward"] == pytest.approx(float(reward.mean()), abs=1e-6)
    near([got[name] for name in trainer.params], list(wanted), atol=1e-6, rtol=1e-5)


SEGMENT = "segment={fn: fixed, sizes: [3]}"


@pytest.mark.parametrize("options", [(), (KL, "kl.beta=10"), (TREE,), (SEGMENT,)])
def test_micro_batches_do_not_change_the_gradient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """Measured: max 3e-8, mean 7e-9, of gradients of mean size 0.15 (with KL)."""
    got = []
    for size in (24, 3, 1):
        trainer = trainer_for(tmp_path, *ONE, *options, f"train.micro_batch={size}")
        shift(trainer)  # away from the reference, so that the KL has a gradient
        (grads,), metrics = gradients(trainer, monkeypatch)
        assert metrics["on_policy_gap"] < 1e-6
        got.append(flat(grads.values()))
    assert float(got[0].abs().mean()) > 0.005
    for other in got[1:]:
        gap = (other - got[0]).abs()
        assert float(gap.max()) < 5e-7 and float(gap.mean()) < 1e-7


def test_updates_share_out_the_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights held still, the mean of the parts' gradients is the whole's."""
    whole = flat(gradients(trainer_for(tmp_path, *ONE), monkeypatch)[0][0].values())
    parts, metrics = gradients(trainer_for(tmp_path, *ONE[1:], "train.updates=3"), monkeypatch)
    assert len(parts) == 3 and metrics["trained"] == 24
    near(torch.stack([flat(part.values()) for part in parts]).mean(0), whole, atol=1e-6, rtol=1e-5)


def test_gradients_are_clipped_to_their_norm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep their direction; the log has the norm before."""
    plain = flat(gradients(trainer_for(tmp_path, *ONE), monkeypatch)[0][0].values())
    changes = ("train.updates=1", "train.max_grad_norm=0.01")
    (short,), metrics = gradients(trainer_for(tmp_path, *changes), monkeypatch)
    assert metrics["grad_norm"] == pytest.approx(float(plain.norm()), rel=1e-5)
    near(flat(short.values()), plain * 0.01 / plain.norm(), atol=1e-7, rtol=1e-3)


def test_gradient_of_the_kl_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal rewards it is beta times that of the mean KL; torch's kl_divergence."""
    trainer = trainer_for(tmp_path, *ONE, KL, "rewards.red.fn=toykit.same")
    reference = LinearFlow(scale=0.3)  # the weights that training starts from
    shift(trainer)
    batch = decisions(ro := trainer.sample(trainer.rows()), torch.zeros(len(ro.x)))
    s, n = batch.sigma[:, None, None, None], batch.sigma_next[:, None, None, None]

    def step(model: Any) -> Normal:
        v = model.velocity(batch.x, batch.sigma, batch.cond)
        mean = batch.x - (s - n) * v - 0.25 * (s - n) / (2 * s) * (batch.x + (1 - s) * v)
        return Normal(mean, (0.5 * (s - n).sqrt()).expand_as(mean))

    kl = kl_divergence(step(trainer.model), step(reference)).flatten(1).mean()
    wanted = torch.autograd.grad(0.1 * kl, list(trainer.params.values()))
    (got,), metrics = gradients(trainer, monkeypatch)
    assert metrics["kl"] == pytest.approx(float(kl.detach()), rel=1e-4) and metrics["kl"] > 1e-3
    near([got[name] for name in trainer.params], list(wanted), atol=1e-7, rtol=1e-4)


def test_gradient_of_the_pull_towards_the_best_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `sft` adds: the mean over draws of 0.5 sigmoid(w) mean((v - (x - x0) / sigma)^2).

    x0 and w are of the best leaf below a draw's state, found here by walking up from the leaves.
    """
    loss = "loss={{fn: dynamic_clip, clip_min: 0.1, clip_max: 0.3, eta: 1.0, sft: {}}}"
    options = (*ONE, TREE, "credit={fn: depth_norm}")
    (plain,), _ = gradients(trainer_for(tmp_path, *options, loss.format(0.0)), monkeypatch)
    trainer = trainer_for(tmp_path, *options, loss.format(0.5))
    ro, _, _, weight, _ = weighed(trainer)
    best: dict[int, int] = {}
    for leaf in ro.leaf.tolist():
        node = leaf
        while node >= 0:
            if node not in best or weight[leaf] > weight[best[node]]:
                best[node] = leaf
            node = int(ro.tree.parent[node])
    batch = decisions(ro, weight)
    chosen = torch.tensor([best[int(parent)] for parent in batch.parent])
    v = trainer.model.velocity(batch.x, batch.sigma, batch.cond)
    target = (batch.x - ro.x[chosen]) / batch.sigma[:, None, None, None]
    pull = weight[chosen].sigmoid() * (v - target).square().flatten(1).mean(1)
    wanted = torch.autograd.grad((0.5 * pull).mean(), list(trainer.params.values()))
    (got,), metrics = gradients(trainer, monkeypatch)
    assert len(chosen.unique()) > 2 and metrics["sft"] > 0
    added = [got[name] - plain[name] for name in trainer.params]
    near(added, list(wanted), atol=1e-6, rtol=1e-4)


def test_finite_differences(tmp_path: Path) -> None:
    """Off policy and with a KL, the gradient is the slope of the logged losses."""
    trainer = trainer_for(tmp_path, *ONE, KL, "loss.clip_low=0.9", "loss.clip_high=9")
    ro = trainer.sample(trainer.rows())
    weight = torch.randn(len(ro.x), generator=torch.Generator().manual_seed(0))
    shift(trainer)
    base = weights_of(trainer)

    def loss(**changes: Tensor) -> float:
        with torch.no_grad():
            for name, p in trainer.params.items():
                p.copy_(base[name] + changes.get(name, 0.0))
        return float(backward_of(trainer, ro, weight).double().mean())

    loss()
    grads = {name: p.grad.clone() for name, p in trainer.params.items() if p.grad is not None}
    assert len(grads) == 3
    for name, grad in grads.items():
        for at in range(grad.numel()):
            step = torch.zeros_like(grad)
            step.view(-1)[at] = 1e-2
            slope = (loss(**{name: step}) - loss(**{name: -step})) / 2e-2
            assert slope == pytest.approx(float(grad.view(-1)[at]), abs=2e-4, rel=1e-3)


def test_decisions_of_weight_zero_are_counted_not_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving out one prompt's equally good images gives the gradient of computing them."""
    options = (*ONE, "rewards.red.fn=toykit.picky", "train.micro_batch=24")
    trainer = trainer_for(tmp_path, *options)
    ro, _, _, weight, _ = weighed(trainer)
    assert int((weight[decision_nodes(ro)] == 0).sum()) == 12  # 4 images x 3 decisions
    backward_of(trainer, ro, weight)
    computed = [p.grad for p in trainer.params.values() if p.grad is not None]
    (skipped,), metrics = gradients(trainer_for(tmp_path, *options), monkeypatch)
    assert metrics["trained"] == 12
    near(flat(skipped.values()), flat(computed), atol=1e-7, rtol=1e-5)


def test_a_selection_scales_the_loss_and_the_divisor_counts_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A factor of 2 doubles the gradient; one of 3 steps alone gives the mean over its draws."""

    def selected(factors: list[int]) -> tuple[Tensor, float]:
        options = (*ONE, f"select={{fn: toykit.by_step, factors: {factors}}}")
        (grads,), metrics = gradients(trainer_for(tmp_path, *options), monkeypatch)
        return flat(grads.values()), metrics["trained"]

    plain = flat(gradients(trainer_for(tmp_path, *ONE), monkeypatch)[0][0].values())
    near(selected([2, 2, 2])[0], 2 * plain, atol=1e-7, rtol=1e-5)
    alone = [selected(factors) for factors in ([1, 0, 0], [0, 1, 0], [0, 0, 1])]
    assert [trained for _, trained in alone] == [8] * 3  # 2 prompts x 4 images
    near(torch.stack([grad for grad, _ in alone]).mean(0), plain, atol=1e-7, rtol=1e-5)
    with pytest.raises(RunError, match="`select` left none of 24 decisions"):
        selected([0, 0, 0])


@pytest.mark.parametrize("kl", [(), (KL, "optimizer.weight_decay=0")])
def test_equal_rewards_change_nothing(tmp_path: Path, kl: tuple[str, ...]) -> None:
    """Weights and EMA stay the same bits; the KL at the reference has gradient exactly 0, too."""
    trainer = trainer_for(tmp_path, "rewards.red.fn=toykit.same", *kl)
    before = weights_of(trainer)
    for _ in range(3):
        metrics = trainer.step()
    assert metrics["trained"] == (24 if kl else 0) and metrics.get("grad_norm", 0.0) == 0
    assert metrics["reward_std"] == 0 and metrics["zero_std"] == 1
    ema = trainer.weights.state_dict()["ema"]
    assert unchanged(trainer, before)
    assert all(torch.equal(ema[name], value) for name, value in before.items())
