"""What other programs call the layers of diffusers' networks.

ComfyUI, kohya's sd-scripts and musubi-tuner name a layer as the model's own code does: SD3's,
FLUX's, Wan's and Z-Image's reference code, the ``sgm`` UNet for SDXL, and diffusers' own names for
Stable Diffusion 1.x and 2.x and Qwen-Image. Some layers of diffusers are held there as one, and
some have their rows in another order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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


def _qkv(layer: str) -> tuple[str, ...]:
    """Return the names of three projections: * stands for their letter."""
    return tuple(layer.replace("*", letter) for letter in "qkv")


# model's own name -> diffusers' names; # is the block's number
_SHARED = {
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
}
_SD3 = _SHARED | {
    "joint_blocks.#.x_block.attn.qkv": _qkv("transformer_blocks.#.attn.to_*"),
    "joint_blocks.#.x_block.attn.proj": ("transformer_blocks.#.attn.to_out.0",),
    "joint_blocks.#.x_block.attn2.qkv": _qkv("transformer_blocks.#.attn2.to_*"),
    "joint_blocks.#.x_block.attn2.proj": ("transformer_blocks.#.attn2.to_out.0",),
    "joint_blocks.#.x_block.mlp.fc1": ("transformer_blocks.#.ff.net.0.proj",),
    "joint_blocks.#.x_block.mlp.fc2": ("transformer_blocks.#.ff.net.2",),
    "joint_blocks.#.x_block.adaLN_modulation.1": ("transformer_blocks.#.norm1.linear",),
    "joint_blocks.#.context_block.attn.qkv": _qkv("transformer_blocks.#.attn.add_*_proj"),
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
    "double_blocks.#.img_attn.qkv": _qkv("transformer_blocks.#.attn.to_*"),
    "double_blocks.#.img_attn.proj": ("transformer_blocks.#.attn.to_out.0",),
    "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.net.0.proj",),
    "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.net.2",),
    "double_blocks.#.img_mod.lin": ("transformer_blocks.#.norm1.linear",),
    "double_blocks.#.txt_attn.qkv": _qkv("transformer_blocks.#.attn.add_*_proj"),
    "double_blocks.#.txt_attn.proj": ("transformer_blocks.#.attn.to_add_out",),
    "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.net.0.proj",),
    "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.net.2",),
    "double_blocks.#.txt_mod.lin": ("transformer_blocks.#.norm1_context.linear",),
    "single_blocks.#.linear1": (
        *_qkv("single_transformer_blocks.#.attn.to_*"),
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
_FLUX2 = {key: parts for key, parts in _FLUX.items() if key.startswith("double_blocks.#.")}
_FLUX2 = {key: parts for key, parts in _FLUX2.items() if not key.endswith(("_mod.lin", "mlp.0"))}
_FLUX2 |= _SHARED | {
    "double_blocks.#.img_mlp.0": ("transformer_blocks.#.ff.linear_in",),
    "double_blocks.#.img_mlp.2": ("transformer_blocks.#.ff.linear_out",),
    "double_blocks.#.txt_mlp.0": ("transformer_blocks.#.ff_context.linear_in",),
    "double_blocks.#.txt_mlp.2": ("transformer_blocks.#.ff_context.linear_out",),
    "single_blocks.#.linear1": ("single_transformer_blocks.#.attn.to_qkv_mlp_proj",),
    "single_blocks.#.linear2": ("single_transformer_blocks.#.attn.to_out",),
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": ("time_guidance_embed.timestep_embedder.linear_1",),
    "time_in.out_layer": ("time_guidance_embed.timestep_embedder.linear_2",),
    "guidance_in.in_layer": ("time_guidance_embed.guidance_embedder.linear_1",),
    "guidance_in.out_layer": ("time_guidance_embed.guidance_embedder.linear_2",),
    "double_stream_modulation_img.lin": ("double_stream_modulation_img.linear",),
    "double_stream_modulation_txt.lin": ("double_stream_modulation_txt.linear",),
    "single_stream_modulation.lin": ("single_stream_modulation.linear",),
}
_WAN = {
    **{f"blocks.#.self_attn.{n}": (f"blocks.#.attn1.to_{n}",) for n in "qkv"},
    "blocks.#.self_attn.o": ("blocks.#.attn1.to_out.0",),
    **{f"blocks.#.cross_attn.{n}": (f"blocks.#.attn2.to_{n}",) for n in "qkv"},
    "blocks.#.cross_attn.o": ("blocks.#.attn2.to_out.0",),
    **{f"blocks.#.cross_attn.{n}_img": (f"blocks.#.attn2.add_{n}_proj",) for n in "kv"},
    "blocks.#.ffn.0": ("blocks.#.ffn.net.0.proj",),
    "blocks.#.ffn.2": ("blocks.#.ffn.net.2",),
    "time_embedding.0": ("condition_embedder.time_embedder.linear_1",),
    "time_embedding.2": ("condition_embedder.time_embedder.linear_2",),
    "time_projection.1": ("condition_embedder.time_proj",),
    "text_embedding.0": ("condition_embedder.text_embedder.linear_1",),
    "text_embedding.2": ("condition_embedder.text_embedder.linear_2",),
    "img_emb.proj.1": ("condition_embedder.image_embedder.ff.net.0.proj",),
    "img_emb.proj.3": ("condition_embedder.image_embedder.ff.net.2",),
    "head.head": ("proj_out",),
}
_Z_BLOCKS = ("layers", "noise_refiner", "context_refiner")
_Z_IMAGE: dict[str, tuple[str, ...]] = {}
for _block in _Z_BLOCKS:
    _Z_IMAGE[f"{_block}.#.attention.qkv"] = _qkv(f"{_block}.#.attention.to_*")
    _Z_IMAGE[f"{_block}.#.attention.out"] = (f"{_block}.#.attention.to_out.0",)
_Z_IMAGE |= {
    "x_embedder": ("all_x_embedder.2-1",),
    "final_layer.linear": ("all_final_layer.2-1.linear",),
    "final_layer.adaLN_modulation.1": ("all_final_layer.2-1.adaLN_modulation.1",),
}
_SGM = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
}


def find_place(name: str, network: str, config: Mapping[str, Any]) -> Place:
    """Return where ComfyUI and sd-scripts hold a layer of a diffusers network (its class) with
    that config. Raise ModelError for a network or a layer without known names."""
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


def places_of(name: str, network: str, config: Mapping[str, Any]) -> Iterator[Place]:
    """Yield the places under which files may have a layer: diffusers' own, and the reference
    code's."""
    yield Place(name, (name,))
    if name.endswith("to_out.0"):  # as diffusers itself called it in 2023
        yield Place(name.removesuffix(".0"), (name,))
    find = _NETWORKS.get(network)
    if find is not None:
        place = find(name, config)
        if place is not None and place.parts != (place.key,):
            yield place
    if network == "UNet2DConditionModel":  # ComfyUI's own files of SD 1.x, too
        key = _SGM.get(name) or _sgm(name, config.get("layers_per_block"))
        if key:
            yield Place(key, (name,))


def _sd3(name: str, config: Mapping[str, Any]) -> Place | None:
    # Where a norm has no gate, diffusers has scale above shift, the reference code shift above
    # scale.
    last = f"joint_blocks.{config['num_layers'] - 1}.context_block.adaLN_modulation.1"
    return _look_up(_SD3, name, swapped=("final_layer.adaLN_modulation.1", last))


def _flux(name: str, config: Mapping[str, Any]) -> Place | None:
    return _look_up(_FLUX, name, swapped=("final_layer.adaLN_modulation.1",))


def _flux2(name: str, config: Mapping[str, Any]) -> Place | None:
    return _look_up(_FLUX2, name, swapped=("final_layer.adaLN_modulation.1",))


def _wan(name: str, config: Mapping[str, Any]) -> Place | None:
    return _look_up(_WAN, name)


def _z_image(name: str, config: Mapping[str, Any]) -> Place | None:
    return _look_up(_Z_IMAGE, name) or Place(name, (name,))


def _own(name: str, config: Mapping[str, Any]) -> Place | None:
    return Place(name, (name,))


def _look_up(
    table: Mapping[str, tuple[str, ...]], name: str, *, swapped: tuple[str, ...] = ()
) -> Place | None:
    match = re.match(r"(\w*blocks|layers|\w+_refiner)\.(\d+)\.", name)
    number, pattern = "", name
    if match:
        number, pattern = match[2], f"{match[1]}.#.{name[match.end() :]}"
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
    # attention stands behind a residual block: in the middle alone between two of them
    if side is None and kind == "attentions":
        return f"middle_block.1.{rest}"
    if side is None:
        return f"middle_block.{2 * int(layer)}.{rest}"
    place = int(block) * (layers + 1) + int(layer)
    part = 1 if kind == "attentions" else 0
    # The first input block is the convolution that takes the latents.
    if side == "down":
        return f"input_blocks.{place + 1}.{part}.{rest}"
    return f"output_blocks.{place}.{part}.{rest}"


_NETWORKS: dict[str, Find] = {
    "SD3Transformer2DModel": _sd3,
    "FluxTransformer2DModel": _flux,
    "UNet2DConditionModel": _unet,
    "Flux2Transformer2DModel": _flux2,
    "WanTransformer3DModel": _wan,
    "ZImageTransformer2DModel": _z_image,
    "QwenImageTransformer2DModel": _own,
}
