"""What the tests of all model adapters need."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.core.types import FlowModel


def noise(model: FlowModel, count: int, height: int = 64, width: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(
        (count, *model.latent_shape(height, width)), generator=torch.Generator().manual_seed(seed)
    )


def euler(model: FlowModel, x: Tensor, sigmas: Tensor, prompts: list[str]) -> Tensor:
    cond = model.encode(prompts)
    with torch.no_grad():
        for sigma, sigma_next in zip(sigmas[:-1], sigmas[1:], strict=True):
            x = x + (sigma_next - sigma) * model.velocity(x, sigma.expand(len(x)), cond)
    return x


def perturb(model: FlowModel, scale: float = 0.1) -> None:
    """Move the trained weights away from their start, as training would."""
    generator = torch.Generator().manual_seed(5)
    for param in model.trainable().values():
        param.data += scale * torch.randn(param.shape, generator=generator)


def gradients(model: FlowModel, loss: Tensor) -> dict[str, Tensor]:
    names, params = zip(*model.trainable().items(), strict=True)
    found = torch.autograd.grad(loss, params, retain_graph=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    """Return what changes settings in a JSON file of a model folder."""

    def apply(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


@contextmanager
def counted(model: Any, kinds: set[str]) -> Iterator[dict[str, int]]:
    """Count how often each block of the network starts to compute."""
    calls: dict[str, int] = {}
    hooks = []

    def count(name: str) -> Any:
        return lambda *_: calls.update({name: calls[name] + 1})

    for name, module in model.network.named_modules():
        if type(module).__name__ in kinds:
            calls[name] = 0
            hooks.append(module.register_forward_pre_hook(count(name)))
    yield calls
    for hook in hooks:
        hook.remove()


@contextmanager
def told(*networks: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Note the keywords of each call of the networks."""
    seen: list[dict[str, Any]] = []
    hooks = []
    for network in networks:
        hook = network.register_forward_pre_hook(
            lambda _, __, named: seen.append(named), with_kwargs=True
        )
        hooks.append(hook)
    yield seen
    for hook in hooks:
        hook.remove()


class Kernels(TorchDispatchMode):
    """Note which kernels torch runs for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in str(func) or "softmax" in str(func):
            self.seen.add(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


FLASH = "_scaled_dot_product_flash_attention_for_cpu"
