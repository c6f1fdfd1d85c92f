"""The LoRA layout of kohya's sd-scripts and musubi-tuner, which ComfyUI reads too.

A key is ``lora_unet_`` and the layer's name in the model's own code
(`flowrl.models.files.lora_names`), dots written as ``_``, then ``lora_down.weight`` [r, in],
``lora_up.weight`` [out, r] and ``alpha``; the weight moves by ``alpha / r * up @ down``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl.models.files.lora_names import Layer, Place, find_place


def kohya_weights(
    layers: Mapping[str, Layer],
    *,
    network: str,
    config: Mapping[str, Any],
    scale: float,
    rows: Callable[[str], int],
) -> dict[str, Tensor]:
    """Return the tensors of a kohya file for the adapters of a diffusers ``network`` (its class)
    with that ``config``.

    ``scale`` is alpha / r of every layer; ``rows`` gives the outputs of a layer that has no
    adapter, where one beside it is held together with it. Layers that are held as one become one
    adapter of the sum of their ranks, exactly. Raise ModelError for a network or a layer without
    known names.
    """
    places: dict[str, Place] = {}
    for name in layers:
        place = find_place(name, network, config)
        places[place.key] = place
    found: dict[str, Tensor] = {}
    for place in places.values():
        down, up = fuse([layers[name] if name in layers else rows(name) for name in place.parts])
        if place.swapped:
            up = torch.cat(up.chunk(2)[::-1])
        key = "lora_unet_" + place.key.replace(".", "_")
        found[f"{key}.lora_down.weight"] = down.contiguous()
        found[f"{key}.lora_up.weight"] = up.contiguous()
        found[f"{key}.alpha"] = torch.tensor(scale * len(down))
    return found


def fuse(parts: Sequence[Layer | int]) -> Layer:
    """Make one adapter of the adapters of layers whose rows are stacked; a number is the rows of
    one without adapter.

    down is all of theirs [sum r, in], up [sum out, sum r] has theirs on its diagonal and zeros
    elsewhere, so that ``up @ down`` is the stack of their products.
    """
    layers = [part for part in parts if isinstance(part, Layer)]
    down = torch.cat([layer.down for layer in layers])
    up = down.new_zeros(
        sum(part if isinstance(part, int) else len(part.up) for part in parts), len(down)
    )
    row = column = 0
    for part in parts:
        if isinstance(part, int):
            row += part
            continue
        outputs, rank = part.up.shape
        up[row : row + outputs, column : column + rank] = part.up
        row, column = row + outputs, column + rank
    return Layer(down, up)
