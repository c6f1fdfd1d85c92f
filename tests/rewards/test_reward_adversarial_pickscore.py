"""The PickScore that learns along: torch's cross-entropy and Adam, on a tiny random CLIP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from clipkit import batch_of, clip_tokenizer, pil, random_images
from torch import Tensor
from transformers import CLIPImageProcessorPil, CLIPModel
from weightkit import Weights

from flowrl.core.types import RewardBatch
from rewards.adversarial_pickscore import adversarial_pickscore

PROMPTS = ["a red circle", "two blue squares", "a cross", "a cross"]
IMAGES = random_images(8, 60, 50)


def logits(model: CLIPModel, images: Tensor) -> Tensor:
    """Return exp(logit_scale) cosine [4] by the library's own forward."""
    pixels = CLIPImageProcessorPil()([pil(image) for image in images], return_tensors="pt")
    words = clip_tokenizer()(PROMPTS, padding="max_length", max_length=77, return_tensors="pt")
    return model(**pixels, **words).logits_per_image.diag()


class Case:
    """Images in the order of their scores: four low ones, then four high ones."""

    def __init__(self, weights: Weights, folder: Any) -> None:
        self.parts = weights.clip.parts
        model = CLIPModel.from_pretrained(self.parts["path"]).eval()
        with torch.no_grad():
            each = [logits(model, image.expand(4, -1, -1, -1)).mean() for image in IMAGES]
        order = torch.stack(each).argsort().tolist()
        self.low, self.high, self.files = order[:4], order[4:], []
        for index, image in enumerate(IMAGES):
            self.files.append(str(folder / f"{index}.png"))
            pil(image).save(self.files[index])

    def make(self, **options: Any) -> adversarial_pickscore:
        return adversarial_pickscore(**self.parts, device="cpu", **options)

    def batch(self, rows: Sequence[int], references: Sequence[int]) -> RewardBatch:
        columns = [self.files[i] for i in references]
        return batch_of(IMAGES[list(rows)], PROMPTS, references=columns)


@pytest.fixture(scope="module")
def case(weights: Weights, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(weights, tmp_path_factory.mktemp("references"))


def test_scores_are_divided_by_26(case: Case) -> None:
    batch = case.batch(range(4), range(4))
    scores = case.make()(batch)
    torch.testing.assert_close(case.make(divide=1.0)(batch), 26 * scores, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_equals_torchs_cross_entropy_and_adam(case: Case, layers: int) -> None:
    reward = case.make(tune_layers=layers, lr=1e-4, batch=3)
    before = copy.deepcopy(reward.towers.model.state_dict())
    model = CLIPModel.from_pretrained(case.parts["path"]).eval().requires_grad_(False)
    tuned = list(model.vision_model.encoder.layers[-layers:].requires_grad_(True).parameters())
    optimizer = torch.optim.Adam(tuned, lr=1e-4, betas=(0.5, 0.999))
    for _ in range(2):
        pair = [logits(model, IMAGES[case.low]), logits(model, IMAGES[case.high])]
        both = torch.stack(pair, dim=1)
        assert both[:, 0].mean() < both[:, 1].mean()
        # the reference is class 0
        loss = torch.nn.functional.cross_entropy(both, torch.zeros(4, dtype=torch.long))
        metrics = reward.update(case.batch(case.high, case.low))
        assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-4) and metrics["trained"] == 1
        assert metrics["real"] == pytest.approx(both[:, 0].mean().item() / 26, abs=1e-5)
        assert metrics["fake"] == pytest.approx(both[:, 1].mean().item() / 26, abs=1e-5)
        assert not reward.trains_policy(0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after, expected = reward.towers.model.state_dict(), model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    last = tuple(f"vision_model.encoder.layers.{2 - k}." for k in range(1, layers + 1))
    assert moved and all(name.startswith(last) for name in moved)
    for name in moved:
        # softmax does not see k's bias: its gradient is rounding, which Adam scales to lr
        if not name.endswith("k_proj.bias"):
            off = ((after[name] - expected[name]).abs() > 2e-6).float().mean()  # a step is 1e-4
            assert off < 0.01, name  # a few gradients are rounding only, too


def test_references_ahead_leave_the_turn_to_the_policy(case: Case) -> None:
    reward = case.make()
    assert reward.trains_policy(0)
    before = reward.state_dict()
    metrics = reward.update(case.batch(case.low, case.high))
    assert metrics["trained"] == 0 and metrics["real"] > metrics["fake"] and reward.trains_policy(1)
    after = reward.state_dict()
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    assert changed == ["counter.rounds"]
    reward.update(case.batch(case.high, case.low))
    restored = case.make()
    restored.load_state_dict(reward.state_dict())
    assert not reward.trains_policy(2) and not restored.trains_policy(2)


def test_training_brings_the_references_ahead(case: Case) -> None:
    reward, batch = case.make(lr=1e-3), case.batch(case.high, case.low)
    seen = [reward.update(batch)]
    while seen[-1]["trained"] and len(seen) < 40:
        seen.append(reward.update(batch))
    assert seen[0]["trained"] == 1 and seen[-1]["trained"] == 0
    assert seen[-1]["loss"] < seen[0]["loss"]


def test_bfloat16_computes_and_float32_learns(case: Case) -> None:
    half, batch = case.make(dtype="bfloat16", lr=5e-6), case.batch(case.high, case.low)
    before = half.state_dict()
    half.update(batch)
    after = half.state_dict()
    name = next(name for name in after if name.startswith("weight.") and "q_proj.weight" in name)
    assert after[name].dtype == torch.float32 and not torch.equal(after[name], before[name])
