"""What puts a fault into flowrl's own code or into a loaded model, until monkeypatch undoes it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

Patch = Callable[[pytest.MonkeyPatch, Any], None]


def velocity(change: Callable[[Tensor], Tensor]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        right = model.velocity
        monkeypatch.setattr(model, "velocity", lambda *args: change(right(*args)), raising=False)

    return patch


def sigmas(change: Callable[[Tensor], Tensor]) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        right = model.sigmas
        monkeypatch.setattr(model, "sigmas", lambda *args: change(right(*args)), raising=False)

    return patch


def just_below_1(sigmas: Tensor) -> Tensor:
    return sigmas.clamp_max(0.9998)  # what `flow_sde` does not count as 1


def short(time: Tensor) -> Tensor:
    return time.bfloat16().float()


def short_when_graded(time: Tensor) -> Tensor:
    return short(time) if torch.is_grad_enabled() else time


def times(change: Callable[[Tensor], Tensor]) -> Patch:
    """Change the network's time where flowrl calls it."""

    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        right = model._tuned.call

        def call(*inputs: Any, named: dict[str, Any]) -> Tensor:
            time = change(named["timestep"])
            return right(*inputs, named={**named, "timestep": time})

        monkeypatch.setattr(model._tuned, "call", call, raising=False)

    return patch


def function(place: str, make: Callable[[Any], Any]) -> Patch:
    """Put another function in the place of "module:name", or of "module:class.name"."""

    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        module, _, name = place.partition(":")
        owner: Any = importlib.import_module(module)
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        last = name.split(".")[-1]
        monkeypatch.setattr(owner, last, make(getattr(owner, last)))

    return patch


def several(*patches: Patch) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        for one in patches:
            one(monkeypatch, model)

    return patch


def dropout(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    layer = model.network.context_embedder
    left_on = torch.nn.Sequential(layer, torch.nn.Dropout(0.2))
    monkeypatch.setitem(model.network._modules, "context_embedder", left_on)


def swapped_texts(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    right = model.encode

    def encode(prompts: list[str]) -> dict[str, Tensor]:
        return {name: rows.flip(0) for name, rows in right(prompts).items()}

    monkeypatch.setattr(model, "encode", encode, raising=False)


def other_texts(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    right = model.encode

    def encode(prompts: list[str]) -> dict[str, Tensor]:
        return {name: 1.1 * rows for name, rows in right(prompts).items()}

    monkeypatch.setattr(model, "encode", encode, raising=False)


def unscaled(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    vae = model._pipeline.vae
    monkeypatch.setattr(model, "_decode", lambda x0: model._images(x0.to(vae.dtype)), raising=False)


def swapped(right: Any) -> Any:
    return lambda network, scale, *rest, **more: right(network, 1 - scale, *rest, **more)


def stronger(right: Any) -> Any:
    return lambda network, scale, *rest, **more: right(network, scale + 1, *rest, **more)


def wide_score(right: Any) -> Any:
    return lambda x_next, mean, std: right(x_next, mean, 1.2 * std)


def alias(right: Any) -> Any:
    def snapshot(self: Any, name: str) -> None:
        right(self, name)
        if name == "ref":
            self._snapshots[name] = {key: p.data for key, p in self._params.items()}

    return snapshot


def no_lr(right: Any) -> Any:
    def set_lr(run: Any, update: int) -> None:
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0

    return set_lr


def copied(right: Any) -> Any:
    def make(call: Any, params: list[Any], **more: Any) -> Any:
        return right(call, [torch.nn.Parameter(p.detach().clone()) for p in params], **more)

    return make


def stretched(right: Any) -> Any:
    return lambda gaussian, noise: right(gaussian, 1.3 * noise)


def late(right: Any) -> Any:
    return lambda run, x, v, k, k_next: right(run, x, v, k, k_next) + 0.05


def other_scale(right: Any) -> Any:
    def batch(self: Any, *args: Any) -> Any:
        made = right(self, *args)
        return made._replace(noise_scale=1.1 * made.noise_scale)

    return batch


def one_seed(*keys: Any) -> torch.Generator:
    return torch.Generator().manual_seed(0)


def any_seed(*keys: Any) -> torch.Generator:
    made = torch.Generator()
    made.seed()
    return made


def times_per_row(v: Tensor) -> Tensor:
    return v * (1 + 1e-4 * len(v))


def steep_at_the_end(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Give the clean steps a gradient of 1e5 times their own."""
    right = model.velocity

    def velocity(x: Tensor, sigma: Tensor, cond: Any) -> Tensor:
        v = right(x, sigma, cond)
        steep = 1e5 * (sigma < 0.5).to(v)[:, None, None, None]
        return v + steep * (v - v.detach())

    monkeypatch.setattr(model, "velocity", velocity, raising=False)


def never(name: str) -> Callable[[Any], Any]:
    def make(right: Any) -> Any:
        def lerp(self: Any, what: str, decay: float) -> None:
            if what != name:
                right(self, what, decay)

        return lerp

    return make


def when_graded(v: Tensor) -> Tensor:
    return v * 1.01 if torch.is_grad_enabled() else v
