"""HPSv2: open_clip's own embeddings of pixels made by torchvision, the public layout, the
padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import open_clip
import pytest
import torch
from clipkit import (
    PROMPTS,
    add_architecture,
    batch_of,
    pil,
    random_images,
    save_transformers,
    tiny_open_clip,
)
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torchvision.transforms import functional as vision

from flowrl.core.errors import ConfigError, ModelError
from rewards._backbones.clip import _config_of
from rewards._common.pixels import letterbox, normalise
from rewards.hpsv2 import hpsv2

MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


class Kit:
    """Random weights of both versions in the published container."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.architecture = folder, add_architecture(folder, "tiny-hps")
        self.models = {
            "v2.0": tiny_open_clip("tiny-hps", seed=2),
            "v2.1": tiny_open_clip("tiny-hps", seed=3),
        }
        for name, model in zip(("HPS_v2", "HPS_v2.1"), self.models.values(), strict=True):
            torch.save({"state_dict": model.state_dict()}, folder / f"{name}_compressed.pt")

    def reward(self, **arguments: Any) -> hpsv2:
        return hpsv2(path=str(self.folder), architecture=self.architecture, **arguments)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return Kit(tmp_path_factory.mktemp("hps"))


def public_pixels(image: Image.Image, antialias: bool = True) -> Tensor:
    """Do what HPSv2's code does, with torchvision: to a tensor, long side to 224, pad around the
    centre, normalise."""
    pixels = vision.to_tensor(image)
    height, width = pixels.shape[1:]
    scale = 224 / float(max(height, width))
    size = [round(height * scale), round(width * scale)]
    pixels = vision.resize(pixels, size, vision.InterpolationMode.BICUBIC, antialias=antialias)
    top, left = (224 - size[0]) // 2, (224 - size[1]) // 2
    pixels = vision.pad(pixels, [left, top, 224 - size[1] - left, 224 - size[0] - top], fill=0)
    return vision.normalize(pixels, MEAN, STD)


def library_scores(kit: Kit, version: str, images: Tensor, antialias: bool = True) -> Tensor:
    """Compute the cosines by open_clip's forward, which normalises, one image at a time."""
    tokens, scores = open_clip.get_tokenizer(kit.architecture), []
    for image, prompt in zip(images, PROMPTS, strict=True):
        with torch.no_grad():
            one, words, _ = kit.models[version](
                public_pixels(pil(image), antialias)[None], tokens([prompt])
            )
        scores.append((one * words).sum())
    return torch.stack(scores)


@pytest.mark.parametrize("version", ["v2.0", "v2.1"])
@pytest.mark.parametrize("size", [(256, 256), (300, 227), (100, 321)])
def test_scores_are_the_librarys(
    kit: Kit, version: Literal["v2.0", "v2.1"], size: tuple[int, int]
) -> None:
    images = random_images(6, *size)
    scores = kit.reward(version=version)(batch_of(images, PROMPTS))
    torch.testing.assert_close(scores, library_scores(kit, version, images), atol=1e-6, rtol=0)
    assert (
        scores.dtype == torch.float32 and scores.std() > 0.02
    )  # a plain cosine: logit_scale is left out
    assert scores.abs().max() <= 1


def test_the_version_picks_the_file(kit: Kit) -> None:
    batch = batch_of(random_images(6), PROMPTS)
    old, new = kit.reward(version="v2.0")(batch), kit.reward()(batch)
    assert not torch.allclose(old, new, atol=1e-3)
    file = hpsv2(
        path=str(kit.folder / "HPS_v2_compressed.pt"), architecture=kit.architecture
    )  # a file is read as it is
    assert torch.equal(file(batch), old)


@pytest.mark.parametrize(
    "size", [(512, 512), (64, 64), (300, 227), (227, 300), (100, 321), (224, 224), (1000, 7)]
)
@pytest.mark.parametrize("antialias", [True, False])
def test_pixels_are_torchvisions(size: tuple[int, int], antialias: bool) -> None:
    image = pil(random_images(1, *size)[0])
    found = normalise(letterbox(image, 224, antialias=antialias))
    torch.testing.assert_close(found, public_pixels(image, antialias), atol=1e-6, rtol=0)


def test_antialias_is_handed_on(kit: Kit) -> None:
    images = random_images(6, 600, 500)
    rough = kit.reward(antialias=False)(batch_of(images, PROMPTS))
    torch.testing.assert_close(
        rough, library_scores(kit, "v2.1", images, antialias=False), atol=1e-6, rtol=0
    )
    assert (rough - kit.reward()(batch_of(images, PROMPTS))).abs().max() > 1e-3  # it counts


@pytest.mark.parametrize("size", [(300, 227), (227, 300), (333, 1000)])
def test_open_clips_longest_mode_agrees_but_for_pils_rounding(size: tuple[int, int]) -> None:
    """open_clip's transform resizes 8-bit images, HPSv2 floats: the same frame, the inside up to
    a level or two."""
    image = pil(random_images(1, *size)[0])
    expected = open_clip.image_transform(224, is_train=False, resize_mode="longest")(image)
    found = normalise(letterbox(image, 224))
    black = (expected == expected[:, :1, :1]).all(0)
    frame = black.all(0)[None] | black.all(1)[:, None]  # whole columns and rows
    assert torch.equal(found[:, frame], expected[:, frame]) and frame.float().mean() > 0.2
    inside = (found - expected).abs() * torch.tensor(STD)[:, None, None] * 255
    assert 0.3 < inside.max() < 6 and inside.mean() < 0.6


def test_a_padded_pixel_is_black_before_the_normalisation() -> None:
    """Fixture: (-1.79226, -1.75210, -1.48022), the reference, section 4.4; = -mean / std."""
    found = normalise(letterbox(pil(random_images(1, 100, 300)[0]), 224))
    expected = torch.tensor([-1.79226, -1.75210, -1.48022])
    for row, column in [
        (0, 0),
        (73, 223),
        (223, 100),
        (149, 5),
    ]:  # 300 x 100 -> 224 x 75: rows 74 to 148 are image
        torch.testing.assert_close(found[:, row, column], expected, atol=6e-6, rtol=0)
    assert not torch.allclose(found[:, 74, 100], expected, atol=1e-2)
    assert not torch.allclose(found[:, 148, 100], expected, atol=1e-2)


def test_a_long_side_of_224_is_padded_too() -> None:
    """HPSv2's code would hand on a 224 x 100 image unpadded, which the network cannot take."""
    image = random_images(1, 100, 224)[0]
    found = letterbox(pil(image), 224)
    assert found.shape == (3, 224, 224)
    torch.testing.assert_close(found[:, 62:162], image, atol=1e-7, rtol=0)
    assert found[:, :62].abs().max() == 0 and found[:, 162:].abs().max() == 0


def test_the_public_layout() -> None:
    """Every name and shape of HPS_v2_compressed.pt, from the reference, section 4.4; built without
    memory."""
    with torch.device("meta"):
        found = {
            k: list(v.shape)
            for k, v in open_clip.CLIP(**_config_of("ViT-H-14", "test")).state_dict().items()
        }
    expected = {
        "visual.class_embedding": [1280],
        "visual.positional_embedding": [257, 1280],
        "visual.conv1.weight": [1280, 3, 14, 14],
        "visual.proj": [1280, 1024],
        "token_embedding.weight": [49408, 1024],
        "positional_embedding": [77, 1024],
        "text_projection": [1024, 1024],
        "logit_scale": [],
    }
    norms = {"visual.ln_pre": 1280, "visual.ln_post": 1280, "ln_final": 1024}
    for tower, layers, width in (("visual.transformer", 32, 1280), ("transformer", 24, 1024)):
        for layer in range(layers):
            block = f"{tower}.resblocks.{layer}"
            norms |= {f"{block}.ln_1": width, f"{block}.ln_2": width}
            expected |= {
                f"{block}.attn.in_proj_weight": [3 * width, width],
                f"{block}.attn.in_proj_bias": [3 * width],
            }
            for name, out, into in (
                ("attn.out_proj", width, width),
                ("mlp.c_fc", 4 * width, width),
                ("mlp.c_proj", width, 4 * width),
            ):
                expected |= {f"{block}.{name}.weight": [out, into], f"{block}.{name}.bias": [out]}
    expected |= {
        f"{name}.{part}": [width] for name, width in norms.items() for part in ("weight", "bias")
    }
    assert found == expected
    assert not open_clip.get_model_config("ViT-H-14").get("quick_gelu", False)


def test_other_layouts_are_refused(kit: Kit, tmp_path: Path) -> None:
    folder = save_transformers(kit.models["v2.1"], tmp_path / "hf")
    torch.save(
        {"state_dict": load_file(folder / "model.safetensors")}, tmp_path / "HPS_v2.1_compressed.pt"
    )
    with pytest.raises(
        ModelError, match=r"HPS_v2\.1_compressed.*missing.*unexpected.*another shape"
    ):
        hpsv2(path=str(tmp_path), architecture=kit.architecture)
    with pytest.raises(ModelError, match=r"no file HPS_v2_compressed\.pt"):
        hpsv2(path=str(tmp_path), architecture=kit.architecture, version="v2.0")
    with pytest.raises(ModelError, match="xswu/HPSv2"):  # no network
        hpsv2()


def test_code_in_a_checkpoint_is_not_run(kit: Kit, tmp_path: Path) -> None:
    torch.save(
        {"state_dict": kit.models["v2.1"]}, tmp_path / "HPS_v2.1_compressed.pt"
    )  # a pickled module
    with pytest.raises(ModelError, match="no readable file of weights"):
        hpsv2(path=str(tmp_path), architecture=kit.architecture)


@pytest.mark.parametrize("arguments", [{"version": "v3"}, {"architecture": "ViT-H-15"}])
def test_wrong_arguments_are_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        hpsv2(**arguments)
