"""ImageReward against timm's ViT, transformers' BLIP text model and a head in numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from blipkit import CLS, PAD, SEP, Public, head_shapes, public_state
from clipkit import MEAN, STD, batch_of, pil, random_images
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import transforms
from weightkit import Weights

from flowrl.core.errors import ModelError
from rewards._backbones.blip import ImageRewardNet, Sizes, load, sizes_of
from rewards.image_reward import image_reward

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


def test_tokens_are_berts(scorer: image_reward) -> None:
    found = scorer._tokenizer(list(WORDS), padding="max_length", truncation=True, max_length=35)
    assert found["input_ids"] == _padded(IDS)[0].tolist()


def test_both_towers_equal_the_libraries(public: Public) -> None:
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


def test_layer_norms_have_the_libraries_eps(public: Public) -> None:
    """Too small a difference to show in the outputs above."""

    def eps(module: nn.Module) -> list[float]:
        return [m.eps for m in module.modules() if isinstance(m, nn.LayerNorm)]

    net = load(public.state, "here")
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
        (f"{VIT}.blocks.1.attn.qkv.bias", None, "1 missing"),
        (f"{VIT}.blocks.1.attn.extra", torch.zeros(1), "1 unexpected"),
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
