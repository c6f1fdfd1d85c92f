"""Work of text encoders and rewards: counted by PyTorch on networks of the real classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CLIPConfig,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    Qwen2VLConfig,
    Qwen2VLModel,
)

from flowrl.config.calls import Call
from flowrl.config.load import load_config
from flowrl.core.devices import DTYPES
from flowrl.cost import time_shares
from flowrl.cost.architecture import architecture_of, build
from flowrl.cost.time_shares import Tower, encoding_work, reward_call_work, rewards_work
from flowrl.models.tiny import save_tiny, tinies
from rewards._backbones.blip import ImageRewardNet, Sizes

pytestmark = pytest.mark.integration
TOKENS = 24  # as many as every tiny encoder takes
EAGER = {"attn_implementation": "eager"}  # whose products the counter knows on any device


def counted(call: Any) -> int:
    """Return what PyTorch counts while something runs."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def near(value: float, rel: float) -> Any:
    """Return what is equal to a number within a share of it."""
    return pytest.approx(value, rel=rel)


def reader(network: nn.Module) -> Any:
    """Return what reads texts in an encoder: all of it, or its language model."""
    inner: Any = network
    if hasattr(inner, "set_attn_implementation"):
        inner.set_attn_implementation("eager")
    while hasattr(inner, "model") or hasattr(inner, "language_model"):
        inner = getattr(inner, "language_model", None) or inner.model
    return inner


@pytest.mark.parametrize("name", ["sd3.5", "flux", "sdxl", "qwen_image", "z_image", "flux2", "wan"])
def test_text_encoders_of_tiny_pipelines(name: str, tmp_path: Path) -> None:
    """T5, both kinds of CLIP, Qwen2.5-VL, Qwen3, Mistral and UMT5: all products with weights and
    all of attention, within what a projection of one token is."""
    assert name in tinies()
    folder, fn = save_tiny(name, tmp_path / "model"), name.replace("sd3.5", "sd3")
    config = load_config(f"{fn}/{'spo' if fn == 'sdxl' else 'flow_grpo_fast'}")
    config.model.kwargs["path"] = f"{folder}"
    architecture = architecture_of(config)
    for part in [one for one in architecture.parts if one.startswith("text_encoder")]:
        network = reader(build(architecture, part, "cpu"))
        ids = torch.ones(1, TOKENS, dtype=torch.int64)
        real = counted(lambda network=network, ids=ids: network(input_ids=ids))
        settings = build(architecture, part).config
        assert time_shares._encoder(settings).work(TOKENS) == pytest.approx(real, rel=0.02)


def test_a_prompt_goes_through_all_encoders() -> None:
    """Of SD3.5: 77 tokens through both CLIPs, 256 through T5, which is nearly all of it; without
    T5 the CLIPs are left."""
    config = load_config("sd3/flow_grpo_fast")
    whole = encoding_work(config, architecture_of(config))
    small = load_config("sd3/flow_grpo_fast", ["model.t5=false"])
    clips = encoding_work(small, architecture_of(small))
    # twice the 4.7 billion numbers without the table of words, for each token
    limit = config.model.kwargs["max_sequence_length"]
    assert (whole - clips) / limit == pytest.approx(2 * 4.63e9, rel=0.03)
    assert 0 < clips < whole / 10


def clip_of(huge: bool) -> CLIPModel:
    """Make OpenAI's ViT-L/14 or LAION's ViT-H/14 without memory."""
    vision, text = (1280, 5120, 32, 16), (1024, 4096, 24, 16)
    if not huge:
        vision, text = (1024, 4096, 24, 16), (768, 3072, 12, 12)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    sizes = [dict(zip(names, one, strict=True)) for one in (vision, text)]
    config = CLIPConfig(vision_config={**sizes[0], "patch_size": 14}, text_config=sizes[1])
    with torch.device("meta"):
        return CLIPModel._from_config(config, **EAGER)


@pytest.mark.parametrize("huge", [False, True])
def test_clip(huge: bool) -> None:
    """The public sizes, without numbers."""
    model, meta = clip_of(huge), torch.device("meta")
    pixels = torch.empty(1, 3, 224, 224, device=meta)
    ids = torch.zeros(1, 77, dtype=torch.int64, device=meta)
    see = counted(lambda: model.vision_model(pixel_values=pixels))
    read = counted(lambda: model.text_model(input_ids=ids))
    given = {"architecture": "ViT-H-14", "backend": "open_clip"} if huge else {}
    for raw in ({"fn": "clip", **given}, {"fn": "pickscore"}, {"fn": "aesthetic"}):
        if (raw["fn"] == "pickscore") == huge or raw["fn"] == "clip":
            found = reward_call_work(Call.bind("rewards.it", raw))
            assert found is not None
            assert found[0] == pytest.approx(see, rel=1e-3)
            assert found[1] in (0, pytest.approx(read, rel=1e-3))


def test_dino_at_its_own_size_and_another() -> None:
    """ViT-B/14 at 518 pixels has 37 x 37 patches, at 224 pixels 16 x 16."""
    with torch.device("meta"):
        model = Dinov2Model._from_config(Dinov2Config(image_size=518, patch_size=14), **EAGER)
    for size in (None, 224):
        side = size or 518
        pixels = torch.empty(1, 3, side, side, device="meta")
        real = counted(lambda pixels=pixels: model(pixel_values=pixels))
        more = {} if size is None else {"size": size}
        found = reward_call_work(Call.bind("rewards.it", {"fn": "dino", **more}))
        assert found == (near(real, 1e-3), 0)
    other = Call.bind("rewards.it", {"fn": "dino", "path": "mine/dino"})
    assert reward_call_work(other) is None


def test_image_reward() -> None:
    """BLIP's public sizes: its texts look at the image's tokens in every layer."""
    sizes = Sizes(16, 197, 1024, 4096, 24, 30524, 512, 768, 3072, 12)
    with torch.device("meta"):
        network = ImageRewardNet(sizes)
    pixels = torch.empty(1, 3, 224, 224, device="meta")
    ids = torch.zeros(1, 35, dtype=torch.int64, device="meta")
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        real = counted(lambda: network(pixels, ids, torch.ones_like(ids)))
    found = reward_call_work(Call.bind("rewards.it", {"fn": "image_reward"}))
    assert found == (near(real, 1e-2), 0)


def test_hpsv3_by_a_small_qwen2_vl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same formula with small sizes, on 16 patches and 6 words."""
    monkeypatch.setattr(time_shares, "QWEN_EYES", Tower(2, 32, 128))
    monkeypatch.setattr(time_shares, "QWEN_7B", Tower(2, 48, 96, 3, 48, 24))
    monkeypatch.setattr(time_shares, "QWEN_PATCHES", 16)
    monkeypatch.setattr(time_shares, "QWEN_WORDS", 6)
    text: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    text |= {"vocab_size": 64}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e6}
    text |= {"rope_parameters": rope, "pad_token_id": 0}
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 48}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=5)
    network = Qwen2VLModel._from_config(config, **EAGER)
    pixels, grid = torch.zeros(16, 3 * 2 * 14 * 14), torch.tensor([[1, 4, 4]])
    ids = torch.tensor([[1, 2, 3, *[5] * 4, 6, 7, 8]])
    place = torch.arange(10).expand(3, 1, 10)
    given = {"pixel_values": pixels, "image_grid_thw": grid, "position_ids": place}
    real = counted(lambda: network(input_ids=ids, use_cache=False, **given))
    found = reward_call_work(Call.bind("rewards.it", {"fn": "hpsv3"}))
    assert found == (near(real, 1e-2), 0)


def test_rewards_of_a_config() -> None:
    """Each by its own dtype; videos frame by frame or one frame; those without a network take
    nothing, and those that are not known are named."""
    image, prompt = reward_call_work(Call.bind("rewards.it", {"fn": "pickscore"})) or (0, 0)
    more = ["rewards.small={fn: jpeg}", "rewards.read={fn: ocr}"]
    work, unknown = rewards_work(load_config("sd3/flow_grpo_fast", more), 10, 3)
    assert (work.short, work.wide) == (0, 10 * image + 3 * prompt) and unknown == ["read"]
    narrow = load_config("sd3/flow_grpo_fast", ["rewards.pickscore.dtype=bfloat16"])
    assert DTYPES["bfloat16"].itemsize == 2
    assert rewards_work(narrow, 10, 3)[0].short == 10 * image + 3 * prompt
    video = load_config("wan/flow_grpo_fast")
    assert video.model.kwargs["frames"] == 5
    assert rewards_work(video, 10, 3)[0].wide == 50 * image + 3 * prompt
    one = load_config("wan/flow_grpo_fast", ["rewards.pickscore.frames=last"])
    assert rewards_work(one, 10, 3)[0].wide == 10 * image + 3 * prompt
