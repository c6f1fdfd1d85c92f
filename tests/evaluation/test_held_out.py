"""Held-out evaluation: what it samples, how it averages, and its intervals."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from toykit import reddish, redness

from flowrl.algorithms.rollout.engine import sample_ode
from flowrl.core.errors import ConfigError, RunError
from flowrl.core.pixels import round_8bit
from flowrl.core.prompts import PromptSet
from flowrl.core.seeds import generator
from flowrl.core.types import Reward, RewardBatch
from flowrl.evaluation.held_out import evaluate_prompts, sampled_images
from flowrl.evaluation.scorecard import evaluation_table
from flowrl.models.toy import LinearFlow

SIZE: dict[str, int] = {"height": 16, "width": 16, "steps": 4}
TEXTS = ["a red dot", "a blue dot", "two dots", "a red dot", "no dot"]
TAGS = ["one", "one", "one", "two", "two"]


def prompts(held_out: list[bool] | None = None, tags: list[str] = TAGS) -> PromptSet:
    records: list[dict[str, Any]] = []
    for i, text in enumerate(TEXTS):
        more = {"held_out": held_out[i]} if held_out else {}
        records.append({"prompt": text, "tag": tags[i], **more})
    return PromptSet(TEXTS, records, "dots", "dots.jsonl")


def run(rewards: dict[str, Reward] | None = None, **options: Any) -> dict[str, Any]:
    """Evaluate three images of each prompt."""
    rewards = rewards or {"red": redness, "strict": reddish}
    filled = {"headline": next(iter(rewards)), "images": 3, **SIZE, **options}
    texts = filled.pop("prompts", prompts())
    return evaluate_prompts(LinearFlow(scale=0.3), texts, rewards, **filled)


def drawn(texts: list[str] = TEXTS, **options: Any) -> tuple[list[int], Tensor]:
    parts = list(sampled_images(LinearFlow(scale=0.3), texts, **{**SIZE, "images": 3, **options}))
    places, images = zip(*parts, strict=True)
    return sum(places, []), torch.cat(images)


def redder() -> Tensor:
    """Score the images that `run` evaluates by hand -> [5, 3]."""
    images = drawn()[1]
    return (images[:, 0].mean((1, 2)) - images[:, 1].mean((1, 2))).double().reshape(5, 3)


# --------------------------------------------------------------------------------------- sampling


def test_images_do_not_depend_on_the_batch() -> None:
    """To the bit on this field; elsewhere to the rounding of another batch geometry."""
    for batch in (1, 2, 3, 7, 15, 1000):
        index, images = drawn(batch=batch)
        assert index == [i for i in range(5) for _ in range(3)]
        assert torch.equal(images, drawn()[1])


def test_an_image_depends_on_the_seed_and_its_prompts_place_only() -> None:
    """Other prompts around it, another batch or what was drawn before change nothing."""
    whole = drawn()[1]
    torch.manual_seed(5)
    torch.randn(7)
    others = drawn(["x", "y", "two dots", "z"], batch=2)[1]
    assert torch.equal(others[6:9], whole[6:9]) and not torch.equal(others[:3], whole[:3])
    assert not torch.equal(whole[:3], whole[9:12])  # the same words at another place
    assert not torch.equal(drawn(seed=1)[1], whole)


def test_sampling_is_euler_from_the_documented_noise_in_256_levels() -> None:
    """Oracle: sample_ode from generators of the documented key, decoded and rounded here."""
    model = LinearFlow(scale=0.3)
    keys = [generator(9, "sample", i) for i in range(2)]
    given: dict[str, Any] = {"shape": (3, 2, 2), "group_size": 3, "generators": keys}
    cond, sigmas = model.encode(TEXTS[:2]), model.sigmas(4, 16, 16)
    x0 = sample_ode(model, cond, sigmas=sigmas, **given)
    got = drawn(TEXTS[:2], seed=9)[1]
    assert torch.equal(got, torch.round(model.decode(x0) * 255) / 255) and not got.requires_grad


def test_a_saved_image_scores_the_same() -> None:
    """A PNG keeps round(255 p) of each value p, cut to [0, 1]."""
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.1
    stored = (images.clamp(0, 1) * 255).round().to(torch.uint8)
    assert torch.equal(round_8bit(images), stored.float() / 255)


def test_progress_and_numbers_that_make_no_sense() -> None:
    seen: list[tuple[int, int]] = []
    drawn(batch=6, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 5), (4, 5), (5, 5)]
    for wrong in ({"steps": 0}, {"images": 0}, {"batch": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            drawn(TEXTS, **wrong)


# ----------------------------------------------------------------------------------------- scores


def test_evaluation_is_deterministic_and_independent_of_the_batch() -> None:
    first = run()
    assert first == run()
    other = run(batch=4)
    assert other.pop("setting")["batch"] == 4 and first.pop("setting")["batch"] == 256
    assert other == first and run(seed=1)["red"] != first["red"]


def test_overall_is_the_mean_over_tasks() -> None:
    """9 images of task one, 6 of task two; oracle: plain means of the same images."""
    result, scores = run(), redder()
    means = [float(scores[:3].mean()), float(scores[3:].mean())]
    tasks = result["tasks"].values()
    assert [task["mean"] for task in tasks] == pytest.approx(means)
    assert [task["images"] for task in tasks] == [9, 6] and result["images"] == 15
    assert result["red"] == pytest.approx(sum(means) / 2)
    assert abs(result["red"] - float(scores.mean())) > 1e-4
    assert result["rewards"]["red"] == pytest.approx(float(scores.mean()))
    assert result["rewards"]["strict"] == pytest.approx(float((scores > 0).float().mean()))
    numbers = {**SIZE, "images": 3, "batch": 256, "seed": 0, "tuned": 1.0}
    setting = dict(result["setting"])
    assert len(setting.pop("prompts_hash")) == 16
    assert setting == {**numbers, "prompts": "dots", "count": 5, "guidance": None}


def test_seen_and_held_out_prompts_apart() -> None:
    """Places 1 and 4 are held out: 6 of 15 images, one prompt of each task."""
    result = run(prompts=prompts([False, True, False, False, True]))
    scores = redder().mean(1).tolist()
    assert result["held_out"]["mean"] == pytest.approx((scores[1] + scores[4]) / 2)
    assert result["seen"]["mean"] == pytest.approx(((scores[0] + scores[2]) / 2 + scores[3]) / 2)
    assert (result["seen"]["images"], result["held_out"]["images"]) == (9, 6)
    one_sided = [prompts(), prompts([True] * 5), prompts([False] * 3 + [True] * 2)]
    for listed in one_sided:
        found = run(prompts=listed)
        assert "seen" not in found and "held_out" not in found
    lines = evaluation_table(result).splitlines()
    assert lines[0].split() == ["red", "95", "%", "interval", "images"]
    names = ["one", "two", "mean over tasks", "seen", "held_out"]
    assert [line.split("  ")[0].strip() for line in lines[2:]] == names
    assert [line.split()[-1] for line in lines[2:]] == ["9", "6", "15", "9", "6"]
    assert len(set(map(len, lines))) == 1


def test_seen_and_held_out_prompts_are_compared_on_the_tasks_of_both() -> None:
    """Tasks one and two have seen and held-out prompts, three only a seen one. By hand, from the
    images' scores: three counts in the mean over tasks alone."""
    tags = ["one", "two", "three", "one", "two"]
    result = run(prompts=prompts([False, True, False, True, False], tags))
    scores = redder().mean(1).tolist()
    assert result["seen"]["mean"] == pytest.approx((scores[0] + scores[4]) / 2)
    assert result["held_out"]["mean"] == pytest.approx((scores[3] + scores[1]) / 2)
    for part in ("seen", "held_out"):
        assert {*result[part]["tasks"]} == {"one", "two"} and result[part]["images"] == 6
    assert {*result["tasks"]} == {"one", "two", "three"} and result["images"] == 15


@pytest.mark.parametrize(
    ("value", "said"),
    [(math.nan, "gave no score for an image of"), (math.inf, "gave inf for image 6, prompt")],
)
def test_an_image_without_a_score_is_an_error(value: float, said: str) -> None:
    def holey(batch: RewardBatch) -> Tensor:
        scores = redness(batch)
        scores[[text == "two dots" for text in batch.prompts]] = value
        return scores

    with pytest.raises(RunError, match=f"evaluation: reward 'holey' {said} 'two dots'"):
        run({"red": redness, "holey": holey})


def test_a_task_without_a_scored_image_is_an_error_that_says_what_helps() -> None:
    """The reward scores no image of task two, 6 of 15, which the limit of one half allows."""

    def blind(batch: RewardBatch) -> Tensor:
        known = torch.tensor([record["tag"] == "one" for record in batch.meta])
        return torch.where(known, redness(batch), torch.nan)

    said = r"no image of the task 'two', .* Mend the reward, or take .* out of .*prompts\.test"
    with pytest.raises(RunError, match=said):
        run({"blind": blind}, max_unscored=0.5)


def test_a_reward_that_scores_nothing_has_no_mean() -> None:
    """JSON has no NaN."""
    blind = {"one": reddish, "none": lambda batch: torch.full((len(batch.images),), math.nan)}
    report = run(blind, max_unscored=1.0)
    assert report["rewards"]["none"] is None and report["rewards"]["one"] > 0
    json.dumps(report, allow_nan=False)


def test_an_image_that_is_no_number_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the reward would not notice."""
    decode = LinearFlow.decode

    def failing(self: LinearFlow, x0: Tensor) -> Tensor:
        images = decode(self, x0)
        images[-1, 0, 0, 0] = math.nan
        return images

    monkeypatch.setattr(LinearFlow, "decode", failing)
    with pytest.raises(RunError, match="no score for an image of 'a blue dot' .3 of 15 images"):
        run({"one": lambda batch: torch.ones(len(batch.images))}, batch=6)


def test_rewards_build_no_graph_and_see_each_prompt_as_a_group() -> None:
    """Also the two prompts of the same words, with two prompts in a batch."""
    seen: list[int] = []

    def watching(batch: RewardBatch) -> Tensor:
        seen.extend(batch.group.tolist())
        assert not torch.is_grad_enabled()
        return redness(batch)

    run({"red": watching}, batch=6)
    assert seen == [i for i in range(5) for _ in range(3)]


# -------------------------------------------------------------------------------------- intervals
