"""One reward's values transformed, and several rewards made one: the fixtures of the sources, or
arithmetic by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forests import by_hand
from hypothesis import given
from hypothesis import strategies as st
from mixkit import batch, close, same, scores
from scipy.stats import rankdata
from torch import Tensor
from toykit import toy

from flowrl.algorithms.credit.advantages import depth_norm, group_norm, mean_centred
from flowrl.algorithms.ema_decays import reset
from flowrl.algorithms.reward_mix.aggregate import (
    advantage_sum,
    by_field,
    gated,
    gdpo,
    log_tame,
    weighted_sum,
)
from flowrl.algorithms.reward_mix.gardo import _doubt, _most_doubted, _next_share, gardo
from flowrl.algorithms.reward_mix.transforms import clip, rank, threshold
from flowrl.core.errors import ConfigError
from flowrl.core.types import Credit, Mixed, RewardBatch, Scores, Tree
from flowrl.cost.meter import Meter
from flowrl.training.trainer import Trainer
from rewards.novelty import cluster_sizes, novelty

NAN = math.nan


def credit_of(s: Scores, **options: Any) -> Credit:
    return lambda reward: group_norm(reward, s.leaf, s.tree, **options)


TWO = {"a": [1.0, 0, 0, 1, 1, 0], "b": [10.0, 0, 5, 4, 4, 4]}


def test_weighted_sum_adds_what_counts() -> None:
    s = scores({"a": [1.0, 2], "b": [10.0, 30], "watched": [NAN, NAN]}, [2, -0.1, 0])
    mixed = weighted_sum(s, same)
    close(mixed, [2 - 1, 4 - 3])
    assert list(mixed.parts) == ["a", "b"]


def test_advantage_sum_and_gdpo_are_the_published_fixture() -> None:
    """Reference fixture of GDPO, numpy float64: two prompts of three images, weights 1 and 0.5,
    nstd1 + 1e-4."""
    s = scores(TWO, [1, 0.5], [0, 0, 0, 1, 1, 1])
    credit = credit_of(s, ddof=1)
    close(advantage_sum(s, credit), [1.654491, -1.077240, -0.577250, 0.577250, 0.577250, -1.154501])
    close(gdpo(s, credit), [1.482025, -0.964948, -0.517077, 0.517077, 0.517077, -1.034154])


def test_with_one_reward_all_three_agree() -> None:
    """A group-normalised advantage has mean 0; whitening then divides by one number."""
    s = scores({"a": [0.1, 0.4, 0.7, 0.9]}, [1])
    credit = credit_of(s, eps=0.0, ddof=1)
    expected = weighted_sum(s, credit).advantage.tolist()
    close(advantage_sum(s, credit), expected)
    close(gdpo(s, credit, eps=0.0), expected)


@pytest.mark.parametrize(
    ("aggregate", "alike"), [(advantage_sum, True), (gdpo, True), (weighted_sum, False)]
)
def test_weights_of_gdpo_are_relative_importances(aggregate: Any, alike: bool) -> None:
    """Scaling one reward by 1/1000 changes a sum of raw rewards, and no sum of advantages."""
    small = {**TWO, "b": [value / 1000 for value in TWO["b"]]}
    one, two = (scores(rows, [1, 1], [0, 0, 0, 1, 1, 1]) for rows in (TWO, small))
    credit = credit_of(one, eps=0.0)
    first, second = (aggregate(s, credit).advantage for s in (one, two))
    assert torch.allclose(first, second, atol=1e-5) == alike


def test_gdpo_whitens_every_node_alike_and_leaves_unscored_ones_at_zero() -> None:
    """Two prompts: a root with two leaves each; the second leaf of the first prompt is not
    scored."""
    tree = by_hand([-1, -1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], group=[0, 1, 0, 0, 1, 1])
    leaf = torch.tensor([2, 3, 4, 5])
    rows = {"a": torch.tensor([1.0, NAN, 3.0, 1.0]), "b": torch.tensor([0.0, NAN, 5.0, 9.0])}
    s = Scores(rows, {"a": 1.0, "b": 0.5}, leaf, tree)
    raw = advantage_sum(s, lambda reward: depth_norm(reward, leaf, tree)).advantage
    white = gdpo(s, lambda reward: depth_norm(reward, leaf, tree)).advantage
    known = raw[torch.tensor([2, 4, 5])].double()
    expected = (raw.double() - known.mean()) / (known.std() + 1e-4)
    expected[3] = 0.0
    torch.testing.assert_close(white, expected.float())


def test_log_tame_is_the_published_fixture() -> None:
    """PaCo's fixture: h = .7071054, .0707105, delta = their mean: only the first is tamed."""
    s = scores({"a": [0.1, 0.9, 0.2, 0.8], "b": [0.5, 0.55, 0.5, 0.45]}, [0.2, 1])
    mixed = log_tame(s, same)
    close(mixed, [0.519062, 0.678371, 0.536464, 0.567557])
    assert mixed.metrics == {"tamed/a": 1.0, "tamed/b": 0.0}
    assert log_tame(s, same, threshold="median").metrics == mixed.metrics
    close(log_tame(s, same, threshold=1.0), weighted_sum(s, same).advantage.tolist())
    assert log_tame(s, same, threshold=0.05).metrics == {"tamed/a": 1.0, "tamed/b": 1.0}


def test_log_tame_refuses_what_has_no_logarithm() -> None:
    s = scores({"a": [-1.0, 5, 0, 0], "b": [0.5, 0.5, 0.5, 0.5]}, [1, 1])
    with pytest.raises(ConfigError, match="'a' gave -1"):
        log_tame(s, same)


def test_gates_open_in_order_of_priority() -> None:
    """By hand: b counts where a > .5, c where a > .5 and b > 2; nothing else gates the gates
    themselves."""
    values = {"c": [1.0, 1, 1, 1], "a": [1.0, 1, 0, 0], "b": [3.0, 1, 3, 1]}
    s = scores(values, [10, 1, 0.1])
    mixed = gated(s, same, above={"a": 0.5, "b": 2.0})
    close(mixed, [1 + 0.3 + 10, 1 + 0.1, 0, 0])
    assert mixed.metrics == {"gate/a": 0.5, "gate/b": 0.5}


def test_a_soft_gate_is_a_sigmoid_and_hardens() -> None:
    s = scores({"a": [0.7, 0.2], "b": [1.0, 1.0]}, [0, 1])
    expected = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(3))]
    close(gated(s, same, above={"a": 0.5}, softness=0.1), expected)
    hard = gated(s, same, above={"a": 0.5}).advantage.tolist()
    close(gated(s, same, above={"a": 0.5}, softness=1e-3), hard)


def test_a_gate_that_was_not_scored_is_neither_open_nor_shut() -> None:
    s = scores({"a": [1.0, NAN, 0.0, 1.0], "b": [1.0, 2.0, 3.0, 4.0]}, [0, 1])
    mixed = gated(s, credit_of(s), above={"a": 0.5})
    known = torch.tensor([1.0, 0.0, 4.0]).double()
    first, *rest = ((known - known.mean()) / (known.std(correction=0) + 1e-4)).tolist()
    close(mixed, [first, 0.0, *rest])


@pytest.mark.parametrize(
    ("aggregate", "options", "part"),
    [
        (gated, {"above": {"quality": 1.0}}, "no reward 'quality' .there is: a, b"),
        (gated, {"above": {"a": 1.0}, "softness": -1.0}, "softness >= 0"),
        (gdpo, {"eps": -1.0}, "eps >= 0"),
    ],
)
def test_mistakes_name_what_is_wrong(aggregate: Any, options: Any, part: str) -> None:
    s = scores(TWO, [1, 1])
    with pytest.raises(ConfigError, match=part):
        aggregate(s, same, **options)


def test_clip_limits_and_keeps_what_was_not_scored() -> None:
    got = clip(torch.tensor([-2.0, 0.5, 9.0, NAN]), batch([0] * 4), low=-1, high=1)
    torch.testing.assert_close(got, torch.tensor([-1.0, 0.5, 1.0, NAN]), equal_nan=True)
    with pytest.raises(ConfigError, match="low < high"):
        clip(torch.zeros(1), batch([0]), low=1, high=1)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.25, 1.0, 7.0, NAN])),
        min_size=1,
        max_size=12,
    )
)
def test_rank_is_scipys_average_rank_within_each_prompt(rows: list[tuple[int, float]]) -> None:
    groups = [g for g, _ in rows]
    values = torch.tensor([v for _, v in rows])
    expected = torch.full_like(values, NAN)
    for g in set(groups):
        mine = torch.tensor([h == g for h in groups]) & ~values.isnan()
        count = int(mine.sum())
        if count:
            ranks = torch.from_numpy(rankdata(values[mine].numpy(), method="average")).float()
            expected[mine] = (ranks - 1) / (count - 1) if count > 1 else 0.5
    torch.testing.assert_close(rank(values, batch(groups)), expected, equal_nan=True)


def test_a_threshold_says_yes_or_no() -> None:
    found = threshold(torch.tensor([0.1, 0.28, 0.5, NAN]), batch([0, 0, 0, 0]), at=0.28)
    assert found[:3].tolist() == [0, 1, 1] and bool(found[3].isnan())


def batch_of(group: torch.Tensor) -> RewardBatch:
    return RewardBatch(torch.zeros(len(group), 0), [], group, [], torch.zeros(len(group)))


def test_a_large_panel_takes_no_square() -> None:
    """8192 images: all pairs would be 256 MiB of float32; a few columns of 8192 numbers are not."""
    values = torch.rand(8192)
    with Meter() as meter:
        rank(values, batch_of(torch.arange(8192) // 8))
    assert meter.peak < 40 * 8 * 8192


# two prompts, a root each with two leaves: nodes 0 and 1 are the roots
TREE: Tree = by_hand([-1, -1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], group=[4, 2, 4, 4, 2, 2])
LEAF = torch.tensor([2, 3, 4, 5])
META = [{"tag": tag} for tag in ("face", "face", "text", "text")]
VALUES = {"a": [1.0, 3, 5, 7], "b": [0.5, 0.1, 0.0, 0.0], "c": [9.0, 9, 9, 8]}
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.0}


def categorised(values: dict[str, list[float]] = VALUES, meta: Any = META) -> Scores:
    rows = {name: torch.tensor(row) for name, row in values.items()}
    return Scores(rows, WEIGHTS, LEAF, TREE, meta)


def credit(reward: torch.Tensor) -> torch.Tensor:
    return group_norm(reward, LEAF, TREE, eps=0.0)


def test_by_hand_on_two_categories() -> None:
    """Within its prompt, a pair has the advantages -1 and 1. `face` counts a half and b three
    times: -.5 + 3 and .5 - 3; `text` counts b not at all and names no a, which has its own weight
    1. Of the watched c nothing is seen."""
    mix = by_field(weights={"face": {"a": 0.5, "b": 3.0}, "text": {"b": 0.0}})
    mixed = mix(categorised(), credit)
    assert mixed.advantage.tolist() == pytest.approx([0, 0, 2.5, -2.5, -1, 1])
    assert mixed.parts["a"].tolist() == pytest.approx([-0.5, 0.5, -1, 1])
    assert mixed.parts["b"].tolist() == pytest.approx([3, -3, 0, 0])
    assert list(mixed.parts) == ["a", "b"]
    # the scale of a reward says nothing: all of b a thousand times as large
    large = {**VALUES, "b": [1000 * value for value in VALUES["b"]]}
    again = mix(categorised(large), credit).advantage
    torch.testing.assert_close(again, mixed.advantage)


def test_without_differences_it_is_advantage_sum() -> None:
    """Empty rows leave each reward its own weight; an image that was not scored has advantage
    0."""
    values = {name: [math.nan, *row[1:]] for name, row in VALUES.items()}
    mix = by_field(weights={"face": {}, "text": {}})
    mixed = mix(categorised(values), credit)
    assert torch.equal(mixed.advantage, advantage_sum(categorised(values), credit).advantage)
    assert float(mixed.advantage[2]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {}}, "expected weights: {category"),
        ({"weights": {"face": {"a": math.inf}, "text": {}}}, "of finite numbers"),
        ({"weights": {"face": {}}}, "category 'text' \\(tag\\), which has no weights"),
        ({"weights": {"face": {}, "text": {}}, "by": "tags"}, "no 'tags' in its record.*tag"),
        ({"weights": {"face": {"d": 1.0}, "text": {}}}, "weights.face: there is no reward 'd'"),
        ({"weights": {"face": {"c": 1.0}, "text": {}}}, "'c' has the weight 0, so it is only"),
        ({"weights": {"face": {"a": 0.0, "b": 0.0}, "text": {}}}, "face: no reward counts"),
    ],
)
def test_what_is_wrong_with_weights_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        by_field(**options)(categorised(), credit)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (
            "{fn: by_field, weights: {odd: {}}}",
            r"training prompt 1 \('a red dot'\) is of the category 'even' \(tag\), which has no",
        ),
        (
            "{fn: by_field, by: kind, weights: {odd: {}}}",
            r"training prompt 1 \('a red dot'\) has no 'kind'.*it has prompt, tag, held_out",
        ),
        ("{fn: by_field, weights: {odd: {}, even: {blue: 1}}}", "there is no reward 'blue'"),
    ],
)
def test_a_list_that_lacks_a_category_is_refused_before_the_model(
    tmp_path: Path, mix: str, message: str
) -> None:
    unread = "model={fn: toykit.unloadable}"
    with pytest.raises(ConfigError, match=message):
        Trainer(toy(tmp_path, unread, f"aggregate={mix}"))


def test_a_run_weighs_by_the_records_of_its_prompts(tmp_path: Path) -> None:
    """Prompts of the tag `even` learn nothing, those of `odd` all: of six prompts three have
    advantages, and a category that is no text is read as one."""
    none = "{odd: {strict: 0.0}, even: {red: 0.0, strict: 1.0}}"
    rewards = "rewards={red: {fn: toykit.redness}, strict: {fn: toykit.same}}"
    changes = (rewards, f"aggregate={{fn: by_field, weights: {none}}}", "train.prompts=6")
    metrics = Trainer(toy(tmp_path, *changes, "train.updates=1")).step()
    # the share of the variance within prompts: all of it is red's
    assert metrics["share/red"] == pytest.approx(1) and metrics["share/strict"] == 0
    assert metrics["trained"] == 3 * 4 * 3
    mix = by_field(weights={"1": {"a": 2.0}, "2": {}}, by="n")
    found = mix(categorised(meta=[{"n": 1}, {"n": 1}, {"n": 2}, {"n": 2}]), credit)
    assert found.parts["a"].tolist() == pytest.approx([-2, 2, -1, 1])


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
    [([1, 0.5, 0.5, 0], [0.8333333, 0, 0, -0.5]), ([1, 0.8, 0.2, 0], [0.8333333, 0.1, -0.3, -0.5])],
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
    gap = _doubt(*(torch.tensor(main), [torch.tensor(aesthetic), torch.tensor(preference)]))
    assert gap.tolist() == [3, -2.5, -0.5, 0]
    assert _most_doubted(gap, 0.1).tolist() == [True, False, False, False]
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
    gap = _doubt(torch.tensor(main), [torch.tensor(strict)])
    assert gap.tolist() == [0.5, 1.5, 1.5, -2.5, -1]
    first, other = (rankdata(-torch.tensor(values)) for values in (main, strict))
    assert gap.tolist() == (other - first).tolist()
    order = [2, 4, 0, 3, 1]
    mixed_up = _doubt(torch.tensor(main)[order], [torch.tensor(strict)[order]])
    assert mixed_up.tolist() == gap[order].tolist()


def test_the_share_follows_the_mean_gap() -> None:
    """The reference's run of the published code, for means 10, 12, 13, 11, 9, 8, 8, 7."""
    share, history, seen = 0.1, list[float](), []
    for level in (10.0, 12.0, 13.0, 11.0, 9.0, 8.0, 8.0, 7.0):
        share = _next_share(share, level, history[-20:], 0.02, 0.2)
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
