"""Networks of rewards: their public sizes, where they are, and what an estimate makes of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    Dinov2Config,
    Dinov2Model,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Qwen2VLConfig,
    Qwen2VLModel,
    ViTConfig,
    VJEPA2Config,
    VJEPA2Model,
)

from flowrl.config.calls import Call
from flowrl.config.load import Config, load_config
from flowrl.core.tables import size
from flowrl.cost.architecture import count
from flowrl.cost.estimate import Estimate, estimate
from flowrl.cost.fit_card import change, verdict, what_helps
from flowrl.cost.memory import PARAMETERS, SCORING, reward_networks
from flowrl.cost.report import dry_run, estimate_as_json, memory
from rewards._backbones.blip import ImageRewardNet, Sizes
from rewards.aesthetic import collapse, layered
from rewards.hpsv3 import head

VISION: dict[str, Any] = {"depth": 32, "embed_dim": 1280, "num_heads": 16}  # of any Qwen2-VL


def qwen(width: int, inner: int, heads: int, keys: int, words: int) -> int:
    """Count a Qwen2-VL of 28 layers without its words' head."""
    text = {"num_hidden_layers": 28, "vocab_size": words, "hidden_size": width}
    text |= {"intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": keys}
    config = Qwen2VLConfig(text_config=text, vision_config={**VISION, "hidden_size": width})
    return count(Qwen2VLModel(config))


def blip() -> int:
    """Count ImageReward: transformers' BERT-base with BLIP's two marks, a ViT-L/16 at 224 pixels,
    and the head."""
    bert, vit = BertConfig(), ViTConfig()
    patches = (vit.image_size // vit.patch_size) ** 2
    words, places = bert.vocab_size + 2, bert.max_position_embeddings
    layers = (bert.hidden_size, bert.intermediate_size, bert.num_hidden_layers)
    sides = (vit.patch_size, patches + 1, 1024, 4096, 24)  # width, MLP and layers of ViT-L
    return count(ImageRewardNet(Sizes(*sides, words, places, *layers)))


def test_public_sizes() -> None:
    """Every number of the table, on networks built of the libraries' settings, or by the reward's
    own class where no library has the part. Mask2Former's default is its Swin-S; COCO has 80
    classes."""
    map_of = collapse(layered().state_dict())[0]
    with torch.device("meta"):
        large, huge = (
            count(open_clip.CLIP(**open_clip.get_model_config(name)))
            for name in ("ViT-L-14", "ViT-H-14")
        )
        dino = Dinov2Config(image_size=518, patch_size=14)  # ViT-B is the default
        detector = Mask2FormerForUniversalSegmentation(Mask2FormerConfig(num_labels=80))
        counted = {
            "clip": large,
            "clip_reference": large,
            "aesthetic": large + map_of.numel() + 1,  # and its constant
            "pickscore": huge,
            "hpsv2": huge,
            # of three marks and of one, each a word more than the tokenizer's 151,657
            "videoalign": qwen(1536, 8960, 12, 2, 151_660) + 3 * 1536,
            "hpsv3": qwen(3584, 18_944, 28, 4, 151_658) + count(head(3584)),
            "pfc": count(VJEPA2Model(VJEPA2Config())),
            "dino": count(Dinov2Model(dino)),
            "image_reward": blip(),
            "geneval": count(detector) + large,
        }
    assert counted == PARAMETERS


def test_clip_has_the_size_of_its_architecture() -> None:
    """PaCo-RL's and Pref-GRPO's CLIP is a ViT-H/14, whose size the test above counts; of others
    nothing is known."""
    open_clips = {"a": "ViT-H-14", "b": "ViT-H-14-quickgelu", "c": "ViT-L-14", "d": "ViT-B-32"}
    rewards = {}
    for name, kind in open_clips.items():
        rewards[name] = {"fn": "clip", "backend": "open_clip", "architecture": kind}
    networks, unknown = reward_networks(rewarded(load_config("sd3/flow_grpo"), **rewards))
    huge, large = 4 * PARAMETERS["pickscore"], 4 * PARAMETERS["clip"]  # float32
    assert [one.bytes for one in networks] == [huge, huge, large] and unknown == ["d"]


def rewarded(config: Config, **rewards: dict[str, Any]) -> Config:
    """Give a config other rewards."""
    calls = {name: Call.bind(f"rewards.{name}", raw) for name, raw in rewards.items()}
    return replace(config, rewards=calls, eval=replace(config.eval, score=""))


def test_where_networks_are(tmp_path: Path) -> None:
    """Two verdicts of GenEval have one detector and one CLIP, of another detector the size is not
    known. The size of a step-aware model is that of its file, here 6 numbers."""
    config = load_config("sd3/flow_grpo")
    folder = {"fn": "step_aware", "path": str(tmp_path)}
    found = rewarded(
        config,
        away={"fn": "pickscore", "device": "cuda:1", "offload": True},
        rest={"fn": "hpsv2", "offload": True},
        small={"fn": "jpeg"},
        served={"fn": "ocr"},
        graded={"fn": "geneval", "mode": "graded"},
        strict={"fn": "geneval"},
        wide={"fn": "geneval", "dtype": "bfloat16"},
        boxes={"fn": "geneval", "detector": "owl"},
        step=folder,
    )
    networks, unknown = reward_networks(found)
    assert unknown == ["served", "boxes", "step"]
    at = {one.name: one for one in networks}
    assert list(at) == ["away", "rest", "graded", "strict", "wide"]
    assert at["away"].what.endswith("bytes, on cuda:1") and at["rest"].guest
    assert at["rest"].what.endswith("bytes, offloaded: there only while it scores")
    assert not (at["away"].always or at["away"].guest or at["rest"].always)
    assert (at["strict"].bytes, at["strict"].what) == (0, "those of graded")
    assert at["graded"].bytes == 2 * at["wide"].bytes == 4 * PARAMETERS["geneval"]
    save_file({"a": torch.zeros(2, 2), "b": torch.zeros(2)}, tmp_path / "step_aware.safetensors")
    (step,) = reward_networks(rewarded(config, step=folder))[0]
    assert step.bytes == 6 * 4 and step.always


@pytest.fixture(scope="module")
def fast() -> Estimate:
    """Estimate SD3.5 Medium with what keeps it below 13 GiB of a 24 GB card, as `--profile 24gb`
    says."""
    batches = ["train.micro_batch=2", "train.rollout_batch=2", "eval.batch=2"]
    runtime = "model.runtime={checkpointing: true, offload: true}"
    return estimate(load_config("sd3/flow_grpo_fast", [*batches, runtime, "model.decode_batch=1"]))


def test_the_verdict_is_with_the_rewards(fast: Estimate) -> None:
    """PickScore in float32 is 3.7 GiB, in each phase. HPSv3 in float32 is 28.9 GiB and fits no such
    card, wherever it rests; in bfloat16 it is 14.4 and fits if it rests."""
    plain = {phase.name: phase.bytes for phase in fast.phases}
    pick = fast._replace(config=rewarded(fast.config, pick={"fn": "pickscore"}))
    stay = 4 * PARAMETERS["pickscore"]
    whole = {phase.name: phase.bytes - stay for phase in pick.judged}
    assert whole == plain
    said = verdict(pick, gigabytes=24)
    assert said.startswith("fits a 24 GB card: yes, ") and f", {size(stay)} of it rewards'" in said
    # what helps is worked out with the network where it then is
    wide = fast._replace(config=rewarded(fast.config, h={"fn": "hpsv3"}))
    assert verdict(wide, gigabytes=24).startswith("fits a 24 GB card: no, ")
    profile, kept, also = what_helps(wide, gigabytes=24).lines
    assert "rewards' networks 28.9 GiB" in kept and "which does not fit" in profile
    assert "with rewards.h.dtype=bfloat16" in also and "train otherwise, it fits: " in also
    short = change(wide.config, "rewards.h.dtype", "bfloat16")
    (profile,) = what_helps(wide._replace(config=short), gigabytes=24).lines
    assert "rewards.h.offload=true" in profile and "which fits into" in profile
    rests = wide._replace(config=change(short, "rewards.h.offload", True))
    largest = rests.largest
    assert largest is not None and largest.name == SCORING
    assert largest.extra == 2 * PARAMETERS["hpsv3"]
    assert largest.kept == next(p.kept for p in fast.phases if p.name == "decode")
    assert verdict(rests, gigabytes=24).startswith("fits a 24 GB card: yes, ")
    assert " card: no, " in verdict(rests, gigabytes=16) and "in scoring" in verdict(
        rests, gigabytes=16
    )


def test_what_is_said(fast: Estimate) -> None:
    """The table of networks keeps to a width; rewards that are not counted are named, also where
    none is counted."""
    pick = fast._replace(config=rewarded(fast.config, pick={"fn": "pickscore"}))
    assert pick.largest is not None
    assert f"the worst moment takes {size(pick.largest.bytes)}" in "\n".join(memory(pick))
    narrow = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in memory(pick, 70)]  # without bold
    assert max(len(line) for text in narrow for line in text.splitlines()) <= 70
    assert max(map(len, memory(pick))) > 70
    config = rewarded(fast.config, read={"fn": "ocr"})
    line = "rewards    not counted: read (their networks, if they have any)"
    assert memory(fast._replace(config=config))[-1] == line and line in dry_run(config)
    bare = fast._replace(config=rewarded(fast.config, small={"fn": "jpeg"}))
    assert not any(text.startswith("rewards") for text in memory(bare))
    # as data
    both = rewarded(fast.config, pick={"fn": "pickscore"}, read={"fn": "ocr"})
    told = json.loads(json.dumps(estimate_as_json(fast._replace(config=both))))
    assert told["rewards"] == {
        "networks": {"pick": {"bytes": 4 * PARAMETERS["pickscore"], "always": True}},
        "not_counted": ["read"],
        "peak": pick.largest.bytes,
    }
    assert told["peak"] == {phase.name: phase.bytes for phase in fast.phases}
