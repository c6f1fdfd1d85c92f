"""Which copies of the weights a run keeps: of the base model, averaged, slow, trained along."""

from __future__ import annotations

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.training.companions import copies_of
from flowrl.training.method import COMPANIONS, Method
from flowrl.training.refreshes import check_refreshes


def snapshots_of(config: Config, method: Method) -> list[str]:
    """Name the copies of the weights that a run keeps over its iterations. Raises ConfigError."""
    # averaged and slow weights: a function and its section come together
    check_refreshes(config)
    if "ema" in method.snapshots and not config.train.ema:
        raise ConfigError("train.ema is 0 (off), but loss or kl evaluates the averaged weights")
    if "slow" in method.snapshots and "slow" not in method.copies:
        raise ConfigError(
            "slow: missing, but loss or kl evaluates a slow copy of the weights; say how it "
            "follows, as in slow: {fn: ramp, slope: 0.001, limit: 0.3}"
        )
    if "slow" in method.copies and "slow" not in method.snapshots:
        raise ConfigError(
            f"slow: neither loss {config.loss.fn} nor kl looks at a slow copy of the weights; "
            "leave the section out"
        )
    for decay in method.copies.values():
        decay(1)  # options that cannot be are refused
    # so do models that are trained along
    for name in COMPANIONS:
        if (name in method.snapshots) != (name in method.companions):
            looks = "looks at" if name in method.snapshots else "does not look at"
            mend = "add the section" if name in method.snapshots else "leave the section out"
            raise ConfigError(
                f"{name}: loss {config.loss.fn} {looks} a model {name!r} that is trained along; "
                f"{mend}"
            )
    # the base model is kept where anything looks at it
    looked_at = {name for role in method.companions.values() for name in role.looks_at}
    base = "ref" in looked_at or "ref" in method.snapshots or config.eval.tuned < 1
    names = [*(["ref"] if base else []), *copies_of(method.companions)]
    return [*names, *(["ema"] if config.train.ema else []), *method.copies]
