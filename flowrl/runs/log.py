"""Write what happens in a run: its metrics, where the time went, and TensorBoard's events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from flowrl.core.errors import RunError
from flowrl.core.files import replacing
from flowrl.runs.folder import HISTOGRAMS, METRICS, TENSORBOARD, TIMING, all_numbers
from flowrl.runs.progress import COLUMNS, Progress
from flowrl.runs.trackers import open_trackers

LOGS = (METRICS, TIMING, HISTOGRAMS)
# phases of a few iterations only: they do not count for the time left
MILESTONES = ("eval", "samples", "save")
_told: set[str] = set()


class RunLogger:
    """Log one run into a folder.

    ``metrics.jsonl`` holds one object per iteration and nothing that depends on the clock, so that
    a resumed run ends with the same file as an uninterrupted one; NaN and infinity, which JSON
    lacks, are null. ``timing.jsonl`` holds the seconds of each phase, ``histograms.jsonl`` the
    rewards and advantages of each iteration, counted. Lines are flushed one by one.
    Raises RunError if the folder cannot be written, or if it holds the metrics of another run and
    `resume_from_iteration` is None.

    Args:
        folder: of the run. resume_from_iteration: the first iteration that will be logged again;
        lines from there on are dropped. tensorboard: also write TensorBoard events into
        ``<folder>/tensorboard``, where it is installed. quiet: show no progress and no hints.
        total: iterations of the whole run, for the time left. columns: {label: metric} shown in the
        progress line. track: names of `TRACKERS` that are told all of it, too, and the config.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        resume_from_iteration: int | None = None,
        tensorboard: bool = True,
        quiet: bool = False,
        *,
        total: int | None = None,
        columns: Mapping[str, str] = COLUMNS,
        track: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.current = ""  # the phase that is running, or that an error has just left
        begun = resume_from_iteration or 0
        self._progress = Progress(total=total, columns=columns, quiet=quiet, begun=begun)
        self._seconds: dict[str, float] = {}
        self._started: float | None = None
        self._files = self._open(resume_from_iteration)
        self._board = self._tensorboard(resume_from_iteration) if tensorboard else None
        self._trackers = open_trackers(track, self.folder, config or {}, self.say)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase `name` of the current iteration."""
        start = time.perf_counter()
        self._started = start if self._started is None else self._started
        self.current = name
        self._progress.begin(name)
        try:
            yield
            self.current = ""
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # kernels run on after their call returns; they belong to this phase
                torch.cuda.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def progress(self, done: int, total: int) -> None:
        """Show in a terminal how much of the running phase is done; a log file hears nothing."""
        self._progress.within(done, total)

    def log(
        self,
        iteration: int,
        metrics: Mapping[str, Any],
        *,
        images: int = 0,
        histograms: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the metrics of a finished iteration (numbers or one-element tensors) and show the
        progress.

        `images` is the number of images made in it, for the speed; `histograms` are its line of
        ``histograms.jsonl``. Ends the iteration's phase timers.
        """
        values = {name: _number(value) for name, value in metrics.items()}
        timing, usual = self._end_timers(images)
        # the two logs
        rounded = {name: None if s is None else round(s, 6) for name, s in timing.items()}
        self._write(METRICS, {"iteration": iteration, **values})
        self._write(TIMING, {"iteration": iteration, **rounded})
        if histograms:
            self._write(HISTOGRAMS, {"iteration": iteration, **histograms})
        # TensorBoard and the terminal
        times = {f"time/{name}": value for name, value in timing.items()}
        self._add_scalars(iteration, {**values, **times})
        self._progress.show(iteration, values, timing, seconds=usual)

    def image(self, name: str, one: Tensor, iteration: int) -> None:
        """Show an image [3, H, W] in [0, 1] in TensorBoard, where it is on, and to trackers."""
        for tracker in self._trackers:
            tracker.image(name, one, iteration)
        with self._board_or_none():
            if self._board is not None:
                self._board.add_image(name, one.detach().float().cpu(), iteration)

    def say(self, text: str) -> None:
        """Print a line to stderr without breaking the progress bar; nothing when quiet."""
        self._progress.say(text)

    def close(self) -> None:
        """Close all files; can be called twice."""
        for tracker in self._trackers:
            tracker.close()
        for file in self._files.values():
            # every line was flushed; what failed then was said then
            with contextlib.suppress(OSError):
                file.close()
        with self._board_or_none():
            if self._board is not None:
                self._board.close()
        self._board = None
        self._progress.close()

    def _open(self, resume: int | None) -> dict[str, IO[str]]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in LOGS:
                _prepare(self.folder / name, resume)
            return {name: (self.folder / name).open("a", encoding="utf-8") for name in LOGS}
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"cannot write to the run folder {self.folder}: {reason}") from error

    def _end_timers(self, images: int) -> tuple[dict[str, float | None], float]:
        """Return seconds of each phase and in all with the speed, and those that count for the time
        left: evaluations are rare."""
        now = time.perf_counter()
        total = now - self._started if self._started is not None else 0.0
        speed = images / total if total and images else None
        timing = {**self._seconds, "total": total, "images_per_s": speed}
        rare = sum(self._seconds.get(name, 0.0) for name in MILESTONES)
        self._started, self._seconds = now, {}
        return timing, max(total - rare, 0.0)

    def _write(self, name: str, values: dict[str, Any]) -> None:
        try:
            self._files[name].write(json.dumps(values, allow_nan=False) + "\n")
            self._files[name].flush()
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"cannot write {self.folder / name}: {reason}") from error

    def _add_scalars(self, iteration: int, values: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(iteration, values)
        board = self._board
        if board is None:
            return
        with self._board_or_none():
            for name, value in values.items():
                if isinstance(value, int | float):
                    board.add_scalar(name, value, iteration)

    @contextlib.contextmanager
    def _board_or_none(self) -> Iterator[None]:
        """Go on without TensorBoard where its events cannot be written, and say so: all that they
        hold is in the other logs."""
        try:
            yield
        except OSError as error:
            self._board = None
            reason = error.strerror or error
            self.say(f"TensorBoard's events cannot be written: {reason}; the run goes on without")

    def _tensorboard(self, purge_step: int | None) -> Any:
        """Open the events; None, said once, where TensorBoard is not installed."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            if "tensorboard" not in _told:
                _told.add("tensorboard")
                self.say(
                    "TensorBoard is not installed: metrics go to metrics.jsonl only (pip install "
                    "tensorboard)"
                )
            return None
        folder = self.folder / TENSORBOARD
        try:
            return SummaryWriter(str(folder), purge_step=purge_step)
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror or error}") from error


class Silence:
    """Stand in for a RunLogger in a process that neither writes nor talks."""

    current = ""

    def __enter__(self) -> Silence:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time nothing."""
        self.current = name
        yield
        self.current = ""

    def progress(self, done: int, total: int) -> None:
        """Show nothing."""

    def log(
        self,
        iteration: int,
        metrics: Mapping[str, Any],
        *,
        images: int = 0,
        histograms: Mapping[str, Any] | None = None,
    ) -> None:
        """Write nothing."""

    def image(self, name: str, one: Tensor, iteration: int) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Print nothing."""


def _prepare(file: Path, resume: int | None) -> None:
    """Drop the lines from iteration `resume` on and a torn last line; keep the rest byte for
    byte."""
    if file.exists() and not file.is_file():
        raise RunError(f"{file}: expected a file, got a folder, a pipe or a device; move it away")
    if not file.exists() or file.stat().st_size == 0:
        if resume and file.name == METRICS:
            warnings.warn(
                f"{file} is missing: the metrics before iteration {resume} are lost", stacklevel=4
            )
        return
    if resume is None:
        raise RunError(f"{file} holds another run: resume that run, or choose another folder")
    # the lines before it
    kept = []
    lines = file.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            iteration = row["iteration"]
            if type(iteration) is not int or (file.name == TIMING and not all_numbers(row)):
                raise TypeError(line)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise RunError(
                f"{file}, line {number}: expected an object with a whole iteration, of "
                "timing numbers only; repair or move the file"
            ) from error
        if iteration < resume:
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    with replacing(file) as draft:
        draft.write_bytes(b"".join(kept))


def _number(value: Any) -> Any:
    """Return what JSON can hold of a number, a NumPy scalar or a tensor of one element."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
