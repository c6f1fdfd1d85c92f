"""Write what happens in a run: metrics, timing and TensorBoard's events in its folder, the
progress in the terminal, and what experiment trackers are told."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from torch import Tensor

from flowrl.core.errors import RunError
from flowrl.core.files import replacing, sync
from flowrl.runs.folder import (
    EVALS,
    FINDINGS,
    HISTOGRAMS,
    METRICS,
    TIMING,
    parse_rows,
)
from flowrl.runs.trackers import BOARD, eval_numbers, open_trackers

PAUSE = 0.2  # seconds between two looks at a running phase
EVERY = 30.0  # seconds without a line of a log file, after which one says how far a phase is
RECENT = 20  # iterations that the time left is told from
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
COLUMNS = {"reward": "reward", "acc": "accuracy", "ratio": "ratio", "approx_kl": "approx_kl"}


def headline_label(name: str) -> str:
    """Return what the headline reward is called beside `reward`, the sum: by its name."""
    if name in COLUMNS:
        return f"{name} alone"
    return name


class Progress:
    """Show the time left, the speed and the metrics of each iteration and the seconds of its
    phases; also the phase that is running and how much of it is done: a terminal at once, a log
    file after `EVERY` seconds without a line.

    Args:
        total: iterations of the whole run, for the time left; None where it ends otherwise.
        columns: {label: metric} that is shown. quiet: show nothing at all. begun: iterations that
        are done already. images: {phase: images that it is about}, which a log file counts. every:
        {phase of `MILESTONES`: iterations from one to the next}, for the time left.
    """

    def __init__(
        self,
        *,
        total: int | None = None,
        columns: Mapping[str, str] = COLUMNS,
        quiet: bool = False,
        begun: int = 0,
        images: Mapping[str, int] | None = None,
        every: Mapping[str, int] | None = None,
    ) -> None:
        self.total, self.columns, self.quiet, self.begun = total, columns, quiet, begun
        self.images, self.every = images or {}, every or {}
        self.gained = ""  # on the held-out prompts so far
        self._rare: dict[str, float] = {}  # seconds that each rare phase took when it last was
        self._said = time.monotonic()  # when the last line of a log file was written
        self._durations: list[float] = []
        self._phase, self._last, self._looked = "", "", 0.0
        self._bar: Any = None  # the progress, and below it the seconds of each phase
        self._line: Any = None

    def say(self, text: str) -> None:
        """Print a line without breaking the bar; nothing when quiet."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)
            self._said = time.monotonic()

    def begin(self, phase: str) -> None:
        """Show in a terminal that a phase of the iteration has begun."""
        self._phase = phase
        if not self.quiet and sys.stderr.isatty():
            self._look(phase)

    def within(self, done: int, total: int) -> None:
        """Show how much of the phase is done: in a terminal a few times a second at most, in a log
        file after `EVERY` seconds without a line."""
        if self.quiet or total < 2:
            return
        if not sys.stderr.isatty():
            if time.monotonic() - self._said >= EVERY:
                self.say(self._how_far(done, total))
            return
        if time.monotonic() - self._looked >= PAUSE or done == total:
            of = f"{done}/{total}"
            if self._phase in MILESTONES and self._phase in self.images:
                count = self.images[self._phase]
                of = f"{done * count // total}/{count} images"
            self._look(f"{self._phase} {of}")

    def _how_far(self, done: int, total: int) -> str:
        """Say how much of a phase is done, in images where it is about images."""
        what = f"{done} of {total}"
        if self._phase in self.images:
            count = self.images[self._phase]
            what = f"{done * count // total} of {count} images"
        if self._phase in MILESTONES:
            return f"{self._phase}: {what}"
        return f"{self._named(self.begun + len(self._durations))}  {self._phase}: {what}"

    def _named(self, iteration: int) -> str:
        """Name an iteration as people count, and of how many it is: "iteration 3/200"."""
        if self.total:
            return f"iteration {iteration + 1}/{self.total}"
        return f"iteration {iteration + 1}"

    def _look(self, now: str) -> None:
        """Write the line below the bar: what is being done, and the last iteration's seconds."""
        if self._bar is None:
            self._open_bar(self.begun)
        if self._last:
            now += f"  before: {self._last}"
        self._bar.refresh()  # its clock
        self._line.set_description_str(now)
        self._looked = time.monotonic()

    def show(
        self,
        iteration: int,
        values: Mapping[str, Any],
        timing: Mapping[str, float | None],
        *,
        seconds: float,
    ) -> None:
        """Show a finished iteration; `seconds` is what of its time the others will take, too."""
        self._durations.append(seconds)
        for name in MILESTONES:
            self._rare[name] = timing.get(name) or self._rare.get(name, 0.0)
        if self.quiet:
            return
        text = "  ".join(self._parts(iteration, values, timing["images_per_s"]))
        phases = [name for name in timing if name != "images_per_s"]
        times = " ".join(f"{name} {timing[name]:.2f}s" for name in phases)
        # a log file gets a line for each iteration
        if not sys.stderr.isatty():
            self.say(f"{self._named(iteration)}  {text}  [{times}]")
            return
        # a terminal gets a bar: metrics on it, the phases' seconds below it
        if self._bar is None:
            self._open_bar(iteration)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(1)
        self._last = times
        self._line.set_description_str(times)

    def close(self) -> None:
        """Close the bar; can be called twice."""
        if self._bar is not None:
            self._line.close()
            self._bar.close()
            self._bar = self._line = None

    def _parts(self, iteration: int, values: Mapping[str, Any], speed: float | None) -> list[str]:
        """Return time left, speed and metrics as texts; a narrow terminal shows the first ones."""
        parts = []
        if self.total:
            parts.append(f"ETA {_clock(self._left(iteration + 1, self.total))}")
        if speed:
            parts.append(f"{speed:.3g} img/s")
        for label, name in self.columns.items():
            if _is_number(values.get(name)):
                parts.append(f"{label} {values[name]:.4g}")
        if self.gained:  # follows the reward, which comes first
            parts.insert(3, f"gain {self.gained}")
        return parts

    def _left(self, done: int, total: int) -> float:
        """Return the seconds that a run will take which has done so many iterations."""
        # one long wait, as of a machine that slept, says nothing of the iterations to come
        left = max(total - done, 0) * median(self._durations[-RECENT:])
        # beside them, what is due from now on, and at the end
        for name, every in self.every.items():
            times = 1
            if every:
                times = total // every - (done - 1) // every + (total % every > 0)
            left += times * self._rare.get(name, 0.0)
        return left

    def _open_bar(self, iteration: int) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped]

        both = {"file": sys.stderr, "dynamic_ncols": True}
        self._bar = tqdm(total=self.total, initial=iteration, bar_format=BAR, **both)
        self._line = tqdm(total=0, bar_format="{desc}", position=1, leave=False, **both)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


LOGS = (METRICS, TIMING, HISTOGRAMS)
# phases of a few iterations only: they do not count for the time left
MILESTONES = ("eval", "samples", "save")


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
        ``<folder>/tensorboard``. quiet: show no progress and no hints.
        total: iterations of the whole run, for the time left. columns: {label: metric} shown in the
        progress line. images: {phase: images that it is about}. every: {rare phase: iterations from
        one to the next}, for the time left. track: names of trackers that are told all of it, too,
        and the config.
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
        images: Mapping[str, int] | None = None,
        every: Mapping[str, int] | None = None,
        track: Sequence[str] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder)
        self.current = ""  # the phase that is running, or that an error has just left
        begun = resume_from_iteration or 0
        self._progress = Progress(
            total=total, columns=columns, quiet=quiet, begun=begun, images=images, every=every
        )
        self._seconds: dict[str, float] = {}
        self._started: float | None = None
        self._files = self._open(resume_from_iteration)
        names = [*[BOARD] * tensorboard, *track]
        about = config or {}
        self._trackers = open_trackers(names, self.folder, about, self.say, resume_from_iteration)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase `name` of the current iteration."""
        start = time.perf_counter()
        if self._started is None:
            self._started = start
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
        """Show how much of the running phase is done; a log file hears it every `EVERY` seconds."""
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
        # trackers and the terminal
        times = {f"time/{name}": value for name, value in timing.items()}
        self._add_scalars(iteration, {**values, **times})
        self._progress.show(iteration, values, timing, seconds=usual)

    def evaluated(self, row: Mapping[str, Any]) -> None:
        """Tell trackers an evaluation, a line of ``eval.jsonl``."""
        self._add_scalars(row["iteration"], eval_numbers(row))

    def gained(self, text: str) -> None:
        """Let every iteration show what is gained so far."""
        self._progress.gained = text

    def image(self, name: str, one: Tensor, iteration: int) -> None:
        """Show an image [3, H, W] in [0, 1] to trackers."""
        for tracker in self._trackers:
            tracker.image(name, one, iteration)

    def say(self, text: str) -> None:
        """Print a line to stderr without breaking the progress bar; nothing when quiet."""
        self._progress.say(text)

    def sync(self) -> None:
        """Bring all that the run's logs hold to the disk, so that no checkpoint is there without
        the lines before it, also after a power cut. Raises RunError."""
        try:
            for name in (*LOGS, EVALS, FINDINGS):
                if (self.folder / name).is_file():
                    sync(self.folder / name)
            sync(self.folder)
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"cannot write the logs of {self.folder}: {reason}") from error

    def close(self) -> None:
        """Close all files; can be called twice."""
        for tracker in self._trackers:
            tracker.close()
        for file in self._files.values():
            # every line was flushed; what failed then was said then
            with contextlib.suppress(OSError):
                file.close()
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
        now, total, speed = time.perf_counter(), 0.0, None
        if self._started is not None:
            total = now - self._started
        if total and images:
            speed = images / total
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


class Silence:
    """Stand in for a RunLogger where nothing is written, and nothing said but by `say`."""

    current = ""

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self.say = say or _nothing

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

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return what does nothing, in place of all else that a log can do."""
        return _nothing


def _nothing(*_: object, **__: object) -> None:
    """Do nothing."""


def _prepare(file: Path, resume: int | None) -> None:
    """Drop the lines from iteration `resume` on and a torn last line; keep the rest byte for
    byte."""
    if file.exists() and not file.is_file():
        raise RunError(f"{file}: expected a file, got a folder, a pipe or a device; move it away")
    if not file.exists() or file.stat().st_size == 0:
        return
    if resume is None:
        raise RunError(f"{file} holds another run: resume that run, or choose another folder")
    # the lines before it; parsed, so that a damaged one is named
    lines, kept = file.read_bytes().splitlines(keepends=True), []
    for line, row in zip(lines, parse_rows(lines, file), strict=False):
        if row["iteration"] < resume:
            kept.append(line.removesuffix(b"\n") + b"\n")
    with replacing(file) as draft:
        draft.write_bytes(b"".join(kept))


def _number(value: Any) -> Any:
    """Return what JSON can hold of a number, a NumPy scalar or a tensor of one element."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


Log = RunLogger | Silence
