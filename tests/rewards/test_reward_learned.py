"""Rewards that are trained along: what a checkpoint keeps of them, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from clipkit import batch_of, pil, random_images
from safetensors.torch import load_file, save_file
from torch import Tensor
from weightkit import Weights

from flowrl.core.abilities import LearnedReward
from flowrl.core.errors import CheckpointError, DataError
from flowrl.core.types import RewardBatch
from rewards.adversarial import adversarial
from rewards.adversarial_pickscore import adversarial_pickscore

PROMPTS = ["a red circle", "two blue squares", "a cross", "a cross"]


@pytest.fixture(scope="module")
def batch(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> RewardBatch:
    """Images that score higher than their references, so that the PickScore is trained on them."""
    images, folder, files = random_images(8, 60, 50), tmp_path_factory.mktemp("references"), []
    judge = adversarial_pickscore(**weights.clip.parts, device="cpu")
    each = [judge(batch_of(images, [prompt] * 8)) for prompt in PROMPTS]
    images = images[torch.stack(each).mean(0).argsort()]
    for index in range(4):
        files.append(str(folder / f"{index}.png"))
        pil(images[index]).save(files[index])
    columns: list[Any] = [files[:2], files[2], files[3], files[1:]]
    return batch_of(images[4:], PROMPTS, references=columns)


@pytest.fixture(params=["adversarial", "adversarial_pickscore"])
def make(request: pytest.FixtureRequest, weights: Weights) -> Callable[..., Any]:
    """Return how one of the rewards is made, such that every update trains."""

    def head(**more: Any) -> adversarial:
        given: dict[str, Any] = {"patches": 4, "lr": 1e-2, "d_steps": 2, "policy_every": 3}
        return adversarial(path=weights.dino, device="cpu", batch=3, **given, **more)

    def pick(**more: Any) -> adversarial_pickscore:
        given = {"lr": 1e-5, "device": "cpu", "batch": 3, **weights.clip.parts}
        return adversarial_pickscore(**given, **more)

    return head if request.param == "adversarial" else pick


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    equal = [torch.equal(value, second[name]) for name, value in first.items()]
    return first.keys() == second.keys() and all(equal)


def rounds(reward: Any, batch: RewardBatch, count: int) -> list[Any]:
    """Score and update `count` times -> all numbers."""
    out = []
    for _ in range(count):
        out += [reward(batch).tolist(), reward.update(batch), reward.trains_policy(reward.rounds)]
    return out


def test_resume_is_exact(make: Callable[..., Any], batch: RewardBatch, tmp_path: Path) -> None:
    whole, first, second = make(), make(), make()
    assert isinstance(whole, LearnedReward)
    fresh = whole.state_dict()
    expected = rounds(whole, batch, 4)
    rounds(first, batch, 2)
    kept = first.state_dict()
    save_file(kept, tmp_path / "state.safetensors")
    name = next(name for name in kept if name.endswith(".weight") and "weight." in name)
    assert fresh.keys() == kept.keys() and not torch.equal(kept[name], fresh[name])
    rounds(first, batch, 2)  # goes on; what was saved must not change with it
    assert not torch.equal(kept[name], first.state_dict()[name])
    rounds(second, batch._replace(images=batch.images.flip(0)), 1)  # must be gone afterwards
    second.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert same(second.state_dict(), kept)
    assert rounds(second, batch, 2) == expected[6:]
    assert same(second.state_dict(), whole.state_dict())


def test_scoring_changes_nothing(make: Callable[..., Any], batch: RewardBatch) -> None:
    reward = make()
    reward.update(batch)
    before, scores = reward.state_dict(), reward(batch)
    assert torch.equal(reward(batch), scores) and same(before, reward.state_dict())


def test_a_state_or_a_batch_that_does_not_fit_is_refused(
    make: Callable[..., Any], batch: RewardBatch
) -> None:
    reward = make()
    head, before = isinstance(reward, adversarial), reward.state_dict()
    other = (make(hidden=9) if head else make(tune_layers=2)).state_dict()
    lost = {name: value for name, value in before.items() if name != "counter.rounds"}
    wrong = [(other, "9 do not fit, first adam.0.bias" if head else "do not fit")]
    wrong += [(lost, "counter.rounds"), (before | {"x": torch.zeros(1)}, "x")]
    for state, name in wrong:
        with pytest.raises(CheckpointError, match=name):
            reward.load_state_dict(state)
    with pytest.raises(DataError, match="1 records"):
        reward.update(batch._replace(meta=[{}]))
    with pytest.raises(DataError, match="line 3"):
        reward.check_record({"prompt": "a"}, "line 3")
    reward.check_record(batch.meta[0], "line 3")
    assert same(before, reward.state_dict())
