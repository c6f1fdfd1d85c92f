"""Rehearse a config: one iteration on a tiny pipeline of its own class, of which nothing is kept.

All that a run does is done: prompts are read, images sampled, scored and judged, weights trained
and saved. The network, the images and the lists are small, and rewards with networks are stood in
for by the brightness of the image, so that no weight is read.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from flowrl.config.calls import PYTHON
from flowrl.config.load import Config, load_config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.prompts import prompts_if_there
from flowrl.core.types import RewardBatch
from flowrl.cost.architecture import architecture_of, facts_of
from flowrl.cost.memory import WITHOUT
from flowrl.evaluation.preference_pairs import IMAGES, LABEL
from flowrl.evaluation.sources import SOURCE, source_paths
from flowrl.models.tiny import class_at, classes, save_tiny
from flowrl.runs.train import train
from flowrl.training.method import method_of
from flowrl.training.parts.real_images import IMAGE
from flowrl.training.parts.teachers import teachers_of
from flowrl.training.rehearsal import check_plan

SIDE = 64  # pixels of a rehearsed image
WAVES = 1e4  # of the stand-in, in an image's brightness of 0 to 1
RECORDS = 4  # of a list of prompts
# options of adapters whose usual values are for large images, long prompts and videos
SMALL = {"frames": 5, "source_pixels": SIDE**2, "seen_pixels": 96**2}
# of model.runtime: what a CPU lacks, or takes minutes for
ACCELERATED = {"compile": False, "cuda_graphs": False, "quantize": "none", "attention": "auto"}
BY_CALL = "pipeline"  # asked by its own call
CUT = ("max_sequence_length",)  # of a call: the tokenizers know letters, so texts are long
BLIND = ("shapes_edit",)  # without a network, but sees no difference where a random one drew
UNTAUGHT = (
    "loss={fn: ppo_clip, clip_low: 0.2, clip_high: 0.2}",
    "credit={fn: group_norm}",
)  # of a rehearsed teacher
# so many prompts and images of each, the first that the method takes
SIZES = ((2, 4), (2, 8), (4, 8), (2, 0), (0, 0))
WORDS = ("a red square", "a blue circle", "a green triangle", "two yellow stars")


class Rehearsal(NamedTuple):
    """What a rehearsal did."""

    summary: dict[str, Any]  # of the run
    pipeline: str  # the name of the tiny pipeline; "" = the config's own model
    stood_in: tuple[str, ...]  # rewards that the image's brightness stood in for
    seconds: float


class StandIn:
    """Stand in for a reward with a network: a wave of the brightness of an image or a video, so
    short that images of a random network differ by it."""

    differentiable = True
    sees_sigma = True  # it judges unfinished images, too

    def __init__(self, *, videos: bool) -> None:
        self.judges_videos = videos

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score images [L, ..., H, W] by a sine of their mean -> [L] in [0, 1]."""
        mean = batch.images.to(torch.float32).flatten(1).mean(1)
        return 0.5 + 0.5 * (WAVES * mean).sin()


def rehearse(
    source: str | Mapping[str, Any],
    overrides: list[str],
    plugins: list[str],
    *,
    quiet: bool = False,
) -> Rehearsal:
    """Train one iteration of a config on a tiny pipeline, in a folder that is deleted at the end.

    Raises ConfigError as `load_config` does, and all that training raises.
    """
    started = time.monotonic()
    whole = load_config(source, overrides, plugins, need_rewards=False)
    with tempfile.TemporaryDirectory(prefix="flowrl-rehearsal-") as name:
        folder = Path(name)
        # a model that is none of diffusers' is small, or the user's own: it is taken as it is
        facts, pipeline, changes = facts_of(whole), "", list[str]()
        by_call = whole.model.fn == BY_CALL
        if by_call:
            pipeline = class_at(whole.model.kwargs["path"])
        elif facts is not None:
            pipeline = facts.tiny_for(architecture_of(whole).settings)
        if pipeline:
            changes += _small_model(whole, save_tiny(pipeline, folder / "model"))
        if pipeline and by_call:
            changes += _small_call(whole, pipeline)
        changes += [*_small_lists(whole, folder), *_short_run(whole)]
        if teachers_of(whole):
            plain, _ = _small_batch(source, [*overrides, *changes, *UNTAUGHT], plugins)
            train(plain, folder / "teacher", quiet=quiet)
            changes.append(_taught_by(whole, folder / "teacher"))
        config, stood_in = _small_batch(source, [*overrides, *changes], plugins)
        summary = train(config, folder / "run", quiet=quiet)
    return Rehearsal(summary, pipeline, stood_in, time.monotonic() - started)


def _small_model(config: Config, folder: Path) -> list[str]:
    """Return overrides for the tiny pipeline in `folder` and its size of images."""
    kwargs = config.model.kwargs
    changes = [f"model.path={folder}", f"image.height={SIDE}", f"image.width={SIDE}"]
    changes += ["eval.height=0", "eval.width=0"]
    for key, pixels in SMALL.items():
        if kwargs.get(key, 1) != 1:
            changes.append(f"model.{key}={pixels}")
    # what this machine's device can do is rehearsed, too
    if torch.cuda.is_available():
        return changes
    given = kwargs.get("runtime") or {}
    for key, value in ACCELERATED.items():
        if key in given:
            changes.append(f"model.runtime.{key}={json.dumps(value)}")
    if kwargs.get("dtype") == "float16":
        changes.append("model.dtype=float32")
    return changes


def _small_call(config: Config, name: str) -> list[str]:
    """Return overrides that the tiny pipeline of a class needs in its call."""
    asked = classes()[name]
    tiny, (height, width) = dict(asked.options), asked.size
    call = tiny.pop("call")
    changes = [f"image.height={height}", f"image.width={width}"]
    if tiny.get("tune") == "full":
        changes.append("model.lora=null")
    changes += [f"model.{key}={json.dumps(value)}" for key, value in tiny.items()]
    merged = dict(config.model.kwargs.get("call") or {})
    for key, value in call.items():
        if key not in merged or key in CUT:
            merged[key] = value
    return [*changes, f"model.call={json.dumps(merged)}"]


def _small_lists(config: Config, folder: Path) -> list[str]:
    """Write the first records of each list of prompts -> overrides that name them."""
    changes = []
    for name in ("train", "test"):
        there = prompts_if_there(getattr(config.prompts, name))
        records: list[dict[str, Any]] = [{"prompt": text} for text in WORDS]
        if there is not None:
            records = [dict(record) for record in there.records[:RECORDS]]
            for place, record in enumerate(records):
                files = [f"{file.absolute()}" for file in source_paths(there, place)]
                if files:
                    record[SOURCE] = files
        _give_images(config, records, folder / "source.png")
        file = folder / f"{name}.jsonl"
        file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        changes.append(f"prompts.{name}={file}")
    return changes


def _give_images(config: Config, records: list[dict[str, Any]], file: Path) -> None:
    """Let the records of an editing model whose images are not here start from a plain one, and
    those of a method that trains on stored or real images have these; a teacher is named to all."""
    Image.new("RGB", (SIDE, SIDE), "white").save(file)
    method = method_of(config)
    if method.plan(0).stored is not None:
        other = file.with_name("other.png")
        Image.new("RGB", (SIDE, SIDE), "black").save(other)
        for record in records:
            record.update(zip(IMAGES, (f"{file}", f"{other}"), strict=True))
            record[LABEL] = 1
    if "data" in needs_of(method.loss) | needs_of(method.kl):
        for record in records:
            record[IMAGE] = f"{file}"
    teachers = [*teachers_of(config)]
    if teachers:
        for record in records:
            record.setdefault(config.loss.kwargs.get("by", "tag"), teachers[0])
    facts = facts_of(config)
    always = facts is not None and facts.sources == "always"
    if not always and not config.model.kwargs.get("sources"):
        return
    for record in records:
        names = record.get(SOURCE)
        if not isinstance(names, list) or not all(Path(name).exists() for name in names):
            record[SOURCE] = [f"{file}"]


def _short_run(config: Config) -> list[str]:
    """Return overrides for one iteration with an evaluation and samples after it."""
    changes = ["train.iterations=1", "eval.images=1", f"samples.prompts={RECORDS}"]
    if config.train.parts > 1:
        changes.append("train.parts=1")
    if config.surrogate is not None:  # the policy is rehearsed, which would stand still at first
        changes.append("surrogate.alone=0")
    return changes


def _taught_by(config: Config, run: Path) -> str:
    """Return the override by which one run teaches all prompts."""
    names = dict.fromkeys(teachers_of(config), f"{run}")
    return f"loss.teachers={json.dumps(names)}"


def _small_batch(
    source: str | Mapping[str, Any], overrides: list[str], plugins: list[str]
) -> tuple[Config, tuple[str, ...]]:
    """Load a config with as few prompts and images as its method takes, and with stand-ins -> it,
    and their names. Raises the ConfigError of the config's own numbers."""
    for sizes in _sizes():
        try:
            config = load_config(source, [*overrides, *sizes], plugins, need_rewards=False)
            config, stood_in = _with_stand_ins(config)
            check_plan(config)
        except ConfigError as error:
            refused = error
            continue
        return config, stood_in
    raise refused


def _sizes() -> Iterator[list[str]]:
    """Yield overrides of the batch, the smallest first; 0 is the config's own number."""
    for prompts, group in SIZES:
        both = {"prompts": prompts, "group": group}
        yield [f"train.{key}={value}" for key, value in both.items() if value]


def _with_stand_ins(config: Config) -> tuple[Config, tuple[str, ...]]:
    """Return a config whose rewards with networks are stood in for, and which these are."""
    calls, stood_in = {}, []
    for name, call in config.rewards.items():
        # a reward of images sees the frames of a video one by one
        videos = int(config.model.kwargs.get("frames", 1)) > 1 and not call.frames
        own = "." in call.fn or call.fn == PYTHON or call.fn in WITHOUT
        if not own or call.fn in BLIND:
            call = replace(
                call,
                fn=PYTHON,
                path=PYTHON,
                kwargs={},
                function=StandIn(videos=videos),
                offload=False,
            )
            stood_in.append(name)
        calls[name] = call
    return replace(config, rewards=calls), tuple(stood_in)
