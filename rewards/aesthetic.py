"""LAION's aesthetic predictor v2: how pretty an image is, whatever its prompt."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import RewardBatch

from ._backbones.clip import OpenClip, positive
from ._common.pixels import shortest, shortest_tensors
from ._common.scorer import (
    check_images,
    find_file,
    in_batches,
    load_strict,
    pick_device,
    pick_dtype,
    read_weights,
    to_pil,
)

WHO = "rewards.aesthetic"
FILE = "sac+logos+ava1-l14-linearMSE.pth"
WIDTH = 768  # of CLIP ViT-L/14's projected embedding


class Fingerprint(NamedTuple):
    """What tells one MLP from another: the file, sums of its tensors, and its affine map ``score =
    w . e + b``."""

    sha256: str
    sums: dict[str, float]  # of stored tensors, in float64
    b: float
    norm: float  # |w|
    total: float  # sum of w
    first: tuple[float, ...]  # w[0:6]


PUBLISHED = Fingerprint(
    sha256="21dd590f3ccdc646f0d53120778b296013b096a035a2718c9cb0d511bff0f1e0",
    sums={
        "layers.0.weight": -11.765618821832504,
        "layers.0.bias": -0.24403834371469,
        "layers.2.weight": 15.560105307348,
        "layers.2.bias": -0.998898776335,
        "layers.4.weight": 2.56330303829,
        "layers.6.weight": 0.09084817549,
        "layers.7.bias": 0.98999321461,
    },
    b=5.236645844819847,
    norm=17.995624776433647,
    total=-9.79262702174934,
    first=(-0.69159344, -0.55699387, -0.32116852, -0.63148355, -0.18479302, -0.09534039),
)


def layered() -> nn.ModuleDict:
    """Build the predictor's MLP with the published names: ``layers.{0,2,4,6,7}``, no activations,
    dropouts between."""
    layers = nn.Sequential(
        nn.Linear(WIDTH, 1024),
        nn.Dropout(0.2),
        nn.Linear(1024, 128),
        nn.Dropout(0.2),
        nn.Linear(128, 64),
        nn.Dropout(0.1),
        nn.Linear(64, 16),
        nn.Linear(16, 1),
    )
    return nn.ModuleDict({"layers": layers}).eval()


def collapse(state: dict[str, Tensor]) -> tuple[Tensor, float]:
    """Multiply the layers out, which is exact as none has an activation -> (w [768], b) in
    float64."""
    row, b = state["layers.7.weight"].double(), state["layers.7.bias"].double()
    for layer in ("layers.6", "layers.4", "layers.2", "layers.0"):
        b = b + row @ state[f"{layer}.bias"].double()
        row = row @ state[f"{layer}.weight"].double()
    return row[0], b.item()


def differences(state: dict[str, Tensor], known: Fingerprint) -> list[str]:
    """Say what of an MLP is not as in a fingerprint; no answer means that it is the same MLP, in
    whatever file."""
    # what the tensors say, beside what is known
    w, b = collapse(state)
    pairs: dict[str, tuple[float, float]] = {}
    for name, value in known.sums.items():
        pairs[f"sum of {name}"] = (state[name].double().sum().item(), value)
    pairs["b"] = (b, known.b)
    pairs["|w|"] = (w.norm().item(), known.norm)
    pairs["sum of w"] = (w.sum().item(), known.total)
    for place, value in enumerate(known.first):
        pairs[f"w[{place}]"] = (w[place].item(), value)
    # what differs by more than rounding
    wrong = []
    for name, (got, want) in pairs.items():
        if not math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-6):
            wrong.append(f"{name} is {got:.9g} and not {want:.9g}")
    return wrong


def check_published(file: Path, state: dict[str, Tensor], known: Fingerprint) -> None:
    """Raise ModelError unless the file has the known hash, or its tensors the known sums and affine
    map."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest == known.sha256:
        return
    wrong = differences(state, known)
    if wrong:
        raise ModelError(
            f"{WHO}: {file}: expected the published predictor (sha256 {known.sha256[:16]}...), got "
            f"another MLP (sha256 {digest[:16]}...): {len(wrong)} numbers differ, {wrong[0]}. Set "
            "verify: false if you mean to use it"
        )


class aesthetic:
    """Score images [L, 3, H, W] by LAION's predictor on normalised CLIP ViT-L/14 -> [L] float32,
    about 1 to 10.

    christophschuhmann/improved-aesthetic-predictor (sac+logos+ava1-l14-linearMSE), as DDPO uses it.
    `path` holds the MLP, `clip` OpenAI's weights in open_clip's naming; both may be a file, a
    folder or a hub repository. Prompts are not looked at. **Differs:** the MLP is collapsed in
    float64 to one affine map. 8-bit images go through PIL, as in DDPO.

    With `gradient` tensors are resized, as in AlignProp and ReFL, and nothing is rounded, so that
    the score can be differentiated with respect to the images. **Differs:** AlignProp resizes
    bilinearly; here it is bicubic, which is nearer to PIL's. Raises
    ConfigError, ModelError (also for another MLP than the published one, unless `verify` is
    false), DataError.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        path: str = "camenduru/improved-aesthetic-predictor",
        clip: str = "timm/vit_large_patch14_clip_224.openai",
        architecture: str = "ViT-L-14-quickgelu",
        verify: bool = True,
        gradient: bool = False,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 32,
    ) -> None:
        # the predictor
        self.batch = int(positive(batch, "batch", WHO))
        self.differentiable = gradient
        where, kind = pick_device(device, WHO), pick_dtype(dtype, WHO)
        file = find_file(path, FILE, WHO)
        state = read_weights(file, WHO)
        load_strict(layered(), state, f"{WHO}: {file}")
        if verify:
            check_published(file, state, PUBLISHED)
        self.w, self.b = collapse(state)
        self.near = self.w.to(where)  # beside the tower: a copy in every call would be waited for
        # the embedding that it reads
        self.towers = OpenClip(
            clip, architecture, prepare=shortest, device=where, dtype=kind, who=WHO
        )
        if self.towers.dimensions != WIDTH:
            raise ConfigError(
                f"{WHO}: architecture: the predictor reads embeddings of {WIDTH} numbers, and "
                f"{architecture!r} makes {self.towers.dimensions}; expected a ViT-L/14"
            )

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image; with `gradient` the scores carry one."""
        if self.differentiable:
            check_images(batch.images)
            parts = [self.follow(part) for part in batch.images.split(self.batch)]
            return torch.cat(parts).to(batch.images.device, torch.float32)
        seen = in_batches(self.towers.see, to_pil(batch.images), size=self.batch).reshape(-1, WIDTH)
        unit = functional.normalize(seen.double(), dim=-1)
        return (unit @ self.w + self.b).to(batch.images.device, torch.float32)

    def follow(self, images: Tensor) -> Tensor:
        """Score images [N, 3, H, W] in [0, 1] without leaving torch -> [N], at least float32."""
        seen = self.towers.embed(shortest_tensors(images, self.towers.size))
        wide = seen.to(torch.promote_types(seen.dtype, torch.float32))
        return functional.normalize(wide, dim=-1) @ self.near.to(wide) + self.b
