"""What the DINO rewards share: the frozen network, its features, and cached features of reference
images."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError

from .._common.references import open_image
from .._common.scorer import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    first_line,
    load_network,
    pick_device,
    pick_dtype,
    source_of,
)

SIGLIP = ("siglip", "siglip_vision_model")
KINDS = ("dinov2", "dinov2_with_registers", "dinov3_vit", *SIGLIP)
"""`model_type` of the networks that are known: Dinov2Model, Dinov2WithRegistersModel,
DINOv3ViTModel; SiglipModel, of which the vision tower is taken, and SiglipVisionModel."""


class Features(NamedTuple):
    """What the network says of B images, after its last norm, float32 on its device."""

    cls: Tensor  # [B, D]  of SigLIP what its attention pools
    # [B, N, D]  row by row from the top left; register tokens are left out. Of several layers [B,
    # T N, D], layer after layer, without the last norm
    patches: Tensor


class Backbone:
    """A frozen DINOv2, DINOv3 or SigLIP of transformers: images to features, in parts of at most
    `batch`; with `layers` the patches are those that these blocks put out, counted from 0.

    Images are resized to `size` x `size` by PIL's bicubic filter, whatever their shape, and
    normalised by ImageNet's mean and std, SigLIP's by 0.5, as in Adv-GRPO's code. The library
    interpolates DINOv2's position embeddings; DINOv3's follow from the grid. **Differs:** the
    processor that comes with DINOv2's weights resizes to 256 and crops 224 from the middle.
    """

    def __init__(
        self,
        path: str,
        *,
        size: int | None,
        device: str,
        dtype: str,
        batch: int,
        who: str,
        layers: Sequence[int] = (),
    ) -> None:
        if batch < 1:
            raise ConfigError(f"{who}: batch: expected at least 1, got {batch}")
        self.device, self.dtype = pick_device(device, who), pick_dtype(dtype, who)
        self.batch = batch
        # the network, and where its patch tokens begin: after CLS and registers, if it has such
        self.network = _load(path, self.dtype, who).to(self.device)
        config = self.network.config
        self.width: int = config.hidden_size
        self.siglip = config.model_type in SIGLIP
        own = 0 if config.model_type == "dinov2" else getattr(config, "num_register_tokens", 0)
        self.first = 0 if self.siglip else 1 + own
        # how many patches an image has, of one layer or of several joined
        self.size, self.patches = _grid(size, config, who)
        self.layers = tuple(layers)
        if any(not 0 <= layer < config.num_hidden_layers for layer in self.layers):
            raise ConfigError(
                f"{who}: layers: expected numbers from 0 to {config.num_hidden_layers - 1}, got "
                f"{list(layers)}"
            )
        self.patches *= len(self.layers) or 1
        # pixels are scaled as the network was trained
        mean, std = ((0.5,) * 3,) * 2 if self.siglip else (IMAGENET_MEAN, IMAGENET_STD)
        self._mean = torch.tensor(mean, device=self.device)[:, None, None]
        self._std = torch.tensor(std, device=self.device)[:, None, None]

    @torch.no_grad()
    def __call__(self, images: Sequence[Image.Image]) -> Iterator[Features]:
        """Yield the features of RGB images, in their order."""
        for start in range(0, len(images), self.batch):
            pixels = self.pixels(images[start : start + self.batch])
            yield self._features(pixels.to(self.dtype))

    def _features(self, pixels: Tensor) -> Features:
        """Show the network pixels [B, 3, size, size]."""
        more: dict[str, Any] = {"output_hidden_states": True} if self.layers else {}
        if self.siglip:
            more["interpolate_pos_encoding"] = self.size != self.network.config.image_size
        found = self.network(pixel_values=pixels, **more)
        tokens = found.last_hidden_state.float()
        # cloned: CLS alone must not keep all tokens alive
        cls = found.pooler_output.float() if self.siglip else tokens[:, 0].clone()
        if not self.layers:
            return Features(cls, tokens[:, self.first :])
        kept = [found.hidden_states[layer + 1][:, self.first :].float() for layer in self.layers]
        return Features(cls, torch.cat(kept, dim=1))

    def pixels(self, images: Sequence[Image.Image]) -> Tensor:
        """Return what the network is shown: [B, 3, size, size] float32, normalised."""
        side = (self.size, self.size)
        resized = [image.resize(side, Image.Resampling.BICUBIC) for image in images]
        rows = np.stack([np.asarray(image, dtype=np.uint8) for image in resized])
        levels = torch.from_numpy(rows).to(self.device).permute(0, 3, 1, 2)
        return (levels.float() / 255 - self._mean) / self._std


def _load(path: str, dtype: torch.dtype, who: str) -> Any:
    """Load a DINO from a folder or hub id. Raises ModelError."""
    from transformers import AutoConfig, AutoModel

    # the config first: it says what kind of network this is, before gigabytes are read
    try:
        config = AutoConfig.from_pretrained(source_of(path), trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{who}: {path}: expected a folder, or a hub id with HF_HUB_OFFLINE unset, of a "
            "DINOv2, DINOv3 or SigLIP of transformers (config.json, model.safetensors): "
            f"{first_line(error)}"
        ) from error
    if config.model_type not in KINDS:
        raise ModelError(
            f"{who}: {path}: expected one of {', '.join(KINDS)}, got a {config.model_type!r} "
            "network"
        )
    expected = f"a {config.model_type}"
    # of SigLIP the half that sees images
    network = load_network(AutoModel, path, who=who, expected=expected, config=config, dtype=dtype)
    return network.vision_model if config.model_type == "siglip" else network


def _grid(size: int | None, config: Any, who: str) -> tuple[int, int]:
    """Return the side in pixels and the number of patches."""
    own, patch = config.image_size, config.patch_size
    if not isinstance(own, int) or not isinstance(patch, int):
        raise ModelError(
            f"{who}: expected a network for square images and patches, got {own} and {patch}"
        )
    side = own if size is None else size
    if side < patch or side % patch:
        raise ConfigError(
            f"{who}: size: expected a multiple of the network's patch size {patch}, got {side}"
        )
    return side, (side // patch) ** 2


Stamp = tuple[Path, int, int]
"""An image's path, its size, and when it was written in nanoseconds."""


class FeatureCache:
    """Features of reference images by path, size and time, computed once and kept while all of them
    fit into `megabytes`."""

    def __init__(self, backbone: Backbone, *, megabytes: int, patches: bool, who: str) -> None:
        if megabytes < 0:
            raise ConfigError(f"{who}: cache_mb: expected 0 or more, got {megabytes}")
        tokens = backbone.patches + 1 if patches else 1
        self.backbone, self.patches, self.who = backbone, patches, who
        self.most = megabytes * 2**20 // (4 * backbone.width * tokens)  # images
        self.kept: OrderedDict[Stamp, Features] = OrderedDict()

    def __call__(self, paths: Sequence[Path]) -> Iterator[Features]:
        """Yield the features of the images at `paths`, in their order, in parts of at most the
        backbone's batch.

        `patches` has no rows if they are not kept.
        """
        for start in range(0, len(paths), self.backbone.batch):
            # computed where they are not known
            part = [_stamped(path) for path in paths[start : start + self.backbone.batch]]
            known = {stamp: self.kept[stamp] for stamp in part if stamp in self.kept}
            known |= self._compute([stamp for stamp in dict.fromkeys(part) if stamp not in known])
            # the last used ones are kept
            for stamp in known:
                self.kept[stamp] = known[stamp]
                self.kept.move_to_end(stamp)
            while len(self.kept) > self.most:
                self.kept.popitem(last=False)
            cls = torch.stack([known[stamp].cls for stamp in part])
            yield Features(cls, torch.stack([known[stamp].patches for stamp in part]))

    def _compute(self, stamps: Sequence[Stamp]) -> dict[Stamp, Features]:
        out: dict[Stamp, Features] = {}
        for part in self.backbone([open_image(stamp[0], self.who) for stamp in stamps]):
            patches = part.patches if self.patches else part.patches[:, :0]
            # cloned, so that a kept image does not keep its whole batch in memory
            rows = [Features(c.clone(), p.clone()) for c, p in zip(part.cls, patches, strict=True)]
            out |= zip(stamps[len(out) : len(out) + len(rows)], rows, strict=True)
        return out


def _stamped(path: Path) -> Stamp:
    """Return an image's path with its size and time; one that is not there is named when read."""
    try:
        about = path.stat()
    except OSError:
        return path, 0, 0
    return path, about.st_size, about.st_mtime_ns
