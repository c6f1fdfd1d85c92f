"""Where the time of many iterations goes: sampling, decoding, rewards, training, evaluation, text
encoding, checkpoints; as shares, and in hours on the cards of one size.

Hours are work over a card's peak, of which a network reaches a share. What it was on an H200, for
images of Stable Diffusion 3.5 and FLUX, is the range of all times here:
assets/results/performance-queue.json has the rows. Text encoders and rewards are transformers,
whose matrix products follow from their sizes; the tests count those of the real classes with
PyTorch's own counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import transformers

from flowrl.config.calls import Call
from flowrl.config.load import Config
from flowrl.core.devices import DTYPES
from flowrl.core.tables import flop, indented_table
from flowrl.cost.architecture import (
    Architecture,
    architecture_of,
    known_facts,
    text_shape,
    tuning_of,
)
from flowrl.cost.estimate import Estimate, evaluated_at_once, judged, prompt_count
from flowrl.cost.memory import WITHOUT
from flowrl.cost.meta_run import meta_run, workload_of
from flowrl.models.prompt_encoding import CACHE_BYTES

MOST, LEAST = 0.36, 0.14  # of the peak that bfloat16 work reached
DISK = (2e9, 2e8)  # bytes that a disk writes in a second: a fast NVMe, and a slow network drive


class Card(NamedTuple):
    """A card's data sheet."""

    name: str
    pattern: str  # of torch's name of it
    sold: int  # GB that it is sold with
    short: float  # TFLOP/s of dense bfloat16 products with sums in float32, without sparsity
    wide: float  # TFLOP/s in float32 without TF32, which PyTorch takes only if it is told to


CARDS = (
    Card("RTX 3090", "NVIDIA GeForce RTX 3090", 24, 71.0, 35.6),
    Card("A10", "NVIDIA A10", 24, 125.0, 31.2),
    Card("L4", "NVIDIA L4", 24, 121.0, 30.3),
    Card("RTX 4090", "NVIDIA GeForce RTX 4090", 24, 165.2, 82.6),
    Card("RTX A6000", "NVIDIA RTX A6000", 48, 154.8, 38.7),
    Card("L40S", "NVIDIA L40S", 48, 362.05, 91.6),
    Card("A100", r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", 80, 312.0, 19.5),
    Card("H100 PCIe", "NVIDIA H100 PCIe", 80, 756.0, 51.2),
    Card("H100", "NVIDIA H100 80GB HBM3", 80, 989.4, 66.9),
    Card("H200", "NVIDIA H200", 141, 989.4, 66.9),
)
"""Sources: NVIDIA's data sheets (H100, H200, A100, L40S, L4, A10) and white papers (Ada and Ampere
GA102: GeForce, RTX A6000)."""


class Work(NamedTuple):
    """What something takes, whatever the card."""

    short: float = 0  # operations in 16 bits
    wide: float = 0  # operations in float32
    written: float = 0  # bytes to the disk

    @property
    def operations(self) -> float:
        """Return the operations of both widths."""
        return self.short + self.wide

    def seconds(self, card: Card, *, slow: bool) -> float:
        """Return the seconds that it takes on a card, at the slow or at the fast end."""
        share, disk = MOST, DISK[0]
        if slow:
            share, disk = LEAST, DISK[1]
        busy = self.short / card.short + self.wide / card.wide
        return busy / 1e12 / share + self.written / disk


def cards_of(gigabytes: float) -> list[Card]:
    """Return the cards that are sold with so much memory or the next size above, the slowest first;
    beyond all sizes those of the largest. Cards have a little less than they are sold with."""
    sizes = sorted({card.sold for card in CARDS})
    sold = next((size for size in sizes if size >= gigabytes - 1), sizes[-1])
    return sorted((card for card in CARDS if card.sold == sold), key=attrgetter("short"))


def time_text(seconds: tuple[float, float]) -> str:
    """Say a range of seconds in the unit that suits its longer end: "7.1 to 18 h"."""
    unit, length = "s", 1
    if seconds[1] >= 90 * 60:
        unit, length = "h", 3600
    elif seconds[1] >= 90:
        unit, length = "min", 60
    low, high = seconds
    return f"{_figures(low / length)} to {_figures(high / length)} {unit}"


def _figures(value: float) -> str:
    """Write a number with two figures; a larger one is rounded to a whole one."""
    if value >= 10:
        return f"{value:,.0f}"
    if value >= 0.1 or value == 0:
        return f"{value:.1f}"
    return f"{value:.1g}"


CLIP_TOKENS = 77
ONE_FRAME = ("first", "last")  # ways to judge a video by a single image


class Tower(NamedTuple):
    """The sizes of a transformer."""

    layers: int
    width: int
    inner: int  # of the MLP
    products: int = 2  # matrices of the MLP: 3 where it is gated
    heads: int = 0  # width of all queries; 0 = `width`
    keys: int = 0  # width of all keys; 0 = that of the queries

    def work(self, tokens: int) -> int:
        """Count the operations of one sequence: products with weights, and attention of all tokens
        to all."""
        heads = self.heads or self.width
        keys = self.keys or heads
        weights = 2 * self.width * (heads + keys) + self.products * self.width * self.inner
        attention = 2 * heads * tokens
        return 2 * tokens * self.layers * (weights + attention)


# ----------------------------------------------------------------------------------- text encoders


def encoding_work(config: Config, architecture: Architecture) -> int:
    """Count the operations that encode one prompt of full length; images that it starts from are
    not counted."""
    read = text_shape(config, architecture).tokens
    total = 0
    for name, part in architecture.parts.items():
        if not name.startswith("text_encoder"):
            continue
        settings: Any = getattr(transformers, part.kind).config_class.from_dict(part.settings)
        tokens = int(config.model.kwargs.get("max_sequence_length") or read)
        if part.kind.startswith("CLIP"):
            tokens = CLIP_TOKENS
        total += _encoder(settings).work(tokens)
    return total


def _encoder(settings: Any) -> Tower:
    """Return the sizes of what reads texts: T5, CLIP, or a language model, alone or beside an
    encoder of images."""
    text = settings.get_text_config()
    # T5's numbers have other names
    if hasattr(text, "d_kv"):
        gated = 3 if text.is_gated_act else 2
        heads = text.num_heads * text.d_kv
        return Tower(text.num_layers, text.d_model, text.d_ff, gated, heads)
    width, heads = text.hidden_size, text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", heads)
    each = getattr(text, "head_dim", None) or width // heads
    products = 2 if "clip" in text.model_type else 3
    sizes = (text.num_hidden_layers, width, text.intermediate_size, products)
    return Tower(*sizes, heads * each, keys * each)


# ----------------------------------------------------------------------------------------- rewards

_LARGE, _HUGE = Tower(24, 1024, 4096), Tower(32, 1280, 5120)  # eyes of CLIP ViT-L/14, ViT-H/14
_LARGE_READS, _HUGE_READS = Tower(12, 768, 3072), Tower(24, 1024, 4096)
_BASE = Tower(12, 768, 3072)  # ViT-B, BERT-base
PATCH, SIDE = 14, 224  # pixels
QWEN_EYES, QWEN_7B = Tower(32, 1280, 5120), Tower(28, 3584, 18_944, 3, 3584, 512)
QWEN_PATCHES, QWEN_WORDS = 1024, 640  # of an image; of HPSv3's instruction and a prompt, about
BLIP_WORDS = 35


def eyes(tower: Tower, side: int = SIDE, patch: int = PATCH) -> int:
    """Count the operations of a vision transformer on one square image."""
    patches = (side // patch) ** 2
    return 2 * patches * 3 * patch**2 * tower.width + tower.work(patches + 1)


def _clip(huge: bool) -> tuple[int, int]:
    if huge:
        return eyes(_HUGE), _HUGE_READS.work(CLIP_TOKENS)
    return eyes(_LARGE), _LARGE_READS.work(CLIP_TOKENS)


def _blip() -> int:
    """Count ImageReward: a ViT-L/16, and a BERT whose layers look at its 197 tokens, too."""
    patches, width = (SIDE // 16) ** 2 + 1, _LARGE.width
    own = _BASE.work(BLIP_WORDS)
    # queries and results are of words, keys and values of patches
    asked = 2 * BLIP_WORDS * 2 * _BASE.width**2 + 2 * patches * 2 * width * _BASE.width
    asked += 4 * BLIP_WORDS * patches * _BASE.width
    return eyes(_LARGE, patch=16) + own + _BASE.layers * asked


def _hpsv3() -> int:
    """Count a Qwen2-VL-7B: its eyes, what joins 2 x 2 patches, and the language model."""
    seen, tokens = QWEN_PATCHES, QWEN_PATCHES // 4
    width = 4 * QWEN_EYES.width
    look = 2 * seen * 3 * 2 * PATCH**2 * QWEN_EYES.width + QWEN_EYES.work(seen)
    join = 2 * tokens * (width * width + width * QWEN_7B.width)
    return look + join + QWEN_7B.work(tokens + QWEN_WORDS)


def reward_call_work(call: Call) -> tuple[int, int] | None:
    """Return the operations of a reward's networks for one image, and for each different prompt;
    None: not known."""
    fn, kwargs = call.fn, call.kwargs
    if fn in WITHOUT:
        return 0, 0
    if fn == "clip":
        named = str(kwargs.get("architecture") or "ViT-L-14")
        if kwargs.get("cells") or not named.startswith(("ViT-L-14", "ViT-H-14")):
            return None
        return _clip(named.startswith("ViT-H-14"))
    if fn == "dino" and str(kwargs["path"]).endswith("dinov2-base"):
        return eyes(_BASE, int(kwargs.get("size") or 518)), 0
    found = {
        "clip_reference": (eyes(_LARGE), 0),
        "aesthetic": (eyes(_LARGE), 0),
        "pickscore": _clip(True),
        "hpsv2": _clip(True),
        "image_reward": (_blip(), 0),
        "hpsv3": (_hpsv3(), 0),
    }
    return found.get(fn)


def rewards_work(config: Config, images: float, prompts: float) -> tuple[Work, list[str]]:
    """Count what all rewards take for so many images of so many different prompts -> the work, and
    the names of the rewards that are not counted: their networks are not known, or they ask a
    server, people or a program."""
    total, unknown = Work(), []
    for name, call in config.rewards.items():
        each = reward_call_work(call)
        if each is None:
            unknown.append(name)
            continue
        # of a video all frames, or one
        frames = 1
        if call.frames and call.frames not in ONE_FRAME:
            frames = int(config.model.kwargs.get("frames") or 1)
        done = images * frames * each[0] + prompts * each[1]
        short = DTYPES[str(call.kwargs.get("dtype", "float32"))].itemsize == 2
        total = Work(total.short + done * short, total.wide + done * (not short))
    return total, unknown


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
        return _together(self.work.values())

    def of(self, name: str) -> Work:
        """Return the work of one thing, or of all where no name is given."""
        if not name:
            return self.total
        return self.work[name]

    def share(self, name: str, card: Card) -> float:
        """Return the part of the time that something takes on a card, at the fast end."""
        whole = self.total.seconds(card, slow=False)
        return self.work[name].seconds(card, slow=False) / whole

    def seconds(self, card: Card, name: str = "") -> tuple[float, float]:
        """Return the seconds of one thing, or of all, at the fast and at the slow end."""
        what = self.of(name)
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
    if not every:
        return 2
    return 2 + (iterations - 1) // every


def _wide_or_short(operations: float, short: bool) -> Work:
    return Work(short=operations) if short else Work(wide=operations)


def _together(works: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(*works, strict=True)))


def _evaluation(found: Estimate, iterations: int, *, short: bool) -> Work:
    """Count held-out images and those of the image grids, in the size that is judged; the former
    are scored."""
    c = found.config
    prompts = prompt_count(c.prompts.test)
    rounds, grids = moments(c.eval.every, iterations), moments(c.samples.every, iterations)
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
    return _together([sampled, decoding, scored])


def _encodings(found: Estimate, iterations: int) -> float:
    """Count what the text encoders take: each prompt once, where the cache holds all of them or
    keeps them in a folder; else each time that it is needed."""
    c, architecture = found.config, architecture_of(found.config)
    visits, held_out = iterations * found.forecast.work.prompts, prompt_count(c.prompts.test)
    different = min(prompt_count(c.prompts.train), visits) + held_out
    tuning = tuning_of(c)
    tokens, width, pooled = text_shape(c, architecture)
    row = (tokens * width + pooled) * tuning.dtype.itemsize
    if different * row > CACHE_BYTES and tuning.runtime.cache is None:
        different = visits + held_out * moments(c.eval.every, iterations)
    return (different + 1) * encoding_work(c, architecture)  # and the empty prompt


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
        *indented_table(rows, 11, width=width),
        f"           a card reaches {LEAST:.0%} to {MOST:.0%} of its peak, as measured on an H200",
    ]
    if times.unknown:
        lines.append(f"           not counted: the rewards {', '.join(times.unknown)}")
    return lines


def _row(times: Times, name: str, cards: Sequence[Card]) -> list[str]:
    """Set what something takes; a dash where it takes nothing."""
    done = times.of(name)
    work = flop(int(done.operations)) if done.operations else "-"
    spent = [time_text(times.seconds(card, name)) if any(done) else "-" for card in cards]
    return [work, *spent]


def _percent(share: float) -> str:
    """Write a share; one that is no longer seen is not written as nothing."""
    if share == 0:
        return "0 %"
    if share < 0.0005:
        return "< 0.1%"
    return f"{share:.1%}"


def times_as_json(found: Estimate) -> dict[str, object]:
    """Return what the time is spent on as plain data: operations and bytes by part, and seconds on
    every card, [fast, slow]; {} where nothing could be counted."""
    times = times_of(found)
    if times is None:
        return {}
    work = {}
    for name, one in times.work.items():
        done = {"operations": int(one.operations), "of them float32": int(one.wide)}
        work[name] = {**done, "bytes": int(one.written)}
    seconds = {card.name: [*times.seconds(card)] for card in CARDS}
    return {"work": work, "not_counted": times.unknown, "seconds": seconds}
