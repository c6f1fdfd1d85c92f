"""Which files of weights the CLIP family and the aesthetic predictor take: the public layouts, old
and new, and no others."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
from rewards._common.scorer import read_weights
from rewards.aesthetic import (
    FILE,
    PUBLISHED,
    Fingerprint,
    aesthetic,
    check_published,
    collapse,
    differences,
)
from rewards.clip import clip
from rewards.dino import dino
from rewards.hpsv2 import hpsv2
from rewards.hpsv3 import hpsv3
from rewards.image_reward import image_reward
from rewards.pickscore import pickscore

BATCH = batch_of(random_images(2), PROMPTS[:2])
PARTS = ("processor_config.json", "tokenizer.json", "tokenizer_config.json")


def test_the_public_layouts() -> None:
    """Names and shapes of HPSv2's ViT-H/14, PickScore's (the reference, 4.3 and 4.4) and OpenAI's
    ViT-L/14 (4.2 and the paper); built without memory."""
    text = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    vision = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32}
    text["num_attention_heads"] = vision["num_attention_heads"] = 16
    vision["patch_size"] = 14
    with torch.device("meta"):
        state = open_clip.CLIP(**_config_of("ViT-H-14", "test")).state_dict()
        openai = open_clip.CLIP(**_config_of("ViT-L-14-quickgelu", "test")).state_dict()
        both = CLIPConfig(text_config=text, vision_config=vision, projection_dim=1024)
        twin = CLIPModel(both).state_dict()
    huge = {"token_embedding.weight": [49408, 1024], "positional_embedding": [77, 1024]}
    huge |= {"text_projection": [1024, 1024], "logit_scale": [], "visual.proj": [1280, 1024]}
    huge |= {"visual.class_embedding": [1280], "visual.positional_embedding": [257, 1280]}
    huge |= {"visual.conv1.weight": [1280, 3, 14, 14]}
    large = {"visual.proj": [1024, 768], "text_projection": [768, 768]}
    large |= {"visual.positional_embedding": [257, 1024], "positional_embedding": [77, 768]}
    large |= {"visual.transformer.resblocks.23.mlp.c_fc.weight": [4096, 1024]}
    large |= {"transformer.resblocks.11.attn.in_proj_weight": [2304, 768]}
    for tensors, shapes in ((state, huge), (openai, large)):
        assert {name: list(tensors[name].shape) for name in shapes} == shapes
    # all of them under transformers' names: of 32 and 24 layers, and no others
    renamed = {name: value.shape for name, value in to_transformers(state).items()}
    assert {name: value.shape for name, value in twin.items()} == renamed
    assert not open_clip.get_model_config("ViT-H-14").get("quick_gelu", False)
    assert open_clip.get_model_config("ViT-L-14-quickgelu")["quick_gelu"] is True
    pretrained = open_clip.get_pretrained_cfg("ViT-L-14", "openai")
    assert pretrained["quick_gelu"] is True
    assert pretrained["hf_hub"] == "timm/vit_large_patch14_clip_224.openai/"
    defaults = {name: p.default for name, p in inspect.signature(pickscore).parameters.items()}
    assert defaults["path"] == "yuvalkirstain/PickScore_v1"
    assert defaults["processor"] == "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


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


SAVED = ["open_clip", "transformers", "pickscore", "hpsv2", "aesthetic", "image_reward"]


@pytest.mark.parametrize("name", [*SAVED, "hpsv3", "dino"])
def test_wrong_weights_are_refused(weights: Weights, tmp_path: Path, name: str) -> None:
    """One tensor is missing, too many, of another shape, or of 8 bits without its scale."""
    kit, hf, projection = weights.clip, weights.clip.folder, "visual_projection.weight"
    given: dict[str, Any] = {
        "open_clip": kit.open_clip,
        "transformers": {"path": str(hf)},
        "dino": {"path": weights.dino},
        "hpsv2": weights.hps,
        "pickscore": kit.parts,
    }.get(name) or getattr(weights, name)
    kinds: dict[str, tuple[Any, str, str]] = {
        "open_clip": (clip, kit.file.name, "visual.proj"),
        "transformers": (clip, "model.safetensors", projection),
        "pickscore": (pickscore, "model.safetensors", projection),
        "hpsv2": (hpsv2, "HPS_v2.1_compressed.pt", "visual.proj"),
        "aesthetic": (aesthetic, FILE, "layers.4.bias"),
        "image_reward": (
            image_reward,
            "ImageReward.pt",
            "blip.visual_encoder.blocks.1.attn.qkv.bias",
        ),
        "hpsv3": (hpsv3, "HPSv3.safetensors", "rm_head.5.bias"),
        "dino": (dino, "model.safetensors", "layernorm.weight"),
    }
    reward, file, tensor = kinds[name]
    place = Path(given["path"])
    folder = place.parent if place.is_file() else place
    shutil.copytree(folder, tmp_path / "it", ignore=shutil.ignore_patterns("hf"))
    state = read_weights(folder / file, "test")
    for changed, said in (
        ({name: value for name, value in state.items() if name != tensor}, tensor),
        (state | {"something.weight": torch.zeros(2)}, "something"),
        (state | {tensor: torch.zeros(3, 5)}, tensor),
        (state | {tensor: state[tensor].char()}, f"{tensor} holds numbers of kind .*quantised"),
    ):
        if file.endswith(".safetensors"):
            save_file(changed, tmp_path / "it" / file, {"format": "pt"})
        else:
            torch.save(changed, tmp_path / "it" / file)
        with pytest.raises(ModelError, match=said):
            reward(**given | {"path": str(tmp_path / "it")})


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
        ("processor_config.json", "processor"),
        ("tokenizer.json", "tokenizer"),
        (foreign_tokenizer, "does not belong"),
        (no_scale, r"1 missing \['logit_scale'\]"),
    ],
)
def test_a_torn_folder_is_refused(
    weights: Weights, tmp_path: Path, change: str | Callable[[Path], None], message: str
) -> None:
    folder = Path(shutil.copytree(weights.clip.folder, tmp_path / "hf"))
    if isinstance(change, str):
        (folder / change).unlink()
    else:
        change(folder)
    with pytest.raises(ModelError, match=message):
        pickscore(path=str(folder), processor=str(folder))


# ------------------------------------------------------------------------------- what fits although


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


# ------------------------------------------------------------------- the aesthetic predictor's file


def fingerprint_of(state: dict[str, Tensor]) -> Fingerprint:
    """Compute a fingerprint by numpy, from the layers' matrices."""
    known = {name: value.double().numpy() for name, value in state.items()}
    matrix, offset = np.eye(768), np.zeros(768)
    for n in (0, 2, 4, 6, 7):
        weight, bias = known[f"layers.{n}.weight"], known[f"layers.{n}.bias"]
        matrix, offset = weight @ matrix, weight @ offset + bias
    sums = {name: float(known[name].sum()) for name in PUBLISHED.sums}
    w = matrix[0]
    norm, total, first = float(np.linalg.norm(w)), float(w.sum()), tuple(w[:6].tolist())
    return Fingerprint("0" * 64, sums, float(offset[0]), norm, total, first)


def test_published_numbers_fit_each_other() -> None:
    """Scores of four embeddings in the reference, 4.1: e_0, ones / sqrt(768), w / |w|, -w / |w|."""
    known = PUBLISHED
    assert known.b + known.first[0] == pytest.approx(4.545052400553648, abs=1e-8)
    assert known.b + known.total / math.sqrt(768) == pytest.approx(4.883284854377319, abs=1e-12)
    assert known.b + known.norm == pytest.approx(23.232270621, abs=1e-8)
    assert known.b - known.norm == pytest.approx(-12.758978932, abs=1e-8)


def test_a_fingerprint_tells_mlps_apart(weights: Weights, tmp_path: Path) -> None:
    state = weights.mlp
    known, other = fingerprint_of(state), {name: value + 1 for name, value in state.items()}
    assert differences(state, known) == []
    assert len(differences(other, known)) == len(PUBLISHED.sums) + 3 + 6
    for name in state:  # also in the tensors without a published sum: the affine map sees them
        spoilt = {key: value.clone() for key, value in state.items()}
        spoilt[name].view(-1)[0] += 1e-2
        assert differences(spoilt, known), name
    # another container of the same MLP passes
    save_file(state, tmp_path / "a.safetensors")
    check_published(tmp_path / "a.safetensors", state, known)
    # another MLP does not, but for the hash
    file = tmp_path / "b.safetensors"
    save_file(other, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    said = rf"sha256 {digest[:16]}.*16 numbers differ.*verify: false"
    with pytest.raises(ModelError, match=said):
        check_published(file, other, known)
    check_published(file, other, known._replace(sha256=digest))


def test_another_mlp_is_refused_unless_the_user_says_so(weights: Weights) -> None:
    given = dict(weights.aesthetic)
    assert aesthetic(**given).b == pytest.approx(fingerprint_of(weights.mlp).b, abs=1e-9)
    del given["verify"]
    for options in (given, given | {"verify": True}):
        with pytest.raises(ModelError, match="expected the published predictor"):
            aesthetic(**options)


def test_other_layouts_are_refused(weights: Weights, tmp_path: Path) -> None:
    """Among them Linear, ReLU, Dropout, ..., the other net of the same repository."""
    state = weights.mlp
    deeper = {name.replace("layers.7", "layers.9"): value for name, value in state.items()}
    for tensors, message in (
        (
            {f"mlp.{name}": state[name] for name in state},
            r"10 missing .*10 unexpected \['mlp.layers",
        ),
        (deeper, r"2 missing \['layers.7.bias'.*2 unexpected \['layers.9.bias'"),
        (
            state | {"layers.0.weight": torch.zeros(1024, 512)},
            r"layers.0.weight: expected \[1024, 768\], got \[1024, 512\]",
        ),
    ):
        torch.save(tensors, tmp_path / FILE)
        with pytest.raises(ModelError, match=message):
            aesthetic(path=str(tmp_path))
    kit, given = weights.clip, weights.aesthetic
    other = {"clip": str(kit.file), "architecture": kit.architecture}
    with pytest.raises(ConfigError, match="embeddings of 768 numbers, and 'tiny-clip' makes 24"):
        aesthetic(**given | other)
    with pytest.raises(ModelError, match="tiny-wide"):
        aesthetic(**given | {"clip": str(kit.file)})


@pytest.mark.skipif(
    "FLOWRL_AESTHETIC" not in os.environ, reason="FLOWRL_AESTHETIC names the published file"
)
def test_the_real_file() -> None:
    """Fixtures: the reference, section 4.1 (numpy float64 on the published file)."""
    file = Path(os.environ["FLOWRL_AESTHETIC"])
    state = torch.load(file, map_location="cpu", weights_only=True)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == PUBLISHED.sha256
    assert not differences(state, PUBLISHED)
    w, b = collapse(state)
    wave = torch.arange(1, 769, dtype=torch.float64).sin()
    assert (w @ wave / wave.norm() + b).item() == pytest.approx(5.483880132144336, abs=1e-9)
    assert (w.argmax().item(), w.argmin().item()) == (288, 669)
