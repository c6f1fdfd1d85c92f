"""Which folders and files the CLIP family takes: the public layouts, old and new, and no others."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from clipkit import MEAN, PROMPTS, STD, batch_of, clip_tokenizer, random_images, to_transformers
from open_clip.tokenizer import SimpleTokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer
from weightkit import Weights

from flowrl.core.errors import ConfigError, ModelError
from rewards._backbones.clip import _config_of
from rewards.clip import clip
from rewards.hpsv2 import hpsv2
from rewards.pickscore import pickscore

BATCH = batch_of(random_images(2), PROMPTS[:2])
PARTS = ("processor_config.json", "tokenizer.json", "tokenizer_config.json")


def test_the_public_layouts() -> None:
    """Names and shapes of HPSv2's ViT-H/14 and of PickScore's (the reference, 4.3 and 4.4)."""
    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    text["num_attention_heads"] = vision["num_attention_heads"] = 16
    vision["patch_size"] = 14
    with torch.device("meta"):
        state = open_clip.CLIP(**_config_of("ViT-H-14", "test")).state_dict()
        both = CLIPConfig(text_config=text, vision_config=vision, projection_dim=1024)
        twin = CLIPModel(both).state_dict()
    for name, shape in {
        "visual.class_embedding": [1280],
        "visual.positional_embedding": [257, 1280],
        "visual.conv1.weight": [1280, 3, 14, 14],
        "visual.proj": [1280, 1024],
        "token_embedding.weight": [49408, 1024],
        "positional_embedding": [77, 1024],
        "text_projection": [1024, 1024],
        "logit_scale": [],
    }.items():
        assert list(state[name].shape) == shape, name
    # all of them under transformers' names: of 32 and 24 layers, and no others
    renamed = {name: value.shape for name, value in to_transformers(state).items()}
    assert {name: value.shape for name, value in twin.items()} == renamed
    assert not open_clip.get_model_config("ViT-H-14").get("quick_gelu", False)
    defaults = {name: p.default for name, p in inspect.signature(pickscore).parameters.items()}
    assert defaults["path"] == "yuvalkirstain/PickScore_v1"
    assert defaults["processor"] == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def test_real_weights_of_openai_would_fit() -> None:
    """Shapes of ViT-L/14: the reference (section 4.2) and OpenAI's paper; built without memory."""
    with torch.device("meta"):
        state = open_clip.CLIP(**_config_of("ViT-L-14-quickgelu", "test")).state_dict()
    for name, shape in {
        "visual.proj": [1024, 768],
        "text_projection": [768, 768],
        "visual.positional_embedding": [257, 1024],
        "positional_embedding": [77, 768],
        "visual.transformer.resblocks.23.mlp.c_fc.weight": [4096, 1024],
        "transformer.resblocks.11.attn.in_proj_weight": [2304, 768],
    }.items():
        assert list(state[name].shape) == shape, name
    assert open_clip.get_model_config("ViT-L-14-quickgelu")["quick_gelu"] is True
    pretrained = open_clip.get_pretrained_cfg("ViT-L-14", "openai")
    assert pretrained["quick_gelu"] is True
    assert pretrained["hf_hub"] == "timm/vit_large_patch14_clip_224.openai/"


def test_every_architecture_is_known_or_refused() -> None:
    plain = set()
    for name in open_clip.list_models():
        try:
            _config_of(name, "test")
        except ConfigError:
            continue
        plain.add(name)
    assert {"ViT-H-14", "ViT-L-14-quickgelu", "ViT-H-14-quickgelu", "ViT-bigG-14"} <= plain
    foreign = {"RN50", "convnext_base", "coca_ViT-L-14", "ViT-B-16-SigLIP", "roberta-ViT-B-32"}
    assert "ViT-B-32" in plain and not foreign & plain


# ------------------------------------------------------------------------------- what does not fit


def damaged(state: dict[str, Tensor], how: str) -> dict[str, Tensor]:
    """Return the weights with one tensor missing, added or of another shape."""
    first = "visual_projection.weight" if "visual_projection.weight" in state else "visual.proj"
    if how == "missing":
        del state[first]
    elif how == "unexpected":
        state["text_model.something.weight"] = torch.zeros(2)
    else:
        state[first] = torch.zeros(3, 5)
    return state


@pytest.mark.parametrize("how", ["missing", "unexpected", "mismatched"])
def test_wrong_weights_are_refused(weights: Weights, tmp_path: Path, how: str) -> None:
    kit = weights.clip
    save_file(damaged(load_file(kit.file), how), tmp_path / kit.file.name)
    named = "text_model.something" if how == "unexpected" else "visual.proj"
    with pytest.raises(ModelError, match=named):
        clip(**kit.open_clip | {"path": str(tmp_path)})
    file = shutil.copytree(kit.folder, tmp_path / "hf") / "model.safetensors"
    save_file(damaged(load_file(file), how), file, {"format": "pt"})
    named = "something" if how == "unexpected" else "visual_projection"
    with pytest.raises(ModelError, match=f"1 {how} .*{named}"):
        clip(path=str(file.parent))


def test_a_layout_or_a_folder_of_another_kind_is_refused(weights: Weights, tmp_path: Path) -> None:
    kit, twin = weights.clip, str(weights.clip.folder / "model.safetensors")
    with pytest.raises(ModelError, match="missing.*unexpected.*(vision|text)_model"):
        clip(**kit.open_clip | {"path": twin})
    for given in ({}, kit.open_clip):
        with pytest.raises(ModelError, match=r"rewards\.clip"):
            clip(**given | {"path": str(tmp_path)})
    torch.save({"state_dict": load_file(twin)}, tmp_path / "HPS_v2.1_compressed.pt")
    given = {"path": str(tmp_path), "architecture": kit.architecture}
    said = r"HPS_v2\.1_compressed.*missing.*unexpected.*another shape"
    with pytest.raises(ModelError, match=said):
        hpsv2(**given)
    with pytest.raises(ModelError, match=r"no file HPS_v2_compressed\.pt"):
        hpsv2(**given, version="v2.0")
    with pytest.raises(ModelError, match=r"config\.json"):
        pickscore(path=str(tmp_path), processor=str(kit.folder))


def test_code_in_weights_is_not_run(weights: Weights, tmp_path: Path) -> None:
    # a pickled module
    torch.save({"state_dict": weights.clip.model}, tmp_path / "HPS_v2.1_compressed.pt")
    with pytest.raises(ModelError, match="no readable file of weights"):
        hpsv2(path=str(tmp_path), architecture=weights.clip.architecture)
    # transformers' pickled layout
    file = shutil.copytree(weights.clip.folder, tmp_path / "hf") / "model.safetensors"
    torch.save(load_file(file), file.parent / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(ModelError, match="safetensors"):
        clip(path=str(file.parent))


def no_processor(folder: Path) -> None:
    (folder / "processor_config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def foreign_tokenizer(folder: Path) -> None:
    """The text tower would look for its end token in vain, and embed the first one."""
    letters = ["<|startoftext|>", "<|endoftext|>", "a", "b", "a</w>", "b</w>"]
    vocab = {letter: n for n, letter in enumerate(letters)}
    CLIPTokenizer(vocab=vocab, merges=[]).save_pretrained(folder)


def no_scale(folder: Path) -> None:
    """It would be 2.6592 by default, and every score too small."""
    state = load_file(folder / "model.safetensors")
    del state["logit_scale"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_processor, "processor"),
        (no_tokenizer, "tokenizer"),
        (foreign_tokenizer, "does not belong"),
        (no_scale, r"1 missing \['logit_scale'\]"),
    ],
)
def test_a_torn_folder_is_refused(
    weights: Weights, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(weights.clip.folder, tmp_path / "hf")
    change(folder)
    with pytest.raises(ModelError, match=message):
        pickscore(path=str(folder), processor=str(folder))


# ------------------------------------------------------------------------------ what fits although


def old_end_token(folder: Path) -> None:
    """Public configs from before transformers 4.31 say 2 for the end token."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["eos_token_id"] = 2
    (folder / "config.json").write_text(json.dumps(config))


def position_ids(folder: Path) -> None:
    """PickScore_v1 was saved when transformers still stored these two buffers."""
    state = load_file(folder / "model.safetensors")
    state["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    state["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def old_processor(folder: Path) -> None:
    """Files of transformers 4: sizes as plain numbers, vocab.json and merges.txt."""
    for name in PARTS:
        (folder / name).unlink()
    settings: dict[str, Any] = {"crop_size": 224, "size": 224, "resample": 3}
    settings |= {"do_resize": True, "do_center_crop": True, "do_normalize": True}
    settings |= {"feature_extractor_type": "CLIPFeatureExtractor"}
    settings |= {"image_mean": MEAN, "image_std": STD}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    (folder / "vocab.json").write_text(json.dumps(clip_tokenizer().get_vocab()), encoding="utf-8")
    merges = ["#version: 0.2", *(" ".join(pair) for pair in SimpleTokenizer().bpe_ranks)]
    (folder / "merges.txt").write_text("\n".join(merges), encoding="utf-8")
    words = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    words |= {"bos_token": "<|startoftext|>", "tokenizer_class": "CLIPTokenizer"}
    settings = {**words, "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("change", [old_end_token, position_ids, old_processor])
def test_an_old_folder_scores_the_same(
    weights: Weights, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = shutil.copytree(weights.clip.folder, tmp_path / "hf")
    change(folder)
    again = pickscore(path=str(folder), processor=str(folder))(BATCH)
    assert torch.equal(again, pickscore(**weights.clip.parts)(BATCH))


def test_two_folders_and_a_bin_file_score_the_same(weights: Weights, tmp_path: Path) -> None:
    """PickScore's model and its processor are two repositories; the model's alone is refused."""
    kit, model, processor = weights.clip, tmp_path / "model", tmp_path / "processor"
    shutil.copytree(kit.folder, model)
    processor.mkdir()
    for name in PARTS:
        shutil.move(model / name, processor / name)
    apart = pickscore(path=str(model), processor=str(processor))(BATCH)
    assert torch.equal(apart, pickscore(**kit.parts)(BATCH))
    with pytest.raises(ModelError, match="processor"):
        pickscore(path=str(model), processor=str(model))
    torch.save(load_file(kit.file), tmp_path / "open_clip_pytorch_model.bin")
    given = kit.open_clip | {"path": str(tmp_path)}
    assert torch.equal(clip(**given)(BATCH), clip(**kit.open_clip)(BATCH))


def test_the_settings_beside_the_weights_are_taken(weights: Weights, tmp_path: Path) -> None:
    """Their mean and std: images whose pixels are moved so score the same. Another resize than is
    made, or settings that cannot be read, are refused."""
    kit = weights.clip
    file = shutil.copy(kit.file, tmp_path / kit.file.name)
    given = kit.open_clip | {"path": str(file)}
    plain = clip(**given)
    beside = tmp_path / "open_clip_config.json"
    beside.write_text(json.dumps({"preprocess_cfg": {"mean": [0.5] * 3, "std": [0.25] * 3}}))
    moved = clip(**given)
    images = random_images(2).clamp(0.3, 0.6)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    # (x - m) / s = (y - .5) / .25; to bytes, so scores agree to a hundredth
    other = (images - mean) / std * 0.25 + 0.5
    assert float(other.min()) >= 0 and float(other.max()) <= 1
    scores = plain(batch_of(images, PROMPTS[:2]))
    assert torch.allclose(
        scores, moved(batch_of(other, PROMPTS[:2])), atol=0.05 * float(scores.abs().max())
    )
    assert not torch.equal(moved(batch_of(images, PROMPTS[:2])), scores)
    for content, said in (({"interpolation": "bilinear"}, "bilinear"), ({"mean": 3}, "TypeError")):
        beside.write_text(json.dumps({"preprocess_cfg": content}))
        with pytest.raises(ModelError, match=said):
            clip(**given)
    beside.write_text(json.dumps({"preprocess_cfg": {"resize_mode": "squash"}}))
    assert len(clip(**given, resize="squash")(BATCH)) == 2
