"""Write what happens in a run: metrics.jsonl, TensorBoard, a progress line and where the time went."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from flowrl import __version__
from flowrl.errors import RunError
from flowrl.resources import checkout

METRICS, TIMING = "metrics.jsonl", "timing.jsonl"
COLUMNS = {"reward": "reward", "acc": "accuracy", "ratio": "ratio", "kl": "approx_kl"}
PACKAGES = ("torch", "diffusers", "transformers", "peft", "safetensors", "numpy")
_told: set[str] = set()

MILESTONES = ("eval", "grid", "save")  # phases of a few iterations only: they do not count for the time left


class RunLogger:
    """Log one run into a folder.

    ``metrics.jsonl`` holds one object per iteration and nothing that depends on the clock, so that a resumed run ends
    with the same file as an uninterrupted one; NaN and infinity, which JSON lacks, are null. ``timing.jsonl`` holds the
    seconds of each phase. Lines are flushed one by one. Raises RunError if the folder cannot be written, or if it holds
    the metrics of another run and `resume_from_iteration` is None.

    Args:
        folder: of the run.
        resume_from_iteration: the first iteration that will be logged again; lines from there on are dropped.
        tensorboard: also write TensorBoard events into ``<folder>/tensorboard``, where it is installed.
        quiet: show no progress and no hints.
        total: iterations of the whole run, for the time left.
        columns: {label: metric} shown in the progress line.
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
    ) -> None:
        self.folder, self.quiet, self.total, self.columns = Path(folder), quiet, total, columns
        self._seconds: dict[str, float] = {}
        self._started: float | None = None
        self._durations: list[float] = []
        self._bar: Any = None  # the progress, and below it the seconds of each phase
        self._line: Any = None
        self.current = ""  # the phase that is running, or that an error has just left
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in (METRICS, TIMING):
                _prepare(self.folder / name, resume_from_iteration)
            self._files = {name: (self.folder / name).open("a", encoding="utf-8") for name in (METRICS, TIMING)}
        except OSError as error:
            raise RunError(f"cannot write to the run folder {self.folder}: {error.strerror or error}") from error
        self._board = self._tensorboard(resume_from_iteration) if tensorboard else None

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to phase `name` of the current iteration."""
        start = time.perf_counter()
        self._started = start if self._started is None else self._started
        self.current = name
        try:
            yield
            self.current = ""
        finally:
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()  # kernels run on after their call returns; they belong to this phase
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def log(self, iteration: int, metrics: Mapping[str, Any], *, images: int = 0) -> None:
        """Write the metrics of a finished iteration (numbers or one-element tensors) and show the progress.

        `images` is the number of pictures made in it, for the speed. Ends the iteration's phase timers.
        """
        values = {name: _number(value) for name, value in metrics.items()}
        now = time.perf_counter()
        duration = now - self._started if self._started is not None else 0.0
        timing = {
            **self._seconds,
            "total": duration,
            "images_per_s": images / duration if duration and images else None,
        }
        rare = sum(self._seconds.get(name, 0.0) for name in MILESTONES)  # not what the other iterations will take
        self._started, self._seconds = now, {}
        self._durations.append(max(duration - rare, 0.0))
        self._write(METRICS, {"iteration": iteration, **values})
        self._write(TIMING, {"iteration": iteration, **{k: v if v is None else round(v, 6) for k, v in timing.items()}})
        if self._board is not None:
            for name, value in {**values, **{f"time/{name}": value for name, value in timing.items()}}.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(name, value, iteration)
        if not self.quiet:
            self._show(iteration, values, timing)

    def image(self, name: str, picture: Tensor, iteration: int) -> None:
        """Show a picture [3, H, W] in [0, 1] in TensorBoard, where it is on."""
        if self._board is not None:
            self._board.add_image(name, picture.detach().float().cpu(), iteration)

    def say(self, text: str) -> None:
        """Print a line to stderr without breaking the progress bar; nothing when quiet."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Close all files; can be called twice."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # every line was flushed; what failed then was said then
                file.close()
        if self._board is not None:
            self._board.close()
            self._board = None
        if self._bar is not None:
            self._line.close()
            self._bar.close()
            self._bar = self._line = None

    def _write(self, name: str, values: dict[str, Any]) -> None:
        try:
            self._files[name].write(json.dumps(values, allow_nan=False) + "\n")
            self._files[name].flush()
        except OSError as error:
            raise RunError(f"cannot write {self.folder / name}: {error.strerror or error}") from error

    def _tensorboard(self, purge_step: int | None) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            if "tensorboard" not in _told:
                _told.add("tensorboard")
                self.say("TensorBoard is not installed: metrics go to metrics.jsonl only (pip install tensorboard)")
            return None
        try:
            return SummaryWriter(str(self.folder / "tensorboard"), purge_step=purge_step)
        except OSError as error:
            raise RunError(f"cannot write to {self.folder / 'tensorboard'}: {error.strerror or error}") from error

    def _show(self, iteration: int, values: Mapping[str, Any], timing: Mapping[str, float | None]) -> None:
        parts = [f"{label} {values[name]:.4g}" for label, name in self.columns.items() if _shown(values.get(name))]
        speed = timing["images_per_s"]
        if speed:
            parts.append(f"{speed:.3g} img/s")
        if self.total:
            left = max(self.total - iteration - 1, 0) * sum(self._durations) / len(self._durations)
            parts.append(f"ETA {_clock(left)}")
        phases = " ".join(f"{name} {timing[name]:.2f}s" for name in timing if name != "images_per_s")
        if not sys.stderr.isatty():
            of = f"/{self.total}" if self.total else ""
            self.say(f"iteration {iteration + 1}{of}  {'  '.join(parts)}  [{phases}]")
            return
        if self._bar is None:
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=self.total, initial=iteration, file=sys.stderr, unit="it", dynamic_ncols=True)
            self._line = tqdm(
                total=0, file=sys.stderr, bar_format="{desc}", position=1, dynamic_ncols=True, leave=False
            )
        self._bar.set_postfix_str("  ".join(parts), refresh=False)
        self._bar.update(1)
        self._line.set_description_str(phases)


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

    def log(self, iteration: int, metrics: Mapping[str, Any], *, images: int = 0) -> None:
        """Write nothing."""

    def image(self, name: str, picture: Tensor, iteration: int) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Print nothing."""


def environment() -> dict[str, Any]:
    """Describe where a run happens: versions, processors, the commit; nothing that names a person or a host."""
    return {
        "python": platform.python_version(),
        "flowrl": __version__,
        **{name: _version(name) for name in PACKAGES},
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())],
        "commit": _commit(),
    }


def _prepare(file: Path, resume: int | None) -> None:
    """Drop the lines from iteration `resume` on and a torn last line; keep the rest byte for byte."""
    if not file.exists() or file.stat().st_size == 0:
        if resume and file.name == METRICS:
            warnings.warn(f"{file} is missing: the metrics before iteration {resume} are lost", stacklevel=3)
        return
    if resume is None:
        raise RunError(f"{file} holds another run: resume that run, or choose another folder")
    kept = []
    lines = file.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            iteration = json.loads(line)["iteration"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise RunError(
                f"{file}, line {number}: expected an object with an iteration; repair or move the file"
            ) from error
        if iteration < resume:
            kept.append(line if line.endswith(b"\n") else line + b"\n")
    partial = file.with_name(f"{file.name}.tmp-{os.getpid()}")
    try:
        partial.write_bytes(b"".join(kept))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _number(value: Any) -> Any:
    if hasattr(value, "item"):  # a tensor or NumPy scalar; more than one element is an error of the caller
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _shown(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = checkout()
    if root is None or not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
