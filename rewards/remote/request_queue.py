"""Join the requests of several clients into batches for the rewards, which one thread calls."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import FAILURES, FlowRLError, RewardError, RunError, describe_error
from flowrl.core.types import Reward, RewardBatch, Source
from flowrl.evaluation.reward_call import call_reward, checked_scores, own_batch

Answer = dict[str, list[float | None]]
"""{name of a reward: one number per image}; None where it gave NaN."""


class ScoreRequest(NamedTuple):
    """Images or videos that one client wants scored; they stay together, in their order."""

    # [L, 3, H, W] or [L, T, 3, H, W] uint8, a quarter of what floats would take while they wait
    pixels: Tensor
    prompts: list[str]  # [L]
    group: Tensor  # [L] int64, the client's own numbers
    meta: list[dict[str, Any]]  # [L]
    sigma: Tensor  # [L] float32
    names: tuple[str, ...]  # rewards that are asked for
    source: list[Source] = []  # [L] what each started from, or nothing


class _Waiting(NamedTuple):
    request: ScoreRequest
    future: Future[Answer]
    due: float  # time.monotonic() at which it is scored even if the batch is not full


@dataclass
class QueueCounts:
    """What was done since the start."""

    images: int = 0  # scored by every reward that was asked for
    batches: int = 0  # calls with joined requests, or with one alone
    failures: int = 0  # requests that could not be scored
    unscored: dict[str, int] = field(default_factory=dict)  # {reward: images that it gave NaN}
    calls: dict[str, int] = field(default_factory=dict)  # {reward: calls that returned}
    seconds: dict[str, float] = field(default_factory=dict)  # {reward: seconds in those calls}


class RequestQueue:
    """Score requests in one thread of its own, several in one call where they fit together.

    Requests fit together if they ask for the same rewards and their images have the same size.
    They are joined up to `batch` images, frames of videos counted each, or until the oldest has
    waited `max_wait_s` seconds. A request is never split, so a larger one is a batch of its own.
    Group numbers of different requests are made distinct, so that a reward that compares the images
    of a prompt compares within one request only.
    """

    def __init__(
        self, rewards: Mapping[str, Reward], *, batch: int = 64, max_wait_s: float = 0.005
    ) -> None:
        self.rewards, self.batch, self.max_wait_s = dict(rewards), batch, max_wait_s
        zero = dict.fromkeys(self.rewards, 0)
        self.counts = QueueCounts(
            unscored=dict(zero), calls=dict(zero), seconds=dict.fromkeys(self.rewards, 0.0)
        )
        self._queue: list[_Waiting] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, request: ScoreRequest) -> Future[Answer]:
        """Queue a request. The future raises what the reward raised; cancel it if nobody waits any
        more."""
        future: Future[Answer] = Future()
        with self._changed:
            if self._closed:
                raise RunError("the server is shutting down")
            self._queue.append(_Waiting(request, future, time.monotonic() + self.max_wait_s))
            self._changed.notify()
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[Answer]) -> None:
        """Let go of the images of a request that nobody waits for any more."""
        if future.cancelled():
            with self._changed:
                self._queue = [job for job in self._queue if job.future is not future]

    def waiting(self) -> tuple[int, int]:
        """Return how many requests and how many images are queued, without those in the batch
        being scored."""
        with self._changed:
            return len(self._queue), sum(len(job.request.prompts) for job in self._queue)

    def close(self, *, wait: bool = True) -> None:
        """Take no more requests; with `wait` return once those that are queued are answered."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if wait:
            self._thread.join()

    def _work(self) -> None:
        while jobs := self._next():
            live = [job for job in jobs if job.future.set_running_or_notify_cancel()]
            if live:
                self._score(live)

    def _next(self) -> list[_Waiting]:
        """Wait for a batch: full, due, or the last ones before closing; empty once closed."""
        with self._changed:
            while True:
                jobs, full = self._fitting()
                if not jobs and self._closed:
                    return []
                left = jobs[0].due - time.monotonic() if jobs else None
                if left is not None and (full or self._closed or left <= 0):
                    chosen = set(map(id, jobs))
                    self._queue = [job for job in self._queue if id(job) not in chosen]
                    return jobs
                self._changed.wait(left)

    def _fitting(self) -> tuple[list[_Waiting], bool]:
        """Return the oldest request with those that join it, and whether waiting longer could add
        none."""
        if not self._queue:
            return [], False
        first, *others = self._queue
        jobs, room, full = [first], self.batch - _images_of(first.request), False
        for job in others:
            if _key(job.request) != _key(first.request):
                continue
            if _images_of(job.request) <= room:
                jobs.append(job)
                room -= _images_of(job.request)
            else:
                full = True
        return jobs, full or room <= 0

    def _score(self, jobs: Sequence[_Waiting]) -> None:
        """Answer requests; if they fail together each is tried alone, so that one bad image fails
        one request."""
        # all together
        try:
            answers = self._call([job.request for job in jobs])
        except FAILURES as raised:  # whatever a reward may raise: the thread has to live on
            error = _for_a_future(raised)
        else:
            for job, answer in zip(jobs, answers, strict=True):
                self.counts.images += len(job.request.prompts)
                job.future.set_result(answer)
            return
        # each alone
        if len(jobs) > 1:
            for job in jobs:
                self._score([job])
            return
        # a failure; flowrl's own errors say all by themselves
        self.counts.failures += 1
        trace = None if isinstance(error, FlowRLError) else error
        # half of a surrogate pair is no UTF-8, so a log could not be written
        said = str(error).encode("utf-8", "backslashreplace").decode()
        logging.getLogger("rewards.remote.server").warning(
            "a request was not scored: %s", said, exc_info=trace
        )
        jobs[0].future.set_exception(error)

    @torch.no_grad()
    def _call(self, requests: Sequence[ScoreRequest]) -> list[Answer]:
        batch, sizes = join(requests), [len(request.prompts) for request in requests]
        answers: list[Answer] = [{} for _ in requests]
        self.counts.batches += 1
        for name in requests[0].names:
            began = time.perf_counter()
            found = call_reward(self.rewards[name], own_batch(batch))
            values = checked_scores(name, found, batch, "the server")
            self.counts.seconds[name] += time.perf_counter() - began
            self.counts.calls[name] += 1
            self.counts.unscored[name] += int(values.isnan().sum())
            for answer, part in zip(answers, values.split(sizes), strict=True):
                answer[name] = [None if math.isnan(value) else value for value in part.tolist()]
        return answers


def _for_a_future(raised: BaseException) -> Exception:
    """Return what a request's future raises: a SystemExit would end the thread that waits for it,
    so it becomes a message that names the line."""
    if isinstance(raised, Exception):
        return raised
    message = RewardError(f"a reward failed with {describe_error(raised)}")
    message.__cause__ = raised
    return message


def join(requests: Sequence[ScoreRequest]) -> RewardBatch:
    """Put requests one after the other, with the groups numbered through -> what the rewards
    see."""
    groups: list[Tensor] = []
    taken = 0
    for request in requests:
        ids, place = torch.unique(request.group, return_inverse=True)
        groups.append(place + taken)
        taken += len(ids)
    return RewardBatch(
        # the division that gave the client's rounded images, so that both hold the same floats
        images=torch.cat([request.pixels for request in requests]).float() / 255,
        prompts=[prompt for request in requests for prompt in request.prompts],
        group=torch.cat(groups),
        meta=[record for request in requests for record in request.meta],
        sigma=torch.cat([request.sigma for request in requests]),
        source=_joined_sources(requests),
    )


def _joined_sources(requests: Sequence[ScoreRequest]) -> list[Source]:
    joined: list[Source] = []
    for request in requests:
        joined += request.source or [()] * len(request.prompts)
    return joined if any(joined) else []


def _images_of(request: ScoreRequest) -> int:
    return request.pixels.shape[:-3].numel()


def _key(request: ScoreRequest) -> tuple[Any, ...]:
    return request.names, request.pixels.shape[1:]
