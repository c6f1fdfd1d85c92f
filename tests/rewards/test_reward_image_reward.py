"""ImageReward against timm's ViT, transformers' BLIP text model and a head in numpy, on random
public-layout files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from blipkit import CLS, PAD, SEP, Public, head_shapes, save_image_reward
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.transforms import (
    CenterCrop,
    Compose,
    InterpolationMode,
    Normalize,
    Resize,
    ToTensor,
)

from flowrl.core.errors import DataError, ModelError
from flowrl.core.types import Reward, RewardBatch
from rewards._backbones.blip import ImageRewardNet, Sizes, load, sizes_of
from rewards.image_reward import image_reward

PROMPTS = ["a red circle", "a blue square", "Red circles", "a square"]
IDS = [
    [CLS, 1037, 2417, 4418, SEP],
    [CLS, 1037, 2630, 2675, SEP],
    [CLS, 2417, 4418, 2015, SEP],
    [CLS, 1037, 2675, SEP],
]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Public:
    return save_image_reward(tmp_path_factory.mktemp("image_reward"))


@pytest.fixture(scope="module")
def scorer(public: Public) -> image_reward:
    return image_reward(
        path=str(public.file), tokenizer=str(public.tokenizer), device="cpu", batch=3
    )


def _images(count: int = 4, height: int = 240, width: int = 301) -> Tensor:
    """Return smooth random images, so that resizing matters but does not wash them out."""
    coarse = torch.rand(count, 3, 9, 11, generator=torch.Generator().manual_seed(1))
    return nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)


def _batch(images: Tensor, prompts: list[str]) -> RewardBatch:
    n = len(images)
    return RewardBatch(
        images, prompts, torch.arange(n), [{"prompt": p} for p in prompts], torch.zeros(n)
    )


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([row + [PAD] * (35 - len(row)) for row in rows])
    return ids, (ids != PAD).long()


# The public preprocessing, of the library that the public code takes it from.
PREPROCESS = Compose(
    [
        Resize(224, interpolation=InterpolationMode.BICUBIC),
        CenterCrop(224),
        ToTensor(),
        Normalize((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    ]
)


@torch.inference_mode()
def _independent(public: Public, images: Tensor, rows: list[list[int]]) -> np.ndarray:
    """Score with torchvision, timm, transformers and numpy; nothing of flowrl's takes part."""
    scores = []
    for image, row in zip(images, rows, strict=True):
        one = Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())
        features = public.vision(PREPROCESS(one)[None])
        states = public.text(
            torch.tensor([row]),  # unpadded: what is padded must not matter
            encoder_hidden_states=features,
            encoder_attention_mask=torch.ones(features.shape[:-1], dtype=torch.long),
            is_decoder=False,
        ).last_hidden_state
        x = states[0, 0].double().numpy()
        for place in head_shapes(128):
            weight, bias = (
                public.state[f"mlp.layers.{place}.{kind}"].double().numpy()
                for kind in ("weight", "bias")
            )
            x = weight @ x + bias
        scores.append((x[0] - 0.16717362830052426) / 1.0333394966054072)
    return np.array(scores)


def test_the_names_and_shapes_are_the_public_files() -> None:
    # Written out from the reference's description of ImageReward.pt: ViT-L/16 at 224 px, BERT-base,
    # 30524 words.
    def linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}

    def norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    vit, bert = "blip.visual_encoder.", "blip.text_encoder."
    shapes: dict[str, tuple[int, ...]] = {
        vit + "cls_token": (1, 1, 1024),
        vit + "pos_embed": (1, 197, 1024),
    }
    shapes |= {
        vit + "patch_embed.proj.weight": (1024, 3, 16, 16),
        vit + "patch_embed.proj.bias": (1024,),
    }
    for i in range(24):
        block = f"{vit}blocks.{i}."
        shapes |= norm(block + "norm1", 1024) | norm(block + "norm2", 1024)
        shapes |= linear(block + "attn.qkv", 3072, 1024) | linear(block + "attn.proj", 1024, 1024)
        shapes |= linear(block + "mlp.fc1", 4096, 1024) | linear(block + "mlp.fc2", 1024, 4096)
    shapes |= norm(vit + "norm", 1024) | norm(bert + "embeddings.LayerNorm", 768)
    shapes[bert + "embeddings.word_embeddings.weight"] = (30524, 768)
    shapes[bert + "embeddings.position_embeddings.weight"] = (512, 768)
    for i in range(12):
        layer = f"{bert}encoder.layer.{i}."
        for part, source in (("attention", 768), ("crossattention", 1024)):
            shapes |= linear(f"{layer}{part}.self.query", 768, 768)
            shapes |= linear(f"{layer}{part}.self.key", 768, source) | linear(
                f"{layer}{part}.self.value", 768, source
            )
            shapes |= linear(f"{layer}{part}.output.dense", 768, 768) | norm(
                f"{layer}{part}.output.LayerNorm", 768
            )
        shapes |= linear(layer + "intermediate.dense", 3072, 768) | linear(
            layer + "output.dense", 768, 3072
        )
        shapes |= norm(layer + "output.LayerNorm", 768)
    for place, (rows, columns) in head_shapes(768).items():
        shapes |= linear(f"mlp.layers.{place}", rows, columns)
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    sizes = sizes_of(state, "here")
    assert sizes == Sizes(16, 197, 1024, 4096, 24, 30524, 512, 768, 3072, 12) and sizes.image == 224
    with torch.device("meta"):
        net = ImageRewardNet(sizes)
    assert {name: tuple(value.shape) for name, value in net.state_dict().items()} == shapes


def test_the_vision_part_equals_timms(public: Public) -> None:
    net = load(public.state, "here")
    pixels = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        ours, theirs = net.blip["visual_encoder"](pixels), public.vision(pixels)
    assert ours.shape == (2, 197, 192)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_text_part_equals_transformers_blip(public: Public) -> None:
    net = load(public.state, "here")
    ids, mask = _padded(IDS)
    image = torch.randn(4, 197, 192, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        ours = net.blip["text_encoder"](ids, mask, image)
        theirs = public.text(
            ids, attention_mask=mask, encoder_hidden_states=image, is_decoder=False
        ).last_hidden_state
    assert ours.shape == (4, 35, 128) and theirs.std() > 0.5
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_layer_norms_have_the_libraries_eps(public: Public) -> None:
    # Too small a difference to show in the outputs above.
    def eps(module: nn.Module) -> list[float]:
        return [m.eps for m in module.modules() if isinstance(m, nn.LayerNorm)]

    net = load(public.state, "here")
    assert eps(net.blip["visual_encoder"]) == eps(public.vision) == [1e-6] * 5
    assert eps(net.blip["text_encoder"]) == eps(public.text) == [1e-12] * 7


@pytest.mark.parametrize(("height", "width"), [(240, 301), (300, 224), (64, 64)])
def test_the_score_equals_an_independent_one(
    public: Public, scorer: image_reward, height: int, width: int
) -> None:
    images = _images(4, height, width)
    scores = scorer(_batch(images, PROMPTS))
    expected = _independent(public, images, IDS)
    assert isinstance(scorer, Reward) and scores.dtype == torch.float32 and scores.shape == (4,)
    assert expected.std() > 0.1  # the images and prompts do differ
    np.testing.assert_allclose(scores.numpy(), expected, rtol=0, atol=1e-5)


def test_tokens_are_berts(public: Public, scorer: image_reward) -> None:
    # By hand: lower-cased words, [CLS] in front, [SEP] behind, at most 35 with both; BLIP's marks
    # behind the words.
    def ids(text: str) -> list[int]:
        return list(
            scorer._tokenizer(text, padding="max_length", truncation=True, max_length=35)[
                "input_ids"
            ]
        )

    assert [ids(prompt) for prompt in PROMPTS] == _padded(IDS)[0].tolist()
    assert ids("red " * 50) == [CLS] + [2417] * 33 + [SEP]
    assert ids("[DEC] a [ENC]") == [CLS, 30522, 1037, 30523, SEP] + [PAD] * 30
    assert ids("") == [CLS, SEP] + [PAD] * 33
    long = _batch(_images(1), ["red " * 50])
    row = [[CLS] + [2417] * 33 + [SEP]]
    np.testing.assert_allclose(
        scorer(long).numpy(), _independent(public, long.images, row), rtol=0, atol=1e-5
    )


def test_half_precision_stays_near(public: Public, scorer: image_reward) -> None:
    half = image_reward(
        path=str(public.file), tokenizer=str(public.tokenizer), device="cpu", dtype="bfloat16"
    )
    images = _images()
    exact, near = scorer(_batch(images, PROMPTS)), half(_batch(images, PROMPTS))
    assert near.dtype == torch.float32 and 0 < (near - exact).abs().max() < 0.5 * (
        exact.max() - exact.min()
    )
    assert half._net.mlp["layers"][0].weight.dtype == torch.float32  # type: ignore[index]


def test_folders_and_safetensors_are_read(
    public: Public, scorer: image_reward, tmp_path: Path
) -> None:
    file = tmp_path / "any.safetensors"
    save_file(public.state, file)
    batch = _batch(_images(1), PROMPTS[:1])
    for path in (str(file), str(public.file.parent)):
        again = image_reward(path=path, tokenizer=str(public.tokenizer), device="cpu")
        assert torch.equal(again(batch), scorer(batch))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blip.visual_encoder.blocks.1.attn.qkv.bias": None}, "1 missing"),
        ({"blip.visual_encoder.blocks.1.attn.extra": torch.zeros(1)}, "1 unexpected"),
        ({"blip.image_queue": torch.zeros(1)}, "1 unexpected"),
        (
            {"mlp.layers.4.weight": torch.zeros(64, 129)},
            r"mlp.layers.4.weight: expected \[64, 128\], got \[64, 129\]",
        ),
        ({"blip.visual_encoder.patch_embed.proj.weight": None}, "expected ImageReward's tensors"),
        ({"blip.visual_encoder.pos_embed": torch.zeros(1, 196, 192)}, "square images"),
        (
            {"blip.text_encoder.embeddings.position_embeddings.weight": torch.zeros(34, 128)},
            "35 text positions",
        ),
    ],
)
def test_another_layout_is_refused(
    public: Public, change: dict[str, Tensor | None], message: str
) -> None:
    state = {name: value for name, value in (public.state | change).items() if value is not None}
    with pytest.raises(ModelError, match=message):
        load(state, "here")


def test_a_head_width_that_64_does_not_divide_is_refused(public: Public) -> None:
    state = public.state | {
        "blip.visual_encoder.patch_embed.proj.weight": torch.zeros(100, 3, 16, 16)
    }
    with pytest.raises(ModelError, match="64 divides"):
        load(state, "here")


def test_what_is_wrong_with_the_files_is_said(public: Public, tmp_path: Path) -> None:
    path, tokenizer = str(public.file), str(public.tokenizer)
    with pytest.raises(ModelError, match="no file ImageReward.pt"):
        image_reward(path=str(tmp_path), tokenizer=tokenizer)
    (tmp_path / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"]) + "\n"
    )
    with pytest.raises(ModelError, match="expected 30524 tokens .* got 8"):
        image_reward(path=path, tokenizer=str(tmp_path))
    with pytest.raises(ModelError, match="no/such-tokenizer"):
        image_reward(path=path, tokenizer="no/such-tokenizer")


def test_as_many_prompts_as_images(scorer: image_reward) -> None:
    with pytest.raises(DataError, match="1 for 2"):
        scorer(_batch(_images(2), PROMPTS[:1]))
