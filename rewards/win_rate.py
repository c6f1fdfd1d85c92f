"""Reward images by how often they win against the other images of their prompt, by any judge of
pairs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import types
import typing
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.core.abilities import RewardWithProbe
from flowrl.core.errors import ConfigError, RunError, unknown
from flowrl.core.types import RewardBatch

from ._common.pairs import all_pairs, both_orders, some_pairs, tournament, verdict, win_rates

_NAME = re.compile(r"(rewards\.)?(?P<file>[a-z][a-z0-9_]*)(\.(?P<cls>[a-z][a-z0-9_]*))?")


@runtime_checkable
class _Compares(Protocol):
    def compare(
        self, first: Tensor, second: Tensor, prompts: list[str], meta: list[dict[str, Any]]
    ) -> Tensor: ...


@runtime_checkable
class _ComparesPlaces(Protocol):
    """A judge that takes places of images instead of copies: an image is prepared once, not once
    per pair."""

    def compare_pairs(
        self,
        images: Tensor,
        first: Tensor,
        second: Tensor,
        prompts: list[str],
        meta: list[dict[str, Any]],
    ) -> Tensor: ...


@runtime_checkable
class _Checks(Protocol):
    def check_record(self, record: dict[str, Any], where: str) -> None: ...


@runtime_checkable
class _ChecksCompared(Protocol):
    """A judge whose `check_record` is for single images alone."""

    def check_compared(self, record: dict[str, Any], where: str) -> None: ...


@runtime_checkable
class _Learns(Protocol):
    def update(self, batch: RewardBatch) -> dict[str, float]: ...


class win_rate:
    """Score images by their mean result against the others of their group -> [L] float32 in [0,
    1], NaN unanswered.

    A win counts 1, a tie .5, a missing pair not at all. If every pair is answered, a group of G
    sums to G/2. `judge` is {fn: reward file, its arguments}: one with `compare` is asked about
    pairs, any other scores single images and the higher score wins. `swap`: ask in both orders
    and average; orders that disagree make a tie. `max_pairs`: compare only so many pairs per group,
    chosen by `seed` and the pixels. `schedule` "tournament" asks 2 (G - 1) questions a group, first
    against one image, then winners against winners, and gives places in place of rates (ArenaRL;
    reconstruction). `tie`: scores of a judge of single images that differ by no more are a tie;
    `vlm` with a template for single images is such a judge. Source: Pref-GRPO (2508.20751), its
    code at 3e787f6.

    **Differs:** the code asks in one order, i < j (`swap: false` does the same); there an
    unreadable answer is a tie and a failed request ends the run, here both are missing; there rates
    are rounded to 3 decimals, here they are not. Raises ConfigError for a judge that cannot be
    made, RunError for one that returns something else than verdicts.
    """

    def __init__(
        self,
        *,
        judge: dict[str, Any],
        swap: bool = True,
        max_pairs: int | None = None,
        seed: int = 0,
        schedule: Literal["all", "tournament"] = "all",
        tie: float = 0.0,
    ) -> None:
        if (schedule == "tournament" and max_pairs is not None) or not tie >= 0:
            raise ConfigError(
                "rewards.win_rate: expected tie of at least 0, and max_pairs with schedule all "
                f"alone, got {schedule=}, {max_pairs=}, {tie=}"
            )
        if max_pairs is not None and max_pairs < 1:
            raise ConfigError(
                f"rewards.win_rate: max_pairs: expected 1 or more, or null for all, got {max_pairs}"
            )
        self.judge = _make(judge)
        if tie and _compares(self.judge):
            raise ConfigError(
                "rewards.win_rate: tie: expected a judge of single images, whose scores it is for; "
                f"got one of pairs: {judge['fn']} names ties itself; leave tie={tie} out"
            )
        self.swap, self.max_pairs, self.seed = swap, max_pairs, seed
        self.schedule, self.tie = schedule, tie

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Let the judge refuse a record, before the first image is made."""
        if isinstance(self.judge, _ChecksCompared):
            self.judge.check_compared(record, where)
        elif isinstance(self.judge, _Checks):
            self.judge.check_record(record, where)

    def probe(self) -> None:
        """Let the judge say whether it can answer."""
        if isinstance(self.judge, RewardWithProbe):
            self.judge.probe()

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Compare images [L, 3, H, W] within their groups, all in one call of the judge -> win
        rates [L]."""
        group = batch.group.cpu()
        if self.schedule == "tournament":
            return self._tournament(batch, group).to(batch.images.device)
        if self.max_pairs is None:
            first, second = all_pairs(group)
        else:
            option = "rewards.win_rate: max_pairs"
            first, second = some_pairs(
                group, batch.images, self.max_pairs, self.seed, option=option
            )
        if not len(first):
            return torch.full((len(group),), torch.nan, device=batch.images.device)
        outcome = self._compare(batch, first, second)
        return win_rates(outcome, first, second, len(group)).to(batch.images.device)

    def _tournament(self, batch: RewardBatch, group: Tensor) -> Tensor:
        """Rank each group by rounds of pairs; a judge of single images is asked about each once."""
        score: Tensor | None = None
        if not _compares(self.judge):
            score = _checked(self.judge(batch), len(batch.images), bound=torch.inf)

        def ask(first: Tensor, second: Tensor) -> Tensor:
            if score is not None:
                return verdict(score[first], score[second], self.tie)
            return self._compare(batch, first, second)

        return tournament(group, batch.images, self.seed, ask)

    def _compare(self, batch: RewardBatch, first: Tensor, second: Tensor) -> Tensor:
        if not _compares(self.judge):
            score = _checked(self.judge(batch), len(batch.images), bound=torch.inf)
            return verdict(score[first], score[second], self.tie)
        if not self.swap:
            return _checked(_ask(self.judge, batch, first, second), len(first), bound=1)
        asked, against = torch.cat([first, second]), torch.cat([second, first])
        outcome = _checked(_ask(self.judge, batch, asked, against), len(asked), bound=1)
        return both_orders(*outcome.chunk(2))


def _compares(judge: Any) -> bool:
    """Say whether a judge is asked about pairs: it can compare, and does not say by
    `compares_pairs = False` that it would only compare scores of single images."""
    return isinstance(judge, _Compares) and bool(getattr(judge, "compares_pairs", True))


def _ask(judge: _Compares, batch: RewardBatch, first: Tensor, second: Tensor) -> Tensor:
    prompts = [batch.prompts[i] for i in first.tolist()]
    meta = [batch.meta[i] for i in first.tolist()]
    if isinstance(judge, _ComparesPlaces):
        return judge.compare_pairs(batch.images, first, second, prompts, meta)
    return judge.compare(batch.images[first], batch.images[second], prompts, meta)


def _checked(answer: Tensor, count: int, bound: float) -> Tensor:
    answer = answer.detach().cpu().double()
    low = -bound if bound == torch.inf else 0
    if answer.shape != (count,):
        raise RunError(
            f"rewards.win_rate: expected {count} answers of the judge, got shape "
            f"{list(answer.shape)}"
        )
    wrong = answer.isinf() | (answer < low) | (answer > bound)
    if bool(wrong.any()):
        expected = "finite scores" if bound == torch.inf else "verdicts in [0, 1]"
        raise RunError(
            f"rewards.win_rate: expected {expected} or NaN of the judge, got "
            f"{answer[wrong][0].item()}"
        )
    return answer


def _make(judge: dict[str, Any]) -> Any:
    # the arguments that a config may set
    where = "rewards.win_rate: judge"
    given = {name: value for name, value in judge.items() if name != "fn"}
    cls = _find(judge.get("fn"), where)
    own = inspect.signature(cls).parameters
    takes = {n: p for n, p in own.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    hints = typing.get_type_hints(cls.__init__)
    # each one given is known and of its type, none is missing
    for name, value in given.items():
        if name not in takes:
            raise ConfigError(f"{where}: {cls.__name__} {unknown(name, takes, 'argument')}")
        if not _fits(value, hints.get(name, Any)):
            raise ConfigError(f"{where}.{name}: expected {takes[name].annotation}, got {value!r}")
    needed = [n for n, p in takes.items() if p.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(
            f"{where}: {cls.__name__} needs {' and '.join(missing)}; it takes {', '.join(takes)}"
        )
    # one that learns would lose its training rounds and state in here
    made = cls(**given)
    if isinstance(made, _Learns):
        raise ConfigError(
            f"{where}: {cls.__name__} learns, which a judge cannot; use it as a reward of its own"
        )
    return made


def _find(fn: Any, where: str) -> type[Any]:
    """Return the reward class of that name; nothing outside the package `rewards` can be named."""
    # the name
    match = _NAME.fullmatch(fn) if isinstance(fn, str) else None
    if match is None:
        raise ConfigError(
            f"{where}.fn: expected the name of a file in rewards/, such as pickscore or vlm, got "
            f"{fn!r}"
        )
    file, cls_name = match["file"], match["cls"] or match["file"]
    # a file or folder of rewards/, but not this one
    package = importlib.import_module(__package__)
    found = [info.name for info in pkgutil.iter_modules(package.__path__)]
    files = [name for name in found if not name.startswith("_") and name != "win_rate"]
    if file not in files:
        raise ConfigError(f"{where}.fn: rewards/ {unknown(file, files, 'judge')}")
    # its class; what it imports is not its own
    module = importlib.import_module(f".{file}", __package__)
    cls = vars(module).get(cls_name)
    home = str(getattr(cls, "__module__", ""))
    if not inspect.isclass(cls) or not f"{home}.".startswith(f"{module.__name__}."):
        raise ConfigError(f"{where}.fn: rewards/{file} has no class {cls_name!r} of its own")
    return cls


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is Literal or hint is Any:
        return hint is Any or value in args
    if hint in (int, float):
        numbers = (int, float) if hint is float else int
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, origin or hint)
