"""What a prompt of T2I-CompBench asks for: its noun phrases, and two objects with their relation.

The benchmark asks spaCy. `Plain` needs no library: closed lists of words say where a phrase ends.
It reads the benchmark's templates ("a red car and a green boat") as spaCy does, and free sentences
less surely.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

from flowrl.core.errors import ConfigError

MOST = 8  # noun phrases of a prompt that are asked about
SKIPPED = ("top", "the side", "the left", "the right")  # phrases that are part of a relation

PHRASES = {
    "on side of": "beside",
    "next to": "beside",
    "near": "beside",
    "on the left of": "left",
    "on the right of": "right",
    "on the bottom of": "bottom",
    "on the top of": "top",
    "on top of": "top",
    "on the left": "left",
    "on the right": "right",
    "on bottom of": "bottom",
}
"""Words -> relation. The published code scores the first eight, in this order, but for `on top of`,
and finds objects beside others of them."""
LISTED = tuple(PHRASES)[:8]

_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*|[^\w\s]")


def _words(text: str) -> set[str]:
    return set(text.split())


_STARTS = _words(
    "a an the this these those its their his her my your our some several many few each every "
    "another one two three four five six seven eight nine ten"
)
_ENDS = _words(
    "and or but nor while as with without of on in into onto inside at by from to through over "
    "under above below beneath behind between beside besides among around across along against "
    "near next toward towards after before during for about off out up down upon within that "
    "which who where when is are was were be been being has have had do does did it they he she "
    "them him there not so than like together everywhere very only"
)
_VERBS = _words(
    "sat sit sits lay lie lies lays stood stands hung hang hangs hold holds held shone shine "
    "shines contrast contrasts provide provides mix mixes make makes made rest rests lean leans "
    "ran fly flew glow glows grow grows grew drove rode cut cuts fit fits stretch stretches fell "
    "swam sleep sleeps slept keep keeps kept give gives gave come comes came go goes went add "
    "adds create creates complement complements protect protects decorate decorates adorn adorns "
    "reflect reflects fill fills serve serves surround surrounds illuminate illuminates looks "
    "wear wears wore carry carries sway sways float loom looms bring brings brought meets met "
    "waits follow follows offer offers sparkle sparkles"
)
_COLORS = _words(
    "black white red green blue yellow brown gray grey pink purple orange gold silver tan"
)
_NOUNS = _words(  # that end like verbs or adverbs
    "painting building ring string wing clothing ceiling railing earring king thing spring swing "
    "wedding pudding icing frosting bed shed seed weed red sled thread bread lightning evening "
    "morning landing topping dressing stocking lining coating flooring padding dumpling duckling "
    "sapling bedding siding family belly jelly butterfly lily fly"
)


class Relation(NamedTuple):
    """Two things, and how the first stands to the second."""

    kind: str  # left, right, top, bottom or beside; "" = a phrase that never holds
    first: str
    second: str


class Parser(Protocol):
    """Reads prompts."""

    def phrases(self, prompt: str) -> list[str]:
        """Return the noun phrases of a prompt, in their order."""
        ...

    def things(self, prompt: str, phrase: str) -> tuple[str, str] | None:
        """Return the nouns before and after a phrase; None where there are none."""
        ...

    def plainly(self, prompt: str) -> str:
        """Return a prompt without its adjectives, or as it is."""
        ...


class Plain:
    """Closed lists of words. **Differs:** an object is the last word of its phrase ("coat rack":
    rack), and adjectives stay in the text that CLIP reads."""

    def phrases(self, prompt: str) -> list[str]:
        """Cut a prompt at determiners, prepositions, conjunctions, auxiliaries and verbs."""
        words = _WORD.findall(prompt)
        found: list[str] = []
        mine: list[str] = []
        # `mine` grows by a word, or is closed as a phrase where a new one starts
        for place, word in enumerate(words):
            low = word.lower()
            rest = words[place + 1 :]
            # "a red, wooden chair" and "a black and white dog" are one phrase
            joins = word == "," and len(mine) > 1 and _goes_on(rest)
            joins |= low == "and" and _is_color(mine[-1:]) and _is_color(rest[:1])
            if joins:
                mine.append(word)
            elif low in _STARTS or low in _ENDS or not word[0].isalnum():
                _close(mine, found, low in _STARTS)
                mine = [word] if low in _STARTS else []
            else:
                mine.append(word)
        _close(mine, found, False)
        return found

    def things(self, prompt: str, phrase: str) -> tuple[str, str] | None:
        """Take the last words of the phrases before and after a relation."""
        before, _, after = prompt.partition(phrase)
        mine, other = self.phrases(before), self.phrases(after)
        if not mine or not other:
            return None
        return mine[-1].split()[-1].lower(), other[0].split()[-1].lower()

    def plainly(self, prompt: str) -> str:
        """Return the prompt as it is."""
        return prompt


def _goes_on(rest: list[str]) -> bool:
    """Say whether what follows a comma can be one more adjective."""
    return bool(rest) and rest[0].lower() not in _STARTS | _ENDS and rest[0][0].isalnum()


def _is_color(word: list[str]) -> bool:
    return bool(word) and word[0].lower() in _COLORS


def _close(words: list[str], found: list[str], before_start: bool) -> None:
    """Add a finished phrase, without the verb and adverb that end it, if a thing is left."""
    words = list(words)
    began = bool(words) and words[0].lower() in _STARTS
    least = 2 if began else 1
    # a verb in the middle: what follows it is a phrase of its own
    for place in range(least, len(words) - 1):
        if words[place].lower() in _VERBS:
            _close(words[:place], found, False)
            _close(words[place + 1 :], found, before_start)
            return
    # no noun stands right before an article: what does is a verb
    if before_start and len(words) > least:
        words.pop()
    while words and words[-1] == ",":
        words.pop()
    while len(words) > least and (_ends_as_verb(words[-1]) or words[-1] == ","):
        words.pop()
    alone = len(words) == 1 and (began or _ends_as_verb(words[0]))
    if words and not alone:
        found.append(" ".join(words).replace(" ,", ","))


def _ends_as_verb(word: str) -> bool:
    low = word.lower()
    return low in _VERBS or (low.endswith(("ed", "ing", "ly")) and low not in _NOUNS)


class Spacy:
    """The benchmark's own parser, spaCy with a trained pipeline, by name or folder."""

    def __init__(self, pipeline: str, who: str) -> None:
        try:
            import spacy

            self.read = spacy.load(pipeline)
        except (ImportError, OSError, ValueError) as error:
            raise ConfigError(
                f"{who}: parser: spacy: {error}; install both with: pip install spacy && python -m "
                f"spacy download {pipeline}, or take `parser: plain`"
            ) from error

    def phrases(self, prompt: str) -> list[str]:
        """Return spaCy's noun chunks."""
        return [str(chunk) for chunk in self.read(prompt).noun_chunks]

    def things(self, prompt: str, phrase: str) -> tuple[str, str] | None:
        """Return the last noun before a relation, and the first one after it."""
        start = prompt.find(phrase)
        before: list[Any] = []
        after: list[Any] = []
        for token in self.read(prompt):
            if token.pos_ in ("NOUN", "PROPN"):
                if token.idx < start:
                    before.append(token)
                elif token.idx >= start + len(phrase):
                    after.append(token)
        # proper nouns only where there is no other, as published
        after = [t for t in after if t.pos_ == "NOUN"] or after
        return (str(before[-1]), str(after[0])) if before and after else None

    def plainly(self, prompt: str) -> str:
        """Leave adjectives out."""
        return " ".join(token.text for token in self.read(prompt) if token.pos_ != "ADJ")


def asked_phrases(parser: Parser, prompt: str) -> list[str]:
    """Return the noun phrases that are asked about: at most `MOST`, none that belongs to a
    relation."""
    found = [one for one in parser.phrases(prompt) if one.lower() not in SKIPPED]
    return found[:MOST]


def relation_of(parser: Parser, prompt: str, *, listed: bool, top_fails: bool) -> Relation | None:
    """Read how two things shall stand to each other; None where no phrase says it.

    The first phrase in the text counts, the longest where several begin there. `listed`: the first
    one of the published list that is anywhere in the prompt, also inside of a word, as the
    published code. `top_fails`: that code knows "on top of" but never lets it hold.
    """
    if listed:
        there = [phrase for phrase in LISTED if phrase in prompt]
        phrase = there[0] if there else ""
    else:
        places = [(m.start(), -len(p), p) for p in PHRASES for m in _whole(p, prompt)]
        phrase = min(places)[2] if places else ""
    pair = parser.things(prompt, phrase) if phrase else None
    if pair is None:
        return None
    kind = "" if top_fails and phrase == "on top of" else PHRASES[phrase]
    return Relation(kind, *pair)


def _whole(phrase: str, prompt: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"\b{re.escape(phrase)}\b", prompt))
