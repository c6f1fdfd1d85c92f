"""Begin with a LoRA of another program: go on with it in the run's adapters, or add it to weights
that are trained in full."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.core.processes import whole
from flowrl.models.files.lora_read import BASE, Update, read_lora, trimmed

DOWN, UP = ".lora_A.default.weight", ".lora_B.default.weight"
ENOUGH = 1e-6  # of an update's norm: what a smaller rank may leave out


def started(
    path: Path,
    networks: Mapping[str, nn.Module],
    params: Mapping[str, nn.Parameter],
    alpha: float | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained parameters that a LoRA file changes, whole, float32 on the CPU; under FSDP
    all processes ask. `networks` are by the prefix of their parameters, `alpha` what the caller
    knows of a file that may not say it.

    Of a run's adapters A and B are set so that they add what the file adds; ranks that it does not
    use stay as they were drawn, with B = 0. To weights that are trained in full it is added. Raises
    ModelError as `read_lora`, and for a layer that is not trained, or a rank that is too small.
    """
    found = read_lora(path, networks, alpha)
    if not found.stated:
        warnings.warn(
            f"{path} states no alpha, so it is taken as the rank: the update stands as its "
            "matrices multiply. If it was trained with another alpha, give the file that says so",
            stacklevel=2,
        )
    # every layer that the file moves has to be trained
    updates = {}
    for layer, whole_update in found.updates.items():
        update = trimmed(whole_update)
        if len(update.down):
            updates[layer] = update
    lora = any(name.endswith(DOWN) for name in params)
    ending = DOWN if lora else ".weight"
    absent = [layer for layer in updates if layer + ending not in params]
    if absent:
        raise ModelError(_not_trained(path, absent, [*updates], params, lora=lora))
    # the new values
    scales = _scales(networks) if lora else {}
    for layer, update in updates.items():
        if lora:
            yield from _continued(path, layer, update, params, scales[layer])
        else:
            name = f"{layer}.weight"
            weight = whole(params[name].detach()).float().cpu()
            yield name, weight + (update.scale * update.up @ update.down).reshape(weight.shape)


def _scales(networks: Mapping[str, nn.Module]) -> dict[str, float]:
    """Return what each of the run's adapters multiplies its product with."""
    found = {}
    for prefix, network in networks.items():
        for name, module in network.named_modules():
            if isinstance(module, BaseTunerLayer):
                scaling: Any = module.scaling
                found[prefix + name] = float(scaling["default"])
    return found


def _continued(
    path: Path, layer: str, update: Update, params: Mapping[str, nn.Parameter], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Yield A and B of one adapter that adds what the file does."""
    down = whole(params[layer + DOWN].detach()).float().cpu().clone()
    up = torch.zeros(params[layer + UP].shape)
    if len(update.down) > len(down):
        update = _narrowed(path, layer, update, len(down))
    rank = len(update.down)
    down[:rank] = update.down
    up[:, :rank] = update.up * (update.scale / scale)
    yield layer + DOWN, down
    yield layer + UP, up


def _narrowed(path: Path, layer: str, update: Update, rank: int) -> Update:
    """Return an update of a smaller rank that adds the same. Raise ModelError if there is none."""
    q_up, r_up = torch.linalg.qr(update.up.double())
    q_down, r_down = torch.linalg.qr(update.down.double().T)
    left, size, right = torch.linalg.svd(r_up @ r_down.T)
    if float(size[rank:].norm()) > ENOUGH * float(size.norm()):
        raise ModelError(
            f"{path}: {layer} has rank {len(update.down)}, and the run's adapters have {rank}: set "
            f"model.lora.rank to {len(update.down)} or more (and model.lora.alpha with it), so "
            "that nothing of it is lost"
        )
    root = size[:rank].sqrt()
    up = (q_up @ left[:, :rank]) * root
    down = root[:, None] * (right[:rank] @ q_down.T)
    return update._replace(down=down.float(), up=up.float())


def _not_trained(
    path: Path,
    absent: list[str],
    layers: list[str],
    params: Mapping[str, nn.Parameter],
    *,
    lora: bool,
) -> str:
    """Say which layers of a file the run does not train, and how to train them."""
    about = f"{path}: {len(absent)} of its {len(layers)} layers are not trained by this run"
    first = f"(first: {absent[0]})"
    if not lora:
        return f"{about} {first}: leave model.layers out, or name them there, too"
    trained = [name.removesuffix(DOWN) for name in params if name.endswith(DOWN)]
    kinds = dict.fromkeys(map(_kind, [*trained, *layers]))
    return (
        f"{about} {first}: set model.lora.targets to [{', '.join(kinds)}], or model.tune to full. "
        "LoRA of convolutions needs model.tune full"
    )


def _kind(layer: str) -> str:
    """Return the end of a layer's name that layers of its kind have in common, as in lora.targets:
    "attn.to_q" of "transformer_blocks.3.attn.to_q"."""
    return re.sub(r"^.*\.\d+\.(?=\D)", "", layer.removesuffix(BASE))
