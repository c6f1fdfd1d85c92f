"""How a reward is called, and what it may answer.

A reward is called in one of two ways. A function of one argument gets a `RewardBatch`. A function
of several gets ``f(images, prompts, **record)``: images [L, 3, H, W], the prompts, and each key of
the prompts' records as a list with one entry per image, None where a record lacks the key. Where
prompts start from images, ``source`` are these, a tuple of [3, h, w] per image.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl.core.types import RewardBatch


def call_reward(reward: Callable[..., Any], batch: RewardBatch) -> Any:
    """Call a reward in the way that its signature asks for."""
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # written in C
        return reward(batch)
    if not _is_plain(parameters):
        return reward(batch)
    # the keys of the records that it takes
    keys = dict.fromkeys(key for record in batch.meta for key in record)
    record: dict[str, Any] = {}
    for key in keys:
        if key != "prompt":
            record[key] = [row.get(key) for row in batch.meta]
    if batch.source:
        record["source"] = list(batch.source)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        record = {key: rows for key, rows in record.items() if key in parameters}
    # by name where they are named so, whatever their order
    if {"images", "prompts"} <= parameters.keys():
        return reward(**{**record, "images": batch.images, "prompts": batch.prompts})
    return reward(batch.images, batch.prompts, **record)


def hint(error: BaseException) -> str:
    """Say what a failed reward most likely took its arguments for; "" where that is not known."""
    text = str(error)
    if isinstance(error, AttributeError) and f"'{RewardBatch.__name__}' object" in text:
        return ". A function of one argument gets a RewardBatch; write f(images, prompts)"
    if isinstance(error, TypeError) and "missing" in text and "required" in text:
        return (
            ". Beside images and prompts a function gets the keys of the prompts' records, each by "
            "its name; write f(images, prompts, **record)"
        )
    return ""


def _is_plain(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Say whether a function wants images and prompts apart, not a `RewardBatch`."""
    if {"images", "prompts"} <= parameters.keys():
        return True
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters.values() if p.kind in kinds and p.default is p.empty]
    return len(needed) > 1


def as_tensor(values: Any, count: int) -> Tensor:
    """Make a tensor of what a reward gave. Raises TypeError, ValueError or RuntimeError."""
    if isinstance(values, Tensor):
        rows = values
    elif isinstance(values, list | tuple):
        rows = torch.tensor([_number(value) for value in values])
    elif hasattr(values, "__array__"):
        found = values.__array__()
        rows = torch.tensor(found.tolist(), dtype=torch.float64)
        rows = rows.expand(count) if found.ndim == 0 else rows
    elif isinstance(values, int | float):
        rows = torch.full((count,), float(values))
    else:
        raise TypeError("no tensor, array, list or number")
    return rows


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"the text {value!r} is no number")
    return math.nan if value is None else float(value)
