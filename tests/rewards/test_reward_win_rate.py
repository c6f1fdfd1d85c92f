"""Rewards of comparisons: win rates within a group (the published example, rank statistics, biased
and failing judges, who may judge), people's votes, and novelty by clusters."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import rankdata
from serving import batch_of as images_of
from serving import random_images
from torch import Tensor
from toykit import apprentice, toy

from flowrl.algorithms.credit.advantages import group_norm
from flowrl.config.calls import Call
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import Reward, RewardBatch, Source, Tree
from flowrl.evaluation.votes import VotePair, append_vote, questions
from flowrl.training.trainer import Trainer
from rewards._common.pairs import _ring, some_pairs, verdict
from rewards.jpeg import jpeg
from rewards.novelty import cluster_sizes, novelty
from rewards.votes import votes
from rewards.win_rate import win_rate

Rule = Callable[[int, int], float]


def batch_of(group: list[int], ids: list[int] | None = None) -> RewardBatch:
    """Make 2x2 images whose red level is the image's number, so that a judge knows it."""
    numbers = torch.tensor(ids or list(range(len(group))), dtype=torch.float32) / 255
    images = numbers[:, None, None, None].expand(-1, 3, 2, 2)
    meta: list[dict[str, Any]] = [{"number": number} for number in group]
    prompts = [f"prompt {number}" for number in group]
    return RewardBatch(images, prompts, torch.tensor(group), meta, torch.zeros(len(group)))


def number_of(images: Tensor) -> list[int]:
    """Read the numbers of images."""
    return [round(float(image[0, 0, 0]) * 255) for image in images]


class Judge:
    """Compare images by a rule on their numbers, and keep what was asked."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.calls: list[list[tuple[int, int]]] = []
        self.words: list[tuple[str, int]] = []

    def compare(
        self, first: Tensor, second: Tensor, prompts: list[str], meta: list[dict[str, Any]]
    ) -> Tensor:
        pairs = list(zip(number_of(first), number_of(second), strict=True))
        self.calls.append(pairs)
        numbers = [record["number"] for record in meta]
        self.words = list(zip(prompts, numbers, strict=True))
        return torch.tensor([self.rule(a, b) for a, b in pairs])


class Scorer:
    """Score an image by a table on its number."""

    def __init__(self, table: list[float]) -> None:
        self.table = table

    def __call__(self, batch: RewardBatch) -> Tensor:
        return torch.tensor([self.table[n] for n in number_of(batch.images)])


def with_judge(judge: Any, **arguments: Any) -> win_rate:
    """Return a win rate that asks `judge`."""
    reward = win_rate(judge={"fn": "jpeg"}, **arguments)
    reward.judge = judge
    return reward


NAN = float("nan")
PUBLISHED = {(0, 1): 1.0, (0, 2): 0.0, (0, 3): 1.0, (1, 2): 1.0, (1, 3): 0.5, (2, 3): 1.0}


def fair(a: int, b: int) -> float:
    return PUBLISHED[a, b] if a < b else 1 - PUBLISHED[b, a]


def higher(a: int, b: int) -> float:
    return float(a > b)


def first_place(a: int, b: int) -> float:
    return 1.0


@pytest.mark.parametrize("swap", [True, False])
def test_the_published_example(swap: bool) -> None:
    """Worked example of Pref-GRPO's rule (rates rounded to 3 places, std with n - 1)."""
    rate = with_judge(Judge(fair), swap=swap)(batch_of([0] * 4))
    assert rate.dtype == torch.float32
    torch.testing.assert_close(rate, torch.tensor([2 / 3, 1 / 2, 2 / 3, 1 / 6]))
    rounded = rate.double().mul(1000).round() / 1000
    advantage = (rounded - rounded.mean()) / (rounded.std() + 1e-8)
    expected = torch.tensor([0.707460, -0.001061, 0.707460, -1.413860], dtype=torch.float64)
    torch.testing.assert_close(advantage, expected, atol=1e-6, rtol=0)
    # without the pair (0, 1): 0 has a loss and a win, 1 a win and a tie; 2 and 3 as before
    hides = Judge(lambda a, b: NAN if (a, b) == (0, 1) else fair(a, b))
    rate = with_judge(hides, swap=swap)(batch_of([0] * 4))
    torch.testing.assert_close(rate, torch.tensor([1 / 2, 3 / 4, 2 / 3, 1 / 6]))


PLACE = st.integers(0, 13)
TABLES = st.dictionaries(st.tuples(PLACE, PLACE), st.floats(0, 1, width=32))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=14), TABLES, st.booleans())
def test_rates_of_a_group_sum_to_half_its_size(
    group: list[int], table: dict[tuple[int, int], float], swap: bool
) -> None:
    """G (G - 1) / 2 pairs hand out one win each, over G - 1: G / 2, however biased the judge."""
    rate = with_judge(Judge(lambda a, b: table.get((a, b), 1.0)), swap=swap)(batch_of(group))
    for number in set(group):
        own = rate[torch.tensor(group) == number]
        if len(own) == 1:
            assert bool(own.isnan().all())
        else:
            assert float(own.sum()) == pytest.approx(len(own) / 2, abs=1e-5)
            assert float(own.min()) >= 0 and float(own.max()) <= 1


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_a_scorer_gives_ranks(scores: list[int], random: Any) -> None:
    """Oracle: scipy's mean ranks; an image of rank r beats r - 1 of the G - 1 others."""
    order = list(range(len(scores)))
    random.shuffle(order)
    rate = with_judge(Scorer([float(s) for s in scores]))(batch_of([7] * len(scores), order))
    expected = (rankdata([scores[i] for i in order]) - 1) / (len(scores) - 1)
    torch.testing.assert_close(rate.double(), torch.tensor(expected), atol=1e-6, rtol=0)


def test_groups_do_not_meet_and_all_pairs_go_in_one_call() -> None:
    """A judge that takes places gets each image once."""

    class Places(Judge):
        def compare_pairs(
            self, images: Tensor, first: Tensor, second: Tensor, *words: list[Any]
        ) -> Tensor:
            assert len(images) == 5
            return super().compare(images[first], images[second], *words)

    forward = [(0, 2), (0, 4), (1, 3), (2, 4)]
    words = [("prompt 5", 5), ("prompt 5", 5), ("prompt 2", 2), ("prompt 5", 5)]
    for judge in (Judge(higher), Places(higher)):
        rate = with_judge(judge)(batch_of([5, 2, 5, 2, 5]))
        assert rate.tolist() == [0, 0, 0.5, 1, 1]  # 0 < 2 < 4 in one group, 1 < 3 in the other
        assert judge.calls == [forward + [(b, a) for a, b in forward]]
        assert judge.words == 2 * words


def test_who_is_shown_first_matters_to_a_biased_judge_only() -> None:
    order = [3, 1, 0, 2]
    batch, shuffled = batch_of([0] * 4), batch_of([0] * 4, order)
    for swap, rule, same in (
        (True, fair, True),
        (True, first_place, True),
        (False, fair, True),
        (False, first_place, False),
    ):
        rate = with_judge(Judge(rule), swap=swap)
        assert torch.equal(rate(batch)[torch.tensor(order)], rate(shuffled)) == same
    assert with_judge(Judge(first_place))(batch_of([0] * 5)).tolist() == [0.5] * 5
    # one order: image i of 5 is shown first to the 4 - i after it
    once = with_judge(Judge(first_place), swap=False)(batch_of([0] * 5))
    assert once.tolist() == [1, 0.75, 0.5, 0.25, 0]


def test_both_orders_are_averaged() -> None:
    for forward, backward, expected in (
        (1.0, 0.0, 1.0),  # both name the first
        (0.0, 1.0, 0.0),
        (1.0, 1.0, 0.5),  # both name the one shown first
        (1.0, 0.5, 0.75),  # a win and a tie
        (0.9, 0.2, 0.85),  # shares: mean of .9 and 1 - .2
        (0.9, 0.7, 0.5),  # shares that name different winners, .9 and .3
        (0.5, 0.5, 0.5),
    ):
        judge = Judge(lambda a, b: forward if a < b else backward)  # noqa: B023 - used at once
        rate = with_judge(judge)(batch_of([0, 0]))
        torch.testing.assert_close(rate, torch.tensor([expected, 1 - expected]))


def test_an_image_without_an_answer_or_alone_is_not_scored() -> None:
    silent = Judge(lambda a, b: NAN if 2 in (a, b) else float(a > b))
    rate = with_judge(silent)(batch_of([0, 0, 0]))
    assert rate[:2].tolist() == [0, 1] and bool(rate[2].isnan())
    scored = with_judge(Scorer([3.0, NAN, 3.0, 1.0]))(batch_of([0] * 4))
    assert scored[[0, 2, 3]].tolist() == [0.75, 0.75, 0] and bool(scored[1].isnan())
    out = verdict(torch.tensor([2.0, 1, 1, NAN, 1]), torch.tensor([1.0, 2, 1, 1, NAN]))
    assert out[:3].tolist() == [1, 0, 0.5] and bool(out[3:].isnan().all())
    # nobody is asked about images that are alone
    judge = Judge(first_place)
    assert bool(with_judge(judge)(batch_of([0, 1, 2])).isnan().all()) and judge.calls == []
    for options in ({}, {"max_pairs": 3}):
        assert with_judge(judge, **options)(batch_of([])).shape == (0,)


@pytest.mark.parametrize("size", range(2, 13))
def test_the_ring_has_every_pair_once_and_no_one_is_left_out(size: int) -> None:
    ring = _ring(size)
    pairs = torch.combinations(torch.arange(size), 2).tolist()
    assert sorted(sorted(pair) for pair in ring) == pairs
    for limit in range((size + 1) // 2, len(ring) + 1):
        times = torch.bincount(torch.tensor(ring[:limit]).flatten(), minlength=size)
        assert int(times.min()) >= 1 and int(times.max()) - int(times.min()) <= 2


def test_the_choice_of_pairs_follows_the_images() -> None:
    ids = list(range(16))
    batch, back = batch_of([0] * 8 + [1] * 8), batch_of([1] * 8 + [0] * 8, ids[::-1])

    def chosen(batch: RewardBatch, seed: int) -> list[tuple[int, int]]:
        first, second = some_pairs(batch.group, batch.images, 10, seed, option="it")
        a, b = number_of(batch.images[first]), number_of(batch.images[second])
        return sorted(zip(a, b, strict=True))

    pairs = chosen(batch, 0)
    assert len(pairs) == 20 == len({frozenset(pair) for pair in pairs})
    assert all((a < 8) == (b < 8) for a, b in pairs)
    assert pairs == chosen(back, 0)
    assert len({tuple(chosen(batch, seed)) for seed in range(5)}) == 5


def test_fewer_pairs_estimate_the_same_rates() -> None:
    """Expected: wins counted by hand from what was asked."""
    batch, judge = batch_of([0] * 8), Judge(higher)
    rate = with_judge(judge, max_pairs=12)(batch)
    assert [len(call) for call in judge.calls] == [24]
    wins: dict[int, list[float]] = {i: [] for i in range(8)}
    for a, b in judge.calls[0][:12]:
        wins[a].append(float(a > b))
        wins[b].append(float(b > a))
    torch.testing.assert_close(rate, torch.tensor([sum(won) / len(won) for won in wins.values()]))
    full = with_judge(judge)(batch)
    for limit in (28, 1000):
        assert torch.equal(with_judge(judge, max_pairs=limit)(batch), full)
    with pytest.raises(ConfigError, match="at least 4 for groups of 8"):
        with_judge(judge, max_pairs=3)(batch)


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 9, 16])
def test_a_tournament_asks_twice_per_image_and_knows_the_best(size: int) -> None:
    """A fair judge: the best image is first, alone, 2 (G - 1) pairs are asked in 1 + ceil(log2 G)
    calls and a group sums to G/2, also beside another group and whatever the order."""
    for seed in range(40):
        judge = Judge(higher)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).tolist()
        found = with_judge(judge, swap=False, schedule="tournament")(
            batch_of([0] * size + [1] * 3, [*order, 200, 201, 202])
        )
        best = order.index(size - 1)
        assert float(found[best]) == 1 and float(found[-1]) == 1, order
        assert int((found[:size] == 1).sum()) == 1 and found[:size].sum() == pytest.approx(size / 2)
        asked = [pair for call in judge.calls for pair in call]
        assert len(asked) == 2 * (size - 1) + 4
        assert len(judge.calls) == 1 + max(2, (size - 1).bit_length())


def test_a_tournament_of_equals_is_a_tie_and_a_missing_answer_is_missing() -> None:
    even = with_judge(Judge(lambda a, b: 0.5), schedule="tournament")(batch_of([0] * 8))
    assert even.tolist() == [0.5] * 8
    mute = with_judge(Judge(lambda a, b: NAN), schedule="tournament")(batch_of([0] * 4))
    assert bool(mute.isnan().all())
    with pytest.raises(ConfigError, match="schedule all"):
        with_judge(Judge(higher), schedule="tournament", max_pairs=3)


def test_tiny_noise_misleads_scores_and_not_win_rates() -> None:
    """Pref-GRPO's claim on synthetic data. Half of 200 groups have 8 images of one quality, half
    have two of which are better; scores have noise of 0.001, and a judge calls a tie what differs
    by less than 0.01.

    Scores, divided by the group's spread, give equal images advantages as large as different ones
    (both have a mean square of 1 by construction). Win rates give equal images exactly 0, and
    the different ones the two best: by hand, 2 of 8 with rate 13/14 and the others 5/14.
    """
    draw = torch.Generator().manual_seed(0)
    quality = torch.zeros(200, 8)
    quality[100:, :2] = 0.05
    noise = 1e-3 * torch.randn(200, 8, generator=draw, dtype=torch.float64)
    table = (0.5 + quality + noise).flatten()
    group = torch.arange(200).repeat_interleave(8)
    images = torch.zeros(1600, 3, 1, 1)
    batch = RewardBatch(images, [""] * 1600, group, [{}] * 1600, torch.zeros(1600))
    rate = with_judge(lambda batch: table, tie=0.01)(batch)
    leaf = torch.arange(1600)
    tree = Tree(torch.full_like(leaf, -1), torch.zeros_like(leaf), leaf.float() * 0, group)
    scored, won = (
        group_norm(reward, leaf, tree, ddof=1).view(200, 8) for reward in (table.float(), rate)
    )
    assert won[:100].abs().max() == 0 and won[100:, :2].mean() > 1.5
    assert scored[:100].square().mean() > 0.5 and scored[100:, :2].mean() > 1.5
    assert rate.view(200, 8)[150].tolist() == pytest.approx([13 / 14] * 2 + [5 / 14] * 6)


# --------------------------------------------------------------------------------------- who judges


def test_another_reward_as_judge() -> None:
    """The flattest image makes the smallest JPEG; `jpeg` itself is the oracle."""
    noise = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = 0.5 + torch.tensor([0.0, 0.4, 0.1, 0.2])[:, None, None, None] * (noise - 0.5)
    batch = batch_of([0] * 4)._replace(images=images)
    expected = (rankdata(jpeg(goal="incompressibility")(batch).numpy()) - 1) / 3
    for fn in ("jpeg", "rewards.jpeg", "rewards.jpeg.jpeg", "jpeg.jpeg"):
        reward = win_rate(judge={"fn": fn, "goal": "incompressibility", "scale": 2})
        assert isinstance(reward, Reward) and isinstance(reward.judge, jpeg)
        rate = reward(batch).double()
        torch.testing.assert_close(rate, torch.tensor(expected), atol=1e-6, rtol=0)


NO_REWARDS: list[Any] = [None, "", 3, "this", "os", "os.system", "rewards", "rewards..jpeg"]
NO_REWARDS += ["rewards._common.scorer", "_scorer", "_scorer.to_pil", "../jpeg", "jpeg\n"]
NO_REWARDS += ["win_rate", "rewards.win_rate", "rewards.win_rate.win_rate", "rewards.vlm.path"]
NO_REWARDS += ["rewards.jpeg.Image", "rewards.jpeg.io", "rewards.jpeg.jpeg.jpeg"]
NO_REWARDS += ["flowrl.training.trainer"]


def test_nothing_but_a_reward_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for fn in NO_REWARDS:
        with pytest.raises(ConfigError, match="judge"):
            win_rate(judge={"fn": fn})
    assert "this" not in sys.modules
    with pytest.raises(ConfigError, match="there is: .*jpeg.*shapes.*vlm") as error:
        win_rate(judge={"fn": "zzz"})
    assert "_scorer" not in str(error.value) and "win_rate," not in str(error.value)
    # what a file imports is not its own
    monkeypatch.setattr("rewards.jpeg.path", Path, raising=False)
    with pytest.raises(ConfigError, match="rewards/jpeg has no class 'path' of its own"):
        win_rate(judge={"fn": "rewards.jpeg.path"})
    # nor is one that learns
    monkeypatch.setattr("rewards.win_rate._find", lambda fn, where: apprentice)
    with pytest.raises(ConfigError, match="apprentice learns"):
        win_rate(judge={"fn": "learner"})


def test_a_wrong_judge_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"fn": "win_rate", "judge": {"fn": "jpeg"}}, "rewards/ has no judge 'win_rate'"),
        ({"fn": "jpge"}, "did you mean 'jpeg'"),
        ({}, "expected the name of a file"),
        ({"fn": "jpeg", "quallity": 3}, "no argument 'quallity'; did you mean 'quality'"),
        ({"fn": "jpeg", "weight": 1.0}, "no argument 'weight'"),
        ({"fn": "jpeg", "quality": "high"}, "quality: expected int, got 'high'"),
        ({"fn": "jpeg", "quality": True}, "quality: expected int, got True"),
        ({"fn": "jpeg", "scale": "1e-4"}, "scale: expected float, got '1e-4'"),
        ({"fn": "jpeg", "goal": "small"}, "goal: expected Literal"),
        ({"fn": "vlm", "cache": 3}, "cache: expected str | None, got 3"),
    ]
    for template in ("pair_rank", "pair_score", "think", "flex"):
        wrong.append(
            ({"fn": "vlm", "template": template}, "whose scores it is for; got one of pairs: vlm")
        )
    for judge, message in wrong:
        with pytest.raises(ConfigError) as error:
            win_rate(judge=judge, tie=0.1)
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (Judge(lambda a, b: 1.5), "verdicts in .0, 1. or NaN of the judge, got 1.5"),
        (Judge(lambda a, b: -0.5), "got -0.5"),
        (Scorer([1.0, float("inf")]), "finite scores or NaN of the judge, got inf"),
        (lambda batch: torch.zeros(3), "expected 2 answers"),
    ],
)
def test_a_broken_answer_stops(judge: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        with_judge(judge)(batch_of([0, 0]))


def test_records_and_probes_go_to_the_judge() -> None:
    """PaCo-RL's question needs a grid in the prompt; without one no image is made."""
    with pytest.raises(DataError, match="line 3"):
        win_rate(judge={"fn": "shapes"}).check_record({"prompt": "a", "include": 3}, "line 3")
    win_rate(judge={"fn": "jpeg"}).check_record({}, "line 3")
    win_rate(judge={"fn": "jpeg"}).probe()
    pairs = win_rate(judge={"fn": "vlm", "url": "http://127.0.0.1:9", "template": "think"})
    pairs.check_record({"prompt": "a"}, "line 3")  # a pair template alone would be refused here
    with pytest.raises(RunError, match="no answer from http://127.0.0.1:9/v1"):
        pairs.probe()
    grids = win_rate(judge={"fn": "vlm", "template": "consistency"})
    grids.check_record({"prompt": "a 2x2 grid of cats"}, "line 3")
    with pytest.raises(DataError, match="line 3: .* expected a grid of 2 to 16 cells"):
        grids.check_record({"prompt": "a cat"}, "line 3")

    class Own(Judge):
        def check_record(self, record: dict[str, Any], where: str) -> None:
            raise DataError(where)

    with pytest.raises(DataError, match="line 4"):
        with_judge(Own(lambda a, b: 0.5)).check_record({}, "line 4")


@pytest.mark.integration
def test_a_config_binds_it_and_a_trainer_uses_it(tmp_path: Path) -> None:
    """Each prompt's rates have the mean 1/2, so does the batch."""
    judge = {"fn": "vlm", "template": "flex", "w_dims": 0.5}
    raw = {"fn": "win_rate", "weight": 0.4, "judge": judge, "max_pairs": 12}
    call = Call.bind("rewards.wins", raw)
    assert call.mix == 0.4 and call.kwargs["judge"] == judge
    made: Any = call.function(**call.kwargs)
    assert made.judge.how.w_dims == 0.5 and made.max_pairs == 12 and made.swap
    metrics = Trainer(toy(tmp_path, "rewards={wins: {fn: win_rate, judge: {fn: jpeg}}}")).step()
    assert metrics["reward/wins"] == pytest.approx(0.5, abs=1e-6) and metrics["trained"] > 0


# ----------------------------------------------------------------------------------- people's votes


BATCH = images_of(random_images(5), group=[0, 0, 0, 1, 1])
Choose = Callable[[VotePair], float | None]


def people(folder: Path, choose: Choose) -> threading.Thread:
    """Answer the next question as `choose` says: 1 for the first of a pair; None is no vote."""

    def answer() -> None:
        while not (asked := questions(folder)):
            time.sleep(0.01)
        for pair in asked[0].pairs:
            label = choose(pair)
            record: dict[str, Any] = {
                "prompt": pair.prompt,
                "image_0": pair.first,
                "image_1": pair.second,
            }
            record |= {"source": list(pair.sources)} if pair.sources else {}
            if label is not None:
                append_vote(folder, {**record, "label_0": label, "voter": "0" * 8})

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def test_scores_are_shares_of_wins_and_a_resumed_run_finds_them(tmp_path: Path) -> None:
    """Everybody likes the image with the smaller name: of three the ranks give 1, 1/2 and 0."""
    reward = votes(folder=str(tmp_path), patience=60, look=0.01)
    people(tmp_path, lambda pair: 1.0)
    scores = reward(BATCH)
    assert sorted(scores[:3].tolist()) == [0, 0.5, 1] and sorted(scores[3:].tolist()) == [0, 1]
    assert questions(tmp_path) == []
    # nobody is asked again: the images are the same to the byte
    began = time.monotonic()
    assert torch.equal(votes(folder=str(tmp_path), patience=60)(BATCH), scores)
    assert time.monotonic() - began < 30


def test_edits_are_asked_with_their_sources(tmp_path: Path) -> None:
    """A file for each image that the groups start from, with its 256 levels."""
    levels = torch.tensor([0, 51, 255])[:, None, None, None] / 255
    black, grey, white = levels.expand(-1, 3, 4, 4)
    sources: list[Source] = [*[(black, grey)] * 3, *[(white,)] * 2]
    batch = BATCH._replace(source=sources)
    asked = set()

    def first(pair: VotePair) -> float:
        asked.add(pair)
        return 1.0

    people(tmp_path, first)
    scores = votes(folder=str(tmp_path), patience=60, look=0.01)(batch)
    assert sorted(scores[3:].tolist()) == [0, 1]
    shown = {}
    for pair in asked:
        files = [Image.open(tmp_path / name) for name in pair.sources]
        shown[pair.prompt] = [image.getpixel((0, 0)) for image in files]
    assert shown == {"prompt 0": [(0, 0, 0), (51, 51, 51)], "prompt 1": [(255, 255, 255)]}


def test_missing_votes_are_missing_and_never_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the second group is judged, as a tie, before patience ends; the command that is said
    can be pasted."""
    tmp_path = tmp_path / "my votes"
    people(tmp_path, lambda pair: 0.5 if pair.prompt == "prompt 1" else None).join(0)
    scores = votes(folder=str(tmp_path), patience=1.0, look=0.01)(BATCH)
    assert scores[:3].isnan().all() and scores[3:].tolist() == [0.5, 0.5]
    assert f"flowrl view RUNS --votes '{tmp_path}'" in caplog.text
    assert questions(tmp_path) == []


def test_equal_images_need_no_vote_and_too_few_pairs_are_refused(tmp_path: Path) -> None:
    """Three images need two pairs, so that each is in one."""
    same = images_of(random_images(1).repeat(2, 1, 1, 1), group=[0, 0])
    assert votes(folder=str(tmp_path), patience=60)(same).tolist() == [0.5, 0.5]
    expected = "^rewards.votes: pairs: expected at least 2 for groups of 3 images, .* got 1"
    with pytest.raises(ConfigError, match=expected):
        votes(folder=str(tmp_path), pairs=1, patience=0)(BATCH)


# ------------------------------------------------------------------------------------------ novelty


def novel(features: Tensor, mode: str = "cluster", most: int | None = None) -> list[float]:
    """Score features without a network."""
    bare = object.__new__(novelty)
    bare.mode, bare.width, bare.most = mode, 0.2, most  # type: ignore[assignment]
    return bare.among(features).tolist()


def test_novelty_is_the_root_of_a_share() -> None:
    """By hand: N orthogonal features are N clusters of 1, so sqrt(N / 1); 12 clusters of 1 and one
    of 12 of 24 images: sqrt(24) = 4.90, sqrt(2) = 1.41. An image alone is a cluster of one of one;
    it has no other to be unlike."""
    for count in (9, 16, 24):
        assert novel(torch.eye(count)) == pytest.approx([count**0.5] * count)
    features = torch.eye(13)[[*range(12), *[12] * 12]]
    assert novel(features) == pytest.approx([24**0.5] * 12 + [2**0.5] * 12)
    assert novel(torch.ones(1, 3)) == [1] and novel(torch.ones(1, 3), mode="nearest") == [0]


def test_most_bounds_the_clusters() -> None:
    """Three clusters of 4 of 12 images stay where 8 are allowed, 4 each; with 2 allowed there are
    two. Of 16 unlike images 8 clusters are made, not one: their sizes n give 8 = sum of 1 / n."""
    three = torch.eye(3).repeat_interleave(4, 0)
    assert novel(three, most=8) == pytest.approx([3**0.5] * 12)
    for distance, most in ((1 - three @ three.T, 2), (1 - torch.eye(16, dtype=torch.float64), 8)):
        sizes = cluster_sizes(distance, width=0.2, most=most)
        assert float((1 / sizes).sum()) == pytest.approx(most)
