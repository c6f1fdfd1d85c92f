"""Show on stderr how a run goes: a bar in a terminal, a line per iteration elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

PAUSE = 0.2  # seconds between two looks at a running phase
RECENT = 20  # iterations that the time left is told from
BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
COLUMNS = {"reward": "reward", "acc": "accuracy", "ratio": "ratio", "approx_kl": "approx_kl"}


def headline_label(name: str) -> str:
    """Return what the headline reward is called beside `reward`, the sum: by its name."""
    return f"{name} alone" if name in COLUMNS else name


class Progress:
    """Show the metrics of each iteration, its speed, the time left and the seconds of its phases;
    in a terminal also the phase that is running, and how much of it is done.

    Args:
        total: iterations of the whole run, for the time left; None where it ends otherwise.
        columns: {label: metric} that is shown. quiet: show nothing at all. begun: iterations that
        are done already.
    """

    def __init__(
        self,
        *,
        total: int | None = None,
        columns: Mapping[str, str] = COLUMNS,
        quiet: bool = False,
        begun: int = 0,
    ) -> None:
        self.total, self.columns, self.quiet, self.begun = total, columns, quiet, begun
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

    def begin(self, phase: str) -> None:
        """Show in a terminal that a phase of the iteration has begun."""
        self._phase = phase
        if not self.quiet and sys.stderr.isatty():
            self._look(phase)

    def within(self, done: int, total: int) -> None:
        """Show in a terminal how much of the phase is done, a few times a second at most."""
        if self.quiet or not sys.stderr.isatty() or total < 2:
            return
        if time.monotonic() - self._looked >= PAUSE or done == total:
            self._look(f"{self._phase} {done}/{total}")

    def _look(self, now: str) -> None:
        """Write the line below the bar: what is being done, and the last iteration's seconds."""
        if self._bar is None:
            self._open_bar(self.begun)
        last = f"  before: {self._last}" if self._last else ""
        self._bar.refresh()  # its clock
        self._line.set_description_str(f"{now}{last}")
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
        if self.quiet:
            return
        text = "  ".join(self._parts(iteration, values, timing["images_per_s"]))
        phases = [name for name in timing if name != "images_per_s"]
        times = " ".join(f"{name} {timing[name]:.2f}s" for name in phases)
        # a log file gets a line for each iteration
        if not sys.stderr.isatty():
            of = f"/{self.total}" if self.total else ""
            self.say(f"iteration {iteration + 1}{of}  {text}  [{times}]")
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
        """Return metrics, speed and time left as texts."""
        parts = []
        for label, name in self.columns.items():
            if _is_number(values.get(name)):
                parts.append(f"{label} {values[name]:.4g}")
        if speed:
            parts.append(f"{speed:.3g} img/s")
        if self.total:
            # one long wait, as of a machine that slept, says nothing of the iterations to come
            each = median(self._durations[-RECENT:])
            parts.append(f"ETA {_clock(max(self.total - iteration - 1, 0) * each)}")
        return parts

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
