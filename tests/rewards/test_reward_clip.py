"""The CLIP family's scores: those of the libraries' own models, transforms and tokenizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clipkit import (
    PROMPTS,
    batch_of,
    clip_tokenizer,
    pil,
    public_pixels,
    random_images,
    tiny_open_clip,
)
from torch import Tensor
from transformers import CLIPImageProcessorPil, CLIPModel
from weightkit import Clip, Weights

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch
from rewards.adversarial_pickscore import adversarial_pickscore
from rewards.aesthetic import aesthetic, collapse
from rewards.clip import clip
from rewards.clip_reference import clip_reference
from rewards.hpsv2 import FILES, hpsv2
from rewards.pickscore import pickscore

BATCH = batch_of(random_images(6, 300, 227), PROMPTS)
OWN = 81.4509  # exp(4.4)


def of_open_clip(kit: Clip, mode: str) -> Tensor:
    """Return the logits by open_clip's transform, tokenizer and model, one image at a time."""
    transform = open_clip.image_transform(224, is_train=False, resize_mode=mode)
    tokenizer, logits = open_clip.get_tokenizer(kit.architecture), []
    with torch.no_grad():
        for image, prompt in zip(BATCH.images, PROMPTS, strict=True):
            one = kit.model.get_logits(transform(pil(image))[None], tokenizer([prompt]))
            logits.append(one[0].flatten())
    return torch.cat(logits)


def inputs(prompts: list[str]) -> dict[str, Tensor]:
    """Return what the public code feeds a CLIPModel: PIL pixels, prompts cut to 77 tokens."""
    pixels = CLIPImageProcessorPil()([pil(i) for i in BATCH.images], return_tensors="pt")
    options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 77}
    return {**pixels, **clip_tokenizer()(prompts, return_tensors="pt", **options)}


@pytest.mark.parametrize("resize", ["shortest", "squash"])
def test_open_clip_scores_are_the_librarys(weights: Weights, resize: str) -> None:
    reward = clip(**weights.clip.open_clip, scale=None, resize=resize)  # type: ignore[arg-type]
    scores = reward(BATCH)
    expected = of_open_clip(weights.clip, resize)
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-6)  # logits of up to 81
    assert scores.std() > 1


@pytest.mark.parametrize("name", ["clip", "pickscore", "adversarial_pickscore"])
def test_transformers_scores_are_the_librarys(weights: Weights, name: str) -> None:
    """Expected: the diagonal of logits_per_image, and the public formula by embeddings."""
    kit = weights.clip
    rewards: dict[str, Any] = {
        "clip": lambda: clip(path=str(kit.folder), scale=None),
        "pickscore": lambda: pickscore(**kit.parts),
        "adversarial_pickscore": lambda: adversarial_pickscore(**kit.parts, divide=1.0),
    }
    given = inputs(PROMPTS)
    assert given["input_ids"].shape == (6, 77)  # the long prompt is cut
    with torch.no_grad():
        out = CLIPModel.from_pretrained(kit.folder)(**given)
    scores = rewards[name]()(BATCH)
    torch.testing.assert_close(scores, out.logits_per_image.diag(), atol=1e-4, rtol=1e-5)
    cosine = torch.cosine_similarity(out.image_embeds.double(), out.text_embeds.double())
    torch.testing.assert_close(scores.double(), OWN * cosine, atol=2e-4, rtol=0)


def test_the_librarys_answer_is_an_object_with_the_projected_embedding(weights: Weights) -> None:
    """transformers 5 returns no tensor: pooler_output must be the projected embedding."""
    model, given = CLIPModel.from_pretrained(weights.clip.folder), inputs(PROMPTS)
    with torch.no_grad():
        out = model(**given)
        image = model.get_image_features(given["pixel_values"])
        text = model.get_text_features(given["input_ids"], attention_mask=given["attention_mask"])
    for found, unit in ((image, out.image_embeds), (text, out.text_embeds)):
        assert not isinstance(found, Tensor)
        torch.testing.assert_close(torch.nn.functional.normalize(found.pooler_output), unit)


def test_back_ends_agree_on_the_activation(weights: Weights) -> None:
    quick, given = weights.quick, weights.quick.open_clip
    ours = clip(**given)(BATCH)
    torch.testing.assert_close(clip(path=str(quick.folder))(BATCH), ours, atol=1e-5, rtol=0)
    assert ours.std() > 0.02 and ours.abs().max() <= 1
    other = clip(**given | {"architecture": weights.clip.architecture})
    assert not torch.allclose(other(BATCH), ours, atol=1e-3)


@pytest.mark.parametrize(
    ("version", "seed", "antialias"), [("v2.0", 0, True), ("v2.1", 3, True), ("v2.1", 3, False)]
)
def test_hpsv2_scores_are_the_librarys(
    weights: Weights, version: Any, seed: int, antialias: bool
) -> None:
    """A plain cosine by open_clip's forward, which normalises; a file is read as it is."""
    name = weights.clip.architecture
    model, tokens, expected = tiny_open_clip(name, seed=seed), open_clip.get_tokenizer(name), []
    with torch.no_grad():
        for image, prompt in zip(BATCH.images, PROMPTS, strict=True):
            pixels = public_pixels(image, antialias)[None]
            seen, read, _ = model(pixels, tokens([prompt]))
            expected.append((seen * read).sum())
    scores = hpsv2(**weights.hps, version=version, antialias=antialias)(BATCH)
    torch.testing.assert_close(scores, torch.stack(expected), atol=1e-6, rtol=0)
    assert scores.std() > 0.02 and scores.abs().max() <= 1
    if antialias:
        given = weights.hps | {"path": f"{weights.hps['path']}/{FILES[version]}"}
        assert torch.equal(hpsv2(**given)(BATCH), scores)
    else:
        assert (scores - hpsv2(**weights.hps)(BATCH)).abs().max() > 1e-3  # it counts


def layers(state: dict[str, Tensor], embedding: Tensor) -> Tensor:
    """Run the aesthetic net layer by layer in float64: in eval mode its dropouts do nothing."""
    for index in (0, 2, 4, 6, 7):
        weight, bias = (state[f"layers.{index}.{kind}"].double() for kind in ("weight", "bias"))
        embedding = torch.nn.functional.linear(embedding, weight, bias)
    return embedding.squeeze(-1)


def test_the_aesthetic_map_is_the_layered_net(weights: Weights) -> None:
    w, b = collapse(weights.mlp)
    points = torch.randn(200, 768, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    points[0] = 0
    expected = layers(weights.mlp, points)
    torch.testing.assert_close(points @ w + b, expected, rtol=1e-12, atol=1e-11)


def test_aesthetic_scores_are_those_of_the_public_path(weights: Weights) -> None:
    """open_clip's transform and embedding, over its norm, through the layers in float64."""
    transform = open_clip.image_transform(224, is_train=False)
    pixels = torch.stack([transform(pil(image)) for image in BATCH.images])
    with torch.no_grad():
        embedding = weights.wide.model.encode_image(pixels).double()
    expected = layers(weights.mlp, embedding / embedding.norm(dim=-1, keepdim=True))
    reward = aesthetic(**weights.aesthetic)
    scores = reward(BATCH)
    torch.testing.assert_close(scores.double(), expected, atol=2e-5, rtol=0)
    assert scores.std() > 0.01  # 500 times the tolerance
    # the common bug is no norm; and prompts do not matter
    assert (layers(weights.mlp, embedding) - expected).abs().min() > 0.1
    assert torch.equal(reward(batch_of(BATCH.images, ["x"] * 6)), scores)


@pytest.mark.parametrize("name", ["open_clip", "transformers", "pickscore"])
def test_scale_and_divide(weights: Weights, name: str) -> None:
    """Closed form from one cosine and exp(4.4); rounded to bfloat16, 4.40625, it would be 81.96."""

    given = weights.clip.parts
    make: Any = partial(pickscore, **given)
    if name != "pickscore":
        given = {"open_clip": weights.clip.open_clip}.get(name, {"path": given["path"]})
        make = partial(clip, **given)
    usual = make()
    scores = usual(BATCH)
    cosine = scores / OWN if name == "pickscore" else scores
    for scale, divide, factor in ((None, 26.0, OWN / 26), (2.5, 10.0, 0.25)):
        scaled = make(scale=scale, divide=divide)
        torch.testing.assert_close(scaled(BATCH), factor * cosine, rtol=5e-6, atol=1e-7)
    assert make(dtype="bfloat16").towers.scale == pytest.approx(OWN, abs=1e-3)


@pytest.mark.parametrize("name", ["clip", "pickscore"])
def test_each_prompt_is_read_once(
    weights: Weights, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward: Any = clip(**weights.clip.open_clip, batch=2)
    if name == "pickscore":
        reward = pickscore(**weights.clip.parts, batch=2)
    read: list[str] = []
    original = reward.towers.read

    def watch(prompts: list[str]) -> Tensor:
        read.extend(prompts)
        embedding: Tensor = original(prompts)
        return embedding

    monkeypatch.setattr(reward.towers, "read", watch)
    reward(BATCH)
    assert read == list(dict.fromkeys(PROMPTS)) and len(read) == 5


def test_a_reference_is_compared_by_the_models_own_features(
    weights: Weights, tmp_path: Path
) -> None:
    """By hand over CLIPModel's image features; an image that is its own reference has cosine 1."""
    images = random_images(3, 40, 52)
    files = []
    for i in (1, 2):
        files.append(str(tmp_path / f"{i}.png"))
        pil(images[i]).save(files[-1])
    given, folder = weights.clip.parts, weights.clip.folder
    model = CLIPModel.from_pretrained(folder).eval()
    pixels = CLIPImageProcessorPil.from_pretrained(folder)([pil(i) for i in images])["pixel_values"]
    with torch.no_grad():
        seen = model.get_image_features(torch.as_tensor(np.stack(pixels))).pooler_output
    seen = seen / seen.norm(dim=-1, keepdim=True)
    cosines = seen @ seen[1:].T
    meta = [{"prompt": "p", "references": files}] * 3
    batch = RewardBatch(images, ["p"] * 3, torch.arange(3), meta, torch.zeros(3))
    close = partial(torch.testing.assert_close, atol=2e-6, rtol=0)
    close(clip_reference(**given)(batch), cosines.amax(1))
    close(clip_reference(**given, over="mean")(batch), cosines.mean(1))
    assert cosines[1, 0] == pytest.approx(1, abs=1e-6)
    with pytest.raises(DataError, match="references"):
        clip_reference(**given).check_record({"prompt": "p"}, "line 3")


def test_each_cell_is_scored_by_its_own_text(weights: Weights) -> None:
    """Expected: open_clip's logits of cells that are cut by slicing, on texts written out by hand;
    the mean of two and of four. Of 61 rows and 47 columns the odd last ones belong to no cell."""
    images = random_images(2, 61, 47, seed=4)
    prompts = [
        "A 1x2 set of cats. [TOP]-[LEFT]: one cat RIGHT: no label, as no full stop is before it. "
        "[RIGHT]:two cats",
        'A sheet of 2 x 2 signs. A1: a sign "go" A2: stop. B1:  "wait" B2: run.',
    ]
    pieces = [images[0, :, :, :23], images[0, :, :, 23:46]]
    pieces += [images[1, :, :30, :23], images[1, :, :30, 23:46]]
    pieces += [images[1, :, 30:60, :23], images[1, :, 30:60, 23:46]]
    texts = ["one cat RIGHT: no label, as no full stop is before it.", "two cats."]
    texts += ['a sign "go.', "stop.", '"wait.', "run."]
    kit = weights.clip
    transform = open_clip.image_transform(224, is_train=False)
    tokenizer, logits = open_clip.get_tokenizer(kit.architecture), []
    with torch.no_grad():
        for piece, text in zip(pieces, texts, strict=True):
            one = kit.model.get_logits(transform(pil(piece))[None], tokenizer([text]))
            logits.append(one[0].flatten())
    own = torch.cat(logits)
    expected = torch.stack([own[:2].mean(), own[2:].mean()])
    reward = clip(**kit.open_clip, scale=None, cells=True, batch=4)
    found = reward(batch_of(images, prompts))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-6)
    # the whole grid by its whole prompt is another score, and so are cells by each other's texts
    whole = clip(**kit.open_clip, scale=None)
    assert (whole(batch_of(images, prompts)) - expected).abs().min() > 0.1
    assert reward(batch_of(images[:0], [])).shape == (0,)
    # prompts that cannot be read are refused before an image is made, and only where cells count
    reward.check_record({"prompt": prompts[0]}, "line 1")
    for prompt, message in (
        ("a cat", "line 3: rewards.clip: expected a grid of 2 to 16 cells"),
        ("a 1024x1024 photo. A: b. B: c", "expected a grid"),
        ("a 1x2 set. LEFT: one cat", "a text for each of 2 cells, .* got 1 of which 0 are empty"),
        ("a 1x2 set. LEFT: . RIGHT: cat", "got 2 of which 1 are empty"),
        ("a 1x2 set. Left: one. Right: two", "got 0"),
        ("a 1x2 set. RIGHT: one. LEFT: two", "got RIGHT for row 1, column 1: put them in that"),
    ):
        with pytest.raises(DataError, match=message):
            reward.check_record({"prompt": prompt}, "line 3")
        whole.check_record({"prompt": prompt}, "line 3")
