"""Devices and dtypes by name, weights that are not what their network takes, memory given back, and
what the host reads of a device.

The host waits for the device as seldom as can be. `on_host` copies a small tensor once: which nodes
a network call has and which sigma grid they were sampled on decide about random streams, which live
on the host, so these tensors are read in every call. `refuse_if` is a check of values that only the
device knows: inside `checked_later` all are read at once, at the end.
"""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.files import read_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def named_device(name: str, who: str = "") -> torch.device:
    """Return the device of that name, whether or not this machine has it; ``auto`` is CUDA where
    there is one.

    Raises ConfigError that names `who` for what flowrl does not run on: log-probs are float64,
    which not every device has.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = f"{who}: device" if who else "device"
    wrong = ConfigError(f"{where}: expected 'auto', 'cpu' or 'cuda[:n]', got {name!r}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise wrong from error
    if device.type not in ("cpu", "cuda"):
        raise wrong
    return device


def pick_device(name: str, who: str = "") -> torch.device:
    """Return the device of that name as `named_device` does. Raises ConfigError too where this
    machine lacks it."""
    where = f"{who}: device" if who else "device"
    device = named_device(name, who)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"{where}: {name!r} asked for, but torch finds no CUDA device; use 'auto' or 'cpu'"
        )
    return device


CONFIG = "config.json"
_KINDS = ("missing", "unexpected", "mismatched")


def misfits(info: Mapping[str, Any], allowed: Collection[str] = ()) -> str:
    """Name what a ``from_pretrained(..., output_loading_info=True)`` says did not fit, "" if
    nothing; "missing", "unexpected" or "mismatched" may be allowed. Only with
    ``ignore_mismatched_sizes=True`` are those of another size named here, else they raise."""
    wrong = []
    for kind in _KINDS:
        names = sorted(map(str, info[f"{kind}_keys"]))
        if names and kind not in allowed:
            wrong.append(f"{len(names)} {kind} {names[:3]}")
    return ", ".join(wrong)


# kinds of numbers as files of safetensors call them, and torch: those of weights, those that count
_WIDE = {"F64", "F32", "F16", "BF16", "float64", "float32", "float16", "bfloat16"}
_COUNTS = {"I64", "I32", "BOOL", "int64", "int32", "bool"}
_WEIGHT = re.compile(r"(^|[._])(q?weight|bias|lora_\w+|qzeros|g_idx|weight_packed|W_q)$")


def kinds_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the kind of numbers of each tensor, as `check_wide` takes them."""
    return {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}


def stored_kinds(file: Path) -> dict[str, str]:
    """Return the kind of numbers of each tensor in a file of safetensors, such as BF16, by its
    header alone. Raises OSError, SafetensorError."""
    from safetensors import safe_open  # late: what only names a reward needs no file of weights

    with safe_open(file, framework="pt") as tensors:
        names = tensors.keys()
        return {name: tensors.get_slice(name).get_dtype() for name in names}


def check_folder(path: str, who: str, inside: str = "") -> None:
    """Raise ModelError as `check_wide` does, for a folder, or what was fetched of a hub id, or the
    part `inside` it, whose config.json does not say how its weights were quantised: where it does,
    the library knows."""
    folder = Path(path) / inside
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(path, f"{inside}/{CONFIG}".lstrip("/"))
        if isinstance(found, str):
            folder = Path(found).parent
    about = folder / CONFIG
    if about.is_file() and "quantization_config" in read_json(about, dict[str, Any]):
        return
    for file in sorted(folder.glob("*.safetensors")):
        check_wide(stored_kinds(file), f"{who}: {file}")


def check_wide(kinds: Mapping[str, str], where: object) -> None:
    """Raise ModelError for weights of less than 16 bits, and for packed ones: libraries would cast
    their numbers as they stand, without the scales that give them a meaning. Places of tokens and
    masks may be whole numbers."""
    for name, kind in kinds.items():
        if kind in _WIDE or (kind in _COUNTS and not _WEIGHT.search(name)):
            continue
        raise ModelError(
            f"{where}: {name} holds numbers of kind {kind}: weights that were quantised (fp8, "
            "int8, nf4, GPTQ, AWQ and the like) are not read, with scales or without; take the "
            "model's files of 16 or 32 bits"
        )


def free_memory() -> None:
    """Collect garbage, and have glibc hand back what it keeps of freed memory; elsewhere the first
    alone. Otherwise freed blocks below the newest ones stay with the process, which grows from run
    to run.
    """
    gc.collect()
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


# ------------------------------------------------------------------------ what the host reads

# for each tensor of a device that is still in use: its copy, and its version when it was copied
_COPIES = WeakTensorKeyDictionary()


def on_host(tensor: Tensor) -> Tensor:
    """Return a tensor as it is on the CPU. The host waits at the first time only, unless the tensor
    was changed since then. The copy is shared: do not change it."""
    if tensor.device.type == "cpu":
        return tensor
    copy, version = _COPIES.get(tensor, (None, -1))
    if copy is None or version != tensor._version:
        copy = tensor.cpu()
        remember(tensor, copy)
    return copy


def remember(tensor: Tensor, copy: Tensor) -> Tensor:
    """Say that a tensor is on the host already, as `copy` -> the tensor."""
    if tensor.device.type != "cpu":
        _COPIES[tensor] = (copy, tensor._version)
    return tensor


def repeated(nodes: Tensor, times: int) -> Tensor:
    """Repeat each of nodes [N] -> [N * times], known on the host where those are."""
    rows = nodes.repeat_interleave(times)
    if nodes in _COPIES:
        remember(rows, on_host(nodes).repeat_interleave(times))
    return rows


Waiting = list[tuple[Tensor, Callable[[], Exception]]]
_WAITING: ContextVar[Waiting | None] = ContextVar("waiting", default=None)


def refuse_if(wrong: Tensor, error: Callable[[], Exception]) -> None:
    """Raise an error if `wrong` [] is true: at once, or at the end of `checked_later`."""
    waiting = _WAITING.get()
    if waiting is not None:
        waiting.append((wrong.detach(), error))
    elif bool(wrong):
        raise error()


@contextmanager
def checked_later() -> Iterator[None]:
    """Put off what `refuse_if` is asked inside -> at the end the first error is raised. After
    another exception nothing is checked."""
    waiting: Waiting = []
    token = _WAITING.set(waiting)
    try:
        yield
    finally:
        _WAITING.reset(token)
    if waiting:
        flags = torch.stack([wrong for wrong, _ in waiting]).tolist()
        for (_, error), flag in zip(waiting, flags, strict=True):
            if flag:
                raise error()
