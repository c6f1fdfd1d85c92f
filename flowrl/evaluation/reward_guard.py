"""A guard around every call of a reward: what it fails with is one message, and what it changes in
the process is put back.

Rewards are users' code in the process that trains. A setting that one leaves changed, such as
`autocast` or the default dtype, would change the training from then on; a working folder, a signal
handler or a closed stdout would break it later, elsewhere. So the settings of `SETTINGS` are looked
at before and after, put back, and said with the reward's name. A reward that would end the process
by ``os._exit`` fails instead, and a child that it forked ends where the parent's call ends. Random
streams are not looked at: training draws from generators of its own, which nobody else has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils import _python_dispatch as dispatch

from flowrl.core.errors import FlowRLError, RewardError, describe_error
from flowrl.core.processes import waiting
from flowrl.core.types import RewardBatch

Way = Callable[[Any], object]
_ONE = threading.Lock()  # of the call that looks


class Setting(NamedTuple):
    """Something of the process that a reward must leave as it was."""

    name: str
    now: Callable[[], Any]
    put: Way
    beside: bool = False  # looked at in a thread beside the main one, too: nobody else changes it


def _autocast(device: str) -> Setting:
    def now() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def put(had: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, had[0])
        torch.set_autocast_dtype(device, had[1])
        torch.clear_autocast_cache()

    return Setting(f"torch.autocast of {device}", now, put, True)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _nest(had: int) -> None:
    while _nesting() > had:
        torch.autocast_decrement_nesting()
    while _nesting() < had:
        torch.autocast_increment_nesting()


def _inference(had: bool) -> None:
    _ENTERED.append(torch.inference_mode(had))
    _ENTERED[-1].__enter__()


_ENTERED: list[torch.inference_mode] = []  # in effect as long as it is held


def _attribute(owner: Any, name: str, said: str) -> Setting:
    return Setting(f"{said}.{name}", partial(getattr, owner, name), partial(setattr, owner, name))


def _device(had: torch.device) -> None:
    # the default of torch itself is no default: a mode for it would slow every call
    torch.set_default_device(None if had == torch.device("cpu") else had)


def _function_modes(had: list[Any]) -> None:
    while len(_get_current_function_mode_stack()) > len(had):
        _pop_mode()


def _dispatch_modes(had: list[Any]) -> None:
    while len(dispatch._get_current_dispatch_mode_stack()) > len(had):
        dispatch._pop_mode()


def _deterministic() -> tuple[bool, bool]:
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled(), warns


def _handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return dict(zip(ends, map(signal.getsignal, ends), strict=True))


def _handle(had: dict[int, Any]) -> None:
    for number, handler in had.items():
        if handler is not None:
            signal.signal(number, handler)


def _current_device() -> int:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1  # type: ignore[no-untyped-call]


def _use_device(had: int) -> None:
    if had >= 0:
        torch.cuda.set_device(had)


_CUDA, _CUDNN = torch.backends.cuda, torch.backends.cudnn
# the default device before modes, of which it is one; grad mode after inference mode, which sets it
SETTINGS = (
    Setting("the default device", torch.get_default_device, _device),
    Setting("a mode of torch functions", _get_current_function_mode_stack, _function_modes),
    Setting("a mode of torch dispatch", dispatch._get_current_dispatch_mode_stack, _dispatch_modes),
    Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype, True),
    Setting("inference mode", torch.is_inference_mode_enabled, _inference, True),
    Setting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, True),
    _autocast("cpu"),
    _autocast("cuda"),
    Setting("torch.autocast's nesting", _nesting, _nest, True),
    Setting(
        "torch.autocast's cache", torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    ),
    Setting("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    Setting(
        "deterministic algorithms",
        _deterministic,
        lambda had: torch.use_deterministic_algorithms(had[0], warn_only=had[1]),
    ),
    Setting("the number of torch's threads", torch.get_num_threads, torch.set_num_threads),
    Setting(
        "the precision of matrix products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    _attribute(_CUDA.matmul, "allow_tf32", "torch.backends.cuda.matmul"),
    _attribute(
        _CUDA.matmul, "allow_bf16_reduced_precision_reduction", "torch.backends.cuda.matmul"
    ),
    _attribute(
        _CUDA.matmul, "allow_fp16_reduced_precision_reduction", "torch.backends.cuda.matmul"
    ),
    _attribute(_CUDNN, "allow_tf32", "torch.backends.cudnn"),
    _attribute(_CUDNN, "benchmark", "torch.backends.cudnn"),
    _attribute(_CUDNN, "deterministic", "torch.backends.cudnn"),
    _attribute(_CUDNN, "enabled", "torch.backends.cudnn"),
    Setting("flash attention", _CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    Setting("efficient attention", _CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    Setting("plain attention", _CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    Setting("attention of cuDNN", _CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    Setting("the current GPU", _current_device, _use_device),
    Setting("the working folder", os.getcwd, os.chdir),
    Setting("the handlers of signals", _handlers, _handle),
    Setting("the switch interval of threads", sys.getswitchinterval, sys.setswitchinterval),
    Setting("the limit of recursion", sys.getrecursionlimit, sys.setrecursionlimit),
)
"""What is looked at, in the order in which it is put back."""


class _Exited(BaseException):
    """A reward has called ``os._exit``."""


@contextlib.contextmanager
def guarded(name: str, what: str) -> Iterator[None]:
    """Call a reward inside: what it changes in the process is put back, with a warning that names
    it, and what it raises is one RewardError with `what` in front.

    Args:
        name: of the reward. what: for messages, as ``iteration 3: reward 'red'``.
    Raises RewardError for whatever was raised inside but KeyboardInterrupt, which is the user's.
    """
    try:
        with watched(name), waiting():
            yield
    except KeyboardInterrupt:
        raise
    except FlowRLError as error:
        raise RewardError(f"{what}: {error}") from error
    except BaseException as error:  # rewards are users' code and servers: they fail in any way
        raise RewardError(f"{what} failed with {_said(error)}") from error


@contextlib.contextmanager
def watched(name: str) -> Iterator[None]:
    """Look before and after, and put back what is another. Of several calls at the same time, as in
    a server's threads, or one in the other, the first looks: what it finds may be the others'. In a
    thread, as of `train.overlap`, the main one samples meanwhile and has settings of its own."""
    if not _ONE.acquire(blocking=False):
        yield
        return
    alone = threading.current_thread() is threading.main_thread()
    # in a thread beside the main one only what is its own
    had = [(each, _now(each)) for each in SETTINGS if alone or each.beside]
    streams, pid = _Streams(alone), os.getpid()
    try:
        with _no_exit(pid):
            yield
    finally:
        if os.getpid() != pid:
            _end_of_fork(name)
        _ONE.release()
        # one by one: what cannot be put back must not keep the others from it, and one may be the
        # cause of another
        changed = streams.put_back()
        for each, value in had:
            if value is not None and _now(each) != value:
                changed.append(each.name)
                with contextlib.suppress(RuntimeError, OSError):
                    each.put(value)
        if changed:
            warnings.warn(
                f"reward {name!r} changed {', '.join(changed)} and left it so: it was put back, "
                "since training would go on otherwise; let the reward put it back itself (in a "
                "`with` block)",
                stacklevel=5,
            )


def _now(each: Setting) -> Any:
    """Return what a setting is now; None where that cannot be told, as of a folder that is gone."""
    try:
        return each.now()
    except (RuntimeError, OSError):
        return None


def _said(error: BaseException) -> str:
    """Say what was raised, and what is most likely the matter."""
    if isinstance(error, _Exited):
        return f"os._exit({error}), which would have ended the run without a checkpoint"
    return f"{describe_error(error)}{hint(error)}"


@contextlib.contextmanager
def _no_exit(pid: int) -> Iterator[None]:
    """Let ``os._exit`` raise in this thread, not in others, nor in children, which end by it."""
    real, mine = os._exit, threading.get_ident()

    def refused(status: int) -> NoReturn:
        if os.getpid() != pid or threading.get_ident() != mine:
            real(status)
        raise _Exited(status)

    os._exit = refused
    try:
        yield
    finally:
        os._exit = real


def _end_of_fork(name: str) -> NoReturn:
    """End a child that a reward forked and that came back as a second run."""
    text = f"flowrl: reward {name!r} called os.fork, and its child came back: it ends here\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(1)


class _Streams:
    """Standard output and error as they were: the objects of Python, and the files beneath."""

    def __init__(self, watched: bool) -> None:
        self.watched, self.objects = watched, (sys.stdout, sys.stderr)
        self.files: dict[int, int] = {}
        for number in (1, 2) if watched else ():
            with contextlib.suppress(OSError):  # closed
                self.files[number] = os.dup(number)

    def put_back(self) -> list[str]:
        """Open again what was closed, and put back what was exchanged -> what it was."""
        changed: list[str] = []
        if not self.watched:
            return changed
        for number, kept in self.files.items():
            try:
                same = os.path.samestat(os.fstat(number), os.fstat(kept))
            except OSError:  # closed
                same = False
            if not same:
                os.dup2(kept, number)
                changed.append(("", "stdout", "stderr")[number])
            os.close(kept)
        for place, (name, had) in enumerate(zip(("stdout", "stderr"), self.objects, strict=True)):
            if getattr(had, "closed", False):
                had = os.fdopen(os.dup(place + 1), "w", buffering=1)
            if getattr(sys, name) is not had:
                setattr(sys, name, had)
                changed.append(f"sys.{name}")
        return changed


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
