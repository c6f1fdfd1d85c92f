"""What a device does in an iteration: seconds of its kernels by what they are for, and the share of
the time in which it has any work."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from flowrl.core.tables import text_table
from flowrl.cost.overhead import wait

# the first that a name fits; names of CUDA kernels, and of PyTorch's operators on a CPU
GROUPS = {
    "collectives": r"nccl",
    "attention": r"flash|fmha|attention|sdpa",
    "products": r"gemm|nvjet|cutlass|cublas|gemv|splitk|::(add|b|add?b)?mm|::linear|mkldnn_linear",
    "norms": r"norm",
    "compiled": r"^triton",
    "copies": r"memcpy|memset|copy|::to$|cat",
    "element by element": r"elementwise|reduce|::(add|mul|sub|div|silu|gelu|exp|sin|cos|neg|pow)",
}
REST, MOST = "other", 12
_GROUPS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in GROUPS.items()}


class Kernel(NamedTuple):
    """All calls of one kernel in a phase."""

    name: str
    seconds: float
    calls: int


def group_of(name: str) -> str:
    """Return what a kernel is for, told from its name; `REST` where no pattern fits."""
    return next((group for group, one in _GROUPS.items() if one.search(name)), REST)


def summary(kernels: list[Kernel], seconds: float) -> dict[str, Any]:
    """Sum kernels up beside the `seconds` that the phase took without a profiler.

    ``busy`` is their share of it: far below 1, the device waits for the host that launches them.
    """
    groups: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0, "calls": 0})
    for kernel in kernels:
        group = groups[group_of(kernel.name)]
        group["seconds"] += kernel.seconds
        group["calls"] += kernel.calls
    total = sum(kernel.seconds for kernel in kernels)
    longest = sorted(kernels, key=lambda kernel: -kernel.seconds)[:MOST]
    return {
        "seconds": seconds,
        "kernel_seconds": total,
        "busy": total / seconds,
        "calls": sum(kernel.calls for kernel in kernels),
        "groups": dict(sorted(groups.items(), key=lambda item: -item[1]["seconds"])),
        "longest": [kernel._asdict() for kernel in longest],
    }


class KernelWatch:
    """Stand in for a run's log: profile some of the phases; `found` has the kernels of each, over
    all times that the phase was met."""

    def __init__(self, phases: tuple[str, ...], *, cuda: bool) -> None:
        self.cuda = cuda
        self.found: dict[str, dict[str, Kernel]] = {name: {} for name in phases}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Profile what is inside."""
        if name not in self.found:
            yield
            return
        wait()
        kind = ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU
        with profile(activities=[kind]) as seen:
            yield
            wait()
        kernels = self.found[name]
        for one in self._kernels(seen):
            before = kernels.get(one.name, Kernel(one.name, 0.0, 0))
            seconds, calls = before.seconds + one.seconds, before.calls + one.calls
            kernels[one.name] = Kernel(one.name, seconds, calls)

    def progress(self, done: int, total: int) -> None:
        """Show nothing."""

    def _kernels(self, seen: Any) -> Iterator[Kernel]:
        """Return what took time of the device itself; the profiler counts microseconds."""
        name = "self_device_time_total" if self.cuda else "self_cpu_time_total"
        for event in seen.key_averages():
            launched_here = self.cuda and event.device_type == DeviceType.CPU
            if getattr(event, name) > 0 and not launched_here:
                yield Kernel(event.key, getattr(event, name) / 1e6, event.count)


def kernels_table(phases: dict[str, dict[str, Any]], *, width: int | None = None) -> str:
    """Set the groups of each phase as a table: seconds, share of the phase, number of calls."""
    lines = [["phase", "kernels", "seconds", "share", "calls"]]
    for phase, found in phases.items():
        for name, group in found["groups"].items():
            share = f"{100 * group['seconds'] / found['seconds']:.0f} %"
            row = [phase, name, f"{group['seconds']:.3f}", share, f"{group['calls']:.0f}"]
            lines.append(row)
        idle = found["seconds"] - found["kernel_seconds"]
        lines.append([phase, "none", f"{idle:.3f}", f"{100 - 100 * found['busy']:.0f} %", ""])
    return text_table(lines, width=width)
