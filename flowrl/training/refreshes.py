"""When a copy of the weights that stays as it is gets refreshed: after a time, or as soon as the
policy is far from it (GARDO, 2512.24138)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.processes import World
from flowrl.training.metrics import Trained

COPIES = ("old", "slow")


def limits_of(config: Config) -> dict[str, float]:
    """Return the KL above which copies are refreshed, by their name."""
    found = {}
    for name in COPIES:
        call = getattr(config, name)
        limit = None if call is None or call.fn != "reset" else call.kwargs.get("above")
        if limit is not None:
            found[name] = float(limit)
    return found


def check_refreshes(config: Config) -> None:
    """Raise ConfigError for copies that would be refreshed inside an iteration, or by a KL that the
    run does not have."""
    updates = config.train.updates
    for name in COPIES:
        call = getattr(config, name)
        every = updates if call is None or call.fn != "reset" else call.kwargs.get("every", updates)
        if every % updates:
            raise ConfigError(
                f"{name}.every={every}: a copy is refreshed after whole iterations, each of "
                f"train.updates={updates} optimizer steps; expected a multiple of {updates}, such "
                f"as {every // updates * updates or updates}"
            )
    for name, limit in limits_of(config).items():
        if not config.kl_beta:
            raise ConfigError(
                f"{name}.above={limit:g}: a limit of the KL, but the run has no kl section with a "
                "beta above 0; add one, or leave the limit out"
            )


def largest_kl(seen: list[Trained], world: World) -> float:
    """Return the mean KL of the optimizer step that has the largest, over all processes; 0 where
    nothing was trained."""
    mine = []
    for part in seen:
        kl = part.metrics["kl"]
        mine.append((part.update, kl.double().sum().item(), len(kl)))
    sums: dict[int, list[float]] = {}
    for update, total, count in (row for rows in world.gather(mine) for row in rows):
        known = sums.setdefault(update, [0.0, 0.0])
        known[0] += total
        known[1] += count
    return max((total / count for total, count in sums.values() if count), default=0.0)


def refresh_decay(
    decay_at: Callable[[int], float], steps: int, memory: dict[str, Any], name: str, far: bool
) -> float:
    """Return the decay of a copy after `steps` optimizer steps, and remember a refresh: now if it
    is `far`, else when `decay_at` says so of the steps since the last one."""
    refreshed = memory.setdefault("refreshed", {})
    decay = 0.0 if far else decay_at(steps - refreshed.get(name, 0))
    if decay == 0:
        refreshed[name] = steps
    return decay
