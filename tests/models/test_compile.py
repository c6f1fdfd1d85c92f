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
from torch import Tensor, nn

from flowrl.algorithms.transitions import cps
from flowrl.core.abilities import stays
from flowrl.core.errors import ConfigError, ModelError
from flowrl.models import runtime
from flowrl.models.runtime import GraphSteps
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


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("name", "kinds", "graphs"), [("sd3 long", 3, False), ("flux", 4, True)])
def test_compilations_are_few_whatever_the_sizes(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, name: str, kinds: int, graphs: bool
) -> None:
    """A back end that compiles nothing counts what it is asked for, and how.

    SD3.5: the block with a second attention, the two after it, the last. FLUX: the first block,
    whose input needs no gradient since nothing before it is trained, the second, the two single
    ones. UNets are compiled by the same call as FLUX. No block's output outlives a call: that of
    the network is made outside of the blocks, so a graph that writes over its own leaves it alone.
    """
    asked: list[dict[str, Any]] = []
    made: list[Tensor] = []

    def note(graph: torch.fx.GraphModule, _: Any, **how: Any) -> Callable[..., Any]:
        asked.append(how)
        return graph.forward

    def keep(_: nn.Module, __: Any, found: Any) -> None:
        made.extend(found if isinstance(found, tuple) else [found])

    monkeypatch.setattr(runtime, "COMPILER", note)
    # another back end adds neither a compilation nor a break in the graph
    attention = "_native_math" if name == "sd3 long" else "native"
    model, plain = pair(folders, name, 0.05, attention=attention, cuda_graphs=graphs)
    for block in model.network.modules():
        if getattr(block, "_compiled_call_impl", None) is not None:
            block.register_forward_hook(keep)
    for size, height, width in [(5, 48, 32), (7, 48, 64)]:
        made.clear()
        with torch.no_grad():
            sampled_v = velocity(model, size, height, width)
        places = {one.untyped_storage().data_ptr() for one in made if one is not None}
        assert places and sampled_v.untyped_storage().data_ptr() not in places
        trained, expected = (velocity(m, size, height, width) for m in (model, plain))
        assert not sampled_v.requires_grad and trained.requires_grad
        assert torch.equal(sampled_v, trained)  # one graph for both
        torch.testing.assert_close(trained, expected, rtol=0, atol=1e-5)
        assert len(asked) == kinds, (size, height, width)
    assert all(how == ({"mode": "reduce-overhead"} if graphs else {}) for how in asked)
    grads = gradients(model, trained.square().sum())
    for key, grad in gradients(plain, expected.square().sum()).items():
        atol = 1e-5 * float(grad.abs().max()) + 1e-7
        torch.testing.assert_close(grads[key], grad, rtol=1e-4, atol=atol)


@pytest.mark.integration
def test_inductor(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real compilation of one block: ratio 1, weights that take effect, and snapshots, too.

    torch compiles some 20 kernels for it, here without vectors, whose headers take the time;
    6 image tokens, as 4 would be taken for the batch.
    """
    monkeypatch.setattr("torch._inductor.config.cpp.simdlen", 1)
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


# ------------------------------------------------------------------------------------ CUDA graphs

GRAPHS = {"compile": True, "cuda_graphs": True}


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the CPU pass for a CUDA device, where torch compiles in the same mode and records nothing
    -> the marks of new steps that torch was given."""
    marks: list[int] = []
    monkeypatch.setattr(runtime, "GRAPH_DEVICES", ("cpu",))
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    return marks


def test_graphs_need_cuda_and_compiled_blocks(folders: Folders) -> None:
    with pytest.raises(ModelError, match="cuda_graphs: needs a CUDA device, got cpu; leave it out"):
        folders.load("sd3 short", lora=LORA, runtime=GRAPHS)
    with pytest.raises(ConfigError, match="cuda_graphs: are of compiled blocks, so it needs compi"):
        folders.load("sd3 short", runtime={"cuda_graphs": True})


def test_a_step_ends_when_no_gradient_is_waiting(
    folders: Folders, on_the_cpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling marks each call. Between the two passes of a training step none is marked, so that
    what the backward pass reads is not written over; and again after a gradient passed, or after
    a velocity was thrown away."""
    monkeypatch.setattr(runtime, "COMPILER", "eager")
    model = folders.load("sd3 short", lora=LORA, runtime=GRAPHS)
    model.encode(["a red square", "two small blue circles left of a green triangle on white"])

    def marked(grad: bool) -> tuple[int, Tensor]:
        before = len(on_the_cpu)
        with torch.set_grad_enabled(grad):
            v = velocity(model)
        return len(on_the_cpu) - before, v

    assert [marked(False)[0] for _ in range(3)] == [1, 1, 1]
    count, v = marked(True)
    assert count == 1
    assert marked(False)[0] == 0  # the reference, while the gradient is still to come
    loss = v.square().sum()
    loss.backward()
    assert marked(False)[0] == 1  # although the loss is still held
    count, v = marked(True)
    assert (count, marked(True)[0]) == (1, 0)
    del v
    assert marked(True)[0] == 1


def test_the_identity_passes_gradients_on() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(GraphSteps().watched, (x,))


@pytest.mark.usefixtures("on_the_cpu")
def test_weights_keep_their_place(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded kernels read them there. A snapshot in their place, and training it, is seen; the
    gradient of a velocity is that of its own weights."""
    monkeypatch.setattr(runtime, "COMPILER", "eager")
    model = folders.load("sd3 short", lora=LORA, runtime=GRAPHS)
    plain = folders.load("sd3 short", lora=LORA)
    assert stays(model) and not stays(plain)
    for one in (model, plain):
        perturb(one, 0.1)
    places = {key: p.data_ptr() for key, p in model.trainable().items()}
    weights = Weights(model.trainable(), stay=True)
    weights.snapshot("old")
    before = velocity(model).detach()
    for p in [*model.trainable().values(), *plain.trainable().values()]:
        p.data += 0.5
    v, expected = velocity(model), velocity(plain)
    with weights.using("old"), torch.no_grad():
        assert {key: p.data_ptr() for key, p in model.trainable().items()} == places
        assert torch.equal(velocity(model), before)
        with weights.using("old"):
            assert torch.equal(velocity(model), before)
    assert torch.equal(velocity(model), v)
    found, wanted = (
        gradients(m, rows.square().sum()) for m, rows in ((model, v), (plain, expected))
    )
    for key, grad in wanted.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))
    assert {key: p.data_ptr() for key, p in model.trainable().items()} == places
