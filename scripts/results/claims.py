"""What papers claim, each answered by one row of docs/results.md.

A claim that one method is better than another is a contrast of two rows of
assets/results/methods.json; one that it is faster compares how fast the right share of their
training images rose; a claim of cost is counted from the published configs for FLUX, by the same
function that the dry run takes. Whatever was not measured yet says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import between, fixed, points, wrapped
from gains import rows as earlier
from methods import NEEDS
from methods_table import PAGE, found, model_of, p_text, slopes
from scipy import stats

from flowrl.config.load import load_config
from flowrl.core.tables import markdown_table
from flowrl.runs.compare.summary import LEVEL, holm
from flowrl.training.rehearsal import check_plan

CLOSE = 0.9  # of the paper's saving that a counted one has to reach
Result = dict[str, Any]


class Contrast(NamedTuple):
    """A claim that one config gains more than another, or, `faster`, that it learns faster."""

    method: str
    paper: str  # what it claims
    one: str  # configs of shapes/
    other: str
    faster: bool = False

    @property
    def configs(self) -> tuple[str, str]:
        """Return the full names."""
        return f"shapes/{self.one}", f"shapes/{self.other}"


class Saving(NamedTuple):
    """A claim that an iteration costs less: seconds of the paper, calls of two configs here."""

    method: str
    seconds: tuple[float, float]  # of the method, and of what it is compared with
    one: tuple[str, ...]  # a config for FLUX, and what is changed of it
    other: tuple[str, ...]
    times: bool = False  # said as a factor, not as a share
    also: tuple[str, ...] = ()  # another config to compare with, and its words


class Seen(NamedTuple):
    """What was measured of a claim: a value that is above 0 where the claim holds."""

    text: str
    value: float
    p: float
    failed: bool = False  # a run broke, so that what it would have reached is unknown


DANCE = ("flux/dance_grpo", "plan.steps=25", "select.share=0.5834")
CLAIMS: tuple[Contrast | Saving, ...] = (
    Contrast(
        "TempFlow-GRPO over Flow-GRPO",
        "GenEval .88 to .97 at an equal budget",
        "tempflow_grpo",
        "flow_grpo_full",
    ),
    Contrast(
        "TP-GRPO over Flow-GRPO",
        "GenEval .967 to .971, PickScore 22.20 to 22.58",
        "tp_grpo",
        "flow_grpo_full",
    ),
    Contrast("Chunk-GRPO over Flow-GRPO", "HPSv3 14.90 to 15.24", "chunk_grpo", "flow_grpo_full"),
    Contrast("G2RPO over MixGRPO", "HPSv2 .378 to .385", "g2rpo", "mix_grpo"),
    Contrast(
        "Dynamic-TreeRPO over MixGRPO",
        "HPSv2 +4.9 % over the best other (second hand)",
        "dynamic_treerpo",
        "mix_grpo",
    ),
    Contrast(
        "SPO over Diffusion-DPO", "PickScore 22.64 to 23.06 (second hand)", "spo", "diffusion_dpo"
    ),
    Contrast("AWM faster than Flow-GRPO", "up to 24 times", "awm", "flow_grpo_full", faster=True),
    Contrast("FIND faster than others (here DDPO)", "about 10 times", "find", "ddpo", faster=True),
    Saving("MixGRPO cheaper than DanceGRPO", (149.3, 291.3), ("flux/mix_grpo",), DANCE),
    Saving("MixGRPO-Flash", (112.4, 291.3), ("flux/mix_grpo_flash",), DANCE),
    Saving(
        "MixGRPO-Flash*",
        (83.3, 291.3),
        ("flux/mix_grpo_flash", "plan.stride=0", "plan.ratio=0.2", "plan.spare=2"),
        DANCE,
    ),
    Saving(
        "BranchGRPO-Mix cheaper than DanceGRPO",
        (148.0, 698.0),
        ("flux/branch_grpo_mix",),
        ("flux/dance_grpo", "plan.steps=20", "select=null"),
        times=True,
        also=("flux/dance_grpo", "select=null", "{} times beside DanceGRPO's own 16 steps"),
    ),
)


# ---------------------------------------------------------------------------------------- measured


def contrast(claim: Contrast, result: Result) -> Seen | None:
    """Measure one config against another; None where one of them has no row yet."""
    entries = {entry["file"]: entry for entry in result.get("configs", [])}
    model = model_of(result) if entries else None
    pair = [entries[name] for name in claim.configs if name in entries]
    if model is None or len(pair) < 2 or any(entry["name"] not in model.groups for entry in pair):
        return None
    failed = any(run["failed"] is not None for entry in pair for run in entry["seeds"])
    if claim.faster:
        return _faster(claim.configs, slopes(pair[0]), slopes(pair[1]), failed)
    value, error = model.difference(*(entry["name"] for entry in pair))
    half = float(error.half())
    ends = f"{points(value - half, '')} to {points(value + half, '')}"
    return Seen(f"{points(value)} points ({ends})", value, error.p(value), failed)


def _faster(
    names: Sequence[str], one: Sequence[float], other: Sequence[float], failed: bool
) -> Seen | None:
    """Compare slopes of seeds: Welch's test of their difference, and their ratio with Fieller's
    interval at the test's freedom, which holds 1 where the test finds nothing."""
    if min(len(one), len(other)) < 2:
        return None
    a, b = float(np.mean(one)), float(np.mean(other))
    value, p = a - b, float(stats.ttest_ind(one, other, equal_var=False).pvalue)
    still = [f"`{name}`" for name, slope in zip(names, (a, b), strict=True) if slope <= 0]
    if still:
        return Seen(f"{' and '.join(still)} did not rise", value, p, failed)
    low, high = fieller(one, other)
    ends = f"{fixed(low)} to {fixed(high)}" if math.isfinite(high) else "no upper end"
    return Seen(f"{fixed(a / b)} times as fast ({ends})", value, p, failed)


def fieller(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of two means of independent seeds; infinite where the
    lower mean is not known to differ from 0 (Fieller 1954)."""
    a, b = float(np.mean(one)), float(np.mean(other))
    va, vb = (float(np.var(some, ddof=1)) / len(some) for some in (one, other))
    # Welch's freedom
    parts = va**2 / (len(one) - 1) + vb**2 / (len(other) - 1)
    t = float(stats.t.isf(0.025, (va + vb) ** 2 / parts)) if parts else 0.0
    g = t**2 * vb / b**2
    if g >= 1:
        return -math.inf, math.inf
    half = t / b * math.sqrt(max(va + (a / b) ** 2 * vb - g * va, 0.0))
    middle = a / b
    return (middle - half) / (1 - g), (middle + half) / (1 - g)


@cache
def calls(name: str, *changes: str) -> float:
    """Count the network calls of an iteration for each image, sampling and training."""
    forecast = check_plan(load_config(name, list(changes)))
    return forecast.calls / forecast.work.images


def saving(claim: Saving) -> tuple[str, str, float]:
    """Count a claim of cost -> the paper's words, ours, and our saving as a share of theirs."""
    (theirs, before), ours = claim.seconds, calls(*claim.one)
    share, counted = 1 - theirs / before, 1 - ours / calls(*claim.other)
    said = f"{fixed(before, 0)} s to {fixed(theirs, 0)} s an iteration: "
    here = f"{fixed(calls(*claim.other))} to {fixed(ours)} calls an image: "
    if not claim.times:
        return (
            f"{said}-{fixed(100 * share, 0)} %",
            f"{here}-{fixed(100 * counted, 0)} %",
            (counted / share),
        )
    said += f"{fixed(before / theirs)} times"
    here += f"{fixed(calls(*claim.other) / ours)} times"
    if claim.also:
        *config, words = claim.also
        here += f"; {words.format(fixed(calls(*config) / ours))}"
    return said, here, counted / share


def answers(result: Result) -> list[Result]:
    """Answer every claim: what the paper says, what was seen, Holm's p over all that were tested,
    and a verdict."""
    tested = [contrast(c, result) if isinstance(c, Contrast) else None for c in CLAIMS]
    adjusted = holm([math.nan if seen is None else seen.p for seen in tested])
    made = []
    for claim, seen, p in zip(CLAIMS, tested, adjusted, strict=True):
        if isinstance(claim, Saving):
            said, here, share = saving(claim)
            row = {"paper": said, "here": here, "verdict": "seen" if share >= CLOSE else "not seen"}
        elif seen is None:
            row = {
                "paper": claim.paper,
                "here": missing(claim, result),
                "verdict": "not measured yet",
            }
        else:
            row = {"paper": claim.paper, "here": seen.text, "verdict": verdict(seen, p)}
        made.append({"claim": claim.method, **row, "p": p})
    return made


def verdict(seen: Seen, p: float) -> str:
    """Judge a claim that was tested; `p`: Holm's."""
    if seen.failed or math.isnan(p):
        return "cannot be tested here"
    if p >= LEVEL:
        return "not seen"
    return "seen" if seen.value > 0 else "contrary"


def missing(claim: Contrast, result: Result) -> str:
    """Name the rows that a claim waits for, and what they need first."""
    there = {entry["file"] for entry in result.get("configs", [])}
    said = []
    for name in claim.configs:
        if name not in there:
            needs = f" ({NEEDS[name]} first)" if name in NEEDS else ""
            said.append(f"`{name}`{needs}")
    return f"needs {', '.join(said)}" if said else "too few seeds"


# ------------------------------------------------------------------------------------ for the docs

HEAD = """## What the papers claim

*Seen*: the same sign with p < 0.05 after Holm's correction over all tested claims; *contrary*: the
other sign, likewise; *not seen*: neither; *cannot be tested here*: a run broke. A cost is counted:
seen where the saving is at least nine tenths of the paper's. A speed is the rise of right training
images by network evaluation. Everything is on a small model and a checker, not on theirs."""


def table(some: Sequence[Mapping[str, Any]]) -> str:
    """Draw the answers."""
    lines = [["claim", "the paper", "here", "Holm's p", "verdict"]]
    for row in some:
        cells = [row["claim"], row["paper"], row["here"], p_text(row["p"]), row["verdict"]]
        lines.append(cells)
    return markdown_table(lines, left=3)


def why_spo(gains: Mapping[str, Mapping[str, Any]]) -> str:
    """Say why SPO as published does not gain; nothing where its rows are not there."""
    pair = [gains.get(f"shapes/{name}") for name in ("spo", "spo_finished")]
    if None in pair:
        return ""
    own, finished = (_measured(row) for row in pair if row)
    return wrapped(
        f"SPO as published, `shapes/spo`, which judges noisy images, came to {own}; with the same "
        f"loss `shapes/spo_finished`, which samples each candidate to its end and compares by the "
        f"reward, came to {finished}. That its judge is the cause was not tested."
    )


def _measured(row: Mapping[str, Any]) -> str:
    """Write a gain, and in which of the page's tables it stands."""
    alone = row["config"] in {one["config"] for one in earlier()}
    return f"{points(row['gain'])} points {'measured alone' if alone else 'on equal terms'}"


def page(text: str) -> str:
    """Fill the claims of docs/results.md."""
    gains = {row["config"]: row for row in (*earlier(), *found()[1])}
    parts = [HEAD, table(answers(found()[0])), why_spo(gains)]
    return between(text, "claims: table", "claims: end", [part for part in parts if part])


def targets() -> list[tuple[Path, Any]]:
    """Return the page that this module fills."""
    return [(PAGE, page)]
