"""Reward images by a judge's answers to the questions of their own prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import DataError
from flowrl.core.types import RewardBatch

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
from .._judge.images import EncodedImage, encode
from .protocols import Benchmark, Dpg, GenEval2, Slips, UniGenBench

WHO = "rewards.questions"


class _Job(NamedTuple):
    """One question about one image."""

    image: int
    number: int
    text: str


class questions:
    """Ask a judge what a benchmark's record asks of each image -> [L] in [0, 1], NaN = an answer is
    missing.

    `protocol` is "dpg", "unigenbench" or "geneval2" (`rewards/questions/protocols.py` says how each
    asks and counts, and where it differs). The judge is a vision-language model behind an
    OpenAI-compatible server at `url`. An image of which one answer could not be read has no score;
    more than the share `max_failed` of answers is a RunError. `cache` keeps answers.
    `geometric` is GenEval 2's prompt-level mean. What published code does otherwise are the options
    `skips_first_question`, `zeroes_in_listed_order`, `other_answers_mean_no` and
    `categories_of_last_image`, all of DPG-Bench.
    """

    judges_singly = True
    writes = ("cache",)

    def __init__(
        self,
        *,
        protocol: Literal["dpg", "unigenbench", "geneval2"],
        url: str = "http://localhost:8080",
        model: str = "judge",
        api_key_env: str | None = None,
        timeout: float = 120.0,
        retries: int = 5,
        backoff: float = 1.0,
        workers: int = 16,
        max_failed: float = 0.0,
        max_tokens: int | None = None,
        encoding: Literal["jpeg", "png"] = "png",
        cache: str | None = None,
        geometric: bool = False,
        skips_first_question: bool = False,
        zeroes_in_listed_order: bool = False,
        other_answers_mean_no: bool = False,
        categories_of_last_image: bool = False,
        extra: dict[str, Any] | None = None,
    ) -> None:
        # known faults of the published code, each only on request
        slips = Slips(
            skips_first_question,
            zeroes_in_listed_order,
            other_answers_mean_no,
            categories_of_last_image,
        )
        # the benchmark says what is asked, how answers are read, and what they are worth
        kinds: dict[str, Benchmark] = {
            "dpg": Dpg(slips),
            "unigenbench": UniGenBench(),
            "geneval2": GenEval2(geometric),
        }
        self.benchmark = kinds[protocol]
        # everything else says how the judge is reached
        self.server = check_server(
            Server(
                base_url(url, WHO),
                api_key_env,
                timeout,
                retries,
                backoff,
                workers,
                max_failed,
                WHO,
            )
        )
        self.settings = request_settings(model, self.benchmark.log_probs, max_tokens, extra, WHO)
        self.encoding = encoding
        self.cache = Path(cache).expanduser() if cache is not None else None

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record without the benchmark's questions. Raises DataError."""
        self.benchmark.check(record, where)

    def probe(self) -> None:
        """Ask the server for its models. Raises RunError if it does not offer `model`."""
        check_offered(self.server, self.settings["model"])

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score images [L, 3, H, W]."""
        return self.explain(batch)[0]

    def explain(self, batch: RewardBatch) -> tuple[Tensor, list[dict[str, Any]]]:
        """Score images -> scores [L], and a row each: prompt, what was asked, the answers."""
        # every image has a record with its questions
        if len(batch.meta) != len(batch.images):
            raise DataError(f"{WHO}: expected one record per image, got {len(batch.meta)}")
        for place, record in enumerate(batch.meta):
            self.check_record(record, f"{WHO}: image {place}")
        answers = self._answers(batch)
        # a missing answer makes the image's score NaN: part of the questions is another score
        rows = []
        for record, values in zip(batch.meta, answers, strict=True):
            whole = all(value is not None for value in values)
            score = self.benchmark.score(record, values) if whole else torch.nan
            asked = self.benchmark.names(record)
            row = {"tag": record.get("tag", ""), "prompt": record["prompt"], "asked": asked}
            rows.append({**row, "answers": values, "score": score})
        # JSON has no NaN, so rows say None
        scores = torch.tensor([row["score"] for row in rows], dtype=torch.float32)
        for row in rows:
            row["score"] = row["score"] if row["score"] == row["score"] else None
        return scores.to(batch.images.device), rows

    def tables(self, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return the benchmark's own numbers from rows of `explain`; images without a score are
        left out."""
        return self.benchmark.tables([row for row in rows if row["score"] is not None])

    def _answers(self, batch: RewardBatch) -> list[list[Any]]:
        """Return the value of every answer, None where there is none."""
        images = [encode(image, self.encoding) for image in to_pil(batch.images)]
        jobs: dict[str, _Job] = {}
        places: list[list[str]] = []
        for image, record in enumerate(batch.meta):
            keys = []
            for number, text in enumerate(self.benchmark.ask(record)):
                keys.append(self._key(images[image], text, number))
                # an equal image of another record: what is right there may be wrong here
                before = jobs.get(keys[-1])
                if before is not None and batch.meta[before.image] != record:
                    other = hashlib.sha256(json.dumps(record, sort_keys=True).encode())
                    keys[-1] = f"{keys[-1]}-{other.hexdigest()[:16]}"
                jobs.setdefault(keys[-1], _Job(image, number, text))
            places.append(keys)
        found = self._ask(jobs, images, batch.meta)
        return [[*map(found.get, keys)] for keys in places]

    def _ask(
        self, jobs: dict[str, _Job], images: list[EncodedImage], records: Sequence[dict[str, Any]]
    ) -> dict[str, Any]:
        # the benchmark reads an answer by its record; where it cannot, a message needs the answer
        def read(key: str, answer: Answer) -> Any:
            job = jobs[key]
            value = self.benchmark.read(answer, records[job.image], job.number)
            unread = isinstance(value, str)
            return f"{value} in the answer {answer.text[:160]!r}" if unread else value

        def question(key: str) -> JudgeQuestion:
            return self._question(images, jobs[key])

        return find_answers(self.server, self.cache, jobs, read, question).values

    def _key(self, image: EncodedImage, text: str, number: int) -> str:
        asked = [self.settings, text, number, image.digest]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()

    def _question(self, images: list[EncodedImage], job: _Job) -> JudgeQuestion:
        def body() -> dict[str, Any]:
            shown = {"type": "image_url", "image_url": {"url": images[job.image].url}}
            content = [shown, {"type": "text", "text": job.text}]
            return {**self.settings, "messages": [{"role": "user", "content": content}]}

        return JudgeQuestion(f"image {job.image}, question {job.text[:80]!r}", body)
