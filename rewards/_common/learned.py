"""What rewards that are trained along share: a small head, its loss, turns and steps, and Adam with
its weights as flat tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from flowrl.core.errors import CheckpointError, ConfigError, DataError, RunError
from flowrl.core.seeds import generator
from flowrl.core.types import RewardBatch

from .references import References

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def adam(
    params: Mapping[str, nn.Parameter], lr: float, betas: tuple[float, float]
) -> torch.optim.Adam:
    """Return Adam with its moments in place and zero, so that a state always has the same names."""
    optimizer = torch.optim.Adam(params.values(), lr=lr, betas=betas)
    for p in params.values():
        moments = {name: torch.zeros_like(p) for name in _MOMENTS[1:]}
        optimizer.state[p] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def pack(
    params: Mapping[str, nn.Parameter], optimizer: torch.optim.Adam, counters: Mapping[str, int]
) -> dict[str, Tensor]:
    """Copy weights, moments and counters into flat tensors on the CPU: "weight.*",
    "adam.*.exp_avg", "counter.*"."""
    live = _live(params, optimizer)
    counts = {
        f"counter.{name}": torch.tensor(value, dtype=torch.int64)
        for name, value in counters.items()
    }
    return {name: value.detach().cpu().clone() for name, value in live.items()} | counts


@torch.no_grad()
def unpack(
    state: Mapping[str, Tensor],
    params: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Adam,
    counters: Mapping[str, int],
    who: str,
) -> dict[str, int]:
    """Copy a state of `pack` back, in place -> the counters. Raises CheckpointError, before
    anything is changed."""
    # refused before anything is changed
    live = _live(params, optimizer)
    expected = {name: value.shape for name, value in live.items()}
    expected |= {f"counter.{name}": torch.Size() for name in counters}
    wrong = sorted(expected.keys() ^ state.keys())
    same = expected.keys() & state.keys()
    wrong += sorted(name for name in same if state[name].shape != expected[name])
    if wrong:
        raise CheckpointError(
            f"{who}: expected {len(expected)} tensors of known names and shapes, got {len(state)}; "
            f"{len(wrong)} do not fit, first {wrong[0]}. The state was saved by a reward of "
            "another network or with other arguments"
        )
    # in place
    for name, value in live.items():
        value.copy_(state[name])
    return {name: int(state[f"counter.{name}"]) for name in counters}


def _live(params: Mapping[str, nn.Parameter], optimizer: torch.optim.Adam) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {f"weight.{name}": p for name, p in params.items()}
    for name, p in params.items():
        out |= {f"adam.{name}.{moment}": optimizer.state[p][moment] for moment in _MOMENTS}
    return out


def hinge(real: Tensor, fake: Tensor) -> Tensor:
    """Return the discriminator's loss 0.5 (mean relu(1 - real) + mean relu(1 + fake)) of logits of
    any shape -> [].

    Adv-GRPO's code (showlab/Adv-GRPO, scripts/train_sd3_fast_dino_patch.py). **Differs:** the paper
    has no factor 0.5.
    """
    return 0.5 * (relu(1 - real).mean() + relu(1 + fake).mean())


def make_head(width: int, hidden: int, seed: int) -> nn.Sequential:
    """Return Linear(width, hidden)-GELU-Linear(hidden, 1) with torch's own initial values, drawn
    from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator(seed, "head").get_state())
        return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, 1))


def check_meta(batch: RewardBatch, who: str) -> None:
    """Raise DataError for a batch without images, or without a prompt's record of each."""
    if not len(batch.images) or len(batch.meta) != len(batch.images):
        raise DataError(
            f"{who}: expected images with one prompt record each, got {len(batch.images)} images "
            f"and {len(batch.meta)} records"
        )


class Discriminator:
    """Heads on the features of a frozen network that learn to tell references from generated images
    (Adv-GRPO, 2511.20256). A class on it says which pairs an update has, and what their loss is."""

    def __init__(
        self, who: str, references: References, *, d_steps: int, policy_every: int, seed: int
    ) -> None:
        """Of every `policy_every` iterations the last trains the policy and the others the heads;
        with 1 each trains both. Raises ConfigError for a number below 1."""
        for name, value in {"d_steps": d_steps, "policy_every": policy_every}.items():
            if value < 1:
                raise ConfigError(f"{who}: {name}: expected at least 1, got {value}")
        self.who, self.references, self.seed, self.rounds = who, references, seed, 0
        self.d_steps, self.policy_every = d_steps, policy_every

    def learn(self, heads: nn.Module, lr: float) -> None:
        """Train these; betas are those that are usual for discriminators."""
        self.params = dict(heads.named_parameters())
        self.optimizer = adam(self.params, lr, (0.5, 0.999))

    def pairs(self, batch: RewardBatch, turn: int) -> Iterable[tuple[Any, Any]]:
        """Yield features of references and of the iteration's images, for each step."""
        raise NotImplementedError

    def loss(self, real: Any, fake: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss [] of a pair, and metrics []."""
        raise NotImplementedError

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Refuse a record whose references are missing, before the first image is made."""
        self.references.check(record, where)

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy is trained in this iteration, counted from 0."""
        return (iteration + 1) % self.policy_every == 0

    def update(self, batch: RewardBatch) -> dict[str, float]:
        """Train the heads on the iteration's images and as many references -> metrics, means over
        the steps; {} if the policy has its turn. Raises RunError if the loss is not finite."""
        turn = self.rounds
        if self.policy_every > 1 and self.trains_policy(turn):
            self.rounds += 1
            return {}
        check_meta(batch, self.who)
        rows = [self._step(real, fake) for real, fake in self.pairs(batch, turn)]
        self.rounds += 1
        means = {}
        for name in rows[0]:
            means[name] = sum(row[name] for row in rows) / len(rows)
        return means

    @torch.enable_grad()  # type: ignore[no-untyped-call,untyped-decorator]
    def _step(self, real: Any, fake: Any) -> dict[str, float]:
        """Make one step of Adam."""
        loss, metrics = self.loss(real, fake)
        if not math.isfinite(loss.item()):
            raise RunError(
                f"{self.who}: update {self.rounds + 1}: the loss is {loss.item()}; lower its lr, "
                "and resume"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {name: value.item() for name, value in {"loss": loss, **metrics}.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Return the heads, Adam's moments and the number of updates as flat tensors, copied."""
        return pack(self.params, self.optimizer, {"rounds": self.rounds})

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a state, bit for bit. Raises CheckpointError if it is other heads'."""
        self.rounds = unpack(state, self.params, self.optimizer, {"rounds": 0}, self.who)["rounds"]


def told_apart(real: Tensor, fake: Tensor) -> dict[str, Tensor]:
    """Return `accuracy`, the mean of the shares of references with a logit above 0 and of images
    with one below, and the mean logits `real` and `fake`, [] each."""
    right = ((real > 0).float().mean() + (fake < 0).float().mean()) / 2
    return {"accuracy": right, "real": real.mean(), "fake": fake.mean()}
