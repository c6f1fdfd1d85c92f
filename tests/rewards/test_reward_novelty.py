"""Novelty by clusters: groups larger than eight, an upper bound on clusters, an image alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowrl.core.errors import ConfigError
from rewards._common.clusters import cluster_sizes
from rewards.novelty import novelty


def score(features: Tensor, mode: str = "cluster", most: int | None = None) -> Tensor:
    """Score features without a network."""
    bare = object.__new__(novelty)
    bare.mode, bare.width, bare.most = mode, 0.2, most  # type: ignore[assignment]
    return bare.among(features)


@pytest.mark.parametrize("count", [9, 16, 24])
def test_every_image_of_a_large_group_can_be_a_cluster_of_its_own(count: int) -> None:
    """By hand: orthogonal features are N clusters of 1, so sqrt(N / 1); 4 for N = 16."""
    expected = torch.full((count,), count**0.5)
    torch.testing.assert_close(score(torch.eye(count)), expected)


def test_unlike_images_and_copies_in_a_large_group() -> None:
    """By hand: 12 clusters of 1 and one of 12 of 24 images: sqrt(24) = 4.90, sqrt(2) = 1.41."""
    features = torch.eye(13)[[*range(12), *[12] * 12]]
    expected = torch.tensor([24**0.5] * 12 + [2**0.5] * 12)
    torch.testing.assert_close(score(features), expected)


def test_most_bounds_the_clusters() -> None:
    """Three clusters of 4 of 12 images stay where 8 are allowed, 4 each; with 2 allowed there are
    two. Of 16 unlike images 8 clusters are made, not one: their sizes n give 8 = sum of 1 / n."""
    three = torch.eye(3).repeat_interleave(4, 0)
    assert score(three, most=8).tolist() == pytest.approx([3**0.5] * 12)
    distance = 1 - three @ three.T
    assert _clusters(cluster_sizes(distance, width=0.2, most=2)) == pytest.approx(2)
    unlike = 1 - torch.eye(16, dtype=torch.float64)
    assert _clusters(cluster_sizes(unlike, width=0.2, most=8)) == pytest.approx(8)


def _clusters(sizes: Tensor) -> float:
    return float((1 / sizes).sum())


def test_an_image_alone() -> None:
    """It is a cluster of one image of one, sqrt(1 / 1); it has no other to be unlike."""
    assert score(torch.ones(1, 3)).tolist() == [1]
    assert score(torch.ones(1, 3), mode="nearest").tolist() == [0]


def test_no_cluster_is_no_bound() -> None:
    with pytest.raises(ConfigError, match="most >= 1 or null, got .*most=0"):
        novelty(most=0)
