"""Scorers with networks of their own, DINO, ImageReward and SPO's preference model: against timm,
transformers, torchvision and numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from clipkit import MEAN, STD, batch_of, pil, random_images
from PIL import Image
from safetensors.torch import load_file, save_file
from scorerkit import words
from tinyscorers import (
    CLS,
    PAD,
    SEP,
    TINY,
    Public,
    head_shapes,
    public_state,
    tokens_of,
    with_references,
)
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, layer_norm, silu
from torchvision import transforms
from transformers import (
    BertConfig,
    BertModel,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
)
from weightkit import Weights

from flowrl.core.errors import DataError, ModelError
from flowrl.core.types import RewardBatch
from rewards._backbones.blip import ImageRewardNet, Sizes, load, sizes_of
from rewards._backbones.dino import Backbone, FeatureCache
from rewards.dino import dino
from rewards.image_reward import image_reward
from rewards.step_aware import prepared, step_aware

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


@pytest.mark.parametrize("mode", ["cls", "patch"])
@pytest.mark.parametrize(
    ("name", "side"), [("v2", 42), ("v2_registers", 42), ("v3", 32), ("v2", 56), ("v3", 64)]
)
def test_scores_equal_numpy_on_the_librarys_own_tokens(
    nets: dict[str, str], files: list[str], name: str, side: int, mode: Any
) -> None:
    """Loops of numpy dot products over the tokens of the library's own model, which makes position
    embeddings for other sizes; another size is another score."""
    network, prefix = network_of(nets, name), PREFIX[name]
    seen, refs = tokens_of(network, IMAGES, side), tokens_of(network, KNOWN, side)
    patches = (side // network.config.patch_size) ** 2
    expected, rows = [], [[0], [1, 2, 3], [0], [3, 1], [2]]
    for i, mine in enumerate(rows):
        expected.append(max(_likeness(seen[i], refs[r], mode, prefix) for r in mine))
    columns: list[Any] = [list(map(files.__getitem__, mine)) for mine in rows]
    columns[0], columns[4] = files[0], files[2]
    batch = with_references(IMAGES, columns)
    given: dict[str, Any] = {"path": nets[name], "mode": mode, "device": "cpu"}
    usual = side == network.config.image_size
    reward = dino(**given, size=None if usual else side)
    scores = reward(batch)
    assert reward.backbone.patches == patches and seen.shape[1] == prefix + patches
    assert len({round(x, 4) for x in expected}) == 5
    np.testing.assert_allclose(scores.numpy(), expected, atol=2e-6)
    # in small parts, with nothing kept
    other = dino(**given, batch=2, cache_mb=0)(batch)
    assert torch.allclose(other, scores, atol=1e-6, rtol=0) == usual


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
    nets: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{index}.png" for index in range(4)]
    for file, image in zip(files, KNOWN, strict=True):
        pil(image).save(file)
    library = FeatureCache(backbone_of(nets["v2"]), megabytes=1, patches=True, who="test")
    # bytes by hand: 10 tokens of 24 float32 numbers per image
    assert library.most == 2**20 // (4 * 24 * 10)
    first = torch.cat([part.patches for part in library(files)])
    with monkeypatch.context() as patch:
        patch.setattr(library, "_compute", lambda stamps: dict.fromkeys(stamps[:0]))
        again = torch.cat([part.patches for part in library(files[::-1])])
    assert torch.equal(again, first.flip(0))
    # another image under the same name is another image
    pil(KNOWN[1]).save(files[0])
    assert torch.equal(torch.cat([part.patches for part in library(files[:1])]), first[1:2])
    library.most = 1
    list(library(files[:1]))
    assert [stamp[0] for stamp in library.kept] == files[:1]
    files[1].unlink()
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


def test_another_kind_of_network_is_refused(tmp_path: Path) -> None:
    config = BertConfig(**TINY, intermediate_size=8, vocab_size=9)
    BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"bert.*dinov2.*'bert'"):
        dino(path=str(tmp_path / "bert"))


# -------------------------------------------------------------------------------------- ImageReward


# by hand: lower-cased words, [CLS] in front, [SEP] behind; at most 35 tokens with both
WORDS = {
    "a red circle": [1037, 2417, 4418],
    "a blue square": [1037, 2630, 2675],
    "Red circles": [2417, 4418, 2015],
    "red " * 50: [2417] * 33,
    "": [],
    "[DEC] a [ENC]": [30522, 1037, 30523],  # BLIP's marks stand behind the words
}
VIT, MLP = "blip.visual_encoder", "mlp.layers.4.weight"
PLACES = "blip.text_encoder.embeddings.position_embeddings.weight"
IDS = [[CLS, *ids, SEP] for ids in WORDS.values()]
# the public preprocessing, of the library that the public code takes it from
PREPROCESS = transforms.Compose(
    [
        transforms.Resize(224, interpolation=transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)


@pytest.fixture(scope="module")
def public(weights: Weights) -> Public:
    return weights.public_blip


@pytest.fixture(scope="module")
def scorer(weights: Weights) -> image_reward:
    return image_reward(**weights.image_reward, device="cpu")


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([row + [PAD] * (35 - len(row)) for row in rows])
    return ids, (ids != PAD).long()


@torch.inference_mode()
def _independent(public: Public, images: Tensor, rows: list[list[int]]) -> np.ndarray:
    """Score with torchvision, timm, transformers and numpy; nothing of flowrl's takes part."""
    scores = []
    for image, row in zip(images, rows, strict=True):
        features = public.vision(PREPROCESS(pil(image))[None])
        states = public.text(
            torch.tensor([row]),  # unpadded: what is padded must not matter
            encoder_hidden_states=features,
            encoder_attention_mask=torch.ones(features.shape[:-1], dtype=torch.long),
            is_decoder=False,
        ).last_hidden_state
        x = states[0, 0].double().numpy()
        for place in head_shapes(128):
            weight, bias = (public.state[f"mlp.layers.{place}.{k}"] for k in ("weight", "bias"))
            x = weight.double().numpy() @ x + bias.double().numpy()
        scores.append((x[0] - 0.16717362830052426) / 1.0333394966054072)
    return np.array(scores)


@pytest.mark.parametrize(("height", "width"), [(240, 301), (300, 224), (64, 64)])
def test_the_score_equals_an_independent_one(
    public: Public, scorer: image_reward, height: int, width: int
) -> None:
    images = random_images(6, height, width)
    scores, expected = scorer(batch_of(images, list(WORDS))), _independent(public, images, IDS)
    assert expected.std() > 0.1  # the images and prompts do differ
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_tokens_and_both_towers_equal_the_libraries(public: Public, scorer: image_reward) -> None:
    """BERT's tokens; the layer norms' eps make too small a difference to show in the outputs."""
    found = scorer._tokenizer(list(WORDS), padding="max_length", truncation=True, max_length=35)
    assert found["input_ids"] == _padded(IDS)[0].tolist()
    net, generator = load(public.state, "here"), torch.Generator().manual_seed(2)
    pixels = torch.randn(2, 3, 224, 224, generator=generator)
    with torch.inference_mode():
        ours, theirs = net.blip["visual_encoder"](pixels), public.vision(pixels)
    assert ours.shape == (2, 197, 192)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    (ids, mask), image = _padded(IDS), torch.randn(6, 197, 192, generator=generator)
    given = {"attention_mask": mask, "encoder_hidden_states": image, "is_decoder": False}
    with torch.inference_mode():
        ours = net.blip["text_encoder"](ids, mask, image)
        theirs = public.text(ids, **given).last_hidden_state
    assert ours.shape == (6, 35, 128) and theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)

    def eps(module: nn.Module) -> list[float]:
        return [m.eps for m in module.modules() if isinstance(m, nn.LayerNorm)]

    assert eps(net.blip["visual_encoder"]) == eps(public.vision) == [1e-6] * 5
    assert eps(net.blip["text_encoder"]) == eps(public.text) == [1e-12] * 7


def test_half_precision_keeps_the_head(weights: Weights) -> None:
    half = image_reward(**weights.image_reward, device="cpu", dtype="bfloat16")
    assert half._net.mlp["layers"][0].weight.dtype == torch.float32  # type: ignore[index]


def test_the_names_and_shapes_are_the_public_files() -> None:
    """ViT-L/16 at 224 px, BERT-base, 30524 words; timm's and transformers' names and shapes."""
    shapes = {name: tuple(value.shape) for name, value in public_state().items()}
    assert shapes[f"{VIT}.pos_embed"] == (1, 197, 1024) and shapes[PLACES] == (512, 768)
    assert shapes[f"{VIT}.patch_embed.proj.weight"] == (1024, 3, 16, 16)
    assert shapes[f"{VIT}.blocks.23.attn.qkv.weight"] == (3072, 1024)
    cross = "blip.text_encoder.encoder.layer.11.crossattention"
    assert shapes[f"{cross}.self.key.weight"] == (768, 1024)
    sizes = sizes_of(public_state(), "here")
    assert sizes == Sizes(16, 197, 1024, 4096, 24, 30524, 512, 768, 3072, 12) and sizes.image == 224
    with torch.device("meta"):
        net = ImageRewardNet(sizes)
    assert {name: tuple(value.shape) for name, value in net.state_dict().items()} == shapes


def test_another_layout_is_refused(public: Public) -> None:
    for name, value, message in (
        ("blip.image_queue", torch.zeros(1), "1 unexpected"),
        (MLP, torch.zeros(64, 129), rf"{MLP}: expected \[64, 128\], got \[64, 129\]"),
        (f"{VIT}.patch_embed.proj.weight", None, "expected ImageReward's tensors"),
        (f"{VIT}.patch_embed.proj.weight", torch.zeros(100, 3, 16, 16), "64 divides"),
        (f"{VIT}.pos_embed", torch.zeros(1, 196, 192), "square images"),
        (PLACES, torch.zeros(34, 128), "35 text positions"),
    ):
        state = {key: tensor for key, tensor in public.state.items() if key != name}
        if value is not None:
            state[name] = value
        with pytest.raises(ModelError, match=message):
            load(state, "here")


def test_which_files_are_read(weights: Weights, scorer: image_reward, tmp_path: Path) -> None:
    public, given = weights.public_blip, weights.image_reward
    save_file(public.state, tmp_path / "any.safetensors")
    batch = batch_of(random_images(1), ["a red circle"])
    for path in (tmp_path / "any.safetensors", public.file.parent):
        again = image_reward(**given | {"path": str(path)}, device="cpu")
        assert torch.equal(again(batch), scorer(batch))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    for wrong, message in (
        ({"path": str(tmp_path)}, "no file ImageReward.pt"),
        ({"tokenizer": str(tmp_path)}, "expected 30524 tokens .* got 8"),
        ({"tokenizer": "no/such-tokenizer"}, "no/such-tokenizer"),
    ):
        with pytest.raises(ModelError, match=message):
            image_reward(**given | wrong)


# --------------------------------------------------------------------------- SPO's preference model


SIGMAS = torch.tensor([0.0, 0.2, 0.5, 0.9, 0.99, 0.3])


class Published(nn.Module):
    """The modules of time_conditioned_clip.py (RockeyCoss/SPO at 27a8642), under the names that its
    checkpoints have, and its arithmetic written out over transformers' own layers."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.model, width = clip, clip.config.vision_config.hidden_size
        clip.t_embedder = nn.Module()
        clip.t_embedder.mlp = nn.Sequential(
            nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width)
        )
        for layer in clip.vision_model.encoder.layers:
            layer.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        clip.vision_model.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, pixels: Tensor, ids: Tensor, time: Tensor) -> Tensor:
        """Score prepared images [B, 3, S, S] against tokens [B, T] at times [B] -> [B]."""
        speed = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        waves = torch.cat([(time[:, None] * speed).cos(), (time[:, None] * speed).sin()], -1)
        now, vision = self.model.t_embedder.mlp(waves), self.model.vision_model
        x = vision.pre_layrnorm(vision.embeddings(pixels))
        for layer in vision.encoder.layers:
            move, size, gate, move2, size2, gate2 = layer.adaLN_modulation(now).chunk(6, 1)
            seen = layer.layer_norm1(x) * (1 + size[:, None]) + move[:, None]
            x = x + layer.self_attn(seen, attention_mask=None)[0] * gate[:, None]
            seen = layer.layer_norm2(x) * (1 + size2[:, None]) + move2[:, None]
            x = x + layer.mlp(seen) * gate2[:, None]
        last = vision.post_layernorm
        pooled = layer_norm(x[:, 0], x.shape[2:], last.weight, last.bias, last.eps)
        final = vision.adaLN_modulation[1]
        move, size = nn.functional.linear(silu(now), final.weight, final.bias).chunk(2, 1)
        image = self.model.visual_projection(pooled * (1 + size) + move)
        text = self.model.get_text_features(ids).pooler_output
        found: Tensor = self.model.logit_scale.exp() * cosine_similarity(image, text)
        return found


@pytest.fixture(scope="module")
def published(weights: Weights) -> tuple[Published, Path]:
    """Return a random model, and its file as the code's own training writes it."""
    torch.manual_seed(0)
    model = Published(CLIPModel.from_pretrained(weights.clip.folder)).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "adaLN" in name or "t_embedder" in name:
                value.normal_(std=0.2)
    file = weights.root / "sd-v1-5_step-aware_preference_model.bin"
    # older releases of transformers stored the positions, too
    positions = {"model.vision_model.embeddings.position_ids": torch.arange(17)[None]}
    torch.save(model.state_dict() | positions, file)
    return model, file


@torch.no_grad()
def test_the_published_file_scores_as_its_own_code(
    weights: Weights, published: tuple[Published, Path]
) -> None:
    """Oracle: the code's arithmetic on the same weights, over transformers' layers; the images are
    prepared as another test compares with the code's own lines."""
    model, file = published
    reward: Any = step_aware(path=str(weights.clip.folder), weights=str(file), device="cpu")
    images, records = random_images(6), words()
    prompts = [record["prompt"] for record in records]
    batch = RewardBatch(images, prompts, torch.arange(6), records, SIGMAS)
    tokens = reward.tokens(
        prompts, padding="max_length", truncation=True, max_length=77, return_tensors="pt"
    )
    oracle = model(prepared(images, reward.images), tokens["input_ids"], 1000 * SIGMAS)
    torch.testing.assert_close(reward(batch), oracle, atol=2e-5, rtol=1e-5)
    # the time matters in these weights
    still = model(prepared(images, reward.images), tokens["input_ids"], 0 * SIGMAS)
    assert float((still - oracle).abs().max()) > 0.1


def test_a_file_that_is_no_such_model(weights: Weights, tmp_path: Path) -> None:
    """Both names, of the file and of a tensor that is missing; a file that is nowhere."""
    folder = str(weights.clip.folder)
    torch.save({"model.t_embedder.mlp.0.weight": torch.zeros(2, 2)}, tmp_path / "a.bin")
    with pytest.raises(ModelError, match=r"a\.bin: expected \d+ tensors.*missing \['clip\."):
        step_aware(path=folder, weights=str(tmp_path / "a.bin"), device="cpu")
    with pytest.raises(ModelError, match=r"no\.bin"):
        step_aware(path=folder, weights=str(tmp_path / "no.bin"), device="cpu")
    # what to do stands before what the library says of a folder that is none
    with pytest.raises(
        ModelError, match=r"step_aware\.py makes one for shapes\. Reading .*failed: "
    ):
        step_aware(path="data/nowhere", device="cpu")
