"""Blind votes: two images of one prompt under names that do not say where they are from, their
sides shuffled; and links to send for them. Each link has a token of its own: who holds it may vote
on what the link is about, and do nothing else. It holds over a restart, until it is taken back."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
import random
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from flowrl.core.errors import DataError, RunError
from flowrl.core.files import read_json, write_json
from flowrl.evaluation import votes
from flowrl.evaluation.votes import (
    VotePair,
    append_vote,
    keep_image,
    last_votes,
    pair_in,
    pair_of,
    read_votes,
)
from flowrl.runs.folder import PROMPTS, SAMPLES, read_object, read_prompts, read_settings
from flowrl.runs.report.samples import sample_keys, source_tiles, strip_of
from flowrl.runs.view.apart import strengths

FILE = "links.json"  # in the folder of the votes: {token: what it is about}
PATH = "/v/"  # before a token, in an address


class Links:
    """The links of a folder of votes. Made for several threads."""

    def __init__(self, box: Path) -> None:
        self.file = box / FILE
        self._lock = threading.Lock()

    def make(self, about: tuple[str, ...]) -> str:
        """Return the token of the link on two checkpoints, or on what waits for votes: (). The same
        again for the same ones. Raises RunError."""
        with self._lock:
            known = self._read()
            for token, names in known.items():
                if tuple(names) == about:
                    return token
            token = secrets.token_urlsafe(18)
            self._write({**known, token: [*about]})
            return token

    def about(self, token: str) -> tuple[str, ...] | None:
        """Return what a link is about, as `make` was told; None for a token that nobody has. Raises
        RunError."""
        found = self._read().get(token)
        return None if found is None else tuple(found)

    def take_back(self, token: str) -> bool:
        """Let a link open nothing any more; False where there is none. Raises RunError."""
        with self._lock:
            known = self._read()
            there = known.pop(token, None) is not None
            if there:
                self._write(known)
            return there

    def _read(self) -> dict[str, list[str]]:
        try:
            found: dict[str, list[str]] = read_json(self.file, dict[str, list[str]])
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise RunError(f"cannot read {self.file}: {error.strerror or error}") from error
        return found

    def _write(self, known: dict[str, list[str]]) -> None:
        write_json(self.file, known)
        os.chmod(self.file, 0o600)  # who reads it may vote


def mark_of(token: str) -> str:
    """Return what a vote keeps of the link that it came by: enough to tell links apart, and no
    token."""
    return hashlib.blake2b(token.encode(), digest_size=4).hexdigest()


KEPT = 4096  # ballots that wait for a vote; an older one is asked anew
CHOICES = {"left": 1.0, "right": 0.0, "tie": 0.5}


class Side(NamedTuple):
    """A checkpoint of a run whose samples are judged."""

    run: str  # as the list of runs names it
    iteration: int

    def text(self) -> str:
        return f"{self.run}@{self.iteration}"


class Ballot(NamedTuple):
    """One question: which of the two is better?"""

    pair: tuple[str, str]  # files; the first is shown on the left
    prompt: str
    names: tuple[str, str]  # whose they are, in the same order; "" of a run in training
    sources: tuple[str, ...]  # files of what both start from


class _Sample(NamedTuple):
    """An image of a checkpoint, and what it starts from, as files in the box."""

    prompt: str
    file: str
    sources: tuple[str, ...]


class Booth:
    """Hand out ballots and put votes into the folder `box`. Made for several threads."""

    def __init__(self, box: Path) -> None:
        self.box = box
        self._ballots: OrderedDict[str, Ballot] = OrderedDict()
        self._done: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._random = random.SystemRandom()

    def next_asked(self, voter: str) -> dict[str, Any]:
        """Return a ballot that a run in training waits for, and how many there are."""
        said = _by_voter(read_votes(self.box))
        asked = [pair for question in votes.questions(self.box) for pair in question.pairs]
        free = [pair for pair in asked if pair not in said.get(voter, set())]
        return self._hand_out(free, said, {}, len(asked))

    def next_compared(
        self, voter: str, one: Side, two: Side, runs: Mapping[str, Path]
    ) -> dict[str, Any]:
        """Return a ballot on two checkpoints. Raises DataError where they cannot be compared."""
        names = self._pairs(one, two, runs)
        said = _by_voter(read_votes(self.box))
        free = [pair for pair in names if pair not in said.get(voter, set())]
        return self._hand_out(free, said, names, len(names))

    def check_compared(self, one: Side, two: Side, runs: Mapping[str, Path]) -> None:
        """Raise DataError where two checkpoints cannot be compared."""
        self._pairs(one, two, runs)

    def _hand_out(
        self,
        free: Sequence[VotePair],
        said: Mapping[str, set[VotePair]],
        names: Mapping[VotePair, dict[str, str]],
        every: int,
    ) -> dict[str, Any]:
        """Take one of the pairs that have the fewest votes, and shuffle its sides."""
        # nobody has to vote twice on a pair
        if not free:
            return {"ballot": None, "left_over": 0, "of": every}
        # pairs with the fewest votes come first, in no order that a voter could guess
        total = Counter(itertools.chain.from_iterable(said.values()))
        fewest = min(total[one] for one in free)
        pair = self._random.choice([one for one in free if total[one] == fewest])
        sides = [pair.first, pair.second]
        self._random.shuffle(sides)
        whose = names.get(pair, {})
        owners = (whose.get(sides[0], ""), whose.get(sides[1], ""))
        ballot = Ballot((sides[0], sides[1]), pair.prompt, owners, pair.sources)
        # the page gets a random key, so that neither side nor name can be read off it
        key = secrets.token_urlsafe(12)
        with self._lock:
            self._ballots[key] = ballot
            while len(self._ballots) > KEPT:
                self._ballots.popitem(last=False)
        told = {"ballot": key, "prompt": pair.prompt, "sources": len(pair.sources)}
        return {**told, "left_over": len(free), "of": every}

    def image(self, key: str, side: str) -> Path | None:
        """Return the file of one side of a ballot, "left" or "right", or of what both start from,
        "source0", "source1" ...; None where there is no such ballot."""
        with self._lock:
            ballot = self._ballots.get(key)
        if ballot is None:
            return None
        files = dict(zip(("left", "right"), ballot.pair, strict=True))
        files |= {f"source{place}": file for place, file in enumerate(ballot.sources)}
        return self.box / files[side] if side in files else None

    def vote(self, key: str, choice: str, voter: str, link: str = "") -> bool:
        """Keep a vote, with the mark of the link that it came by; False where the ballot is not
        known, because the server began anew. The second time a ballot comes it is not counted
        again. Raises DataError, RunError."""
        if choice not in CHOICES:
            raise DataError(f"expected a choice of {', '.join(CHOICES)}, got {choice!r}")
        # browsers send again what they got no answer to: the key says that it was counted
        with self._lock:
            if key in self._done:
                return True
            ballot = self._ballots.get(key)
            if ballot is None:
                return False
            # columns as preference data sets have them: 1, 0 or 0.5 for the image on the left
            record: dict[str, Any] = {
                "prompt": ballot.prompt,
                "image_0": ballot.pair[0],
                "image_1": ballot.pair[1],
                "label_0": CHOICES[choice],
                "name_0": ballot.names[0],
                "name_1": ballot.names[1],
                "voter": voter,
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
            }
            if link:
                record["link"] = link
            if ballot.sources:
                record["source"] = list(ballot.sources)
            append_vote(self.box, record)
            # remember some keys only; memory stays bounded
            self._done[key] = choice
            while len(self._done) > KEPT:
                self._done.popitem(last=False)
        return True

    def scores(self) -> list[dict[str, Any]]:
        """Return the Bradley-Terry strengths of all checkpoints that were compared, against the one
        that was compared first."""
        every = []
        for vote in last_votes(read_votes(self.box)):
            # those on images of a run in training name none
            if vote.get("name_0") and vote.get("name_1"):
                every.append(vote)
        results = [(vote["name_0"], vote["name_1"], float(vote["label_0"])) for vote in every]
        names = sorted({name for one, two, _ in results for name in (one, two)}, key=_natural)
        return strengths(results, names) if names else []

    def _pairs(
        self, one: Side, two: Side, runs: Mapping[str, Path]
    ) -> dict[VotePair, dict[str, str]]:
        """Return {pair: {file: whose it is}} of two checkpoints, of the prompts that both have."""
        # two different checkpoints of known runs, sampled from the same noise
        for side in (one, two):
            if side.run not in runs:
                raise DataError(f"there is no run {side.run!r}; reload the page")
        if one == two:
            raise DataError("expected two different checkpoints to compare")
        noise = [_noise(runs[side.run]) for side in (one, two)]
        if noise[0] != noise[1]:
            raise DataError(
                f"{one.text()} and {two.text()} sampled from different noise (samples.seed "
                f"{noise[0]} and {noise[1]}), so a vote would judge that, too"
            )
        # files are named after their bytes: equal images have one name, and nothing to choose
        files = [self._files(side, runs[side.run]) for side in (one, two)]
        found: dict[VotePair, dict[str, str]] = {}
        for key, a in files[0].items():
            b = files[1].get(key)
            if b is not None and a.file != b.file:
                pair = pair_of(a.prompt, a.file, b.file, a.sources)
                found[pair] = {a.file: one.text(), b.file: two.text()}
        if not found:
            raise DataError(
                f"{one.text()} and {two.text()} have no prompt in common with two different images"
            )
        return found

    def _files(self, side: Side, run: Path) -> dict[str, _Sample]:
        """Copy the samples of a checkpoint into the box, with what they start from -> {key of
        `sample_keys`: sample}."""
        found, prompts, starts = {}, read_prompts(run)[0], source_tiles(run)
        images = strip_of(run, side.iteration)
        for place, key in enumerate(sample_keys(prompts, starts)):
            sources = tuple(map(self._kept, starts[place]))
            found[key] = _Sample(prompts[place], self._kept(images[place]), sources)
        return found

    def _kept(self, image: Image.Image) -> str:
        """Copy an image into the box -> its file."""
        png = io.BytesIO()
        image.save(png, "PNG")
        return keep_image(self.box, png.getvalue())


def _by_voter(every: Sequence[dict[str, Any]]) -> dict[str, set[VotePair]]:
    found: dict[str, set[VotePair]] = {}
    for vote in every:
        found.setdefault(vote["voter"], set()).add(pair_in(vote))
    return found


def _noise(run: Path) -> Any:
    """Return the seed of a run's samples, as it stands beside them, or else in the config."""
    about = read_object(run / SAMPLES, PROMPTS) if (run / SAMPLES / PROMPTS).exists() else {}
    if "seed" in about:
        return about["seed"]
    samples = read_settings(run).get("samples")
    return samples.get("seed") if isinstance(samples, dict) else None


def _natural(name: str) -> tuple[str, int]:
    run, _, iteration = name.rpartition("@")
    return run, int(iteration) if iteration.isdecimal() and len(iteration) <= 12 else 0
