"""How slowly a copy of the weights follows the trained ones: ``(steps) -> decay``.

After each iteration ``copy <- decay copy + (1 - decay) current``; `steps` counts the optimizer
steps that were made until then. 0 copies, 1 leaves the copy as it is.
"""

from __future__ import annotations

from flowrl.core.errors import ConfigError


def ramp(steps: int, *, slope: float, limit: float, wait: int = 0, start: float = 0.0) -> float:
    """Return ``min(start + slope max(0, steps - wait), limit)``, and 0 while steps <= wait.

    DiffusionNFT (2509.16117, code), old policy: type 0 is slope 0; type 1 is slope 0.001, limit
    0.5; type 2 is wait 75, slope 0.0075, limit 0.999. AWM (2509.25050, code), slow copy: slope
    0.001, limit 0.3.

    Raises: ConfigError for a slope, wait or start below 0, or a limit outside [start, 1].
    """
    if slope < 0 or wait < 0 or not 0 <= start <= limit <= 1:
        raise ConfigError(
            "decay ramp: expected slope >= 0, wait >= 0 and 0 <= start <= limit <= 1, got "
            f"{slope=}, {wait=}, {start=}, {limit=}"
        )
    return min(start + slope * (steps - wait), limit) if steps > wait else 0.0


def reset(steps: int, *, every: int, above: float | None = None) -> float:
    """Return 0 at each `every`-th optimizer step, else 1: the copy stays, and is then refreshed.

    It is asked after whole iterations only, so `every` must be a multiple of ``train.updates``.
    With `above` the copy is refreshed after any iteration, too, in which the mean `kl` of an
    optimizer step was above that; `steps` then counts from the last refresh
    (`flowrl/training/parts/copies.py`).

    GARDO (2512.24138; tinnerhrhe/GARDO 1cc77fb, train_sd3_grpo_gardo.py): the reference is
    refreshed more than 15 epochs after the last time, so the 16th, or when the logged KL of an
    optimizer step passes 3e-4, to be set for each task. **Differs:** its KL is the mean over
    network calls, 0 in those without a doubted image; here over the doubted images.

    Raises: ConfigError for every < 1, or above <= 0.
    """
    if every < 1 or not (above is None or above > 0):
        raise ConfigError(
            f"decay reset: expected every >= 1 and above > 0, got every={every}, above={above}"
        )
    return 0.0 if steps % every == 0 else 1.0
