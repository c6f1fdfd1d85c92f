"""Streams by what they are for: what a stream draws, and that keys alone decide it. Records of
equal names, put together."""

from __future__ import annotations

import hashlib
import random

import pytest
import torch

from flowrl.core.seeds import generator, seed_of
from flowrl.core.types import concatenated, medians


def test_a_stream_is_the_mersenne_twister_from_all_of_its_hash() -> None:
    """The standard library's Mersenne Twister, set to the SHAKE-128 digest of the text of the keys,
    gives the numbers expected; torch puts two of them, the upper half first, into one of 64 bits.
    """
    digest = hashlib.shake_128(b"7/rollout/3").digest(4 * 624)
    words = [int.from_bytes(digest[i : i + 4], "little") for i in range(0, len(digest), 4)]
    twister = random.Random()
    twister.setstate((3, (*words, 624), None))
    expected = []
    for _ in range(2000):
        upper, lower = twister.getrandbits(32), twister.getrandbits(32)
        expected.append((upper << 32 | lower) % 2**62)
    drawn = torch.randint(2**62, (2000,), generator=generator(7, "rollout", 3))
    assert drawn.tolist() == expected


def test_seeds_that_share_their_lower_32_bits_draw_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own `manual_seed` is blind to what is above; the seeds are set by hand."""
    a, b = (torch.Generator().manual_seed(s) for s in (5, 5 + 2**40))
    assert torch.randn(8, generator=a).equal(torch.randn(8, generator=b))
    monkeypatch.setattr("flowrl.core.seeds.seed_of", lambda *keys: 5)
    assert not torch.randn(8, generator=generator("a")).equal(
        torch.randn(8, generator=generator("b"))
    )


def test_a_stream_begins_as_fresh_and_repeats() -> None:
    """Nothing of an earlier normal draw, which torch keeps in pairs, is left in a new stream."""
    first = torch.randn(3, generator=generator(1, "x"))
    assert torch.randn(3, generator=generator(1, "x")).equal(first)
    assert generator(1, "x").initial_seed() == seed_of(1, "x")


def test_normal_draws_are_standard() -> None:
    """The first draw of each of 40,000 streams: mean and spread within five of their standard
    errors (.005 and .0035), neighbours uncorrelated within five of .005."""
    x = torch.cat([torch.randn(1, generator=generator(0, "n", i)) for i in range(40_000)])
    assert abs(float(x.mean())) < 0.025
    assert abs(float(x.std()) - 1) < 0.018
    assert abs(float(torch.corrcoef(torch.stack([x[1:], x[:-1]]))[0, 1])) < 0.025


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
