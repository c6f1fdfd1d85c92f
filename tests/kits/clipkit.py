"""Tiny random CLIP models in the layouts of open_clip and of transformers, with the real
vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import torch
from open_clip.tokenizer import SimpleTokenizer
from PIL import Image
from pretendkit import pretend_cuda
from safetensors.torch import save_file
from torch import Tensor
from torchvision.transforms import functional as vision
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

from flowrl.core.devices import checked_later
from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch

PROMPTS = [
    "a red circle",
    "two  BLUE squares, it's late!",
    "a red circle",
    "a long walk " * 60,
    "",
    "naïve Ünïcode 日本",
]
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def add_architecture(
    folder: Path, name: str, *, width: int = 32, dimensions: int = 24, quick_gelu: bool = False
) -> str:
    """Make open_clip know a CLIP of two layers per tower under `name`."""
    vision = {"image_size": 224, "layers": 2, "width": width, "head_width": 16, "patch_size": 56}
    text = {"context_length": 77, "vocab_size": 49408, "width": width, "heads": 2, "layers": 2}
    config = {"embed_dim": dimensions, "vision_cfg": vision, "text_cfg": text}
    config["quick_gelu"] = quick_gelu
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    return name


def tiny_open_clip(name: str, *, seed: int = 0) -> Any:
    """Build a random model of open_clip whose embeddings depend on everything: no bias and no shift
    is 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = open_clip.CLIP(**open_clip.get_model_config(name)).eval()
        with torch.no_grad():
            for value in model.parameters():
                value.add_(0.1 * torch.randn_like(value))
            model.logit_scale.fill_(4.4)  # PickScore learns it: not ln 100
    return model


def save_open_clip(model: Any, file: Path) -> Path:
    """Save the weights as safetensors."""
    state = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(state, file)
    return file


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename open_clip's tensors to transformers' CLIPModel: in_proj becomes q, k, v; projections
    are transposed."""
    names = {
        "visual.class_embedding": "vision_model.embeddings.class_embedding",
        "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "logit_scale": "logit_scale",
    }
    norms = {
        "visual.ln_pre": "vision_model.pre_layrnorm",
        "visual.ln_post": "vision_model.post_layernorm",
        "ln_final": "text_model.final_layer_norm",
    }
    out = {new: state[old] for old, new in names.items()}
    for old, new in norms.items():
        out |= {f"{new}.{part}": state[f"{old}.{part}"] for part in ("weight", "bias")}
    out["visual_projection.weight"] = state["visual.proj"].T.contiguous()
    out["text_projection.weight"] = state["text_projection"].T.contiguous()
    towers = {"visual.transformer": "vision_model", "transformer": "text_model"}
    for old, new in towers.items():
        for name, value in state.items():
            if name.startswith(f"{old}.resblocks."):
                layer, _, rest = name.removeprefix(f"{old}.resblocks.").partition(".")
                out |= _block(f"{new}.encoder.layers.{layer}", rest, value)
    return out


def _block(prefix: str, rest: str, value: Tensor) -> dict[str, Tensor]:
    if rest.startswith("attn.in_proj_"):
        kind = rest.removeprefix("attn.in_proj_")
        return {
            f"{prefix}.self_attn.{n}_proj.{kind}": part.clone()
            for n, part in zip("qkv", value.chunk(3), strict=True)
        }
    renamed = {"ln_1": "layer_norm1", "ln_2": "layer_norm2", "attn.out_proj": "self_attn.out_proj"}
    renamed |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    old, _, kind = rest.rpartition(".")
    return {f"{prefix}.{renamed[old]}.{kind}": value}


def save_transformers(model: Any, folder: Path, *, quick_gelu: bool = False) -> Path:
    """Save a model of open_clip as a CLIPModel folder with tokenizer and image processor."""
    state = to_transformers(model.state_dict())
    width, dimensions = model.visual.conv1.weight.shape[0], model.visual.proj.shape[1]
    tower = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "hidden_act": "quick_gelu" if quick_gelu else "gelu",
        "projection_dim": dimensions,
    }
    text = tower | {"vocab_size": 49408, "bos_token_id": 49406}
    text |= {"eos_token_id": 49407, "pad_token_id": 49407}
    vision = tower | {"image_size": 224, "patch_size": 56}
    twin = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=dimensions))
    twin.load_state_dict(state)
    twin.save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessor(), clip_tokenizer()).save_pretrained(folder)
    return folder


@cache
def clip_tokenizer() -> Any:
    """Build transformers' tokenizer from the vocabulary that open_clip ships: the public one, 49408
    tokens."""
    public = SimpleTokenizer()
    names = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    vocab = {names.get(token, token): index for token, index in public.encoder.items()}
    return CLIPTokenizer(vocab=vocab, merges=list(public.bpe_ranks))


def random_images(count: int, height: int = 256, width: int = 256, *, seed: int = 0) -> Tensor:
    """Draw smooth 8-bit images [count, 3, height, width], different in colours and shapes."""
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)
    large = [
        np.asarray(Image.fromarray(p).resize((width, height), Image.Resampling.BICUBIC))
        for p in rough
    ]
    noisy = np.clip(np.stack(large) + rng.normal(0, 20, (count, height, width, 3)), 0, 255).round()
    return torch.from_numpy(noisy).permute(0, 3, 1, 2).float() / 255


def pil(image: Tensor) -> Image.Image:
    """Turn [3, H, W] into an 8-bit image."""
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).numpy())


def batch_of(images: Tensor, prompts: list[str] | None = None, **records: list[Any]) -> RewardBatch:
    """Make a batch as the loop hands it to a reward, with further columns in its records."""
    n = len(images)
    prompts = [""] * n if prompts is None else prompts
    meta: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    for name, values in records.items():
        for record, value in zip(meta, values, strict=True):
            record[name] = value
    return RewardBatch(images, prompts, torch.arange(n), meta, torch.zeros(n))


def public_pixels(image: Tensor, antialias: bool) -> Tensor:
    """Do what HPSv2's code does: long side to 224 as floats, pad around the centre, normalise."""
    pixels = vision.to_tensor(pil(image))
    height, width = pixels.shape[1:]
    scale = 224 / float(max(height, width))
    size = [round(height * scale), round(width * scale)]
    pixels = vision.resize(pixels, size, vision.InterpolationMode.BICUBIC, antialias=antialias)
    top, left = (224 - size[0]) // 2, (224 - size[1]) // 2
    pixels = vision.pad(pixels, [left, top, 224 - size[1] - left, 224 - size[0] - top], fill=0)
    return vision.normalize(pixels, MEAN, STD)


def check_slope(follow: Callable[[Tensor], Tensor], least: float) -> None:
    """Assert that the gradient of scores [2] of two float64 images is that of central differences
    along three random directions, and longer than `least`; a step of 1e-4 is exact to about its
    square."""
    images = random_images(2, 61, 47).double().requires_grad_()
    follow(images).sum().backward()
    gradient = images.grad
    assert gradient is not None and gradient.flatten(1).norm(dim=1).min() > least
    step, generator = 1e-4, torch.Generator().manual_seed(5)
    for _ in range(3):
        way = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            up, down = (follow(images + sign * step * way).sum() for sign in (1, -1))
        slope = float(gradient.mul(way).sum())
        assert float(up - down) / (2 * step) == pytest.approx(slope, rel=1e-4)


def check_no_waits(make: Callable[..., Callable[[RewardBatch], Tensor]], calls: int = 2) -> None:
    """Assert that scores and gradient of so many calls of a reward that is followed do not make the
    host wait for a pretended device, and are those of the host. What is not finite is found at the
    end, with the one wait there."""
    images = random_images(3, 64, 64)
    want = make()(batch_of(images, PROMPTS[:3]))
    with pretend_cuda() as seen:
        reward, far = make(device="cuda"), images.to("cuda").requires_grad_()
        seen.clear()
        with checked_later():
            for _ in range(calls):
                scores = reward(batch_of(far, PROMPTS[:3]))
                (gradient,) = torch.autograd.grad(scores.sum(), far)
            assert not seen.waits
        assert seen.waits.total() == 1
        torch.testing.assert_close(scores.detach().cpu(), want)
        assert gradient.isfinite().all().cpu() and gradient.abs().sum().cpu() > 0
        with pytest.raises(DataError, match="NaN"), checked_later():
            reward(batch_of(far * torch.nan, PROMPTS[:3]))
