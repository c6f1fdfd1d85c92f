"""The layout of a run folder, the readers of its logs, and the lock of the one process that works
in it. No torch, no matplotlib."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import shlex
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from flowrl.config.overrides import parse_yaml
from flowrl.core.errors import ConfigError, DataError, RunError
from flowrl.core.files import (
    parse_json,
    read_json,
    read_text,
    refuse_pipe,
    shaped,
    shortened,
    write_text,
)

RunPath = str | os.PathLike[str]
Rows = list[dict[str, Any]]

# what a run is, and where it ran
CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
# logs with one object a line, each with its iteration
METRICS, TIMING, EVALS = "metrics.jsonl", "timing.jsonl", "eval.jsonl"
EARLIER_EVALS = "eval-earlier.jsonl"  # of another score or setting, which count no longer
HISTOGRAMS = "histograms.jsonl"  # of rewards and advantages
FINDINGS = "findings.jsonl"  # of the monitors
# the fixed prompts of a run: one strip of images per iteration, and their texts
SAMPLES, PROMPTS, VERDICTS = "samples", "prompts.json", "verdicts.json"
SOURCES = "sources.png"  # a strip of what they start from, where they do
CHECKPOINTS = "checkpoints"
# what is written at the end
SUMMARY, GRID, CURVES, REPORT = "summary.json", "grid.png", "curves.png", "report.html"
RESULT = "result.json"  # of a run of a comparison, in place of a summary
# beside them
DOCTOR = "doctor.json"  # what `flowrl doctor --run` left
TENSORBOARD, EXPORT = "tensorboard", "export"


class Score(NamedTuple):
    """One mean over images with its interval; NaN and None where unknown."""

    mean: float
    low: float
    high: float
    images: int | None


class Evaluation(NamedTuple):
    """One held-out evaluation: the headline score and each task's."""

    iteration: int
    name: str
    total: Score
    tasks: dict[str, Score]


MOST_ITERATIONS = 2**53  # what JSON's readers count without a mistake
Number = float | None
Pixels = Annotated[int, Field(ge=1, le=2**20)]


class _Written(BaseModel):
    """Something that a run writes; what is not named here may be there, too."""

    model_config = ConfigDict(extra="allow")


class _Scored(_Written):
    interval: Annotated[list[Number], Field(min_length=2, max_length=2)] | None = None
    images: int | None = None


class _OfTask(_Scored):
    mean: Number = None


class _Judged(_Scored):
    iteration: int
    score: str
    setting: dict[str, Any] = {}
    tasks: dict[str, _OfTask] = {}


class _Finding(_Written):
    monitor: str
    what: str
    advice: str
    action: str


class _Counts(_Written):
    low: float
    high: float
    counts: list[int]


class _Histograms(_Written):
    reward: _Counts | None
    advantage: _Counts | None


class _Best(_Written):
    iteration: int
    score: float
    checkpoint: str


class _Stopped(_Written):
    iteration: int
    monitor: str
    why: str


class _Summary(_Written):
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    best: _Best | None = None
    stopped: _Stopped | None = None


class _Section(_Written):
    skipped: str = ""
    table: list[list[str]] = []


class _Doctor(_Written):
    findings: list[dict[str, str]] = []
    sections: dict[str, _Section] = {}
    settings: dict[str, Any] = {}


class _Prompts(_Written):
    prompts: Annotated[list[str], Field(min_length=1)]
    height: Pixels
    width: Pixels


SHAPES: dict[str, Any] = {
    METRICS: dict[str, Number],
    TIMING: dict[str, Number],
    FINDINGS: _Finding,
    HISTOGRAMS: _Histograms,
    SUMMARY: _Summary,
    PROMPTS: _Prompts,
    VERDICTS: dict[str, list[bool | None]],
    DOCTOR: _Doctor,
}
"""File -> what it, or each of its lines, has to be; the reader of evaluations is `evaluation`."""


def strip_file(run: RunPath, iteration: int) -> Path:
    """Return the file of the samples after `iteration` iterations: ``<run>/samples/000020.png``."""
    return Path(run) / SAMPLES / f"{iteration:06d}.png"


def read_rows(run: RunPath, name: str) -> Rows:
    """Read a log of one object per line, each with its iteration; [] if there is none.

    A torn last line, as a killed or running process leaves it, is left out. Raises RunError naming
    file and line.
    """
    path = Path(run) / name
    return parse_rows(read_bytes(path).splitlines(keepends=True), path)


def read_bytes(path: Path, start: int = 0) -> bytes:
    """Read a log from a byte on; nothing of one that is not there. Raises RunError."""
    try:
        refuse_pipe(path)
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror or error}") from error


def parse_rows(lines: Sequence[bytes], path: Path) -> Rows:
    """Parse lines of a log as `read_rows` does."""
    # each line by itself, so that a mistake is named; scores are read by those who know of NaN
    name, rows = path.name, list[dict[str, Any]]()
    constants, shape = name in (EVALS, EARLIER_EVALS), SHAPES.get(name, dict)
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            row = parse_json(line, "the line", error=ValueError, constants=constants)
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                break
            text = f"{where}: expected a JSON object, got {_short(line)}: {error}"
            raise RunError(text) from error
        if not isinstance(row, dict) or not _whole(row.get("iteration"), MOST_ITERATIONS):
            text = f"{where}: expected an object with a whole iteration, got {_short(line)}"
            raise RunError(text)
        rows.append(shaped(row, shape, where))
    return rows


def check_run(run: RunPath) -> None:
    """Raise RunError if a folder is no run."""
    files = (METRICS, EVALS, CONFIG)
    if not any((Path(run) / name).is_file() for name in files):
        raise RunError(
            f"{run} is not a run folder: expected {', '.join(files[:-1])} or {files[-1]} in it"
        )


def read_metrics(run: RunPath) -> Rows:
    """Read the metrics of a run, [] before its first iteration. Raises RunError if the folder is no
    run."""
    check_run(run)
    return read_rows(run, METRICS)


def left_of(run: RunPath) -> list[str]:
    """Say what of an earlier run is in a folder beside checkpoints, which are saved first:
    "metrics.jsonl with 12 lines", "summary.json"; [] where none has written anything."""
    found = []
    for name in (METRICS, EVALS, EARLIER_EVALS, TIMING, HISTOGRAMS, FINDINGS, SUMMARY):
        path = Path(run) / name
        with contextlib.suppress(OSError):
            if not path.is_file() or not path.stat().st_size:
                continue
            lines = path.read_bytes().count(b"\n")  # one that cannot be read is left out
            if name == SUMMARY:
                found.append(name)
            else:
                found.append(f"{name} with {counted(lines, 'line')}")
    return found


def what_is_there(run: RunPath) -> str:
    """Say of a run without a whole checkpoint what is there in their place and beside it, and how
    to go on, as the end of a message."""
    path = Path(run) / CHECKPOINTS
    # the folder itself
    if path.is_symlink() and not path.exists():
        place = f"{path} leads to {path.readlink()}, which is not there"
    elif not path.exists():
        place = f"{path} is not there"
    elif not path.is_dir():
        place = f"{path} is a file, not a folder"
    else:
        inside = sorted(item.name for item in path.iterdir())
        place = f"{path} holds {', '.join(inside[:4]) or 'nothing'}"
    # what the run would lose, and what can be done
    left = left_of(run)
    if left:
        place += f", but a run was here: {', '.join(left)}"
    return (
        f": {place}. Bring the checkpoints back (mount the disk, undo the move) and give "
        "the same command again, or start again in another folder; nothing was changed"
    )


def check_lines(run: RunPath, iterations: int) -> None:
    """Raise RunError unless the metrics of a run hold each of its first `iterations` iterations
    once, naming what is missing or double; all are missing where the file is."""
    path = Path(run) / METRICS
    seen = Counter(row["iteration"] for row in read_rows(run, METRICS))
    missing = [number for number in range(iterations) if number not in seen]
    double = sorted(n for n, times in seen.items() if times > 1 and n < iterations)
    if not missing and not double:
        return
    # what is wrong, and the ways on, none of which deletes anything by itself
    where, wrong = str(path), []
    first = min([*missing, *double])
    ways = [f"move away the checkpoints after {first} iterations to train these again"]
    if first == 0:
        ways = ["bring the whole file back"]
    if not path.exists():
        where += ", which is not there"
    if missing:
        wrong.append(f"lacks {_numbers(missing)}")
    if double:
        wrong.append(f"holds {_numbers(double)} more than once")
        ways.append("delete the lines that are too many")
    if missing:
        begin, end = _spans(missing)[0]
        made = f"seq -f '{{\"iteration\": %.0f}}' {begin} {end}"
        if not seen:
            made += f" > {shlex.quote(str(path))}"
        ways.append(
            "go on without these numbers, with a line for each in its place that holds its "
            f"iteration alone: `{made}`"
        )
    raise RunError(
        f"{where}: expected each of the {counted(iterations, 'iteration')} before the "
        f"checkpoint once, but it {' and '.join(wrong)}. Nothing was changed. Before you resume: "
        f"{', or '.join(ways)}"
    )


def _spans(found: Sequence[int]) -> list[list[int]]:
    """Return the first and last of all numbers that follow each other."""
    spans: list[list[int]] = []
    for number in found:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def _numbers(found: Sequence[int]) -> str:
    """Say which iterations: "iterations 3 to 7, 9"."""
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in _spans(found)]
    what = "iteration" if len(found) == 1 else "iterations"
    said = f"{what} {', '.join(texts[:5])}"
    if len(texts) > 5:
        said += f" and {len(texts) - 5} more"
    return said


def counted(number: int, what: str) -> str:
    """Return "1 line", "2 lines"."""
    if number == 1:
        return f"1 {what}"
    return f"{number} {what}s"


def read_evals(run: RunPath) -> list[Evaluation]:
    """Read the held-out evaluations of a run, [] without any. Raises RunError naming file and
    line."""
    found = []
    for number, row in enumerate(read_rows(run, EVALS), 1):
        try:
            found.append(evaluation(row))
        except DataError as error:
            raise RunError(f"{Path(run) / EVALS}, line {number}: {error}") from error
    return found


def write_evals(run: RunPath, rows: Iterable[Mapping[str, Any]], name: str = EVALS) -> None:
    """Write all evaluations of a run anew, one per line. Raises RunError."""
    lines = [json.dumps(row) + "\n" for row in rows]
    write_text(Path(run) / name, "".join(lines))


def read_object(run: RunPath, name: str) -> dict[str, Any]:
    """Read a JSON object of the run, such as its summary; {} if there is none. Raises RunError if
    it is damaged."""
    path = Path(run) / name
    try:
        found = read_json(path, constants=True)
    except FileNotFoundError:
        return {}
    if not isinstance(found, dict):
        raise RunError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return dict(shaped(found, SHAPES.get(name, dict), str(path)))


def read_settings(run: RunPath) -> dict[str, Any]:
    """Read the config of a run as plain data, {} where there is none; without aliases, which can
    grow without bounds. Raises RunError if it is damaged."""
    path = Path(run) / CONFIG
    try:
        found = parse_yaml(read_text(path), str(path))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise RunError(f"{path}: expected a mapping, got {type(found).__name__}")
    return found


def read_prompts(run: RunPath) -> tuple[list[str], tuple[int, int]]:
    """Read the texts of a run's samples, and the height and width of its images. Raises
    RunError."""
    path = Path(run) / SAMPLES / PROMPTS
    try:
        record = read_json(path, _Prompts)
    except (FileNotFoundError, RunError) as error:
        expected = '{"prompts": [...], "height": H, "width": W}'
        reason = f"{type(error).__name__}: {error}"
        raise RunError(f"{path}: expected {expected}, {reason}") from error
    return record["prompts"], (record["height"], record["width"])


def read_verdicts(run: RunPath) -> dict[int, list[bool | None]]:
    """Read which samples of a run are right, by iteration, None where it is not known; {} where
    nobody judged them. Raises RunError."""
    path = Path(run) / SAMPLES / VERDICTS
    if not path.exists():
        return {}
    try:
        return {int(key): row for key, row in read_json(path, SHAPES[VERDICTS]).items()}
    except (OSError, ValueError, RunError) as error:
        expected = '{"20": [true, false, null, ...], ...}'
        raise RunError(f"{path}: expected {expected}, {type(error).__name__}: {error}") from error


def evaluation(row: Mapping[str, Any]) -> Evaluation:
    """Check one evaluation: {iteration, score: name, <name>: mean, interval, tasks}. Raises
    DataError."""
    shaped(row, _Judged, "evaluation", error=DataError)
    name, tasks = row["score"], row.get("tasks", {})
    if name not in row:
        raise DataError(f'expected "score" to name one of the keys {", ".join(row)}; got {name!r}')
    shaped(row[name], Number, f"score {name!r}", error=DataError)
    scores = {task: _score(values, "mean") for task, values in tasks.items()}
    total = _score(row, name)
    if total.images is None:
        total = total._replace(images=_images(list(scores.values())))
    return Evaluation(row["iteration"], name, total, scores)


def _score(row: Mapping[str, Any], key: str) -> Score:
    low, high = row.get("interval") or (None, None)
    return Score(_or_nan(row.get(key)), _or_nan(low), _or_nan(high), row.get("images"))


def _or_nan(value: Number) -> float:
    if value is None:
        return math.nan
    return float(value)


def _images(scores: Sequence[Score]) -> int | None:
    """Add up the images of all tasks; None where one of them does not say how many."""
    counts = [score.images for score in scores if score.images is not None]
    if not counts or len(counts) < len(scores):
        return None
    return sum(counts)


def _whole(value: Any, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= most


def _short(line: bytes) -> str:
    return repr(shortened(line.decode("utf-8", "replace").strip()))


LOCK = ".lock"
LOOKS, LOOK = 5, 0.01  # how often a lock is tried again, and the seconds in between
# what a file system answers that knows no locks
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class FolderLock:
    """A lock that is held until `release`, or until the process is gone: the system itself lets go
    of it, also after a crash, so nothing has to be cleared away."""

    def __init__(self, handle: int, made: list[Path]) -> None:
        """made: the folders that were made for this lock, the locked one first; maybe none."""
        self._handle = handle
        self._made = made
        _HELD.add(self)

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go of the folder; can be called twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def leave(self, *empty: str) -> None:
        """Let go, and remove the folder where it was made for this lock and nothing came into it
        since but folders of the names `empty` that hold nothing; can be called twice."""
        if self._handle >= 0 and self._made:
            folder = self._made[0]
            # what is not empty stays, and the rest with it
            with contextlib.suppress(OSError):
                there = {path.name for path in folder.iterdir()}
                if there <= {LOCK, *empty}:
                    for name in there - {LOCK}:
                        (folder / name).rmdir()
                    (folder / LOCK).unlink(missing_ok=True)
                    for path in self._made:
                        path.rmdir()
        self.release()


_HELD: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget() -> None:
    """Let go of all locks in a child that was forked: it would hold them after the process that
    has them was killed."""
    for held in list(_HELD):
        held.release()


os.register_at_fork(after_in_child=_forget)


def try_lock(folder: Path) -> FolderLock | None:
    """Lock a folder, which is made if it is not there -> the lock, None where somebody has it.

    The file ``.lock`` in it holds the number of the process. Raises RunError if the folder cannot
    be written.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        # who had it before has just removed it
        if error.errno == errno.ENOENT and not os.path.lexists(folder):
            return try_lock(folder)
        reason = error.strerror
        if error.errno == errno.EEXIST:
            reason = os.strerror(errno.ENOTDIR)
        raise RunError(f"cannot write to the run folder {folder}: {reason or error}") from error
    taken = _flock(handle, fcntl.LOCK_EX)
    # who only looks holds it for a moment
    for _ in range(LOOKS):
        if taken is not False:
            break
        time.sleep(LOOK)
        taken = _flock(handle, fcntl.LOCK_EX)
    if taken is False:
        os.close(handle)
        return None
    if taken is None:
        made = []  # without locks somebody else may work in it
    # who had it before may have removed the folder since its file was opened
    if not _is_file(handle, folder / LOCK):
        os.close(handle)
        return try_lock(folder)
    # whose lock it is; a pipe or a device of that name cannot say it
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
    return FolderLock(handle, made)


def _flock(handle: int, kind: int) -> bool | None:
    """Take a lock of an open file, without waiting -> whether it was free; None where the file
    system knows no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return None
        return False
    return True


def is_locked(folder: Path) -> bool:
    """Say whether a process works in a folder. Nothing is written, and no file of it is made.

    Where the file system knows no locks, the process that ``.lock`` names must be of this machine.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        free = _flock(handle, fcntl.LOCK_SH)
        if free is not None:
            return not free
        number = os.read(handle, 32).decode("ascii", "replace").strip()
        return number.isdecimal() and os.path.exists(f"/proc/{number}")
    except OSError:
        return False
    finally:
        os.close(handle)


def _is_file(handle: int, path: Path) -> bool:
    """Say whether an open file is the one of this path."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def lock(folder: Path, *, mend: str) -> FolderLock:
    """Lock a folder as `try_lock` does. Raises RunError with the way out `mend` where somebody has
    it."""
    found = try_lock(folder)
    if found is None:
        raise RunError(f"{folder}: {_who(folder)} works in it now; {mend}")
    return found


def _who(folder: Path) -> str:
    number, file = "", folder / LOCK
    with contextlib.suppress(OSError, ValueError):
        if file.is_file():
            number = file.read_text().strip()
    if not number.isdecimal():
        return "another process"
    if os.path.exists(f"/proc/{number}") or not os.path.exists("/proc/self"):
        return f"process {number}"
    return f"process {number} (of another machine, or one that it left)"
