"""What a config will take, worked out without a weight or a GPU: parameters, memory by part and by
phase, calls, FLOPs.

docs/memory.md says how the numbers come about and what they leave out.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from flowrl.config.load import Config, check_config, check_eval_count
from flowrl.config.sections import ImageConfig
from flowrl.core.errors import ConfigError, FlowRLError
from flowrl.core.prompts import groups_of, prompts_if_there
from flowrl.core.tables import size
from flowrl.cost.architecture import (
    architecture_of,
    facts_of,
    known_facts,
    latent_shape,
    tuning_of,
)
from flowrl.cost.memory import (
    FLOAT,
    PHASES,
    SCORING,
    MemoryPart,
    WeightCounts,
    count_weights,
    guest,
    images_of_part,
    kept_memory,
    moment_bytes,
    staying,
)
from flowrl.cost.meta_run import MetaRun, meta_run, workload_of
from flowrl.training.method import method_of
from flowrl.training.rehearsal import RehearsedIteration, check_plan


class Phase(NamedTuple):
    """The worst moment of one phase."""

    name: str
    kept: int  # bytes of the parts that are there
    extra: int  # bytes that come and go
    size: int  # latents, or images, that go through a network at once; 0 = none do
    what: str  # the extra is for

    @property
    def bytes(self) -> int:
        """Return the peak."""
        return self.kept + self.extra


class Estimate(NamedTuple):
    """See `estimate`. Of a model that is not one of diffusers', sizes, phases and flops are
    empty."""

    config: Config
    forecast: RehearsedIteration
    origin: str  # where the model's settings come from
    weights: WeightCounts | None
    parts: list[MemoryPart]
    phases: list[Phase]  # without the rewards' networks
    saved: int  # activations of one micro-batch that wait for the backward pass
    flops: dict[str, int]  # of an iteration: sampling, decode, training
    note: str  # what could not be counted

    def __repr__(self) -> str:
        """Say the peak, and the work of an iteration."""
        work, peak = self.forecast.work, self.largest
        needs = f"memory not counted, {self.note}"
        if peak is not None:
            needs = f"{size(peak.bytes)} in {peak.name}"
        return (
            f"Estimate({self.config.name!r}: {needs}; {work.images:,} images and "
            f"{self.forecast.calls:,} network calls an iteration)"
        )

    @property
    def judged(self) -> list[Phase]:
        """Return the phases with the rewards' networks that stay, and the moment at which the
        largest of the others scores: what a card has to hold."""
        if not self.phases:
            return []
        stay, visitor = staying(self.config), guest(self.config)
        whole = [phase._replace(kept=phase.kept + stay) for phase in self.phases]
        # a network that rests otherwise scores beside what is kept while images are decoded
        for phase in whole:
            if visitor is not None and phase.name == "decode":
                what = f"the network of the reward {visitor.name}"
                return [*whole, Phase(SCORING, phase.kept, visitor.bytes, 0, what)]
        return whole

    @property
    def largest(self) -> Phase | None:
        """Return the phase that needs most, with the rewards' networks that are counted."""
        return max(self.judged, key=attrgetter("bytes"), default=None)


def estimate(config: Config) -> Estimate:
    """Work out what a config takes, for the iteration that comes first.

    Raises ConfigError and ModelError as `check_plan` and `kept_memory` do, DataError for a broken
    prompt file; a list that is not here yet is no mistake.
    """
    # what can be known without the network's settings: work, latents, stored parts
    check_config(config)
    # lists as a run reads them
    train, test = prompts_if_there(config.prompts.train), prompts_if_there(config.prompts.test)
    check_eval_count(config, len(test) if test else 1)
    if train is not None:
        groups_of(train, config.train.balance)
    forecast = check_plan(config)
    parts, note = kept_memory(config, forecast)
    if facts_of(config) is not None:
        judged(config)
    if note:
        return Estimate(config, forecast, "", None, parts, [], 0, {}, note)
    # with the settings: peaks, parameters, and FLOPs, from a run of the network on shapes alone
    architecture = architecture_of(config)
    phases = [phase(config, name, forecast, parts) for name in PHASES]
    counted = count_weights(architecture, tuning_of(config))
    made = meta_run(workload_of(config))
    saved = made.training(_micro_batch(config, forecast)).saved
    return Estimate(
        config,
        forecast,
        architecture.origin,
        counted,
        parts,
        phases,
        saved,
        _flops(config, forecast, made),
        "",
    )


def phase(
    config: Config, name: str, forecast: RehearsedIteration, parts: list[MemoryPart] | None = None
) -> Phase:
    """Work out one phase, for a model of diffusers that is known; with its `parts` if they are at
    hand."""
    if parts is None:
        parts = kept_memory(config, forecast)[0]
    there = sum(part.bytes for part in parts if name in part.phases)
    return Phase(name, there, *_EXTRA[name](config, forecast, meta_run(workload_of(config)), parts))


ENCODERS_ALONE = "the text encoders, which work while the network is away"
_LEAVES = ("latents of leaves", "old means of leaves")
MOST_UNKNOWN = 1000  # prompts that a list which is not here is taken to have
NETWORK_PARTS = ("trained weights", "frozen weights", "network's tables")
Extra = tuple[int, int, str]
"""Bytes that come and go, latents or images at once, what for."""


def _sampling(
    config: Config, forecast: RehearsedIteration, made: MetaRun, parts: list[MemoryPart]
) -> Extra:
    size = min(config.train.rollout_batch, images_of_part(config, forecast.work))
    ways = [
        _call(made, size, twice="sampling" in forecast.work.twice),
        (_joined(config, parts), size, "joining the nodes of the forest"),
    ]
    if _offloads(config) and tuning_of(config).runtime.text_encoders == "device":
        alone = _others(config, vae=False) - _bytes(parts, *NETWORK_PARTS)
        ways.append((alone, 0, ENCODERS_ALONE))
    return max(ways)


def _decode(
    config: Config, forecast: RehearsedIteration, made: MetaRun, parts: list[MemoryPart]
) -> Extra:
    count = images_of_part(config, forecast.work)
    batch = min(int(config.model.kwargs["decode_batch"]), count)
    peak, size, _ = _images(config, made, batch)
    ways = [(peak, size, f"decoding {size} of {forecast.work.images:,} images")]
    inner = _bytes(parts, "latents", "old means") // config.train.parts
    ways.append((inner, 0, "a copy of the latents without those of the leaves"))
    return max(ways[: 1 if method_of(config).reads_leaves else 2])


def _training(
    config: Config, forecast: RehearsedIteration, made: MetaRun, parts: list[MemoryPart]
) -> Extra:
    size = _micro_batch(config, forecast)
    anew = made.workload.tuning.runtime.checkpointing
    how = "computed anew block by block" if anew else "with its activations"
    return made.training(size).peak, size, f"a micro-batch of {_latents(made, size)}, {how}"


def _update(
    config: Config, forecast: RehearsedIteration, made: MetaRun, parts: list[MemoryPart]
) -> Extra:
    if moment_bytes(config) == 1:
        return 0, 0, "8-bit AdamW, which works in place"
    return made.step().peak, 0, "what AdamW computes with"


def _evaluation(
    config: Config, forecast: RehearsedIteration, made: MetaRun, parts: list[MemoryPart]
) -> Extra:
    count = evaluated_at_once(config)
    # in the size that is judged
    config = judged(config)
    made = meta_run(workload_of(config))
    return max(_call(made, min(config.eval.batch, count)), _images(config, made, count))


def evaluated_at_once(config: Config) -> int:
    """Return how many images an evaluation draws at a time: whole prompts, with all of each."""
    e = config.eval
    drawn = e.images * e.best_of
    share = max(1, e.batch // drawn)
    return min(share, prompt_count(config.prompts.test)) * drawn


def prompt_count(path: str) -> int:
    """Return how many prompts a list has; one that is not here is taken to have many."""
    prompts = prompts_if_there(path)
    return len(prompts) if prompts else MOST_UNKNOWN


def judged(config: Config) -> Config:
    """Return a config whose images have the size of those that are evaluated. Raises ConfigError
    if the model cannot make it."""
    height, width = config.eval_size
    if (height, width) == (config.image.height, config.image.width):
        return config
    found = replace(config, image=ImageConfig(height, width))
    try:
        latent_shape(found, architecture_of(found))
    except FlowRLError as error:
        raise ConfigError(
            f"eval.height, eval.width: {config.model.fn} cannot make images of {height} x {width} "
            f"pixels: {error}"
        ) from error
    return found


_EXTRA = dict(zip(PHASES, (_sampling, _decode, _training, _update, _evaluation), strict=True))


def _call(made: MetaRun, size: int, *, twice: bool = False) -> Extra:
    """Trace a network call that samples; twice: with and without the prompt, by a network whose
    training has no guidance."""
    peak = made.velocity(2 * size if twice else size).peak
    return peak, size, f"one network call with {_latents(made, size, twice=twice)}"


def _images(config: Config, made: MetaRun, count: int) -> Extra:
    batch = min(int(config.model.kwargs["decode_batch"]), count)
    peak = made.decoding(
        count, batch=batch, height=config.image.height, width=config.image.width
    ).peak
    if _offloads(config):
        peak += _others(config, vae=True)
    return peak, batch, f"decoding {count:,} images, {batch} at a time, with the images"


def _offloads(config: Config) -> bool:
    return tuning_of(config).runtime.offload


def _others(config: Config, *, vae: bool) -> int:
    """Return the bytes of the VAE, or of what reads texts and sources."""
    tuning = tuning_of(config)
    counted = count_weights(architecture_of(config), tuning).others
    wide = known_facts(config).wide
    total = 0
    for name, count in counted.items():
        if (name == "vae") == vae:
            total += count * (FLOAT if name in wide else tuning.dtype.itemsize)
    return total


def _latents(made: MetaRun, size: int, *, twice: bool = False) -> str:
    text = f"{size} latents"
    if size == 1:
        text = "1 latent"
    if made.workload.guided or twice:
        text += f" ({2 * size} rows under guidance)"
    return text


def _joined(config: Config, parts: list[MemoryPart]) -> int:
    """Return the bytes of the nodes a second time, as they are joined: those of one part, then
    those of all parts without leaves."""
    inner, leaves = _bytes(parts, "latents", "old means"), _bytes(parts, *_LEAVES)
    turns = config.train.parts
    return inner + leaves if turns == 1 else max(inner // turns + leaves, inner)


def _bytes(parts: list[MemoryPart], *names: str) -> int:
    return sum(part.bytes for part in parts if part.name in names)


def _micro_batch(config: Config, forecast: RehearsedIteration) -> int:
    # with a real image beside each state both wait for the backward pass
    states = min(config.train.micro_batch, -(-forecast.states // config.train.updates))
    return states * method_of(config).graphs


def _flops(config: Config, forecast: RehearsedIteration, made: MetaRun) -> dict[str, int]:
    """Count the work of an iteration; that of a call is in proportion to its latents."""
    work, height, width = forecast.work, config.image.height, config.image.width
    batch, count = int(config.model.kwargs["decode_batch"]), images_of_part(config, work)
    sampled, rows = min(config.train.rollout_batch, count), _micro_batch(config, forecast)
    trained = forecast.states * method_of(config).graphs
    return {
        "sampling": made.velocity(sampled).flops * work.nfe // sampled,
        "decode": made.decoding(count, batch=batch, height=height, width=width).flops
        * work.images
        // count,
        "training": made.training(rows).flops * trained // rows,
    }
