"""HPSv2's score of tensors: beside the score of files, its gradient, and SRPO's words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from clipkit import PROMPTS, batch_of, check_no_waits, check_slope, random_images
from weightkit import Weights

from flowrl.core.abilities import differentiable
from flowrl.core.errors import ConfigError, DataError
from rewards._common.words import with_words
from rewards.hpsv2 import hpsv2


@pytest.mark.parametrize("size", [(300, 227), (64, 64), (97, 333), (224, 224)])
def test_scores_of_tensors_are_those_of_files(weights: Weights, size: tuple[int, int]) -> None:
    """Random images have 256 levels, which rounding leaves as they are, and both paths resize
    tensors: the same scores, of any number of images at a time."""
    batch = batch_of(random_images(6, *size), PROMPTS)
    files = hpsv2(**weights.hps)(batch)
    found = hpsv2(**weights.hps, gradient=True, batch=4)(batch)
    torch.testing.assert_close(found, files, atol=2e-6, rtol=0)
    assert found.dtype == torch.float32 and files.std() > 1e-3


def test_the_gradient_is_that_of_finite_differences(weights: Weights) -> None:
    """The score itself is rounded to float32, so this sees the cosines, in float64."""
    reward = hpsv2(**weights.hps, gradient=True)
    reward.towers.model.double()
    check_slope(lambda images: reward.follow(images, PROMPTS[:2]), 1e-4)


def test_it_can_be_differentiated_in_that_mode_alone(weights: Weights) -> None:
    images = random_images(3, 64, 64).requires_grad_()
    batch = batch_of(images, PROMPTS[:3])
    followed, usual = hpsv2(**weights.hps, gradient=True), hpsv2(**weights.hps)
    assert differentiable(followed) and followed(batch).requires_grad
    assert not differentiable(usual) and not usual(batch).requires_grad
    assert not any(weight.requires_grad for weight in followed.towers.model.parameters())
    with pytest.raises(DataError, match="one prompt per image"):
        followed(batch._replace(prompts=PROMPTS[:2]))
    spoilt = images.detach().clone()
    spoilt[1, 0, 3, 4] = torch.nan
    with pytest.raises(DataError, match="NaN"):
        followed(batch_of(spoilt, PROMPTS[:3]))


def test_a_training_call_does_not_wait_for_the_device(weights: Weights) -> None:
    check_no_waits(partial(hpsv2, **weights.hps, gradient=True, batch=2))


def test_words_stand_in_front_of_prompts_in_turn(weights: Weights) -> None:
    """Groups 0, 1, 2, 3 with two words: the first, the second, the first, the second. The score is
    that of the prompt with the word in it, and another than without."""
    prompts = ["a cat", "a dog", "a red circle", "a cat"]
    batch = batch_of(random_images(4, 64, 64), prompts)
    batch = batch._replace(group=torch.arange(4))
    said = ["Real. a cat", "Flat. a dog", "Real. a red circle", "Flat. a cat"]
    assert with_words(batch, ["Real", "Flat"]).prompts == said
    assert with_words(batch, []) is batch
    for gradient in (False, True):
        reward = hpsv2(**weights.hps, words=["Real", " Flat "], gradient=gradient)
        plain = hpsv2(**weights.hps, gradient=gradient)
        assert torch.equal(reward(batch), plain(batch._replace(prompts=said)))
        assert not torch.equal(reward(batch), plain(batch))


@pytest.mark.parametrize("words", [[], [""], ["Real", 3], "Real"])
def test_words_that_are_none_are_refused(weights: Weights, words: Any) -> None:
    with pytest.raises(ConfigError, match="expected a list of words"):
        hpsv2(**weights.hps, words=words)
