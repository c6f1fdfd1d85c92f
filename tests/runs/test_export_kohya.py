"""Names of layers in kohya's layout, and layers that are held as one, on the real networks' names;
no weights.

What reads such files is diffusers: its own readers of kohya files, and its converters of the
models' reference checkpoints. The latter stand for ComfyUI, which finds the weight that a key means
by one rule: ``lora_unet_`` and the name of the weight in the reference checkpoint, dots written as
``_``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import (
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
)
from diffusers.loaders.single_file_utils import (
    convert_flux2_transformer_checkpoint_to_diffusers,
    convert_flux_transformer_checkpoint_to_diffusers,
    convert_sd3_transformer_checkpoint_to_diffusers,
    convert_wan_transformer_to_diffusers,
    convert_z_image_transformer_checkpoint_to_diffusers,
)
from diffusers.utils import convert_unet_state_dict_to_peft
from torch import Tensor, nn

from flowrl.core.errors import ModelError
from flowrl.cost.architecture import Architecture, build, released_parts
from flowrl.models.files.lora_names import Layer, find_place
from flowrl.runs.export.export import fuse, kohya_weights

RANK, SCALE, INPUTS = 4, 3.0, 5
FLUX_ROWS = {"proj_mlp": 12288, "to_q": 3072, "to_k": 3072, "to_v": 3072}
"""Those of single blocks; diffusers' converter has them in its code."""


RELEASED_AS = {
    "sd3": ("stabilityai/stable-diffusion-3.5-medium", "transformer"),
    "flux": ("black-forest-labs/FLUX.1-dev", "transformer"),
    "sd15": ("stable-diffusion-v1-5/stable-diffusion-v1-5", "unet"),
    "sdxl": ("stabilityai/stable-diffusion-xl-base-1.0", "unet"),
    "wan": ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "transformer"),
    "wan_i2v": ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", "transformer"),
    "z_image": ("Tongyi-MAI/Z-Image", "transformer"),
    "flux2": ("black-forest-labs/FLUX.2-dev", "transformer"),
    "flux2_klein": ("black-forest-labs/FLUX.2-klein-base-4B", "transformer"),
    "qwen_image": ("Qwen/Qwen-Image", "transformer"),
}


@cache
def released(name: str) -> nn.Module:
    """Return a released network by its published config, without weights."""
    path, part = RELEASED_AS[name]
    return build(Architecture(path, released_parts(path), known=True), part)


def linear(network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]


def adapters(names: list[str], rows: Callable[[str], int]) -> dict[str, Layer]:
    """Draw an adapter for each layer; only the number of rows is the real one, where it matters."""
    draw = torch.Generator().manual_seed(0)
    layers = {}
    for name in names:
        down = torch.randn(RANK, INPUTS, generator=draw)
        layers[name] = Layer(down, torch.randn(rows(name), RANK, generator=draw))
    return layers


def exported(
    network: nn.Module, layers: dict[str, Layer], rows: Callable[[str], int]
) -> dict[str, Tensor]:
    kind, config = type(network).__name__, network.config
    return kohya_weights(layers, network=kind, config=config, scale=SCALE, rows=rows)  # type: ignore[arg-type]


def six(name: str) -> int:
    return 6


def flux_rows(name: str) -> int:
    return FLUX_ROWS.get(name.rpartition(".")[2], 6) if name.startswith("single_") else 6


def moved(layer: Layer) -> Tensor:
    """Return what an adapter adds to its weight, by the definition of LoRA."""
    return SCALE * layer.up @ layer.down


class Reference(dict[str, Tensor]):
    """A reference checkpoint of zeros, moved by a kohya file; it has whatever weight is asked
    for."""

    def __init__(
        self, lora: dict[str, Tensor], hints: list[str], rows: Callable[[str], int]
    ) -> None:
        # converters count blocks by names
        super().__init__({hint: torch.zeros(6, INPUTS) for hint in hints})
        self.lora, self.rows, self.asked = lora, rows, set[str]()

    def pop(self, key: str, *_: Any) -> Tensor:  # type: ignore[override]
        stem = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
        if not key.endswith(".weight") or f"{stem}.lora_up.weight" not in self.lora:
            return torch.zeros(self.rows(key), INPUTS)
        self.asked.add(stem)
        down, up = self.lora[f"{stem}.lora_down.weight"], self.lora[f"{stem}.lora_up.weight"]
        return self.lora[f"{stem}.alpha"] / len(down) * up @ down


def stems(lora: dict[str, Tensor]) -> set[str]:
    return {key.partition(".")[0] for key in lora}


# --------------------------------------------------------------------------- one adapter of several


def test_fused_adapters_move_the_stacked_weight_alike() -> None:
    """Closed form: the product of the fused matrices is the stack of the products, to the bit but
    for the sums' order.

    Ranks and heights differ; the third layer has no adapter, so its rows do not move.
    """
    draw = torch.Generator().manual_seed(1)
    parts = [
        Layer(torch.randn(r, 7, generator=draw), torch.randn(o, r, generator=draw))
        for r, o in ((2, 3), (4, 5))
    ]
    last = Layer(torch.randn(1, 7, generator=draw), torch.randn(2, 1, generator=draw))
    down, up = fuse([*parts, 4, last])
    assert down.shape == (7, 7) and up.shape == (14, 7)
    want = torch.cat(
        [*(part.up @ part.down for part in parts), torch.zeros(4, 7), last.up @ last.down]
    )
    torch.testing.assert_close(up @ down, want, rtol=0, atol=1e-6)
    assert (up @ down)[8:12].count_nonzero() == 0 and up.count_nonzero() == 3 * 2 + 5 * 4 + 2


# -------------------------------------------------------------------------------------------- names


UNET_KEYS = {
    "sd15": {
        "down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_out.0": (
            "down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_out_0"
        ),
    },
    "sdxl": {
        "down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k": (
            "input_blocks_4_1_transformer_blocks_1_attn2_to_k"
        ),
        "mid_block.attentions.0.transformer_blocks.9.attn1.to_q": (
            "middle_block_1_transformer_blocks_9_attn1_to_q"
        ),
        "up_blocks.0.attentions.2.proj_in": "output_blocks_2_1_proj_in",
        "up_blocks.2.resnets.1.time_emb_proj": "output_blocks_7_0_emb_layers_1",
    },
}


@pytest.mark.parametrize("model", UNET_KEYS)
def test_keys_of_unets(model: str) -> None:
    """Written down from the published layouts: diffusers' UNet, and SDXL's sgm UNet."""
    names = UNET_KEYS[model]
    found = exported(released(model), adapters([*names], six), six)
    parts = ("lora_down.weight", "lora_up.weight", "alpha")
    assert set(found) == {f"lora_unet_{key}.{part}" for key in names.values() for part in parts}


def test_what_a_fused_key_holds() -> None:
    """q and v trained, k not: rank 2 r, zeros for k, and alpha / rank is the scale of each."""
    names = [f"transformer_blocks.3.attn.{name}" for name in ("to_q", "to_v")]
    layers = adapters(names, six)
    found = exported(released("flux"), layers, six)
    key = "lora_unet_double_blocks_3_img_attn_qkv"
    down, up, alpha = (
        found[f"{key}.{part}"] for part in ("lora_down.weight", "lora_up.weight", "alpha")
    )
    assert down.shape == (2 * RANK, INPUTS) and up.shape == (18, 2 * RANK)
    assert float(alpha) == SCALE * 2 * RANK and alpha.dim() == 0 and up[6:12].count_nonzero() == 0
    torch.testing.assert_close(SCALE * (up @ down)[12:], moved(layers[names[1]]))


@pytest.mark.parametrize(
    ("model", "convert", "hints"),
    [
        (
            "sd3",
            convert_sd3_transformer_checkpoint_to_diffusers,
            [f"joint_blocks.{i}.x_block.attn2.ln_q.weight" for i in range(13)]
            + ["joint_blocks.23.", "context_embedder.weight"],
        ),
        (
            "flux",
            convert_flux_transformer_checkpoint_to_diffusers,
            ["double_blocks.18.", "single_blocks.37.", "guidance_in.in_layer.weight"],
        ),
    ],
)
def test_every_linear_layer_of_the_reference_checkpoint(
    model: str, convert: Callable[..., dict[str, Tensor]], hints: list[str]
) -> None:
    """Moving the reference checkpoint by the file, then converting it with diffusers, moves each
    weight as it should.

    Swapped halves and stacked q, k, v are thereby diffusers' own. No key of the file is left over.
    """
    network = released(model)
    names = linear(network)
    layers = adapters(names, flux_rows)
    lora = exported(network, layers, flux_rows)
    checkpoint = Reference(lora, hints, lambda key: 21504 if "linear1" in key else 6)
    converted = convert(checkpoint)
    assert checkpoint.asked == stems(lora)
    for name, layer in layers.items():
        torch.testing.assert_close(converted[f"{name}.weight"], moved(layer), rtol=0, atol=1e-4)
        assert float(moved(layer).abs().max()) > 1
    assert len(names) > 300


CONVERTERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "wan": convert_wan_transformer_to_diffusers,
    "wan_i2v": convert_wan_transformer_to_diffusers,
    "z_image": convert_z_image_transformer_checkpoint_to_diffusers,
    "flux2": convert_flux2_transformer_checkpoint_to_diffusers,
    "flux2_klein": convert_flux2_transformer_checkpoint_to_diffusers,
    "qwen_image": lambda checkpoint: checkpoint,  # ComfyUI keeps diffusers' names
}


@pytest.mark.parametrize("model", CONVERTERS)
def test_every_linear_layer_of_a_reference_checkpoint_that_is_given(model: str) -> None:
    """The weights that the file moves, under the reference code's names, which diffusers turns into
    its own: each moves as it should, and no key of the file is left over."""
    network = released(model)
    names = linear(network)
    layers = adapters(names, six)
    lora = exported(network, layers, six)
    checkpoint = {}
    for name in names:
        key = find_place(name, type(network).__name__, network.config).key  # type: ignore[arg-type]
        stem = "lora_unet_" + key.replace(".", "_")
        down, up = lora[f"{stem}.lora_down.weight"], lora[f"{stem}.lora_up.weight"]
        checkpoint[f"{key}.weight"] = lora[f"{stem}.alpha"] / len(down) * up @ down
    assert {"lora_unet_" + key[:-7].replace(".", "_") for key in checkpoint} == stems(lora)
    converted = CONVERTERS[model](checkpoint)
    assert len(names) > 100 and converted.keys() == {f"{name}.weight" for name in names}
    for name, layer in layers.items():
        torch.testing.assert_close(converted[f"{name}.weight"], moved(layer), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "pipeline"), [("sd15", StableDiffusionPipeline), ("sdxl", StableDiffusionXLPipeline)]
)
def test_diffusers_reads_every_linear_layer_of_the_unets(model: str, pipeline: Any) -> None:
    """lora_state_dict of the pipeline gives back names, matrices and alpha: attention,
    feed-forward, time, size."""
    network = released(model)
    names = linear(network)
    layers = adapters(names, six)
    file = exported(network, layers, six)
    raw, alphas = pipeline.lora_state_dict(file, unet_config=network.config)
    bare = {key.removeprefix("unet."): value for key, value in raw.items()}
    found = convert_unet_state_dict_to_peft(bare)
    for name, layer in layers.items():
        assert torch.equal(found[f"{name}.lora_A.weight"], layer.down)
        assert torch.equal(found[f"{name}.lora_B.weight"], layer.up)
    assert len(found) == 2 * len(names) > 300 and len(alphas) == len(names)
    assert set(alphas.values()) == {SCALE * RANK}


@pytest.mark.parametrize(("model", "name"), [("flux", "brand_new"), ("sdxl", "encoder_hid_proj")])
def test_unknown_layers(model: str, name: str) -> None:
    network = released(model)
    words = f"no key is known for the layer '{name}' of a {type(network).__name__}"
    with pytest.raises(ModelError, match=words):
        exported(network, adapters([name], six), six)


def test_unknown_networks() -> None:
    words = "no keys are known for a PixArtTransformer2DModel, only for SD3Transformer"
    layers = adapters(["brand_new"], six)
    with pytest.raises(ModelError, match=words):
        kohya_weights(layers, network="PixArtTransformer2DModel", config={}, scale=1.0, rows=six)
