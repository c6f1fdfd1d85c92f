"""LoRA of the FLUX.1 configs: rank and layers of the code that they follow."""

from __future__ import annotations

import pytest

from flowrl.config.load import load_config
from flowrl.core.shipped_files import list_configs

FLUX = (
    *("flow_grpo", "flow_grpo_cps", "flow_grpo_fast", "flow_grpo_geneval", "flow_grpo_ocr"),
    *("grpo_guard", "tp_grpo", "vgpo", "awm", "diffusion_nft", "paco_rl"),
)
KONTEXT = [name for name in list_configs() if name.startswith("flux_kontext/")]
LAYERS = {
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
    *(f"attn.add_{name}_proj" for name in "qkv"),
    *(f"{mlp}.net.{layer}" for mlp in ("ff", "ff_context") for layer in ("0.proj", "2")),
}


@pytest.mark.parametrize("name", [*(f"flux/{name}" for name in FLUX), *KONTEXT])
def test_it_is_the_published_one(name: str) -> None:
    """Rank 64, alpha 128, attention and feed-forward: scripts/train_flux.py and train_flux_fast.py
    of vanzll/flow_grpo, my_train_flux_fast.py of YunzeTong/TurningPoint-GRPO, train_flux.py and
    train_flux_kontext.py of X-GenGroup/PaCo-RL (08caac6), and the default of Flow-Factory's
    flux1.py and flux1_kontext.py, read there. SD3's is 32 and 64, attention alone."""
    lora = load_config(name).model.kwargs["lora"]
    assert (lora["rank"], lora["alpha"]) == (64, 128)
    assert set(lora["targets"]) == LAYERS
