"""Similarity to reference images: the real DINO classes, against timm and numpy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from clipkit import pil, random_images
from dinokit import TINY, tokens_of, with_references
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

from flowrl.core.errors import DataError, ModelError
from flowrl.core.types import RewardBatch
from rewards._backbones.dino import Backbone, FeatureCache
from rewards.dino import dino

V2 = Dinov2Config(image_size=42, patch_size=14, mlp_ratio=2, **TINY)
REGISTERS: Any = {"image_size": 42, "patch_size": 14, "num_register_tokens": 3, **TINY}
V3: Any = {"image_size": 32, "patch_size": 8, "intermediate_size": 48, "num_register_tokens": 4}
MODELS: dict[str, Callable[[], Any]] = {
    "v2": lambda: Dinov2Model(V2),
    "v2_registers": lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**REGISTERS)),
    "v3": lambda: DINOv3ViTModel(DINOv3ViTConfig(**V3, **TINY)),
}
PREFIX = {"v2": 1, "v2_registers": 4, "v3": 5}  # CLS and register tokens
IMAGES, KNOWN = random_images(5, 40, 52), random_images(4, 33, 33, seed=1)


@pytest.fixture(scope="module")
def nets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny networks with weights large enough that features differ, saved by the library."""
    out = {}
    for name, make in MODELS.items():
        torch.manual_seed(3)
        network = make()
        with torch.no_grad():
            for p in network.parameters():
                p.add_(0.3 * torch.randn_like(p))
        out[name] = str(tmp_path_factory.mktemp(name))
        network.save_pretrained(out[name], safe_serialization=True)
    return out


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The images of KNOWN."""
    folder = tmp_path_factory.mktemp("references")
    for index, image in enumerate(KNOWN):
        pil(image).save(folder / f"{index}.png")
    return [str(folder / f"{index}.png") for index in range(4)]


def network_of(nets: dict[str, str], name: str) -> Any:
    return MODELS[name]().from_pretrained(nets[name]).eval()


def backbone_of(path: str) -> Backbone:
    return Backbone(path, size=None, device="cpu", dtype="float32", batch=2, who="test")


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def _likeness(seen: np.ndarray, known: np.ndarray, mode: str, prefix: int) -> float:
    if mode == "cls":
        return _cosine(seen[0], known[0])
    best = []
    for p in seen[prefix:]:
        best.append(max(_cosine(p, q) for q in known[prefix:]))
    return float(np.mean(best))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["cls", "patch"])
def test_scores_equal_numpy_on_the_librarys_own_tokens(
    nets: dict[str, str], files: list[str], name: str, mode: Any
) -> None:
    """Loops of numpy dot products over the tokens of the library's own model."""
    network = network_of(nets, name)
    side, prefix = network.config.image_size, PREFIX[name]
    seen, refs = tokens_of(network, IMAGES, side), tokens_of(network, KNOWN, side)
    assert seen.shape[1] == prefix + (side // network.config.patch_size) ** 2
    expected, rows = [], [[0], [1, 2, 3], [0], [3, 1], [2]]
    for i, mine in enumerate(rows):
        expected.append(max(_likeness(seen[i], refs[r], mode, prefix) for r in mine))
    columns: list[Any] = [list(map(files.__getitem__, mine)) for mine in rows]
    columns[0], columns[4] = files[0], files[2]
    batch = with_references(IMAGES, columns)
    scores = dino(path=nets[name], mode=mode, device="cpu")(batch)
    assert len({round(x, 4) for x in expected}) == 5
    np.testing.assert_allclose(scores.numpy(), expected, atol=2e-6)
    # in small parts, with nothing kept
    small = dino(path=nets[name], mode=mode, device="cpu", batch=2, cache_mb=0)(batch)
    torch.testing.assert_close(small, scores, atol=1e-6, rtol=0)


def test_dinov2_features_equal_timms(nets: dict[str, str]) -> None:
    """timm's VisionTransformer, which Adv-GRPO's code uses, with the same tensors."""
    options: dict[str, Any] = {"img_size": 42, "patch_size": 14, "embed_dim": 24, "depth": 2}
    options |= {"num_heads": 2, "mlp_ratio": 2, "init_values": 1.0, "num_classes": 0}
    other = timm.models.vision_transformer.VisionTransformer(**options)
    # strict: every tensor of timm's layout has its own in the file
    other.load_state_dict(_timm_names(load_file(f"{nets['v2']}/model.safetensors")))
    backbone = backbone_of(nets["v2"])
    images = [pil(image) for image in IMAGES[:3]]
    parts = list(backbone(images))
    with torch.no_grad():
        expected = other.eval().forward_features(backbone.pixels(images))
    assert [len(part.cls) for part in parts] == [2, 1]
    cls = torch.cat([part.cls for part in parts])
    patches = torch.cat([part.patches for part in parts])
    torch.testing.assert_close(cls, expected[:, 0], atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(patches, expected[:, 1:], atol=2e-5, rtol=1e-5)


def _timm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of a Dinov2Model's file, after the public layouts of both libraries."""
    names = {
        "cls_token": "embeddings.cls_token",
        "pos_embed": "embeddings.position_embeddings",
        "patch_embed.proj.weight": "embeddings.patch_embeddings.projection.weight",
        "patch_embed.proj.bias": "embeddings.patch_embeddings.projection.bias",
        "norm.weight": "layernorm.weight",
        "norm.bias": "layernorm.bias",
    }
    out = {}
    for layer in range(2):
        a, b = f"encoder.layer.{layer}.", f"blocks.{layer}."
        for kind in ("weight", "bias"):
            attention = f"{a}attention.attention"
            parts = [state[f"{attention}.{part}.{kind}"] for part in ("query", "key", "value")]
            out[f"{b}attn.qkv.{kind}"] = torch.cat(parts)
            names[f"{b}attn.proj.{kind}"] = f"{a}attention.output.dense.{kind}"
            for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                names[f"{b}{part}.{kind}"] = f"{a}{part}.{kind}"
        for part in ("1", "2"):
            names[f"{b}ls{part}.gamma"] = f"{a}layer_scale{part}.lambda1"
    return out | {new: state[old] for new, old in names.items()}


@pytest.mark.parametrize(("name", "size", "patches"), [("v2", 56, 16), ("v3", 64, 64)])
def test_another_size_uses_the_librarys_position_embeddings(
    nets: dict[str, str], files: list[str], name: str, size: int, patches: int
) -> None:
    network = network_of(nets, name)
    seen, refs = tokens_of(network, IMAGES, size), tokens_of(network, KNOWN[:1], size)
    reward, batch = dino(path=nets[name], size=size), with_references(IMAGES, [files[0]] * 5)
    assert reward.backbone.patches == patches  # (56 / 14)^2 and (64 / 8)^2
    scores = reward(batch)
    np.testing.assert_allclose(scores.numpy(), [_cosine(s[0], refs[0, 0]) for s in seen], atol=2e-6)
    own = dino(path=nets[name])(batch)
    assert (own - scores).abs().max() > 1e-4  # another size is another score


@pytest.mark.parametrize("mode", ["cls", "patch"])
def test_an_identical_image_scores_one_and_no_other_does(
    nets: dict[str, str], files: list[str], mode: Any
) -> None:
    """The folder serves every prompt: no column is needed."""
    reward = dino(path=nets["v3"], mode=mode, references=str(Path(files[0]).parent))
    reward.check_record({"prompt": "a"}, "here")
    images = torch.cat([KNOWN[:2], random_images(2, 33, 33, seed=2)])
    scores = reward(with_references(images, [None] * 4))
    torch.testing.assert_close(scores[:2], torch.ones(2), atol=1e-6, rtol=0)
    assert bool((scores[2:] < 1 - 1e-4).all())


def test_references_are_read_once_and_forgotten_when_memory_is_full(
    nets: dict[str, str], tmp_path: Path
) -> None:
    files = [tmp_path / f"{index}.png" for index in range(4)]
    for file, image in zip(files, KNOWN, strict=True):
        pil(image).save(file)
    library = FeatureCache(backbone_of(nets["v2"]), megabytes=1, patches=True, who="test")
    # bytes by hand: 10 tokens of 24 float32 numbers per image
    assert library.most == 2**20 // (4 * 24 * 10)
    first = torch.cat([part.patches for part in library(files)])
    for file in files:
        file.unlink()
    assert torch.equal(torch.cat([part.patches for part in library(files[::-1])]), first.flip(0))
    library.most = 1
    list(library(files[:1]))
    assert list(library.kept) == files[:1]
    with pytest.raises(DataError, match=r"1\.png"):
        list(library(files[1:2]))


def test_images_are_turned_and_made_rgb(nets: dict[str, str], tmp_path: Path) -> None:
    """An EXIF note "turned by 90 degrees" (6), as phones write it: as if stored turned."""
    image, exif = pil(IMAGES[0]), Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "note.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "turned.png")
    image.convert("L").save(tmp_path / "grey.png")
    reward = dino(path=nets["v2"], device="cpu", batch=4)
    files = [tmp_path / name for name in ("note.png", "turned.png", "grey.png")]
    (features,) = reward.library(files)
    assert torch.equal(features.cls[0], features.cls[1])
    assert not torch.equal(features.cls[0], features.cls[2])


def test_a_record_is_checked_before_anything_is_scored(
    nets: dict[str, str], tmp_path: Path
) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(DataError, match=str(folder)):
            dino(path=nets["v2"], references=str(folder))
    pil(KNOWN[0]).save(tmp_path / "0.png")
    (tmp_path / "text.png").write_text("no image")
    reward = dino(path=nets["v2"], root=str(tmp_path), column="looks", device="cpu")
    reward.check_record({"prompt": "a", "looks": "0.png"}, "f, line 1")
    reward.check_record({"prompt": "a", "looks": ["0.png"]}, "f, line 2")
    for value in (None, [], "", [""], 3, ["0.png", 4], {"a": 1}):
        with pytest.raises(DataError, match=r"f, line 3.*'looks'"):
            reward.check_record({"prompt": "a", "looks": value}, "f, line 3")
    for name in ("1.png", "text.png"):
        with pytest.raises(DataError, match=rf"f, line 4.*{name}"):
            reward.check_record({"prompt": "a", "looks": ["0.png", name]}, "f, line 4")
    batch = RewardBatch(KNOWN[:1], ["a"], torch.zeros(1), [{"prompt": "a"}], torch.zeros(1))
    with pytest.raises(DataError, match="'a'"):
        reward(batch)


def test_weights_that_do_not_fit_are_refused(nets: dict[str, str], tmp_path: Path) -> None:
    config = BertConfig(**TINY, intermediate_size=8, vocab_size=9)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"bert.*dinov2.*'bert'"):
        dino(path=str(tmp_path / "bert"))
    state = load_file(f"{nets['v2']}/model.safetensors")
    without = {name: value for name, value in state.items() if name != "layernorm.weight"}
    (tmp_path / "config.json").write_text(Path(nets["v2"], "config.json").read_text())
    for tensors in (
        without,
        state | {"embeddings.extra": torch.zeros(1)},
        state | {"layernorm.weight": torch.zeros(7)},
    ):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=r"layernorm|extra"):
            dino(path=str(tmp_path))
