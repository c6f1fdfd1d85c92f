"""What a reward is tested for: does it see damage, another prompt and images that show nothing, and
does it judge each image by itself, the same in any order, batch and company?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, pad

from flowrl.core.abilities import LearnedReward
from flowrl.core.errors import FlowRLError, RewardError
from flowrl.core.seeds import generator, seed_of
from flowrl.core.types import Reward
from flowrl.evaluation.score_images import PromptedImage, RewardScores
from flowrl.evaluation.statistics import wilson

BLUR = 0.03  # std of the Gaussian, as a share of the shorter side: 2 pixels of 64, 15 of 512
NOISE = 0.2  # std of the pixel noise, of the range [0, 1]


def blur(image: Tensor, seed: int = 0) -> Tensor:
    """Blur an image [3, H, W] by a Gaussian that is cut off at 3 std; the edge is continued.
    `seed` has no effect."""
    std = BLUR * min(image.shape[1:])
    reach = max(1, math.ceil(3 * std))
    kernel = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / std) ** 2)
    kernel = kernel / kernel.sum()
    # [3, 1, H + 2 reach, W + 2 reach]
    wide = pad(image[None], [reach] * 4, mode="replicate").transpose(0, 1)
    return conv2d(conv2d(wide, kernel[None, None, None, :]), kernel[None, None, :, None])[:, 0]


def noise(image: Tensor, seed: int = 0) -> Tensor:
    """Add Gaussian noise to an image [3, H, W] in [0, 1] and cut off what leaves the range."""
    drawn = torch.randn(image.shape, generator=generator(seed, "noise"))
    return (image + NOISE * drawn).clamp(0, 1)


def _static(height: int, width: int, seed: int) -> Tensor:
    return torch.rand(3, height, width, generator=generator(seed, "static"))


def _flat(height: int, width: int, seed: int) -> Tensor:
    return _colour(seed).expand(3, height, width).clone()


def _mosaic(height: int, width: int, seed: int) -> Tensor:
    tiles = torch.rand(1, 3, 8, 8, generator=generator(seed, "mosaic"))
    return interpolate(tiles, size=(height, width), mode="nearest")[0]


def _gradient(height: int, width: int, seed: int) -> Tensor:
    x, y = torch.linspace(-1, 1, width)[None, :], torch.linspace(-1, 1, height)[:, None]
    angle = 2 * math.pi * float(torch.rand(1, generator=generator(seed, "angle")))
    ramp = ((math.cos(angle) * x + math.sin(angle) * y) / (2 * math.sqrt(2)) + 0.5).clamp(0, 1)
    return ramp * _colour(seed)


def _strokes(height: int, width: int, seed: int) -> Tensor:
    """Draw 8 lines of black bars of random width on white, like a page of writing seen from
    afar."""
    bars = torch.rand(8, 32, generator=generator(seed, "strokes")) < 0.6
    lines = torch.ones(32, 32)
    for row in range(8):
        lines[4 * row + 1 : 4 * row + 3] = 1 - bars[row].float()
    return (
        interpolate(lines[None, None], size=(height, width), mode="nearest")[0]
        .expand(3, height, width)
        .clone()
    )


def _colour(seed: int) -> Tensor:
    return torch.rand(3, 1, 1, generator=generator(seed, "colour"))


DAMAGES: dict[str, Callable[[Tensor, int], Tensor]] = {"blur": blur, "noise": noise}
PROBES: dict[str, Callable[[int, int, int], Tensor]] = {
    "static": _static,
    "flat colour": _flat,
    "mosaic": _mosaic,
    "gradient": _gradient,
    "strokes": _strokes,
}
"""Images [3, H, W] in [0, 1] of (H, W, seed) that show nothing: what a policy drifts to that
fools a reward."""


def strangers(
    prompts: Sequence[str], sizes: Sequence[tuple[int, int]] | None = None
) -> list[int | None]:
    """Find for each prompt one of the half that shares the fewest words with it -> its index, None
    without another.

    They are spread: of that half the one that was taken least. With `sizes`, the other's image
    has the same size.
    """
    words = [set(re.findall(r"\w+", prompt.lower())) for prompt in prompts]
    used = [0] * len(prompts)
    found: list[int | None] = []
    for i, prompt in enumerate(prompts):
        # other prompts, of images of the same size
        others = [j for j in range(len(prompts)) if prompts[j] != prompt]
        if sizes is not None:
            others = [j for j in others if sizes[j] == sizes[i]]
        if not others:
            found.append(None)
            continue
        # the half that shares the fewest words, and of that the one taken least
        shared = {j: len(words[i] & words[j]) / max(1, len(words[i] | words[j])) for j in others}
        order = sorted(others, key=lambda j: (shared[j], (j - i) % len(prompts)))
        best = min(order[: -(-len(others) // 2)], key=used.__getitem__)
        used[best] += 1
        found.append(best)
    return found


# --------------------------------------------------------------------------------------- the checks


PROBED = 16  # made-up images of each kind
Pairs = list[tuple[PromptedImage, PromptedImage]]

Verdict = Literal["ok", "weak", "fails", "skipped", ""]


def ok_if(right: bool, otherwise: Verdict = "weak") -> Verdict:
    """Return the verdict "ok" where something is right."""
    if right:
        return "ok"
    return otherwise


class CheckResult(NamedTuple):
    """What one check found."""

    reward: str
    check: str
    verdict: Verdict  # "" = a figure without a verdict
    found: str  # in words
    figures: dict[str, float]
    hard: bool = False  # to fail here is a fault whatever the reward is meant to like


class RewardUnderTest(NamedTuple):
    """A reward under test, what it said at first, and how to ask it again."""

    name: str
    reward: Reward
    # one group per image; with its noisy twin where the reward compares within groups
    images: Sequence[PromptedImage]
    ask: Callable[[Sequence[PromptedImage], int], RewardScores]  # images, images per batch
    batch: int
    first: RewardScores
    slack: float  # differences up to this are rounding

    @property
    def grouped(self) -> bool:
        """Say whether the reward compares images of a group with each other."""
        return "group" in self.first.reads

    @property
    def singles(self) -> list[PromptedImage]:
        """Return the first image of each group: the undamaged ones."""
        by_group = {image.group: image for image in reversed(self.images)}
        return list(by_group.values())[::-1]

    def result(
        self,
        check: str,
        verdict: Verdict,
        found: str,
        figures: dict[str, float] | None = None,
        hard: bool = False,
    ) -> CheckResult:
        """Return what a check of this reward found."""
        return CheckResult(self.name, check, verdict, found, figures or {}, hard)


def damaged(image: PromptedImage, damage: str, seed: int) -> PromptedImage:
    """Return the same image, made worse."""

    def load() -> Tensor:
        return DAMAGES[damage](image.load(), seed)

    return image._replace(load=load, name=f"{image.name} ({damage})")


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest distance of scores [N], infinity where only one of them is NaN."""
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    known = ~a.isnan()
    if not bool(known.any()):
        return 0.0
    return float((a[known].double() - b[known].double()).abs().max())


def answers(test: RewardUnderTest) -> CheckResult:
    """Count the scored images."""
    # how many
    values = test.first.values
    known = values[values.isfinite()].double()
    figures = {"scored": float(len(known)), "images": float(len(values))}
    if not len(known):
        found = f"none of {len(values)} images is scored"
        return test.result("answers", "fails", found, figures, hard=True)
    # and what they look like
    mean, std = known.mean().item(), known.std(correction=0).item()
    low, high = known.min().item(), known.max().item()
    figures |= {"mean": mean, "std": std, "min": low, "max": high}
    found = f"{len(known)} of {len(values)} scored, mean {mean:.4g}, std {std:.3g}, "
    found += f"{low:.4g} to {high:.4g}"
    return test.result("answers", ok_if(len(known) == len(values)), found, figures)


def damages(test: RewardUnderTest, skip: Sequence[str]) -> list[CheckResult]:
    """Show each image beside its blurred, its noisy version. To rank none of them right is a
    fault."""
    # a row for each damage
    rows = []
    for damage in DAMAGES:
        if damage in skip:
            rows.append(test.result(damage, "skipped", "as asked"))
            continue
        pairs = [(image, damaged(image, damage, i)) for i, image in enumerate(test.singles)]
        rows.append(_compare_pairs(test, damage, pairs))
    # before its first round a reward that learns has no opinion
    learns = isinstance(test.reward, LearnedReward)
    blind = not learns and not any(row.verdict in ("ok", "weak") for row in rows)
    return [row._replace(hard=row.hard or blind) for row in rows]


def try_wrong_prompts(test: RewardUnderTest, skip: Sequence[str]) -> CheckResult:
    """Show each image also with another image's record; to a reward that compares images, the
    other image."""
    check = "wrong prompt"
    if "prompt" in skip:
        return test.result(check, "skipped", "as asked")
    pairs = _wrong_prompts(test)
    if not pairs:
        return test.result(check, "skipped", "there is no image with another prompt")
    row = _compare_pairs(test, check, pairs)
    # a reward that no other prompt moves: does it read prompts?
    unmoved = row.figures.get("tied") == len(pairs)
    if unmoved and not test.first.reads & {"prompts", "meta"}:
        return row._replace(verdict="skipped", found="it reads neither prompt nor record")
    if unmoved and "prompts" not in test.first.reads:
        found = "it reads the record, but another one changes no score"
        return row._replace(verdict="weak", found=found)
    # taste explains a failure only of rewards that compare or learn
    tasteless = not (test.grouped or isinstance(test.reward, LearnedReward))
    return row._replace(hard=row.hard or tasteless)


def _wrong_prompts(test: RewardUnderTest) -> Pairs:
    """Pair each image with itself under another prompt, or with another image of the same size."""
    singles = test.singles
    texts = [image.record["prompt"] for image in singles]
    sizes = [image.size for image in singles] if test.grouped else None
    pairs: Pairs = []
    for image, place in zip(singles, strangers(texts, sizes), strict=True):
        if place is None:
            continue
        other = singles[place]
        if test.grouped:
            pairs.append((image, image._replace(load=other.load, name=other.name)))
        else:
            pairs.append((image, image._replace(record=other.record)))
    return pairs


def _compare_pairs(test: RewardUnderTest, check: str, pairs: Pairs) -> CheckResult:
    """Count how often the first of each pair scores higher."""
    # every second pair the other way round: a reward that likes what comes first, or last, gains
    # nothing by it
    shown: list[PromptedImage] = []
    for group, pair in enumerate(pairs):
        if group % 2:
            pair = pair[::-1]
        shown += [image._replace(group=group) for image in pair]
    try:
        values = test.ask(shown, test.batch).values.view(-1, 2)
    except RewardError as error:
        return test.result(check, "fails", str(error), hard=True)
    # how the pairs came out
    gap = values[:, 0] - values[:, 1]
    gap[1::2] *= -1
    count, right = int((~gap.isnan()).sum()), int((gap > test.slack).sum())
    wrong, tied = int((gap < -test.slack).sum()), int((gap.abs() <= test.slack).sum())
    figures: dict[str, float] = {"pairs": count, "right": right, "tied": tied, "wrong": wrong}
    if not count:
        return test.result(check, "weak", f"none of {len(pairs)} pairs is scored", figures)
    # the share with its interval
    low, high = wilson(right, count)
    figures |= {"share": right / count, "low": low, "high": high}
    found = f"{100 * right / count:.1f} % of {count} pairs right "
    found += f"(95 %: {100 * low:.1f} to {100 * high:.1f})"
    if tied:
        found += f", {tied} tied"
    if count < len(pairs):
        found += f", {len(pairs) - count} not scored"
    # more wrong than right, or nothing seen, is a failure
    verdict = ok_if(low > 0.5)
    if tied == count or (right + wrong and wilson(right, right + wrong)[1] < 0.5):
        verdict = "fails"
    return test.result(check, verdict, found, figures)


def probes(test: RewardUnderTest) -> list[CheckResult]:
    """Tell where made-up images that show nothing stand among the real ones: a warning, no
    failure."""
    rows = []
    for kind in PROBES:
        # each beside a real image
        shown: list[PromptedImage] = []
        for i, image in enumerate(test.singles[:PROBED]):
            fake = partial(PROBES[kind], *image.size, seed_of("selftest", kind, i))
            shown.append(image._replace(group=i))
            shown.append(image._replace(load=fake, group=i, name=f"{kind} {i + 1}"))
        try:
            real, made = test.ask(shown, test.batch).values.view(-1, 2).unbind(1)
        except RewardError as error:
            rows.append(test.result(f"probe: {kind}", "weak", str(error)))
            continue
        # where they stand
        if not test.grouped:
            real = test.first.values
        ranks = percentiles(made, real)
        rows.append(_probe_result(test, kind, ranks))
    return rows


def _probe_result(test: RewardUnderTest, kind: str, ranks: Tensor) -> CheckResult:
    found, mean, most = "not scored", 0.0, 0.0
    if len(ranks):
        mean, most = ranks.mean().item(), ranks.max().item()
        found = f"percentile {mean:.1f} among the real images, the highest {most:.1f}"
    figures = {"mean": mean, "highest": most}
    return test.result(f"probe: {kind}", ok_if(mean < 50), found, figures)


def percentiles(made: Tensor, real: Tensor) -> Tensor:
    """Return for each scored one of `made` the percentage of the scored `real` below it, ties
    counting half."""
    made, real = made[made.isfinite()], real[real.isfinite()]
    if not len(real):
        return made[:0]
    below = (made[:, None] > real[None]).double() + 0.5 * (made[:, None] == real[None]).double()
    return 100 * below.mean(1)


Way = tuple[list[int], int]  # order of the images, images per batch


def invariances(test: RewardUnderTest) -> list[CheckResult]:
    """Ask again: the same, in other orders, in other batches; a score must not change.

    Two images of three are damaged, since equal scores in another order would look alike.
    """
    images = _some_damaged(test)
    first = test.ask(images, test.batch)
    seconds = [test.first.seconds, first.seconds]
    rows = []
    for check, (ways, how) in _ways(test).items():
        # the largest difference over all ways
        worst = 0.0
        try:
            for order, most in ways:
                scores = test.ask([images[i] for i in order], most)
                worst = max(worst, difference(scores.values, first.values[order]))
                if most == test.batch:
                    seconds.append(scores.seconds)
        except RewardError as error:
            rows.append(test.result(check, "fails", f"{how}: {error}", hard=True))
            continue
        # against the tolerance; JSON has no infinity
        found = f"largest difference {worst:.3g}, {how} (tolerance {test.slack:.1g})"
        figures = {"tolerance": test.slack}
        if worst < math.inf:
            figures["difference"] = worst
        verdict = ok_if(worst <= test.slack, "fails")
        rows.append(test.result(check, verdict, found, figures, hard=True))
    # the time that all took
    speed = len(images) / max(median(seconds), 1e-9)
    found = f"{speed:.4g} images/s in batches of {test.batch}"
    return [*rows, test.result("speed", "", found, {"images_per_s": speed})]


def _some_damaged(test: RewardUnderTest) -> list[PromptedImage]:
    images = [*test.images]
    if test.grouped:
        return images
    kinds = [None, *DAMAGES]
    for i, image in enumerate(images):
        kind = kinds[i % len(kinds)]
        if kind is not None:
            images[i] = damaged(image, kind, i)
    return images


def _ways(test: RewardUnderTest) -> dict[str, tuple[list[Way], str]]:
    """Return {check: (ways to ask again, how messages call them)}."""
    # groups stay together
    count = len(test.images)
    place = torch.randperm(count, generator=generator(0, "selftest", "order")).tolist()
    same = list(range(count))
    shuffled = sorted(same, key=lambda i: (place[test.images[i].group], i))
    # the sizes hold one image, a few, and all
    sizes = [(same, most) for most in (1, 3, count)]
    return {
        "repeat": ([(same, test.batch)], "asked again"),
        "order": ([(same[::-1], test.batch), (shuffled, test.batch)], "reversed and shuffled"),
        "batch size": (sizes, f"batches of 1, 3 and {count}, not {test.batch}"),
    }


def nan_images(test: RewardUnderTest) -> CheckResult:
    """Show an image with one NaN, and one of NaN alone: each must be refused or not scored, and
    harm no other."""
    notes = [_with_a_broken_image(test, where) for where in ((0, 0, 0), ())]
    worst = min(notes, key=lambda note: ("fails", "weak", "ok").index(note[0]))
    return test.result("NaN image", *worst, hard=True)


def _with_a_broken_image(test: RewardUnderTest, where: tuple[int, ...]) -> tuple[Verdict, str]:
    # the first image has NaN at a place, or everywhere
    first = test.images[0]
    try:
        images = [first._replace(load=partial(_with_nan, first, where)), *test.images[1:]]
        values = test.ask(images, test.batch).values
    except RewardError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, FlowRLError):
            return "ok", "refused"
        return "weak", f"stops, but with a {type(cause).__name__}: {cause}"
    # it has no score, and other groups have theirs
    others = [i for i, image in enumerate(test.images) if image.group != first.group]
    if not bool(values[0].isnan()):
        return "fails", f"an image with NaN got the score {values[0].item():.4g}"
    if difference(values[others], test.first.values[others]) > test.slack:
        return "fails", "an image with NaN changes the scores of others"
    return "ok", "not scored"


def _with_nan(image: PromptedImage, where: tuple[int, ...]) -> Tensor:
    pixels = image.load().clone()
    pixels[where or ...] = torch.nan
    return pixels
