"""The checks of `flowrl score --selftest`, one reward at a time: what it sees, and if it judges pictures singly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.damage import DAMAGES, PROBES, strangers
from flowrl.errors import FlowRLError, RewardError
from flowrl.evaluate import wilson
from flowrl.scoring import Heard, Shot
from flowrl.seeds import generator, seed_of
from flowrl.types import LearnedReward, Reward

PROBED = 16  # made-up pictures of each kind
Verdict = Literal["ok", "weak", "fails", "skipped", ""]
Pairs = list[tuple[Shot, Shot]]


class Row(NamedTuple):
    """What one check found."""

    reward: str
    check: str
    verdict: Verdict  # "" = a figure without a verdict
    found: str  # in words
    figures: dict[str, float]
    hard: bool = False  # to fail here is a fault whatever the reward is meant to like


class Subject(NamedTuple):
    """A reward under test, what it said at first, and how to ask it again."""

    name: str
    reward: Reward
    shots: Sequence[Shot]  # one group per picture; with its noisy twin where the reward compares within groups
    ask: Callable[[Sequence[Shot], int], Heard]  # shots, pictures per batch
    batch: int
    first: Heard
    slack: float  # differences up to this are rounding

    @property
    def grouped(self) -> bool:
        """Say whether the reward compares pictures of a group with each other."""
        return "group" in self.first.reads

    @property
    def singles(self) -> list[Shot]:
        """Return the first shot of each group: the undamaged pictures."""
        return list({shot.group: shot for shot in reversed(self.shots)}.values())[::-1]

    def row(self, check: str, verdict: Verdict, found: str, figures: dict[str, float], hard: bool = False) -> Row:
        """Return a row of this reward."""
        return Row(self.name, check, verdict, found, figures, hard)


def damaged(shot: Shot, damage: str, seed: int) -> Shot:
    """Return a shot of the same picture, made worse."""
    return shot._replace(load=lambda: DAMAGES[damage](shot.load(), seed), name=f"{shot.name} ({damage})")


def answers(test: Subject) -> Row:
    """Count the scored pictures."""
    values = test.first.values
    known = values[values.isfinite()].double()
    figures = {"scored": float(len(known)), "pictures": float(len(values))}
    if not len(known):
        return test.row("answers", "fails", f"none of {len(values)} pictures is scored", figures, hard=True)
    figures |= {"mean": known.mean().item(), "std": known.std(correction=0).item()}
    figures |= {"min": known.min().item(), "max": known.max().item()}
    found = f"{len(known)} of {len(values)} scored, mean {figures['mean']:.4g}, std {figures['std']:.3g}, "
    found += f"{figures['min']:.4g} to {figures['max']:.4g}"
    return test.row("answers", "ok" if len(known) == len(values) else "weak", found, figures)


def invariances(test: Subject) -> list[Row]:
    """Ask again: the same, in other orders, in other batches; a score must not change.

    Two pictures of three are damaged, since equal scores in another order would look alike.
    """
    kinds = [None, *DAMAGES]
    shots = [_as(shot, kinds[0 if test.grouped else i % len(kinds)], i) for i, shot in enumerate(test.shots)]
    first, count = test.ask(shots, test.batch), len(shots)
    seconds = [test.first.seconds, first.seconds]
    place = torch.randperm(count, generator=generator(0, "selftest", "order")).tolist()
    same = list(range(count))
    shuffled = sorted(same, key=lambda i: (place[test.shots[i].group], i))  # groups stay together
    again = {
        "repeat": ([(same, test.batch)], "asked again"),
        "order": ([(same[::-1], test.batch), (shuffled, test.batch)], "reversed and shuffled"),
        "batch size": ([(same, most) for most in (1, 3, count)], f"batches of 1, 3 and {count}, not {test.batch}"),
    }
    rows = []
    for check, (ways, how) in again.items():
        try:
            worst = 0.0
            for order, most in ways:
                heard = test.ask([shots[i] for i in order], most)
                worst = max(worst, difference(heard.values, first.values[order]))
                seconds += [heard.seconds] if most == test.batch else []
        except RewardError as error:
            rows.append(test.row(check, "fails", f"{how}: {error}", {}, hard=True))
            continue
        found = f"largest difference {worst:.3g}, {how} (tolerance {test.slack:.1g})"
        verdict: Verdict = "ok" if worst <= test.slack else "fails"
        figures = {"tolerance": test.slack, **({"difference": worst} if worst < math.inf else {})}  # JSON has no inf
        rows.append(test.row(check, verdict, found, figures, hard=True))
    speed = count / max(median(seconds), 1e-9)
    return [*rows, test.row("speed", "", f"{speed:.4g} pictures/s in batches of {test.batch}", {"images_per_s": speed})]


def _as(shot: Shot, damage: str | None, seed: int) -> Shot:
    return shot if damage is None else damaged(shot, damage, seed)


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest distance of scores [N], infinity where only one of them is NaN."""
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    known = ~a.isnan()
    return float((a[known].double() - b[known].double()).abs().max()) if bool(known.any()) else 0.0


def damages(test: Subject, skip: Sequence[str]) -> list[Row]:
    """Show each picture beside its blurred, its noisy version. To rank none of them right is a fault."""
    rows = []
    for damage in DAMAGES:
        pairs = [(shot, damaged(shot, damage, i)) for i, shot in enumerate(test.singles)]
        asked = damage not in skip
        rows.append(compare(test, damage, pairs) if asked else test.row(damage, "skipped", "as asked", {}))
    learns = isinstance(test.reward, LearnedReward)  # before its first round it has no opinion
    blind = not learns and not any(row.verdict in ("ok", "weak") for row in rows)
    return [row._replace(hard=row.hard or blind) for row in rows]


def prompts(test: Subject, skip: Sequence[str]) -> Row:
    """Show each picture also with another picture's record; to a reward that compares pictures, the other picture."""
    check, singles = "wrong prompt", test.singles
    if "prompt" in skip:
        return test.row(check, "skipped", "as asked", {})
    sizes = [shot.size for shot in singles] if test.grouped else None
    pairs: Pairs = []
    for shot, other in zip(singles, strangers([shot.record["prompt"] for shot in singles], sizes), strict=True):
        if other is not None and test.grouped:
            pairs.append((shot, shot._replace(load=singles[other].load, name=singles[other].name)))
        elif other is not None:
            pairs.append((shot, shot._replace(record=singles[other].record)))
    if not pairs:
        return test.row(check, "skipped", "there is no picture with another prompt", {})
    row = compare(test, check, pairs)
    unmoved = row.figures.get("tied") == len(pairs)
    if unmoved and not test.first.reads & {"prompts", "meta"}:
        return row._replace(verdict="skipped", found="it reads neither prompt nor record")
    if unmoved and "prompts" not in test.first.reads:
        return row._replace(verdict="weak", found="it reads the record, but another one changes no score")
    return row._replace(hard=row.hard or not (test.grouped or isinstance(test.reward, LearnedReward)))


def compare(test: Subject, check: str, pairs: Pairs) -> Row:
    """Count how often the first of each pair scores higher."""
    # Every second pair the other way round: a reward that likes what comes first, or last, gains nothing by it.
    shown = [shot._replace(group=i) for i, pair in enumerate(pairs) for shot in (pair[::-1] if i % 2 else pair)]
    try:
        values = test.ask(shown, test.batch).values.view(-1, 2)
    except RewardError as error:
        return test.row(check, "fails", str(error), {}, hard=True)
    gap = values[:, 0] - values[:, 1]
    gap[1::2] *= -1
    count, right = int((~gap.isnan()).sum()), int((gap > test.slack).sum())
    wrong, tied = int((gap < -test.slack).sum()), int((gap.abs() <= test.slack).sum())
    figures: dict[str, float] = {"pairs": count, "right": right, "tied": tied, "wrong": wrong}
    if not count:
        return test.row(check, "weak", f"none of {len(pairs)} pairs is scored", figures)
    low, high = wilson(right, count)
    found = f"{100 * right / count:.1f} % of {count} pairs right (95 %: {100 * low:.1f} to {100 * high:.1f})"
    found += f", {tied} tied" if tied else ""
    found += f", {len(pairs) - count} not scored" if count < len(pairs) else ""
    figures |= {"share": right / count, "low": low, "high": high}
    reverse = right + wrong > 0 and wilson(right, right + wrong)[1] < 0.5
    verdict: Verdict = "fails" if reverse or tied == count else "ok" if low > 0.5 else "weak"
    return test.row(check, verdict, found, figures)


def nan_pictures(test: Subject) -> Row:
    """Show a picture with one NaN, and one of NaN alone: each must be refused or not scored, and harm no other."""
    notes = [_spoilt(test, where) for where in ((0, 0, 0), ())]
    verdict, found = next(note for kind in ("fails", "weak", "ok") for note in notes if note[0] == kind)
    return test.row("NaN picture", verdict, found, {}, hard=True)


def _spoilt(test: Subject, where: tuple[int, ...]) -> tuple[Verdict, str]:
    first = test.shots[0]
    others = [i for i, shot in enumerate(test.shots) if shot.group != first.group]
    try:
        shots = [first._replace(load=partial(_with_nan, first, where)), *test.shots[1:]]
        values = test.ask(shots, test.batch).values
    except RewardError as error:
        cause = error.__cause__
        own = cause is None or isinstance(cause, FlowRLError)
        return ("ok", "refused") if own else ("weak", f"stops, but with a {type(cause).__name__}: {cause}")
    if not bool(values[0].isnan()):
        return "fails", f"a picture with NaN got the score {values[0].item():.4g}"
    if difference(values[others], test.first.values[others]) > test.slack:
        return "fails", "a picture with NaN changes the scores of others"
    return "ok", "not scored"


def _with_nan(shot: Shot, where: tuple[int, ...]) -> Tensor:
    image = shot.load().clone()
    image[where or ...] = torch.nan
    return image


def probes(test: Subject) -> list[Row]:
    """Tell where made-up pictures that show nothing stand among the real ones: a warning, no failure."""
    rows = []
    for kind, draw in PROBES.items():
        shown: list[Shot] = []
        for i, shot in enumerate(test.singles[:PROBED]):
            fake = partial(draw, *shot.size, seed_of("selftest", kind, i))
            shown += [shot._replace(group=i), shot._replace(load=fake, group=i, name=f"{kind} {i + 1}")]
        try:
            real, made = test.ask(shown, test.batch).values.view(-1, 2).unbind(1)
        except RewardError as error:
            rows.append(test.row(f"probe: {kind}", "weak", str(error), {}))
            continue
        ranks = percentiles(made, real if test.grouped else test.first.values)
        mean, most = (ranks.mean().item(), ranks.max().item()) if len(ranks) else (0.0, 0.0)
        found = f"percentile {mean:.1f} among the real pictures, the highest {most:.1f}" if len(ranks) else "not scored"
        rows.append(test.row(f"probe: {kind}", "weak" if mean >= 50 else "ok", found, {"mean": mean, "highest": most}))
    return rows


def percentiles(made: Tensor, real: Tensor) -> Tensor:
    """Return for each scored one of `made` the percentage of the scored `real` below it, ties counting half."""
    made, real = made[made.isfinite()], real[real.isfinite()]
    below = (made[:, None] > real[None]).double() + 0.5 * (made[:, None] == real[None]).double()
    return 100 * below.mean(1) if len(real) else made[:0]
