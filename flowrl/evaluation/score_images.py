"""Score images with rewards, outside of a run: what `flowrl score` and its self-test are made
of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.config.calls import Call
from flowrl.config.load import load_config
from flowrl.config.overrides import Source, apply_override
from flowrl.core.errors import ConfigError
from flowrl.core.prompts import PromptSet, Record
from flowrl.core.types import Reward, RewardBatch
from flowrl.core.types import Source as Images
from flowrl.evaluation.image_files import ImageFile, read_image
from flowrl.evaluation.reward_call import ask, probe_rewards, rewards_of
from flowrl.evaluation.sources import check_sources, sources_of


class PromptedImage(NamedTuple):
    """One image to be scored, with its prompt record."""

    load: Callable[[], Tensor]  # -> [3, H, W] float32 in [0, 1]
    size: tuple[int, int]  # height, width
    record: Record  # at least {"prompt": text}
    group: int  # images of one group are shown to the rewards together
    name: str
    sources: Callable[[], Images] = tuple  # what it started from, each as large as its file


@dataclass
class RewardScores:
    """What one reward said of all images, and what it looked at."""

    values: Tensor  # [N] float32, NaN = not scored
    reads: set[str] = field(default_factory=set)  # of "prompts", "meta", "group"
    seconds: float = 0.0  # in the reward itself


def make_rewards(
    names: Sequence[str], config: str | None, changes: Sequence[str], plugins: Sequence[str]
) -> tuple[dict[str, Reward], dict[str, Any]]:
    """Bind and make rewards -> ({name: reward}, {name: its call as in YAML}).

    Args:
        names: reward functions, as `fn` of a config names them; a dotted one is called by its last
            part.
        config: a config whose rewards are taken instead.
        changes: "key=value" for a single one of `names`, else "NAME.key=value"; overrides of the
            config.
        plugins: top-level packages that dotted names may be in.

    Raises ConfigError, and what the rewards raise when they are made or probed.
    """
    if (config is None) == (not names):
        raise ConfigError(
            "expected either --reward NAME, once or several times, or --config CONFIG"
        )
    if config is not None:
        calls: Mapping[str, Call] = load_config(config, changes, plugins).rewards
    else:
        calls = _bind(names, changes, plugins)
    rewards = rewards_of(calls)
    probe_rewards(rewards)
    return rewards, {name: call.to_dict() for name, call in calls.items()}


def _bind(names: Sequence[str], changes: Sequence[str], plugins: Sequence[str]) -> dict[str, Call]:
    # each reward by the last part of its name
    labels = [name.rpartition(".")[2] for name in names]
    if len(set(labels)) < len(labels):
        raise ConfigError(
            f"--reward: expected names that differ, got {', '.join(labels)}; a config can hold both"
        )
    raw: dict[str, Any] = {label: {"fn": name} for label, name in zip(labels, names, strict=True)}
    # their arguments
    keys = list(changes)
    if len(labels) == 1:
        keys = [f"{labels[0]}.{text}" for text in changes]
    for text in keys:
        if text.partition(".")[0] not in raw:
            raise ConfigError(
                f"--set {text}: expected NAME.key=value with a NAME of {', '.join(labels)}"
            )
        apply_override(raw, text)
    source = Source("--reward", tuple(f"rewards.{text}" for text in keys))
    bind = partial(Call.bind, source=source, plugins=plugins)
    return {label: bind(f"rewards.{label}", call) for label, call in raw.items()}


def prompted_images(
    images: Sequence[ImageFile], prompts: PromptSet, notes: dict[str, dict[str, None]]
) -> list[PromptedImage]:
    """Give image files their records, one each; what reading did to a file is added to `notes`
    {what: names}.

    The images of one prompt are one group. Raises DataError for a source that is missing or
    broken.
    """
    check_sources(prompts)

    def load(image: ImageFile) -> Tensor:
        pixels, done = read_image(image)
        for what in done:
            notes.setdefault(what, {})[image.name] = None
        return pixels / 255

    def start(row: int) -> Images:
        return next(iter(sources_of(prompts, [row], None)), ())

    # an edit of another image is another prompt
    keys = [(r["prompt"], str(r.get("source"))) for r in prompts.records]
    groups = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    out = []
    for row, (image, key) in enumerate(zip(images, keys, strict=True)):
        record, sources = prompts.records[row], partial(start, row)
        made = (partial(load, image), image.size, record, groups[key], image.name, sources)
        out.append(PromptedImage(*made))
    return out


def prompts_of_images(images: Sequence[PromptedImage], places: Sequence[str]) -> PromptSet:
    """Return the records of images as a list of prompts, `places` [N] for messages."""
    records = [image.record for image in images]
    return PromptSet([record["prompt"] for record in records], records, "", "", [*places])


@torch.no_grad()
def score_images(
    rewards: Mapping[str, Reward],
    images: Sequence[PromptedImage],
    *,
    batch: int = 32,
    whole: bool = False,
    split: bool = False,
    has_prompts: bool = True,
    progress: Callable[[int], Any] = lambda done: None,
) -> dict[str, RewardScores]:
    """Show images, at most `batch` of one size at a time, to all rewards -> {name: scores in the
    order of the images}.

    Args:
        whole: a group of more than `batch` images is shown at once; else it is cut.
        split: a group may be cut also for a reward that looks at groups.
        has_prompts: False = the records hold no prompt, only an empty text.
        progress: gets the number of images just scored by one reward.

    The images of a group come together. Raises RewardError naming reward and images if a reward
    fails or gives infinity; ConfigError if one reads the prompt and there is none, or looks at
    groups and one had to be cut.
    """
    if batch < 1:
        raise ConfigError(f"expected a batch of at least 1 image, got {batch}")
    out = {name: RewardScores(torch.full((len(images),), torch.nan)) for name in rewards}
    for rows, cut in batches(images, batch, whole):
        # load what is shown together
        mine = [images[row] for row in rows]
        pixels = torch.stack([image.load() for image in mine])
        where = mine[0].name
        if len(mine) > 1:
            where += f" to {mine[-1].name}"
        for name, reward in rewards.items():
            # ask, and note what the reward looks at
            scores = out[name]
            shown = _watched_batch(mine, pixels, scores.reads)
            began = time.perf_counter()
            values = ask(name, reward, shown, where)
            scores.seconds += time.perf_counter() - began
            # it must have seen what it needs
            prompt = mine[0].record["prompt"]
            _check_shown(name, scores.reads, has_prompts, cut and not split, prompt)
            scores.values[rows] = values
            progress(len(mine))
    return out


def batches(
    images: Sequence[PromptedImage], most: int, whole: bool
) -> Iterator[tuple[list[int], bool]]:
    """Yield (rows, whether a group was cut): images of one size, groups together, in the order in
    which they come."""
    # {size: {group: rows}}, and the sizes of each group
    by_size: dict[tuple[int, int], dict[int, list[int]]] = {}
    sizes: dict[int, set[tuple[int, int]]] = {}
    for row, image in enumerate(images):
        by_size.setdefault(image.size, {}).setdefault(image.group, []).append(row)
        sizes.setdefault(image.group, set()).add(image.size)
    for groups in by_size.values():
        rows: list[int] = []
        cut = False
        for number, members in groups.items():
            # a group in parts that fit, each with what is there already if there is room
            step = len(members) if whole else most
            for start in range(0, len(members), step):
                part = members[start : start + step]
                if rows and len(rows) + len(part) > most:
                    yield rows, cut
                    rows, cut = [], False
                rows = rows + part
                cut = cut or len(part) < len(members) or len(sizes[number]) > 1
        yield rows, cut


def _watched_batch(images: Sequence[PromptedImage], pixels: Tensor, reads: set[str]) -> RewardBatch:
    """Return images as a batch that adds to `reads` which words a reward looks at."""
    records = [image.record for image in images]
    group = torch.tensor([image.group for image in images])
    prompts = [record["prompt"] for record in records]
    sources = [image.sources() for image in images]
    if not any(sources):
        sources = []
    return _watched(reads)(pixels, prompts, group, records, torch.zeros(len(records)), sources)


def _watched(reads: set[str]) -> type[RewardBatch]:
    """Return a RewardBatch that notes which words are looked at."""

    # a property for each field that says something beside the pixels
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


def _check_shown(name: str, reads: set[str], has_prompts: bool, cut: bool, prompt: str) -> None:
    if "prompts" in reads and not has_prompts:
        raise ConfigError(f"reward {name!r} reads the prompt: give --prompt TEXT or --prompts FILE")
    if "group" in reads and cut:
        raise ConfigError(
            f"reward {name!r} looks at which images belong to one prompt, but those of {prompt!r} "
            "are more than one batch, or of several sizes; give a larger --batch or images of one "
            "size, or --split if it scores each image by itself all the same"
        )


@contextmanager
def bar(total: int | None, what: str) -> Iterator[Callable[[int], Any]]:
    """Show a progress bar on a terminal while the block runs; it gets the number of images just
    done."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    with tqdm(
        total=total, desc=what, unit=" images", disable=None, leave=False, dynamic_ncols=True
    ) as shown:
        yield shown.update
