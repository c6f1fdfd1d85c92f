"""A quantised base under LoRA, on the CPU: bounded error, finite gradients, ratio 1, and a clear no
where it cannot be.

int8 runs on the CPU as anywhere. diffusers refuses nf4 without a GPU; the test takes this refusal
away, and with it bitsandbytes' own packing for some processors, so that the code that runs on a GPU
runs here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from modelkit import gradients, perturb
from rolloutkit import decisions, score_draws
from runtimekit import PROMPTS, load, network, velocity
from tiny import tiny_flux, tiny_sd3, tiny_sd15
from torch import nn

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps
from flowrl.core.errors import ModelError
from flowrl.models import quantized

needs = {
    package: pytest.mark.skipif(
        not importlib.util.find_spec(package), reason=f"needs {package} (flowrl[quant])"
    )
    for package in quantized.PACKAGES.values()
}
CASES = [
    pytest.param("sd3", "int8", 0.02, marks=needs["torchao"]),
    pytest.param("flux", "int8", 0.02, marks=needs["torchao"]),
    pytest.param("sd15", "int8", 0.02, marks=needs["torchao"]),
    pytest.param("sd3", "nf4", 0.2, marks=needs["bitsandbytes"]),
    pytest.param("flux", "nf4", 0.2, marks=needs["bitsandbytes"]),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    sd3 = tiny_sd3(root / "sd3", dual=True)
    return {"sd3": sd3, "flux": tiny_flux(root / "flux"), "sd15": tiny_sd15(root / "sd15")}


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let diffusers and bitsandbytes do on the CPU what they do on a GPU."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    from bitsandbytes.nn import Linear4bit
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import (
        BnB4BitDiffusersQuantizer as Quantizer,
    )

    start = Linear4bit.__init__

    def unpacked(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **options)
        self.support_avx512bf16_for_cpu = False

    monkeypatch.setattr(Linear4bit, "__init__", unpacked)
    monkeypatch.setattr(Quantizer, "validate_environment", lambda *_args, **_options: None)
    monkeypatch.setattr(Quantizer, "update_device_map", lambda *_: {"": "cpu"})
    monkeypatch.setattr(quantized, "NF4_DEVICES", ("cpu",))


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize(("fn", "kind", "bound"), CASES)
def test_training_on_a_quantised_base(
    folders: dict[str, Path], fn: str, kind: str, bound: float
) -> None:
    """Bounds: rounding to 127 levels a side errs by 0.4 % of the largest weight at most, to 16
    levels by 15 %."""
    exact = load(folders, fn, dtype="bfloat16")
    model = load(folders, fn, dtype="bfloat16", runtime={"quantize": kind, "checkpointing": True})
    frozen = [
        m
        for name, m in network(model).named_modules()
        if isinstance(m, nn.Linear) and ".lora_" not in name
    ]
    kinds = {type(m.weight).__name__ for m in frozen}
    assert frozen and "Parameter" not in kinds, kinds  # each linear layer is quantised
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}
    v, expected = velocity(model).detach(), velocity(exact).detach()
    error = float((v - expected).norm() / expected.norm())
    assert 1e-4 < error < bound  # equal bits would mean that nothing was quantised

    perturb(model, 0.05)
    ro = rollout(
        model,
        model.encode(PROMPTS),
        full(0, steps=4, noise_scale=0.7),
        cps,
        sigmas=model.sigmas(4, 32, 32),
        shape=model.latent_shape(32, 32),
        group_size=2,
        generators=[torch.Generator().manual_seed(i) for i in range(2)],
        micro_batch=4,
    )
    batch = decisions(ro, torch.zeros(len(ro.x)), nodes=(ro.tree.step == 2).nonzero().flatten())
    log_prob = score_draws(model, batch, cps).log_prob
    assert torch.equal(log_prob, batch.old_log_prob)
    found = gradients(model, log_prob.sum())
    assert set(found) == set(model.trainable())
    assert all(bool(grad.isfinite().all()) for grad in found.values())
    # SD3's last block drops what its text tokens attend to, so that their queries have no gradient
    # in any dtype.
    idle = {name for name, grad in found.items() if not float(grad.abs().max()) > 0}
    assert idle == {name for name in found if fn == "sd3" and "blocks.1.attn.add_q_proj" in name}


def test_nf4_without_cuda(folders: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="'nf4' needs a CUDA device, got cpu: .*'int8' works here"):
        load(folders, "sd15", runtime={"quantize": "nf4"})


def test_a_missing_package(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.models.quantized.importlib.util.find_spec", lambda _: None)
    with pytest.raises(
        ModelError, match=r"'int8' needs the package torchao: pip install 'flowrl\[quant\]'"
    ):
        load(folders, "sd15", runtime={"quantize": "int8"})
