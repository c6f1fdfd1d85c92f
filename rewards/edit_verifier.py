"""Reward edits by a judge that checks principles one by one, or gives an expected score: Edit-R1,
which is two projects."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

from ._common.scorer import to_pil
from ._judge.answer import Answer, level, yes_no
from ._judge.ask import Job, Judge, fill, wordings
from ._judge.images import first_source, needs_source

WHO = "rewards.edit_verifier"
KINDS = ("keep", "follow", "quality")  # always in this order
LINE = re.compile(r"^\W*(keep|follow|quality)\W*:\s*(.+?)\s*$", re.IGNORECASE | re.MULTILINE)
WORDS = {
    "level": "The second image was made from the first by this instruction: {prompt}\n"
    "{requirement}\nHow well was that done, with everything else left as it was? Answer with a "
    "single digit from 0 (not at all) to 5 (perfectly).",
    "check": "The second image was made from the first by this instruction: {prompt}\nCheck one "
    'thing alone: {criterion}\nDoes it hold? Begin the answer with "Yes" or "No".',
    "principles": "This image is to be edited by the instruction: {prompt}\nName what has to be "
    "checked in the result, one thing a line and nothing else: lines that begin with 'Keep:' for "
    "what must not change, 'Follow:' for what the instruction asks, 'Quality:' for what has to "
    "look right. At least one line of each.",
}
USUAL = {
    "keep": "Whatever the instruction does not mention is as in the first image.",
    "follow": "The instruction was carried out, completely and correctly.",
    "quality": "The second image is free of artefacts and looks natural.",
}


class Principle(NamedTuple):
    """One thing to check."""

    kind: str  # keep, follow or quality
    text: str


class edit_verifier:
    """Score edits [L, 3, H, W], each beside its source -> [L] in [0, 1], NaN = one answer missing.

    `protocol` "principles" (2604.27505; **reconstruction**, its code is not public): each principle
    of three kinds is a question of its own, P(yes) from the first token; the mean of each kind,
    then these means weighted by `keep`, `follow` and `quality`. Principles are those of the record
    (`principles`: {kind: texts}); or, with `principles: ask`, written by the judge from source and
    instruction; or, with `usual`, three that suit every edit. **Differs:** there one model thinks
    aloud over all principles and writes the score.
    "level" (PKU-YuanGroup/Edit-R1 at 4217f25): the mean digit of 0 to 5 under the first token's
    probabilities, / 5; the record's `requirement` is told too. **Differs:** there a failure scores
    0; here it is missing. `wordings` takes the place of flowrl's own words: `level`, `check`,
    `principles`.
    """

    judges_singly = True
    writes = ("cache",)

    def __init__(
        self,
        *,
        protocol: Literal["principles", "level"] = "principles",
        principles: Literal["record", "ask", "usual"] = "usual",
        keep: float = 1.0,
        follow: float = 1.0,
        quality: float = 1.0,
        wordings: dict[str, str] | None = None,
        url: str = "http://localhost:8080",
        model: str = "judge",
        api_key_env: str | None = None,
        timeout: float = 120.0,
        retries: int = 5,
        backoff: float = 1.0,
        workers: int = 16,
        max_failed: float = 0.1,
        encoding: Literal["jpeg", "png"] = "png",
        cache: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        # refuse what cannot be before the judge is asked
        if protocol not in ("principles", "level"):
            raise ConfigError(f"{WHO}: protocol: expected principles or level, got {protocol!r}")
        if principles not in ("record", "ask", "usual"):
            raise ConfigError(
                f"{WHO}: principles: expected record, ask or usual, got {principles!r}"
            )
        if not all(0 <= one < math.inf for one in (keep, follow, quality)) or keep + follow <= 0:
            raise ConfigError(
                f"{WHO}: expected weights keep, follow, quality >= 0, not both of keep and follow "
                f"0, got {keep, follow, quality}"
            )
        # what is asked, and how much each answer counts
        self.protocol, self.principles = protocol, principles
        self.weights = dict(zip(KINDS, (keep, follow, quality), strict=True))
        self.words = _wordings(wordings)
        # everything else says how the judge is reached
        self.judge = Judge(
            WHO,
            url=url,
            model=model,
            api_key_env=api_key_env,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            workers=workers,
            max_failed=max_failed,
            encoding=encoding,
            cache=cache,
            extra=extra,
        )

    def probe(self) -> None:
        """Ask the server for its models. Raises RunError."""
        self.judge.probe()

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record without a source, or without principles where it must have them. Raises
        DataError."""
        needs_source(record, where, WHO)
        if self.protocol == "principles" and self.principles == "record":
            asked = {one.kind for one in principles_of(record, where)}
            if not any(self.weights[kind] for kind in asked):
                raise DataError(
                    f"{where}: {WHO}: all principles of this record are of kinds whose weight is "
                    f"0, so it could never be scored: {', '.join(sorted(asked))}; give one a weight"
                )

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each edit."""
        images: list[Image.Image] = []
        for i, image in enumerate(to_pil(batch.images)):
            images += [first_source(batch, i, WHO), image]
        ask = self._levels if self.protocol == "level" else self._checks
        return torch.tensor(ask(batch, images), dtype=torch.float32).to(batch.images.device)

    def _levels(self, batch: RewardBatch, images: Sequence[Image.Image]) -> list[float]:
        jobs = []
        for i, (prompt, record) in enumerate(zip(batch.prompts, batch.meta, strict=True)):
            requirement = str(record.get("requirement") or "")
            text = fill(self.words["level"], prompt=prompt, requirement=requirement)
            jobs.append(Job(f"image {i}, prompt {prompt[:80]!r}", (2 * i, 2 * i + 1), text))
        return [_number(value) for value in self.judge.ask(images, jobs, level)]

    def _checks(self, batch: RewardBatch, images: Sequence[Image.Image]) -> list[float]:
        jobs, owner = [], list[tuple[int, str]]()
        listed = self._principles(batch, images)
        for i, (prompt, mine) in enumerate(zip(batch.prompts, listed, strict=True)):
            for kind, text in mine or ():
                if self.weights[kind]:
                    asked = fill(self.words["check"], prompt=prompt, criterion=text)
                    jobs.append(Job(f"image {i}, {kind}: {text[:80]!r}", (2 * i, 2 * i + 1), asked))
                    owner.append((i, kind))
        found: list[dict[str, list[float]]] = [{} for _ in batch.prompts]
        for (i, kind), value in zip(owner, self.judge.ask(images, jobs, yes_no), strict=True):
            found[i].setdefault(kind, []).append(_number(value))
        return [aggregated(checks, self.weights) for checks in found]

    def _principles(
        self, batch: RewardBatch, images: Sequence[Image.Image]
    ) -> list[list[Principle] | None]:
        """Return what is checked in each image; None where the judge named nothing."""
        if self.principles == "usual":
            usual = [Principle(kind, USUAL[kind]) for kind in KINDS]
            return [usual for _ in batch.prompts]
        if self.principles == "record":
            return [principles_of(record, WHO) for record in batch.meta]
        jobs = []
        for i, prompt in enumerate(batch.prompts):
            text = fill(self.words["principles"], prompt=prompt)
            jobs.append(Job(f"principles of {prompt[:80]!r}", (2 * i,), text))
        return self.judge.ask(images, jobs, read_principles, written=True)


def principles_of(record: Mapping[str, Any], where: str) -> list[Principle]:
    """Return a record's principles, kinds in their fixed order. Raises DataError."""
    given = record.get("principles")
    rows = given if isinstance(given, dict) else {}
    fine = not set(rows) - set(KINDS)
    found: list[Principle] = []
    for kind in KINDS:
        texts = rows.get(kind, [])
        fine = fine and isinstance(texts, list) and all(map(_is_text, texts))
        found += [Principle(kind, text) for text in texts] if fine else []
    if not fine or not found:
        raise DataError(
            f"{where}: {WHO}: expected principles, {{keep, follow, quality: texts}}, got {given!r}"
        )
    return found


def read_principles(answer: Answer) -> list[Principle] | str:
    """Read the lines that a judge wrote, kinds in their fixed order; or say what is wrong."""
    rows = [Principle(kind.lower(), text) for kind, text in LINE.findall(answer.text)]
    if {row.kind for row in rows} != set(KINDS):
        cut = " (it was cut off at max_tokens)" if answer.cut else ""
        return f"no line of Keep:, Follow: and Quality: each{cut} in {answer.text[:160]!r}"
    return sorted(rows, key=lambda row: KINDS.index(row.kind))


def aggregated(checks: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> float:
    """Average each kind's checks, then the kinds by their weights; NaN where a check is missing or
    none was made."""
    total = math.fsum(weights[kind] for kind in checks)
    if not total:
        return math.nan
    means = [weights[kind] * math.fsum(values) / len(values) for kind, values in checks.items()]
    return math.fsum(means) / total


def _wordings(given: dict[str, str] | None) -> dict[str, str]:
    return wordings(WORDS, given, WHO)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _number(value: float | None) -> float:
    return math.nan if value is None else value
