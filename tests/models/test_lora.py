"""LoRA: products of mixed precision, layers that have one by default, and a run that begins with
one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapterkit import Folders
from diffusers import StableDiffusion3Pipeline
from docskit import PAGES, blocks, section
from exportkit import draw
from modelkit import gradients, perturb
from peft.tuners.lora import Linear
from tiny import tiny_sd3
from torch import Tensor

from flowrl.models.sd3 import SD3, sd3
from flowrl.runs.export.export import trained_part, write_lora

X = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(2))


def layer_of(model: Any) -> Any:
    """Return the adapted layer of a network that comes first."""
    return next(m for m in model.network.modules() if isinstance(m, Linear))


def loaded(folders: Folders, dtype: str, *, float32: bool) -> Any:
    """Load a tiny SD3 whose adapters add something."""
    model = folders.load("sd3", dtype=dtype, lora={"rank": 2, "float32": float32})
    perturb(model, 0.3)
    return model


def ran(model: Any, x: Tensor, **autocast: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what the first adapted layer makes of x, and the gradients of its weights."""
    layer = layer_of(model)
    with torch.autocast("cpu", torch.bfloat16, **autocast):
        out = layer(x)
    found = gradients(model, out.float().square().sum())
    return out.detach(), {name: g for name, g in found.items() if bool(g.any())}


def test_in_bfloat16_they_are_those_of_autocast(folders: Folders) -> None:
    """The reference is peft's own layer under torch.autocast, in which published code trains: equal
    to the bit, values and gradients, and those of A and B alone are there."""
    ours, peft = (loaded(folders, "bfloat16", float32=wide) for wide in (False, True))
    x = X[..., : layer_of(ours).in_features].bfloat16()
    out, mine = ran(ours, x, enabled=False)
    expected, theirs = ran(peft, x, enabled=True)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert mine.keys() == theirs.keys() and len(mine) == 2
    for name, gradient in mine.items():
        assert gradient.dtype == torch.float32 and torch.equal(gradient, theirs[name])
    # not what peft computes without autocast, which is in float32
    assert not torch.equal(out, ran(peft, x, enabled=False)[0])


def test_in_float32_they_are_pefts(folders: Folders) -> None:
    """Nothing is rounded: the option changes nothing."""
    ours, peft = (loaded(folders, "float32", float32=wide) for wide in (False, True))
    x = X[..., : layer_of(ours).in_features]
    out, mine = ran(ours, x, enabled=False)
    expected, theirs = ran(peft, x, enabled=False)
    assert torch.equal(out, expected) and mine.keys() == theirs.keys()
    assert all(torch.equal(gradient, theirs[name]) for name, gradient in mine.items())


def test_less_is_kept_for_the_backward_pass(folders: Folders) -> None:
    """The input of the layer in bfloat16, which it shares with the adapter, in place of a copy of
    twice its size."""
    sizes = []
    for wide in (False, True):
        layer, kept = layer_of(loaded(folders, "bfloat16", float32=wide)), dict[int, int]()

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(64, 512, layer.in_features).bfloat16().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            layer(x)
        sizes.append(sum(kept.values()) / x.nbytes)
    narrow, wide_share = sizes
    # beside x: rank 2 of in_features numbers, and the rounded weights
    assert narrow < 1.3 and wide_share > 2


def test_what_is_adapted_by_default(folders: Folders, tmp_path: Path) -> None:
    """As the option's comment says. Of SD3.5 Medium, whose blocks have a second attention, the
    first alone: Flow-GRPO's scripts/train_sd3.py lists eight names that begin with ``attn.``. Of
    Qwen-Image, Z-Image, FLUX.2 and Wan the MLPs, too."""
    medium = sd3(path=str(tiny_sd3(tmp_path / "sd3", dual=True)), device="cpu")
    there = [name for name, _ in medium.transformer.named_modules()]
    assert any(name.endswith(".attn2.to_q") for name in there)
    adapted = {name.split(".lora_")[0] for name in medium.trainable()}
    assert {name.split(".")[2] for name in adapted} == {"attn"}
    for fn in ("qwen_image", "z_image", "flux2", "flux2_klein", "wan"):
        names = folders.load(fn, lora={"rank": 2}).trainable()
        kinds = {name.split(".lora_")[0].split(".")[2] for name in names}
        assert any("mlp" in kind or kind.startswith(("ff", "feed")) for kind in kinds), fn


FILE = "pytorch_lora_weights.safetensors"


def with_lora(folder: Path) -> SD3:
    """Save a tiny SD3 as `base`, a LoRA of it as `mine` -> the two as one model."""
    tiny_sd3(folder / "base", t5=True, dual=True)
    model = sd3(str(folder / "base"), tune="lora", lora={"rank": 4, "alpha": 14.0})
    perturb(model, 0.1)
    (folder / "mine").mkdir()
    write_lora(trained_part(model, name="mine"), folder / "mine")
    return model


@pytest.mark.integration
def test_the_page_s_code_makes_a_base_model_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged pipeline, and flowrl's model of it before its first step, draw what diffusers
    draws with the LoRA loaded, which is not what the base model draws."""
    with_lora(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / FILE).rename("mine.safetensors")
    (code,) = blocks(section(PAGES["docs/models.md"], "Begin with a LoRA"), "python")
    exec(code, {})  # the page's own lines
    plain = StableDiffusion3Pipeline.from_pretrained("base")
    before = draw(plain, 1.0)
    plain.load_lora_weights(".", weight_name="mine.safetensors")
    want = draw(plain, 1.0)
    assert (before - want).abs().max() > 0.01
    again = sd3("base-and-mine", tune="lora", lora={"rank": 2, "alpha": 2.0})
    torch.testing.assert_close(draw(again.pipeline(), 1.0), want, rtol=0, atol=1e-5)
