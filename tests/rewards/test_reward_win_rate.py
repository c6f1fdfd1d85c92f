"""Win rates within a group: the published example, rank statistics, biased and failing judges, the
choice of pairs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata
from torch import Tensor
from toykit import toy

from flowrl.config.calls import Call
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.types import Reward, RewardBatch
from flowrl.training.trainer import Trainer
from rewards._common.pairs import _ring, some_pairs, verdict
from rewards.jpeg import jpeg
from rewards.win_rate import win_rate

Rule = Callable[[int, int], float]


def batch_of(group: list[int], ids: list[int] | None = None) -> RewardBatch:
    """Make 2x2 images whose red level is the image's number, so that a judge knows which one it
    sees."""
    ids = list(range(len(group))) if ids is None else ids
    images = (torch.tensor(ids, dtype=torch.float32) / 255)[:, None, None, None].expand(-1, 3, 2, 2)
    meta: list[dict[str, Any]] = [{"number": number} for number in group]
    return RewardBatch(
        images, [f"prompt {g}" for g in group], torch.tensor(group), meta, torch.zeros(len(group))
    )


def number_of(images: Tensor) -> list[int]:
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
        self.words = [
            (prompt, record["number"]) for prompt, record in zip(prompts, meta, strict=True)
        ]
        return torch.tensor([self.rule(a, b) for a, b in pairs])


class Scorer:
    """Score an image by a table on its number."""

    def __init__(self, table: list[float]) -> None:
        self.table = table

    def __call__(self, batch: RewardBatch) -> Tensor:
        return torch.tensor([self.table[n] for n in number_of(batch.images)])


def with_judge(judge: Any, **arguments: Any) -> win_rate:
    reward = win_rate(judge={"fn": "jpeg"}, **arguments)
    reward.judge = judge
    return reward


PUBLISHED = {(0, 1): 1.0, (0, 2): 0.0, (0, 3): 1.0, (1, 2): 1.0, (1, 3): 0.5, (2, 3): 1.0}


def fair(a: int, b: int) -> float:
    return PUBLISHED[a, b] if a < b else 1 - PUBLISHED[b, a]


@pytest.mark.parametrize("swap", [True, False])
def test_the_published_example(swap: bool) -> None:
    """Outcomes, rates, advantages: worked example of Pref-GRPO's rule (rates rounded to 3 places,
    std with n - 1)."""
    rate = with_judge(Judge(fair), swap=swap)(batch_of([0] * 4))
    assert rate.dtype == torch.float32
    torch.testing.assert_close(rate, torch.tensor([2 / 3, 1 / 2, 2 / 3, 1 / 6]))
    rounded = rate.double().mul(1000).round() / 1000
    advantage = (rounded - rounded.mean()) / (rounded.std() + 1e-8)
    expected = torch.tensor([0.707460, -0.001061, 0.707460, -1.413860], dtype=torch.float64)
    torch.testing.assert_close(advantage, expected, atol=1e-6, rtol=0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rates_of_a_group_sum_to_half_its_size(data: st.DataObject) -> None:
    """G (G - 1) / 2 pairs hand out one win each, divided by G - 1: the sum is G / 2, however biased
    the judge."""
    group = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=14))
    table = data.draw(
        st.dictionaries(
            st.tuples(st.integers(0, 13), st.integers(0, 13)), st.floats(0, 1, width=32)
        )
    )
    swap = data.draw(st.booleans())
    rate = with_judge(Judge(lambda a, b: table.get((a, b), 1.0)), swap=swap)(batch_of(group))
    for number in set(group):
        own = rate[torch.tensor(group) == number]
        if len(own) == 1:
            assert bool(own.isnan().all())
        else:
            assert float(own.sum()) == pytest.approx(len(own) / 2, abs=1e-5)
            assert float(own.min()) >= 0 and float(own.max()) <= 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=12), st.randoms(use_true_random=False))
def test_a_scorer_gives_ranks(scores: list[int], random: Any) -> None:
    """Oracle: scipy's mean ranks; an image of rank r beats r - 1 of the G - 1 others, ties as
    halves."""
    order = list(range(len(scores)))
    random.shuffle(order)
    rate = with_judge(Scorer([float(s) for s in scores]))(batch_of([7] * len(scores), order))
    expected = (rankdata([scores[i] for i in order]) - 1) / (len(scores) - 1)
    torch.testing.assert_close(rate.double(), torch.tensor(expected), atol=1e-6, rtol=0)


def test_groups_do_not_meet_and_all_pairs_go_in_one_call() -> None:
    judge = Judge(lambda a, b: float(a > b))
    rate = with_judge(judge)(batch_of([5, 2, 5, 2, 5]))
    assert rate.tolist() == [0, 0, 0.5, 1, 1]  # 0 < 2 < 4 in one group, 1 < 3 in the other
    forward = [(0, 2), (0, 4), (1, 3), (2, 4)]
    assert judge.calls == [forward + [(b, a) for a, b in forward]]
    assert judge.words == 2 * [("prompt 5", 5), ("prompt 5", 5), ("prompt 2", 2), ("prompt 5", 5)]


def test_a_judge_that_takes_places_sees_each_image_once() -> None:
    class Places(Judge):
        def compare_pairs(
            self,
            images: Tensor,
            first: Tensor,
            second: Tensor,
            prompts: list[str],
            meta: list[dict[str, Any]],
        ) -> Tensor:
            assert len(images) == 5
            return super().compare(images[first], images[second], prompts, meta)

    batch = batch_of([5, 2, 5, 2, 5])
    plain, places = Judge(lambda a, b: float(a > b)), Places(lambda a, b: float(a > b))
    assert (
        torch.equal(with_judge(plain)(batch), with_judge(places)(batch))
        and plain.calls == places.calls
    )


def test_an_order_does_not_matter_to_a_fair_judge_only() -> None:
    order = [3, 1, 0, 2]
    batch, shuffled = batch_of([0] * 4), batch_of([0] * 4, order)
    for swap, rule, same in [
        (True, fair, True),
        (True, _first, True),
        (False, fair, True),
        (False, _first, False),
    ]:
        rate = with_judge(Judge(rule), swap=swap)
        assert torch.equal(rate(batch)[torch.tensor(order)], rate(shuffled)) == same


def _first(a: int, b: int) -> float:
    return 1.0


def test_a_judge_that_prefers_the_first_place_makes_ties() -> None:
    assert with_judge(Judge(_first))(batch_of([0] * 5)).tolist() == [0.5] * 5
    # one order: image i of 5 is shown first to the 4 - i after it
    assert with_judge(Judge(_first), swap=False)(batch_of([0] * 5)).tolist() == [
        1,
        0.75,
        0.5,
        0.25,
        0,
    ]


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [
        (1.0, 0.0, 1.0),  # both name the first
        (0.0, 1.0, 0.0),
        (1.0, 1.0, 0.5),  # both name the one shown first
        (1.0, 0.5, 0.75),  # a win and a tie
        (0.9, 0.2, 0.85),  # shares: mean of .9 and 1 - .2
        (0.9, 0.7, 0.5),  # shares that name different winners, .9 and .3
        (0.5, 0.5, 0.5),
    ],
)
def test_both_orders_are_averaged(forward: float, backward: float, expected: float) -> None:
    rate = with_judge(Judge(lambda a, b: forward if a < b else backward))(batch_of([0, 0]))
    torch.testing.assert_close(rate, torch.tensor([expected, 1 - expected]))


@pytest.mark.parametrize("swap", [True, False])
def test_a_missing_pair_is_left_out(swap: bool) -> None:
    """Without (0, 1): 0 has a loss and a win, 1 a win and a tie; 2 and 3 as before."""

    def rule(a: int, b: int) -> float:
        return float("nan") if (a, b) == (0, 1) else fair(a, b)

    rate = with_judge(Judge(rule), swap=swap)(batch_of([0] * 4))
    torch.testing.assert_close(rate, torch.tensor([1 / 2, 3 / 4, 2 / 3, 1 / 6]))


def test_an_image_without_an_answer_is_not_scored() -> None:
    rate = with_judge(Judge(lambda a, b: float("nan") if 2 in (a, b) else float(a > b)))(
        batch_of([0, 0, 0])
    )
    assert rate[:2].tolist() == [0, 1] and bool(rate[2].isnan())
    scored = with_judge(Scorer([3.0, float("nan"), 3.0, 1.0]))(batch_of([0] * 4))
    assert scored[[0, 2, 3]].tolist() == [0.75, 0.75, 0] and bool(scored[1].isnan())


def test_a_lone_image_is_not_scored_and_nobody_is_asked() -> None:
    judge = Judge(_first)
    assert bool(with_judge(judge)(batch_of([0, 1, 2])).isnan().all()) and judge.calls == []
    assert with_judge(judge)(batch_of([])).shape == (0,)
    assert with_judge(judge, max_pairs=3)(batch_of([])).shape == (0,)


def test_verdicts_of_scores() -> None:
    nan = float("nan")
    out = verdict(torch.tensor([2.0, 1, 1, nan, 1]), torch.tensor([1.0, 2, 1, 1, nan]))
    assert out[:3].tolist() == [1, 0, 0.5] and bool(out[3:].isnan().all())


# ----------------------------------------------------------------------------- a share of the pairs


@pytest.mark.parametrize("size", range(2, 13))
def test_the_ring_has_every_pair_once_and_no_one_is_left_out(size: int) -> None:
    ring = _ring(size)
    assert sorted(tuple(sorted(pair)) for pair in ring) == [
        (i, j) for i in range(size) for j in range(i + 1, size)
    ]
    for limit in range((size + 1) // 2, len(ring) + 1):
        times = torch.bincount(torch.tensor(ring[:limit]).flatten(), minlength=size)
        assert int(times.min()) >= 1 and int(times.max()) - int(times.min()) <= 2


def test_the_choice_of_pairs_follows_the_images() -> None:
    ids = list(range(16))
    batch, back = batch_of([0] * 8 + [1] * 8), batch_of([1] * 8 + [0] * 8, ids[::-1])

    def chosen(batch: RewardBatch, seed: int) -> list[tuple[int, int]]:
        first, second = some_pairs(batch.group, batch.images, 10, seed)
        return sorted(
            zip(number_of(batch.images[first]), number_of(batch.images[second]), strict=True)
        )

    pairs = chosen(batch, 0)
    assert len(pairs) == 20 == len({frozenset(pair) for pair in pairs})
    assert all((a < 8) == (b < 8) for a, b in pairs)
    assert pairs == chosen(back, 0)
    assert len({tuple(chosen(batch, seed)) for seed in range(5)}) == 5


def test_fewer_pairs_estimate_the_same_rates() -> None:
    batch = batch_of([0] * 8)
    judge = Judge(lambda a, b: float(a > b))
    rate = with_judge(judge, max_pairs=12)(batch)
    assert [len(call) for call in judge.calls] == [24]
    wins: dict[int, list[float]] = {i: [] for i in range(8)}  # counted by hand from what was asked
    for a, b in judge.calls[0][:12]:
        wins[a].append(float(a > b))
        wins[b].append(float(b > a))
    torch.testing.assert_close(rate, torch.tensor([sum(wins[i]) / len(wins[i]) for i in range(8)]))
    full = with_judge(judge)(batch)
    assert torch.equal(with_judge(judge, max_pairs=28)(batch), full)
    assert torch.equal(with_judge(judge, max_pairs=1000)(batch), full)


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 4 for groups of 8"):
        with_judge(Judge(fair), max_pairs=3)(batch_of([0] * 8))
    with pytest.raises(ConfigError, match="max_pairs"):
        win_rate(judge={"fn": "jpeg"}, max_pairs=0)


# -------------------------------------------------------------------------------------- which judge


def test_another_reward_as_judge() -> None:
    """The flattest image makes the smallest JPEG; `jpeg` itself is the oracle."""
    noise = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = 0.5 + torch.tensor([0.0, 0.4, 0.1, 0.2])[:, None, None, None] * (noise - 0.5)
    batch = RewardBatch(
        images, ["a"] * 4, torch.zeros(4, dtype=torch.int64), [{}] * 4, torch.zeros(4)
    )
    for fn in ("jpeg", "rewards.jpeg", "rewards.jpeg.jpeg", "jpeg.jpeg"):
        reward = win_rate(judge={"fn": fn, "goal": "incompressibility", "scale": 2})
        assert isinstance(reward, Reward) and isinstance(reward.judge, jpeg)
        expected = (rankdata(jpeg(goal="incompressibility")(batch).numpy()) - 1) / 3
        torch.testing.assert_close(
            reward(batch).double(), torch.tensor(expected), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    "fn",
    [
        None,
        "",
        3,
        "this",
        "os",
        "os.system",
        "rewards",
        "rewards._common.scorer",
        "_scorer",
        "_scorer.to_pil",
        "rewards.win_rate",
        "win_rate",
        "../jpeg",
        "rewards.jpeg.Image",
        "rewards.jpeg.io",
        "rewards.win_rate.win_rate",
        "rewards.vlm.path",
        "rewards.jpeg.jpeg.jpeg",
        "flowrl.training.trainer",
        "jpeg\n",
        "rewards..jpeg",
    ],
)
def test_nothing_but_a_reward_can_be_named(fn: Any) -> None:
    with pytest.raises(ConfigError, match="judge"):
        win_rate(judge={"fn": fn})
    assert "this" not in sys.modules


def test_the_judges_that_there_are_are_offered() -> None:
    with pytest.raises(ConfigError, match="there is: .*jpeg.*shapes.*vlm") as error:
        win_rate(judge={"fn": "zzz"})
    assert "_scorer" not in str(error.value) and "win_rate," not in str(error.value)


def test_what_a_file_imports_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rewards.jpeg.path", Path, raising=False)
    with pytest.raises(ConfigError, match="rewards/jpeg has no class 'path' of its own"):
        win_rate(judge={"fn": "rewards.jpeg.path"})


@pytest.mark.parametrize(
    ("judge", "message"),
    [
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
    ],
)
def test_a_wrong_judge_is_refused(judge: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        win_rate(judge=judge)
    assert message in str(error.value)


def test_a_judge_that_learns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Learner(Scorer):
        def __init__(self) -> None:
            super().__init__([])

        def update(self, batch: RewardBatch) -> dict[str, float]:
            return {}

    monkeypatch.setattr("rewards.win_rate._find", lambda fn, where: Learner)
    with pytest.raises(ConfigError, match="Learner learns"):
        win_rate(judge={"fn": "learner"})


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
    with pytest.raises(DataError, match="line 3"):
        win_rate(judge={"fn": "shapes"}).check_record(
            {"prompt": "a red circle", "include": 3}, "line 3"
        )
    win_rate(judge={"fn": "jpeg"}).check_record({}, "line 3")
    win_rate(judge={"fn": "jpeg"}).probe()
    pairs = win_rate(judge={"fn": "vlm", "url": "http://127.0.0.1:9", "template": "think"})
    pairs.check_record({"prompt": "a"}, "line 3")  # a pair template alone would be refused here
    with pytest.raises(RunError, match="no answer from http://127.0.0.1:9/v1"):
        pairs.probe()


def test_a_config_binds_it() -> None:
    raw = {
        "fn": "win_rate",
        "weight": 0.4,
        "judge": {"fn": "vlm", "template": "flex", "w_dims": 0.5},
        "max_pairs": 12,
    }
    call = Call.bind("rewards.wins", raw)
    assert call.mix == 0.4 and call.kwargs["judge"] == raw["judge"]
    made = call.function(**call.kwargs)
    assert (
        isinstance(made, win_rate)
        and made.judge.how.w_dims == 0.5
        and made.max_pairs == 12
        and made.swap
    )


@pytest.mark.integration
def test_a_trainer_uses_it(tmp_path: Path) -> None:
    """Each prompt's rates have the mean 1/2, so does the batch."""
    metrics = Trainer(toy(tmp_path, "rewards={wins: {fn: win_rate, judge: {fn: jpeg}}}")).step()
    assert metrics["reward/wins"] == pytest.approx(0.5, abs=1e-6) and metrics["trained"] > 0
