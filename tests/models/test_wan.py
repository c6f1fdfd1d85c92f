"""Wan beyond the contract battery: its grid and times, its frames, what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from adapterkit import Folders
from diffusers import UniPCMultistepScheduler
from modelkit import edit
from tinywan import UNIPC

from flowrl.algorithms.transitions import flow_sde
from flowrl.core.errors import ModelError
from flowrl.models.wan import wan

# shift 3, ten steps: diffusers 0.42.1, as the reference has it to seven digits
SIGMAS = [0.999999, 0.964324, 0.9231657, 0.8751562, 0.8184296]
SIGMAS += [0.7503748, 0.6672218, 0.5633196, 0.4297945, 0.2518722, 0.0]
TIMES = [999, 964, 923, 875, 818, 750, 667, 563, 429, 251]


def test_grid_and_times_are_the_published_ones(folders: Folders) -> None:
    model = folders.load("wan", tune="none")
    sigmas = model.sigmas(10, 32, 32)
    torch.testing.assert_close(sigmas, torch.tensor(SIGMAS), rtol=0, atol=1e-6)
    assert model.time(sigmas[:-1]).tolist() == TIMES


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 7.0])
def test_times_are_the_schedulers_for_any_number_of_steps(folders: Folders, shift: float) -> None:
    """From float32 sigmas. Without a shift, 1000 sigma may be a whole number, up to rounding in
    float64, which the scheduler cuts off by one: once here, for 3 steps."""
    model = folders.load("wan", tune="none", flow_shift=shift)
    scheduler = UniPCMultistepScheduler(**(UNIPC | {"flow_shift": shift}))
    other = 0
    for steps in range(1, 61):
        scheduler.set_timesteps(steps)
        sigmas = model.sigmas(steps, 32, 32)
        assert torch.equal(sigmas, scheduler.sigmas)
        other += int((model.time(sigmas[:-1]) != scheduler.timesteps).sum())
    assert other == 0 or shift == 1.0


def test_noise_at_the_first_sigma_is_that_of_pure_noise(folders: Folders) -> None:
    """sigma .999999 counts as 1; Flow-GRPO's formula gives a std of 170 there at a = 0.9."""
    sigmas = folders.load("wan", tune="none").sigmas(10, 32, 32)
    x = torch.ones(1, 4)
    scale = torch.tensor([0.9])
    step = flow_sde(x, 0.1 * x, sigmas[:1], sigmas[1:2], scale)
    exact = flow_sde(x, 0.1 * x, torch.ones(1), sigmas[1:2], scale)
    torch.testing.assert_close(step.std, exact.std, rtol=1e-4, atol=0)
    torch.testing.assert_close(step.mean, exact.mean, rtol=1e-4, atol=1e-4)
    # g = a sqrt(sigma / (1 - sigma_next)), std = g sqrt(1 - sigma_next)
    assert float(step.std) == pytest.approx(0.9, rel=1e-4)


def test_frames_that_the_vae_cannot_take_are_refused_at_load(folders: Folders) -> None:
    for frames, near in ((2, "1 or 5"), (6, "5 or 9"), (80, "77 or 81")):
        message = f"model.frames: .* multiple of 4 frames, got {frames}; take {near}"
        with pytest.raises(ModelError, match=message):
            wan(str(folders["wan"]), device="cpu", frames=frames)


def test_latents_are_where_decoding_starts(folders: Folders) -> None:
    """The inverse scale and the order of axes: what the VAE itself makes of the pixels."""
    model = folders.load("wan", tune="none", frames=9, decode_batch=1)
    videos = torch.rand(2, 9, 3, 16, 32, generator=torch.Generator().manual_seed(0))
    latents = model.latents(videos)
    assert latents.shape == (2, *model.latent_shape(16, 32))
    vae = model.pipeline().vae
    with torch.no_grad():
        raw = vae.encode(2 * videos.transpose(1, 2) - 1).latent_dist.mode()
        again = vae.decode(raw).sample.transpose(1, 2) / 2 + 0.5
        torch.testing.assert_close(model.decode(latents), again, rtol=0, atol=1e-5)
    image = folders.load("wan", tune="none", frames=1)
    assert image.decode(image.latents(videos[:, 0])).shape == (2, 3, 16, 32)


def test_other_schedulers_and_channels_are_refused(folders: Folders, tmp_path: Path) -> None:
    file = "scheduler/scheduler_config.json"
    for change, message in (
        (edit(file, use_flow_sigmas=False), "expected UniPC with flow_prediction"),
        (edit(file, prediction_type="epsilon"), "got one that predicts epsilon"),
        (edit(file, use_karras_sigmas=True), "got one with use_karras_sigmas"),
    ):
        folder = tmp_path / message.replace(" ", "-")
        shutil.copytree(folders["wan"], folder)
        change(folder)
        with pytest.raises(ModelError, match=message):
            wan(str(folder), device="cpu", frames=5)
