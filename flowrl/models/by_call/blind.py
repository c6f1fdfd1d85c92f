"""Parts of a network that switch gradients off while it is at rest, as experts of a mixture do that
have another way to compute in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError


def let_through(model: Any, asked: Any, x: Tensor, level: float) -> None:
    """Let gradients through what switches them off inside a network: the module around it computes
    as in training, and what is within as before. Raise ModelError where that does not help."""
    around = {module for _, module in _blind(model, asked, x, level)}
    for module in around:
        module.training = True
    left = [name for name, _ in _blind(model, asked, x, level)] if around else []
    if left:
        raise ModelError(
            f"{model.name}: {left[0]} works without gradients inside the network, so that training "
            "would miss a part of them; it needs an adapter"
        )


def _blind(model: Any, asked: Any, x: Tensor, level: float) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module with parameters that is called without gradients, by its name, with the
    innermost module around it that is called with them."""
    called: dict[nn.Module, bool] = {}  # whether with gradients

    def note(module: nn.Module, *_: Any) -> None:
        called[module] = called.get(module, True) and torch.is_grad_enabled()

    networks = [*model.networks.values()]
    hooks = [one.register_forward_pre_hook(note) for net in networks for one in net.modules()]
    try:
        with torch.enable_grad():
            model.step_at(x, [level], [asked])
    finally:
        for hook in hooks:
            hook.remove()
    for network in networks:
        names = dict(network.named_modules())
        for name, module in names.items():
            if called.get(module, True) or not [*module.parameters()]:
                continue
            while name and not called.get(names[name], False):
                name = name.rpartition(".")[0]
            if called.get(names[name], False):
                yield type(module).__name__, names[name]
