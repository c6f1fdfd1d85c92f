"""Reward images that show the quoted text of their prompt, as an OCR engine reads it."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError, RewardError, RunError, install
from flowrl.core.types import RewardBatch

from ._common.scorer import first_line, to_pil

WHO = "rewards.ocr"
Reader = Callable[[Image.Image], str]
QUOTED = re.compile(r'"([^"]*)"')


class ocr:
    """Score images [L, 3, H, W] in [0, 1] by the text on them -> [L] float32 in [0, 1]: 1 - edits
    / len(target).

    The target is the text between the first pair of double quotes of the prompt, or the record's
    `key`. White space and case do not count; a target that is read anywhere scores 1; more edits
    than the target has letters score 0. Flow-GRPO (2505.05470; yifan123/flow_grpo,
    flow_grpo/ocr.py).

    **Differs:** the engine is RapidOCR (PP-OCRv6 small, Chinese and English) instead of PaddleOCR
    2.9.1 English, so that absolute numbers are not comparable. An image on which the engine fails
    is NaN with a warning, and RewardError if it fails on all: the public code scores it 0. All
    white space is removed, not blanks alone. One quote without a second is an error here, the rest
    of the prompt there.

    `confidence`: lines that the engine trusts no more than this are dropped. `threads`: 0 = as many
    as it likes.
    """

    judges_singly = True

    def __init__(self, *, key: str = "", confidence: float = 0.0, threads: int = 0) -> None:
        if not 0 <= confidence < 1:
            raise ConfigError(f"{WHO}: confidence: expected a number in [0, 1), got {confidence}")
        if threads < 0:
            raise ConfigError(
                f"{WHO}: threads: expected 0 (the engine chooses) or more, got {threads}"
            )
        self.key, self.confidence, self.threads = key, confidence, threads
        self._read: Reader | None = None  # made when first needed: the package is an extra

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record without a text to look for. Raises DataError."""
        target_of(record["prompt"], record, self.key, where)

    def probe(self) -> None:
        """Let the engine read a word. Raises RunError if the package or its models are missing, or
        it reads nothing."""
        card = Image.new("RGB", (256, 96), "white")
        ImageDraw.Draw(card).text((24, 20), "flow", fill="black", font=ImageFont.load_default(48))
        try:
            found = self._reader()(card)
        except RunError:
            raise
        except Exception as error:
            raise RunError(
                f"{WHO}: the OCR engine failed on a test image: {first_line(error)}"
            ) from error
        if not fold(found):
            raise RunError(f'{WHO}: the OCR engine read nothing on a test image of the word "flow"')

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Read and compare. Raises DataError for a prompt without target, RewardError if every
        reading fails."""
        # what should be read
        targets = []
        for prompt, record in zip(batch.prompts, batch.meta, strict=True):
            targets.append(target_of(prompt, record, self.key, f"{WHO}: prompt {prompt!r}"))
        # what is read; an engine may raise anything, and one odd image must not end a run
        read, failures, scores = self._reader(), [], []
        for place, (image, target) in enumerate(zip(to_pil(batch.images), targets, strict=True)):
            try:
                scores.append(similarity(read(image), target))
            except Exception as error:
                failures.append(f"image {place} ({target!r}): {first_line(error)}")
                scores.append(math.nan)
        # all failed is an error, some is a warning
        if failures and len(failures) == len(scores):
            raise RewardError(
                f"{WHO}: the OCR engine failed on all {len(scores)} images; {failures[0]}"
            )
        for failure in failures:
            warnings.warn(f"{WHO}: not scored (NaN): {failure}", RuntimeWarning, stacklevel=2)
        return torch.tensor(scores, dtype=torch.float32)

    def _reader(self) -> Reader:
        if self._read is None:
            self._read = _rapidocr(self.confidence, self.threads)
        return self._read


def target_of(prompt: str, record: dict[str, Any], key: str, where: str) -> str:
    """Return the text that an image should show. Raises DataError naming `where` if there is
    none."""
    if key:
        target = record.get(key)
        if not isinstance(target, str):
            raise DataError(f"{where}: expected the text to be drawn as {key!r}, got {target!r}")
    else:
        quoted = QUOTED.search(prompt)
        if quoted is None:
            raise DataError(
                f"{where}: expected the text to be drawn in straight double quotes, like a sign "
                f'that says "OPEN", got {prompt!r}; or name the field of the record with `key`'
            )
        target = quoted[1]
    if not fold(target):
        raise DataError(f"{where}: expected a text to be drawn that is not empty, got {target!r}")
    return target


def fold(text: str) -> str:
    """Drop white space and case."""
    return "".join(text.split()).lower()


def similarity(found: str, target: str) -> float:
    """Return 1 - min(edits, n) / n in [0, 1] for a target of n letters; 1 if `found` has it
    anywhere."""
    found, target = fold(found), fold(target)
    if target in found:
        return 1.0
    return 1 - min(edit_distance(found, target), len(target)) / len(target)


def edit_distance(a: str, b: str) -> int:
    """Count the insertions, deletions and substitutions that turn a into b (Levenshtein 1966)."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def _rapidocr(confidence: float, threads: int) -> Reader:
    try:
        import onnxruntime  # noqa: F401 - RapidOCR names it only when the first image comes
        from rapidocr import RapidOCR
    except ImportError as error:
        raise RunError(
            f"{WHO}: expected rapidocr and onnxruntime ({error}): {install('ocr')}"
        ) from error
    # every line that it finds, however unsure
    engine = RapidOCR(
        params={
            "Global.text_score": 0.0,
            "Global.use_cls": False,  # no turning of lines by 180 degrees, as in Flow-GRPO
            "Global.log_level": "error",  # else a line per image without text
            "EngineConfig.onnxruntime.intra_op_num_threads": threads or -1,
        }
    )

    # the confidence that counts is ours
    def read(image: Image.Image) -> str:
        result: Any = engine(image)
        lines = zip(result.txts or (), result.scores or (), strict=True)
        return "".join(text for text, score in lines if score > confidence)

    return read
