"""The suites that `flowrl eval TARGET --suite NAME` knows: prompts, rewards, images per prompt."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from flowrl.config.overrides import text_override
from flowrl.core.benchmark_files import format_of
from flowrl.core.errors import ConfigError, unknown
from flowrl.core.prompt_files import PUBLISHED

Calls = dict[str, dict[str, Any]]  # of rewards, as a config has them


class Suite(NamedTuple):
    """What a suite measures, on what, and how often."""

    prompts: str  # made by code, shipped, or of the hub; "" = the user's own
    rewards: Calls  # the first is the headline
    images: int  # per prompt
    what: str
    validation: str = ""  # prompts to choose settings on; "" = the user's own
    reader: str = ""  # the benchmark's own format, where --prompts names none


_PREFERENCE: Calls = {"pickscore": {"fn": "pickscore"}}
_QUALITY: Calls = {
    "pickscore": {"fn": "pickscore"},
    "hpsv2": {"fn": "hpsv2"},
    "image_reward": {"fn": "image_reward"},
    "aesthetic": {"fn": "aesthetic"},
    "clip": {"fn": "clip"},
}

SUITES: dict[str, Suite] = {
    "shapes": Suite(
        "assets/shapes/test.jsonl",
        {"shapes": {"fn": "shapes", "mode": "strict"}},
        4,
        "the shapes benchmark, judged from pixels",
        "assets/shapes/validation.jsonl",
    ),
    "geneval": Suite(
        "geneval/test",
        {"geneval": {"fn": "geneval", "mode": "strict"}},
        4,
        "GenEval's six tasks (2310.11513), 553 prompts of our own in its structure",
        "geneval/train",
    ),
    "ocr": Suite(
        "ocr/test", {"ocr": {"fn": "ocr"}}, 1, "texts to be written, 1,000 prompts", "ocr/train"
    ),
    "drawbench": Suite(
        "drawbench", _QUALITY, 4, "preference scorers on DrawBench's prompts (2205.11487)"
    ),
    "partiprompts": Suite("partiprompts", _QUALITY, 1, "the same on PartiPrompts (2206.10789)"),
    "pickscore": Suite(
        "pickscore/test", _PREFERENCE, 1, "PickScore (2305.01569) on Pick-a-Pic's test prompts"
    ),
    "hpdv2": Suite(
        "hpdv2/test", {"hpsv2": {"fn": "hpsv2"}}, 1, "HPSv2 (2306.09341) on its 3,200 prompts"
    ),
    "t2i-compbench": Suite(
        "",
        {"t2i_compbench": {"fn": "t2i_compbench"}},
        10,
        "T2I-CompBench (2307.06350): attributes by BLIP, places by a detector, the rest by CLIP",
        reader="t2i-compbench",
    ),
    "dpg": Suite(
        "",
        {"dpg": {"fn": "questions", "protocol": "dpg"}},
        4,
        "DPG-Bench (2403.05135): dependent questions, by a judge server",
        reader="dpg",
    ),
    "unigenbench": Suite(
        "",
        {"unigenbench": {"fn": "questions", "protocol": "unigenbench"}},
        4,
        "UniGenBench (2508.20751): 27 test points, by a judge server",
        reader="unigenbench",
    ),
    "geneval2": Suite(
        "",
        {"geneval2": {"fn": "questions", "protocol": "geneval2"}},
        1,
        "GenEval 2 (2512.16853): Soft-TIFA, by a judge server",
        reader="geneval2",
    ),
    "clip_score": Suite(
        "",
        {"clip_score": {"fn": "clip", "scale": 100.0}},
        1,
        "CLIPScore (2104.08718) as torchmetrics has it, 100 times the cosine",
    ),
    "aesthetic": Suite("", {"aesthetic": {"fn": "aesthetic"}}, 1, "the aesthetic predictor"),
}


def suite_of(name: str) -> Suite:
    """Return a suite by its name. Raises ConfigError with the nearest one."""
    if name not in SUITES:
        raise ConfigError(f"--suite: flowrl {unknown(name, SUITES, 'suite')}")
    return SUITES[name]


def prompts_of(name: str, prompts: str | None) -> str:
    """Return the prompts of a suite, or the user's own in its format. Raises ConfigError for a
    suite whose prompts are not shipped, without `prompts`."""
    suite = suite_of(name)
    chosen = prompts or suite.prompts
    own = chosen.endswith(".jsonl") and suite.reader != "geneval2"  # records as rewards see them
    own = own or chosen in PUBLISHED
    if chosen and suite.reader and format_of(chosen)[0] in ("", "hub") and not own:
        chosen = f"{suite.reader}:{chosen}"
    if not chosen:
        raise ConfigError(
            f"--suite {name}: its prompts are not shipped; give --prompts FILE with one a line, or "
            "a CSV, TSV or JSON file with a column or key `prompt`"
        )
    return chosen


def headline_of(name: str, prompts: str | None) -> list[str]:
    """Return the overrides that make a suite's headline that of a config's evaluations, and leave
    its training alone: the suite's first reward is added with weight 0, as `suite_<its name>`.

    Raises ConfigError as `overrides_of`.
    """
    suite, chosen = suite_of(name), prompts_of(name, prompts)
    first, call = next(iter(suite.rewards.items()))
    return [
        f"rewards.suite_{first}={json.dumps({**call, 'weight': 0.0})}",
        text_override("prompts.test", chosen),
        f"eval.images={suite.images}",
        f"eval.score=suite_{first}",
    ]


def overrides_of(name: str, prompts: str | None) -> list[str]:
    """Return the overrides that make a config's evaluation the suite's.

    Raises ConfigError for a suite whose prompts are not shipped, without `prompts`.
    """
    suite, chosen = suite_of(name), prompts_of(name, prompts)
    return [
        f"rewards={json.dumps(suite.rewards)}",
        text_override("prompts.test", chosen),
        f"eval.images={suite.images}",
        "eval.score=''",
    ]
