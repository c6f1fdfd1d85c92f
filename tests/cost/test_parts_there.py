"""Estimates beside what is there: parts that a random model leaves out, and two experts in one
optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from estimatekit import model_config, phases, sizes
from scriptkit import module_of
from tiny import tiny_sd3, tiny_wan, tiny_wan22

from flowrl.cost.estimate import estimate
from flowrl.cost.meter import Meter

WAN = "fn: wan, frames: 5, guidance: 2.0, lora: {rank: 3}, max_sequence_length: 16"
TINY: dict[str, tuple[Any, str]] = {
    "sd3": (tiny_sd3, "fn: sd3, guidance: 2.0, lora: {rank: 3}"),
    "wan": (tiny_wan, WAN),
}


@pytest.mark.parametrize("name", ["sd3", "wan"])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("vae", [False, True])
def test_what_the_estimate_leaves_out_is_what_is_not_there(
    tmp_path: Path, name: str, host: bool, vae: bool
) -> None:
    """Expected: the estimate's line of VAE and text encoders, less the bytes of the VAE that the
    random model holds; it has no text encoder. With text encoders on the host the line has the VAE
    alone; a video model's VAE is float32 and always there."""
    runtime = ", dtype: bfloat16" + ", runtime: {text_encoders: cpu}" * host
    build, options = TINY[name]
    build(tmp_path / "weights")
    model = f"{{{options}{runtime}, path: {tmp_path}/weights, device: cpu}}"
    config = model_config(tmp_path, model)
    found, (line,) = estimate(config), [n for n in sizes(config) if n.startswith("VAE")]
    assert line == ("VAE" if host else "VAE, text encoders")
    adapter: Any = module_of("bench", "random_model").random_model(config, vae=vae).adapter  # type: ignore[attr-defined]
    held = adapter.pipeline().vae
    # on the device "meta" stands what the sizes of latents are read from
    there = sum(p.nbytes for p in held.parameters() if not p.is_meta) if held is not None else 0
    assert (there > 0) == (vae or name == "wan")
    assert module_of("bench", "performance")._absent(found, vae=vae) == sizes(config)[line] - there


@pytest.mark.parametrize("make", [tiny_wan, tiny_wan22])
def test_one_optimizer_step_has_the_weights_of_both_experts(tmp_path: Path, make: Any) -> None:
    """Expected: what AdamW, as a run makes it, allocates at most in a step on the real adapters of
    one network and of two. It is about as much as the trained weights."""
    make(tmp_path / "weights")
    config = model_config(tmp_path, f"{{{WAN}, path: {tmp_path}/weights, device: cpu}}")
    trained = [*config.call("model")().trainable().values()]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW(trained, foreach=True)
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    with Meter([*trained, *(p.grad for p in trained if p.grad is not None), *moments]) as meter:
        optimizer.step()
    found = estimate(config)
    assert found.weights is not None
    extra = phases(found)["optimizer step"].extra
    assert extra == pytest.approx(meter.peak, rel=0.01)
    assert extra == pytest.approx(4 * found.weights.trained, rel=0.02)
