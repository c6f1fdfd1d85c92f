"""Make rewards and ask them: every failure is one message, every answer is checked.

A reward is called in one of two ways (see `named_arguments`). A function of one argument ``batch``
gets a `RewardBatch`. Any other is called by the names of its arguments, as
``f(images, prompts, **record)``: images [L, 3, H, W], the prompts, and each key of the prompts'
records as a list with one entry per image, None where a record lacks the key. Where prompts start
from images, ``source`` are these, a tuple of [3, h, w] per image.

`PerFrame` lets a reward of images judge videos, and `Resting` keeps a reward's networks on their
device only while they score.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import ModuleType
from typing import Any, get_args
from weakref import WeakSet

import numpy
import torch
from torch import Tensor, nn

from flowrl.config.calls import Call, FrameWay
from flowrl.config.load import Config
from flowrl.core.abilities import (
    LearnedReward,
    RewardWithProbe,
    asks_people,
    differentiable,
    ignores_quality,
    judges_singly,
    judges_videos,
    least_frames,
    sees_latents,
)
from flowrl.core.errors import (
    ConfigError,
    RewardError,
    as_one_message,
    near,
)
from flowrl.core.pixels import from_bytes
from flowrl.core.types import Reward, RewardBatch, Source, sources_at
from flowrl.evaluation.reward_guard import guarded, watched

_UNCHANGING = (str, int, float, bool, type(None))


def rewards_of(calls: Mapping[str, Call], frames: int = 1) -> dict[str, Any]:
    """Make the rewards of a config for a model whose videos have so many frames; 1: images. Raises
    ConfigError that names the one which failed, or what it raises of our own errors."""
    made = {}
    for name, call in calls.items():
        with as_one_message(f"making reward {name!r}", ConfigError), watched(name):
            made[name] = fitting(call, resting(call) if call.offload else call.make(), frames)
    return made


def probe_rewards(rewards: Mapping[str, Any]) -> None:
    """Ask each reward that can tell whether it is ready. Raises RewardError, or what it raises of
    our own errors."""
    for name, reward in rewards.items():
        if isinstance(reward, RewardWithProbe):
            with as_one_message(f"the probe of reward {name!r}", RewardError), watched(name):
                reward.probe()


def try_out(rewards: Mapping[str, Any], batch: RewardBatch) -> None:
    """Ask each reward about a few images before a model is loaded, so that a mistake in one is
    found in seconds. Those that ask people, or judge latents, which nobody has made yet, are not
    asked.

    Nothing remembers it: random streams are put back, and a reward without networks is asked as a
    copy where it can be copied. Raises RewardError as `ask` does.
    """
    for name, reward in rewards.items():
        if asks_people(reward) or sees_latents(reward):
            continue
        asked = reward
        if not getattr(reward, "loads_late", False) and next(networks_of(reward), None) is None:
            with contextlib.suppress(Exception):
                asked = copy.deepcopy(reward)
        with torch.no_grad(), same_draws():
            ask(name, asked, batch, "two random images, before anything is loaded")


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """Put the global random streams back, as if nobody had drawn."""
    state = random.getstate(), numpy.random.get_state()
    devices = []
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        devices.append(torch.cuda.current_device())
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(state[0])
            numpy.random.set_state(state[1])


def ask(name: str, reward: Reward | Callable[..., Any], batch: RewardBatch, where: str) -> Tensor:
    """Call one reward -> its values [L] as `checked_scores` returns them. Raises RewardError that
    names it, whatever it failed with.

    The reward gets a batch of its own, as `own_batch` says.
    """
    own = own_batch(batch)
    with guarded(name, f"{where}: reward {name!r}"):
        values = call_reward(reward, own)
    return checked_scores(name, values, batch, where)


def own_batch(batch: RewardBatch) -> RewardBatch:
    """Return a batch with images, prompts, groups, records, sigmas and sources of its own: what a
    reward changes in them, no other sees. Latents, on the model's device, are shared. Images of 256
    levels, uint8, become floats; others keep their gradient."""
    # by place: whoever watches what a reward reads watches the names
    images, prompts, group, meta, sigma = batch[:5]
    pixels = from_bytes(images) if images.dtype == torch.uint8 else images.clone()
    return batch._replace(
        images=pixels,
        prompts=[*prompts],
        group=group.clone(),
        meta=_own(meta),
        sigma=sigma.clone(),
        source=_copied(batch.source),
    )


def _own(value: Any) -> Any:
    """Copy what a record holds. Plain JSON, as files have it, is copied several times as fast as by
    `copy.deepcopy`, which looks after everything else."""
    if type(value) is dict:
        made = dict(value)
        for key, one in value.items():
            if type(one) not in _UNCHANGING:
                made[key] = _own(one)
        return made
    if type(value) in _UNCHANGING:
        return value
    if type(value) is not list:
        return copy.deepcopy(value)
    copied = list(value)
    for place, one in enumerate(value):
        if type(one) not in _UNCHANGING:
            copied[place] = _own(one)
    return copied


def _copied(sources: list[Source]) -> list[Source]:
    """Copy sources [L]; images that share theirs still do."""
    copies: dict[int, Source] = {}
    for source in sources:
        if id(source) not in copies:
            copies[id(source)] = tuple(image.clone() for image in source)
    return [copies[id(source)] for source in sources]


def checked_scores(name: str, values: Any, batch: RewardBatch, where: str) -> Tensor:
    """Return what a reward gave as [L] float32 on the CPU, NaN = not scored.

    Tensors, arrays and lists have one number per image, None for one that is not scored; a plain
    number counts for every image, a tensor without dimensions is a mistake. Raises RewardError for
    anything else.
    """
    # one number per image
    count = len(batch.images)
    said = f"{where}: reward {name!r}: expected {count} numbers, one per image, got"
    try:
        rows = as_tensor(values, count)
        if rows.is_complex():
            raise TypeError("complex numbers have no order")
        rows = rows.detach().float().cpu()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # what was given may have code of its own, such as __array__
        raise RewardError(f"{said} {type(values).__name__}: {error}") from error
    if rows.shape != (count,):
        raise RewardError(f"{said} shape {list(rows.shape)}")
    # none of them infinite
    infinite = rows.isinf().nonzero()
    if len(infinite):
        rule = "NaN means not scored; infinity is never allowed"
        raise unusable(name, rows, batch.prompts, where, int(infinite[0]), rule)
    return rows


def unusable(
    name: str, values: Tensor, prompts: list[str], where: str, first: int, rule: str
) -> RewardError:
    """Say which image has no usable score, and how many have none."""
    missing = int((~values.isfinite()).sum())
    return RewardError(
        f"{where}: reward {name!r} gave {values[first].item()} for image {first}, prompt "
        f"{prompts[first]!r} ({missing} of {len(values)} images have no finite score). {rule}"
    )


def call_reward(reward: Callable[..., Any], batch: RewardBatch) -> Any:
    """Call a reward in the way that its signature asks for. Raises ConfigError for an argument that
    nothing is known of."""
    parameters = _named(reward)
    if parameters is None:
        return reward(batch)
    return reward(**named_arguments(reward, parameters, batch))


def as_tensor(values: Any, count: int) -> Tensor:
    """Make a tensor of what a reward gave. Raises TypeError, ValueError or RuntimeError."""
    if isinstance(values, Tensor):
        rows = values
    elif isinstance(values, list | tuple):
        rows = torch.tensor([_number(value) for value in values])
    elif hasattr(values, "__array__"):
        found = values.__array__()
        rows = torch.tensor(found.tolist(), dtype=torch.float64)
        if found.ndim == 0:
            rows = rows.expand(count)
    elif isinstance(values, int | float):
        rows = torch.full((count,), float(values))
    else:
        raise TypeError("no tensor, array, list or number")
    return rows


def _number(value: Any) -> float:
    if isinstance(value, str):
        raise TypeError(f"the text {value!r} is no number")
    return math.nan if value is None else float(value)


def frames_of(config: Config, model: Any = None) -> int:
    """Return how many frames the videos of a config's model have, or of one that is there already;
    1: it makes images."""
    made = getattr(config.model.function, "frames", None)  # of a model that a program handed over
    asked = config.model.kwargs.get("frames", made)
    if model is not None:
        asked = getattr(model, "frames", 1)
    return int(asked or 1)


def fitting(call: Call, reward: Any, frames: int) -> Any:
    """Return what judges a model's videos of so many frames; 1: images. Raises ConfigError for a
    reward that judges the other kind or longer videos, and for a way to judge frames where there is
    one frame."""
    videos = judges_videos(reward)
    if frames == 1 and videos:
        raise ConfigError(
            f"{call.key}: {call.fn} judges videos, but the model makes images; take a video model "
            "with model.frames above 1, or a reward that judges images"
        )
    if frames == 1 and call.frames:
        raise ConfigError(
            f"{call.key}.frames: the model makes images, so that {call.frames!r} has no effect; "
            "leave it out, or take a video model with model.frames above 1"
        )
    least = least_frames(reward)
    if videos and not call.frames and frames < least:
        raise ConfigError(
            f"{call.key}: {call.fn} judges videos of at least {least} frames as it is set, but the "
            f"model makes {frames}; raise model.frames, or let the reward look at fewer"
        )
    # what is judged is what the model makes
    if frames == 1 or (videos and not call.frames):
        return reward
    if videos:
        raise ConfigError(
            f"{call.key}.frames: {call.fn} judges whole videos, so that {call.frames!r} has no "
            "effect; leave it out"
        )
    # images are judged, videos are made: only the user knows how to get from one to the other
    if not call.frames:
        ways = ", ".join(get_args(FrameWay))
        raise ConfigError(
            f"{call.key}: {call.fn} judges images, but the model makes videos of {frames} frames. "
            f"Say how it judges them, as in {call.key}.frames=mean (there is: {ways}), or take a "
            "reward that judges videos; one of your own says so by `judges_videos = True`, "
            "`remote` by videos: true"
        )
    if isinstance(reward, LearnedReward):
        raise ConfigError(
            f"{call.key}: {call.fn} is trained along on images; with a video model it cannot be"
        )
    return PerFrame(reward, call.frames)


class PerFrame:
    """Judge videos [L, T, 3, H, W] by an image reward -> [L]: the mean or the lowest score of all
    frames, or that of the first or the last. A frame without a score leaves its video without one.

    For rewards that compare images of a prompt, frames of one place in time are a prompt's images.
    """

    judges_videos = True

    def __init__(self, reward: Any, way: str) -> None:
        self.reward, self.way = reward, way
        # what the reward promises of itself holds for its frames, too
        self.judges_singly, self.differentiable = judges_singly(reward), differentiable(reward)
        self.asks_people, self.ignores_quality = asks_people(reward), ignores_quality(reward)
        # only what the reward has: all records are shown to one that checks them
        for name in ("check_record", "check_records"):
            if hasattr(reward, name):
                setattr(self, name, getattr(reward, name))

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score videos [L, T, 3, H, W]. Raises RewardError unless there is a number per frame."""
        shown = {"first": slice(0, 1), "last": slice(-1, None)}.get(self.way, slice(None))
        images = batch.images[:, shown]
        count, frames = images.shape[:2]
        rows = numpy.repeat(range(count), frames).tolist()
        flat = RewardBatch(
            images=images.flatten(0, 1),
            prompts=[batch.prompts[i] for i in rows],
            group=_by_time(batch.group, frames),
            meta=[{**batch.meta[i]} for i in rows],
            sigma=batch.sigma.repeat_interleave(frames),
            source=sources_at(batch.source, rows),
        )
        values = as_tensor(call_reward(self.reward, flat), len(rows))
        if values.shape != (len(rows),):
            raise RewardError(
                f"expected {len(rows)} numbers, one per frame, got shape {list(values.shape)}"
            )
        scores = values.reshape(count, frames)
        # both keep NaN
        return scores.amin(1) if self.way == "min" else scores.mean(1)

    def probe(self) -> None:
        """Ask the reward whether it is ready, if it can tell."""
        if isinstance(self.reward, RewardWithProbe):
            self.reward.probe()


def _by_time(group: Tensor, frames: int) -> Tensor:
    """Number each prompt's images of one place in time [L * T]."""
    time = group.new_tensor(range(frames)).repeat(len(group))
    return group.repeat_interleave(frames) * frames + time


_REGISTERED = ("_parameters", "_buffers", "_modules")


def resting(call: Call) -> Resting:
    """Make a reward that is offloaded. Raises ConfigError for one without networks, or one that is
    trained along."""
    reward = call.make()
    if isinstance(reward, LearnedReward):
        raise ConfigError(
            f"{call.key}.offload: {call.fn} is trained along, so that its networks have to stay"
        )
    networks = list(networks_of(reward))
    # some load a network with the first image that needs it
    if not networks and not getattr(reward, "loads_late", False):
        raise ConfigError(
            f"{call.key}.offload: {call.fn} has no network of its own to offload; leave it out"
        )
    return Resting(reward, networks)


class Resting:
    """A reward that is asked like any other; everything else is that of the reward itself.

    Networks that it loads while it scores or is probed rest from then on. No gradient goes through
    it: the weights are elsewhere by the time of a backward pass.
    """

    differentiable = False

    def __init__(self, reward: Any, networks: list[nn.Module]) -> None:
        self.reward, self.networks = reward, networks
        self.homes = [*map(_device, networks)]
        self.late = bool(getattr(reward, "loads_late", False))
        self._rest()

    def __getattr__(self, name: str) -> Any:
        if name == "reward":  # while it is copied
            raise AttributeError(name)
        return getattr(self.reward, name)

    def __call__(self, batch: RewardBatch) -> Any:
        """Score with the networks on their device; afterwards they are on the host again, also on
        an error."""
        try:
            for network, home in zip(self.networks, self.homes, strict=True):
                network.to(home)
            return call_reward(self.reward, batch)
        finally:
            self._rest()

    def probe(self) -> None:
        """Ask the reward whether it is ready, if it can tell; what it loads for that rests."""
        try:
            if isinstance(self.reward, RewardWithProbe):
                self.reward.probe()
        finally:
            self._rest()

    def _rest(self) -> None:
        # home is where a network was loaded
        if self.late:
            for network in networks_of(self.reward):
                if network not in self.networks:
                    self.networks.append(network)
                    self.homes.append(_device(network))
        for network in self.networks:
            network.to("cpu")


def networks_of(owner: Any) -> Iterator[nn.Module]:
    """Yield the networks with weights that an object holds, in its attributes and in theirs, each
    once; also those that a network keeps without registering them as its parts."""
    seen: set[int] = set()
    left = [owner]
    while left:
        one = left.pop()
        # objects may point to each other in circles
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            # its parts move with it, so they are not listed again; what hangs on them does not
            parts = list(one.modules())
            seen.update(map(id, parts))
            for part in parts:
                left += [value for name, value in vars(part).items() if name not in _REGISTERED]
            if next(one.parameters(), None) is not None:
                yield one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list | tuple | set):
            left += one
        elif hasattr(one, "__dict__") and not isinstance(one, type | ModuleType):
            left += vars(one).values()


def _device(network: nn.Module) -> torch.device:
    return next(network.parameters()).device


# ------------------------------------------------------------------ how a reward wants to be called


BATCH = "batch"  # the name of an argument that is a whole `RewardBatch`
OURS = ("images", "prompts", "source")
FORM = "f(images, prompts, **record), or f(batch) for a whole RewardBatch"

# rewards whose names were looked up in whole lists: a batch may lack a key that others have
_checked: WeakSet[Any] = WeakSet()


def named_arguments(
    reward: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], batch: RewardBatch
) -> dict[str, Any]:
    """Return what a function gets by name. Raises ConfigError for a name that nothing has."""
    columns = dict.fromkeys(chain.from_iterable(batch.meta))
    if not _is_checked(reward):
        _check_names(parameters, columns)
    # all there is, one entry per image
    known: dict[str, Any] = {}
    for key in [*columns, *_needed(parameters)]:
        known[key] = [record.get(key) for record in batch.meta]
    known |= {"images": batch.images, "prompts": batch.prompts}
    known.pop("prompt", None)
    if batch.source:
        known["source"] = list(batch.source)
    # of it what the function takes
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return known
    return {key: value for key, value in known.items() if key in parameters}


def check_arguments(rewards: Mapping[str, Any], records: Iterable[Mapping[str, Any]]) -> None:
    """Check before anything is sampled that each argument of a reward is known: a name of ours, or
    a key of one of the prompts' records. Raises ConfigError that shows the right form."""
    columns = dict.fromkeys(chain.from_iterable(records))
    for name, reward in rewards.items():
        parameters = _named(reward)
        if parameters is None:
            continue
        try:
            _check_names(parameters, columns)
        except ConfigError as error:
            raise ConfigError(f"reward {name!r}: {error}") from None
        try:
            _checked.add(reward)
        except TypeError:  # an object that cannot be remembered is checked again
            continue


def _is_checked(reward: Any) -> bool:
    try:
        return reward in _checked
    except TypeError:
        return False


def _named(reward: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a reward that is called by their names; None where it takes a
    `RewardBatch`: its only argument is named `batch`, or annotated so, or is any."""
    try:
        parameters = inspect.signature(reward).parameters
    except (TypeError, ValueError):  # written in C
        return None
    if set(parameters).isdisjoint(OURS):
        first = next(iter(parameters.values()), None)
        if first is None or first.kind is first.VAR_POSITIONAL:
            return None
        if first.name == BATCH or RewardBatch.__name__ in str(first.annotation):
            return None
    return parameters


def _needed(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Return the names that a function has to be given."""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters.values() if p.kind not in various and p.default is p.empty]


def _check_names(parameters: Mapping[str, inspect.Parameter], columns: Iterable[str]) -> None:
    keys = [key for key in columns if key != "prompt"]
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"its argument {parameter.name!r} has a place and no name, and a reward is called "
                f"by names; write {FORM}"
            )
    for name in _needed(parameters):
        if name not in (*OURS, *keys):
            there = ", ".join([*OURS[:2], *keys])
            raise ConfigError(
                f"its argument {name!r} is nothing that a reward gets{near(name, [*OURS, *keys])}; "
                f"a reward is called by the names of its arguments, here of {there}. Write {FORM}"
            )
