"""Several processes as one run: who holds which prompts, and how their numbers come together.

Beside `shards.py` the only file that imports torch.distributed. Processes are started by
``accelerate launch`` or ``torchrun``; accelerate picks the back end (NCCL with CUDA, else gloo) and
each process' device.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed
from torch import Tensor

from flowrl.core.errors import ConfigError, FlowRLError, ProcessLost, RewardError, RunError

T = TypeVar("T")
BUCKET = 2**25  # numbers that are summed in one call: 128 MiB
JOINED_AFTER = 60.0  # seconds after which processes that have not joined are told
PATIENCE = timedelta(hours=2)  # one process may wait so long for a slow reward of another


@dataclass(frozen=True)
class World:
    """The processes of a run; of one process, each method returns at once."""

    rank: int = 0
    size: int = 1
    # several processes may compute each sample together: then they are one of `size`
    context: int = 1
    place: int = 0  # of this process among these

    @property
    def main(self) -> bool:
        """Tell whether this is the process that writes files and talks."""
        return self.rank == 0 and self.place == 0

    @cached_property
    def alone(self) -> bool:
        """Tell whether there is no other process."""
        return self.size * self.context == 1

    def in_groups(self, context: int) -> World:
        """Return the same processes, of which each `context` that follow each other are one: they
        have the same prompts and the same noise. Raises ConfigError."""
        if context == 1 or self.alone:
            return self
        if self.size % context:
            raise ConfigError(
                f"model.runtime.context_parallel={context}: expected a number of processes that is "
                f"a multiple of it, got {self.size}"
            )
        rank, place = divmod(self.rank, context)
        return World(rank, self.size // context, context, place)

    def share(self, count: int) -> range:
        """Return this process' places of `count`: contiguous, in the order of ranks, sizes apart by
        at most one."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def gather(self, value: T) -> list[T]:
        """Return every process' value in the order of ranks, exactly (integers stay integers); of
        processes that are one, the first one's.

        Tensors must be on the CPU. All values are our own processes': they are pickled on the way.
        Raises ProcessLost if one of them is gone.
        """
        return self._gather(value)[:: self.context]

    def _gather(self, value: T) -> list[T]:
        if self.alone:
            return [value]
        values: list[Any] = [None] * self.size * self.context
        call: Callable[[], object] = partial(torch.distributed.all_gather_object, values, value)
        if launched():
            call = partial(_heard, call)
        self._exchange(call)
        return values

    def totals(self, rows: Sequence[Sequence[int]], columns: int) -> list[int]:
        """Add up columns of whole numbers, over rows and over all processes."""
        total = [0] * columns
        for row in rows:
            for column, number in enumerate(row):
                total[column] += number
        if self.alone:
            return total
        return list(map(sum, zip(*self.gather(total), strict=True)))

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set in any process."""
        return any(self._gather(flag))

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype and device by their sums over all processes, in few large
        calls. Raises ProcessLost if one of them is gone."""
        if self.alone:
            return
        bucket: list[Tensor] = []
        numbers = 0
        for tensor in tensors:
            if bucket and numbers + tensor.numel() > BUCKET:
                self._exchange(partial(_sum, bucket))
                bucket, numbers = [], 0
            bucket.append(tensor)
            numbers += tensor.numel()
        if bucket:
            self._exchange(partial(_sum, bucket))

    def by_main(self, work: Callable[[], T]) -> T:
        """Do work in the first process alone -> what it returned, in all of them, by one exchange.
        If it fails, all raise as `together` says."""
        if self.alone:
            return work()
        found: T = self._meet(work if self.main else None, tell=True)[1][0]
        return found

    def together(self, work: Callable[[], T]) -> T:
        """Do work in every process. If it fails in one, all raise: nobody waits for a process that
        is gone.

        Raises in each process what `work` raised there; elsewhere RewardError or RunError with the
        first such message.
        """
        if self.alone:
            return work()
        found: T = self._meet(work, tell=False)[0]
        return found

    def _meet(self, work: Callable[[], Any] | None, *, tell: bool) -> tuple[Any, list[Any]]:
        """Do work, if there is any, and meet the others -> what it returned, and what all told of
        that."""
        found: Any = None
        failed: BaseException | None = None
        try:
            # an error waits: who failed must meet the others in the gather below, too
            if work is not None:
                found = work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failed = error
        # all tell each other how it went, as (is it a reward's, its message)
        wrong = None
        if failed is not None:
            wrong = isinstance(failed, RewardError), f"{failed}"
        try:
            answers = self._gather((wrong, found if tell else None))
        except ProcessLost:
            if failed is None:
                raise
            # a process is lost, but the error here says more
            raise failed from None
        if failed is not None:
            raise failed
        # it went well here, but not elsewhere: stop, too
        for rank, (mistake, _) in enumerate(answers):
            if mistake is not None:
                kind: type[FlowRLError] = RewardError if mistake[0] else RunError
                raise kind(f"process {rank} of {len(answers)}: {mistake[1]}")
        return found, [told for _, told in answers]

    def _exchange(self, call: Callable[[], object]) -> None:
        """Talk to the other processes. Raises ProcessLost where one does not answer any more."""
        try:
            call()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:300]
            number, count = self.rank * self.context + self.place, self.size * self.context
            raise ProcessLost(
                f"process {number} of {count}: another process of the run is gone; its own "
                f"message, or the system's log, says why ({reason})"
            ) from error


ALONE = World()


KILLERS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")


def launched() -> bool:
    """Tell whether this process was started by what kills 30 s after its signal: torchrun,
    accelerate with several processes, Slurm, Kubernetes."""
    return any(map(os.environ.get, KILLERS))


_waits = 0


@contextmanager
def waiting() -> Iterator[None]:
    """Say that what is inside waits for somebody else, a reward or another process, and that a run
    is the same wherever it is left, so that a signal may end it at once. Counts in the main
    thread alone, which hears signals."""
    global _waits
    mine = threading.current_thread() is threading.main_thread()
    _waits += mine
    try:
        yield
    finally:
        _waits -= mine


def is_waiting() -> bool:
    """Tell whether the main thread is in `waiting`."""
    return _waits > 0


def _heard(call: Callable[[], object]) -> None:
    """Run a call that waits for other processes in a thread: in the main one it would be deaf to
    signals until the last of them has come."""
    if threading.current_thread() is not threading.main_thread():
        call()
        return
    failed: list[BaseException] = []
    done = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def work() -> None:
        try:
            if device is not None:  # each thread has its own
                torch.cuda.set_device(device)
            call()
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    threading.Thread(target=work, daemon=True).start()
    with waiting():
        done.wait()
    if failed:
        raise failed[0]


def sharded() -> bool:
    """Tell whether the launcher asked for FSDP: each process keeps its share of every weight of the
    network.

    Raises ConfigError for FSDP of version 1.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in ("1", "true") or world().size == 1:
        return False
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise ConfigError(
            "fsdp_version: expected 2 in the launcher's config (configs/accelerate/fsdp.yaml), "
            f"got {version}"
        )
    return True


def shard(network: Any, kinds: Sequence[str]) -> None:
    """Share a network's weights out over all processes, block by block, with FSDP2; gradients are
    summed, not averaged.

    ``kinds`` are the class names of the blocks whose weights come together while they compute.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in reversed([*network.modules()]):  # children first
        if module is network or type(module).__name__ in kinds:
            # The root, too, gives its weights back: swapped ones (EMA, reference) must be fetched
            # again.
            fully_shard(module, reshard_after_forward=True)
    for module in network.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as one process would hold it; the processes' shares are joined, so all must
    call it."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shared_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this process' share of a whole tensor, shared out as the parameter is; the same if
    that is whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or tensor.shape != parameter.shape:
        return tensor
    if isinstance(tensor, DTensor):  # it is one already
        return tensor
    return distribute_tensor(
        tensor.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def world() -> World:
    """Return the processes that this one was started with, and join them at the first call. Raises
    RunError."""
    size = _whole("WORLD_SIZE", 1)
    if size == 1:
        return World()
    if not torch.distributed.is_initialized():
        from accelerate import PartialState

        try:
            with _told_of_waiting(size):
                PartialState(timeout=PATIENCE)
        except (RuntimeError, ValueError) as error:
            raise RunError(
                f"process {os.environ.get('RANK')} of {size} could not join the others: {error}"
            ) from error
        atexit.register(_leave)
    return World(torch.distributed.get_rank(), torch.distributed.get_world_size())


@contextmanager
def _told_of_waiting(size: int) -> Iterator[None]:
    """Say after a minute, and then every ten, that the other processes have not come."""
    done = threading.Event()
    rank, meet = os.environ.get("RANK", "?"), os.environ.get("MASTER_ADDR", "?")
    meet += f":{os.environ.get('MASTER_PORT', '?')}"

    def tell() -> None:
        waited = JOINED_AFTER
        while not done.wait(waited):
            text = (
                f"flowrl: process {rank} of {size} still waits for others to join it at {meet}: "
                f"each of {size} has to be started, with this address and with a RANK of its own "
                f"from 0 to {size - 1}; look at their messages, or stop this one\n"
            )
            os.write(2, text.encode())
            waited = 10 * JOINED_AFTER

    threading.Thread(target=tell, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def context_mesh(degree: int, device: str) -> Any:
    """Return diffusers' mesh of the processes that compute each sample together with this one:
    ``degree`` of them, by Ulysses. All processes must call it."""
    from torch.distributed.device_mesh import init_device_mesh

    shape = (world().size // degree, 1, degree)
    mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "ring", "ulysses"))
    return mesh["ring", "ulysses"]


def end_process(code: int) -> NoReturn:
    """End this one of several processes with an exit code, once its work is done.

    What was registered with `atexit` runs and streams are flushed; the interpreter is not taken
    apart. Threads of the back end that would take Python's lock after that abort the process
    ("terminate called without an active exception"): a run that went well would end with -6.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _leave() -> None:
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _whole(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() and int(text) else default


def _sum(bucket: list[Tensor]) -> None:
    flat = torch.cat([tensor.flatten() for tensor in bucket])
    torch.distributed.all_reduce(flat)
    for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view_as(tensor))
