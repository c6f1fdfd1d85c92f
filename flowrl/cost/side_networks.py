"""Floating-point work of the networks beside the one that is trained: text encoders and rewards.

All of them are transformers, whose matrix products follow from their sizes. The tests count those
of the real classes with PyTorch's own counter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.devices import DTYPES
from flowrl.cost.architecture import Architecture, text_shape
from flowrl.cost.cards import Work
from flowrl.cost.memory import WITHOUT

CLIP_TOKENS = 77
ONE_FRAME = ("first", "last")  # ways to judge a video by a single image


class Tower(NamedTuple):
    """The sizes of a transformer."""

    layers: int
    width: int
    inner: int  # of the MLP
    products: int = 2  # matrices of the MLP: 3 where it is gated
    heads: int = 0  # width of all queries; 0 = `width`
    keys: int = 0  # width of all keys; 0 = that of the queries

    def work(self, tokens: int, *, seen: int = 0) -> int:
        """Count the operations of one sequence: products with weights, and attention of all tokens
        to all, or to `seen` others only."""
        heads = self.heads or self.width
        keys = self.keys or heads
        weights = 2 * self.width * (heads + keys) + self.products * self.width * self.inner
        attention = 2 * heads * (seen or tokens)
        return 2 * tokens * self.layers * (weights + attention)


# ----------------------------------------------------------------------------------- text encoders


def encoding_work(config: Config, architecture: Architecture) -> int:
    """Count the operations that encode one prompt of full length; images that it starts from are
    not counted."""
    read = text_shape(config, architecture).tokens
    total = 0
    for name, part in architecture.parts.items():
        if not name.startswith("text_encoder"):
            continue
        settings: Any = getattr(transformers, part.kind).config_class.from_dict(part.settings)
        is_clip = part.kind.startswith("CLIP")
        limit = config.model.kwargs.get("max_sequence_length") or read
        total += _encoder(settings).work(CLIP_TOKENS if is_clip else int(limit))
    return total


def _encoder(settings: Any) -> Tower:
    """Return the sizes of what reads texts: T5, CLIP, or a language model, alone or beside an
    encoder of images."""
    text = settings.get_text_config()
    # T5's numbers have other names
    if hasattr(text, "d_kv"):
        gated = 3 if text.is_gated_act else 2
        heads = text.num_heads * text.d_kv
        return Tower(text.num_layers, text.d_model, text.d_ff, gated, heads)
    width, heads = text.hidden_size, text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", heads)
    each = getattr(text, "head_dim", None) or width // heads
    products = 2 if "clip" in text.model_type else 3
    sizes = (text.num_hidden_layers, width, text.intermediate_size, products)
    return Tower(*sizes, heads * each, keys * each)


# ----------------------------------------------------------------------------------------- rewards

_LARGE, _HUGE = Tower(24, 1024, 4096), Tower(32, 1280, 5120)  # eyes of CLIP ViT-L/14, ViT-H/14
_LARGE_READS, _HUGE_READS = Tower(12, 768, 3072), Tower(24, 1024, 4096)
_BASE = Tower(12, 768, 3072)  # ViT-B, BERT-base
PATCH, SIDE = 14, 224  # pixels
QWEN_EYES, QWEN_7B = Tower(32, 1280, 5120), Tower(28, 3584, 18_944, 3, 3584, 512)
QWEN_PATCHES, QWEN_WORDS = 1024, 640  # of an image; of HPSv3's instruction and a prompt, about
BLIP_WORDS = 35


def eyes(tower: Tower, side: int = SIDE, patch: int = PATCH) -> int:
    """Count the operations of a vision transformer on one square image."""
    patches = (side // patch) ** 2
    return 2 * patches * 3 * patch**2 * tower.width + tower.work(patches + 1)


def _clip(huge: bool) -> tuple[int, int]:
    see, read = (_HUGE, _HUGE_READS) if huge else (_LARGE, _LARGE_READS)
    return eyes(see), read.work(CLIP_TOKENS)


def _blip() -> int:
    """Count ImageReward: a ViT-L/16, and a BERT whose layers look at its 197 tokens, too."""
    patches, width = (SIDE // 16) ** 2 + 1, _LARGE.width
    own = _BASE.work(BLIP_WORDS)
    # queries and results are of words, keys and values of patches
    asked = 2 * BLIP_WORDS * 2 * _BASE.width**2 + 2 * patches * 2 * width * _BASE.width
    asked += 4 * BLIP_WORDS * patches * _BASE.width
    return eyes(_LARGE, patch=16) + own + _BASE.layers * asked


def _hpsv3() -> int:
    """Count a Qwen2-VL-7B: its eyes, what joins 2 x 2 patches, and the language model."""
    seen, tokens = QWEN_PATCHES, QWEN_PATCHES // 4
    width = 4 * QWEN_EYES.width
    look = 2 * seen * 3 * 2 * PATCH**2 * QWEN_EYES.width + QWEN_EYES.work(seen)
    join = 2 * tokens * (width * width + width * QWEN_7B.width)
    return look + join + QWEN_7B.work(tokens + QWEN_WORDS)


def reward_call_work(call: Call) -> tuple[int, int] | None:
    """Return the operations of a reward's networks for one image, and for each different prompt;
    None: not known."""
    fn, kwargs = call.fn, call.kwargs
    if fn in WITHOUT:
        return 0, 0
    if fn == "clip":
        named = str(kwargs.get("architecture") or "ViT-L-14")
        known = named.startswith(("ViT-L-14", "ViT-H-14")) and not kwargs.get("cells")
        return _clip(named.startswith("ViT-H-14")) if known else None
    if fn == "dino" and str(kwargs["path"]).endswith("dinov2-base"):
        return eyes(_BASE, int(kwargs.get("size") or 518)), 0
    found = {
        "clip_reference": (eyes(_LARGE), 0),
        "aesthetic": (eyes(_LARGE), 0),
        "pickscore": _clip(True),
        "hpsv2": _clip(True),
        "image_reward": (_blip(), 0),
        "hpsv3": (_hpsv3(), 0),
    }
    return found.get(fn)


def rewards_work(config: Config, images: float, prompts: float) -> tuple[Work, list[str]]:
    """Count what all rewards take for so many images of so many different prompts -> the work, and
    the names of the rewards that are not counted: their networks are not known, or they ask a
    server, people or a program."""
    total, unknown = Work(), []
    for name, call in config.rewards.items():
        each = reward_call_work(call)
        if each is None:
            unknown.append(name)
            continue
        # of a video all frames, or one
        frames = int(config.model.kwargs.get("frames") or 1)
        judged = frames if call.frames and call.frames not in ONE_FRAME else 1
        done = images * judged * each[0] + prompts * each[1]
        short = DTYPES[str(call.kwargs.get("dtype", "float32"))].itemsize == 2
        total = Work(total.short + done * short, total.wide + done * (not short))
    return total, unknown
