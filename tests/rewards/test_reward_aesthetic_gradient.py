"""The aesthetic score of tensors: beside the score of files, and its gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from clipkit import MEAN, PROMPTS, STD, batch_of, check_no_waits, check_slope, random_images
from tiny import tiny_sd15
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision
from weightkit import Weights

from flowrl.config.load import load_config
from flowrl.core.abilities import differentiable
from flowrl.core.errors import ConfigError, DataError
from flowrl.training.trainer import Trainer
from rewards._common.pixels import shortest_tensors
from rewards.aesthetic import aesthetic, collapse

SIZES = [(300, 227), (512, 512), (64, 64), (97, 333), (224, 224)]


def by_torchvision(images: Tensor) -> Tensor:
    """Resize and crop tensors as ReFL's code does, with antialiasing."""
    bicubic = InterpolationMode.BICUBIC
    return vision.center_crop(vision.resize(images, [224], bicubic, antialias=True), [224])


@pytest.mark.parametrize("size", SIZES)
def test_scores_of_tensors_are_near_those_of_files(weights: Weights, size: tuple[int, int]) -> None:
    """Expected: torchvision's resize of tensors and open_clip's embedding, through the affine map;
    beside PIL's path within .005, where images differ by .05 or more. 224 pixels are not resized:
    both paths see the same."""
    batch = batch_of(random_images(6, *size), PROMPTS)
    pixels = by_torchvision(batch.images)
    torch.testing.assert_close(shortest_tensors(batch.images, 224), pixels, atol=1e-6, rtol=0)
    with torch.no_grad():
        embedding = weights.wide.model.encode_image(vision.normalize(pixels, MEAN, STD)).double()
    w, b = collapse(weights.mlp)
    expected = embedding / embedding.norm(dim=-1, keepdim=True) @ w + b
    found = aesthetic(**weights.aesthetic, gradient=True, batch=4)(batch)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    near = 5e-3 if size != (224, 224) else 2e-5
    files = aesthetic(**weights.aesthetic)(batch)
    torch.testing.assert_close(found, files, atol=near, rtol=0)
    assert found.std() > 10 * near and found.dtype == torch.float32


def test_the_gradient_is_that_of_finite_differences(weights: Weights) -> None:
    reward = aesthetic(**weights.aesthetic, gradient=True)
    reward.towers.model.double()
    check_slope(reward.follow, 1e-3)


def test_it_can_be_differentiated_in_that_mode_alone(weights: Weights) -> None:
    """An ascent along the gradient raises the score, of a batch in parts too; the usual mode rounds
    images and says so. The weights get no gradient."""
    followed = aesthetic(**weights.aesthetic, gradient=True, batch=2)
    assert differentiable(followed)
    images = random_images(3, 64, 64).requires_grad_()
    batch = batch_of(images, PROMPTS[:3])
    before = followed(batch)
    (gradient,) = torch.autograd.grad(before.sum(), images)
    unit = gradient / gradient.flatten(1).norm(dim=1)[:, None, None, None]
    with torch.no_grad():
        after = followed(batch_of(images + 0.5 * unit, PROMPTS[:3]))
    assert (after > before + 0.01).all()
    assert not any(weight.requires_grad for weight in followed.towers.model.parameters())
    usual = aesthetic(**weights.aesthetic)
    assert not differentiable(usual) and not usual(batch).requires_grad
    spoilt = images.detach().clone()
    spoilt[1, 0, 3, 4] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        followed(batch_of(spoilt, PROMPTS[:3]))


def test_a_training_call_does_not_wait_for_the_device(weights: Weights) -> None:
    check_no_waits(partial(aesthetic, **weights.aesthetic, gradient=True, batch=2))


@pytest.mark.parametrize("name", ["sd15/draft", "sd15/align_prop"])
def test_a_public_config_trains_along_it(weights: Weights, tmp_path: Path, name: str) -> None:
    """One iteration with a tiny Stable Diffusion and a tiny CLIP: the trained images have the
    scores of the rollout's, which were rounded to 8 bits, and LoRA moves. Without `gradient` the
    config is refused in words."""
    (tmp_path / "p.txt").write_text("a red fox\na blue cat\n")
    small = [
        f"model.path={tiny_sd15(tmp_path / 'sd')}",
        "model.dtype=float32",
        "image={height: 16, width: 16}",
        f"prompts={{train: {tmp_path}/p.txt, test: {tmp_path}/p.txt}}",
        "plan.steps=3",
        "train.prompts=2",
        *(f"rewards.aesthetic.{key}={value}" for key, value in weights.aesthetic.items()),
    ]
    with pytest.raises(ConfigError, match="aesthetic and hpsv2 with gradient: true"):
        Trainer(load_config(name, [*small, "rewards.aesthetic.gradient=false"]))
    trainer = Trainer(load_config(name, small))
    before = [weight.detach().clone() for weight in trainer.params.values()]
    metrics = trainer.step()
    assert metrics["image_reward"] == pytest.approx(metrics["reward/aesthetic"], abs=0.02)
    pairs = zip(before, trainer.params.values(), strict=True)
    assert metrics["grad_norm"] > 0 and any(not torch.equal(*pair) for pair in pairs)
