"""Where the time of many iterations goes: sampling, decoding, rewards, training, evaluation, text
encoding, checkpoints; as shares, and in hours on the cards of one size.

Hours are work over a card's speed, which is a range: see `flowrl.cost.cards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from flowrl.core.prompts import prompts_if_there
from flowrl.core.tables import flop, text_table
from flowrl.cost.architecture import architecture_of, known_facts, text_shape, tuning_of
from flowrl.cost.cards import CARDS, LEAST, MOST, Card, Work, cards_of, time_text
from flowrl.cost.estimate import MOST_UNKNOWN, Estimate, evaluated_at_once, judged
from flowrl.cost.meta_run import meta_run, workload_of
from flowrl.cost.side_networks import encoding_work, rewards_work
from flowrl.models.prompt_encoding import CACHE_BYTES

ITERATIONS = 1000
KEPT = (  # what a checkpoint holds, by the names of an estimate's parts
    *("trained weights", "AdamW's moments", "averaged weights (EMA)"),
    *("weights that sample (old)", "slow copy of the weights", "models that are trained along"),
)


class Times(NamedTuple):
    """What many iterations take."""

    iterations: int
    work: dict[str, Work]  # by what it is for
    unknown: list[str]  # rewards that are not counted

    @property
    def total(self) -> Work:
        """Return the work of all."""
        columns = zip(*self.work.values(), strict=True)
        return Work(*(sum(column) for column in columns))

    def share(self, name: str, card: Card) -> float:
        """Return the part of the time that something takes on a card, at the fast end."""
        whole = self.total.seconds(card, slow=False)
        return self.work[name].seconds(card, slow=False) / whole

    def seconds(self, card: Card, name: str = "") -> tuple[float, float]:
        """Return the seconds of one thing, or of all, at the fast and at the slow end."""
        what = self.work[name] if name else self.total
        return what.seconds(card, slow=False), what.seconds(card, slow=True)


def times_of(found: Estimate, iterations: int = ITERATIONS) -> Times | None:
    """Count what so many iterations take; None where an iteration could not be counted."""
    if not found.flops:
        return None
    c = found.config
    short = tuning_of(c).dtype.itemsize == torch.bfloat16.itemsize
    work = {name: _wide_or_short(count * iterations, short) for name, count in found.flops.items()}
    if known_facts(c).video:  # whose VAE stays in float32
        work["decode"] = Work(wide=work["decode"].operations)
    # every image of an iteration is scored by all rewards
    cost = found.forecast.work
    each = rewards_work(c, cost.images, cost.prompts)
    work["rewards"] = Work(*(iterations * value for value in each[0]))
    work["evaluation"] = _evaluation(found, iterations, short=short)
    work["text encoding"] = _wide_or_short(_encodings(found, iterations), short)
    # the weights at the start follow from the config, but are written, too
    saved = sum(part.bytes for part in found.parts if part.name in KEPT)
    work["checkpoints"] = Work(written=saved * moments(c.checkpoint.every, iterations))
    return Times(iterations, work, each[1])


def moments(every: int, iterations: int) -> int:
    """Return how often something is done: before the first iteration, after the last, and every so
    many between; 0: never between."""
    between = (iterations - 1) // every if every else 0
    return 2 + between


def _wide_or_short(operations: float, short: bool) -> Work:
    return Work(short=operations) if short else Work(wide=operations)


def _evaluation(found: Estimate, iterations: int, *, short: bool) -> Work:
    """Count held-out images and those of the image grids, in the size that is judged; the former
    are scored."""
    c = found.config
    prompts = _count(c.prompts.test)
    rounds, grids = (moments(one.every, iterations) for one in (c.eval, c.samples))
    images = prompts * c.eval.images * c.eval.best_of * rounds
    # one network call, and one decoded image
    changed = judged(c)
    made, size = meta_run(workload_of(changed)), min(c.eval.batch, evaluated_at_once(c))
    batch = min(int(c.model.kwargs["decode_batch"]), evaluated_at_once(c))
    call = made.velocity(size).flops / size
    sides = {"height": changed.image.height, "width": changed.image.width}
    decoded = made.decoding(batch, batch=batch, **sides).flops / batch
    # all that is drawn, and what judges it
    drawn = images + grids * c.samples.prompts
    sampled = _wide_or_short(drawn * c.eval.steps * call, short)
    decoding = _wide_or_short(drawn * decoded, short and not known_facts(c).video)
    scored, _ = rewards_work(c, images, prompts * rounds)
    return Work(*(sum(ones) for ones in zip(sampled, decoding, scored, strict=True)))


def _encodings(found: Estimate, iterations: int) -> float:
    """Count what the text encoders take: each prompt once, where the cache holds all of them or
    keeps them in a folder; else each time that it is needed."""
    c, architecture = found.config, architecture_of(found.config)
    visits, held_out = iterations * found.forecast.work.prompts, _count(c.prompts.test)
    different = min(_count(c.prompts.train), visits) + held_out
    tuning = tuning_of(c)
    tokens, width, pooled = text_shape(c, architecture)
    row = (tokens * width + pooled) * tuning.dtype.itemsize
    if different * row > CACHE_BYTES and tuning.runtime.cache is None:
        different = visits + held_out * moments(c.eval.every, iterations)
    return (different + 1) * encoding_work(c, architecture)  # and the empty prompt


def _count(path: str) -> int:
    """Return how many prompts a list has; one that is not here is taken to have many."""
    prompts = prompts_if_there(path)
    return len(prompts) if prompts else MOST_UNKNOWN


def time_lines(found: Estimate, *, gigabytes: float, width: int | None = None) -> list[str]:
    """Say where the time of 1,000 iterations is, the largest share first, on the cards of a size;
    a table of `width` columns, None: of any number."""
    times = times_of(found)
    if times is None:
        return []
    cards = cards_of(gigabytes)
    best = cards[-1]
    rows = [["part", "share", "work", *(card.name for card in cards)]]
    for name in sorted(times.work, key=lambda name: -times.share(name, best)):
        rows.append([name, _percent(times.share(name, best)), *_row(times, name, cards)])
    rows.append(["all", "", *_row(times, "", cards)])
    lines = [
        f"time       of {ITERATIONS:,} iterations; shares are those on the {best.name}",
        *(f"           {line}" for line in _drawn(rows, width)),
        f"           a card reaches {LEAST:.0%} to {MOST:.0%} of its peak, as measured on an H200",
    ]
    if times.unknown:
        lines.append(f"           not counted: the rewards {', '.join(times.unknown)}")
    return lines


def _row(times: Times, name: str, cards: Sequence[Card]) -> list[str]:
    done = times.work[name] if name else times.total
    spent = [time_text(times.seconds(card, name)) if any(done) else "-" for card in cards]
    return [flop(int(done.operations)) if done.operations else "-", *spent]


def _percent(share: float) -> str:
    """Write a share; one that is no longer seen is not written as nothing."""
    return f"{share:.1%}" if share >= 0.0005 else "0 %" if share == 0 else "< 0.1%"


def _drawn(rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    inner = None if width is None else max(width - 11, 20)
    return text_table(rows, width=inner).splitlines()


def times_as_json(found: Estimate, iterations: int = ITERATIONS) -> dict[str, object]:
    """Return what the time is spent on as plain data: operations and bytes by part, and seconds on
    every card, [fast, slow]; {} where nothing could be counted."""
    times = times_of(found, iterations)
    if times is None:
        return {}
    work = {}
    for name, one in times.work.items():
        done = {"operations": int(one.operations), "of them float32": int(one.wide)}
        work[name] = {**done, "bytes": int(one.written)}
    seconds = {card.name: [*times.seconds(card)] for card in CARDS}
    return {"work": work, "not_counted": times.unknown, "seconds": seconds}
