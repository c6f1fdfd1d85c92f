"""What stands in a pipeline's place for one call: a scheduler that notes a velocity and steps
nowhere, a network that is passed over, times of their own for each row.

A pipeline's loop asks its scheduler for timesteps, its network for an output, and hands that to
``step``. A `probe` gives the timesteps that it was told, and ends the call at the step that is
asked about by raising `Stop`: nothing behind it runs.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowrl.core.errors import ModelError


class Stop(BaseException):
    """Ends a pipeline's call; no pipeline catches it."""


class Noted(NamedTuple):
    """What a pipeline handed to its scheduler at one step."""

    out: Tensor  # the output of the network, guided
    time: Any
    x: Tensor  # the sample


class Stepped(tuple):  # type: ignore[type-arg]  # what pipelines take of a step: [0], a pair, a name
    """What a step returns, whichever way a pipeline reads it."""

    prev_sample: Tensor

    def __new__(cls, x: Tensor) -> Stepped:
        """Make it of the next sample."""
        made = super().__new__(cls, (x, x))
        made.prev_sample = x
        return made


def probe(
    real: Any,
    times: Tensor,
    sigmas: Tensor,
    *,
    skip: int = 0,
    end: Tensor | None = None,
    at_step: Callable[[int], None] = lambda k: None,
) -> Any:
    """Return a stand-in for a scheduler with these ``times`` and ``sigmas``, which takes no step.

    The call ends at step ``skip``, or with ``end`` goes on with it as the last sample. ``at_step``
    hears how many steps were taken. It is of a subclass of the scheduler's class, so whatever else
    a pipeline asks is answered as before.
    """
    made = copy.copy(real)
    kind: Any = type(real)
    made.__class__ = _probe_class(kind)
    made.given = (times, sigmas)
    made.skip, made.end, made.at_step = skip, end, at_step
    made.got = []
    made._step_index = made._begin_index = None
    return made


@functools.cache
def _probe_class(kind: type[Any]) -> type[Any]:
    """Return the subclass of a scheduler's class that takes no step."""

    @functools.wraps(kind.set_timesteps)  # pipelines look at its signature
    def set_timesteps(self: Any, *args: Any, **named: Any) -> None:
        self.timesteps = self.given[0]
        if hasattr(self, "sigmas"):  # pipelines ask whether a scheduler has them
            self.sigmas = self.given[1]
        self.num_inference_steps = len(self.timesteps)

    def scale_model_input(self: Any, sample: Tensor, *args: Any, **named: Any) -> Tensor:
        return sample

    def step(self: Any, out: Any, time: Any, sample: Any, *args: Any, **named: Any) -> Stepped:
        self.got.append(Noted(out, time, sample))
        if self.end is not None:
            return Stepped(self.end)
        if len(self.got) <= self.skip:
            self.at_step(len(self.got))
            return Stepped(sample)
        raise Stop

    own = {"set_timesteps": set_timesteps, "scale_model_input": scale_model_input, "step": step}
    return type(kind.__name__, (kind,), own | {"init_noise_sigma": 1.0, "order": 1})


def _flat_sizes(sizes: Any) -> Any:
    """Return the sizes that torch takes as several arguments, or as one list of them."""
    if len(sizes) == 1 and not isinstance(sizes[0], int):
        return sizes[0]
    return sizes


class RowTimes(Tensor):
    """Times [B], one for each row; a pipeline that stretches them to a batch of k B rows gets them
    k times, as it has the rows."""

    def expand(self, *sizes: Any) -> Tensor:  # type: ignore[override]
        """Repeat to [k B], where tensors of one time are expanded."""
        wanted = _flat_sizes(sizes)
        plain = self.as_subclass(Tensor)  # type: ignore[arg-type]
        if plain.dim() == 1 and len(wanted) == 1 and wanted[0] not in (-1, len(plain)):
            times, rest = divmod(int(wanted[0]), len(plain))
            if rest or not times:
                raise ValueError(f"expected a multiple of {len(plain)} rows, got {wanted[0]}")
            return plain.repeat(times)
        return plain.expand(*wanted)

    def repeat(self, *sizes: Any) -> Tensor:
        """Repeat to [B], where a tensor of one time is repeated for each row."""
        wanted = _flat_sizes(sizes)
        plain = self.as_subclass(Tensor)  # type: ignore[arg-type]
        count = int(wanted[0])
        if plain.dim() == 1 and len(wanted) == 1 and count % len(plain) == 0:
            return plain.repeat(count // len(plain))
        return plain.repeat(*wanted)


def row_times(times: Tensor) -> Tensor:
    """Return one step [1, B] at which each row has its own time of ``times`` [B]."""
    return times[None].as_subclass(RowTimes)


class Stubs:
    """Networks that answer with zeros, for the steps before the one that is asked about.

    What zeros look like is learned from one real call for each set of input shapes.
    """

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    @contextmanager
    def passing(self, networks: Mapping[str, nn.Module]) -> Iterator[Callable[[], None]]:
        """Let networks answer with zeros until the function that is yielded is called."""
        with ExitStack() as stack:
            undo = []
            for name, network in networks.items():
                own, real = vars(network).get("forward"), network.forward
                network.forward = functools.partial(  # type: ignore[method-assign]
                    self._zeros, name, real
                )
                undo.append(functools.partial(_put_back, network, own))
            for put_back in undo:
                stack.callback(put_back)

            def real_again() -> None:
                for put_back in undo:
                    put_back()

            yield real_again

    def _zeros(self, name: str, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        key = (name, *_shapes((args, named)))
        if key not in self._known:
            with torch.no_grad():
                self._known[key] = _mapped(real(*args, **named), lambda t: t.to("meta"))
        device = _first(args, named).device
        return _mapped(self._known[key], lambda t: torch.zeros_like(t, device=device))


def _put_back(network: nn.Module, own: Any) -> None:
    """Let a network compute by its class's forward again, or by one of its own."""
    vars(network).pop("forward", None)
    if own is not None:
        network.forward = own


@contextmanager
def stopped_at(networks: Sequence[nn.Module]) -> Iterator[None]:
    """End a pipeline's call where one of the networks is asked."""

    def stop(*_: Any) -> None:
        raise Stop

    hooks = [network.register_forward_pre_hook(stop) for network in networks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _shapes(found: Any) -> tuple[Any, ...]:
    """Return the shapes of all tensors in nested inputs."""
    if isinstance(found, Tensor):
        return (tuple(found.shape), str(found.dtype))
    if isinstance(found, dict):
        return tuple((key, _shapes(value)) for key, value in found.items())
    if isinstance(found, list | tuple):
        return tuple(map(_shapes, found))
    return (type(found).__name__,)


def _first(*found: Any) -> Tensor:
    """Return the first tensor in nested inputs. Raise ModelError if there is none."""
    queue = list(found)
    while queue:
        one = queue.pop(0)
        if isinstance(one, Tensor):
            return one
        if isinstance(one, dict):
            queue += one.values()
        if isinstance(one, list | tuple):
            queue += one
    raise ModelError("pipeline: the network was called without a tensor")


def _mapped(found: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change all tensors of a network's output."""
    if isinstance(found, Tensor):
        return change(found)
    if isinstance(found, dict):
        made = copy.copy(found)
        for key in found:
            made[key] = _mapped(found[key], change)
        return made
    if isinstance(found, list | tuple):
        return type(found)(_mapped(one, change) for one in found)
    return found
