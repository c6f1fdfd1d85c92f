"""Detectors of transformers, which find what the rules of GenEval and T2I-CompBench judge."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.core.errors import ModelError
from flowrl.core.identity import facts_of_name, short_digest
from flowrl.core.prompt_lists import COCO_NAMES
from flowrl.evaluation.suites.geneval.objects import DetectedObject, Objects

from .._common.scorer import first_line, load_network, source_of

TOP = 100  # instances of an image that Mask2Former's inference keeps
ALIASES = {coco: name for name, coco in COCO_NAMES.items()}
ALIASES |= {"aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch"}
ALIASES |= {"tvmonitor": "tv", "pottedplant": "potted plant", "diningtable": "dining table"}
ALIASES |= {"hair dryer": "hair drier"}
"""What label files call a class -> GenEval's name."""


PATHS = {
    "mask2former": "facebook/mask2former-swin-small-coco-instance",
    "owl": "google/owlv2-base-patch16-ensemble",
    "grounding_dino": "IDEA-Research/grounding-dino-base",
    "shapes": "",
}
"""Detector -> its public weights."""
TEMPLATES = {"owl": "a photo of a {}", "grounding_dino": "{}."}


class Detector(Protocol):
    """Finds objects on RGB images."""

    classes: Collection[str] | None  # that it knows, by GenEval's names; None = whatever is named

    def __call__(
        self, images: Sequence[Image.Image], wanted: Sequence[Sequence[str]], floor: float
    ) -> list[Objects]:
        """Return the objects of each image with a confidence above `floor`; `wanted` are the
        classes that the image's record names."""
        ...


class Mask2Former:
    """Instances of a Mask2Former of transformers with their masks, all classes at once.

    The confidence of an instance is the probability of its class times the mean of its mask's
    probabilities, as in Cheng et al. 2022 (2112.01527); its box encloses its mask. **Differs:**
    GenEval runs mmdet's Swin-S at a short side of 800; here the folder's own processor says how
    large images are made.
    """

    def __init__(self, path: str, *, device: torch.device, dtype: torch.dtype, who: str) -> None:
        from transformers import Mask2FormerForUniversalSegmentation, Mask2FormerImageProcessor

        kind = Mask2FormerForUniversalSegmentation
        self.network = _load(kind, path, dtype, who).to(device)
        self.images = load_part(Mask2FormerImageProcessor, path, who)
        self.device, self.dtype = device, dtype
        labels = self.network.config.id2label
        self.names = [ALIASES.get(labels[i], labels[i]) for i in range(len(labels))]
        self.classes: Collection[str] | None = frozenset(self.names)

    def __call__(
        self, images: Sequence[Image.Image], wanted: Sequence[Sequence[str]], floor: float
    ) -> list[Objects]:
        """Find everything, whatever is wanted."""
        ready = self.images(images=list(images), return_tensors="pt")
        pixels, valid = ready["pixel_values"], ready["pixel_mask"]
        with torch.inference_mode():
            said = self.network(
                pixel_values=pixels.to(self.device, self.dtype), pixel_mask=valid.to(self.device)
            )
        classes, masks = said.class_queries_logits.float(), said.masks_queries_logits.float()
        out: list[Objects] = []
        for row, image in enumerate(images):
            # what was padded is no part of the image
            height, width = int(valid[row].any(1).sum()), int(valid[row].any(0).sum())
            size = (pixels.shape[-2], pixels.shape[-1])
            chosen, confidence, query = top_classes(classes[row], floor)
            if not len(query):
                out.append({})
                continue
            shown = interpolate(masks[row][None, query], size, mode="bilinear")[
                ..., :height, :width
            ]
            whole = interpolate(shown, (image.height, image.width), mode="bilinear")[0]
            out.append(instances(whole, confidence, chosen, self.names, floor))
        return out


def top_classes(logits: Tensor, floor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Pick the likeliest classes of all queries -> class, probability and query of each, at most
    `TOP`, all above `floor`; logits [Q, C + 1], the last one "nothing"."""
    shares = logits.softmax(-1)[:, :-1]
    best, place = shares.flatten().topk(min(TOP, shares.numel()))
    # a mask's probability is at most 1, so what is not above the floor here never is
    above = best > floor
    best, place = best[above], place[above]
    return place % shares.shape[1], best, place // shares.shape[1]


def instances(
    masks: Tensor, shares: Tensor, chosen: Tensor, names: Sequence[str], floor: float
) -> Objects:
    """Make objects of mask logits [n, H, W], probabilities [n] and classes [n], in falling
    confidence; equal ones stay in their order."""
    inside = masks > 0
    sure = (masks.sigmoid() * inside).flatten(1).sum(1) / (inside.flatten(1).sum(1) + 1e-6)
    confidence = shares * sure
    out: Objects = {}
    for i in confidence.argsort(descending=True, stable=True).tolist():
        if confidence[i] > floor and bool(inside[i].any()):
            mask = inside[i].cpu().numpy()
            one = DetectedObject(box_of(mask), float(confidence[i]), mask)
            out.setdefault(names[int(chosen[i])], []).append(one)
    return out


def box_of(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Return the edges around a mask [H, W] with at least one pixel."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    edges = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    left, top, right, bottom = map(float, edges)
    return left, top, right, bottom


class ZeroShot:
    """Boxes of an OWL or a Grounding DINO of transformers, one question for each class that a
    record names.

    OWL (2306.09683) is asked "a photo of a cat", Grounding DINO (2303.05499) "cat.". Their
    confidences are not Mask2Former's: thresholds have to be chosen anew.
    """

    classes: Collection[str] | None = None

    def __init__(
        self, path: str, *, template: str, device: torch.device, dtype: torch.dtype, who: str
    ) -> None:
        from transformers import AutoModelForZeroShotObjectDetection, AutoProcessor

        self.network = _load(AutoModelForZeroShotObjectDetection, path, dtype, who)
        self.network = self.network.to(device)
        self.processor = load_part(AutoProcessor, path, who)
        self.template, self.device, self.dtype = template, device, dtype

    def __call__(
        self, images: Sequence[Image.Image], wanted: Sequence[Sequence[str]], floor: float
    ) -> list[Objects]:
        """Look for the classes that are wanted of each image."""
        # a row for each image and class
        rows = [(place, name) for place, names in enumerate(wanted) for name in names]
        out: list[Objects] = [{} for _ in images]
        if not rows:
            return out
        ready = self.processor(
            images=[images[place] for place, _ in rows],
            text=[self.template.format(name) for _, name in rows],
            return_tensors="pt",
            padding=True,
        ).to(self.device)
        ready["pixel_values"] = ready["pixel_values"].to(self.dtype)
        with torch.inference_mode():
            said = self.network(**ready)
        # boxes in pixels, above the floor
        sizes = [(images[place].height, images[place].width) for place, _ in rows]
        found = self.processor.post_process_grounded_object_detection(
            said, threshold=floor, target_sizes=sizes
        )
        for (place, name), one in zip(rows, found, strict=True):
            objects = []
            for box, score in zip(one["boxes"].tolist(), one["scores"].tolist(), strict=True):
                objects.append(DetectedObject(_inside(box, images[place]), score))
            if objects:
                out[place][name] = sorted(objects, key=lambda o: -o.score)
        return out


def _inside(box: list[float], image: Image.Image) -> tuple[float, float, float, float]:
    """Cut a box off at the image's edges."""
    left, right = (min(max(x, 0.0), float(image.width)) for x in box[::2])
    top, bottom = (min(max(y, 0.0), float(image.height)) for y in box[1::2])
    return left, top, right, bottom


class Shapes:
    """The shapes of the embedded benchmark, read from pixels (`flowrl eval --suite shapes`)."""

    def __init__(self) -> None:
        from flowrl.evaluation.suites.shapes.scene import CLASSES

        self.classes: Collection[str] | None = CLASSES

    def __call__(
        self, images: Sequence[Image.Image], wanted: Sequence[Sequence[str]], floor: float
    ) -> list[Objects]:
        """Find all readable shapes with their colours."""
        from flowrl.evaluation.suites.shapes.detect import shapes_objects

        levels = np.stack([np.asarray(image, np.float32) for image in images]) / 255
        return shapes_objects(torch.from_numpy(levels).permute(0, 3, 1, 2))


def _load(kind: Any, path: str, dtype: torch.dtype, who: str) -> Any:
    """Load a detector from a folder or hub id; tensors that it does not take are left. Raises
    ModelError."""
    from transformers import AutoConfig

    expected = f"a {kind.__name__}"
    try:
        config = AutoConfig.from_pretrained(source_of(path), trust_remote_code=False)
        if not isinstance(config, getattr(kind, "config_class", None) or type(config)):
            raise TypeError(f"its config.json is that of a {config.model_type!r}")
    except Exception as error:
        raise ModelError(
            f"{who}: {path}: expected a folder or hub repository of {expected} "
            f"(config.json and safetensors): {first_line(error)}"
        ) from error
    return load_network(
        kind, path, who=who, expected=expected, more=True, config=config, dtype=dtype
    )


def load_part(kind: Any, path: str, who: str) -> Any:
    """Load the processor that belongs to a detector. Raises ModelError."""
    try:
        return kind.from_pretrained(source_of(path), trust_remote_code=False)
    except Exception as error:
        raise ModelError(
            f"{who}: {path}: expected a folder or hub repository with a {kind.__name__}: "
            f"{first_line(error)}"
        ) from error


def load_detector(
    name: str, path: str | None, device: torch.device, dtype: torch.dtype, who: str
) -> Detector:
    """Load a detector of `PATHS` from a folder or hub id; null: its public weights. The last one
    is kept, while its files are the same. Raises ModelError."""
    if name == "shapes":
        return Shapes()
    source = path or PATHS[name]
    return _detector(name, source, device, dtype, who, short_digest(facts_of_name(source)))


@lru_cache(maxsize=1)
def _detector(
    name: str, source: str, device: torch.device, dtype: torch.dtype, who: str, content: str
) -> Detector:
    if name == "mask2former":
        return Mask2Former(source, device=device, dtype=dtype, who=who)
    return ZeroShot(source, template=TEMPLATES[name], device=device, dtype=dtype, who=who)
