"""Reward images by a learnt rubric, whose rules a judge checks one by one: JSON with a version on
disk, written whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flowrl.core.errors import ConfigError, DataError
from flowrl.core.files import write_text
from flowrl.core.types import RewardBatch

from .._common.scorer import local, to_pil
from .._judge.answer import Answer, yes_no
from .._judge.ask import Job, Judge, fill, wordings

FORMAT, VERSION = "flowrl rubric", 1
WHO = "rewards.rubric"
ASK = (
    'The image was made from this caption: "{prompt}"\nDoes it keep this rule? {criterion}\n'
    'Begin the answer with "Yes" or "No".'
)


class rubric:
    """Score images [L, 3, H, W] by ``sum_j w_j s_j`` -> [L] float32, NaN = an answer is missing.

    s_j in [0, 1] is the judge's P(yes) to "does the image keep rule j?", w_j the rule's weight. So
    the range is from the sum of the negative weights to that of the positive ones. AutoRubric-T2I
    (2605.17602); `file` is what `scripts/assets/learn_rubric.py` writes. **Reconstruction:** its
    code and prompts are not public; the question is in flowrl's own words, unless `wording` has
    others, with
    {criterion} for the rule and {prompt} for the caption. Raises ConfigError for a file that is no
    rubric, or of another version.
    """

    judges_singly = True
    writes = ("cache",)

    def __init__(
        self,
        *,
        file: str,
        wording: str = "",
        variants: bool = False,
        url: str = "http://localhost:8080",
        model: str = "judge",
        api_key_env: str | None = None,
        timeout: float = 120.0,
        retries: int = 5,
        backoff: float = 1.0,
        workers: int = 16,
        max_failed: float = 0.1,
        encoding: Literal["jpeg", "png"] = "png",
        cache: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self.rules = load_rubric(Path(local(file)))
        # the judge that checks the rules on an image
        judge = Judge(
            WHO,
            url=url,
            model=model,
            api_key_env=api_key_env,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            workers=workers,
            max_failed=max_failed,
            encoding=encoding,
            cache=cache,
            extra=extra,
        )
        self.checks = Checks(judge, wording, variants)

    def probe(self) -> None:
        """Ask the server for its models. Raises RunError."""
        self.checks.judge.probe()

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each image; all rules of all images are asked at once."""
        kept = self.checks(batch.images, batch.prompts, [rule.text for rule in self.rules])
        weights = torch.tensor([rule.weight for rule in self.rules], dtype=torch.float64)
        return (kept @ weights).float().to(batch.images.device)


class Rule(NamedTuple):
    """One rule, and what it is worth to keep it."""

    text: str
    weight: float


def save_rubric(path: Path, rules: Sequence[Rule], made: dict[str, Any] | None = None) -> None:
    """Write a rubric. made: how it was learnt, for people. Raises RunError."""
    rows = [rule._asdict() for rule in rules]
    data = {"format": FORMAT, "version": VERSION, "rules": rows, "made": made or {}}
    write_text(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")


def load_rubric(path: Path) -> list[Rule]:
    """Read a rubric. Raises ConfigError for a file that is none, or of another version."""
    # can it be read, is it a rubric, and one that this release understands?
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{WHO}: file: expected a rubric, as scripts/assets/learn_rubric.py writes it, at "
            f"{path}: {error}"
        ) from error
    kind = data.get("format") if isinstance(data, dict) else None
    if kind != FORMAT:
        raise ConfigError(f"{WHO}: {path}: expected format {FORMAT!r}, got {kind!r}")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ConfigError(
            f"{WHO}: {path}: expected a rubric of version {VERSION}, got version "
            f"{data.get('version')!r}; learn it again with this release of flowrl"
        )
    # rules, each once: a repeated one would count twice
    rows = data.get("rules")
    rules = [_rule(row, path) for row in rows] if isinstance(rows, list) else []
    if not rules or len({rule.text for rule in rules}) < len(rules):
        raise ConfigError(f"{WHO}: {path}: expected a rule or more, each once, got {rows!r:.200}")
    return rules


def _rule(row: Any, path: Path) -> Rule:
    given = row if isinstance(row, dict) else {}
    text, weight = given.get("text"), given.get("weight", math.nan)
    numeric = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not isinstance(text, str) or not text.strip() or not numeric or not math.isfinite(weight):
        raise ConfigError(f"{WHO}: {path}: expected rules with text and weight, got {row!r:.200}")
    return Rule(text, float(weight))


class Checks:
    """P(yes) of each image and rule, from the first token's log-probs."""

    def __init__(self, judge: Judge, wording: str = "", variants: bool = False) -> None:
        given = {"wording": wording} if wording else None
        self.words = wordings({"wording": ASK}, given, WHO)["wording"]
        self.judge, self.variants = judge, variants

    def __call__(self, images: Tensor, prompts: Sequence[str], rules: Sequence[str]) -> Tensor:
        """Return s [L, R] float64 in [0, 1] of images [L, 3, H, W]; NaN = no readable answer."""
        if len(prompts) != len(images):
            raise DataError(f"{WHO}: expected {len(images)} prompts, got {len(prompts)}")
        shown, jobs = to_pil(images), []
        for i, prompt in enumerate(prompts):
            for rule in rules:
                text = fill(self.words, prompt=prompt, criterion=rule)
                jobs.append(Job(f"image {i}, rule {rule[:80]!r}", (i,), text))

        def read(answer: Answer) -> float | str:
            return yes_no(answer, variants=self.variants)

        found = [math.nan if one is None else one for one in self.judge.ask(shown, jobs, read)]
        return torch.tensor(found, dtype=torch.float64).reshape(len(prompts), len(rules))
