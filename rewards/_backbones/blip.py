"""ImageReward's network in the layout of its public file: a ViT with timm's names, a BERT that
looks at it, a head."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from flowrl.core.errors import ModelError

from .._common.scorer import load_strict

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of the raw score on ImageReward's own data
HEAD_DIM = 64  # of ViT-B, ViT-L and BERT-base alike; no tensor of the file tells it
LENGTH = 35  # tokens of a text, padding included
UNUSED = (  # in the public file or in ones of its kind, and read by no scorer
    "blip.vision_proj.",
    "blip.text_proj.",
    "blip.text_encoder.embeddings.position_ids",
    "blip.text_encoder.embeddings.token_type_embeddings.",
)


class Sizes(NamedTuple):
    """The sizes of a network; the public file's are in the comments."""

    patch: int  # 16
    tokens: int  # 197 = 1 + (224 / 16)^2
    vision: int  # 1024
    vision_mlp: int  # 4096
    vision_layers: int  # 24
    words: int  # 30524
    positions: int  # 512
    text: int  # 768
    text_mlp: int  # 3072
    text_layers: int  # 12

    @property
    def image(self) -> int:
        """Return the side of the images in pixels."""
        return self.patch * math.isqrt(self.tokens - 1)


def sizes_of(state: dict[str, Tensor], where: str) -> Sizes:
    """Read the sizes from the shapes of a state dict. Raises ModelError where it is not laid out
    like ImageReward."""
    # from the shapes
    vit, bert = "blip.visual_encoder.", "blip.text_encoder."
    try:
        vision, _, patch, _ = state[vit + "patch_embed.proj.weight"].shape
        words, text = state[bert + "embeddings.word_embeddings.weight"].shape
        sizes = Sizes(
            patch=patch,
            tokens=state[vit + "pos_embed"].shape[1],
            vision=vision,
            vision_mlp=state[vit + "blocks.0.mlp.fc1.bias"].shape[0],
            vision_layers=_count(state, vit + "blocks."),
            words=words,
            positions=state[bert + "embeddings.position_embeddings.weight"].shape[0],
            text=text,
            text_mlp=state[bert + "encoder.layer.0.intermediate.dense.bias"].shape[0],
            text_layers=_count(state, bert + "encoder.layer."),
        )
    except (KeyError, ValueError, IndexError) as error:
        raise ModelError(
            f"{where}: expected ImageReward's tensors (blip.visual_encoder.*, blip.text_encoder.*, "
            f"mlp.layers.*), got {len(state)} others ({error}); use the file ImageReward.pt"
        ) from error
    # and checked against what they have to be
    patches = sizes.tokens - 1
    if vision % HEAD_DIM or text % HEAD_DIM or math.isqrt(patches) ** 2 != patches:
        raise ModelError(
            f"{where}: expected widths that {HEAD_DIM} divides and square images, got {sizes}"
        )
    if sizes.positions < LENGTH:
        raise ModelError(
            f"{where}: expected at least {LENGTH} text positions, got {sizes.positions}"
        )
    return sizes


def _count(state: dict[str, Tensor], prefix: str) -> int:
    names = [name.removeprefix(prefix) for name in state if name.startswith(prefix)]
    return len({name.partition(".")[0] for name in names})


def load(state: dict[str, Tensor], where: str) -> ImageRewardNet:
    """Build the network for a state dict and fill it: names and shapes must fit, but for those in
    `UNUSED`.

    **Differs:** the public loader ignores any name; here only the known unused ones may be left
    over. Raises ModelError.
    """
    used = {name: value for name, value in state.items() if not name.startswith(UNUSED)}
    with torch.device("meta"):  # random first values for 450 million numbers would take seconds
        net = ImageRewardNet(sizes_of(used, where))
    net = net.to_empty(device="cpu")
    load_strict(net, used, where)
    return net.eval().requires_grad_(False)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend with heads of `HEAD_DIM`: q [B, T, C], k and v [B, S, C], mask [B, 1, 1, S] (True:
    look) -> [B, T, C]."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class _Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class _VisionAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(_attend(*self.qkv(x).chunk(3, dim=-1)))


class _Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = _VisionAttention(width), _Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionEncoder(nn.Module):
    """Turn images [B, 3, H, W] into features [B, 1 + patches, C]: a pre-norm ViT with a class
    token."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.empty(1, 1, s.vision))
        self.pos_embed = nn.Parameter(torch.empty(1, s.tokens, s.vision))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, s.vision, s.patch, s.patch)})
        self.blocks = nn.Sequential(
            *(_Block(s.vision, s.vision_mlp) for _ in range(s.vision_layers))
        )
        self.norm = nn.LayerNorm(s.vision, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """Return the last features, normalised."""
        patches = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1)
        return self.norm(self.blocks(x + self.pos_embed))


class _Projections(nn.Module):
    def __init__(self, width: int, source: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(width, width),
            nn.Linear(source, width),
            nn.Linear(source, width),
        )

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        return _attend(self.query(x), self.key(source), self.value(source), mask)


class _Join(nn.Module):
    """Project, add the residual, normalise: BERT normalises after the sum."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, width), nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + residual)


class _TextAttention(nn.Module):
    def __init__(self, width: int, source: int) -> None:
        super().__init__()
        self.self, self.output = _Projections(width, source), _Join(width, width)

    def forward(self, x: Tensor, source: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.self(x, source, mask), x)


class _TextLayer(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.attention, self.crossattention = (
            _TextAttention(s.text, s.text),
            _TextAttention(s.text, s.vision),
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(s.text, s.text_mlp)})
        self.output = _Join(s.text_mlp, s.text)

    def forward(self, x: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        x = self.crossattention(self.attention(x, x, mask), image)
        return self.output(gelu(self.intermediate["dense"](x)), x)


class TextEncoder(nn.Module):
    """Read ids [B, T] with mask [B, T] (1: a token, 0: padding) beside features [B, S, C] -> last
    states [B, T, D]."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(s.words, s.text),
                "position_embeddings": nn.Embedding(s.positions, s.text),
                "LayerNorm": nn.LayerNorm(s.text, eps=1e-12),
            }
        )
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(_TextLayer(s) for _ in range(s.text_layers))}
        )

    def forward(self, ids: Tensor, mask: Tensor, image: Tensor) -> Tensor:
        """Let every layer attend to the text both ways, then to the whole image."""
        part = self.embeddings
        place = part["position_embeddings"](torch.arange(ids.shape[1], device=ids.device))
        x = part["LayerNorm"](part["word_embeddings"](ids) + place)
        for layer in self.encoder["layer"].children():
            x = layer(x, mask.bool()[:, None, None, :], image)
        return x


def _head(width: int) -> nn.Sequential:
    # Linear maps only: the public head has no activation, and its dropouts take up the places 1, 3
    # and 5.
    one, two, three, four = (
        nn.Linear(a, b) for a, b in ((width, 1024), (1024, 128), (128, 64), (64, 16))
    )
    return nn.Sequential(
        one, nn.Dropout(0.2), two, nn.Dropout(0.2), three, nn.Dropout(0.1), four, nn.Linear(16, 1)
    )


class ImageRewardNet(nn.Module):
    """Score B images [B, 3, H, W], each with its own text: ids and mask [B, T] -> [B] float32,
    unbounded."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.sizes = s
        self.blip = nn.ModuleDict(
            {"visual_encoder": VisionEncoder(s), "text_encoder": TextEncoder(s)}
        )
        self.mlp = nn.ModuleDict({"layers": _head(s.text)})

    def forward(self, images: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (head(state of the first token) - MEAN) / STD."""
        states = self.blip["text_encoder"](ids, mask, self.blip["visual_encoder"](images))
        return (self.mlp["layers"](states[:, 0].float())[:, 0] - MEAN) / STD
