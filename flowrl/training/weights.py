"""Named copies of the trainable parameters (old, ref, ema) that can take the model's place for a
while."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.core.processes import shared_as, whole
from flowrl.core.shards import is_share
from flowrl.training.checkpoint import CheckpointTensors


class Weights:
    """Keep snapshots of the trainable parameters, in their own dtype and on their own device.

    ``stay``: parameters keep their place in memory, as CUDA graphs need it; a snapshot then takes
    their place by exchanging values.
    """

    def __init__(self, params: dict[str, nn.Parameter], *, stay: bool = False) -> None:
        self._params, self._stay = dict(params), stay
        self._snapshots: dict[str, dict[str, Tensor]] = {}
        self._in_use: list[str] = []
        self._nothing: dict[str, bool] = {}  # what `adds_nothing` found

    def names(self) -> list[str]:
        """List the snapshots in the order in which they were first taken."""
        return list(self._snapshots)

    @torch.no_grad()
    def snapshot(self, name: str) -> None:
        """Copy the current parameters under `name`, over an older copy if there is one. Raises
        RunError in `using`."""
        self._own(f"snapshot {name!r}")
        self._nothing.pop(name, None)
        self._snapshots[name] = {key: p.detach().clone() for key, p in self._params.items()}

    @torch.no_grad()
    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Keep other parameters under `name`, {parameter: tensor of its shape}. Raises
        CheckpointError if they do not fit the model."""
        self._own(f"add {name!r}")
        self._check(name, tensors)
        self._snapshots[name] = {
            key: shared_as(tensors[key].to(p.dtype), p).to(p.device)
            for key, p in self._params.items()
        }

    @torch.no_grad()
    def lerp(self, name: str, decay: float, towards: str | None = None) -> None:
        """Set ``name <- decay * name + (1 - decay) * current``, or the snapshot `towards` in place
        of the current ones; 0 copies, 1 keeps. Raises ConfigError, RunError."""
        self._own(f"lerp {name!r}")
        self._nothing.pop(name, None)
        if not 0 <= decay <= 1:
            raise ConfigError(f"the decay of snapshot {name!r} must lie in [0, 1], got {decay}")
        goal = self._params if towards is None else self._get(towards)
        for key, value in self._get(name).items():
            value.lerp_(goal[key], 1 - decay)

    def adds_nothing(self, name: str) -> bool:
        """Say whether the snapshot is that of adapters as they start: the matrix B of each is
        zero, so that the network is the base network."""
        if name not in self._nothing:
            second = [rows for key, rows in self._get(name).items() if ".lora_B." in key]
            zero = len(second) * 2 == len(self._params) and not any(map(_any, second))
            self._nothing[name] = zero
        return self._nothing[name]

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Let the model run with the snapshot; the current parameters come back afterwards, also on
        an exception.

        Tensors change places without a copy; only shares of FSDP, which knows its own memory, are
        copied, and with ``stay`` values change places. Do not step an optimizer inside: it would
        change the snapshot (see `training`).
        """
        snapshot = self._get(name)
        if self._stay:
            with self._exchanged(name):
                yield
            return
        current = {
            key: p.detach().clone() if is_share(p) else p.data for key, p in self._params.items()
        }
        self._in_use.append(name)
        try:
            self._put(snapshot)
            yield
        finally:
            self._put(current)
            self._in_use.pop()

    @contextmanager
    def _exchanged(self, name: str) -> Iterator[None]:
        """Let parameters and the snapshot exchange their values, one tensor after the other, and
        exchange them again."""
        if name in self._in_use and name != self._in_use[-1]:
            raise RunError(
                f"snapshot {name!r} is in use below {self._in_use[-1]!r}, which holds its values"
            )
        needed = self._in_use[-1:] != [name]
        snapshot, changed = self._snapshots[name], list[str]()
        self._in_use.append(name)
        try:
            for key in self._params if needed else ():
                _exchange(self._params[key].data, snapshot[key])
                changed.append(key)
            yield
        finally:
            # only those that have been exchanged: the rest may have failed for want of memory
            for key in changed:
                _exchange(self._params[key].data, snapshot[key])
            self._in_use.pop()

    @contextmanager
    def training(self, name: str) -> Iterator[None]:
        """Let an optimizer of the parameters step the snapshot, in the current ones' place."""
        self._nothing.pop(name, None)
        with self.using(name):
            yield

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return {snapshot: {parameter: tensor}}, not copied."""
        return {name: dict(tensors) for name, tensors in self._snapshots.items()}

    @torch.no_grad()
    def load_state_dict(
        self, state: dict[str, dict[str, Tensor]], *, besides: Collection[str] = ()
    ) -> None:
        """Replace all snapshots but `besides` by copies of those in `state`. Raises CheckpointError
        if one does not fit the model."""
        self._own("load_state_dict")
        self._nothing.clear()
        for name, tensors in state.items():
            self._check(name, tensors)
        found = {name: self._snapshots[name] for name in besides}
        for name, tensors in state.items():
            found[name] = {}
            for key, p in self._params.items():
                found[name][key] = tensors[key].to(p.device, p.dtype, copy=True)
        self._snapshots = found

    def shared_as(self, file: str, name: str) -> Tensor | None:
        """Return the parameter that a tensor of a checkpoint's file is shared out as."""
        return self._params.get(name)

    def _get(self, name: str) -> dict[str, Tensor]:
        if name not in self._snapshots:
            raise ConfigError(f"no weights named {name!r} were taken; there are {self.names()}")
        return self._snapshots[name]

    def _put(self, tensors: dict[str, Tensor]) -> None:
        for key, p in self._params.items():
            if is_share(p):
                with torch.no_grad():
                    p.copy_(tensors[key])
            else:
                p.data = tensors[key]

    def _own(self, action: str) -> None:
        if self._in_use:
            raise RunError(
                f"{action}: the model holds snapshot {self._in_use[-1]!r} now; leave `using` first"
            )

    def _check(self, name: str, tensors: dict[str, Tensor]) -> None:
        # three ways not to fit: too few tensors, too many, or ones of other shapes
        missing, extra = self._params.keys() - tensors.keys(), tensors.keys() - self._params.keys()
        shapes = [
            key
            for key, p in self._params.items()
            if key in tensors and tensors[key].shape != p.shape
        ]
        # the message names a few of them
        for what, keys in (
            ("lacks", missing),
            ("has unknown", extra),
            ("has other shapes for", shapes),
        ):
            if keys:
                some = ", ".join(sorted(keys)[:3])
                raise CheckpointError(
                    f"snapshot {name!r} {what} {len(keys)} of the model's {len(self._params)} "
                    "trainable parameters "
                    f"({some}): it was saved with another model or another LoRA setting"
                )


@torch.no_grad()
def put_weights(params: dict[str, nn.Parameter], tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into the parameters of the same names. Raises CheckpointError if names or shapes
    differ, or a value is not finite."""
    _check_fit(params, {name: tuple(rows.shape) for name, rows in tensors.items()}, where)
    for name, rows in tensors.items():
        # a NaN would end the first iteration, long after the file was named
        if not bool(rows.isfinite().all()):
            raise CheckpointError(f"{where}: {name} holds a value that is not finite")
    for name, p in params.items():
        p.copy_(shared_as(tensors[name], p))


def check_saved(params: Mapping[str, nn.Parameter], files: CheckpointTensors, name: str) -> None:
    """Raise CheckpointError unless a checkpoint's file has the parameters' names and shapes."""
    _check_fit(params, files.shapes(name), files.folder)


def put_saved(params: Mapping[str, nn.Parameter], files: CheckpointTensors, name: str) -> None:
    """Read the tensors of a checkpoint's file into the parameters of the same names, one after the
    other. Raises CheckpointError if names or shapes differ."""
    check_saved(params, files, name)
    files.read_into(name, params)


def _check_fit(
    params: Mapping[str, nn.Parameter], shapes: Mapping[str, tuple[int, ...]], where: Path
) -> None:
    wrong = [k for k, p in params.items() if shapes.get(k) != tuple(p.shape)]
    wrong += [k for k in shapes if k not in params]
    if wrong:
        raise CheckpointError(
            f"{where}: {len(wrong)} of {len(params)} trainable parameters do not fit this model "
            f"(first: {wrong[0]}); it was saved with another model, `tune` or LoRA setting"
        )


def _any(tensor: Tensor) -> bool:
    return bool(whole(tensor).any())


def _exchange(one: Tensor, other: Tensor) -> None:
    """Let two tensors of one shape exchange their values. Either both have them, or, where it
    raises, neither."""
    # by .data of a parameter: what autograd kept for a backward pass counts as unchanged
    try:
        kept = one.clone()
    except torch.OutOfMemoryError:  # the way back must not fail
        kept = one.to("cpu", copy=True)
    one.copy_(other)
    other.copy_(kept)
