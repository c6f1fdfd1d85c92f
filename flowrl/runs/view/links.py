"""Links to send for blind votes. Each has a token of its own: who holds it may vote on what the
link is about, and do nothing else. It holds over a restart, until it is taken back."""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from pathlib import Path

from flowrl.core.errors import RunError
from flowrl.core.files import read_json, write_json

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
