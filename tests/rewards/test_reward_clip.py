"""The CLIP family: its scores are those of the libraries' own models, transforms and tokenizers,
its pixels those of the public code, and its texts of cells those of the prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from clipkit import (
    MEAN,
    PROMPTS,
    STD,
    batch_of,
    clip_tokenizer,
    pil,
    public_pixels,
    random_images,
    tiny_open_clip,
)
from PIL import Image
from tiny import tiny_sd15
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as vision
from transformers import CLIPImageProcessor, CLIPImageProcessorPil, CLIPModel
from weightkit import Clip, Weights

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.training.trainer import Trainer
from rewards._common.pixels import letterbox, normalise, shortest, shortest_tensors, squash
from rewards._common.prompts import cell_texts, with_words
from rewards.adversarial_pickscore import adversarial_pickscore
from rewards.aesthetic import aesthetic, collapse
from rewards.clip import clip
from rewards.clip_reference import clip_reference
from rewards.hpsv2 import FILES, hpsv2
from rewards.pickscore import pickscore

BATCH = batch_of(random_images(6, 300, 227), PROMPTS)
OWN = 81.4509  # exp(4.4)


def of_open_clip(kit: Clip, mode: str, images: Any, prompts: list[str]) -> Tensor:
    """Return the logits by open_clip's transform, tokenizer and model, one image at a time."""
    transform = open_clip.image_transform(224, is_train=False, resize_mode=mode)
    tokenizer, logits = open_clip.get_tokenizer(kit.architecture), []
    with torch.no_grad():
        for image, prompt in zip(images, prompts, strict=True):
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
    expected = of_open_clip(weights.clip, resize, BATCH.images, PROMPTS)
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


def test_aesthetic_scores_are_those_of_the_public_path(weights: Weights) -> None:
    """The affine map is the layered net; open_clip's transform and embedding, over its norm,
    through the layers in float64."""
    w, b = collapse(weights.mlp)
    points = torch.randn(200, 768, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    points[0] = 0
    torch.testing.assert_close(points @ w + b, layers(weights.mlp, points), rtol=1e-12, atol=1e-11)
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


# --------------------------------------------------------- scores of tensors, which can be followed


def by_torchvision(images: Tensor) -> Tensor:
    """Resize and crop tensors as ReFL's code does, with antialiasing."""
    bicubic = InterpolationMode.BICUBIC
    return vision.center_crop(vision.resize(images, [224], bicubic, antialias=True), [224])


SIZES = [(300, 227), (512, 512), (64, 64), (97, 333), (224, 224)]


@pytest.mark.parametrize("size", SIZES)
def test_scores_of_tensors_are_near_those_of_files(weights: Weights, size: tuple[int, int]) -> None:
    """Expected of aesthetic: torchvision's resize of tensors and open_clip's embedding, through the
    affine map; beside PIL's path within .005, where images differ by .05 or more. HPSv2 resizes
    tensors in both paths: the same scores. Random images have 256 levels, which rounding leaves."""
    batch = batch_of(random_images(6, *size), PROMPTS)
    pixels = by_torchvision(batch.images)
    torch.testing.assert_close(shortest_tensors(batch.images, 224), pixels, atol=1e-6, rtol=0)
    with torch.no_grad():
        embedding = weights.wide.model.encode_image(vision.normalize(pixels, MEAN, STD)).double()
    w, b = collapse(weights.mlp)
    expected = embedding / embedding.norm(dim=-1, keepdim=True) @ w + b
    found = aesthetic(**weights.aesthetic, gradient=True, batch=4)(batch)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)
    near = 5e-3 if size != (224, 224) else 2e-5  # which is not resized
    files = aesthetic(**weights.aesthetic)(batch)
    torch.testing.assert_close(found, files, atol=near, rtol=0)
    assert found.std() > 10 * near and found.dtype == torch.float32
    files = hpsv2(**weights.hps)(batch)
    found = hpsv2(**weights.hps, gradient=True, batch=4)(batch)
    torch.testing.assert_close(found, files, atol=2e-6, rtol=0)
    assert found.dtype == torch.float32 and files.std() > 1e-3


def test_words_stand_in_front_of_prompts_in_turn(weights: Weights) -> None:
    """Groups 0, 1, 2, 3 with two words: the first, the second, the first, the second. The score is
    that of the prompt with the word in it, and another than without."""
    prompts = ["a cat", "a dog", "a red circle", "a cat"]
    batch = batch_of(random_images(4, 64, 64), prompts)
    batch = batch._replace(group=torch.arange(4))
    said = ["Real. a cat", "Flat. a dog", "Real. a red circle", "Flat. a cat"]
    assert with_words(batch, ["Real", "Flat"]).prompts == said
    assert with_words(batch, []) is batch
    for gradient in (False, True):
        reward = hpsv2(**weights.hps, words=["Real", " Flat "], gradient=gradient)
        plain = hpsv2(**weights.hps, gradient=gradient)
        assert torch.equal(reward(batch), plain(batch._replace(prompts=said)))
        assert not torch.equal(reward(batch), plain(batch))


@pytest.mark.parametrize("name", ["sd15/draft", "sd15/align_prop"])
def test_a_public_config_trains_along_it(weights: Weights, tmp_path: Path, name: str) -> None:
    """One iteration with a tiny Stable Diffusion and a tiny CLIP: the trained images have the
    scores of the rollout's, which were rounded to 8 bits, and LoRA moves. Without `gradient` the
    config is refused in words."""
    (tmp_path / "p.txt").write_text("a red fox\na blue cat\n")
    small = [
        f"model.path={tiny_sd15(tmp_path / 'sd')}",
        "model.dtype=float32",
        "image={height: 16, width: 16}",
        f"prompts={{train: {tmp_path}/p.txt, test: {tmp_path}/p.txt}}",
        "plan.steps=3",
        "train.prompts=2",
        *(f"rewards.aesthetic.{key}={value}" for key, value in weights.aesthetic.items()),
    ]
    with pytest.raises(ConfigError, match="aesthetic and hpsv2 with gradient: true"):
        Trainer(load_config(name, [*small, "rewards.aesthetic.gradient=false"]))
    trainer = Trainer(load_config(name, small))
    before = [weight.detach().clone() for weight in trainer.params.values()]
    metrics = trainer.step()
    assert metrics["image_reward"] == pytest.approx(metrics["reward/aesthetic"], abs=0.02)
    pairs = zip(before, trainer.params.values(), strict=True)
    assert metrics["grad_norm"] > 0 and any(not torch.equal(*pair) for pair in pairs)


# ------------------------------------------------------------------------------------------- pixels


SHAPES = [(512, 512), (224, 224), (64, 64), (64, 100), (300, 227), (227, 300), (224, 231)]


@pytest.mark.parametrize("size", [*SHAPES, (1000, 333), (100, 321), (1000, 7)])
def test_pixels_are_those_of_open_clip_and_of_hpsv2(size: tuple[int, int]) -> None:
    """open_clip's to the last bit; letterboxed ones are torchvision's, as in HPSv2's code."""
    image = random_images(1, *size)[0]
    for mode, ours in {"shortest": shortest, "squash": squash}.items():
        if min(size) > 7:
            expected = open_clip.image_transform(224, is_train=False, resize_mode=mode)(pil(image))
            assert torch.equal(normalise(ours(pil(image), 224)), expected)
    for antialias in (True, False):
        found = normalise(letterbox(pil(image), 224, antialias=antialias))
        expected = public_pixels(image, antialias)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [(512, 512), (64, 100), (300, 227), (225, 233), (1000, 333)])
def test_transformers_pixels_are_pils(weights: Weights, size: tuple[int, int]) -> None:
    """Expected: Pillow and numpy by hand; transformers rounds the crop's corner down."""
    image = pil(random_images(1, *size)[0])
    short = min(image.size)
    width, height = (224 if side == short else int(224 * side / short) for side in image.size)
    left, top = (width - 224) // 2, (height - 224) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    levels = np.asarray(resized.crop((left, top, left + 224, top + 224))) / 255
    towers: Any = clip(path=str(weights.clip.folder)).towers
    found = towers.images([image], return_tensors="pt")["pixel_values"][0]
    expected = (levels - np.array(MEAN)) / np.array(STD)
    np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=2e-6)
    # torchvision, the default, is 1 to 3 of 255 levels apart (measured)
    modern = CLIPImageProcessor()([image], return_tensors="pt")["pixel_values"][0]
    assert 0.9 < (found - modern).abs().max() * 255 * max(STD) < 4.5


def test_letterboxes_are_black_before_the_normalisation() -> None:
    """Fixture: (-1.79226, -1.75210, -1.48022), the reference, section 4.4; = -mean / std. A long
    side of 224 is padded, too: HPSv2's code would hand on an image that its network cannot take."""
    found = normalise(letterbox(pil(random_images(1, 100, 300)[0]), 224))
    expected = torch.tensor([-1.79226, -1.75210, -1.48022])
    for row, column in ((0, 0), (73, 223), (223, 100), (149, 5)):
        torch.testing.assert_close(found[:, row, column], expected, atol=6e-6, rtol=0)
    for row in (74, 148):  # 300 x 100 -> 224 x 75: rows 74 to 148 are image
        assert not torch.allclose(found[:, row, 100], expected, atol=1e-2)
    image = random_images(1, 100, 224)[0]
    found = letterbox(pil(image), 224)
    assert found.shape == (3, 224, 224)
    torch.testing.assert_close(found[:, 62:162], image, atol=1e-7, rtol=0)
    assert found[:, :62].abs().max() == 0 and found[:, 162:].abs().max() == 0


# ----------------------------------------------------------------------------------- texts of cells


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
    own = of_open_clip(kit, "shortest", pieces, texts)
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


ROWS = ("[TOP]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[LEFT]", "[BOTTOM]-[RIGHT]")
FOUR = ("LEFT", "MIDDLE-LEFT", "MIDDLE-RIGHT", "RIGHT")  # PaCo-RL's columns, where there are four


NINE: tuple[str, ...] = (
    "TOP-LEFT",
    "TOP-CENTER",
    "TOP-RIGHT",
    "MIDDLE-LEFT",
    "CENTER",
    "MIDDLE-RIGHT",
)
NINE += ("BOTTOM-LEFT", "BOTTOM-MIDDLE", "BOTTOM-RIGHT")


def read(labels: tuple[str, ...], grid: tuple[int, int]) -> list[str]:
    parts = [f"{label}: text {number}." for number, label in enumerate(labels)]
    return cell_texts(f"A set. {' '.join(parts)}", grid, "line 3", "rewards.clip")


def test_texts_belong_to_cells_row_by_row() -> None:
    for labels, grid in (
        (ROWS, (2, 2)),
        (FOUR, (1, 4)),
        (NINE, (3, 3)),
        (tuple(f"[TOP]-[{name}]" for name in FOUR), (1, 4)),
        (("[LEFT]", "[MIDDLE]", "[RIGHT]"), (1, 3)),
        (("TOP", "CENTRE", "BOTTOM"), (3, 1)),
        (("TOP-CENTER", "BOTTOM-CENTER"), (2, 1)),
        (("LEFT", "RIGHT", "LEFT", "RIGHT"), (2, 2)),
        # no places: whatever their order
        (("B2", "A1", "[D]", "1"), (2, 2)),
        (("[RIGHTS]", "[LEFTOVERS]"), (1, 2)),
    ):
        assert read(labels, grid) == [f"text {number}." for number in range(len(labels))]


def test_a_label_of_another_place_is_refused() -> None:
    for labels, grid, said in (
        (ROWS[::-1], (2, 2), r"got \[BOTTOM\]-\[RIGHT\] for row 1, column 1"),
        ((ROWS[0], ROWS[2], ROWS[1], ROWS[3]), (2, 2), r"\[BOTTOM\]-\[LEFT\] for row 1, column 2"),
        (("RIGHT", "LEFT"), (1, 2), "got RIGHT for row 1, column 1"),
        (("BOTTOM", "TOP"), (2, 1), "got BOTTOM for row 1, column 1"),
        (("LEFT", "RIGHT", "MIDDLE"), (1, 3), "got RIGHT for row 1, column 2"),
        (("A", "B", "MIDDLE"), (1, 3), "got MIDDLE for row 1, column 3"),
        (("TOP-CENTER", *"BCDEFGHI"), (3, 3), "got TOP-CENTER for row 1, column 1"),
        ((FOUR[1], FOUR[0], *FOUR[2:]), (1, 4), "got MIDDLE-LEFT for row 1, column 1"),
    ):
        with pytest.raises(DataError, match=f"line 3: rewards.clip: .*row by row.*{said}"):
            read(labels, grid)
