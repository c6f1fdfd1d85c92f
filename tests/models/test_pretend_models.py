"""Every family's pipeline on a pretend device: loaded, sampled with, differentiated, decoded."""

from __future__ import annotations

import pytest
import torch
from adapterkit import GUIDED, PROMPTS, Folders, adapter_of, load_folder
from pretendkit import pretend_cuda

from flowrl.algorithms.plans.windows import full
from flowrl.algorithms.rollout.engine import rollout
from flowrl.algorithms.transitions import cps

FAMILIES = ["sd3.5", "flux", "sd15", "sdxl", "wan", "qwen_image", "z_image", "flux2", "flux2_klein"]
# diffusers copies the length of Qwen's texts to the device; Z-Image's network wants texts of their
# own lengths, which the host reads
WAITS = {"qwen_image": 1, "z_image": 1}
SIZE = (32, 32)


@pytest.mark.parametrize("tune", ["lora", "full"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pipeline_works_there(folders: Folders, name: str, tune: str) -> None:
    """In bfloat16, under full tuning as CUDA's autocast. Waits of a network call after the first,
    forward and backward alike: counted."""
    with pretend_cuda() as seen:
        options = {**GUIDED[adapter_of(name)], "device": "cuda", "dtype": "bfloat16"}
        model = load_folder(name, folders[name], tune=tune, **options)
        cond = model.encode(PROMPTS)
        # sampling, whose parts are all on the device
        made = rollout(
            model,
            cond,
            full(0, steps=3, noise_scale=0.5),
            cps,
            sigmas=model.sigmas(3, *SIZE),
            shape=model.latent_shape(*SIZE),
            group_size=1,
            generators=[torch.Generator().manual_seed(seed) for seed in range(3)],
        )
        x, sigma = made.x[made.leaf], torch.full((3,), 0.7, device="cuda")
        # a call without and one with a gradient
        for wanted in (False, True):
            seen.clear()
            with torch.set_grad_enabled(wanted):
                v = model.velocity(x, sigma, cond)
                if wanted:
                    v.square().mean().backward()
            assert seen.waits.total() == WAITS.get(name, 0), seen.waits
        grads = [p.grad for p in model.trainable().values() if p.grad is not None]
        images = model.decode(x)
    assert {t.device.type for t in (v, images, made.log_prob, *cond.values(), *grads)} == {"cuda"}
    assert len(grads) > len(model.trainable()) / 2
