"""The reward: detections of each image, judged by its prompt's GenEval record; colours by CLIP
between ten names, on a crop with the background painted over."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.identity import facts_of_name, short_digest
from flowrl.core.prompt_lists import COLORS
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.geneval.objects import DetectedObject, DetectionLimits, Objects, kept
from flowrl.evaluation.suites.geneval.rules import credit, judge, result_row, validate_record
from flowrl.evaluation.suites.shapes.scene import COLORS as SHAPES

from .._backbones.clip import OpenClip, Towers, TransformersClip, positive
from .._common.pixels import shortest
from .._common.scorer import in_batches, pick_device, pick_dtype, to_pil
from .._detectors.networks import PATHS, Detector, load_detector

WHO = "rewards.geneval"
CLIP = {"transformers": "openai/clip-vit-large-patch14"}
CLIP["open_clip"] = "timm/vit_large_patch14_clip_224.openai"


LIMITS = {
    "mask2former": DetectionLimits(),
    # GenEval says nothing of these; the limits are ours
    "owl": DetectionLimits(0.2, 0.2, 16, 0.5),
    "grounding_dino": DetectionLimits(0.35, 0.35, 16, 0.5),
    # every readable shape, whatever its confidence
    "shapes": DetectionLimits(0.0, 0.0, 16, 1.0),
}
MODES = ("strict", "graded", "exact")
BACKGROUND = "#999"
TEMPLATES = (
    "a photo of a {color} {name}",
    "a photo of a {color}-colored {name}",
    "a photo of a {color} object",
)


class geneval:
    """Score images [L, 3, H, W] by GenEval's rules: "strict" is its verdict, 0 or 1; "graded"
    Flow-GRPO's partial credit, up to 1; "exact" 0 or 1, with counts that must be equal -> [L]
    float32.

    GenEval: Ghosh et al. 2023, djghosh13/geneval; credits: Flow-GRPO (2505.05470),
    yifan123/reward-server. `path` is the detector's folder or hub id, `clip` that of a CLIP for the
    colours (ViT-L/14 of OpenAI). `threshold`, `counting_threshold`, `max_objects` and `max_overlap`
    decide which detections count; null: GenEval's own for mask2former, ours for the others.
    `below_zero` and `wrong_place_pays` are slips of Flow-GRPO's code; see
    flowrl/evaluation/suites/geneval/rules.py.

    **Differs:** Mask2Former is transformers', not mmdet's, so absolute numbers are not exactly
    comparable. OWL and Grounding DINO give boxes without masks: colours are then read off the whole
    crop.
    """

    judges_singly = True

    @staticmethod
    def reads(given: Mapping[str, Any]) -> dict[str, str]:
        """Return what is read for each argument that names weights."""
        if given["detector"] == "shapes":
            return {}
        path = given["path"] or PATHS[given["detector"]]
        return {"path": path, "clip": given["clip"] or CLIP[given["clip_backend"]]}

    def __init__(
        self,
        *,
        mode: Literal["strict", "graded", "exact"] = "strict",
        detector: Literal["mask2former", "owl", "grounding_dino", "shapes"] = "mask2former",
        path: str | None = None,
        clip: str | None = None,
        clip_backend: Literal["transformers", "open_clip"] = "transformers",
        clip_architecture: str = "ViT-L-14-quickgelu",
        threshold: float | None = None,
        counting_threshold: float | None = None,
        max_objects: int | None = None,
        max_overlap: float | None = None,
        below_zero: bool = False,
        wrong_place_pays: bool = False,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 8,
    ) -> None:
        # the arguments
        for name, value, known in (
            ("mode", mode, MODES),
            ("detector", detector, PATHS),
            ("clip_backend", clip_backend, CLIP),
        ):
            if value not in known:
                raise ConfigError(
                    f"{WHO}: {name}: expected one of {', '.join(known)}, got {value!r}"
                )
        self.mode, self.batch = mode, int(positive(batch, "batch", WHO))
        self.says_right = mode != "graded"
        given = (threshold, counting_threshold, max_objects, max_overlap)
        self.limits = _limits(LIMITS[detector], given)
        self.slips = {"below_zero": below_zero, "wrong_place_pays": wrong_place_pays}
        where, kind = pick_device(device, WHO), pick_dtype(dtype, WHO)
        # the detector, and who reads colours
        self.detector = load_detector(detector, path, where, kind, WHO)
        self.colors: ClipColors | None = None
        if detector != "shapes":
            towers = _towers(
                clip or CLIP[clip_backend],
                clip_backend,
                clip_architecture,
                where,
                kind,
                short_digest(facts_of_name(clip or CLIP[clip_backend])),
            )
            self.colors = ClipColors(towers, batch=self.batch)

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first image is made."""
        # the detector of shapes names its own colours, CLIP those of GenEval
        validate_record(record, where, self.detector.classes, SHAPES if self.colors is None else ())
        if self.mode != "strict" and not record.get("include"):
            raise DataError(
                f"{where}: mode {self.mode!r} rewards what `include` asks for, and this record has "
                "`exclude` alone; leave it out, or take mode strict"
            )

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Judge each image by its own record."""
        return self.explain(batch)[0]

    def explain(self, batch: RewardBatch) -> tuple[Tensor, list[dict[str, Any]]]:
        """Judge each image -> its score, and its line of a GenEval result file without the file's
        name, with "score"."""
        if len(batch.meta) != len(batch.images):
            raise DataError(
                f"{WHO}: one GenEval record per image is needed in `meta`; got {len(batch.meta)} "
                f"records for {len(batch.images)} images"
            )
        for place, record in enumerate(batch.meta):
            self.check_record(record, f"{WHO}: image {place}")
        images = to_pil(batch.images)
        rows = []
        for image, record, found in zip(images, batch.meta, self._find(images, batch), strict=True):
            rows.append(self._row(image, record, found))
        scores = torch.tensor([row["score"] for row in rows], dtype=torch.float32)
        return scores.to(batch.images.device), rows

    def _find(self, images: Sequence[Image.Image], batch: RewardBatch) -> list[Objects]:
        """Return the detections that count on each image."""
        floor = min(self.limits.threshold, self.limits.counting)
        key = _key(self.limits, images, batch)
        if _Last.detector is self.detector and key == _Last.key:
            return _Last.found
        out: list[Objects] = []
        for start in range(0, len(images), self.batch):
            part = slice(start, start + self.batch)
            records = batch.meta[part]
            wanted = [_classes(record) for record in records]
            found = self.detector(images[part], wanted, floor)
            for record, objects in zip(records, found, strict=True):
                out.append(kept(objects, str(record.get("tag", "")), self.limits))
        _Last.detector, _Last.key, _Last.found = self.detector, key, out
        return out

    def _row(self, image: Image.Image, record: dict[str, Any], found: Objects) -> dict[str, Any]:
        """Judge one image -> its line."""

        def colors(name: str, objects: list[DetectedObject]) -> list[str]:
            if self.colors is None:
                return [one.color or "" for one in objects]
            key = (name, len(objects))
            if key not in seen:
                seen[key] = self.colors(image, name, objects)
            return seen[key]

        # verdict and credit ask for the same colours
        seen: dict[tuple[str, int], list[str]] = {}
        verdict = judge(found, record, colors)
        row = result_row("", record, found, verdict)
        if self.mode == "strict":
            return {**row, "score": float(verdict.correct)}
        earned = credit(found, record, colors, **self.slips)
        return {**row, "score": earned.score if self.mode == "graded" else float(earned.exact)}


class _Last:
    """What was found on the last batch: several modes in one run look at equal images."""

    detector: ClassVar[Detector | None] = None
    key = b""
    found: ClassVar[list[Objects]] = []


def _key(limits: DetectionLimits, images: Sequence[Image.Image], batch: RewardBatch) -> bytes:
    """Return a digest of all that detections depend on, but for the detector."""
    digest = hashlib.blake2b(f"{limits}{batch.meta}".encode())
    for image in images:
        digest.update(f"{image.size}".encode() + image.tobytes())
    return digest.digest()


def _classes(record: dict[str, Any]) -> list[str]:
    """Return the classes that a record names, each once."""
    entries = [*record.get("include", []), *record.get("exclude", [])]
    return list(dict.fromkeys(entry["class"] for entry in entries))


def _limits(own: DetectionLimits, given: Sequence[float | None]) -> DetectionLimits:
    """Put given limits in the place of a detector's own. Raises ConfigError."""
    threshold, counting, most, overlap = given
    limits = DetectionLimits(
        own.threshold if threshold is None else threshold,
        own.counting if counting is None else counting,
        own.most if most is None else int(most),
        own.overlap if overlap is None else overlap,
    )
    good = 0 <= limits.threshold < 1 and 0 <= limits.counting < 1
    if not good or limits.most < 1 or not 0 < limits.overlap <= 1:
        raise ConfigError(
            f"{WHO}: expected threshold and counting_threshold in [0, 1), max_objects from 1 and "
            f"max_overlap in (0, 1], got {limits}"
        )
    return limits


@lru_cache(maxsize=1)
def _towers(
    path: str,
    backend: str,
    architecture: str,
    device: torch.device,
    dtype: torch.dtype,
    content: str,
) -> Towers:
    """Load a CLIP; the last one is kept while its files are the same, as `content` says."""
    if backend == "open_clip":
        return OpenClip(path, architecture, prepare=shortest, device=device, dtype=dtype, who=WHO)
    return TransformersClip(path, path, device=device, dtype=dtype, who=WHO)


class ClipColors:
    """Tell the colour of objects, zero-shot, as djghosh13/geneval does (evaluate_images.py).

    A colour's direction is the mean of three prompts' normalised embeddings, normalised again; the
    object gets the colour with the highest cosine. Directions are kept by class.
    """

    def __init__(self, towers: Towers, *, batch: int) -> None:
        self.towers, self.batch = towers, batch
        self._known: dict[str, Tensor] = {}

    def __call__(self, image: Image.Image, name: str, found: list[DetectedObject]) -> list[str]:
        """Return the colour of each object of a class on an RGB image."""
        crops = [crop(image, one) for one in found]
        seen = normalize(in_batches(self.towers.see, crops, size=self.batch), dim=-1)
        best = (seen @ self.directions(name).T).argmax(-1)
        return [COLORS[place] for place in best.tolist()]

    def directions(self, name: str) -> Tensor:
        """Return the colours' directions for a class [10, D], float32 on the CPU."""
        if name not in self._known:
            texts = [text.format(color=c, name=name) for c in COLORS for text in TEMPLATES]
            read = normalize(in_batches(self.towers.read, texts, size=self.batch), dim=-1)
            means = read.unflatten(0, (len(COLORS), len(TEMPLATES))).mean(1)
            self._known[name] = normalize(means, dim=-1)
        return self._known[name]


def crop(image: Image.Image, found: DetectedObject) -> Image.Image:
    """Cut an object out by its box; what its mask leaves out is painted grey."""
    shown = image
    if found.mask is not None:
        blank = Image.new("RGB", image.size, BACKGROUND)
        mask = torch.from_numpy(found.mask).to(torch.uint8).mul(255).numpy()
        shown = Image.composite(image, blank, Image.fromarray(mask))
    left, top, right, bottom = map(round, found.box)
    # a box thinner than a pixel still has one
    left, top = min(left, image.width - 1), min(top, image.height - 1)
    return shown.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
