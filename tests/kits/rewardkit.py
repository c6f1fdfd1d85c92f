"""What the tests of scorers share."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import pytest

from rewards._backbones import clip

if TYPE_CHECKING:
    from weightkit import Weights


@pytest.fixture(scope="session", autouse=True)
def _tokenizers_are_read_once() -> Iterator[None]:
    """Keep the tokenizer of each folder: reading 49,408 words takes longer than a tiny network.

    Tests that change a folder's files change them in a copy.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "load_part", cache(clip.load_part))
        yield


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Tiny networks of all scorers, saved once for all tests."""
    from weightkit import Weights  # only where it is asked for: it imports the libraries

    return Weights(tmp_path_factory.mktemp("weights"))
