"""A LoRA of another program: how docs/models.md begins with it, and what is said of one that is
given as a run's own weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from docskit import PAGES, blocks, section
from exportkit import draw
from modelkit import perturb
from tiny import tiny_sd3
from torch import nn

from flowrl.core.errors import CheckpointError
from flowrl.models.sd3 import SD3, sd3
from flowrl.runs.export.export import trained_part, write_kohya, write_lora
from flowrl.training.start_weights import start_from

pytestmark = pytest.mark.integration
FILE = "pytorch_lora_weights.safetensors"


def with_lora(folder: Path) -> SD3:
    """Save a tiny SD3 as `base`, a LoRA of it as `mine` -> the two as one model."""
    tiny_sd3(folder / "base", t5=True, dual=True)
    model = sd3(str(folder / "base"), tune="lora", lora={"rank": 4, "alpha": 14.0})
    perturb(model, 0.1)
    (folder / "mine").mkdir()
    write_lora(trained_part(model, name="mine"), folder / "mine")
    return model


def test_the_page_s_code_makes_a_base_model_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merged pipeline, and flowrl's model of it before its first step, draw what diffusers
    draws with the LoRA loaded, which is not what the base model draws."""
    with_lora(tmp_path)
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(section(PAGES["docs/models.md"], "Begin with a LoRA"), "python")
    exec(code, {})  # the page's own lines
    plain = StableDiffusion3Pipeline.from_pretrained("base")
    before = draw(plain, 1.0)
    plain.load_lora_weights("mine", weight_name=FILE)
    want = draw(plain, 1.0)
    assert (before - want).abs().max() > 0.01
    again = sd3("base-and-mine", tune="lora", lora={"rank": 2, "alpha": 2.0})
    torch.testing.assert_close(draw(again.pipeline(), 1.0), want, rtol=0, atol=1e-5)


def test_such_a_file_is_told_from_a_run_s_weights(tmp_path: Path) -> None:
    model = with_lora(tmp_path)
    params = {name: nn.Parameter(p.detach().clone()) for name, p in model.trainable().items()}
    write_kohya(trained_part(model, name="mine"), tmp_path)
    for file in (tmp_path / "mine" / FILE, tmp_path / "mine-kohya.safetensors"):
        with pytest.raises(CheckpointError, match=r"LoRA file of another program.*docs/models\.md"):
            start_from(str(file), params)
