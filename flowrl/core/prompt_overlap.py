"""What held-out prompts share with the training prompts: texts, meanings, mirrored relations."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from flowrl.core.prompts import PromptSet

Meaning = tuple[Any, ...]

OPPOSITE = {
    "left of": "right of",
    "right of": "left of",
    "above": "below",
    "below": "above",
}
"""Relations of GenEval; a pair can be said with either."""

# words that add nothing to what is to be seen
_FILLING = re.compile(
    r"\b(?:an?|the|one|there (?:is|are)|(?:photo|picture|image|painting|drawing)s? of|to)\b"
)
_QUOTED = re.compile(r'"([^"]*\w[^"]*)"')
_RELATION = re.compile(r"\b(?:the )?(left of|right of|above|below)\b")


class Overlap(NamedTuple):
    """Pairs of texts, (held out, trained on); each held-out prompt is in one list at most."""

    same: list[tuple[str, str]]  # the same text, but for case, spaces and a full stop
    mirrored: list[tuple[str, str]]  # "a left of b" and "b right of a"
    paraphrased: list[tuple[str, str]]  # the same things are asked for in other words

    def lines(self, total: int) -> list[str]:
        """Say of `total` held-out prompts how many training knows, with an example of each kind."""
        kinds = (
            ("are training prompts too", self.same),
            ("mirror a training prompt's relation", self.mirrored),
            ("ask for what a training prompt asks for in other words", self.paraphrased),
        )
        out = []
        for what, pairs in kinds:
            if pairs:
                held, trained = pairs[0]
                out.append(f"{len(pairs)} of {total} {what}: {held!r} and {trained!r}")
        return out


def overlap(
    held_out: PromptSet,
    trained: PromptSet,
    starts: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None,
) -> Overlap:
    """Compare every held-out prompt with all training prompts.

    What a prompt means is its GenEval record (class, count, colour, relation) if it has one, else
    the text in double quotes that it asks for, else its words without articles and "a photo of".
    `starts` says of each held-out and of each training prompt what it starts from, such as files:
    then only prompts that start from the same are alike.
    """
    found = Overlap([], [], [])
    here, there = starts or ([None] * len(held_out), [None] * len(trained))
    # what training asks for, as it is said and with each relation one way round
    texts: dict[tuple[str, Hashable], str] = {}
    said: dict[tuple[Meaning, Hashable], str] = {}
    turned: dict[tuple[Meaning, Hashable], str] = {}
    for text, record, start in zip(trained.texts, trained.records, there, strict=True):
        texts.setdefault((_plain(text), start), text)
        said.setdefault((_meaning(record, turn=False), start), text)
        turned.setdefault((_meaning(record, turn=True), start), text)
    for text, record, start in zip(held_out.texts, held_out.records, here, strict=True):
        if (plain := (_plain(text), start)) in texts:
            found.same.append((text, texts[plain]))
        elif (meaning := (_meaning(record, turn=False), start)) in said:
            found.paraphrased.append((text, said[meaning]))
        elif (meaning := (_meaning(record, turn=True), start)) in turned:
            found.mirrored.append((text, turned[meaning]))
    return found


def undeclared(found: Overlap, held_out: PromptSet) -> Overlap:
    """Leave out reworded and mirrored prompts whose record says ``held_out: false``: the list
    itself says that training knows what they ask for. Equal texts stay."""
    pairs = zip(held_out.texts, held_out.records, strict=True)
    declared = {text for text, record in pairs if record.get("held_out") is False}
    mirrored = [pair for pair in found.mirrored if pair[0] not in declared]
    paraphrased = [pair for pair in found.paraphrased if pair[0] not in declared]
    return Overlap(found.same, mirrored, paraphrased)


def scenes_of(prompts: PromptSet) -> list[Meaning]:
    """Return what each prompt asks for, equal for all wordings of one scene and for a relation that
    is said the other way round."""
    return [_meaning(record, turn=True) for record in prompts.records]


def _meaning(record: dict[str, Any], *, turn: bool) -> Meaning:
    """Say what a prompt asks for; with `turn` "b right of a" is "a left of b"."""
    include = record.get("include")
    # a column of a CSV file may be named so: a text, and no list of GenEval's
    if not include or not isinstance(include, list | tuple):
        return _words(record["prompt"], turn=turn)
    entries = []
    for entry in include:
        thing = _thing(entry)
        place: tuple[Any, ...] = ()
        if "position" in entry:
            relation, other = entry["position"]
            place = _placed(thing, relation, _thing(include[other]), turn=turn)
        entries.append((thing, place))
    # with a relation turned round, its place belongs to both things
    things = tuple(sorted(thing for thing, _ in entries))
    places = tuple(sorted(place for _, place in entries if place))
    return things, places


def _thing(entry: dict[str, Any]) -> tuple[str, int, str]:
    return str(entry["class"]), int(entry.get("count", 1)), str(entry.get("color", ""))


def _placed(one: Any, relation: str, two: Any, *, turn: bool) -> tuple[Any, ...]:
    if turn and relation in ("right of", "below"):
        return two, OPPOSITE[relation], one
    return one, relation, two


def _words(text: str, *, turn: bool) -> Meaning:
    """Say what a prompt without a record asks for by its words."""
    plain = _plain(text)
    quoted = _QUOTED.search(plain)
    if quoted:
        return ("text", "".join(quoted[1].split()))
    parts = _RELATION.split(plain, maxsplit=1)
    if len(parts) == 3:
        one, two = (_bare(part) for part in (parts[0], parts[2]))
        return _placed(one, parts[1], two, turn=turn)
    return (_bare(plain),)


def _bare(text: str) -> str:
    return " ".join(_FILLING.sub(" ", text).split())


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .")
