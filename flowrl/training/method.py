"""The functions of a config's method, with their hyper-parameters filled in."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.errors import ConfigError
from flowrl.core.needs import SNAPSHOTS, needs_of
from flowrl.core.types import (
    Likelihood,
    LossInput,
    Plan,
    Rollout,
    SelectInput,
    Transition,
    Unrolled,
)

# network calls that training one state costs: one forward, and a backward of twice its work
TRAINED_CALLS = 3
COMPANIONS = ("fake", "surrogate")  # sections of models that are trained along, in this order


KL_TERM = "kl_term"  # of a row's loss, times its weight: becomes `kl_share`
# what a run measures itself: a loss has other names
RESERVED = frozenset(
    (
        *(
            "reward",
            "accuracy",
            "diversity",
            "loss",
            "kl",
            "kl_most",
            "kl_share",
            "kl_weight",
            KL_TERM,
        ),
        *(
            "velocity_grad",
            "velocity_length",
            "ratio_std",
            "on_policy_gap",
            "grad_norm",
            "grad_outliers",
        ),
        *("trained", "step", "update", "lr", "nfe", "backwards"),
    )
)


@dataclass(frozen=True)
class Method:
    """What a method is made of. Rewards are elsewhere: see `flowrl.evaluation.reward_set`."""

    plan: Callable[[int], Plan]  # of an iteration; the last one is kept
    transition: Transition
    credit: Callable[..., Tensor]
    likelihood: Likelihood
    loss: Callable[[LossInput], tuple[Tensor, dict[str, Tensor]]]
    kl: Callable[[LossInput], Tensor] | None
    kl_beta: float
    segment: Callable[[Rollout], Tensor] | None
    select: list[Callable[[SelectInput], Tensor]]
    # how slowly the copies "old" and "slow" follow, by name: optimizer steps made -> decay
    copies: dict[str, Callable[[int], float]]
    companions: dict[str, Any]  # models that are trained along: `flowrl.algorithms.companions`
    needs: frozenset[str] = frozenset()  # what loss and penalty want made for them
    # the weights under which every batch is evaluated besides the current ones
    snapshots: tuple[str, ...] = ()

    @functools.cached_property
    def reads_leaves(self) -> bool:
        """Say whether training reads clean latents: as data, or as the best below a state."""
        return self.likelihood.trains in ("leaves", "steps") or "best" in self.needs

    @functools.cached_property
    def rows(self) -> int:
        """Return the rows of a batch per trained state."""
        return max(1, self.likelihood.rows_per_state)

    @functools.cached_property
    def graphs(self) -> int:
        """Return how many rows of the network go backward for a trained state: its own, and one of
        a real image where loss or penalty look at data."""
        return 2 if "data" in self.needs else 1

    def others(self, update: int, steps: list[int]) -> tuple[str, ...]:
        """Name the `snapshots` that need a network call of their own at optimizer step `update` of
        an iteration. "old" needs none while it has the very weights that are trained.

        steps: how many optimizer steps were made at the end of each earlier iteration.
        """
        decay = self.copies.get("old")
        same = update == 0 and (decay is None or all(decay(count) == 0 for count in steps))
        wanted = list(self.snapshots)
        if same and "old" in wanted:
            wanted.remove("old")
        return tuple(wanted)

    def trained_calls(self, update: int, steps: list[int]) -> int:
        """Return the network calls that training one row counts as: forward, backward, and a
        forward pass for each of the `others`; forward and backward again for a real image."""
        if not self.likelihood.rows_per_state:
            return 0
        return TRAINED_CALLS * self.graphs + len(self.others(update, steps))


def unrolled_calls(path: Unrolled) -> tuple[int, int]:
    """Return the network calls that training rows of a sampler costs, and how many rows go
    backward: a forward pass for each step, and for open ones a backward pass, and another forward
    pass where they are computed again."""
    steps = torch.arange(path.open.shape[1])
    taken = steps <= path.last[:, None]
    opened = int((taken & path.open).sum())
    return int(taken.sum()) + opened * (TRAINED_CALLS - 1 + path.again), opened


def method_of(config: Config) -> Method:
    """Return the functions that a config names."""
    likelihood: Any = config.likelihood.make()
    loss, kl = config.call("loss"), config.call("kl") if config.kl_beta else None
    needs = needs_of(loss) | needs_of(kl)
    return Method(
        plan=functools.lru_cache(maxsize=1)(config.call("plan")),
        transition=config.call("transition"),
        credit=config.credit.make(),
        likelihood=likelihood,
        loss=loss,
        kl=kl,
        kl_beta=config.kl_beta,
        segment=config.call("segment") if config.segment else None,
        select=[call.partial() for call in config.select],
        copies={key: config.call(key) for key in ("old", "slow") if getattr(config, key)},
        companions={key: getattr(config, key).make() for key in COMPANIONS if getattr(config, key)},
        needs=needs,
        snapshots=_snapshots(needs, likelihood),
    )


def check_names(metrics: dict[str, Tensor]) -> None:
    """Raise ConfigError if a loss returns a metric under a name that the run has for its own."""
    taken = sorted(RESERVED & metrics.keys())
    if taken:
        raise ConfigError(
            f"loss: returns a metric {taken[0]!r}, which a run measures itself and would "
            "overwrite; give it another name"
        )


def _snapshots(needs: frozenset[str], likelihood: Likelihood) -> tuple[str, ...]:
    """Name the copies of the weights that needs stand for: what the likelihood keeps of the policy
    that sampled need not be evaluated anew."""
    wanted = set(needs)
    if wanted & {"old_log_prob", "old_mean"} - likelihood.keeps:
        wanted.add("old")
    return tuple(name for name in SNAPSHOTS if name in wanted)
