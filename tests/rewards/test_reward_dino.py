"""Similarity to reference images: both real DINO classes, against timm and numpy, on tiny random
weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from dinokit import tokens_of, with_references
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
)

from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import RewardBatch
from rewards._backbones.dino import Backbone, FeatureCache
from rewards.dino import dino


def _v2() -> Dinov2Model:
    config = Dinov2Config(
        image_size=42,
        patch_size=14,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
    )
    return Dinov2Model(config)


def _v2_registers() -> Dinov2WithRegistersModel:
    config = Dinov2WithRegistersConfig(
        image_size=42,
        patch_size=14,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_register_tokens=3,
    )
    return Dinov2WithRegistersModel(config)


def _v3() -> DINOv3ViTModel:
    config = DINOv3ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_register_tokens=4,
    )
    return DINOv3ViTModel(config)


MODELS: dict[str, Callable[[], Any]] = {"v2": _v2, "v2_registers": _v2_registers, "v3": _v3}
PREFIX = {"v2": 1, "v2_registers": 4, "v3": 5}  # CLS and register tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny networks with weights large enough that features differ, saved as the library saves
    them."""
    out = {}
    for name, make in MODELS.items():
        torch.manual_seed(3)
        network = make()
        with torch.no_grad():
            for p in network.parameters():
                p.add_(0.3 * torch.randn_like(p))
        out[name] = tmp_path_factory.mktemp(name)
        network.save_pretrained(out[name], safe_serialization=True)
    return out


def _images(count: int, seed: int = 0, height: int = 40, width: int = 52) -> Tensor:
    """Smooth random images in exact 8-bit steps."""
    rough = torch.rand(count, 3, 5, 6, generator=torch.Generator().manual_seed(seed))
    return (
        torch.nn.functional.interpolate(rough, (height, width), mode="bilinear") * 255
    ).round() / 255


def _save(images: Tensor, folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        pixels = (image * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return [str(folder / f"{index}.png") for index in range(len(images))]


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["cls", "patch"])
def test_scores_equal_numpy_on_the_librarys_owntokens_of(
    folders: dict[str, Path], tmp_path: Path, name: str, mode: Any
) -> None:
    # expected: loops of numpy dot products over the tokens of the library's own model, loaded by
    # its own class
    images, known = _images(5), _images(4, seed=1, height=33, width=33)
    files = _save(known, tmp_path)
    network = MODELS[name]().from_pretrained(folders[name]).eval()
    side, prefix = network.config.image_size, PREFIX[name]
    seen, refs = tokens_of(network, images, side), tokens_of(network, known, side)
    assert seen.shape[1] == prefix + (side // network.config.patch_size) ** 2
    expected = []
    for i, mine in enumerate([[0], [1, 2, 3], [0], [3, 1], [2]]):
        if mode == "cls":
            each = [_cosine(seen[i, 0], refs[r, 0]) for r in mine]
        else:
            each = [
                float(
                    np.mean(
                        [max(_cosine(p, q) for q in refs[r, prefix:]) for p in seen[i, prefix:]]
                    )
                )
                for r in mine
            ]
        expected.append(max(each))
    columns = [files[0], [files[1], files[2], files[3]], [files[0]], [files[3], files[1]], files[2]]
    scores = dino(path=str(folders[name]), mode=mode, device="cpu")(
        with_references(images, columns)
    )
    assert scores.dtype == torch.float32 and len({round(x, 4) for x in expected}) == 5
    np.testing.assert_allclose(scores.numpy(), expected, atol=2e-6)


def test_dinov2_features_equal_timms(folders: dict[str, Path], tmp_path: Path) -> None:
    # expected: timm's VisionTransformer, which Adv-GRPO's code uses, with the same tensors under
    # timm's names
    state = load_file(folders["v2"] / "model.safetensors")
    other = timm.models.vision_transformer.VisionTransformer(
        img_size=42,
        patch_size=14,
        embed_dim=24,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
        init_values=1.0,
        num_classes=0,
    )
    other.load_state_dict(
        _timm_names(state)
    )  # strict: every tensor of timm's layout has its own in the file
    backbone = Backbone(
        str(folders["v2"]), size=None, device="cpu", dtype="float32", batch=2, who="test"
    )
    images = [Image.open(file).convert("RGB") for file in _save(_images(3), tmp_path)]
    parts = list(backbone(images))
    with torch.no_grad():
        expected = other.eval().forward_features(backbone.pixels(images))
    assert [len(part.cls) for part in parts] == [2, 1]
    torch.testing.assert_close(
        torch.cat([part.cls for part in parts]), expected[:, 0], atol=2e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        torch.cat([part.patches for part in parts]), expected[:, 1:], atol=2e-5, rtol=1e-5
    )


def _timm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Dinov2Model's file, after the public layouts of both libraries."""
    out = {
        "cls_token": state["embeddings.cls_token"],
        "pos_embed": state["embeddings.position_embeddings"],
        "patch_embed.proj.weight": state["embeddings.patch_embeddings.projection.weight"],
        "patch_embed.proj.bias": state["embeddings.patch_embeddings.projection.bias"],
        "norm.weight": state["layernorm.weight"],
        "norm.bias": state["layernorm.bias"],
    }
    for layer in range(2):
        a, b = f"encoder.layer.{layer}.", f"blocks.{layer}."
        for kind in ("weight", "bias"):
            parts = [
                state[f"{a}attention.attention.{part}.{kind}"] for part in ("query", "key", "value")
            ]
            out[f"{b}attn.qkv.{kind}"] = torch.cat(parts)
            out[f"{b}attn.proj.{kind}"] = state[f"{a}attention.output.dense.{kind}"]
            for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                out[f"{b}{part}.{kind}"] = state[f"{a}{part}.{kind}"]
        for part in ("1", "2"):
            out[f"{b}ls{part}.gamma"] = state[f"{a}layer_scale{part}.lambda1"]
    return out


@pytest.mark.parametrize(("name", "size"), [("v2", 56), ("v3", 64)])
def test_another_size_uses_the_librarys_position_embeddings(
    folders: dict[str, Path], tmp_path: Path, name: str, size: int
) -> None:
    images, known = _images(2), _images(1, seed=1)
    network = MODELS[name]().from_pretrained(folders[name]).eval()
    seen, refs = tokens_of(network, images, size), tokens_of(network, known, size)
    reward = dino(path=str(folders[name]), size=size, device="cpu")
    assert reward.backbone.patches == {"v2": 16, "v3": 64}[name]  # (56 / 14)^2 and (64 / 8)^2
    scores = reward(with_references(images, [_save(known, tmp_path)] * 2))
    np.testing.assert_allclose(scores.numpy(), [_cosine(s[0], refs[0, 0]) for s in seen], atol=2e-6)
    own = dino(path=str(folders[name]), device="cpu")(
        with_references(images, [str(tmp_path / "0.png")] * 2)
    )
    assert (own - scores).abs().min() > 1e-4  # another size is another score


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["cls", "patch"])
def test_an_identical_image_scores_one_and_no_other_does(
    folders: dict[str, Path], tmp_path: Path, name: str, mode: Any
) -> None:
    images = _images(4)
    _save(images[:2], tmp_path / "refs")
    reward = dino(
        path=str(folders[name]), mode=mode, references=str(tmp_path / "refs"), device="cpu"
    )
    scores = reward(
        with_references(images, [None] * 4)
    )  # the folder serves every prompt: no column is needed
    torch.testing.assert_close(scores[:2], torch.ones(2), atol=1e-6, rtol=0)
    assert bool((scores[2:] < 1 - 1e-4).all())


def test_register_tokens_are_no_patches(folders: dict[str, Path]) -> None:
    # the registers are rows 1 to 4 of the library's own output, the 16 patches follow
    network = DINOv3ViTModel.from_pretrained(folders["v3"]).eval()
    images = _images(1)
    backbone = Backbone(
        str(folders["v3"]), size=None, device="cpu", dtype="float32", batch=1, who="test"
    )
    image = Image.fromarray((images[0] * 255).round().byte().permute(1, 2, 0).contiguous().numpy())
    (features,) = backbone([image])
    tokens = torch.from_numpy(tokens_of(network, images, 32)).float()
    assert tokens.shape == (1, 1 + 4 + 16, 24) and backbone.patches == 16
    torch.testing.assert_close(features.patches, tokens[:, 5:], atol=2e-5, rtol=1e-4)
    assert (tokens[:, 4] - features.patches[:, 0]).abs().max() > 0.1


@pytest.mark.parametrize("mode", ["cls", "patch"])
def test_images_with_other_references_do_not_matter(
    folders: dict[str, Path], tmp_path: Path, mode: Any
) -> None:
    images = _images(7)
    files = _save(_images(3, seed=1), tmp_path)
    columns = [files[:2], files[2], files[:2], files[1], files[2], files[:2], files]
    whole = dino(path=str(folders["v2"]), mode=mode, device="cpu", batch=32)(
        with_references(images, columns)
    )
    small = dino(path=str(folders["v2"]), mode=mode, device="cpu", batch=2, cache_mb=0)(
        with_references(images, columns)
    )
    torch.testing.assert_close(small, whole, atol=1e-6, rtol=0)


def test_references_are_read_once_and_forgotten_when_memory_is_full(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    files = [Path(f) for f in _save(_images(4), tmp_path)]
    backbone = Backbone(
        str(folders["v2"]), size=None, device="cpu", dtype="float32", batch=2, who="test"
    )
    library = FeatureCache(backbone, megabytes=1, patches=True, who="test")
    assert library.most == 2**20 // (
        4 * 24 * 10
    )  # bytes by hand: 10 tokens of 24 float32 numbers per image
    first = torch.cat([part.patches for part in library(files)])
    for file in files:
        file.unlink()
    assert torch.equal(torch.cat([part.patches for part in library(files[::-1])]), first.flip(0))
    library.most = 1
    list(library(files[:1]))
    assert list(library.kept) == files[:1]
    with pytest.raises(DataError, match=r"1\.png"):
        list(library(files[1:2]))


def test_bfloat16_comes_close(folders: dict[str, Path], tmp_path: Path) -> None:
    images, files = _images(3), _save(_images(2, seed=1), tmp_path)
    scores = [
        dino(path=str(folders["v3"]), dtype=d, device="cpu")(with_references(images, [files] * 3))
        for d in ("float32", "bfloat16")
    ]
    assert scores[1].dtype == torch.float32 and not torch.equal(*scores)
    torch.testing.assert_close(scores[1], scores[0], atol=0.03, rtol=0)


def test_images_are_turned_and_made_rgb(folders: dict[str, Path], tmp_path: Path) -> None:
    # an EXIF note "turned by 90 degrees" (6), as phones write it: the same image as the one that
    # is stored turned
    pixels = Image.fromarray((_images(1)[0] * 255).byte().permute(1, 2, 0).contiguous().numpy())
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels.save(tmp_path / "note.png", exif=exif)
    pixels.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "turned.png")
    pixels.convert("L").save(tmp_path / "grey.png")
    reward = dino(path=str(folders["v2"]), device="cpu", batch=4)
    files = [tmp_path / name for name in ("note.png", "turned.png", "grey.png")]
    (features,) = reward.library(files)
    assert torch.equal(features.cls[0], features.cls[1]) and not torch.equal(
        features.cls[0], features.cls[2]
    )


def test_a_record_is_checked_before_anything_is_scored(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    _save(_images(1), tmp_path / "in")
    (tmp_path / "in" / "text.png").write_text("no image")
    reward = dino(path=str(folders["v2"]), root=str(tmp_path), column="looks", device="cpu")
    reward.check_record({"prompt": "a", "looks": "in/0.png"}, "f, line 1")
    reward.check_record({"prompt": "a", "looks": ["in/0.png"]}, "f, line 2")
    for value in (None, [], "", [""], 3, ["in/0.png", 4], {"a": 1}):
        with pytest.raises(DataError, match=r"f, line 3.*'looks'"):
            reward.check_record({"prompt": "a", "looks": value}, "f, line 3")
    for name in ("in/1.png", "in/text.png"):
        with pytest.raises(DataError, match=rf"f, line 4.*{name}"):
            reward.check_record({"prompt": "a", "looks": ["in/0.png", name]}, "f, line 4")
    with pytest.raises(DataError, match="'a'"):
        reward(RewardBatch(_images(1), ["a"], torch.zeros(1), [{"prompt": "a"}], torch.zeros(1)))
    dino(path=str(folders["v2"]), references=str(tmp_path / "in"), device="cpu").check_record(
        {"prompt": "a"}, "here"
    )


def test_wrong_arguments_and_images(folders: dict[str, Path], tmp_path: Path) -> None:
    path = str(folders["v2"])
    with pytest.raises(ConfigError, match=r"patch size 14, got 519"):
        dino(path=path, size=519)
    with pytest.raises(ConfigError, match="mean"):
        dino(path=path, mode="mean")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cache_mb"):
        dino(path=path, cache_mb=-1)
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match=str(folder)):
            dino(path=path, references=str(folder))
    files = _save(_images(1), tmp_path)
    with pytest.raises(DataError, match="1 records for 2"):
        dino(path=path, device="cpu")(with_references(_images(2), [files])._replace(meta=[{}]))


def test_weights_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    config = BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9
    )
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"bert.*dinov2.*'bert'"):
        dino(path=str(tmp_path / "bert"))
    with pytest.raises(ModelError, match="no/such-model"):
        dino(path="no/such-model")
    state = load_file(folders["v2"] / "model.safetensors")
    changes: dict[str, dict[str, Tensor]] = {
        "missing": {k: v for k, v in state.items() if k != "layernorm.weight"},
        "unexpected": state | {"embeddings.extra": torch.zeros(1)},
        "mismatched": state | {"layernorm.weight": torch.zeros(7)},
    }
    for kind, tensors in changes.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text((folders["v2"] / "config.json").read_text())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"layernorm|extra"):
            dino(path=str(folder))
