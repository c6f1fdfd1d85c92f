"""Products of adapters: those of mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from adapterkit import Folders
from modelkit import gradients, perturb
from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import Tensor

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


def test_in_bfloat16_they_round_less_than_autocast(folders: Folders) -> None:
    """The reference is peft's own layer in float64; peft's layer under torch.autocast, in which
    published code trains, rounds what is scaled and what is added once more each: ours is nearer,
    in values and gradients, and those of A and B alone are there."""
    ours, peft, exact = (loaded(folders, "bfloat16", float32=wide) for wide in (False, True, True))
    x = X[..., : layer_of(ours).in_features].bfloat16()
    layer_of(exact).double()
    truth, expected = ran(exact, x.double(), enabled=False)
    out, mine = ran(ours, x, enabled=False)
    theirs_out, theirs = ran(peft, x, enabled=True)
    assert out.dtype == torch.bfloat16 and off(out, truth) < off(theirs_out, truth) < 0.01
    assert mine.keys() == theirs.keys() and len(mine) == 2
    for name, gradient in mine.items():
        assert gradient.dtype == torch.float32
        assert off(gradient, expected[name]) < 1.1 * off(theirs[name], expected[name]) < 0.02
    # the same to the bit where no gradient is wanted, which adds in place
    with torch.no_grad():
        assert torch.equal(layer_of(ours)(x), out)


def off(found: Tensor, truth: Tensor) -> float:
    """Return how far a tensor is from the truth, as a share of it."""
    return float((found.double() - truth).norm() / truth.norm())


def test_in_float32_they_are_pefts(folders: Folders) -> None:
    """Nothing is rounded: the option changes nothing beyond float32's last bits."""
    ours, peft = (loaded(folders, "float32", float32=wide) for wide in (False, True))
    x = X[..., : layer_of(ours).in_features]
    out, mine = ran(ours, x, enabled=False)
    expected, theirs = ran(peft, x, enabled=False)
    torch.testing.assert_close(out, expected)
    assert mine.keys() == theirs.keys()
    for name, gradient in mine.items():
        torch.testing.assert_close(gradient, theirs[name])


def test_several_none_or_merged_adapters(folders: Folders) -> None:
    """Two adapters on one layer, adapters switched off, and weights with the adapter added in;
    oracle: peft's own layer with the same weights."""
    ours, peft = (loaded(folders, "float32", float32=wide) for wide in (False, True))
    x = X[..., : layer_of(ours).in_features]
    second = LoraConfig(r=3, lora_alpha=5, target_modules=["attn.to_q"])
    for model in (ours, peft):
        model.network.add_adapter(second, adapter_name="second")
        model.network.set_adapters(["default"])
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for part in (layer_of(model).lora_A["second"], layer_of(model).lora_B["second"]):
                part.weight.copy_(torch.randn(part.weight.shape, generator=draw))
    mine, theirs = layer_of(ours), layer_of(peft)
    first = mine(x)
    for layer in (mine, theirs):
        layer.set_adapter(["default", "second"])
    torch.testing.assert_close(mine(x), theirs(x))
    assert not torch.allclose(mine(x), first, rtol=0.01)
    for layer in (mine, theirs):
        layer.enable_adapters(False)
    assert torch.equal(mine(x), theirs(x)) and torch.equal(mine(x), mine.base_layer(x))
    for layer in (mine, theirs):
        layer.enable_adapters(True)
        layer.merge()
    assert torch.equal(mine(x), theirs(x))


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
