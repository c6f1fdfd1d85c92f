"""Copies of the weights: of the base model (`ref`), of the policy that samples (`old`), averaged
(`ema`) and slow ones. Which a run keeps, when each moves, and batches evaluated under them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from flowrl.config.load import Config
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.part import Part, PartState
from flowrl.core.processes import World, shared_as
from flowrl.core.types import Eval, LossInput, Plan
from flowrl.training.learn import CallRows, Trained
from flowrl.training.run import Iteration, Run
from flowrl.training.task import Task
from flowrl.training.weights import Weights

FOLLOWING = ("old", "slow")  # sections of copies that follow the weights as a function says
OWN = frozenset(("old", "ref", "ema", "slow"))


class Copies(Part):
    """The copies of the trained weights that a run keeps, and evaluations under them."""

    name = "copies"
    rank = 10
    when = (
        *("needs.old", "needs.old_log_prob", "needs.old_mean", "needs.ref", "needs.ema"),
        *("needs.slow", "config.old", "config.slow", "config.fake", "config.surrogate"),
        *("config.train.ema", "config.eval.tuned<1"),
    )

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a copy that nobody looks at, or one that is looked at and not kept."""
        config, method = task.config, task.method
        _check_refreshes(config)
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

    def model_ready(self, run: Run) -> None:
        """Keep the base model where anything looks at it, before other weights are put in."""
        if "ref" in kept_copies(run):
            run.weights.snapshot("ref")

    def weights_ready(self, run: Run) -> None:
        """Take all other copies of the weights that training begins with."""
        for name in kept_copies(run):
            if name != "ref":
                run.weights.snapshot(name)

    def sampling(self, run: Run) -> AbstractContextManager[None]:
        """Sample with the copy `old` where the method has one that follows slowly."""
        return run.sampling_policy()

    def before_learning(self, run: Run, it: Iteration) -> None:
        """Keep the weights that sampled, where a loss asks for a policy that is not a slow copy."""
        if "old" in run.method.snapshots and "old" not in run.method.copies:
            run.weights.snapshot("old")

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Evaluate the batch under the copies that loss or penalty look at. A copy that has the
        very weights that are trained needs no network call."""
        if OWN.isdisjoint(run.method.snapshots):
            return data
        other = run.method.others(rows.update, run.steps_before)
        under = dict(data.under)
        for name in run.method.snapshots:
            if name in OWN:
                under[name] = evaluated(run, rows, name) if name in other else as_now(rows.now)
        # the policy that sampled: from the rollout, if that has it
        needs = run.method.needs
        if "old_log_prob" in needs - run.method.likelihood.keeps:
            data = data._replace(old_log_prob=under["old"].log_prob)
        if "old_mean" in needs and data.old_mean is None:
            data = data._replace(old_mean=under["old"].mean)
        return data._replace(under=under)

    def learned(self, run: Run, it: Iteration, seen: Sequence[Trained]) -> None:
        """Move the copies; one with a limit is refreshed where the iteration's KL was above it."""
        kl = 0.0
        limits = limits_of(run.config)
        if limits:
            kl = it.metrics["kl_most"] = largest_kl(seen, run.world)
        it.metrics |= follow(run, kl)

    def state_dict(self, run: Run) -> PartState:
        """Return the copies that outlive an iteration."""
        kept = kept_copies(run)
        rows = run.weights.state_dict()
        return PartState({name: rows[name] for name in kept})

    def load_state_dict(self, run: Run, state: PartState, where: Path) -> None:
        """Put the copies back. Raises CheckpointError where others were kept."""
        wanted = sorted(kept_copies(run))
        if sorted(state.files) != wanted:
            raise CheckpointError(
                f"{where}: holds the weights {sorted(state.files)}, this config needs {wanted}; "
                "train.ema, kl, old, slow and an eval.tuned below 1 must be on or off as in the "
                "run that is resumed"
            )
        put_copies(run, state)


def kept_copies(run: Task) -> list[str]:
    """Name the copies that a run keeps over its iterations, companions and theirs left out."""
    config, method = run.config, run.method
    base = "ref" in method.snapshots or config.eval.tuned < 1
    for role in method.companions.values():
        base = base or "ref" in role.looks_at
    names = []
    if base:
        names.append("ref")
    if config.train.ema:
        names.append("ema")
    return [*names, *method.copies]


def follow(run: Run, kl: float = 0.0) -> dict[str, float]:
    """Move the copies towards the current weights at the end of an iteration, whose largest KL is
    given -> metrics: which of those with a limit were refreshed."""
    limits, refreshed = limits_of(run.config), {}
    for name in kept_copies(run):
        decay = decay_of(run, name, far=name in limits and kl > limits[name])
        if name in limits and decay == 0:
            run.state.memory.setdefault("refreshed", {})[name] = _steps(run)
        if name != "ref":
            run.weights.lerp(name, decay)
        if name in limits:
            refreshed[f"refreshed/{name}"] = float(decay == 0)
    return refreshed


def decay_of(run: Run, name: str, *, far: bool = False) -> float:
    """Return what share of itself a copy keeps at the end of the current iteration; the rest is of
    the current weights.

    `ref` keeps all. `ema` keeps ``train.ema``, at first less: ``(1 + n) / (10 + n)`` after n
    iterations, as TensorFlow's ExponentialMovingAverage does. `old` and `slow` follow their
    sections; one with a limit starts anew where the KL is `far` above it, and its steps count from
    the last time (GARDO, 2512.24138).
    """
    if name == "ref":
        return 1.0
    if name == "ema":
        return min(run.config.train.ema, (1 + run.iteration) / (10 + run.iteration))
    decay_at = run.method.copies[name]
    if name not in limits_of(run.config):
        return decay_at(_steps(run))
    since = run.state.memory.get("refreshed", {}).get(name, 0)
    return 0.0 if far else decay_at(_steps(run) - since)


def _steps(run: Run) -> int:
    """Count the optimizer steps at the end of the current iteration."""
    return (run.iteration + 1) * run.config.train.updates


def limits_of(config: Config) -> dict[str, float]:
    """Return the KL above which copies are refreshed, by their name."""
    found = {}
    for name, options in _refreshes(config).items():
        if options.get("above") is not None:
            found[name] = float(options["above"])
    return found


def _refreshes(config: Config) -> dict[str, dict[str, Any]]:
    """Return the options of the copies that start anew from time to time, by their name."""
    found = {}
    for name in FOLLOWING:
        call = getattr(config, name)
        if call is not None and call.fn == "reset":
            found[name] = call.kwargs
    return found


def _check_refreshes(config: Config) -> None:
    """Raise ConfigError for copies that would be refreshed inside an iteration, or by a KL that the
    run does not have."""
    updates = config.train.updates
    for name, options in _refreshes(config).items():
        every = options.get("every", updates)
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


def largest_kl(seen: Sequence[Trained], world: World) -> float:
    """Return the mean KL of the optimizer step that has the largest, over all processes; 0 where
    nothing was trained."""
    mine = []
    for part in seen:
        kl = part.metrics["kl"]
        mine.append((part.update, kl.double().sum().item(), len(kl)))
    sums: dict[int, list[float]] = {}
    for rows in world.gather(mine):
        for update, total, count in rows:
            known = sums.setdefault(update, [0.0, 0.0])
            known[0] += total
            known[1] += count
    means = [total / count for total, count in sums.values() if count]
    return max(means, default=0.0)


def as_now(now: Eval) -> Eval:
    """Return an evaluation without its gradient: what other weights say that are the same."""
    v = None if now.v is None else now.v.detach()
    return Eval(now.log_prob.detach(), now.mean.detach(), now.std.detach(), v)


def evaluated(run: Run, rows: CallRows, name: str) -> Eval:
    """Evaluate the rows of a network call under other weights."""
    likelihood: Any = run.method.likelihood
    judge: Callable[..., Eval] | None = getattr(likelihood, "judge", None)
    with run.parts.inside("under", run, name), torch.no_grad(), run.policy(name):
        if judge is not None:
            return judge(run.model, rows.batch, rows.now)
        found: Eval = likelihood.evaluate(run.model, rows.batch, run.method.transition)
    return found


def put_copies(run: Run, state: PartState) -> None:
    """Put copies of the weights back from a checkpoint, and leave all others."""
    shared = {}
    for name in state.files:
        rows = state.files[name]
        like = {key: run.params.get(key, value) for key, value in rows.items()}
        shared[name] = {key: shared_as(value, like[key]) for key, value in rows.items()}
    weights: Weights = run.weights
    weights.load_state_dict(shared, besides=[n for n in weights.names() if n not in shared])
