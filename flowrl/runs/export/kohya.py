"""The LoRA layout of kohya's sd-scripts, which ComfyUI reads too: names of layers, and layers that
are held as one.

A key is ``lora_unet_`` and the layer's name in the model's own code, dots written as ``_``, then
``lora_down.weight`` [r, in], ``lora_up.weight`` [out, r] and ``alpha``; the weight moves by ``alpha
/ r * up @ down``. The model's own code is SD3's and FLUX's reference code, the ``sgm`` UNet for
SDXL, and diffusers' UNet for Stable Diffusion 1.x and 2.x.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ModelError


class Layer(NamedTuple):
    """The adapter of one linear layer, whose weight moves by ``scale * up @ down``."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r]


class Place(NamedTuple):
    """Where a layer of diffusers' network is held elsewhere."""

    key: str  # with dots
    parts: tuple[str, ...]  # diffusers' layers that are stacked there, from the top
    swapped: bool = False  # the upper and lower half of the rows change places


Find = Callable[[str, Mapping[str, Any]], Place | None]

# model's own name -> diffusers' names; # is the block's number
_SHARED = {
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_SD3 = _SHARED | {
    "joint_blocks.#.x_block.attn.qkv": tuple(f"transformer_blocks.#.attn.to_{n}" for n in "qkv"),
    "joint_blocks.#.x_block.attn.proj": ("transformer_blocks.#.attn.to_out.0",),
    "joint_blocks.#.x_block.attn2.qkv": tuple(f"transformer_blocks.#.attn2.to_{n}" for n in "qkv"),
    "joint_blocks.#.x_block.attn2.proj": ("transformer_blocks.#.attn2.to_out.0",),
    "joint_blocks.#.x_block.mlp.fc1": ("transformer_blocks.#.ff.net.0.proj",),
    "joint_blocks.#.x_block.mlp.fc2": ("transformer_blocks.#.ff.net.2",),
    "joint_blocks.#.x_block.adaLN_modulation.1": ("transformer_blocks.#.norm1.linear",),
    "joint_blocks.#.context_block.attn.qkv": tuple(
        f"transformer_blocks.#.attn.add_{n}_proj" for n in "qkv"
    ),
    "joint_blocks.#.context_block.attn.proj": ("transformer_blocks.#.attn.to_add_out",),
    "joint_blocks.#.context_block.mlp.fc1": ("transformer_blocks.#.ff_context.net.0.proj",),
    "joint_blocks.#.context_block.mlp.fc2": ("transformer_blocks.#.ff_context.net.2",),
    "joint_blocks.#.context_block.adaLN_modulation.1": (
        "transformer_blocks.#.norm1_context.linear",
    ),
    "context_embedder": ("context_embedder",),
    "t_embedder.mlp.0": ("time_text_embed.timestep_embedder.linear_1",),
    "t_embedder.mlp.2": ("time_text_embed.timestep_embedder.linear_2",),
    "y_embedder.mlp.0": ("time_text_embed.text_embedder.linear_1",),
    "y_embedder.mlp.2": ("time_text_embed.text_embedder.linear_2",),
}
_FLUX = _SHARED | {
    "double_blocks.#.img_attn.qkv": tuple(f"transformer_blocks.#.attn.to_{n}" for n in "qkv"),
    "double_blocks.#.img_attn.proj": ("transformer_blocks.#.attn.to_out.0",),
    "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.net.0.proj",),
    "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.net.2",),
    "double_blocks.#.img_mod.lin": ("transformer_blocks.#.norm1.linear",),
    "double_blocks.#.txt_attn.qkv": tuple(f"transformer_blocks.#.attn.add_{n}_proj" for n in "qkv"),
    "double_blocks.#.txt_attn.proj": ("transformer_blocks.#.attn.to_add_out",),
    "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.net.0.proj",),
    "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.net.2",),
    "double_blocks.#.txt_mod.lin": ("transformer_blocks.#.norm1_context.linear",),
    "single_blocks.#.linear1": (
        *(f"single_transformer_blocks.#.attn.to_{n}" for n in "qkv"),
        "single_transformer_blocks.#.proj_mlp",
    ),
    "single_blocks.#.linear2": ("single_transformer_blocks.#.proj_out",),
    "single_blocks.#.modulation.lin": ("single_transformer_blocks.#.norm.linear",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_text_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_text_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_text_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_text_embed.guidance_embedder.linear_2",),
    "vector_in.in_layer": ("time_text_embed.text_embedder.linear_1",),
    "vector_in.out_layer": ("time_text_embed.text_embedder.linear_2",),
}
_SGM = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


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
        place = _find(name, network, config)
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


def _find(name: str, network: str, config: Mapping[str, Any]) -> Place:
    find = _NETWORKS.get(network)
    if find is None:
        known = ", ".join(_NETWORKS)
        raise ModelError(
            f"kohya: no keys are known for a {network}, only for {known}; leave this format out"
        )
    place = find(name, config)
    if place is None:
        raise ModelError(
            f"kohya: no key is known for the layer {name!r} of a {network}; leave this format out"
        )
    return place


def _sd3(name: str, config: Mapping[str, Any]) -> Place | None:
    # Where a norm has no gate, diffusers has scale above shift, the reference code shift above
    # scale.
    last = f"joint_blocks.{config['num_layers'] - 1}.context_block.adaLN_modulation.1"
    return _look_up(_SD3, name, swapped=("final_layer.adaLN_modulation.1", last))


def _flux(name: str, config: Mapping[str, Any]) -> Place | None:
    return _look_up(_FLUX, name, swapped=("final_layer.adaLN_modulation.1",))


def _look_up(
    table: Mapping[str, tuple[str, ...]], name: str, *, swapped: tuple[str, ...]
) -> Place | None:
    match = re.search(r"blocks\.(\d+)\.", name)
    number = match[1] if match else ""
    pattern = name.replace(f"blocks.{number}.", "blocks.#.", 1) if match else name
    for key, parts in table.items():
        if pattern in parts:
            own = key.replace("#", number)
            return Place(own, tuple(part.replace("#", number) for part in parts), own in swapped)
    return None


def _unet(name: str, config: Mapping[str, Any]) -> Place | None:
    """SDXL's reference UNet counts all layers through; the older models are trained by kohya in
    diffusers' UNet."""
    if config.get("addition_embed_type") != "text_time":
        return Place(name, (name,))
    key = _SGM.get(name) or _sgm(name, config["layers_per_block"])
    return Place(key, (name,)) if key else None


def _sgm(name: str, layers: Any) -> str | None:
    match = re.fullmatch(
        r"(?:(down|up)_blocks\.(\d+)|mid_block)\.(attentions|resnets)\.(\d+)\.(.+)", name
    )
    if match is None or not isinstance(layers, int):
        return None
    side, block, kind, layer, rest = match.groups()
    rest = re.sub(r"^time_emb_proj$", "emb_layers.1", rest)
    attention = kind == "attentions"
    if side is None:
        return f"middle_block.{1 if attention else 2 * int(layer)}.{rest}"
    place = int(block) * (layers + 1) + int(layer)
    # The first input block is the convolution that takes the latents.
    stem = f"input_blocks.{place + 1}" if side == "down" else f"output_blocks.{place}"
    return f"{stem}.{1 if attention else 0}.{rest}"


_NETWORKS: dict[str, Find] = {
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "UNet2DConditionModel": _unet,
}
