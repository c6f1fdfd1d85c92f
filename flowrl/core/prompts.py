"""Prompt lists: read in the usual formats, dealt out in shuffled epochs, compared with each other.

`overlap` says what held-out prompts share with the training prompts: texts, meanings, mirrored
relations.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.core.benchmark_files import READERS, format_of, format_within
from flowrl.core.errors import ConfigError, DataError, as_one_message, near
from flowrl.core.prompt_files import (
    COLUMNS,
    ENDINGS,
    PUBLISHED,
    kind_of,
    labelled,
    no_prompt,
    on_hub,
    prompt_name,
    read_items,
)
from flowrl.core.prompt_lists import MADE, made_records
from flowrl.core.shipped_files import resource

Record = dict[str, Any]
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


@dataclass(frozen=True)
class PromptSet:
    """A list of prompts, each with its own record for the rewards to read."""

    texts: list[str]  # [N]
    # [N]  at least {"prompt": text}; GenEval files also have tag, include, exclude
    records: list[Record]
    name: str  # file name without its ending
    path: str  # the file as it was found
    # [N] "file, line 3", for messages; empty if not read from a file
    places: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.texts)

    def texts_of(self, rows: Iterable[int]) -> list[str]:
        """Return the texts of prompts `rows` [L]."""
        return list(map(self.texts.__getitem__, rows))


_GIVEN: dict[str, PromptSet] = {}
GIVEN = "python/"  # how the names of lists begin that a program handed over


def given_prompts(items: Iterable[Any], what: str) -> PromptSet:
    """Make a list of texts, or of records as a ``.jsonl`` file has them, one that `load_prompts`
    finds under its `path`, as long as the program runs.

    The name follows from what is in it, so that equal lists are one. A record's text may stand
    under caption or text, too. `what` names the list in messages. Raises DataError.
    """
    records, places = [], []
    for number, item in enumerate(items):
        place = f"{what}[{number}]"
        if isinstance(item, Mapping):
            item = dict(item)
            named = prompt_name(item) or COLUMNS[0]
            if named in item:
                item = {COLUMNS[0]: item.pop(named), **item}
        record = _check(item, place)
        try:
            json.dumps(record, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{place}: expected a record that JSON can hold (texts, numbers, lists, null): "
                f"{error}; leave such columns out"
            ) from error
        records.append(record)
        places.append(place)
    if not records:
        raise DataError(f"{what}: expected at least one prompt, got none")
    texts = [record["prompt"] for record in records]
    unnamed = PromptSet(texts, records, what, "", places)
    name = f"{GIVEN}{what}-{len(texts)}-{prompts_hash(unnamed)[:8]}"
    return _GIVEN.setdefault(name, replace(unnamed, path=name))


def load_prompts(path: str | os.PathLike[str]) -> PromptSet:
    """Read a prompt file, or make one of the lists of `prompt_lists.MADE`, such as
    "geneval/test"; blank lines are skipped, a byte order mark is no part of the text.

    ``.jsonl``: one object per line with "prompt", optionally GenEval's "tag", "include", "exclude".
    ``.json``: a list of such objects, or of texts, or an object that holds one or files them under
    ids. ``.txt``: one prompt per line. ``.csv``, ``.tsv``: a header with a column "prompt"; other
    columns go into the record. Other names of keys and columns: `prompt_files.COLUMNS`. A folder
    of such files: each is a task that is named like its file, unless all hold one prompt. A
    benchmark's own format, or a data set of the hub: named in front, as in "dpg:file.csv"
    (`benchmark_files`), or a list of `prompt_files.PUBLISHED`, such as "drawbench".
    Raises DataError with file and line where a prompt is missing, empty or of the wrong type;
    ConfigError if no file.
    """
    made = os.fspath(path)
    if made in _GIVEN:
        return _GIVEN[made]
    if made.startswith(GIVEN) and not os.path.exists(made):
        raise ConfigError(
            f"{made}: this list of prompts was handed over by a program that has ended; hand it "
            "over again, as in prompts=[...]"
        )
    if made in MADE:
        # a list that flowrl makes itself: no file
        records = made_records(made)
        places = [f"{made}, prompt {number}" for number in range(1, len(records) + 1)]
        texts = [record["prompt"] for record in records]
        return PromptSet(texts, records, made.replace("/", "-"), made, places)
    # a short name such as "drawbench" stands for a format and an address
    known, made = made, PUBLISHED.get(made, made)
    kind, rest = format_of(made)
    if kind:
        file, found, items = Path(rest), made, READERS[kind](rest)
    else:
        file = _found(made)
        found, items = str(file), _items(file)
    name = known.replace("/", "-") if known in PUBLISHED else file.stem
    records, places = [], []
    # `where` stays with each record, for messages much later
    for where, item in items:
        records.append(_check(item, where))
        places.append(where)
    if not records:
        raise DataError(
            f"{file}: expected at least one prompt, got none (the file is empty or blank, or the "
            "folder has no list)"
        )
    return PromptSet([record["prompt"] for record in records], records, name, found, places)


def prompts_if_there(path: str) -> PromptSet | None:
    """Read a list; None if it is on the hub, or not there yet and may be put there later. Raises
    DataError for a broken one, ConfigError for something there that is no list."""
    if on_hub(path):
        return None
    try:
        return load_prompts(path)
    except ConfigError:
        if not path.strip() or os.path.exists(path):
            raise
        return None


def _items(file: Path) -> Iterator[tuple[str, Any]]:
    """Read a file, or all files of a folder: each is a task of its own, named like the file, unless
    all hold one prompt; then their names are the prompts' ids."""
    if not file.is_dir():
        # a table in a benchmark's own columns has more than a prompt in each row
        kind = format_within(file)
        if kind:
            yield from READERS[kind](str(file))
        else:
            yield from read_items(file)
        return
    files = sorted(path for path in file.iterdir() if path.suffix.lower() in ENDINGS)
    found = [(one.stem, list(read_items(one))) for one in files]
    tasks = any(len(items) > 1 for _, items in found)
    for stem, items in found:
        label = {"tag": stem}
        if not tasks:
            label = {"id": stem}
        for where, item in items:
            yield where, labelled(item, label)


def _found(path: str) -> Path:
    """Return the file of a path. Raises ConfigError, with the nearest made list where the path has
    no ending."""
    try:
        return resource(path)
    except ConfigError as error:
        if Path(path).suffix or not path.strip():
            raise
        hub = ", ".join(PUBLISHED)
        raise ConfigError(
            f"{error}\nLists that need no file: {', '.join(MADE)}; from the hub: {hub}"
            f"{near(path, [*MADE, *PUBLISHED])}"
        ) from error


def check_records(prompts: PromptSet, rewards: Mapping[str, Any]) -> None:
    """Show every record to the rewards that have a ``check_record(record, where)``, before anything
    is sampled; all at once to those that have a ``check_records(records, places)``.

    Raises what they raise of our own errors, as a rule a DataError that names file and line, and a
    DataError in place of anything else.
    """
    for name, reward in rewards.items():
        if hasattr(reward, "check_records"):
            with as_one_message(f"{prompts.path}: the check of reward {name!r}", DataError):
                reward.check_records(prompts.records, prompts.places)
            continue
        if not hasattr(reward, "check_record"):
            continue
        for record, where in zip(prompts.records, prompts.places, strict=True):
            with as_one_message(f"{where}: the check_record of reward {name!r}", DataError):
                reward.check_record(record, where)


def task_of(record: Mapping[str, Any]) -> str:
    """Return the task that a prompt belongs to, the `tag` of its record."""
    return str(record.get("tag", "all"))


def prompts_hash(prompts: PromptSet) -> str:
    """Return 16 hexadecimal digits that stand for the records, in their order."""
    lines = (json.dumps(record, sort_keys=True) for record in prompts.records)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def groups_of(prompt_set: PromptSet, balance: str | None) -> list[list[int]]:
    """Return the prompts' indices by the value of the record key `balance`, values in the order of
    the list; all in one group without a key.

    Raises DataError for a record in which the key is missing, or no text or number.
    """
    if balance is None:
        return [list(range(len(prompt_set)))]
    groups: dict[str | int | float, list[int]] = {}
    for index, record in enumerate(prompt_set.records):
        value = record.get(balance)
        if not isinstance(value, str | int | float):
            where = prompt_set.places[index] if prompt_set.places else f"prompt {index + 1}"
            raise DataError(
                f"{where}: train.balance is {balance!r}, so each record needs a text or a number "
                f"under this key; got {value!r}. Add it, or leave train.balance out"
            )
        groups.setdefault(value, []).append(index)
    return list(groups.values())


def stream(
    prompt_set: PromptSet, *, seed: int, first: int, count: int, balance: str | None = None
) -> list[int]:
    """Return `count` prompt indices of an endless stream of shuffled epochs, from place `first` on,
    a function of its arguments alone.

    Each epoch holds every prompt exactly once, in its own order. A batch may run over the end of an
    epoch (always, where the set is smaller than `count`, and then over several); only such a batch
    can hold a prompt twice. With `balance` the prompts of each value of that record key are an
    endless stream, and they take turns; an epoch's order follows from the number of prompts, so
    values with equally many go through theirs in the same order of places.
    Raises DataError for an empty list, or as `groups_of`.
    """
    if not prompt_set.texts:
        raise DataError(f"{prompt_set.path}: no prompts to choose from")
    groups, chosen = groups_of(prompt_set, balance), []
    for place in range(first, first + count):
        turn, which = divmod(place, len(groups))
        epoch, at = divmod(turn, len(groups[which]))
        chosen.append(groups[which][_epoch(len(groups[which]), seed, epoch)[at]])
    return chosen


@lru_cache(maxsize=64)
def _epoch(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    # Sorted by digest: no library promises the same shuffle in its next version, and a resumed run
    # relies on it.
    def key(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest()

    return tuple(sorted(range(size), key=key))


def _check(item: Any, where: str) -> Record:
    # a bare text is a record with nothing but a prompt
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        raise DataError(f"{where}: expected a text or an object with a prompt, got {kind_of(item)}")
    if "prompt" not in item:
        raise no_prompt(where, 'the key "prompt"', item)
    prompt = item["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise DataError(f'{where}: expected a text that is not empty as "prompt", got {prompt!r}')
    # JSON can write half a surrogate pair, which cannot be written as UTF-8 again
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise DataError(
            f'{where}: expected Unicode text as "prompt", got half of a surrogate pair in '
            f"{prompt!r}"
        )
    if not isinstance(item.get("tag", ""), str):
        raise DataError(f'{where}: expected a text as "tag", got {item["tag"]!r}')
    # what GenEval's reward will read, checked before anything runs
    for key in ("include", "exclude"):
        _check_objects(item.get(key, []), f"{where}, {key}")
    return item


def _check_objects(objects: Any, where: str) -> None:
    """Check GenEval's include or exclude list: objects with a "class" and, where present, a "count"
    >= 1."""
    if isinstance(objects, str):  # a column of a CSV file; it means what its reward says it means
        return
    if not isinstance(objects, list):
        raise DataError(f"{where}: expected a list of objects, got {kind_of(objects)}")
    for number, entry in enumerate(objects, 1):
        # what object it is, then how many of it, then where it is
        if not isinstance(entry, dict) or not isinstance(entry.get("class"), str):
            raise DataError(
                f'{where}, entry {number}: expected an object with the text "class", got {entry!r}'
            )
        count = entry.get("count", 1)
        # True is an int for Python, but no number to whoever wrote the file
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise DataError(
                f'{where}, entry {number}: expected a whole number >= 1 as "count", got {count!r}'
            )
        if "position" in entry:
            _check_position(entry["position"], number - 1, f"{where}, entry {number}")


def _check_position(position: Any, earlier: int, where: str) -> None:
    """Check GenEval's relation: a text, and the place of one of the `earlier` entries from 0."""
    good = isinstance(position, list | tuple) and len(position) == 2
    good = good and isinstance(position[0], str) and type(position[1]) is int
    if not good or not 0 <= position[1] < earlier:
        raise DataError(
            f'{where}: expected ["left of", 0] or the like as "position", with the place of an '
            f"earlier entry, got {position!r}"
        )


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
    things, places = [], []
    for entry in include:
        thing = _thing(entry)
        things.append(thing)
        # with a relation turned round, its place belongs to both things
        if "position" in entry:
            relation, other = entry["position"]
            places.append(_placed(thing, relation, _thing(include[other]), turn=turn))
    return tuple(sorted(things)), tuple(sorted(places))


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
        return _placed(_bare(parts[0]), parts[1], _bare(parts[2]), turn=turn)
    return (_bare(plain),)


def _bare(text: str) -> str:
    return " ".join(_FILLING.sub(" ", text).split())


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(" .")
