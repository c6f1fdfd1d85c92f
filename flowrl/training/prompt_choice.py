"""Which prompts an iteration gets."""

from __future__ import annotations

from flowrl.config.load import Config
from flowrl.core.abilities import PromptDraw, PromptSampler
from flowrl.core.errors import ConfigError
from flowrl.core.needs import needs_of
from flowrl.core.processes import World
from flowrl.core.prompts import PromptSet, batch_for, stream
from flowrl.core.seeds import generator


def sampler_of(config: Config, prompts: PromptSet) -> PromptSampler | None:
    """Make the config's sampler, which knows nothing yet. Raises ConfigError where something else
    of the config wants to choose prompts, or for a list that the sampler cannot work with."""
    if config.sampler is None:
        return None
    # only one may choose prompts
    if config.train.balance:
        raise ConfigError(
            f"train.balance={config.train.balance!r} and sampler {config.sampler.fn}: both choose "
            "the prompts of an iteration; leave one out"
        )
    sampler: PromptSampler = config.sampler.make()
    # a prompt at several places: what works place by place would see only a part of its images
    if sampler.joins and config.train.refill:
        raise ConfigError(
            f"train.refill={config.train.refill}: replaces prompts place by place, and sampler "
            f"{config.sampler.fn} gives a prompt several; set it to 0"
        )
    whole_prompt = config.segment is not None and config.segment.fn == "prompt"
    if sampler.joins and (whole_prompt or "siblings" in needs_of(config.call("loss"))):
        raise ConfigError(
            f"sampler {config.sampler.fn}: gives prompts several places of an iteration, and loss "
            f"{config.loss.fn} compares the images of a prompt in one network call, which has "
            "those of one place; take another sampler"
        )
    # a draw for the first iteration, so that a wrong list is found before the model is loaded
    sampler.start(prompts.texts)
    chosen = sampler(draw_of(config, prompts, 0))
    if len(chosen) != config.train.prompts:
        raise ConfigError(
            f"sampler {config.sampler.fn}: expected train.prompts={config.train.prompts} rows of "
            f"the list, got {len(chosen)}"
        )
    return sampler


def check_refill(config: Config, *, sharded: bool, stored: bool) -> None:
    """Raise ConfigError where an iteration cannot have a second draw."""
    if not config.train.refill:
        return
    # a second draw needs equal work in all processes, something to draw, and images that differ
    if sharded:
        raise ConfigError(
            f"train.refill={config.train.refill}: processes draw different numbers of prompts "
            "again, but under FSDP all call the network in step; start the processes without FSDP"
        )
    if stored:
        raise ConfigError(
            f"train.refill={config.train.refill}: plan {config.plan.fn} samples nothing, so "
            "nothing can be drawn again; set it to 0"
        )
    if config.train.group < 2:
        raise ConfigError(
            f"train.refill={config.train.refill}: with train.group=1 no prompt's images differ; "
            "set it to 0"
        )


def draw_of(config: Config, prompts: PromptSet, iteration: int) -> PromptDraw:
    """Say what a sampler may look at."""
    return PromptDraw(
        iteration,
        config.train.prompts,
        config.train.group,
        lambda first, count: stream(prompts, seed=config.seed, first=first, count=count),
        generator(config.seed, "sampler", iteration),
    )


def training_rows(
    config: Config, prompts: PromptSet, sampler: PromptSampler | None, iteration: int
) -> list[int]:
    """Return the training prompts of an iteration; with a sampler, those that it would choose
    now."""
    if sampler is not None:
        return sampler(draw_of(config, prompts, iteration))
    t = config.train
    return batch_for(
        prompts, seed=config.seed, iteration=iteration, count=t.prompts, balance=t.balance
    )


def ahead(
    config: Config,
    prompts: PromptSet,
    sampler: PromptSampler | None,
    world: World,
    iteration: int,
    count: int | None,
) -> list[int]:
    """Return the prompts of this process in `count` iterations from `iteration` on, or all that
    are trained on."""
    t, rows = config.train, dict[int, None]()
    size = len(prompts.texts)
    last = size // t.prompts + 1  # more iterations show every prompt
    count = last if count is None else min(count, last)
    if sampler is not None or t.refill:
        # nobody knows which, and how many; all of a list that is not much longer
        return list(range(size)) if count * t.prompts >= size else []
    for later in range(iteration, iteration + count):
        found = training_rows(config, prompts, sampler, later)
        rows |= dict.fromkeys(found[place] for place in world.share(len(found)))
    return list(rows)
