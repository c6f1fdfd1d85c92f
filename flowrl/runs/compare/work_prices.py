"""What the work beside sampling costs, in network evaluations: measured once per config, before its
first run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.config.load import Config
from flowrl.core.errors import RunError
from flowrl.core.files import write_json
from flowrl.core.types import medians
from flowrl.cost.overhead import PhaseClock, without_overlap
from flowrl.runs.compare.file_shapes import PRICES
from flowrl.runs.compare.stored_files import stored
from flowrl.training.method import TRAINED_CALLS
from flowrl.training.trainer import Trainer

FILE = "prices.json"
ITERATIONS = 3  # that are timed, after one that is not


class Prices(NamedTuple):
    """What one piece of work costs; 1 is the velocity of one latent while sampling."""

    trained: float = float(TRAINED_CALLS)  # a row of the network forward and backward
    decoded: float = 0.0  # an image
    scored: float = 0.0  # an image

    def of(self, metrics: Mapping[str, float]) -> float:
        """Return what an iteration cost, from what its metrics count."""
        beyond = (self.trained - TRAINED_CALLS) * metrics["backwards"]
        images = self.decoded * metrics["decoded"] + self.scored * metrics["scored"]
        return metrics["nfe"] + beyond + images


def prices_of(config: Config, folder: Path) -> Prices:
    """Read a config's prices from its folder, or measure them and write them there.

    Raises RunError if the folder cannot be written or the file is damaged, and what an iteration
    raises.
    """
    found = stored(folder, FILE, PRICES, "delete it, and the same command measures them again")
    if found:
        return Prices(**found)
    prices = measured(Trainer(config))
    write_json(folder / FILE, prices._asdict())
    return prices


def measured(trainer: Trainer) -> Prices:
    """Run a few iterations of a trainer that nobody needs any more -> the medians of what they
    cost.

    Each phase counts as a whole: the bookkeeping around network, VAE and rewards, optimizer steps,
    and forward passes that checkpointing repeats. Seconds are those that a processor works, on a
    GPU those of the wall. Raises RunError if sampling took no time that the clock can tell.
    """
    trainer.step()
    rows = [_iteration(trainer) for _ in range(ITERATIONS)]
    return Prices(**medians(rows))


def _iteration(trainer: Trainer) -> dict[str, float]:
    """Run one iteration -> the price of each kind of work in it."""
    planned, clock = trainer.cost.nfe, PhaseClock()
    trainer.state.log = clock  # type: ignore[assignment]
    with without_overlap(trainer):
        metrics = trainer.step()
    # prompts that were drawn again
    sampled = planned * (1 + metrics.get("refilled", 0.0) / trainer.config.train.prompts)
    unit = clock.seconds["rollout"] / sampled if sampled else 0.0
    if not unit:
        raise RunError(
            f"compare: {trainer.config.name} samples too little for its time to be told; take more "
            "images, or --count calls"
        )
    # passes forward alone cost what they cost while sampling
    forward = metrics["nfe"] - sampled - TRAINED_CALLS * metrics["backwards"]
    spent: dict[str, Any] = {name: seconds / unit for name, seconds in clock.seconds.items()}
    return {
        "trained": _each(spent["train"] - forward, metrics["backwards"], float(TRAINED_CALLS)),
        "decoded": _each(spent["decode"], metrics["decoded"], 0.0),
        "scored": _each(spent["reward"], metrics["scored"], 0.0),
    }


def _each(spent: float, count: float, otherwise: float) -> float:
    """Share out what was spent; `otherwise` where there was nothing of it."""
    return max(0.0, spent) / count if count else otherwise
