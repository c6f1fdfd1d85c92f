"""Compiled blocks: few compilations whatever the sizes, one graph for sampling and training, the
same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from adapterkit import Folders, sampled, velocity
from modelkit import gradients, perturb
from rolloutkit import decisions, score_draws

from flowrl.algorithms.transitions import cps
from flowrl.models import runtime
from flowrl.training.weights import Weights

LORA = {"rank": 2, "targets": ["attn.to_q"]}  # few, as each takes time to trace


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what other tests compiled: blocks of all models of a kind share it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def pair(folders: Folders, name: str, scale: float, **how: Any) -> tuple[Any, Any]:
    """Load a compiled model and a plain one, both moved in the same way."""
    model = folders.load(name, lora=LORA, runtime={"compile": True, **how})
    plain = folders.load(name, lora=LORA)
    perturb(model, scale)
    perturb(plain, scale)
    return model, plain


@pytest.mark.parametrize(("name", "kinds"), [("sd3 long", 3), ("flux", 4)])
def test_compilations_are_few_whatever_the_sizes(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, name: str, kinds: int
) -> None:
    """A back end that compiles nothing counts what it is asked for.

    SD3.5: the block with a second attention, the two after it, the last. FLUX: the first block,
    whose input needs no gradient since nothing before it is trained, the second, the two single
    ones. UNets are compiled by the same call as FLUX.
    """
    asked: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        asked.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(runtime, "COMPILER", count)
    # another back end adds neither a compilation nor a break in the graph
    attention = "_native_math" if name == "sd3 long" else "native"
    model, plain = pair(folders, name, 0.05, attention=attention)
    for size, height, width in [(5, 48, 32), (7, 48, 64)]:
        with torch.no_grad():
            sampled_v = velocity(model, size, height, width)
        assert len(asked) == kinds, (size, height, width)
        trained, expected = (velocity(m, size, height, width) for m in (model, plain))
        assert not sampled_v.requires_grad and trained.requires_grad
        assert torch.equal(sampled_v, trained)  # one graph for both
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-5)
        assert len(asked) == kinds, (size, height, width)
    grads = gradients(model, velocity(model, 3, 48, 32).square().sum())
    for key, grad in gradients(plain, velocity(plain, 3, 48, 32).square().sum()).items():
        atol = 1e-5 * float(grad.abs().max()) + 1e-7
        torch.testing.assert_close(grads[key], grad, rtol=1e-4, atol=atol)


@pytest.mark.integration
def test_inductor(folders: Folders) -> None:
    """Real compilation of one block: ratio 1, weights that take effect, and snapshots, too.

    torch compiles some 20 kernels for it; 6 image tokens, as 4 would be taken for the batch.
    """
    model, plain = pair(folders, "sd3 short", 0.1, checkpointing=True)
    assert model.network.transformer_blocks[0]._compiled_call_impl is not None  # nn.Module's mark
    v, expected = velocity(model, 4, 48, 32), velocity(plain, 4, 48, 32)
    torch.testing.assert_close(v, expected, rtol=0, atol=1e-5)
    (v.square().sum() + expected.square().sum()).backward()
    for name, param in plain.trainable().items():
        found, grad = model.trainable()[name].grad, param.grad
        torch.testing.assert_close(found, grad, rtol=1e-3, atol=1e-5 * float(grad.abs().max()))

    # the ratio, at the rollout's batch size and at another one
    ro = sampled(model, size=(48, 32))
    drawn = (ro.tree.step == 2).nonzero().flatten()
    for count, bound in ((4, 0.0), (3, 1e-5)):
        batch = decisions(ro, torch.zeros(len(ro.x)), nodes=drawn[:count])
        log_prob = score_draws(model, batch, cps).log_prob
        assert log_prob.requires_grad
        assert float((log_prob - batch.old_log_prob).detach().abs().max()) <= bound

    # trained weights take effect, and snapshots take their place
    weights, before = Weights(model.trainable()), velocity(model, 4, 48, 32).detach()
    weights.snapshot("old")
    for param in [*model.trainable().values(), *plain.trainable().values()]:
        param.data += 0.5
    after = velocity(model, 4, 48, 32).detach()
    torch.testing.assert_close(after, velocity(plain, 4, 48, 32).detach(), rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 1e-3
    with weights.using("old"), torch.no_grad():
        assert torch.equal(velocity(model, 4, 48, 32), before)
    assert torch.equal(velocity(model, 4, 48, 32), after)
