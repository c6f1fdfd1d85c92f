"""A tiny random Qwen2-VL with the public chat template, and files in the layouts of the reward
models that are made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny import qwen_tokenizer
from torch import Tensor, nn
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from rewards._backbones.qwen2_vl import TEXTS

WIDTH = 32
# as the released Qwen2-VL's
CHAT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PADS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
STATS = {"VQ_mean": 1.5, "VQ_std": 2.0, "MQ_mean": -0.5, "MQ_std": 0.5}
STATS |= {"TA_mean": 0.25, "TA_std": 4.0}


def save_processor(folder: Path) -> Qwen2VLProcessor:
    """Save config.json and processor; its words are those of the public instructions."""
    tokens = qwen_tokenizer()
    tokens.add_tokens(PADS, special_tokens=True)
    words: set[str] = set()
    for file in TEXTS.glob("*.txt"):
        words |= set(re.findall(r"[a-zA-Z]{3,}", file.read_text(encoding="utf-8")))
    tokens.add_tokens(sorted(words - {"reward", "Reward"}))
    processor = Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(),
        tokenizer=tokens,
        video_processor=Qwen2VLVideoProcessor(),
        chat_template=CHAT,
    )
    processor.save_pretrained(folder)
    config_of(tokens).save_pretrained(folder)
    return processor


def config_of(tokens: Any) -> Qwen2VLConfig:
    """Return a tiny config for a tokenizer; its embedding has room to spare, as the released."""
    ids = {}
    for name in ("vision_start", "vision_end", "image_pad", "video_pad"):
        ids[name] = tokens.convert_tokens_to_ids(f"<|{name}|>")
    text: dict[str, Any] = {
        "vocab_size": len(tokens) + 8,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4},
    }
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": WIDTH, "mlp_ratio": 2}
    return Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
    )


class Judge(nn.Module):
    """The public classes' parts: a Qwen2-VL with words, and the head."""

    def __init__(self, tokens: Any, head: nn.Module, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        network = Qwen2VLForConditionalGeneration(config_of(tokens)).eval()
        network.resize_token_embeddings(len(tokens))
        for p in network.parameters():
            p.data += 0.1 * torch.randn_like(p)
        for p in head.parameters():
            p.data = 0.3 * torch.randn_like(p)
        network.rm_head = head
        self.network: Any = network

    @torch.no_grad()
    def forward(self, inputs: dict[str, Tensor], marks: list[int]) -> Tensor:
        """Return what the head says at the marked tokens [B, M, outputs], by the public forward:
        embed, put in what was seen, call the language model without positions."""
        network, ids = self.network, inputs["input_ids"]
        embeds = network.model.language_model.embed_tokens(ids)
        for token, pixels, grid in [
            ("image_token_id", "pixel_values", "image_grid_thw"),
            ("video_token_id", "pixel_values_videos", "video_grid_thw"),
        ]:
            if pixels in inputs:
                seen = network.model.visual(inputs[pixels], grid_thw=inputs[grid]).pooler_output
                place = (ids == getattr(network.config, token))[..., None].expand_as(embeds)
                embeds = embeds.masked_scatter(place, seen)
        hidden = network.model.language_model(
            inputs_embeds=embeds, attention_mask=inputs["attention_mask"], use_cache=False
        ).last_hidden_state
        rows = [hidden[ids == mark] for mark in marks]
        out: Tensor = network.rm_head(torch.stack(rows, dim=1))
        return out


def public_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a state dict of transformers 5 the names of the public files, of transformers 4."""
    out = {}
    for key, value in state.items():
        old = key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        out[old] = value.detach().clone().contiguous()
    return out


def save_hpsv3(folder: Path) -> tuple[Judge, Any, dict[str, Any]]:
    """Save HPSv3's file and a processor -> the network, the processor with the reward's token, and
    the reward's arguments."""
    processor = save_processor(folder)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    layers = [nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Dropout(0.05)]
    layers += [nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)]
    judge = Judge(processor.tokenizer, nn.Sequential(*layers).eval())
    save_file(public_names(judge.network.state_dict()), folder / "HPSv3.safetensors")
    return judge, processor, {"path": str(folder), "processor": str(folder)}


def save_videoalign(folder: Path, *, split: bool) -> tuple[Judge, Any, dict[str, Any]]:
    """Save VideoAlign's folder, LoRA by peft in it: all weights in one file, or split as its
    trainer saves them beside a base -> the network with LoRA unmerged, and the same as above."""
    from peft import LoraConfig, get_peft_model

    base, processor = folder / "base", save_processor(folder / "base")
    marks = [f"<|{name}_reward|>" for name in ("VQ", "MQ", "TA")]
    processor.tokenizer.add_special_tokens({"additional_special_tokens": marks})
    judge = Judge(processor.tokenizer, nn.Linear(WIDTH, 3, bias=False), seed=1)
    network = judge.network
    bare = {key: value.clone() for key, value in network.state_dict().items()}
    tuned = get_peft_model(network, LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj"]))
    for name, p in tuned.named_parameters():
        if "lora_" in name:
            p.data = 0.2 * torch.randn_like(p)
    state, step = public_names(tuned.state_dict()), folder / "checkpoint-20"
    step.mkdir()
    (folder / "checkpoint-3").mkdir()  # an older one, which is not read
    if split:
        torch.manual_seed(0)
        plain = Qwen2VLForConditionalGeneration(config_of(processor.tokenizer))
        plain.resize_token_embeddings(len(processor.tokenizer))
        plain.load_state_dict({k: v for k, v in bare.items() if "rm_head" not in k})
        plain.save_pretrained(base, safe_serialization=True)
        lora = {k.replace(".default", ""): v for k, v in state.items() if "lora_" in k}
        save_file(lora, step / "adapter_model.safetensors")
        rest = {k: v for k, v in state.items() if "rm_head" in k or ".visual." in k}
        torch.save(rest, step / "non_lora_state_dict.pth")
    else:
        torch.save(state, step / "model.pth")
    settings: dict[str, Any] = {
        "data_config": {
            "fps": 2.0,
            "max_frame_pixels": 100352,
            "prompt_template_type": "detailed_special",
        },
        "model_config": {
            "model_name_or_path": str(base),
            "output_dim": 3,
            "use_special_tokens": True,
        },
        "peft_lora_config": {"lora_r": 2, "lora_alpha": 6},
        "inference_config": STATS,
    }
    (folder / "model_config.json").write_text(json.dumps(settings))
    return judge, processor, {"path": str(folder)}
