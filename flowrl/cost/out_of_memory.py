"""Out of memory, said in one message: in which phase, what to lower, and what the config was
estimated to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from flowrl.config.load import Config
from flowrl.core.errors import FlowRLError, RunError

# What torch says where it raises a plain RuntimeError.
_SAYS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

# phase of a run's log, or of a command -> in words, the key to lower, the phase of the estimate
_PHASES = {
    "load": ("loading the model", "", "sampling"),
    "rollout": ("sampling", "train.rollout_batch", "sampling"),
    "decode": ("decoding images", "model.decode_batch", "decode"),
    "reward": ("scoring images", "", "decode"),
    "train": ("training", "train.micro_batch", "training"),
    "eval": ("judging held-out images", "eval.batch", "evaluation"),
    "samples": ("drawing the grid", "eval.batch", "evaluation"),
    "sample": ("drawing images", "eval.batch", "evaluation"),
}


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error means that a GPU, or the machine, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _SAYS)


@contextmanager
def explained(config: Config, phase: str) -> Iterator[None]:
    """Turn running out of memory inside into a RunError; `phase` is one of a run's log, or load, or
    sample."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(explain(error, config, phase)) from error


def explain(error: BaseException, config: Config, phase: str) -> str:
    """Say in one message what ran out of memory, what to lower from which value, and the
    estimate."""
    doing, key, counted = _PHASES.get(
        phase, ("a step that has no batch of its own", "", "training")
    )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    ways = "; or ".join(_lower(config, key)) or "use a smaller model, or model.tune: lora"
    return f"out of memory while {doing}: {lines[0][:200]}\n{ways}\n{_estimated(config, counted)}"


def _lower(config: Config, key: str) -> list[str]:
    """Name the key to lower and its value, and what else takes less."""
    section, _, name = key.partition(".")
    kwargs, ways = config.model.kwargs, []
    values: Mapping[str, Any] = {}
    if section == "model":
        values = kwargs
    elif section:
        values = vars(getattr(config, section))
    if name in values:
        value = int(values[name])
        ways.append(f"lower {key} (now {value})" if value > 1 else f"{key} is 1 already")
    # options of the runtime that are off; CUDA graphs refuse offload
    if "runtime" in kwargs:
        on = kwargs["runtime"] or {}
        helps = []
        if key == "train.micro_batch":
            helps.append("checkpointing")
        if not on.get("cuda_graphs"):
            helps.append("offload")
        ways += [f"turn on model.runtime.{name}" for name in helps if not on.get(name)]
    if kwargs.get("tune") == "full":
        ways.append("tune by LoRA (model.tune)")
    return ways


def _estimated(config: Config, name: str) -> str:
    """Say what the config was estimated to take in a phase."""
    from flowrl.core.tables import size
    from flowrl.cost.estimate import phase
    from flowrl.cost.memory import kept_memory
    from flowrl.training.rehearsal import check_plan

    # whatever goes wrong here must not hide the error that is explained
    try:
        forecast = check_plan(config)
        parts, note = kept_memory(config, forecast)
        if note:
            return f"no estimate: {note}"
        there = phase(config, name, forecast, parts)
    # there may be no memory left for it either
    except (FlowRLError, RuntimeError, MemoryError) as error:
        return f"no estimate: {error}"
    # said as a sentence below that error
    return (
        f"the estimate for {there.name}: {size(there.bytes)}, of which {size(there.kept)} are kept "
        "and "
        f"{size(there.extra)} are for {there.what}; `flowrl estimate` says what fits a card"
    )
