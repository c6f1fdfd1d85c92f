"""CLIPScore: both back ends against their own libraries, against each other, and against every
wrong folder."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import open_clip
import pytest
import torch
from clipkit import (
    PROMPTS,
    add_architecture,
    batch_of,
    pil,
    random_images,
    save_open_clip,
    save_transformers,
    tiny_open_clip,
)
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision import transforms
from transformers import CLIPImageProcessor, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from flowrl.core.errors import ConfigError, DataError, ModelError
from rewards._backbones.clip import _config_of
from rewards._common.pixels import normalise, shortest, squash
from rewards.clip import clip

IMAGES = random_images(6)


class Kit:
    """The same random weights in both layouts."""

    def __init__(self, folder: Path, name: str, quick_gelu: bool) -> None:
        self.architecture = add_architecture(folder, name, quick_gelu=quick_gelu)
        self.model = tiny_open_clip(name)
        self.file = save_open_clip(self.model, folder / "open_clip_model.safetensors")
        self.folder = save_transformers(self.model, folder / "hf", quick_gelu=quick_gelu)

    @cache  # noqa: B019 - loading is what takes the time; two kits live as long as this module
    def open_clip(self, **arguments: Any) -> clip:
        return clip(
            path=str(self.file), backend="open_clip", architecture=self.architecture, **arguments
        )

    @cache  # noqa: B019
    def transformers(self, **arguments: Any) -> clip:
        return clip(path=str(self.folder), **arguments)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("gelu"), "tiny-clip", False)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("quick"), "tiny-clip-quickgelu", True)


def library_logits(kit: Kit, images: Tensor, prompts: list[str], mode: str = "shortest") -> Tensor:
    """Compute exp(logit_scale) * cosine by open_clip's own transform, tokenizer and logits, one
    image at a time."""
    transform = open_clip.image_transform(224, is_train=False, resize_mode=mode)
    tokenizer = open_clip.get_tokenizer(kit.architecture)
    with torch.no_grad():
        rows = zip(images, prompts, strict=True)
        logits = [kit.model.get_logits(transform(pil(i))[None], tokenizer([p]))[0] for i, p in rows]
    return torch.cat(logits).flatten()


def test_back_ends_agree_on_the_same_weights(kit: Kit, quick: Kit) -> None:
    batch = batch_of(IMAGES, PROMPTS)
    for both in (kit, quick):
        ours, theirs = both.open_clip()(batch), both.transformers()(batch)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert ours.std() > 0.02 and ours.abs().max() <= 1
    assert not torch.allclose(
        kit.open_clip()(batch), quick.open_clip()(batch), atol=1e-3
    )  # the activation counts


@pytest.mark.parametrize("size", [(256, 256), (64, 64), (300, 227), (224, 227), (225, 512)])
def test_open_clip_scores_are_the_librarys(kit: Kit, size: tuple[int, int]) -> None:
    images = random_images(6, *size)
    expected = library_logits(kit, images, PROMPTS)
    scores = kit.open_clip(scale=None)(batch_of(images, PROMPTS))
    torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-6)  # logits of up to 100
    assert scores.dtype == torch.float32 and not scores.is_inference()


def test_squashed_scores_are_the_librarys(kit: Kit) -> None:
    images = random_images(6, 300, 227)
    squashed = kit.open_clip(resize="squash")(batch_of(images, PROMPTS))
    torch.testing.assert_close(
        100 * squashed, library_logits(kit, images, PROMPTS, "squash"), atol=1e-4, rtol=1e-4
    )
    assert not torch.allclose(squashed, kit.open_clip()(batch_of(images, PROMPTS)), atol=1e-4)


@pytest.mark.parametrize("size", [(256, 256), (300, 227)])
def test_transformers_scores_are_the_librarys(kit: Kit, size: tuple[int, int]) -> None:
    images = random_images(6, *size)
    model = CLIPModel.from_pretrained(kit.folder)
    pixels = CLIPImageProcessorPil()([pil(i) for i in images], return_tensors="pt")
    words = CLIPTokenizer.from_pretrained(kit.folder)(
        PROMPTS, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    with torch.no_grad():
        expected = model(**pixels, **words).logits_per_image.diag()
    torch.testing.assert_close(
        kit.transformers(scale=None)(batch_of(images, PROMPTS)), expected, atol=1e-4, rtol=1e-6
    )


SIZES = [
    (512, 512),
    (224, 224),
    (64, 64),
    (64, 100),
    (300, 227),
    (227, 224),
    (224, 231),
    (1000, 333),
]


@pytest.mark.parametrize("size", SIZES)
def test_pixels_are_open_clips_to_the_last_bit(size: tuple[int, int]) -> None:
    image = pil(random_images(1, *size)[0])
    for mode, ours in {"shortest": shortest, "squash": squash}.items():
        expected = open_clip.image_transform(224, is_train=False, resize_mode=mode)(image)
        assert torch.equal(normalise(ours(image, 224)), expected)


@pytest.mark.parametrize("size", [(512, 512), (64, 100), (300, 227), (225, 233), (1000, 333)])
def test_transformers_pixels_are_pils(kit: Kit, size: tuple[int, int]) -> None:
    """Expected: Pillow and numpy by hand; transformers rounds the crop's corner down."""
    image = pil(random_images(1, *size)[0])
    width, height = (
        224 if side == min(image.size) else int(224 * side / min(image.size)) for side in image.size
    )
    left, top = (width - 224) // 2, (height - 224) // 2
    resized = image.resize((width, height), Image.Resampling.BICUBIC).crop(
        (left, top, left + 224, top + 224)
    )
    mean, std = (
        np.array([0.48145466, 0.4578275, 0.40821073]),
        np.array([0.26862954, 0.26130258, 0.27577711]),
    )
    expected = (np.asarray(resized) / 255 - mean) / std
    towers: Any = kit.transformers().towers
    found = towers.images([image], return_tensors="pt")["pixel_values"][0]
    np.testing.assert_allclose(found.permute(1, 2, 0).numpy(), expected, atol=2e-6)
    modern = CLIPImageProcessor()([image], return_tensors="pt")["pixel_values"][
        0
    ]  # torchvision, the default
    levels = (found - modern).abs().max() * 255 * max(std)
    assert (
        0.9 < levels < 4.5
    )  # measured: 1 to 3 of 255 levels; this is why the PIL processor is asked for by name


def test_an_odd_margin_is_cut_one_pixel_apart(kit: Kit) -> None:
    """torchvision cuts a margin of 3 at round(1.5) = 2, transformers at 3 // 2 = 1: a trap when
    comparing."""
    image = pil(random_images(1, 224, 227)[0])
    ramp = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    assert torch.equal(shortest(image, 224), ramp[:, :, 2:226])
    assert torch.equal(transforms.CenterCrop(224)(ramp), ramp[:, :, 2:226])
    towers: Any = kit.transformers().towers
    found = towers.images([image], return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(found, normalise(ramp[:, :, 1:225]), atol=2e-6, rtol=0)


def test_scale_and_divide(kit: Kit) -> None:
    """Closed form: the values of the table in the documentation, from one cosine and
    exp(4.6052)."""
    batch = batch_of(IMAGES, PROMPTS)
    own = float(np.exp(np.float32(4.6052)))
    cosine = kit.open_clip()(batch)
    for scale, divide, factor in [
        (100.0, 1.0, 100.0),
        (None, 1.0, own),
        (None, 30.0, own / 30),
        (2.5, 10.0, 0.25),
    ]:
        scores = kit.open_clip(scale=scale, divide=divide)(batch)
        torch.testing.assert_close(scores, factor * cosine, rtol=1e-6, atol=1e-7)
    theirs = kit.transformers(scale=None, divide=30.0)(batch)
    torch.testing.assert_close(theirs, own / 30 * kit.transformers()(batch), rtol=1e-6, atol=1e-7)


def test_each_prompt_is_read_once(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = kit.open_clip(batch=2)
    towers: Any = reward.towers
    read: list[str] = []
    original = towers.read

    def watch(prompts: list[str]) -> Tensor:
        read.extend(prompts)
        embedding: Tensor = original(prompts)
        return embedding

    monkeypatch.setattr(towers, "read", watch)
    reward(batch_of(IMAGES, PROMPTS))
    assert read == list(dict.fromkeys(PROMPTS)) and len(read) == 5


@pytest.mark.parametrize("backend", ["open_clip", "transformers"])
def test_bfloat16_towers_keep_the_logit_scale(kit: Kit, backend: str) -> None:
    """exp of 4.6052 rounded to bfloat16 is 99.5, not 100."""
    make = kit.open_clip if backend == "open_clip" else kit.transformers
    batch, half = batch_of(IMAGES, PROMPTS), make(dtype="bfloat16")
    assert half.towers.scale == pytest.approx(100.0034, abs=1e-3)
    torch.testing.assert_close(half(batch), make()(batch), atol=0.03, rtol=0)
    assert not torch.equal(half(batch), make()(batch))


def test_real_weights_of_openai_would_fit() -> None:
    """Shapes of ViT-L/14: the reference (section 4.2) and OpenAI's paper; built without memory."""
    with torch.device("meta"):
        state = open_clip.CLIP(**_config_of("ViT-L-14-quickgelu", "test")).state_dict()
    shapes = {name: list(value.shape) for name, value in state.items()}
    assert shapes["visual.proj"] == [1024, 768] and shapes["text_projection"] == [768, 768]
    assert shapes["visual.positional_embedding"] == [257, 1024] and shapes[
        "positional_embedding"
    ] == [77, 768]
    assert "visual.transformer.resblocks.23.mlp.c_fc.weight" in shapes
    assert "transformer.resblocks.11.attn.in_proj_weight" in shapes
    assert open_clip.get_model_config("ViT-L-14-quickgelu")["quick_gelu"] is True
    pretrained = open_clip.get_pretrained_cfg("ViT-L-14", "openai")
    assert (
        pretrained["quick_gelu"] is True
        and pretrained["hf_hub"] == "timm/vit_large_patch14_clip_224.openai/"
    )


def test_every_architecture_is_known_or_refused() -> None:
    plain = []
    for name in open_clip.list_models():
        try:
            _config_of(name, "test")
            plain.append(name)
        except ConfigError:
            continue
    assert {
        "ViT-H-14",
        "ViT-L-14-quickgelu",
        "ViT-H-14-quickgelu",
        "ViT-bigG-14",
        "ViT-B-32",
    } <= set(plain)
    assert not {
        "RN50",
        "convnext_base",
        "coca_ViT-L-14",
        "ViT-B-16-SigLIP",
        "roberta-ViT-B-32",
    } & set(plain)


def damaged(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """Return the weights with one tensor missing, added, renamed or of another shape."""
    first = "visual_projection.weight" if "visual_projection.weight" in state else "visual.proj"
    if how == "missing":
        del state[first]
    elif how == "unexpected":
        state["text_model.something.weight"] = torch.zeros(2)
    else:
        state[first] = torch.zeros(3, 5)
    return state


@pytest.mark.parametrize("how", ["missing", "unexpected", "mismatched"])
def test_wrong_weights_are_refused(kit: Kit, tmp_path: Path, how: str) -> None:
    file = tmp_path / "open_clip_model.safetensors"
    save_file(damaged(load_file(kit.file), how), file)
    with pytest.raises(
        ModelError, match="visual.proj" if how != "unexpected" else "text_model.something"
    ):
        clip(path=str(tmp_path), backend="open_clip", architecture=kit.architecture)
    folder = shutil.copytree(kit.folder, tmp_path / "hf")
    save_file(
        damaged(load_file(folder / "model.safetensors"), how),
        folder / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(
        ModelError, match=f"1 {how} .*{'visual_projection' if how != 'unexpected' else 'something'}"
    ):
        clip(path=str(folder))


def test_the_other_layout_is_refused(kit: Kit) -> None:
    with pytest.raises(
        ModelError, match="missing.*unexpected.*vision_model|missing.*unexpected.*text_model"
    ):
        clip(
            path=str(kit.folder / "model.safetensors"),
            backend="open_clip",
            architecture=kit.architecture,
        )


def test_a_folder_that_is_no_model_is_refused(kit: Kit, tmp_path: Path) -> None:
    for backend in ("transformers", "open_clip"):
        name: Literal["transformers", "open_clip"] = backend  # type: ignore[assignment]
        architecture = kit.architecture if backend == "open_clip" else None
        with pytest.raises(ModelError, match=r"rewards\.clip"):
            clip(path=str(tmp_path), backend=name, architecture=architecture)
        with pytest.raises(ModelError, match="nobody/nothing"):  # a hub id without a network
            clip(path="nobody/nothing", backend=name, architecture=architecture)


def test_pickled_weights_are_not_opened(kit: Kit, tmp_path: Path) -> None:
    folder = shutil.copytree(kit.folder, tmp_path / "hf")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        clip(path=str(folder))


def test_a_bin_file_of_open_clip_is_read(kit: Kit, tmp_path: Path) -> None:
    torch.save(load_file(kit.file), tmp_path / "open_clip_pytorch_model.bin")
    reward = clip(path=str(tmp_path), backend="open_clip", architecture=kit.architecture)
    batch = batch_of(IMAGES, PROMPTS)
    assert torch.equal(reward(batch), kit.open_clip()(batch))


@pytest.mark.parametrize("missing", ["processor_config.json", "tokenizer.json"])
def test_a_folder_without_its_processor_is_refused(kit: Kit, tmp_path: Path, missing: str) -> None:
    folder = shutil.copytree(kit.folder, tmp_path / "hf")
    (folder / missing).unlink()
    with pytest.raises(ModelError, match="processor|tokenizer"):
        clip(path=str(folder))


def test_a_tokenizer_of_another_model_is_refused(kit: Kit, tmp_path: Path) -> None:
    """The text tower would look for its end token in vain, and embed the first token of every
    prompt."""
    folder = shutil.copytree(kit.folder, tmp_path / "hf")
    letters = {
        letter: n
        for n, letter in enumerate(["<|startoftext|>", "<|endoftext|>", "a", "b", "a</w>", "b</w>"])
    }
    CLIPTokenizer(vocab=letters, merges=[]).save_pretrained(folder)
    with pytest.raises(ModelError, match="does not belong"):
        clip(path=str(folder))


def test_old_configs_mean_the_largest_token(kit: Kit, tmp_path: Path) -> None:
    """Public configs from before transformers 4.31 (OpenAI's, laion's) say 2 for the end token."""
    folder = shutil.copytree(kit.folder, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    batch = batch_of(IMAGES, PROMPTS)
    assert torch.equal(clip(path=str(folder))(batch), kit.transformers()(batch))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "jax"}, "transformers, open_clip"),
        ({"architecture": "ViT-L-14"}, "belong to backend 'open_clip'"),
        ({"resize": "squash"}, "belong to backend 'open_clip'"),
        ({"backend": "open_clip", "resize": "longest"}, "shortest, squash"),
        (
            {"backend": "open_clip", "architecture": "ViT-L-14-quickgel"},
            "did you mean 'ViT-L-14-quickgelu'",
        ),
        ({"backend": "open_clip", "architecture": "ViT-B-16-SigLIP"}, "no plain CLIP"),
        ({"backend": "open_clip", "architecture": "RN50"}, "no plain CLIP"),
        ({"scale": 0.0}, "scale: expected a finite number above 0"),
        ({"divide": float("inf")}, "divide"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        clip(**arguments)


def test_wrong_batches_are_errors(kit: Kit) -> None:
    reward = kit.open_clip()
    with pytest.raises(DataError, match="one prompt per image, got 5 for 6"):
        reward(batch_of(IMAGES, PROMPTS[:5]))
