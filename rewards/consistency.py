"""Reward sets of images, and edits, by whether they stay consistent: PaCo-Reward (2512.04784), a
judge behind a server."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.types import RewardBatch

from ._common.prompts import SUB_PROMPT
from ._common.scorer import to_pil
from ._judge.answer import Answer, yes_no
from ._judge.ask import Job, Judge, fill, wordings
from ._judge.images import cut, first_source, grid_size, needs_source

WHO = "rewards.consistency"
WORDS = {
    "pair": 'Both images belong to one set, made from this theme: "{prompt}" Are they consistent '
    'with each other in style, logic and identity? Begin the answer with "Yes" or "No".',
    "criterion": "Do the two images meet this criterion? {criterion} Begin the answer with "
    '"Yes" or "No".',
    "keep": "The second image was made from the first by the instruction: '{prompt}'. Apart from "
    "what the instruction asks to change, is the second image consistent with the first in style, "
    'logic and identity? Begin the answer with "Yes" or "No".',
    "follow": "The second image was made from the first by the instruction: '{prompt}'. Does the "
    'second image do what the instruction asks? Begin the answer with "Yes" or "No".',
}


class consistency:
    """Score images [L, 3, H, W] by a judge's P(yes) -> [L] in [0, 1], NaN = an answer is missing.

    X-GenGroup/PaCo-RL at 08caac6. `mode` "grid": an image is cut into the cells that its prompt
    names ("2x2"), and the mean over all pairs of cells counts; with `criteria` the record's
    `criteria`, {dimension: texts}, are asked one by one: mean over pairs, over a dimension's
    criteria, over dimensions. "edit": ``sqrt(consistent * followed)``, the source shown first.
    P(yes) is sigmoid(lp(Yes) - lp(No)) of the first token; `variants` adds yes, YES, " Yes".
    `wordings` takes the place of flowrl's own words: `pair`, `criterion`, `keep`, `follow`.

    **Differs:** published code makes 0 of a failed request, of an answer without both tokens and of
    a dimension without criteria; here these are missing, or an error. A size such as 1024x1024 is
    no grid. Its shipped wording leaves out the criterion, so that all of a pair's questions are
    the same: `criteria: false`.
    """

    judges_singly = True
    writes = ("cache",)

    def __init__(
        self,
        *,
        mode: Literal["grid", "edit"] = "grid",
        criteria: bool = False,
        variants: bool = False,
        wordings: dict[str, str] | None = None,
        url: str = "http://localhost:8080",
        model: str = "PaCo-Reward-7B",
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
        # criteria are asked about a grid of images, not about an edit
        if mode not in ("grid", "edit") or (criteria and mode == "edit"):
            raise ConfigError(
                f"{WHO}: expected mode grid or edit, and criteria with grid alone, got {mode=}, "
                f"{criteria=}"
            )
        self.mode, self.criteria = mode, criteria
        self.words = _wordings(wordings)
        self.variants = variants
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
        """Refuse a record without a grid, a source or criteria. Raises DataError."""
        if self.mode == "edit":
            needs_source(record, where, WHO)
            return
        grid_size(str(record.get("prompt", "")), where, WHO)
        if self.criteria:
            criteria_of(record, where)

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score images, all questions at once."""
        images = to_pil(batch.images)
        scores = self._edits(batch, images) if self.mode == "edit" else self._grids(batch, images)
        return torch.tensor(scores, dtype=torch.float32).to(batch.images.device)

    def _grids(self, batch: RewardBatch, images: Sequence[Image.Image]) -> list[float]:
        # all questions of all images are asked together
        cells: list[Image.Image] = []
        jobs: list[Job] = []
        plans: list[dict[str, list[list[int]]]] = []  # of each image: {dimension: [jobs by text]}
        for i, (image, prompt) in enumerate(zip(images, batch.prompts, strict=True)):
            # each pair of an image's cells is compared under each text
            own = cut(image, *grid_size(prompt, f"image {i}", WHO), WHO)
            pairs = list(itertools.combinations(range(len(cells), len(cells) + len(own)), 2))
            cells += own
            plan: dict[str, list[list[int]]] = {}
            for dimension, texts in self._texts(prompt, batch.meta[i]).items():
                plan[dimension] = []
                for text in texts:
                    name = f"cells of image {i}, prompt {prompt[:80]!r}"
                    plan[dimension].append(list(range(len(jobs), len(jobs) + len(pairs))))
                    jobs += [Job(name, pair, text) for pair in pairs]
            plans.append(plan)
        # means over pairs, then over texts, then over dimensions
        found = self._ask(cells, jobs)
        scores = []
        for plan in plans:
            dimensions = []
            for asked in plan.values():
                values = [_mean([*map(found.__getitem__, places)]) for places in asked]
                dimensions.append(_mean(values))
            scores.append(_mean(dimensions))
        return scores

    def _texts(self, prompt: str, record: Mapping[str, Any]) -> dict[str, list[str]]:
        """Return the questions about a pair of cells, by dimension."""
        if not self.criteria:
            return {"": [fill(self.words["pair"], prompt=theme(prompt))]}
        asked = {}
        for dimension, texts in criteria_of(record, WHO).items():
            asked[dimension] = [fill(self.words["criterion"], criterion=text) for text in texts]
        return asked

    def _edits(self, batch: RewardBatch, images: Sequence[Image.Image]) -> list[float]:
        shown: list[Image.Image] = []
        jobs: list[Job] = []
        for i, (image, prompt) in enumerate(zip(images, batch.prompts, strict=True)):
            shown += [first_source(batch, i, WHO), image]
            for name in ("keep", "follow"):
                text = fill(self.words[name], prompt=prompt)
                label = f"image {i}, prompt {prompt[:80]!r}"
                jobs.append(Job(label, (len(shown) - 2, len(shown) - 1), text))
        found = self._ask(shown, jobs)
        return [math.sqrt(found[2 * i] * found[2 * i + 1]) for i in range(len(images))]

    def _ask(self, images: Sequence[Image.Image], jobs: Sequence[Job]) -> list[float]:
        def read(answer: Answer) -> float | str:
            return yes_no(answer, variants=self.variants)

        found = self.judge.ask(images, jobs, read)
        return [math.nan if value is None else value for value in found]


def theme(prompt: str) -> str:
    """Return what a prompt says before the texts of its cells, "[LEFT]: ...", with a full stop at
    its end, as the code has it."""
    first = SUB_PROMPT.split(prompt)[0]
    return first if first.rstrip().endswith(".") else f"{first}."


def criteria_of(record: Mapping[str, Any], where: str) -> dict[str, list[str]]:
    """Return a record's criteria by dimension, at least one each. Raises DataError."""
    given = record.get("criteria")
    found: dict[str, list[str]] = {}
    for dimension, texts in given.items() if isinstance(given, dict) else ():
        listed = list(texts.values()) if isinstance(texts, dict) else texts
        if isinstance(listed, list):
            found[str(dimension)] = [text for text in listed if isinstance(text, str) and text]
    if not found or not all(found.values()):
        raise DataError(
            f"{where}: {WHO}: expected criteria, {{dimension: texts}} with a text or more each, "
            f"got {given!r}"
        )
    return found


def _wordings(given: dict[str, str] | None) -> dict[str, str]:
    return wordings(WORDS, given, WHO)


def _mean(values: Sequence[float]) -> float:
    """Average values; NaN where one is."""
    return math.fsum(values) / len(values)
