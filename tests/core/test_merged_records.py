"""Records of the same names, put together name by name."""

from __future__ import annotations

import torch

from flowrl.core.types import concatenated, medians


def test_rows_stand_behind_each_other_under_their_names() -> None:
    parts = [
        {"a": torch.tensor([1, 2]), "b": torch.tensor([[1.0]])},
        {"b": torch.tensor([[2.0], [3.0]]), "a": torch.tensor([], dtype=torch.int64)},
    ]
    found = concatenated(parts)
    assert list(found) == ["a", "b"]
    assert found["a"].tolist() == [1, 2] and found["b"].tolist() == [[1.0], [2.0], [3.0]]


def test_medians_are_taken_number_by_number() -> None:
    """By hand: the middle of three, and the mean of the middle two."""
    rows = [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": 9.0, "b": 4.0}]
    assert medians(rows) == {"a": 3.0, "b": 2.0}
    assert medians(rows[:2]) == {"a": 2.0, "b": 1.5}
