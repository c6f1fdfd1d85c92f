"""Reward images by the votes of people, who compare them at a page while the run waits."""

from __future__ import annotations

import io
import logging
import shlex
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from flowrl.core.errors import ConfigError
from flowrl.core.types import RewardBatch
from flowrl.evaluation.votes import (
    VotePair,
    ask_people,
    keep_image,
    opinions,
    pair_of,
    read_votes,
    withdraw,
)

from ._common.pairs import some_pairs, win_rates
from ._common.scorer import to_pil

_log = logging.getLogger("flowrl.votes")


class votes:
    """Score images by their share of wins in votes against others of their group -> [L] float32 in
    [0, 1], NaN where nobody voted.

    The images, and what they start from, go into `folder`, which `flowrl view RUNS --votes FOLDER`
    shows; each group of G is compared in `pairs` pairs (at least G/2), chosen as in `win_rate`. The
    call ends once every pair has `each` votes, or after `patience` seconds: pairs without a vote
    are missing then, and so is an image without any, never a 0. Files are named by their contents,
    so a run that is resumed finds the votes that it had. Evaluations leave this reward out unless
    it is their headline. Source: win rates within a group are Pref-GRPO's (2508.20751), there of a
    model as judge. Raises ConfigError for numbers that cannot be.
    """

    asks_people = True
    writes = ("folder",)

    def __init__(
        self,
        *,
        folder: str,
        pairs: int = 8,
        each: int = 1,
        patience: float = 3600.0,
        look: float = 1.0,
    ) -> None:
        for name, value, least in (("pairs", pairs, 1), ("each", each, 1)):
            if value < least:
                raise ConfigError(f"rewards.votes: {name}: expected {least} or more, got {value}")
        if not patience >= 0 or not look > 0:
            raise ConfigError("rewards.votes: expected patience >= 0 and look > 0, in seconds")
        self.folder, self.pairs, self.each = Path(folder), pairs, each
        self.patience, self.look = patience, look

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Show the images, wait for people, and count."""
        # the images become files that the voting page can show
        group = batch.group.cpu()
        first, second = some_pairs(
            group, batch.images, self.pairs, 0, option="rewards.votes: pairs"
        )
        names = []
        for image in to_pil(batch.images):
            names.append(self._kept(image))
        sources = self._sources(batch)
        # wait for votes on each pair
        asked = []
        for i, j in zip(first.tolist(), second.tolist(), strict=True):
            asked.append(pair_of(batch.prompts[i], names[i], names[j], sources[i]))
        said = self._asked(asked)
        # 1 = the first image wins; a pair has its own order of the two
        outcome = torch.full((len(asked),), torch.nan)
        for place, (pair, i) in enumerate(zip(asked, first.tolist(), strict=True)):
            if said[pair]:
                mean = sum(said[pair]) / len(said[pair])
                outcome[place] = mean if pair.first == names[i] else 1 - mean
        return win_rates(outcome, first, second, len(group))

    def _kept(self, image: Image.Image) -> str:
        """Keep an image in the folder -> its file."""
        png = io.BytesIO()
        image.save(png, "PNG")
        return keep_image(self.folder, png.getvalue())

    def _sources(self, batch: RewardBatch) -> list[tuple[str, ...]]:
        """Keep what each image [L] starts from -> files, none where that is noise alone."""
        if not batch.source:
            return [()] * len(batch.prompts)
        # images of one prompt share their sources, which are kept once
        kept: dict[int, tuple[str, ...]] = {}
        for source in batch.source:
            if id(source) not in kept:
                pictures = [to_pil(image[None])[0] for image in source]
                kept[id(source)] = tuple(map(self._kept, pictures))
        return [kept[id(source)] for source in batch.source]

    def _asked(self, asked: Sequence[VotePair]) -> dict[VotePair, list[float]]:
        """Put pairs before people where votes are missing -> what was said of each."""
        # two images of the same bytes need no vote: neither can be better
        wanted = [pair for pair in asked if pair.first != pair.second]
        if self._missing(wanted):
            question = ask_people(self.folder, wanted)
            try:
                self._wait(wanted)
            finally:
                withdraw(self.folder, question)
        given = opinions(read_votes(self.folder))
        same = {pair: [0.5] for pair in asked if pair.first == pair.second}
        return {pair: given.get(pair, []) for pair in asked} | same

    def _wait(self, wanted: Sequence[VotePair]) -> None:
        """Wait until every pair has its votes, or nobody comes any more."""
        end = time.monotonic() + self.patience
        _log.warning(
            "votes: waiting up to %.0f s for %d votes: flowrl view RUNS --votes %s",
            self.patience,
            self._missing(wanted),
            shlex.quote(str(self.folder)),
        )
        while (missing := self._missing(wanted)) and (left := end - time.monotonic()) > 0:
            time.sleep(min(self.look, left))
        if missing:
            _log.warning("votes: %d votes did not come; they are missing, not 0", missing)

    def _missing(self, wanted: Sequence[VotePair]) -> int:
        given = opinions(read_votes(self.folder))
        return sum(max(0, self.each - len(given.get(pair, []))) for pair in wanted)
