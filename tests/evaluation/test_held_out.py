"""Held-out evaluation: what it samples, how it averages, and its intervals."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from toykit import reddish, redness

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import PromptSet
from flowrl.core.seeds import generator
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.held_out import evaluate_prompts, evaluation_table, sample
from flowrl.evaluation.statistics import Z95, summarize, wilson
from flowrl.models.toy import LinearFlow

SIZE: dict[str, int] = {"height": 16, "width": 16, "steps": 4}
TEXTS = ["a red dot", "a blue dot", "two dots", "a red dot", "no dot"]


def prompts(**extra: list[Any]) -> PromptSet:
    records = [
        {
            "prompt": text,
            "tag": "one" if i < 3 else "two",
            **{key: values[i] for key, values in extra.items()},
        }
        for i, text in enumerate(TEXTS)
    ]
    return PromptSet(TEXTS, records, "dots", "dots.jsonl")


def run(
    images: int = 3, rewards: dict[str, Reward] | None = None, **options: Any
) -> dict[str, Any]:
    model = LinearFlow(scale=0.3)
    rewards = rewards or {"red": redness, "strict": reddish}
    options = {"headline": next(iter(rewards)), "prompts": prompts(), **SIZE, **options}
    return evaluate_prompts(model, options.pop("prompts"), rewards, images=images, **options)


def drawn(texts: list[str] = TEXTS, **options: Any) -> tuple[list[int], Tensor]:
    parts = list(sample(LinearFlow(scale=0.3), texts, **{**SIZE, "images": 3, **options}))
    return [i for index, _ in parts for i in index], torch.cat([images for _, images in parts])


# ----------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 15, 1000])
def test_images_do_not_depend_on_the_batch(batch: int) -> None:
    """To the bit on this field; elsewhere to the rounding of another batch geometry."""
    index, images = drawn(batch=batch)
    assert index == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    assert torch.equal(images, drawn()[1])


def test_an_image_depends_on_the_seed_and_its_prompts_place_only() -> None:
    """Other prompts around it, another batch or what was drawn before change nothing; seed and
    place do."""
    whole = drawn()[1]
    torch.manual_seed(5)
    torch.randn(7)
    others = drawn(["x", "y", "two dots", "z"], batch=2)[1]
    assert torch.equal(others[6:9], whole[6:9]) and not torch.equal(others[:3], whole[:3])
    assert not torch.equal(whole[:3], whole[9:12])  # the same words at another place
    assert not torch.equal(drawn(seed=1)[1], whole)


def test_sampling_is_euler_from_the_documented_noise() -> None:
    """Oracle: sample_ode from the generators of the documented key, decoded and rounded to 256
    levels here."""
    model = LinearFlow(scale=0.3)
    keys = [generator(9, "sample", i) for i in range(2)]
    cond = model.encode(TEXTS[:2])
    x0 = sample_ode(
        model, cond, sigmas=model.sigmas(4, 16, 16), shape=(3, 2, 2), group_size=3, generators=keys
    )
    got = drawn(TEXTS[:2], seed=9)[1]
    assert torch.equal(got, torch.round(model.decode(x0) * 255) / 255) and not got.requires_grad


def test_progress_and_numbers_that_make_no_sense() -> None:
    seen: list[tuple[int, int]] = []
    drawn(batch=6, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    for wrong in ({"steps": 0}, {"images": 0}, {"batch": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            drawn(TEXTS, **wrong)


def test_a_saved_image_scores_the_same() -> None:
    """A PNG keeps round(255 p) of each value p."""
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1
    stored = (round_8bit(images) * 255).round().to(torch.uint8)
    assert (
        torch.equal(stored.float() / 255, round_8bit(images))
        and float((round_8bit(images) - images).abs().max()) < 0.11
    )


# ------------------------------------------------------------------------------------------- scores


def test_evaluation_is_deterministic_and_independent_of_the_batch() -> None:
    first = run()
    assert first == run()
    other = run(batch=4)
    assert other.pop("setting")["batch"] == 4 and first.pop("setting")["batch"] == 256
    assert other == first
    assert run(seed=1)["red"] != first["red"]


def test_overall_is_the_mean_over_tasks() -> None:
    """9 images of task one, 6 of task two; oracle: plain means of the same images."""
    result, images = run(), drawn()[1]
    scores = images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))
    means = [float(scores[:9].double().mean()), float(scores[9:].double().mean())]
    assert [task["mean"] for task in result["tasks"].values()] == pytest.approx(means)
    assert (
        result["red"] == pytest.approx(sum(means) / 2)
        and abs(result["red"] - float(scores.mean())) > 1e-4
    )
    assert [task["images"] for task in result["tasks"].values()] == [9, 6] and result[
        "images"
    ] == 15
    assert result["rewards"]["red"] == pytest.approx(float(scores.mean()))
    assert result["rewards"]["strict"] == pytest.approx(float((scores > 0).float().mean()))
    numbers = {**SIZE, "images": 3, "batch": 256, "seed": 0, "tuned": 1.0}
    assert result["setting"] == {**numbers, "prompts": "dots", "guidance": None}


def test_seen_and_held_out_prompts_apart() -> None:
    """Places 1 and 4 are held out: 6 of 15 images, one prompt of each task."""
    held = [False, True, False, False, True]
    result, images = run(prompts=prompts(held_out=held)), drawn()[1]
    scores = (images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))).double().reshape(5, 3).mean(1)
    assert result["held_out"]["mean"] == pytest.approx(float(scores[1] + scores[4]) / 2)
    assert result["seen"]["mean"] == pytest.approx(
        float((scores[0] + scores[2]) / 2 + scores[3]) / 2
    )
    assert (result["seen"]["images"], result["held_out"]["images"]) == (9, 6)
    for one_sided in (run(), run(prompts=prompts(held_out=[True] * 5))):
        assert "seen" not in one_sided and "held_out" not in one_sided


@pytest.mark.parametrize(
    ("value", "said"),
    [(math.nan, "gave no score for an image of"), (math.inf, "gave inf for image 6, prompt")],
)
def test_an_image_without_a_score_is_an_error(value: float, said: str) -> None:
    def holey(batch: RewardBatch) -> Tensor:
        scores = redness(batch)
        scores[[p == "two dots" for p in batch.prompts]] = value
        return scores

    with pytest.raises(RunError, match=f"evaluation: reward 'holey' {said} 'two dots'"):
        run(rewards={"red": redness, "holey": holey})


def test_an_image_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the reward would not notice."""
    decode = LinearFlow.decode

    def failing(self: LinearFlow, x0: Tensor) -> Tensor:
        images = decode(self, x0)
        images[-1, 0, 0, 0] = math.nan
        return images

    monkeypatch.setattr(LinearFlow, "decode", failing)
    with pytest.raises(RunError, match="image of 'a blue dot' that is not finite"):
        run(rewards={"one": lambda batch: torch.ones(len(batch.images))}, batch=6)


def test_rewards_build_no_graph() -> None:
    seen: list[bool] = []

    def watching(batch: RewardBatch) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return redness(batch)

    run(rewards={"red": watching})
    assert seen == [False]


# ---------------------------------------------------------------------------------------- intervals


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_against_the_published_table(hits: int, n: int, low: float, high: float) -> None:
    """Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    assert wilson(hits, n) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_against_scipy(numbers: tuple[int, int]) -> None:
    interval = scipy.stats.binomtest(*numbers).proportion_ci(0.95, method="wilson")
    assert wilson(*numbers) == pytest.approx((interval.low, interval.high), abs=1e-9)


def test_wilson_of_what_is_no_count() -> None:
    for hits, n in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ConfigError, match=f"hits={hits}, n={n}"):
            wilson(hits, n)


def test_quantile() -> None:
    assert pytest.approx(scipy.stats.norm.ppf(0.975), abs=1e-15) == Z95


def test_one_task_of_real_numbers() -> None:
    """Oracle: scipy's normal interval with the population std."""
    values = torch.tensor([0.2, 0.9, 0.4, 0.7])
    std = float(values.double().std(correction=0)) / 2
    low, high = scipy.stats.norm.interval(0.95, loc=float(values.double().mean()), scale=std)
    report = summarize(values, ["a"] * 4)
    assert (
        report["interval"] == pytest.approx([low, high])
        and report["tasks"]["a"]["interval"] == report["interval"]
    )


def test_two_tasks_of_real_numbers() -> None:
    """The variance of a mean of two independent means is a quarter of the sum of theirs."""
    a, b = torch.tensor([0.2, 0.9, 0.4, 0.7]), torch.tensor([0.1, 0.3, 0.8])
    report = summarize(torch.cat([a, b]), ["a"] * 4 + ["b"] * 3)
    variance = (
        float(a.double().var(correction=0)) / 4 + float(b.double().var(correction=0)) / 3
    ) / 4
    mean = (0.55 + 0.4) / 2
    want = [mean - 1.959964 * math.sqrt(variance), mean + 1.959964 * math.sqrt(variance)]
    assert report["mean"] == pytest.approx(mean) and report["interval"] == pytest.approx(want)


def test_verdicts() -> None:
    """One task: Wilson's own interval. Two: squares of the distances to each end are added, each
    end apart."""
    one = summarize(torch.tensor([1.0, 1, 1, 0]), ["a"] * 4)
    assert one["interval"] == pytest.approx(wilson(3, 4))
    two = summarize(torch.tensor([1.0, 1, 1, 0, 0, 0]), ["a"] * 4 + ["b"] * 2)
    (low_a, high_a), (low_b, high_b) = wilson(3, 4), wilson(0, 2)
    below, above = math.hypot(0.75 - low_a, 0.0 - low_b) / 2, math.hypot(high_a - 0.75, high_b) / 2
    assert two["mean"] == 0.375 and two["interval"] == pytest.approx([0.375 - below, 0.375 + above])


def test_tasks_that_all_hit_are_not_certain() -> None:
    """4 of 4 in one task: the lower end is Wilson's, not 1."""
    report = summarize(torch.ones(8), ["a"] * 4 + ["b"] * 4)
    low, high = report["interval"]
    assert report["mean"] == high == 1 and low == pytest.approx(
        1 - (1 - wilson(4, 4)[0]) * math.sqrt(2) / 2
    )


def test_interval_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks of 40 and 10 verdicts at 0.9 and 0.6: 95 % of 2000 intervals hold 0.75, within 5 SE
    (2.4 %)."""
    monkeypatch.setattr("flowrl.evaluation.statistics.wilson", cache(wilson))  # few counts differ
    generator = torch.Generator().manual_seed(0)
    tags, hit = ["a"] * 40 + ["b"] * 10, 0
    for draw in torch.rand(2000, 50, generator=generator):
        values = (draw < torch.tensor([0.9] * 40 + [0.6] * 10)).float()
        low, high = summarize(values, tags)["interval"]
        hit += low <= 0.75 <= high
    assert abs(hit / 2000 - 0.95) < 0.024


def test_table() -> None:
    text = evaluation_table(run(prompts=prompts(held_out=[False, True, False, False, True])))
    lines = text.splitlines()
    assert lines[0].split() == ["red", "95", "%", "interval", "images"]
    assert [line.split("  ")[0].strip() for line in lines[2:]] == [
        "one",
        "two",
        "mean over tasks",
        "seen",
        "held_out",
    ]
    assert [line.split()[-1] for line in lines[2:]] == ["9", "6", "15", "9", "6"] and len(
        {*map(len, lines)}
    ) == 1


def test_rewards_that_compare_see_each_prompt_as_a_group() -> None:
    """Also the two prompts of the same words; with a batch of two prompts at a time."""
    seen: list[int] = []

    def comparing(batch: RewardBatch) -> Tensor:
        seen.extend(batch.group.tolist())
        return redness(batch)

    run(images=3, rewards={"red": comparing}, batch=6)
    assert seen == [i for i in range(5) for _ in range(3)]
