"""Make torch believe in a device: names in arguments, factories, and what asks for the driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flowrl.cost.meter import _SHORT, _WIDE
from pretendkit.tensor import ALIAS, DeviceTensor, Seen, compute

# these copy to the device where no mode looks: here on the CPU first, and then with `.to`
FROM_LISTS = (torch.tensor, torch.as_tensor, torch.asarray)


class _Names(TorchFunctionMode):
    """Let "cuda" in the arguments of any torch function mean the pretend device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:  # a name stays a name
            return func(*args, **kwargs)
        if func is Tensor.cuda:
            func, args = Tensor.to, (args[0], ALIAS)
        args = [renamed(value) for value in args]
        kwargs = {key: renamed(value) for key, value in kwargs.items()}
        if func is Tensor.new_tensor and _there(args):
            options = {"dtype": args[0].dtype, **kwargs, "device": "cpu"}
            return torch.tensor(*args[1:], **options).to(kwargs.get("device", ALIAS))
        if func in FROM_LISTS and kwargs.get("device") == ALIAS and not _there(args):
            return func(*args, **{**kwargs, "device": "cpu"}).to(ALIAS)
        if torch.is_autocast_enabled("cuda"):
            args, kwargs = autocast(func, args, kwargs)
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Compute every operation by the device's rules, also those that make a tensor."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(self.seen, func, args, kwargs or {})


@contextmanager
def pretend_cuda() -> Iterator[Seen]:
    """Let this thread have a device "cuda" -> what is seen of it."""
    seen = Seen()
    with ExitStack() as stack:
        for name in ("is_available", "is_bf16_supported"):
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, **__: True))
        # asks the driver whether a graph is being captured
        check = "_accelerator_graph_capture_health_check"
        stack.enter_context(mock.patch.object(torch.optim.Optimizer, check, lambda _: None))
        stack.enter_context(_Names())
        stack.enter_context(_Operations(seen))
        yield seen


def renamed(value: Any) -> Any:
    """Return the pretend device for "cuda" and "cuda:0", anything else as it is."""
    if isinstance(value, torch.device):
        return ALIAS if value.type == "cuda" else value
    return ALIAS if isinstance(value, str) and value in ("cuda", "cuda:0") else value


def _there(args: list[Any]) -> bool:
    return bool(args) and isinstance(args[0], Tensor) and args[0].is_cuda


def autocast(
    func: Any, args: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Cast device tensors as CUDA's autocast would, by the list that `flowrl estimate` uses and
    `tests/cost/test_meter.py` compares with torch's own."""
    if func in _SHORT or func is scaled_dot_product_attention:
        dtype = torch.get_autocast_dtype("cuda")
    elif func in _WIDE:
        dtype = torch.float32
    else:
        return args, kwargs

    def cast(value: Any) -> Any:
        eligible = isinstance(value, DeviceTensor) and value.is_floating_point()
        return value.to(dtype) if eligible else value

    named = {key: cast(value) for key, value in kwargs.items()}
    return [cast(value) for value in args], named
