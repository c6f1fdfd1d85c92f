"""The look of images, the drift of the velocity, and which prompts teach: closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from flowrl.evaluation.image_statistics import grid_energy, looks_of, saturation, sharpness
from flowrl.evaluation.reward_metrics import prompt_entropy
from flowrl.evaluation.velocity_drift import Given, take, velocity_drift
from flowrl.models.toy import LinearFlow


def stripes(period: int, size: int = 40) -> torch.Tensor:
    """Return an image [1, 3, size, size] with a bright column every `period` pixels."""
    image = torch.zeros(1, 3, size, size)
    image[..., ::period] = 1
    return image


def test_looks_by_hand() -> None:
    grey, red = torch.full((1, 3, 16, 16), 0.3), torch.zeros(1, 3, 16, 16)
    red[:, 0] = 1
    assert saturation(torch.cat([grey, red])).tolist() == [0, 1]
    assert sharpness(grey).tolist() == [0] and grid_energy(grey).tolist() == [0]
    # one bright pixel: |-4| on it and 1 on each of four neighbours, of 14 x 14 inside
    dot = torch.zeros(1, 3, 16, 16)
    dot[..., 8, 8] = 1
    assert sharpness(dot).item() == pytest.approx(8 / 14**2)


def test_grid_energy() -> None:
    """Columns 8 apart have all of their energy at multiples of 1/8 along one axis, and none along
    the other; columns 5 apart share no frequency with them but the mean and 1 (in 40 pixels)."""
    assert grid_energy(stripes(8)).item() == pytest.approx(0.5)
    checks = torch.maximum(stripes(8), stripes(8).transpose(2, 3))
    assert grid_energy(checks).item() == pytest.approx(1.0)
    assert grid_energy(stripes(5)).item() == pytest.approx(0.0, abs=1e-9)
    # white noise spreads it over all 20 frequencies, of which 4 are multiples
    noise = torch.rand(400, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    assert grid_energy(noise).mean().item() == pytest.approx(0.2, abs=0.03)


def test_the_first_finished_image_of_each_prompt_is_looked_at() -> None:
    images = torch.zeros(5, 3, 16, 16, dtype=torch.uint8)
    images[2, 0] = 255  # the second prompt's first finished image
    images[0, 0] = 255  # not finished
    looks = looks_of(images, torch.tensor([0, 0, 1, 1, 0]), torch.tensor([1, 0, 0, 0, 0]))
    assert looks[:, 0].tolist() == [0, 1] and looks.shape == (2, 3)


def test_drift_of_a_scaled_velocity() -> None:
    """The toy's velocity is linear in its parameters: 1.5 times them moves it by half its size."""
    model = LinearFlow(scale=0.3)
    probe = take(model, Given(["a red dot", "a blue dot"]), height=16, width=16, steps=4, seed=0)
    assert len(probe.x) == 4 and velocity_drift(model, probe) == 0
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.mul_(1.5)
    assert velocity_drift(model, probe) == pytest.approx(0.5, rel=1e-5)


def test_prompt_entropy() -> None:
    """Shares 1/2, 1/4 and 1/4: 1.5 bits of log2(3)."""
    group = torch.tensor([0, 0, 1, 2])
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert prompt_entropy(advantage, group) == pytest.approx(1.5 / math.log2(3))
    assert prompt_entropy(torch.tensor([1.0, 1, 2, 2]), group) == pytest.approx(1.0)
    assert prompt_entropy(torch.tensor([0.0, 0, 2, 0]), group) == 0
    assert (
        prompt_entropy(torch.zeros(4), group) == 0 == 1 - prompt_entropy(torch.ones(2), group[:2])
    )
