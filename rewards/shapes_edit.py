"""Reward edits of coloured shapes: the asked change was made, and nothing else changed."""

from __future__ import annotations

import hashlib
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.suites.shapes.edits import EditVerdict, check_edits, validate_edit
from flowrl.evaluation.suites.shapes.scene import SIZE

MODES = ("graded", "strict", "kept", "done", "both")


class _Judged(NamedTuple):
    """The last batch and what was found on it: all modes in one run look at equal images."""

    key: bytes
    verdict: EditVerdict


_last: _Judged | None = None


def _judge(images: Tensor, sources: Tensor, records: list[dict[str, Any]]) -> EditVerdict:
    """Judge edits, or return what was found on the last ones if their contents are equal."""
    global _last
    key = hashlib.blake2b(f"{images.dtype}{[*images.shape]}{records}".encode())
    for pixels in (images, sources):
        key.update(pixels.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    seen = _last
    if seen is None or seen.key != key.digest():
        seen = _last = _Judged(key.digest(), check_edits(images, sources, records))
    return seen.verdict


class shapes_edit:
    """Score edits [L, 3, H, W] of sources of that size: "graded" in [0, 1], 1 exactly where
    strictly right and 0 for a copy of the source, or "strict", 0 or 1.

    "kept" is how well all else is as it was, "done" how well the asked change is there, both in [0,
    1], and "both" ``sqrt(kept * done)``: PaCo-RL's reward of edits (2512.04784), consistency and
    following, with an exact checker in place of its judge. What counts is in
    flowrl/evaluation/suites/shapes/edits.py, which reads 64 x 64 pixels; with `resize`,
    images and sources of another size are scaled to that, for a policy that is trained on small
    images. A batch without sources, or a source that does not have the object of the edit, is a
    DataError.
    """

    judges_singly = True

    def __init__(
        self,
        *,
        mode: Literal["graded", "strict", "kept", "done", "both"] = "graded",
        resize: bool = False,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(
                f"rewards.shapes_edit: mode: expected one of {', '.join(MODES)}, got {mode!r}"
            )
        self.mode, self.says_right, self.resize = mode, mode == "strict", resize

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record that cannot be judged, before the first image is made."""
        validate_edit(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Judge each image by its own record and source: -> [L] float32."""
        if len(batch.source) != len(batch.images) or any(len(s) != 1 for s in batch.source):
            raise DataError(
                "rewards.shapes_edit: expected one source for each image; got "
                f"{len(batch.source)} for {len(batch.images)} images. Use a list "
                "whose records have `source`, such as assets/shapes-edits/train.jsonl."
            )
        if not len(batch.images):
            return torch.zeros(0)
        sources = torch.stack([source[0] for source in batch.source])
        verdict = _judge(self._sized(batch.images), self._sized(sources), batch.meta)
        if self.mode == "both":
            score: Tensor = (verdict.kept * verdict.done).sqrt()
        else:
            score = getattr(verdict, self.mode)
        return score.to(batch.images.device, torch.float32)

    def _sized(self, images: Tensor) -> Tensor:
        """Scale images [L, 3, H, W] to the checker's size, if that is asked for."""
        if not self.resize or images.shape[-2:] == (SIZE, SIZE):
            return images
        found = interpolate(images.float(), (SIZE, SIZE), mode="bicubic", antialias=True)
        return found.clamp(0, 1)
