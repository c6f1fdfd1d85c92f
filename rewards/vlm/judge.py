"""Reward images by what a vision-language model says of them, asked over an OpenAI-compatible
server."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch

from .._common.pairs import verdict
from .._common.scorer import to_pil
from .._judge.accepting import find_answers
from .._judge.answer import Answer
from .._judge.client import (
    JudgeQuestion,
    Server,
    base_url,
    check_offered,
    check_server,
    request_settings,
)
from .._judge.images import EncodedImage, cut, encode, grid_size
from .answers import ReadingOptions, read
from .templates import LOG_PROB, PAIR, WORDING, fill, load_wording

Template = Literal[
    "pair_rank",
    "point",
    "acs",
    "pair_score",
    "think",
    "flex",
    "yes_no",
    "consistency",
    "level",
    "rating",
]
_USES = {  # the reading options that a template has; another one would do nothing
    "acs": {"axes"},
    "pair_score": {"axes"},
    "flex": {"w_overall", "w_dims"},
    "rating": {"pattern", "low", "high"},
    "yes_no": {"variants"},
    "consistency": {"variants"},
}


class _Job(NamedTuple):
    """One question."""

    name: str  # for messages: "image 3"
    shown: tuple[int, ...]  # which of the encoded images
    prompt: str
    place: int  # which score the answer belongs to


class vlm:
    """Ask a judge about single images (`__call__`) or pairs (`compare`, through rewards.win_rate)
    -> [0, 1] or NaN.

    `template` names the question and how its answer is read: pair_rank, pair_score, think, flex
    show two images; point, acs, rating, yes_no, level one; consistency all pairs of cells of an
    image that is a grid. A question that failed or whose answer cannot be read is NaN, never a
    score; more than the share `max_failed` of them is a RunError. Each question is asked at
    temperature 0; `cache` keeps answers that could be read. Formats: UnifiedReward at ff6f520,
    Pref-GRPO at 3e787f6, PaCo-RL at 08caac6, Q-Insight at 08308fd; `rewards/vlm/answers.py` says
    where the readers differ.
    """

    writes = ("cache",)

    def __init__(
        self,
        *,
        url: str = "http://localhost:8080",
        model: str = "UnifiedReward",
        template: Template = "pair_rank",
        template_file: str | None = None,
        template_sha256: str | None = None,
        api_key_env: str | None = None,
        timeout: float = 120.0,
        retries: int = 5,
        backoff: float = 1.0,
        workers: int = 16,
        max_failed: float = 0.1,
        max_tokens: int | None = None,
        encoding: Literal["jpeg", "png"] = "jpeg",
        cache: str | None = None,
        alignment: float = 1.0,
        coherence: float = 1.0,
        style: float = 1.0,
        w_overall: float = 1.0,
        w_dims: float = 1.0,
        pattern: str = r'"rating"\s*:\s*([\d.]+)',
        low: float = 1.0,
        high: float = 5.0,
        variants: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> None:
        axes = (alignment, coherence, style)
        self.how = check_reading(
            ReadingOptions(template, axes, w_overall, w_dims, pattern, low, high, variants)
        )
        self.server = check_server(
            Server(base_url(url), api_key_env, timeout, retries, backoff, workers, max_failed)
        )
        self.wording = load_wording(template, template_file, template_sha256)
        self.settings = request_settings(model, template in LOG_PROB, max_tokens, extra)
        self.encoding = encoding
        self.cache = Path(cache).expanduser() if cache is not None else None
        self.counts = {"asked": 0, "cached": 0, "failed": 0}

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a template or a prompt that single images cannot be scored with, before the
        first one is made."""
        self._refuse_pairs()
        self.check_compared(record, where)

    def check_compared(self, record: dict[str, Any], where: str) -> None:
        """Refuse a prompt whose images cannot be compared, before the first one is made."""
        if self.how.template == "consistency":
            grid_size(str(record.get("prompt", "")), where)

    @property
    def compares_pairs(self) -> bool:
        """Say whether the template shows two images; else rewards.win_rate compares scores."""
        return self.how.template in PAIR

    def probe(self) -> None:
        """Ask the server for its models. Raises RunError if it does not answer or does not offer
        `model`."""
        check_offered(self.server, self.settings["model"])

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score images [L, 3, H, W] one by one -> [L] float32 in [0, 1], NaN = no readable
        answer."""
        self._refuse_pairs()
        images = to_pil(batch.images)
        return self._scores(images, range(len(images)), batch.prompts).to(batch.images.device)

    def compare(
        self, first: Tensor, second: Tensor, prompts: list[str], meta: list[dict[str, Any]]
    ) -> Tensor:
        """Judge pairs [P, 3, H, W], `first` shown as Image 1 -> [P] float32: 1 first is better, 0
        second, .5 tie, NaN.

        pair_score gives the first one's share, flex its blend, instead of a bare verdict.
        """
        places = torch.arange(len(first))
        return self.compare_pairs(
            torch.cat([first, second]), places, places + len(first), prompts, meta
        )

    def compare_pairs(
        self,
        images: Tensor,
        first: Tensor,
        second: Tensor,
        prompts: list[str],
        meta: list[dict[str, Any]],
    ) -> Tensor:
        """Do what `compare` does for places first [P], second [P] of images [L, 3, H, W].

        A template for single images scores both, each once however many pairs it is in; the
        higher score wins.
        """
        pil_images, left, right = to_pil(images), first.tolist(), second.tolist()
        if not self.compares_pairs:
            scores = self._scores(pil_images, left + right, prompts + prompts)
            return verdict(scores[: len(left)], scores[len(left) :])
        rows = enumerate(zip(left, right, prompts, strict=True))
        jobs = [
            _Job(f"images {i} and {j}", (i, j), prompt, place) for place, (i, j, prompt) in rows
        ]
        return self._means(pil_images, jobs, len(jobs))

    def _refuse_pairs(self) -> None:
        if self.compares_pairs:
            raise ConfigError(
                f"rewards.vlm: the template {self.how.template} compares two images; write {{fn: "
                f"win_rate, judge: {{fn: vlm, template: {self.how.template}, ...}}}}"
            )

    def _scores(
        self, images: list[Image.Image], numbers: Sequence[int], prompts: list[str]
    ) -> Tensor:
        rows = list(enumerate(zip(numbers, prompts, strict=True)))
        if self.how.template != "consistency":
            jobs = [_Job(f"image {i}", (i,), prompt, place) for place, (i, prompt) in rows]
            return self._means(images, jobs, len(rows))
        cells: list[Image.Image] = []
        jobs = []
        for place, (i, prompt) in rows:
            own = cut(images[i], *grid_size(prompt, f"image {i}"))
            for a, b in itertools.combinations(range(len(own)), 2):
                shown = (len(cells) + a, len(cells) + b)
                jobs.append(_Job(f"cells {a} and {b} of image {i}", shown, prompt, place))
            cells += own
        return self._means(cells, jobs, len(rows))

    def _means(self, images: list[Image.Image], jobs: Sequence[_Job], count: int) -> Tensor:
        """Ask every job and average each place's answers -> [count] float32; NaN where none could
        be read."""
        encoded = [encode(image, self.encoding) for image in images]
        keys = [self._key(encoded, job) for job in jobs]
        found = self._ask(encoded, dict(zip(keys, jobs, strict=True)))
        value = torch.tensor([found.get(key, torch.nan) for key in keys], dtype=torch.float64)
        known, place = ~value.isnan(), torch.tensor([job.place for job in jobs], dtype=torch.int64)
        total = torch.zeros(count, dtype=torch.float64).index_add(0, place[known], value[known])
        return (total / torch.bincount(place[known], minlength=count)).float()

    def _key(self, encoded: list[EncodedImage], job: _Job) -> str:
        asked = [self.settings, self.wording, job.prompt, [encoded[i].digest for i in job.shown]]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def _ask(self, encoded: list[EncodedImage], jobs: dict[str, _Job]) -> dict[str, float]:
        def question(key: str) -> JudgeQuestion:
            return self._question(encoded, jobs[key])

        def value(key: str, answer: Answer) -> float | str:
            return read(answer, self.how)

        found = find_answers(self.server, self.cache, jobs, value, question)
        self.counts["asked"] += found.asked
        self.counts["cached"] += len(jobs) - found.asked
        self.counts["failed"] += found.failed
        return found.values

    def _question(self, encoded: list[EncodedImage], job: _Job) -> JudgeQuestion:
        def body() -> dict[str, Any]:
            shown = [{"type": "image_url", "image_url": {"url": encoded[i].url}} for i in job.shown]
            text = {"type": "text", "text": fill(self.wording, job.prompt)}
            return {**self.settings, "messages": [{"role": "user", "content": [*shown, text]}]}

        return JudgeQuestion(f"{job.name}, prompt {job.prompt[:80]!r}", body)


def check_reading(how: ReadingOptions) -> ReadingOptions:
    """Return the options; raises ConfigError for one that is wrong or that the template has no use
    for."""
    # a template, and only options that it reads
    if how.template not in WORDING:
        raise ConfigError(
            f"rewards.vlm: template: expected one of {', '.join(WORDING)}, got {how.template!r}"
        )
    for name, default in ReadingOptions._field_defaults.items():
        if getattr(how, name) != default and name not in _USES.get(how.template, set()):
            label = "alignment, coherence, style" if name == "axes" else name
            raise ConfigError(
                f"rewards.vlm: the template {how.template} makes no use of {label}; leave it out"
            )
    # numbers in their ranges
    if min(how.axes) < 0 or sum(how.axes) <= 0:
        raise ConfigError(
            "rewards.vlm: alignment, coherence, style: expected weights >= 0, not all 0, got "
            f"{how.axes}"
        )
    if min(how.w_overall, how.w_dims) < 0 or how.w_overall + how.w_dims <= 0:
        got = f"{how.w_overall} and {how.w_dims}"
        raise ConfigError(
            f"rewards.vlm: w_overall, w_dims: expected weights >= 0, not both 0, got {got}"
        )
    if not how.low < how.high:
        raise ConfigError(
            f"rewards.vlm: low, high: expected low < high, got {how.low} and {how.high}"
        )
    # a pattern with one number
    try:
        groups = re.compile(how.pattern).groups
    except re.error as error:
        raise ConfigError(
            f"rewards.vlm: pattern: expected a regular expression, got {how.pattern!r}: {error}"
        ) from None
    if groups != 1:
        raise ConfigError(
            f"rewards.vlm: pattern: expected one group in {how.pattern!r}, the number; got {groups}"
        )
    return how
