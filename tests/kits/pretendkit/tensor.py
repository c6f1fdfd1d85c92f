"""A tensor on the pretend device: what it holds, and how an operation on it is computed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pretendkit import rules

CUDA = torch.device("cuda", 0)
# What torch's C++ believes the device to be: "cuda" would make it ask a driver, and this is the one
# device type without hardware whose backward runs in the calling thread. Python sees "cuda:0".
ALIAS = torch.device("lazy", 0)
ROOT = Path(__file__).parents[3]
OURS = tuple(str(ROOT / part) for part in ("flowrl", "rewards", "scripts"))


class Seen:
    """Where the host waited for the device, and what it sent there without waiting: how often by
    (operation, lines of flowrl that lead to it)."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.collectives = 0
        self.mode = "default"

    def set_sync_debug_mode(self, mode: str) -> None:
        """Let a wait raise RuntimeError with "error", as `torch.cuda.set_sync_debug_mode` does, or
        only be counted with "default"."""
        self.mode = mode

    def clear(self) -> None:
        """Forget what was seen so far."""
        self.waits.clear()
        self.sent.clear()


class DeviceTensor(Tensor):
    """A tensor that says it is on ``cuda:0`` and holds one of the CPU, with the same strides."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, seen: Seen) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            layout=held.layout,
            device=ALIAS,
        )
        made.held, made.seen = held, seen  # type: ignore[attr-defined]
        return made

    def __init__(self, held: Tensor, seen: Seen) -> None:
        """Hold a tensor of the CPU, not copied."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute an operation outside of `pretend_cuda`'s modes, such as in another thread."""
        mine = [t for t in tensors((args, kwargs or {})) if isinstance(t, DeviceTensor)]
        return compute(mine[0].seen, func, args, kwargs or {})  # type: ignore[attr-defined]

    # torch moves the weights of a module in place for subclasses that can be taken apart
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.seen  # type: ignore[attr-defined]

    @staticmethod
    def __tensor_unflatten__(inner: Any, seen: Any, size: Any, stride: Any) -> DeviceTensor:
        return DeviceTensor(inner["held"], seen)

    @property  # type: ignore[override]
    def data(self) -> Tensor:  # type: ignore[override]
        """Return the numbers, without their history; they can be exchanged."""
        return self.detach()

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, DeviceTensor) or other.shape != self.shape:
            raise RuntimeError("incompatible tensor type: .data of a device tensor gets another")
        self.held = other.held

    def tolist(self) -> Any:
        """Return nested lists, as of a copy on the host."""
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Raise TypeError, as on CUDA."""
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of the device is pickled: it would come back on that device")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held})"


def compute(seen: Seen, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operation on what its tensors hold, as the device would.

    Results are on the device if an argument is, or if the operation is told to put them there.
    """
    name = func.overloadpacket.__name__
    found = tensors((args, kwargs))
    if func.namespace == "c10d":
        rules.refuse_collective(name, found)
        seen.collectives += 1
        return func(*plain(args), **plain(kwargs))
    here = [t for t in found if isinstance(t, DeviceTensor)]
    away = [t for t in found if not isinstance(t, DeviceTensor)]
    to = kwargs.get("device")
    target = bool(here) if to is None else torch.device(to).type in (ALIAS.type, CUDA.type)
    if to is not None:
        kwargs = {**kwargs, "device": "cpu" if target else to}
    # the rules of a real device
    if target and not name.startswith("_to_copy"):
        rules.refuse_generator(name, kwargs)
    if here:
        if away:
            rules.refuse_indices(name, args[0], args[1]) if name in rules.INDEXING else None
            rules.refuse(name, func.tags, here, away)
        elif name in rules.PRODUCTS or name in rules.ABSENT:
            rules.refuse(name, func.tags, here, away)
    _note(seen, name, args, kwargs, here, away, target)
    # the same on the CPU
    out = func(*plain(args), **plain(kwargs))
    if not target:
        return out
    if name.endswith("_") and not name.startswith("__"):
        return args[0] if out is not None else None
    return wrapped(out, seen, kwargs.get("out"))


def _note(
    seen: Seen,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    here: list[Any],
    away: list[Any],
    target: bool,
) -> None:
    """Write down whether the host waits in an operation, or sends something."""
    if name not in rules.COPIES:
        why = rules.waits(name, args, kwargs) if here else ""
    else:
        to_host = bool(here) and not (target and isinstance(args[0], DeviceTensor))
        if name == "_to_copy":
            crosses, to_host = bool(here) != target, not target
            blocking = not kwargs.get("non_blocking", False)
        else:
            crosses = bool(here and away)
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        why = rules.copy_waits(name, to_host, blocking) if crosses else ""
        if crosses and not why:
            seen.sent[f"{name}{where()}"] += 1
    if why:
        seen.waits[f"{why}{where()}"] += 1
        if seen.mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {why}{where()}")


def where(depth: int = 3) -> str:
    """Name the innermost lines of flowrl that are being run."""
    lines: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(lines) < depth:
        file = frame.f_code.co_filename
        if file.startswith(OURS):
            lines.append(f"{Path(file).relative_to(ROOT)}:{frame.f_lineno}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(["", *lines])


def tensors(tree: Any) -> list[Tensor]:
    """List the tensors in nested arguments."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [found for part in tree for found in tensors(part)]


def plain(tree: Any) -> Any:
    """Replace device tensors by what they hold, in nested arguments."""
    if isinstance(tree, DeviceTensor):
        return tree.held
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([plain(part) for part in tree])
    if isinstance(tree, torch.device) and tree.type == ALIAS.type:
        return torch.device("cpu")
    return tree


def wrapped(tree: Any, seen: Seen, out: Any = None) -> Any:
    """Put results on the device."""
    if isinstance(tree, Tensor):
        return DeviceTensor(tree, seen) if out is None else out
    if isinstance(tree, (list, tuple)):
        return type(tree)([wrapped(part, seen) for part in tree])
    return tree
