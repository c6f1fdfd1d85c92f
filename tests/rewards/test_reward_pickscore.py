"""PickScore: the library's own logits, the tuned scale, and the public layout."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from clipkit import (
    PROMPTS,
    add_architecture,
    batch_of,
    clip_tokenizer,
    pil,
    random_images,
    save_transformers,
    tiny_open_clip,
)
from open_clip.tokenizer import SimpleTokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPProcessor,
)

from flowrl.core.errors import ConfigError, ModelError
from rewards.pickscore import pickscore

IMAGES = random_images(6, 300, 227)
TUNED = 4.4  # PickScore's logit_scale is learnt, so it is not ln 100


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A model folder without a processor, and a processor folder without a model, as the two public
    repositories."""
    folder = tmp_path_factory.mktemp("pick")
    model = tiny_open_clip(add_architecture(folder, "tiny-pick"), seed=1)
    with torch.no_grad():
        model.logit_scale.fill_(TUNED)
    save_transformers(model, folder / "model")
    for name in ("processor_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / "model" / name).unlink()
    CLIPProcessor(CLIPImageProcessor(), clip_tokenizer()).save_pretrained(folder / "processor")
    return str(folder / "model"), str(folder / "processor")


@pytest.fixture(scope="module")
def scores(parts: tuple[str, str]) -> Tensor:
    return pickscore(path=parts[0], processor=parts[1])(batch_of(IMAGES, PROMPTS))


def inputs() -> dict[str, Tensor]:
    """Return what the public code feeds the model: PIL pixels, prompts padded and cut to 77
    tokens."""
    pixels = CLIPImageProcessorPil()([pil(i) for i in IMAGES], return_tensors="pt")
    words = clip_tokenizer()(
        PROMPTS, padding=True, truncation=True, max_length=77, return_tensors="pt"
    )
    assert words["input_ids"].shape == (6, 77)  # the long prompt is cut
    return {**pixels, **words}


def test_scores_are_the_librarys_logits(parts: tuple[str, str], scores: Tensor) -> None:
    """Expected: the diagonal of logits_per_image of CLIPModel.forward, and the public formula by
    embeddings."""
    model = CLIPModel.from_pretrained(parts[0])
    given = inputs()
    with torch.no_grad():
        out = model(**given)
    torch.testing.assert_close(scores, out.logits_per_image.diag(), atol=1e-4, rtol=1e-6)
    cosine = torch.cosine_similarity(out.image_embeds.double(), out.text_embeds.double())
    torch.testing.assert_close(
        scores.double(), torch.tensor(TUNED).double().exp() * cosine, atol=2e-4, rtol=0
    )
    assert scores.shape == (6,) and scores.dtype == torch.float32 and scores.std() > 1


def test_the_librarys_answer_is_an_object_with_the_projected_embedding(
    parts: tuple[str, str],
) -> None:
    """transformers 5 returns no tensor from get_image_features: pooler_output must be the projected
    one."""
    model = CLIPModel.from_pretrained(parts[0])
    given = inputs()
    with torch.no_grad():
        out = model(**given)
        image = model.get_image_features(given["pixel_values"])
        text = model.get_text_features(given["input_ids"], attention_mask=given["attention_mask"])
    assert not isinstance(image, Tensor)
    for found, unit in [
        (image.pooler_output, out.image_embeds),
        (text.pooler_output, out.text_embeds),
    ]:
        assert found.shape[1] == model.config.projection_dim
        torch.testing.assert_close(torch.nn.functional.normalize(found, dim=-1), unit)


def test_divide_and_scale(parts: tuple[str, str], scores: Tensor) -> None:
    """Closed form: flow_grpo's score / 26, and the bare cosine = score / exp(logit_scale)."""
    batch = batch_of(IMAGES, PROMPTS)
    flow_grpo = pickscore(path=parts[0], processor=parts[1], divide=26.0)
    torch.testing.assert_close(flow_grpo(batch), scores / 26, rtol=1e-6, atol=1e-7)
    bare = pickscore(path=parts[0], processor=parts[1], scale=1.0)
    torch.testing.assert_close(
        bare(batch), scores / torch.tensor(TUNED).exp(), rtol=1e-5, atol=1e-7
    )


def test_half_precision_keeps_the_scale(parts: tuple[str, str], scores: Tensor) -> None:
    """exp of 4.4 rounded to bfloat16 (4.40625) is 81.96, not 81.45."""
    reward = pickscore(path=parts[0], processor=parts[1], dtype="bfloat16")
    assert reward.towers.scale == pytest.approx(81.4509, abs=1e-3)
    torch.testing.assert_close(reward(batch_of(IMAGES, PROMPTS)), scores, atol=2.5, rtol=0)


def test_position_ids_of_old_checkpoints_are_no_error(
    parts: tuple[str, str], tmp_path: Path, scores: Tensor
) -> None:
    """PickScore_v1 was saved when transformers still stored these two buffers."""
    folder = shutil.copytree(parts[0], tmp_path / "old")
    state = load_file(folder / "model.safetensors")
    state["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    state["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    again = pickscore(path=str(folder), processor=parts[1])(batch_of(IMAGES, PROMPTS))
    assert torch.equal(again, scores)


def test_a_processor_in_the_old_files_is_the_same(
    parts: tuple[str, str], tmp_path: Path, scores: Tensor
) -> None:
    """Public repositories still have the files of transformers 4: sizes as plain numbers,
    vocab.json and merges.txt."""
    settings: dict[str, Any] = {
        "crop_size": 224,
        "size": 224,
        "resample": 3,
        "do_resize": True,
        "do_center_crop": True,
    }
    settings |= {"do_normalize": True, "feature_extractor_type": "CLIPFeatureExtractor"}
    settings |= {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    public = SimpleTokenizer()
    vocab = clip_tokenizer().get_vocab()
    (tmp_path / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    merges = "\n".join(["#version: 0.2", *(" ".join(pair) for pair in public.bpe_ranks)])
    (tmp_path / "merges.txt").write_text(merges, encoding="utf-8")
    words = {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
    }
    words |= {"pad_token": "<|endoftext|>", "tokenizer_class": "CLIPTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words | {"model_max_length": 77}))
    again = pickscore(path=parts[0], processor=str(tmp_path))(batch_of(IMAGES, PROMPTS))
    assert torch.equal(again, scores)


def test_wrong_parts_are_refused(parts: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="processor"):  # PickScore_v1 alone
        pickscore(path=parts[0], processor=parts[0])
    with pytest.raises(ModelError, match=r"config\.json"):
        pickscore(path=parts[1], processor=parts[1])
    folder = shutil.copytree(parts[0], tmp_path / "torn")
    state = load_file(folder / "model.safetensors")
    del state["logit_scale"]  # would be 2.6592 by default, and every score 7 times too small
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"1 missing \['logit_scale'\]"):
        pickscore(path=str(folder), processor=parts[1])
    with pytest.raises(ModelError, match="yuvalkirstain/PickScore_v1"):  # no network
        pickscore()


@pytest.mark.parametrize("arguments", [{"divide": 0.0}, {"scale": -1.0}])
def test_wrong_arguments_are_errors(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        pickscore(**arguments)


def test_public_names_and_shapes() -> None:
    """Names and shapes of a CLIPModel H/14: the reference, section 4.3; built without memory."""
    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    text["num_attention_heads"] = vision["num_attention_heads"] = 16
    vision["patch_size"] = 14
    with torch.device("meta"):
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=1024))
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    expected = {"visual_projection.weight": [1024, 1280], "text_projection.weight": [1024, 1024]}
    expected |= {"logit_scale": []}
    expected |= {
        "vision_model.embeddings.patch_embedding.weight": [1280, 3, 14, 14],
        "vision_model.embeddings.position_embedding.weight": [257, 1280],
        "text_model.embeddings.position_embedding.weight": [77, 1024],
    }
    for layer, width, inner in (
        ("vision_model.encoder.layers.31", 1280, 5120),
        ("text_model.encoder.layers.23", 1024, 4096),
    ):
        expected |= {f"{layer}.self_attn.{part}_proj.weight": [width, width] for part in "qkv"}
        expected |= {f"{layer}.self_attn.out_proj.bias": [width]}
        expected |= {f"{layer}.mlp.fc1.weight": [inner, width], f"{layer}.mlp.fc2.bias": [width]}
    assert {name: shapes.get(name) for name in expected} == expected
    too_many = ("vision_model.encoder.layers.32.", "text_model.encoder.layers.24.")
    assert not [name for name in shapes if name.startswith(too_many)]
    defaults = {name: p.default for name, p in inspect.signature(pickscore).parameters.items()}
    assert defaults["path"] == "yuvalkirstain/PickScore_v1"
    assert defaults["processor"] == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
