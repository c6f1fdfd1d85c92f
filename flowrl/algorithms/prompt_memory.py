"""Numbers that a credit or a sampler keeps for each prompt of the training list."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowrl.core.errors import CheckpointError, ConfigError


class PromptMemory:
    """Columns of numbers with a row for each prompt, NaN where there is none yet.

    Rows are those of the training list, so that a run that goes on with another list is found.
    """

    needs = frozenset({"prompts"})
    kind = "credit"  # what messages call it

    def __init__(self, columns: dict[str, int]) -> None:
        """columns: name -> numbers per prompt."""
        self._columns = columns
        self._row: dict[str, int] = {}
        self.kept: dict[str, Tensor] = {}

    def start(self, prompts: list[str]) -> None:
        """Make empty rows for the prompts of the training list; equal texts share one. The text of
        an edit names its sources, too (`flowrl.evaluation.sources.prompt_keys`)."""
        self._row = {text: row for row, text in enumerate(dict.fromkeys(prompts))}
        for name, width in self._columns.items():
            self.kept[name] = torch.full((len(self._row), width), torch.nan, dtype=torch.float64)

    def places(self, prompts: Sequence[str]) -> Tensor:
        """Return the row of each prompt [L]. Raises ConfigError for one that is not in the list."""
        strange = next((text for text in prompts if text not in self._row), None)
        if strange is not None:
            raise ConfigError(
                f"{self.kind} {type(self).__name__} remembers the {len(self._row)} prompts of the "
                f"training list, and {strange!r} is none of them; the list must not change"
            )
        return torch.tensor([self._row[text] for text in prompts])

    def visited(
        self, reward: Tensor, prompts: Sequence[str]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each prompt that has scored rewards [L]: its row, which of them are its own [L]
        bool, and these [n] float64; on the device of the rewards."""
        value, place = reward.double(), self.places(prompts).to(reward.device)
        for row in place.unique().tolist():
            mine = (place == row) & ~value.isnan()
            if bool(mine.any()):
                yield row, mine, value[mine]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the numbers of the P prompts, {name: [P, width]}, and their texts' digests [P]."""
        return {**{name: rows.clone() for name, rows in self.kept.items()}, "prompts": self._ids()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put numbers {name: [P, width]} back. Raises CheckpointError if they are of another list
        of prompts."""
        ids, same = self._ids(), state.keys() == {*self.kept, "prompts"}
        if not (same and torch.equal(state["prompts"].cpu(), ids)):
            raise CheckpointError(
                f"{self.kind} {type(self).__name__} has remembered other prompts than those of "
                "prompts.train; go on with the list that the run began with"
            )
        self.kept = {name: state[name].cpu().double().clone() for name in self.kept}

    def _ids(self) -> Tensor:
        """Return a number for each prompt's text, in the order of the list [P] int64."""
        ids = []
        for text in self._row:
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            ids.append(int.from_bytes(digest, signed=True))
        return torch.tensor(ids, dtype=torch.int64)
