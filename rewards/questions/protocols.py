"""What each benchmark asks of an image, how answers are read, and what they are worth.

Text that is no answer is reported in words; it never becomes a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from flowrl.core.errors import DataError

from .._judge.answer import Answer

Record = dict[str, Any]
DOUBT = 1e-2  # how far a probability may be off because a server lists the likeliest tokens only
POINTS = {
    "Style": "art, painting, photography or design style, or an artist's manner",
    "World Knowledge": "people, buildings and things that one has to know",
    "Logical Reasoning": "what follows from the prompt but is not said in it",
    "Text Generation": "the text to be written, without a letter more or less",
    "Compound - Imagination": "what cannot exist",
    "Compound - Feature Matching": "features of several kinds, each on the right thing",
    "Relationship - Composition": "one thing is made of others",
    "Relationship - Inclusion": "one thing is in or on a container or a plane",
    "Relationship - Similarity": "things are alike",
    "Relationship - Comparison": "a property of two things is compared",
    "Grammar - Pronoun Reference": "what a pronoun stands for",
    "Grammar - Negation": "what must not be there",
    "Grammar - Consistency": "a property that several things share",
    "Entity Layout - Two-Dimensional Space": "places in the plane of the image",
    "Entity Layout - Three-Dimensional Space": "places in depth",
    "Attribute - Material": "what it is made of, and its texture",
    "Attribute - Shape": "its shape",
    "Attribute - Expression": "a face that shows a feeling",
    "Attribute - Quantity": "how many there are",
    "Attribute - Size": "how large, long, thick or tall it is",
    "Attribute - Color": "its colour",
    "Action - State": "a state that lasts",
    "Action - Non-contact Interaction": "things act on each other without touching",
    "Action - Full-body": "an action of the whole body",
    "Action - Contact Interaction": "things act on each other by touch",
    "Action - Hand": "an action of hands, and whether they are whole",
    "Action - Animal": "an action of an animal",
}
"""Name -> what it asks. Checked against the counts of the published file: 27 points, 10
primaries."""


class Slips(NamedTuple):
    """What published code does otherwise, off by default."""

    skips_first_question: bool = False
    zeroes_in_listed_order: bool = False
    other_answers_mean_no: bool = False
    categories_of_last_image: bool = False


class Benchmark(Protocol):
    """A way of asking and counting."""

    log_probs: bool  # one token with its log-probs is asked for, not a text

    def check(self, record: Record, where: str) -> None:
        """Raise DataError, naming `where`, for a record that cannot be asked about."""
        ...

    def ask(self, record: Record) -> list[str]:
        """Return the requests about an image of this record."""
        ...

    def read(self, answer: Answer, record: Record, number: int) -> Any | str:
        """Return what an answer says, or a text that says why it cannot be read."""
        ...

    def score(self, record: Record, values: Sequence[Any]) -> float:
        """Return an image's score from what was read of its answers."""
        ...

    def tables(self, rows: Sequence[Record]) -> dict[str, float]:
        """Return the benchmark's own figures of all images."""
        ...

    def names(self, record: Record) -> list[str]:
        """Name what is asked, in the order of the answers."""
        ...


class Dpg:
    """DPG-Bench (2403.05135): yes or no to each question; a question whose parent fails is worth
    nothing.

    An image's score is the mean over its questions. **Differs:** a failed parent fails its children
    and theirs in any order of the list, where the code only sees what is listed before
    (`zeroes_in_listed_order`); the judge is a server, not mPLUG-large; each image is judged whole,
    not cut from a grid.
    """

    log_probs = False

    def __init__(self, slips: Slips) -> None:
        self.slips = slips

    def check(self, record: Record, where: str) -> None:
        """Refuse a record without questions in the form of the benchmark."""
        if not isinstance(record.get("questions"), list) or not record["questions"]:
            raise DataError(
                f'{where}: expected "questions" as DPG-Bench\'s CSV has them (prompts: '
                f"dpg:FILE.csv), got {record.get('questions')!r:.80}"
            )

    def asked(self, record: Record) -> list[Record]:
        """Return the questions that count."""
        skips = self.slips.skips_first_question
        return [one for one in record["questions"] if not (skips and one.get("first"))]

    def ask(self, record: Record) -> list[str]:
        """Put the questions of a record to the judge."""
        return [f"{one['question']} Answer with yes or no alone." for one in self.asked(record)]

    def read(self, answer: Answer, record: Record, number: int) -> Any | str:
        """Read an answer; a text says why it cannot be."""
        word = re.sub(r"\W+", "", answer.text).lower()
        if word in ("yes", "no"):
            return float(word == "yes")
        return 0.0 if self.slips.other_answers_mean_no else "neither yes nor no"

    def score(self, record: Record, values: Sequence[Any]) -> float:
        """Return the score of an image."""
        worth = {one["id"]: float(v) for one, v in zip(self.asked(record), values, strict=True)}
        # once in the order of the list, as published, or until nothing changes
        for _ in range(1 if self.slips.zeroes_in_listed_order else len(worth)):
            for one in self.asked(record):
                if any(worth.get(parent) == 0 for parent in one["parents"]):
                    worth[one["id"]] = 0.0
        return sum(worth.values()) / len(worth) if worth else 0.0

    def tables(self, rows: Sequence[Record]) -> dict[str, float]:
        """Return the share of yes by category, parents left aside, and 100 times the mean score."""
        chosen = list(rows)
        if self.slips.categories_of_last_image:
            chosen = list({row["prompt"]: row for row in rows}.values())
        counts: dict[str, list[float]] = {}
        for row in chosen:
            for one, value in zip(row["asked"], row["answers"], strict=True):
                second = one.partition("(")[0].strip()
                first = second.partition("-")[0].strip()
                for name in dict.fromkeys((f"1: {first}", f"2: {second}")):
                    counts.setdefault(name, []).append(value)
        table = {name: _mean(values) for name, values in sorted(counts.items())}
        return {"dpg": 100 * _mean([row["score"] for row in rows]), **table}

    def names(self, record: Record) -> list[str]:
        """Return what a result row calls the questions."""
        return [one["tuple"] for one in self.asked(record)]


class UniGenBench:
    """UniGenBench (2508.20751): one request for all test points of a prompt, 0 or 1 for each.

    An image's score is the share of its test points. **Differs:** the analysis is not parsed, which
    an apostrophe breaks in the published code; a score may stand in quotation marks, where it
    counts there but is never a hit; an answer of another length is missing, and missing images are
    counted.
    """

    log_probs = False

    def check(self, record: Record, where: str) -> None:
        """Refuse a record without questions in the form of the benchmark."""
        points, texts = record.get("testpoints"), record.get("descriptions")
        if not isinstance(points, list) or not isinstance(texts, list) or len(points) != len(texts):
            raise DataError(
                f'{where}: expected as many "testpoints" as "descriptions" (prompts: '
                f"unigenbench:FILE.csv), got {points!r:.80} and {texts!r:.80}"
            )
        odd = [point for point in points if plain(point) not in POINTS]
        if odd or not points:
            raise DataError(f"{where}: expected test points of UniGenBench, got {odd or 'none'}")

    def ask(self, record: Record) -> list[str]:
        """Put the questions of a record to the judge."""
        lines = []
        pairs = zip(record["testpoints"], record["descriptions"], strict=True)
        for number, (point, described) in enumerate(pairs, 1):
            lines.append(f"{number}. {point} ({POINTS[plain(point)]}): {described}")
        return [
            "An image was made from this prompt:\n"
            f"{record['prompt']}\n\nJudge each checkpoint by what can be seen, without guessing:\n"
            + "\n".join(lines)
            + f"\n\nSay in a sentence for each of the {len(lines)} checkpoints, in their order, "
            "what the image shows, and give 1 if it fulfils the checkpoint, 0 if not. Answer in "
            "this form, with lists of that length:\n"
            '<analysis>["...", "..."]</analysis>\n<score>[1, 0]</score>'
        ]

    def read(self, answer: Answer, record: Record, number: int) -> Any | str:
        """Read an answer; a text says why it cannot be."""
        found = re.findall(r"<score>\s*\[(.*?)\]\s*</score>", answer.text, re.DOTALL)
        if not found:
            return "no <score>[...]</score>"
        marks = [part.strip().strip("'\"") for part in found[-1].split(",")]
        if any(mark not in ("0", "1") for mark in marks):
            return f"scores other than 0 and 1: {marks}"
        if len(marks) != len(record["testpoints"]):
            return f"{len(marks)} scores for {len(record['testpoints'])} test points"
        return [float(mark) for mark in marks]

    def score(self, record: Record, values: Sequence[Any]) -> float:
        """Return the score of an image."""
        return _mean(values[0])

    def tables(self, rows: Sequence[Record]) -> dict[str, float]:
        """Return the accuracy by test point and by primary category, pooled over images, and the
        mean over primaries."""
        second: dict[str, list[float]] = {}
        for row in rows:
            for name, value in zip(row["asked"], row["answers"][0], strict=True):
                second.setdefault(plain(name), []).append(value)
        first: dict[str, list[float]] = {}
        for name, values in second.items():
            first.setdefault(name.partition("-")[0].strip(), []).extend(values)
        table = {f"1: {name}": _mean(values) for name, values in sorted(first.items())}
        table |= {f"2: {name}": _mean(values) for name, values in sorted(second.items())}
        return {"unigenbench": _mean([_mean(values) for values in first.values()]), **table}

    def names(self, record: Record) -> list[str]:
        """Name the questions."""
        return list(record["testpoints"])


WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


class GenEval2:
    """GenEval 2's Soft-TIFA (2512.16853): the probability of the right answer to each question.

    An image's score is the arithmetic mean over its questions (atoms), or with `geometric` their
    geometric mean (prompt). The probability is that of the first token being a form of the answer:
    yes in four forms, a count as word, capitalised and digit, each with and without a space before
    it. **Differs:** forms are compared as text, so none counts twice, and a form that the judge's
    tokenizer splits counts only where its first piece is the whole word; a server lists the 20
    likeliest tokens, and an answer of which more than DOUBT could be missing is no answer.
    """

    log_probs = True

    def __init__(self, geometric: bool) -> None:
        self.geometric = geometric

    def check(self, record: Record, where: str) -> None:
        """Refuse a record without questions in the form of the benchmark."""
        pairs, skills = record.get("vqa_list"), record.get("skills")
        good = isinstance(pairs, list) and bool(pairs)
        good = good and all(isinstance(p, list) and len(p) == 2 for p in pairs or [])
        if not good or not isinstance(skills, list) or len(skills) != len(pairs or []):
            raise DataError(
                f'{where}: expected a "vqa_list" of [question, answer] and as many "skills" '
                f"(prompts: geneval2:FILE.jsonl), got {pairs!r:.80} and {skills!r:.80}"
            )
        odd = [answer for _, answer in pairs or [] if not forms(answer)]
        if odd:
            raise DataError(f"{where}: expected the answers Yes, No and one to ten, got {odd}")

    def ask(self, record: Record) -> list[str]:
        """Put the questions of a record to the judge."""
        return [f"{question} Answer in one word." for question, _ in record["vqa_list"]]

    def read(self, answer: Answer, record: Record, number: int) -> Any | str:
        """Read an answer; a text says why it cannot be."""
        wanted = forms(record["vqa_list"][number][1])
        listed = dict(answer.top)
        if not listed:
            return "no log-probs of the first token"
        known = math.fsum(math.exp(lp) for token, lp in listed.items() if token in wanted)
        missing = len(wanted - listed.keys()) * math.exp(min(listed.values()))
        missing = min(missing, 1 - math.fsum(math.exp(lp) for lp in listed.values()))
        if missing > DOUBT:
            return f"{len(listed)} log-probs, which leave {missing:.2f} of {sorted(wanted)} open"
        return min(known, 1.0)

    def score(self, record: Record, values: Sequence[Any]) -> float:
        """Return the score of an image."""
        if not self.geometric:
            return _mean(values)
        if min(values) <= 0:
            return 0.0
        return math.exp(_mean([math.log(value) for value in values]))

    def tables(self, rows: Sequence[Record]) -> dict[str, float]:
        """Return 100 times both means over images, the arithmetic one by skill over atoms, the
        geometric one by the number of atoms."""
        both = {True: GenEval2(True), False: GenEval2(False)}
        am = [both[False].score({}, row["answers"]) for row in rows]
        gm = [both[True].score({}, row["answers"]) for row in rows]
        found = {"soft-TIFA AM": 100 * _mean(am), "soft-TIFA GM": 100 * _mean(gm)}
        skills: dict[str, list[float]] = {}
        atoms: dict[str, list[float]] = {}
        for row, value in zip(rows, gm, strict=True):
            atoms.setdefault(str(row.get("tag", "")), []).append(value)
            for skill, one in zip(row["asked"], row["answers"], strict=True):
                skills.setdefault(skill, []).append(one)
        found |= {f"AM, {name}": 100 * _mean(values) for name, values in sorted(skills.items())}
        return found | {f"GM, {name}": 100 * _mean(values) for name, values in atoms.items()}

    def names(self, record: Record) -> list[str]:
        """Name the questions."""
        return list(record["skills"])


def forms(answer: str) -> set[str]:
    """Return the tokens that mean an answer; none for one that GenEval 2 does not have."""
    word = str(answer).strip().lower()
    if word not in ("yes", "no", *WORDS):
        return set()
    own = {word, word.capitalize()}
    if word in WORDS:
        own.add(str(WORDS.index(word)))
    return own | {f" {form}" for form in own}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def plain(point: str) -> str:
    """Return a test point without brackets and with one space round its dash."""
    bare = re.sub(r"\(.*?\)", "", str(point)).strip()
    return re.sub(r"\s*[-\u2013]\s*", " - ", bare, count=1) if bare not in POINTS else bare
