"""Real compilation: ratio 1, trained weights that take effect, snapshots that take their place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from modelkit import perturb
from rolloutkit import decisions, score_draws
from runtimekit import PROMPTS, load, network, velocity
from tiny import tiny_sd3

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps
from flowrl.training.weights import Weights


@pytest.mark.integration
def test_inductor(tmp_path: Path) -> None:
    """One block, as torch compiles some 20 kernels for it; 6 image tokens, as 4 would be taken for
    the batch."""
    folders = {"sd3": tiny_sd3(tmp_path / "sd3", layers=1)}
    lora = {"rank": 2, "targets": ["attn.to_q"]}
    model = load(folders, "sd3", lora=lora, runtime={"compile": True, "checkpointing": True})
    plain = load(folders, "sd3", lora=lora)
    perturb(model, 0.1)
    perturb(plain, 0.1)
    block = network(model).transformer_blocks[0]
    assert block._compiled_call_impl is not None  # nn.Module's own mark
    v, expected = velocity(model, 4, 48, 32), velocity(plain, 4, 48, 32)
    torch.testing.assert_close(v, expected, rtol=0, atol=1e-5)
    (v.square().sum() + expected.square().sum()).backward()
    for name, param in plain.trainable().items():
        found, grad = model.trainable()[name].grad, param.grad
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()))
    ro = rollout(
        model,
        model.encode(PROMPTS),
        full(0, steps=4, noise_scale=0.7),
        cps,
        sigmas=model.sigmas(4, 48, 32),
        shape=model.latent_shape(48, 32),
        group_size=2,
        generators=[torch.Generator().manual_seed(i) for i in range(2)],
        micro_batch=4,
    )
    batch = decisions(ro, torch.zeros(len(ro.x)), nodes=(ro.tree.step == 2).nonzero().flatten())
    log_prob = score_draws(model, batch, cps).log_prob
    assert torch.equal(log_prob, batch.old_log_prob) and log_prob.requires_grad
    few = decisions(ro, torch.zeros(len(ro.x)), nodes=batch.node[:3])
    assert (score_draws(model, few, cps).log_prob - few.old_log_prob).abs().max() < 1e-5

    weights = Weights(model.trainable())
    before = velocity(model, 4, 48, 32).detach()
    weights.snapshot("old")
    for one, other in zip(model.trainable().values(), plain.trainable().values(), strict=True):
        with torch.no_grad():
            one += 0.5
            other += 0.5
    after = velocity(model, 4, 48, 32).detach()
    torch.testing.assert_close(after, velocity(plain, 4, 48, 32).detach(), rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-3
    with weights.using("old"), torch.no_grad():
        assert torch.equal(velocity(model, 4, 48, 32), before)
    assert torch.equal(velocity(model, 4, 48, 32), after)
