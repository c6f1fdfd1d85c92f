"""Exports of the models whose prompts are read by a language model, read by their own pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapterkit import PROMPTS, Folders, diffusers_images
from modelkit import noise, perturb

from flowrl.runs.export.export import trained_part, write_lora, write_merged


@pytest.mark.parametrize("fn", ["qwen_image", "z_image", "flux2", "flux2_klein"])
def test_the_plain_pipeline_draws_the_run_s_image(
    folders: Folders, tmp_path: Path, fn: str
) -> None:
    """By load_lora_weights on the base, and from the merged pipeline."""
    options = {"lora": {"rank": 4, "alpha": 14.0}, "guidance": 3.0}
    model = folders.load(fn, **options)
    perturb(model)
    x = noise(model, 1, 32, 48)
    expected = diffusers_images(folders[fn], model, x, PROMPTS[:1], steps=2)
    base = folders.load(fn, tune="none", guidance=3.0)
    plain = diffusers_images(folders[fn], base, x, PROMPTS[:1], steps=2)
    assert (plain - expected).abs().max() > 1e-3

    trained = trained_part(model, name="tiny")
    write_lora(trained, tmp_path)
    base.pipeline().load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    found = diffusers_images(folders[fn], base, x, PROMPTS[:1], steps=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    merged = tmp_path / "merged"
    merged.mkdir()
    write_merged(trained, merged)
    whole = type(folders)(tmp_path)
    whole._made[fn] = merged
    found = diffusers_images(
        merged, whole.load(fn, tune="none", guidance=3.0), x, PROMPTS[:1], steps=2
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
