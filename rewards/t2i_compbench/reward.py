"""The reward: what a prompt of T2I-CompBench asks for, part by part. Where two things stand is
scored as in 2307.06350 (Karine-Huang/T2I-CompBench, UniDet_eval/2D_spatial_eval.py): compared with
the published function on 100,000 random pairs of boxes and all relations, equal."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.geneval.objects import Box, DetectedObject, DetectionLimits, kept

from .._backbones.clip import TransformersClip, positive
from .._common.scorer import in_batches, pick_device, pick_dtype, to_pil
from .._detectors.networks import PATHS, Detector, load_detector
from .blip_vqa import BlipVqa
from .words import Parser, Plain, Relation, Spacy, asked_phrases, relation_of

WHO = "rewards.t2i_compbench"
PARTS = ("attribute", "spatial", "action")
THRESHOLDS = {"mask2former": 0.5, "owl": 0.2, "grounding_dino": 0.35}
PEOPLE = {"girl", "boy", "man", "woman"}
SIDE = 479  # pixels of an image's short side, as the published detector sees it ...
MOST = 480  # ... unless its long side would have more
NEAR = 150  # pixels of that image within which things are beside each other
OVERLAP = 0.1  # IoU from which a place counts less
_WAY = {"left": (0, 1), "right": (0, -1), "top": (1, 1), "bottom": (1, -1)}


class t2i_compbench:
    """Score images [L, 3, H, W] by the parts that their records name -> [L] float32 in [-1, 1]; the
    mean where there are several.

    T2I-CompBench (2307.06350), Karine-Huang/T2I-CompBench. `parts` of a record: "attribute", BLIP's
    P(yes) for each noun phrase, multiplied; "spatial", two objects and their relation by a
    detector; "action", the cosine of CLIP. `vqa`, `path` and `clip` are their weights, by folder or
    hub id; only those are loaded that a record needs. A record may bring its own `phrases`, and
    `objects` with a `relation` (left, right, top, bottom or beside). `threshold` is the confidence
    above which an object is there; null: 0.5 for mask2former, as the published detector has, 0.2
    for owl, 0.35 for grounding_dino (ours).

    Slips of the published code: `first_listed_relation` takes the first phrase of a fixed list that
    is anywhere in the prompt; `on_top_of_fails` never lets "on top of" hold;
    `unread_relation_is_zero` scores 0 where no phrase of the list is found; without it such a
    prompt is scored by its other parts. `one_object_is_two` compares the most confident object with
    itself where both are of one class, as a man and a woman are (both are persons).

    **Differs:** the detector is one of transformers, not UniDet; the most confident object of a
    class counts; `parser: plain` is not spaCy (see words.py).
    """

    judges_singly = True
    loads_late = True  # networks come with the first record that needs them

    @staticmethod
    def reads(given: Mapping[str, Any]) -> dict[str, str]:
        """Return what is read for each argument that names weights."""
        path = given["path"] or PATHS[given["detector"]]
        return {"vqa": given["vqa"], "path": path, "clip": given["clip"]}

    def __init__(
        self,
        *,
        vqa: str = "Salesforce/blip-vqa-capfilt-large",
        vqa_size: int = 480,
        detector: Literal["grounding_dino", "owl", "mask2former"] = "grounding_dino",
        path: str | None = None,
        threshold: float | None = None,
        clip: str = "openai/clip-vit-base-patch32",
        parser: Literal["plain", "spacy"] = "plain",
        spacy: str = "en_core_web_sm",
        first_listed_relation: bool = False,
        on_top_of_fails: bool = False,
        unread_relation_is_zero: bool = False,
        one_object_is_two: bool = False,
        device: str = "auto",
        dtype: str = "float32",
        batch: int = 8,
    ) -> None:
        # refuse what cannot be before any network is loaded
        if detector not in THRESHOLDS:
            raise ConfigError(
                f"{WHO}: detector: expected one of {', '.join(THRESHOLDS)}, got {detector!r}"
            )
        if parser not in ("plain", "spacy"):
            raise ConfigError(f"{WHO}: parser: expected plain or spacy, got {parser!r}")
        least = THRESHOLDS[detector] if threshold is None else threshold
        if not 0 <= least < 1:
            raise ConfigError(f"{WHO}: threshold: expected a number in [0, 1), got {threshold}")
        # networks are loaded when the first record needs them: this only keeps how
        self.limits = DetectionLimits(least, least, 100, 1.0)
        self.vqa_path, self.vqa_size, self.clip_path = vqa, vqa_size, clip
        self.kind, self.path = detector, path
        self.device, self.dtype = pick_device(device, WHO), pick_dtype(dtype, WHO)
        self.batch = int(positive(batch, "batch", WHO))
        # known faults of the published code, each only on request
        self.slips = {"listed": first_listed_relation, "top_fails": on_top_of_fails}
        self.unread_is_zero, self.one_is_two = unread_relation_is_zero, one_object_is_two
        self.parser: Parser = Spacy(spacy, WHO) if parser == "spacy" else Plain()
        self.needed: set[str] = set()

    @cached_property
    def blip(self) -> BlipVqa:
        """Return who answers questions."""
        return BlipVqa(
            self.vqa_path, size=self.vqa_size, device=self.device, dtype=self.dtype, who=WHO
        )

    @cached_property
    def detector(self) -> Detector:
        """Return who finds objects."""
        return load_detector(self.kind, self.path, self.device, self.dtype, WHO)

    @cached_property
    def towers(self) -> TransformersClip:
        """Return the CLIP."""
        path = self.clip_path
        return TransformersClip(path, path, device=self.device, dtype=self.dtype, who=WHO)

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first image is made. Raises
        DataError."""
        # the kinds of check that the prompt asks for
        parts = record.get("parts")
        if not isinstance(parts, list) or not parts or not set(parts) <= set(PARTS):
            raise DataError(
                f'{where}: expected "parts", a list of {", ".join(PARTS)} (prompts: '
                f"t2i-compbench:FOLDER), got {parts!r:.80}"
            )
        # each kind needs something of the prompt: phrases, or two objects and their relation
        if "attribute" in parts and not self._phrases(record):
            raise DataError(f"{where}: no noun phrase to ask about in {record['prompt']!r}")
        if "spatial" in parts:
            relation = self._relation(record, where)
            if relation is None and parts == ["spatial"] and not self.unread_is_zero:
                raise DataError(
                    f"{where}: no relation of two things in {record['prompt']!r}; name them: "
                    '"objects": ["cat", "chair"], "relation": "left"'
                )
            if relation is not None and self.kind == "mask2former":
                self._check_classes(relation, where)
        # `probe` loads the networks of these
        self.needed |= set(parts)

    def probe(self) -> None:
        """Load the networks that the records need. Raises ModelError."""
        names = {"attribute": "blip", "spatial": "detector", "action": "towers"}
        for part in PARTS:
            if part in self.needed:
                getattr(self, names[part])

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Judge each image by its own record."""
        return self.explain(batch)[0]

    def explain(self, batch: RewardBatch) -> tuple[Tensor, list[dict[str, Any]]]:
        """Judge each image -> its score, and a line: prompt, tag, each part's score, and what was
        asked and found."""
        # one record per image, which says what to check
        if len(batch.meta) != len(batch.images):
            raise DataError(f"{WHO}: expected one record per image, got {len(batch.meta)}")
        for place, record in enumerate(batch.meta):
            self.check_record(record, f"{WHO}: image {place}")
        images = to_pil(batch.images)
        rows: list[dict[str, Any]] = []
        for record in batch.meta:
            rows.append({"tag": record.get("tag", ""), "prompt": record["prompt"]})
        # each kind of check has its own network: show it all its images, batch by batch
        judges = {"attribute": self._attributes, "spatial": self._places, "action": self._actions}
        for part, judge in judges.items():
            mine = [i for i, record in enumerate(batch.meta) if part in record["parts"]]
            for start in range(0, len(mine), self.batch):
                chosen = mine[start : start + self.batch]
                records = [batch.meta[i] for i in chosen]
                found = judge([images[i] for i in chosen], records)
                for place, line in zip(chosen, found, strict=True):
                    rows[place].update(line)
        # a prompt with several kinds gets their mean
        for row in rows:
            known = [row[part] for part in PARTS if row.get(part) is not None]
            row["score"] = sum(known) / len(known)
        scores = torch.tensor([row["score"] for row in rows], dtype=torch.float32)
        return scores.to(batch.images.device), rows

    def _attributes(
        self, images: list[Image.Image], records: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Ask about every noun phrase; the image's score is the product of the answers."""
        asked = [self._phrases(record) for record in records]
        questions = [[*map("{}?".format, mine)] for mine in asked]
        answers = self.blip(images, questions)
        lines = []
        for mine, values in zip(asked, answers, strict=True):
            product = float(torch.tensor(values, dtype=torch.float64).prod())
            lines.append({"attribute": product, "asked": mine, "answers": values})
        return lines

    def _places(
        self, images: list[Image.Image], records: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Find both objects of each image, and score how they stand."""
        asked = [self._relation(record, WHO) for record in records]
        wanted = [_classes(relation) for relation in asked]
        found = self.detector(images, wanted, self.limits.threshold)
        lines: list[dict[str, Any]] = []
        for image, relation, objects in zip(images, asked, found, strict=True):
            if relation is None:
                lines.append({"spatial": 0.0 if self.unread_is_zero else None})
                continue
            there = kept(objects, "", self.limits)
            pair = [there.get(name, []) for name in (relation.first, relation.second)]
            if relation.first == relation.second and not self.one_is_two:
                score, pair = twin_score(relation.kind, pair[0], image.size)
            else:
                score = place_score(relation.kind, pair[0], pair[1], image.size)
            lines.append(
                {"spatial": score, "relation": [*relation], "found": _boxes(relation, pair)}
            )
        return lines

    def _actions(
        self, images: list[Image.Image], records: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Return the cosine of each image with its prompt, of a mixed prompt without adjectives."""
        texts = []
        for record in records:
            mixed = len(record["parts"]) > 1
            texts.append(self.parser.plainly(record["prompt"]) if mixed else record["prompt"])
        seen = normalize(in_batches(self.towers.see, images, size=self.batch), dim=-1)
        read = normalize(in_batches(self.towers.read, texts, size=self.batch), dim=-1)
        return [{"action": value} for value in (seen * read).sum(-1).tolist()]

    def _phrases(self, record: Mapping[str, Any]) -> list[str]:
        own = record.get("phrases")
        if isinstance(own, list) and all(isinstance(one, str) for one in own):
            return own
        return asked_phrases(self.parser, record["prompt"])

    def _relation(self, record: Mapping[str, Any], where: str) -> Relation | None:
        """Return what a record says of two things, or its prompt. Raises DataError."""
        own, kind = record.get("objects"), record.get("relation")
        if own is None and kind is None:
            found = relation_of(self.parser, record["prompt"], **self.slips)
        else:
            good = isinstance(own, list) and len(own) == 2 and all(isinstance(o, str) for o in own)
            if not good or kind not in ("left", "right", "top", "bottom", "beside"):
                raise DataError(
                    f'{where}: expected two texts as "objects" and left, right, top, bottom or '
                    f'beside as "relation", got {own!r:.80} and {kind!r:.40}'
                )
            found = Relation(str(kind), *map(str, own or []))
        if found is None:
            return None
        names = ["person" if name in PEOPLE else name for name in found[1:]]
        return Relation(found.kind, names[0], names[1])

    def _check_classes(self, relation: Relation, where: str) -> None:
        known = self.detector.classes or ()
        odd = [name for name in _classes(relation) if name not in known]
        if odd:
            raise DataError(
                f"{where}: the detector knows no class {', '.join(map(repr, odd))}, but "
                f"{len(known)} others; `detector: owl` or grounding_dino finds any"
            )


def _classes(relation: Relation | None) -> list[str]:
    return list(dict.fromkeys(relation[1:])) if relation is not None else []


def _boxes(relation: Relation, pair: Sequence[Sequence[DetectedObject]]) -> dict[str, list[float]]:
    """Return the boxes that counted, with their confidences."""
    boxes = {}
    for name, found in zip(relation[1:], pair, strict=True):
        if found:
            boxes[name] = [*map(float, found[0].box), float(found[0].score)]
    return boxes


def holds(kind: str, a: Box, b: Box) -> float:
    """Return how well box `a` stands to box `b` as asked, in [0, 1]; boxes are in the published
    detector's pixels, y down.

    Beside: 1 within NEAR along either axis, else NEAR over the larger offset. The others: the
    offset of the centres has the right sign and its axis is the longer one, then 1, or OVERLAP /
    IoU where the boxes overlap more.
    """
    offset = [(b[i] + b[i + 2] - a[i] - a[i + 2]) / 2 for i in (0, 1)]
    if kind == "beside":
        if min(map(abs, offset)) < NEAR:
            return 1.0
        return NEAR / max(map(abs, offset))
    if kind not in _WAY:
        return 0.0
    axis, sign = _WAY[kind]
    if sign * offset[axis] <= 0 or abs(offset[axis]) <= abs(offset[1 - axis]):
        return 0.0
    shared = _overlap(a, b)
    return 1.0 if shared < OVERLAP else OVERLAP / shared


def _overlap(a: Box, b: Box) -> float:
    """Return the IoU; an edge is no pixel of its own here, unlike in GenEval."""
    width, height = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    whole = sum(areas) - width * height
    return width * height / whole if whole > 0 else 0.0


def place_score(
    kind: str,
    first: Sequence[DetectedObject],
    second: Sequence[DetectedObject],
    size: tuple[int, int],
) -> float:
    """Score the most confident object of each kind on an image of `size` (width, height).

    A quarter for the confidence of each, a half for their relation; a sum below a half is 0. So
    one thing alone, or a relation that does not hold, is worth nothing.
    """
    score = sum(0.25 * found[0].score for found in (first, second) if found)
    if first and second:
        score += holds(kind, scaled(first[0].box, size), scaled(second[0].box, size)) / 2
    return score if score >= 0.5 else 0.0


def twin_score(
    kind: str, found: Sequence[DetectedObject], size: tuple[int, int]
) -> tuple[float, list[list[DetectedObject]]]:
    """Score two objects of one class as `place_score` does: of all ordered pairs of different
    objects the best -> its score, and the pair. One object alone stands to nothing."""
    best, chosen = place_score(kind, found[:1], [], size), [list(found[:1]), list[DetectedObject]()]
    for one, other in itertools.permutations(found, 2):
        score = place_score(kind, [one], [other], size)
        if score > best or not chosen[1]:
            best, chosen = max(best, score), [[one], [other]]
    return best, chosen


def scaled(box: Box, size: tuple[int, int]) -> Box:
    """Return a box of an image of `size` (width, height) in the published detector's pixels."""
    ratio = min(SIDE / min(size), MOST / max(size))
    left, top, right, bottom = (edge * ratio for edge in box)
    return left, top, right, bottom
