"""The PickScore that learns along: the library's own logits, cross-entropy and Adam, on a tiny
random CLIP."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from clipkit import (
    add_architecture,
    clip_tokenizer,
    pil,
    random_images,
    save_transformers,
    tiny_open_clip,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPImageProcessor, CLIPImageProcessorPil, CLIPModel, CLIPProcessor

from flowrl.core.errors import CheckpointError, ConfigError, DataError
from flowrl.core.types import LearnedReward, RewardBatch
from rewards.adversarial_pickscore import adversarial_pickscore

PROMPTS = ["a red circle", "two blue squares", "a cross", "a cross"]
IMAGES = random_images(8, 60, 50)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pick")
    save_transformers(
        tiny_open_clip(add_architecture(folder, "tiny-adv"), seed=2), folder / "model"
    )
    CLIPProcessor(CLIPImageProcessor(), clip_tokenizer()).save_pretrained(folder / "processor")
    return {"path": str(folder / "model"), "processor": str(folder / "processor")}


def logits(model: CLIPModel, images: Tensor) -> Tensor:
    """Return exp(logit_scale) cosine [4] by the library's own forward."""
    pixels = CLIPImageProcessorPil()([pil(image) for image in images], return_tensors="pt")
    words = clip_tokenizer()(
        PROMPTS, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    )
    return model(**pixels, **words).logits_per_image.diag()


@pytest.fixture(scope="module")
def order(parts: dict[str, Any]) -> list[int]:
    """The images in the order of their scores: four low ones, then four high ones, for each
    prompt's place."""
    model = CLIPModel.from_pretrained(parts["path"]).eval()
    with torch.no_grad():
        each = [logits(model, image.expand(4, -1, -1, -1)).mean() for image in IMAGES]
    return torch.stack(each).argsort().tolist()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("references")
    for index, image in enumerate(IMAGES):
        pil(image).save(folder / f"{index}.png")
    return [str(folder / f"{index}.png") for index in range(8)]


def batch(rows: Sequence[int], references: Sequence[Any]) -> RewardBatch:
    meta = [
        {"prompt": prompt, "references": r} for prompt, r in zip(PROMPTS, references, strict=True)
    ]
    return RewardBatch(IMAGES[list(rows)], PROMPTS, torch.arange(4), meta, torch.zeros(4))


def test_scores_are_the_librarys_logits_over_26(parts: dict[str, Any]) -> None:
    model = CLIPModel.from_pretrained(parts["path"]).eval()
    reward = adversarial_pickscore(**parts, device="cpu")
    assert isinstance(reward, LearnedReward)
    with torch.no_grad():
        expected = logits(model, IMAGES[:4]) / 26
    scores = reward(batch(range(4), [None] * 4))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)
    small = adversarial_pickscore(**parts, device="cpu", batch=3, divide=13.0)
    torch.testing.assert_close(
        small(batch(range(4), [None] * 4)), 2 * expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("layers", [1, 2])
def test_a_step_equals_torchs_cross_entropy_and_adam(
    parts: dict[str, Any], files: list[str], order: list[int], layers: int
) -> None:
    low, high = order[:4], order[4:]
    reward = adversarial_pickscore(**parts, tune_layers=layers, lr=1e-4, device="cpu", batch=3)
    before = copy.deepcopy(reward.towers.model.state_dict())
    model = CLIPModel.from_pretrained(parts["path"]).eval().requires_grad_(False)
    tuned = [
        p.requires_grad_(True)
        for layer in model.vision_model.encoder.layers[-layers:]
        for p in layer.parameters()
    ]
    optimizer = torch.optim.Adam(tuned, lr=1e-4, betas=(0.5, 0.999))
    for _ in range(2):
        both = torch.stack([logits(model, IMAGES[low]), logits(model, IMAGES[high])], dim=1)
        assert both[:, 0].mean() < both[:, 1].mean()
        loss = torch.nn.functional.cross_entropy(
            both, torch.zeros(4, dtype=torch.long)
        )  # the reference is class 0
        metrics = reward.update(batch(high, [files[i] for i in low]))
        assert metrics["loss"] == pytest.approx(loss.item(), abs=2e-4) and metrics["trained"] == 1
        assert metrics["real"] == pytest.approx(both[:, 0].mean().item() / 26, abs=1e-5)
        assert metrics["fake"] == pytest.approx(both[:, 1].mean().item() / 26, abs=1e-5)
        assert not reward.trains_policy(0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after, expected = reward.towers.model.state_dict(), model.state_dict()
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    last = [f"vision_model.encoder.layers.{2 - k}." for k in range(1, layers + 1)]
    assert moved and all(name.startswith(tuple(last)) for name in moved)
    for name in moved:
        if not name.endswith(
            "k_proj.bias"
        ):  # softmax does not see it: its gradient is rounding, which Adam scales to lr
            off = ((after[name] - expected[name]).abs() > 2e-6).float().mean()  # a step is 1e-4
            assert off < 0.01, name  # a few gradients are rounding only, too


def test_references_ahead_leave_the_turn_to_the_policy(
    parts: dict[str, Any], files: list[str], order: list[int]
) -> None:
    low, high = order[:4], order[4:]
    reward = adversarial_pickscore(**parts, device="cpu")
    assert reward.trains_policy(0)
    before = reward.state_dict()
    metrics = reward.update(batch(low, [files[i] for i in high]))
    assert metrics["trained"] == 0 and metrics["real"] > metrics["fake"] and reward.trains_policy(1)
    after = reward.state_dict()
    assert [name for name in after if not torch.equal(after[name], before[name])] == [
        "counter.rounds"
    ]
    reward.update(batch(high, [files[i] for i in low]))
    assert not reward.trains_policy(2)
    restored = adversarial_pickscore(**parts, device="cpu")
    restored.load_state_dict(reward.state_dict())
    assert not restored.trains_policy(2)


def test_training_brings_the_references_ahead(
    parts: dict[str, Any], files: list[str], order: list[int]
) -> None:
    reward = adversarial_pickscore(**parts, lr=1e-3, device="cpu")
    case = batch(order[4:], [files[i] for i in order[:4]])
    seen = [reward.update(case) for _ in range(40)]
    trained = [row["trained"] for row in seen]
    assert trained[0] == 1 and trained[-1] == 0 and seen[-1]["loss"] < seen[0]["loss"]


def test_resume_is_exact(
    parts: dict[str, Any], files: list[str], order: list[int], tmp_path: Path
) -> None:
    case = batch(
        order[4:],
        [[files[i] for i in order[:2]], files[order[2]], files[order[3]], files[order[0]]],
    )

    def make() -> adversarial_pickscore:
        return adversarial_pickscore(**parts, lr=1e-4, device="cpu", batch=3)

    whole, first, second = make(), make(), make()
    expected = [whole.update(case) for _ in range(4)]
    for _ in range(2):
        first.update(case)
    save_file(first.state_dict(), tmp_path / "state.safetensors")
    second.load_state_dict(load_file(tmp_path / "state.safetensors"))
    assert [second.update(case) for _ in range(2)] == expected[2:]
    mine, other = second.state_dict(), whole.state_dict()
    assert mine.keys() == other.keys() and all(
        torch.equal(mine[name], other[name]) for name in mine
    )
    with pytest.raises(CheckpointError):
        adversarial_pickscore(**parts, tune_layers=2, device="cpu").load_state_dict(mine)


def test_bfloat16_computes_and_float32_learns(
    parts: dict[str, Any], files: list[str], order: list[int]
) -> None:
    full, half = (
        adversarial_pickscore(**parts, dtype=d, lr=5e-6, device="cpu")
        for d in ("float32", "bfloat16")
    )
    case = batch(order[4:], [files[i] for i in order[:4]])
    before = half.state_dict()
    torch.testing.assert_close(half(case), full(case), atol=0.05, rtol=0.05)
    assert not torch.equal(half(case), full(case))
    half.update(case)
    after = half.state_dict()
    name = next(
        name for name in after if name.startswith("weight.") and name.endswith("q_proj.weight")
    )
    assert after[name].dtype == torch.float32 and not torch.equal(after[name], before[name])


def test_wrong_arguments_and_records(parts: dict[str, Any], files: list[str]) -> None:
    wrong: dict[str, Any]
    for wrong in (
        {"tune_layers": 0},
        {"tune_layers": 3},
        {"lr": 0.0},
        {"divide": -1.0},
        {"batch": 0},
        {"dtype": "float16"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            adversarial_pickscore(**parts, **wrong)
    reward = adversarial_pickscore(**parts, device="cpu")
    with pytest.raises(DataError, match="line 3"):
        reward.check_record({"prompt": "a"}, "line 3")
    with pytest.raises(DataError, match="1 records"):
        reward.update(batch(range(4), files[:4])._replace(meta=[{}]))
