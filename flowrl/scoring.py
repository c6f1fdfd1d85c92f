"""Score pictures with rewards, outside of a run: what `flowrl score` and its self-test are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.config import Call, Source, apply_override, load_config
from flowrl.errors import ConfigError
from flowrl.panel import ask
from flowrl.pictures import Picture, read_picture
from flowrl.prompts import PromptSet, Record
from flowrl.types import Probed, Reward, RewardBatch


class Shot(NamedTuple):
    """One picture to be scored, with the words that go with it."""

    load: Callable[[], Tensor]  # -> [3, H, W] float32 in [0, 1]
    size: tuple[int, int]  # height, width
    record: Record  # at least {"prompt": text}
    group: int  # pictures of one group are shown to the rewards together
    name: str


@dataclass
class Heard:
    """What one reward said of all shots, and what it looked at."""

    values: Tensor  # [N] float32, NaN = not scored
    reads: set[str] = field(default_factory=set)  # of "prompts", "meta", "group"
    seconds: float = 0.0  # in the reward itself


def make_rewards(
    names: Sequence[str], config: str | None, changes: Sequence[str], plugins: Sequence[str]
) -> tuple[dict[str, Reward], dict[str, Any]]:
    """Bind and make rewards -> ({name: reward}, {name: its call as in YAML}).

    Args:
        names: reward functions, as `fn` of a config names them; a dotted one is called by its last part.
        config: a config whose rewards are taken instead.
        changes: "key=value" for a single one of `names`, else "NAME.key=value"; overrides of the config.
        plugins: top-level packages that dotted names may be in.
    Raises ConfigError, and what the rewards raise when they are made or probed.
    """
    if (config is None) == (not names):
        raise ConfigError("expected either --reward NAME, once or several times, or --config CONFIG")
    calls = load_config(config, changes, plugins).rewards if config is not None else _bind(names, changes, plugins)
    rewards = {name: call.make() for name, call in calls.items()}
    for reward in rewards.values():
        if isinstance(reward, Probed):
            reward.probe()
    return rewards, {name: call.to_dict() for name, call in calls.items()}


def _bind(names: Sequence[str], changes: Sequence[str], plugins: Sequence[str]) -> dict[str, Call]:
    labels = [name.rpartition(".")[2] for name in names]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"--reward: expected names that differ, got {', '.join(labels)}; a config can hold both")
    raw: dict[str, Any] = {label: {"fn": name} for label, name in zip(labels, names, strict=True)}
    keys = [text if len(labels) > 1 else f"{labels[0]}.{text}" for text in changes]
    for text in keys:
        if text.partition(".")[0] not in raw:
            raise ConfigError(f"--set {text}: expected NAME.key=value with a NAME of {', '.join(labels)}")
        apply_override(raw, text)
    source = Source("--reward", tuple(f"rewards.{text}" for text in keys))
    return {n: Call.bind(f"rewards.{n}", call, source=source, plugins=plugins) for n, call in raw.items()}


def shots_of(pictures: Sequence[Picture], prompts: PromptSet, notes: dict[str, dict[str, None]]) -> list[Shot]:
    """Turn picture files with a record each into shots; what reading did to a file is added to `notes` {what: names}.

    The pictures of one prompt are one group.
    """
    groups = {text: number for number, text in enumerate(dict.fromkeys(prompts.texts))}

    def load(picture: Picture) -> Tensor:
        pixels, done = read_picture(picture)
        for what in done:
            notes.setdefault(what, {})[picture.name] = None
        return pixels / 255

    return [
        Shot(partial(load, picture), picture.size, record, groups[record["prompt"]], picture.name)
        for picture, record in zip(pictures, prompts.records, strict=True)
    ]


@torch.no_grad()
def score_shots(
    rewards: Mapping[str, Reward],
    shots: Sequence[Shot],
    *,
    batch: int = 32,
    whole: bool = False,
    split: bool = False,
    told: bool = True,
    progress: Callable[[int], Any] = lambda done: None,
) -> dict[str, Heard]:
    """Show shots of one size, at most `batch` at a time, to all rewards -> {name: Heard}, in the order of the shots.

    The shots of a group come together. One of more than `batch` is cut, unless `whole`. `progress` gets the number of
    pictures just scored by one reward. Raises RewardError naming reward and pictures if a reward fails or gives
    infinity; ConfigError if one reads the prompt and none was `told`, or, unless `split`, if one looks at groups and a
    group had to be cut.
    """
    if batch < 1:
        raise ConfigError(f"expected a batch of at least 1 picture, got {batch}")
    out = {name: Heard(torch.full((len(shots),), torch.nan)) for name in rewards}
    for rows, cut in batches(shots, batch, whole):
        mine = [shots[row] for row in rows]
        images, meta = torch.stack([shot.load() for shot in mine]), [shot.record for shot in mine]
        group, where = torch.tensor([shot.group for shot in mine]), _span(mine)
        for name, reward in rewards.items():
            heard = out[name]
            shown = _watched(heard.reads)(images, [r["prompt"] for r in meta], group, meta, torch.zeros(len(mine)))
            began = time.perf_counter()
            values = ask(name, reward, shown, where)
            heard.seconds += time.perf_counter() - began
            _check_shown(name, heard.reads, told, cut and not split, meta[0]["prompt"])
            heard.values[rows] = values
            progress(len(mine))
    return out


def batches(shots: Sequence[Shot], most: int, whole: bool) -> Iterator[tuple[list[int], bool]]:
    """Yield (rows, whether a group was cut): shots of one size, groups together, in the order in which they come."""
    sizes: dict[tuple[int, int], dict[int, list[int]]] = {}
    places: dict[int, set[tuple[int, int]]] = {}
    for row, shot in enumerate(shots):
        sizes.setdefault(shot.size, {}).setdefault(shot.group, []).append(row)
        places.setdefault(shot.group, set()).add(shot.size)
    for groups in sizes.values():
        rows: list[int] = []
        cut = False
        for number, members in groups.items():
            step = len(members) if whole else most
            for part in (members[i : i + step] for i in range(0, len(members), step)):
                if rows and len(rows) + len(part) > most:
                    yield rows, cut
                    rows, cut = [], False
                rows, cut = rows + part, cut or len(part) < len(members) or len(places[number]) > 1
        yield rows, cut


def _watched(reads: set[str]) -> type[RewardBatch]:
    """Return a RewardBatch that notes which words are looked at."""

    class Watched(RewardBatch):
        @property
        def prompts(self) -> list[str]:  # type: ignore[override]
            reads.add("prompts")
            return self[1]

        @property
        def group(self) -> Tensor:  # type: ignore[override]
            reads.add("group")
            return self[2]

        @property
        def meta(self) -> list[dict[str, Any]]:  # type: ignore[override]
            reads.add("meta")
            return self[3]

    return Watched


def _span(shots: Sequence[Shot]) -> str:
    return shots[0].name if len(shots) == 1 else f"{shots[0].name} to {shots[-1].name}"


def _check_shown(name: str, reads: set[str], told: bool, cut: bool, prompt: str) -> None:
    if "prompts" in reads and not told:
        raise ConfigError(f"reward {name!r} reads the prompt: give --prompt TEXT or --prompts FILE")
    if "group" in reads and cut:
        raise ConfigError(
            f"reward {name!r} looks at which pictures belong to one prompt, but those of {prompt!r} are more than one "
            "batch, or of several sizes; give a larger --batch or pictures of one size, or --split if it scores each "
            "picture by itself all the same"
        )


@contextmanager
def bar(total: int | None, what: str) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar on a terminal while the block runs; it gets the number of pictures just done."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(total=total, desc=what, unit=" pictures", disable=None, leave=False, dynamic_ncols=True) as shown:
        yield shown.update
