"""Methods against collapse and hacking: the numbers of their published code, as the reference has
them."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import rankdata
from torch import Tensor

from flowrl.algorithms.credit.estimators import mean_centred
from flowrl.algorithms.ema_decays import reset
from flowrl.algorithms.reward_mix._gate import doubt, most_doubted, next_share
from flowrl.algorithms.reward_mix.aggregate import gardo
from flowrl.core.errors import ConfigError
from flowrl.core.types import Mixed, Scores, Tree
from rewards.novelty import cluster_sizes, novelty

FEATURES = torch.tensor([[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]])


def unlike(features: Tensor, mode: str = "nearest", width: float = 0.2) -> Tensor:
    """Score features without a network."""
    bare = object.__new__(novelty)
    bare.mode, bare.width, bare.most = mode, width, 8  # type: ignore[assignment]
    return bare.among(features.float())


def mixed(aggregate: gardo, **values: list[float]) -> Mixed:
    """Mix the rewards of one prompt's four images; only `main` counts."""
    leaf = torch.arange(4)
    tree = Tree(torch.full_like(leaf, -1), leaf * 0, torch.zeros(4), leaf * 0)
    tensors = {name: torch.tensor(row) for name, row in values.items()}
    weights = {name: float(name == "main") for name in tensors}
    scores = Scores(tensors, weights, leaf, tree)
    out = aggregate(scores, lambda reward: mean_centred(reward, leaf, tree))
    aggregate.update(scores)
    return out


@pytest.mark.parametrize(
    ("reward", "wanted"),
    [
        ([1, 0.5, 0.5, 0], [0.8333333, 0, 0, -0.5]),
        ([1, 0.8, 0.2, 0], [0.8333333, 0.1, -0.3, -0.5]),
    ],
)
def test_gardo_pays_what_is_unlike(reward: list[float], wanted: list[float]) -> None:
    """The reference's run of the published code: n = .2, .04, .04, .2."""
    n = unlike(FEATURES)
    torch.testing.assert_close(n, torch.tensor([0.2, 0.04, 0.04, 0.2]))
    found = mixed(gardo(novelty="n", doubted_by=[]), main=reward, n=n.tolist())
    torch.testing.assert_close(found.advantage, torch.tensor(wanted))


def test_an_unscored_image_does_not_count_in_the_mean_novelty() -> None:
    """Closed form: the three that are scored have the mean .28 / 3, so .4 * .2 / (.28 / 3)."""
    missing = float("nan")
    reward, novelty = [1, 0.5, 0.3, missing], [0.2, 0.04, 0.04, missing]
    found = mixed(gardo(novelty="n", doubted_by=[]), main=reward, n=novelty)
    torch.testing.assert_close(found.advantage, torch.tensor([6 / 7, -0.1, -0.3, 0]))


def test_an_iteration_without_scores_is_not_followed() -> None:
    """A NaN among the levels would hide every later one: max and min of it are NaN or not by
    place."""
    missing, made = float("nan"), gardo(novelty="n", doubted_by=["other"])
    reward = {"n": [1.0] * 4, "other": [0.1, 0.8, 0.9, 0.3]}
    mixed(made, main=[0.9, 0.2, 0.6, 0.4], **reward)
    before = made.share, made.levels
    mixed(made, main=[missing] * 4, **reward)
    assert (made.share, made.levels) == before and len(made.levels) == 1


def test_images_that_are_all_alike_keep_their_advantage() -> None:
    found = mixed(gardo(novelty="n", doubted_by=[]), main=[1, 0.5, 0.5, 0], n=[0.0] * 4)
    torch.testing.assert_close(found.advantage, torch.tensor([0.5, 0, 0, -0.5]))


def test_gardo_doubts_what_only_its_reward_likes() -> None:
    """The reference's case: by the stated aim image 1 is doubted; the published sign, the negative
    of this gap, is (-3, 2.5, .5, 0). The penalty's mean over four is that of the one."""
    main, aesthetic, preference = [0.9, 0.2, 0.6, 0.4], [5, 6, 5.5, 5.2], [0.1, 0.8, 0.9, 0.3]
    gap = doubt(*(torch.tensor(main), [torch.tensor(aesthetic), torch.tensor(preference)]))
    assert gap.tolist() == [3, -2.5, -0.5, 0]
    assert most_doubted(gap, 0.1).tolist() == [True, False, False, False]
    both = {"aesthetic": aesthetic, "preference": preference}
    made = gardo(novelty="n", doubted_by=[*both])
    found = mixed(made, main=main, n=[1.0] * 4, **both)
    assert found.gate is not None and found.gate.tolist() == [4, 0, 0, 0]
    again = gardo(novelty="n", doubted_by=[*both])
    again.load_state_dict(made.state_dict())
    assert (again.share, again.levels) == (made.share, made.levels) == (0.1, [1.5])


def test_equal_images_are_doubted_equally_wherever_they_stand_in_the_batch() -> None:
    """By hand: a reward of 0 and 1 ranks its two right images 1.5 and its three wrong ones 4; the
    main reward's two that are equal share 2.5. scipy.stats.rankdata has the same ranks."""
    main, strict = [0.9, 0.8, 0.8, 0.3, 0.1], [1.0, 0.0, 0.0, 1.0, 0.0]
    gap = doubt(torch.tensor(main), [torch.tensor(strict)])
    assert gap.tolist() == [0.5, 1.5, 1.5, -2.5, -1]
    first, other = (rankdata(-torch.tensor(values)) for values in (main, strict))
    assert gap.tolist() == (other - first).tolist()
    order = [2, 4, 0, 3, 1]
    mixed_up = doubt(torch.tensor(main)[order], [torch.tensor(strict)[order]])
    assert mixed_up.tolist() == gap[order].tolist()


def test_the_share_follows_the_mean_gap() -> None:
    """The reference's run of the published code, for means 10, 12, 13, 11, 9, 8, 8, 7."""
    share, history, seen = 0.1, list[float](), []
    for level in (10.0, 12.0, 13.0, 11.0, 9.0, 8.0, 8.0, 7.0):
        share = next_share(share, level, history[-20:], 0.02, 0.2)
        history.append(level)
        seen.append(share)
    wanted = [0.1, 0.11, 0.121, 0.121, 0.1089, 0.09801, 0.09801, 0.088209]
    assert seen == pytest.approx(wanted, abs=1e-12)


def test_the_reference_is_refreshed() -> None:
    assert [reset(step, every=3) for step in range(1, 7)] == [1, 1, 0, 1, 1, 0]


def test_clusters_of_a_prompt() -> None:
    """DiverseGRPO's example: clusters of 4, 1 and 1 of 6 images; one cluster is a bonus of 1."""
    angle = torch.tensor([0.0, 0.01, 0.02, 0.03, 1.5, 3.1])
    features = torch.stack([angle.cos(), angle.sin()], 1)
    far = [math.sqrt(1.5)] * 4 + [math.sqrt(6)] * 2
    torch.testing.assert_close(unlike(features, "cluster"), torch.tensor(far))
    assert unlike(features[:4], "cluster").tolist() == [1] * 4
    assert cluster_sizes(torch.zeros(1, 1), width=0.2, most=8).tolist() == [1]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_images_that_are_all_unlike_are_clusters_of_their_own(count: int) -> None:
    """At five widths and more from each other no affinity is above exp(-12.5)."""
    for seed in range(20):
        made = torch.Generator().manual_seed(seed)
        distance = (1 + torch.rand(count, count, generator=made)).fill_diagonal_(0)
        sizes = cluster_sizes((distance + distance.T) / 2, width=0.2, most=8)
        assert sizes.tolist() == [1] * count


def test_options_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no reward 'n'"):
        mixed(gardo(novelty="n", doubted_by=[]), main=[1, 0, 0, 0])
    with pytest.raises(ConfigError, match="least <= share"):
        gardo(novelty="n", doubted_by=[], share=0.5)
    with pytest.raises(ConfigError, match="width > 0"):
        novelty(width=0.0)
