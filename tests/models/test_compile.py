"""Compiled blocks: few compilations whatever the sizes, one graph for sampling and training, the
same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from modelkit import gradients, perturb
from runtimekit import load, velocity
from tiny import tiny_flux, tiny_sd3, tiny_sd15

from flowrl.models import runtime

LORA = {
    "sd3": ["attn.to_q"],
    "flux": ["attn.to_q"],
    "sd15": ["attn1.to_q"],
}  # few, as each takes time to trace


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "sd3": tiny_sd3(root / "sd3", layers=4, dual=True),
        "flux": tiny_flux(root / "flux"),
        "sd15": tiny_sd15(root / "sd15"),
    }


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Forget what other tests compiled: blocks of all models of a kind share it."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize(("fn", "kinds"), [("sd3", 3), ("flux", 4)])
def test_compilations_are_few_whatever_the_sizes(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, fn: str, kinds: int
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
    lora = {"rank": 2, "targets": LORA[fn]}
    # another back end adds neither a compilation nor a break in the graph
    attention = "_native_math" if fn == "sd3" else "native"
    model = load(folders, fn, lora=lora, runtime={"compile": True, "attention": attention})
    plain = load(folders, fn, lora=lora)
    perturb(model, 0.05)
    perturb(plain, 0.05)
    for at, (size, height, width) in enumerate([(5, 48, 32), (7, 48, 64)]):
        with torch.no_grad():
            sampled = velocity(model, size, height, width)
        if at == 0:
            first = len(asked)
            assert first == kinds
        trained = velocity(model, size, height, width)
        assert not sampled.requires_grad and trained.requires_grad
        assert torch.equal(sampled, trained)  # one graph for both
        torch.testing.assert_close(
            sampled, velocity(plain, size, height, width).detach(), rtol=0, atol=1e-5
        )
        assert len(asked) == first, (size, height, width)
    grads = gradients(model, velocity(model, 3, 48, 32).square().sum())
    expected = gradients(plain, velocity(plain, 3, 48, 32).square().sum())
    for name, grad in expected.items():
        torch.testing.assert_close(
            grads[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-7
        )
