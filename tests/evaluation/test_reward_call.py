"""One reward is asked: what it may look like, what it may return, and how it may fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toykit import redness, toy

from flowrl.config.calls import Call
from flowrl.config.load import with_rewards
from flowrl.core.errors import ConfigError, DataError, FlowRLError, RewardError
from flowrl.core.prompts import PromptSet, check_records
from flowrl.core.types import RewardBatch
from flowrl.evaluation.held_out import evaluate_prompts
from flowrl.evaluation.reward_call import ask, probe_rewards, rewards_of
from flowrl.models.toy import LinearFlow
from flowrl.training.trainer import Trainer

NAN = math.nan


def batch() -> RewardBatch:
    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2) / 4
    meta: list[dict[str, Any]] = [{"prompt": "a", "tag": "x"}, {"prompt": "b"}, {"prompt": "c"}]
    return RewardBatch(images.clone(), ["a", "b", "c"], torch.arange(3), meta, torch.zeros(3))


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ([0.5, 1, True], [0.5, 1, 1]),
        ((0.5, None, 2.0), [0.5, NAN, 2]),
        ([torch.tensor(0.5), np.float32(1), 2], [0.5, 1, 2]),
        (np.array([0.5, NAN, 2]), [0.5, NAN, 2]),
        (np.array([3, 2, 1])[::-1], [1, 2, 3]),
        (torch.tensor([1, 2, 3], dtype=torch.int32), [1, 2, 3]),
        (torch.ones(3, requires_grad=True) * 2, [2, 2, 2]),
        (0.25, [0.25] * 3),
        (np.float64(0.25), [0.25] * 3),
        (7, [7] * 3),
    ],
)
def test_what_a_reward_may_return(answer: Any, want: list[float]) -> None:
    """The numbers are those that stand in the answer; a single one counts for every image."""
    got = ask("it", lambda batch: answer, batch(), "here")
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got, torch.tensor(want).float(), equal_nan=True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1.0, 2.0], r"expected 3 numbers, one per image, got shape \[2\]"),
        ([10**400] * 3, "expected 3 numbers, one per image, got list: int too large to convert"),
        (torch.ones(3, dtype=torch.complex64), "got Tensor: complex numbers have no order"),
        (torch.ones(3, device="meta"), "expected 3 numbers, one per image, got Tensor: "),
        (torch.ones(3, 1), r"got shape \[3, 1\]"),
        ("good", "got str: no tensor, array, list or number"),
        (["1", "2", "3"], "got list: the text '1' is no number"),
        ({"score": 1}, "got dict"),
        (None, "got NoneType"),
        ([[1, 2], [3], 4], "got list"),
        (np.array(["a", "b", "c"]), "got ndarray"),
        ([1.0, math.inf, 2.0], "gave inf for image 1, prompt 'b'"),
    ],
)
def test_what_it_may_not(answer: Any, said: str) -> None:
    with pytest.raises(RewardError, match=f"^here: reward 'it'.*{said}"):
        ask("it", lambda batch: answer, batch(), "here")


def by_position(one: Tensor, two: list[str], **record: list[Any]) -> list[float]:
    assert (two, record) == (["a", "b", "c"], {"tag": ["x", None, None]})
    return one.mean((1, 2, 3)).tolist()


def by_name(prompts: list[str], images: Tensor, *, tag: list[Any]) -> Tensor:
    assert (prompts, tag) == (["a", "b", "c"], ["x", None, None])
    return images.mean((1, 2, 3))


def without_records(images: Tensor, prompts: list[str]) -> Tensor:
    return images.mean((1, 2, 3))


class Object:
    def __call__(self, images: Tensor, prompts: list[str]) -> Tensor:
        return images.mean((1, 2, 3))


def of_a_batch(batch: RewardBatch, scale: float = 1.0) -> Tensor:
    return scale * batch.images.mean((1, 2, 3))


@pytest.mark.parametrize("way", [by_position, by_name, without_records, Object(), of_a_batch])
def test_how_a_reward_is_called(way: Callable[..., Any]) -> None:
    """Image i is i / 4 everywhere."""
    assert ask("it", way, batch(), "here").tolist() == [0, 0.25, 0.5]


def test_one_reward_cannot_change_what_the_next_sees() -> None:
    def vandal(batch: RewardBatch) -> Tensor:
        batch.images.zero_()
        batch.meta[0]["tag"] = "y"
        batch.meta[1]["boxes"].clear()
        batch.prompts.clear()
        batch.group.zero_()
        batch.sigma.add_(5)
        return torch.ones(3)

    shown = batch()
    shown.meta[1]["boxes"] = [{"class": "cup"}]
    ask("vandal", vandal, shown, "here")
    assert shown.meta[1].pop("boxes") == [{"class": "cup"}]
    assert (shown.group.tolist(), shown.sigma.tolist()) == ([0, 1, 2], [0, 0, 0])
    assert ask("next", by_position, shown, "here").tolist() == [0, 0.25, 0.5]


def wrong(*_: Any, **__: Any) -> None:
    raise KeyError("gone")


def leaving(*_: Any) -> None:
    raise SystemExit("no licence")


def of_images(images: Any) -> Any:
    return images.mean((1, 2, 3))


def with_metadata(images: Tensor, prompts: list[str], metadata: list[Any]) -> Tensor:
    return images.mean((1, 2, 3))


CLASS = type("Broken", (), {"__init__": lambda self: wrong()})
WITH = type("With", (), {"__call__": wrong, "probe": wrong, "check_record": wrong})
HERE = rf"KeyError: 'gone' \({Path(__file__).name}, line \d+\)"
PROMPTS = PromptSet(["a"], [{"prompt": "a"}], "p", "p.txt", ["p.txt, line 1"])


@pytest.mark.parametrize(
    ("action", "kind", "said"),
    [
        (
            lambda: rewards_of({"it": Call("rewards.it", "x", "x", {}, function=CLASS)}),
            ConfigError,
            f"making reward 'it' failed with {HERE}",
        ),
        (
            lambda: probe_rewards({"it": WITH()}),
            RewardError,
            f"the probe of reward 'it' failed.*{HERE}",
        ),
        (
            lambda: check_records(PROMPTS, {"it": WITH()}),
            DataError,
            f"p.txt, line 1: the check_record of reward 'it' failed with {HERE}",
        ),
        (lambda: ask("it", wrong, batch(), "here"), RewardError, f"here: reward 'it'.*{HERE}"),
        (
            lambda: ask("it", of_images, batch(), "here"),
            RewardError,
            r"AttributeError.* gets a RewardBatch; write f\(images, prompts\)$",
        ),
        (
            lambda: ask("it", with_metadata, batch(), "here"),
            RewardError,
            r"TypeError.*'metadata'.*each by its name; write f\(images, prompts, \*\*record\)$",
        ),
        (lambda: ask("it", leaving, batch(), "here"), RewardError, "SystemExit: no licence"),
    ],
)
def test_every_failure_is_one_message_that_names_the_line(
    action: Callable[[], Any], kind: type[FlowRLError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        action()


# ------------------------------------------------------------------------------- images without one


def test_the_limit_of_unscored_images_is_that_of_the_whole_iteration(tmp_path: Path) -> None:
    """All images of one of four parts are a quarter of the iteration's."""
    parts = ("train.prompts=4", "train.parts=4", "rewards.red={fn: toykit.blind, prompt: X}")
    probe = Trainer(toy(tmp_path, *parts))
    word = probe.train_set.texts[probe.rows()[1]]
    config = [*parts, f"rewards.red.prompt={word}"]
    metrics = Trainer(toy(tmp_path, *config, "train.max_unscored=0.25")).step()
    assert metrics["trained"] > 0
    with pytest.raises(RewardError, match=rf"prompt '{word}' \(4 of 16 images have no finite"):
        Trainer(toy(tmp_path, *config, "train.max_unscored=0.24")).step()


def test_an_evaluation_counts_its_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 prompts with 2 images each, the model breaks the last image and the reward skips the
    first prompt: 3 of 8. The mean is that of the other images, task by task."""
    decode, texts = LinearFlow.decode, ["one", "two", "three", "four"]
    records = [{"prompt": text, "tag": "ab"[i % 2]} for i, text in enumerate(texts)]
    prompts = PromptSet(texts, records, "p", "p.txt")
    options: dict[str, Any] = {"height": 16, "width": 16, "steps": 2, "images": 2}
    shown: list[int] = []

    def partly(batch: RewardBatch) -> Tensor:
        shown.append(len(batch.images))
        assert bool(batch.images.isfinite().all())
        keep = torch.tensor([text != "one" for text in batch.prompts])
        return torch.where(keep, redness(batch), NAN)

    whole = evaluate_prompts(LinearFlow(), prompts, {"red": redness}, headline="red", **options)
    monkeypatch.setattr(
        LinearFlow,
        "decode",
        lambda self, x: torch.cat([decode(self, x)[:-1], torch.full((1, 3, 16, 16), NAN)]),
    )
    options |= {"headline": "red", "max_unscored": 0.375}
    found = evaluate_prompts(LinearFlow(), prompts, {"red": partly, "all": redness}, **options)
    assert shown == [7] and found["unscored"] == {"red": 3, "all": 1}
    assert {tag: task["images"] for tag, task in found["tasks"].items()} == {"a": 2, "b": 3}
    assert found["red"] != whole["red"] and math.isfinite(found["rewards"]["all"])
    with pytest.raises(RewardError, match=r"'red' gave no score for an image of 'one' \(3 of 8"):
        evaluate_prompts(
            LinearFlow(), prompts, {"red": partly}, **{**options, "max_unscored": 0.37}
        )


# ---------------------------------------------------------------------------- rewards of a program


def test_rewards_that_are_handed_over(tmp_path: Path) -> None:
    config = toy(tmp_path, "rewards.red.weight=0.5", "rewards.red.transform={fn: rank}")
    changed = with_rewards(config, {"red": without_records, "more": Object()})
    assert list(changed.rewards) == ["red", "more"]
    assert changed.reward_weights == {"red": 0.5, "more": 1.0}
    assert len(changed.rewards["red"].transform) == 1 and changed.headline == "red"
    metrics = Trainer(changed).step()
    assert metrics["reward/red"] == pytest.approx(metrics["reward/more"])
    with pytest.raises(ConfigError, match="rewards.red: expected something to call, got 3"):
        with_rewards(config, {"red": 3})


def test_a_reward_cannot_change_a_record() -> None:
    """What it writes into lists and mappings of its own, however deep, stays there; what is no
    plain JSON is copied too, and values come back as they are."""
    kept: dict[str, Any] = {
        "list": [{"deep": [1, 2]}],
        "array": np.zeros(2),
        "pair": ([3],),
        "none": None,
    }
    whole = batch()._replace(meta=[kept, {}, {}])

    def writing(seen: RewardBatch) -> list[float]:
        own = seen.meta[0]
        assert own["list"] == [{"deep": [1, 2]}] and own["pair"] == ([3],) and own["none"] is None
        own["list"][0]["deep"].append(9)
        own["array"][0] = 7.0
        own["pair"][0].append(9)
        own["new"] = True
        return [0.0] * 3

    ask("it", writing, whole, "here")
    assert kept["list"] == [{"deep": [1, 2]}] and kept["pair"] == ([3],)
    assert "new" not in kept and kept["array"].tolist() == [0.0, 0.0]
