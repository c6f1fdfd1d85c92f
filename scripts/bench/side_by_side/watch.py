"""Run a trainer's own program, unchanged, and note what its iterations take.

    python watch.py --network diffusers:SD3Transformer2DModel --updates 1 --warm-up 1 \\
        --iterations 2 --out FILE -- PROGRAM [ARGUMENT...]

PROGRAM is a file, or -m and a module. It runs in this process, in whatever environment that trainer
needs: this file imports torch, and the class of the network. Every call of the network, every
decode of the VAE and every optimizer step is counted; an iteration ends with its last optimizer
step. Then the program is ended.

Seconds are the processor's, over all threads, so that other work on the machine counts for nothing;
with a GPU they are the wall's, and the GPU is waited for where a phase begins, never between two
calls.

- between: from the last optimizer step of the iteration before to the first call of the network,
- sampling: to the first call with a gradient, with what scores the images,
- decoding: the VAE,
- training: to the end of the last optimizer step.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

PHASES = ("between", "sampling", "decoding", "training")
LOGGERS = ("wandb", "swanlab")  # what is logged there is no part of the work


class Done(BaseException):
    """All iterations were seen; no `except Exception` of a trainer may hold it."""


class Watch:
    """Share the time of iterations out to phases, and count rows of the network."""

    def __init__(self, updates: int, warm_up: int, iterations: int) -> None:
        self.updates, self.warm_up, self.iterations = updates, warm_up, iterations
        self.rows: list[dict[str, Any]] = []  # of the iterations that count
        self.seen = 0
        self._begin()

    def called(self, rows: int, gradient: bool) -> None:
        """Note a call of the network with so many rows."""
        if gradient and self.phase != "training":
            self._turn("training")
        elif self.phase == "between":
            self._turn("sampling")
        kind = "training" if gradient else "reference" if self.phase == "training" else "sampling"
        self.calls[kind] = self.calls.get(kind, 0) + 1
        self.network_rows[kind] = self.network_rows.get(kind, 0) + rows

    def decoding(self, decode: Callable[[], Any]) -> Any:
        """Run a decode in its own phase."""
        before = self.phase
        self._turn("decoding")
        try:
            return decode()
        finally:
            self._turn(before)

    def stepped(self) -> None:
        """Note an optimizer step. Raises Done after the last one."""
        self.steps += 1
        if self.steps < self.updates:
            return
        self._turn("between")
        self.seen += 1
        if self.seen > self.warm_up:
            self.rows.append(self._row())
        if self.seen == self.warm_up + self.iterations:
            raise Done
        if self.seen == self.warm_up:
            forget_peak()
        self._begin()

    def _begin(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.calls: dict[str, int] = {}
        self.network_rows: dict[str, int] = {}
        self.phase, self.steps = "between", 0
        self.began, self.wall = now(), time.perf_counter()

    def _turn(self, phase: str) -> None:
        """End a phase and begin another."""
        at = now()
        self.seconds[self.phase] += at - self.began
        self.began, self.phase = at, phase

    def _row(self) -> dict[str, Any]:
        wall = time.perf_counter() - self.wall
        seconds = {**self.seconds, "all": sum(self.seconds.values())}
        return {"seconds": seconds, "wall": wall, "calls": self.calls, "rows": self.network_rows}


def now() -> float:
    """Return the processor's seconds of this process; with a GPU the wall's, once it is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def forget_peak() -> None:
    """Begin a new peak of memory, where that can be done."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def peak_mib() -> float | None:
    """Return the peak of the memory since `forget_peak`: the GPU's, else the process'."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line.split()[1] for line in lines if line.startswith("VmHWM")]
    return int(found[0]) / 1024 if found else None


def put_in(watch: Watch, network: str) -> None:
    """Let a network class, diffusers' VAE and every optimizer tell the watch."""
    module, _, name = network.partition(":")
    cls = getattr(importlib.import_module(module), name)
    forward = cls.forward

    @functools.wraps(forward)  # trainers and peft read its signature
    def counted(self: Any, *args: Any, **named: Any) -> Any:
        first = args[0] if args else named["hidden_states"]
        watch.called(len(first), torch.is_grad_enabled())
        return forward(self, *args, **named)

    cls.forward = counted
    vae = importlib.import_module("diffusers").AutoencoderKL
    decode = vae.decode

    @functools.wraps(decode)
    def decoded(self: Any, *args: Any, **named: Any) -> Any:
        return watch.decoding(lambda: decode(self, *args, **named))

    vae.decode = decoded
    register_optimizer_step_post_hook(lambda *_: watch.stepped())


def without_loggers() -> None:
    """Let trackers that are not installed be imported; what they are told is lost."""
    os.environ.setdefault("WANDB_MODE", "disabled")
    for name in LOGGERS:
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))


def run(program: list[str]) -> None:
    """Run a program as Python would: a file, or -m and a module."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def versions() -> dict[str, str]:
    """Name the releases that the work ran with."""
    names = ("torch", "diffusers", "transformers", "peft", "accelerate")
    found = {name: importlib.util.find_spec(name) for name in names}
    return {name: importlib.import_module(name).__version__ for name in names if found[name]}


def main() -> None:
    """Watch a program and write what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", required=True, help="module:class of the network")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps per iteration")
    parser.add_argument("--warm-up", type=int, default=1, help="iterations that do not count")
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    watch = Watch(args.updates, args.warm_up, args.iterations)
    put_in(watch, args.network)
    without_loggers()
    try:
        run([word for word in args.program if word != "--"])
    except Done:
        found = {"iterations": watch.rows, "peak_MiB": peak_mib(), "versions": versions()}
        args.out.write_text(json.dumps({**found, "gpu": torch.cuda.is_available()}))
        os._exit(0)  # the trainer's threads and workers have nothing left to do
    sys.exit(f"{args.program[0]} ended after {watch.seen} iterations")


if __name__ == "__main__":
    main()
