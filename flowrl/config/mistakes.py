"""All mistakes of a config in one message: each line says where, what was expected, what came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from flowrl.core.errors import ConfigError

RENAMED = {
    "grid": "samples",
    "plan.level": "plan.noise_scale",
    "loss.max_weight": "loss.max_advantage",
    "train.lr": "optimizer.lr",
    "train.weight_decay": "optimizer.weight_decay",
    "train.betas": "optimizer.betas",
    "train.eps": "optimizer.eps",
    "train.optimizer": "optimizer.fn",
    "monitors.pictures": "monitors.images",
}
"""Keys of 0.1, or of a commit since -> what they are called since 0.2."""


class Mistakes(ConfigError):
    """One or more mistakes of a config, one line for each."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = list(lines)
        several = f"{len(self.lines)} mistakes:\n  " + "\n  ".join(self.lines)
        super().__init__(several if len(self.lines) > 1 else self.lines[0])


class Collector:
    """Goes on after a mistake, so that a config shows all of its mistakes at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        """Note a mistake."""
        self.lines.append(line)

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Note the mistakes of a block that raises ConfigError, and go on after it."""
        try:
            yield
        except Mistakes as error:
            self.lines += error.lines
        except ConfigError as error:
            self.add(str(error))

    def close(self) -> None:
        """Raise Mistakes if there was one."""
        if self.lines:
            raise Mistakes(self.lines)


def renamed(key: str) -> str | None:
    """Say what a key of 0.1 is called now; None for any other key."""
    new = RENAMED.get(key)
    return f"has another name since flowrl 0.2: {new}" if new else None
