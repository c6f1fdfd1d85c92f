"""Models that learn along with the policy (`flowrl.algorithms.companions`): copies of the weights
with an optimizer of their own, trained before the policy learns in an iteration."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowrl.algorithms.forest import count_trained, states_of, trained_nodes
from flowrl.core.devices import checked_later
from flowrl.core.errors import CheckpointError, ConfigError, RunError
from flowrl.core.part import Part, PartState
from flowrl.core.processes import whole
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import Batch, Eval, LossInput, Plan, Rollout
from flowrl.training import checkpoint
from flowrl.training.batches import Minibatch, NetworkCall, NodeTable, SharedForest, cut, deal
from flowrl.training.checkpoint_state import check_optimizer
from flowrl.training.learn import CallRows, Trained, reduce_metrics, sum_gradients
from flowrl.training.method import COMPANIONS, TRAINED_CALLS
from flowrl.training.optimizer_state import (
    check_settings,
    optimizer_from_tensors,
    optimizer_to_tensors,
)
from flowrl.training.parts.copies import evaluated, put_copies
from flowrl.training.run import Iteration, Prepared, Run
from flowrl.training.start_weights import check_start, start_from
from flowrl.training.task import Task

PREFIX = "optimizer-"


class Companions(Part):
    """The models that a method trains along, by name."""

    name = "companions"
    rank = 20
    when = ("config.fake", "config.surrogate", "needs.fake", "needs.surrogate")
    fsdp = "a model that is trained along"
    context = "models that are trained along"

    def __init__(self) -> None:
        self.optimizers: dict[str, torch.optim.AdamW] = {}
        self.roles: dict[str, Any] = {}

    # ------------------------------------------------------------------------------- before a run

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a section without a loss that looks at it, and a policy that never learns."""
        config, method = task.config, task.method
        for name in COMPANIONS:
            if (name in method.snapshots) != (name in method.companions):
                looks, mend = "does not look at", "leave the section out"
                if name in method.snapshots:
                    looks, mend = "looks at", "add the section"
                raise ConfigError(
                    f"{name}: loss {config.loss.fn} {looks} a model {name!r} that is trained "
                    f"along; {mend}"
                )
        for name, role in method.companions.items():
            if role.alone >= config.train.iterations:
                raise ConfigError(
                    f"{name}.alone={role.alone}: the policy stands still in these iterations, and "
                    f"train.iterations={config.train.iterations} leaves it none; lower the one or "
                    "raise the other"
                )

    def begin(self, prepared: Prepared) -> None:
        """Look whether the weights that companions begin with are there."""
        self.roles = prepared.method.companions
        for name, role in self.roles.items():
            check_start(role.begin, f"{name}.begin")

    def calls(self, task: Task, made: Rollout, iteration: int) -> int:
        """Count the network calls in which one prompt trains the companions."""
        nodes, rng = trained_nodes(made, task.method.likelihood.trains), torch.Generator()
        found = 0
        for role in task.method.companions.values():
            if role.learns(iteration):
                found += len(role.rows(made, nodes, rng)) * role.updates * calls_of(role)
        return found

    # ----------------------------------------------------------------------------------- set up

    def model_ready(self, run: Run) -> None:
        """Let companions begin as the model came, or with given weights, and their slow copies."""
        for name in copies_of(self.roles):
            run.weights.snapshot(name)
        for name, role in self.roles.items():
            if not role.begin:
                continue
            for copy in copies_of({name: role}):
                with run.weights.training(copy):
                    start_from(role.begin, run.params, f"{name}.begin", run.model)

    def weights_ready(self, run: Run) -> None:
        """Make their optimizers: a companion is stepped while its copy is in the policy's place."""
        params = [*run.params.values()]
        for name, role in self.roles.items():
            self.optimizers[name] = torch.optim.AdamW(params, foreach=True, **role.adamw)

    # ------------------------------------------------------------------------------ an iteration

    def trains_policy(self, iteration: int) -> bool:
        """Say whether all companions let the policy learn."""
        return all(role.trains_policy(iteration) for role in self.roles.values())

    def before_learning(self, run: Run, it: Iteration) -> None:
        """Make all updates of the companions, one after the other. Raises RunError for a gradient
        that is not finite."""
        ro, table, local = it.rollout, it.table, it.own_table
        assert ro is not None and table is not None and local is not None
        assert it.forest is not None
        count = None
        if table.segment is not None:
            everyone = torch.arange(len(ro.tree.parent), device=ro.tree.parent.device)
            count = count_trained(ro, "leaves", everyone)
        calls = backwards = 0
        for name, role in self.roles.items():
            if not role.learns(run.iteration):
                continue
            # a companion may take several steps for one of the policy, each with its own noise
            seen: list[Trained] = []
            norms: list[float] = []
            for update in range(role.updates):
                keys = (run.config.seed, name, run.iteration, update)
                streams = NodeStreams(ro.tree.group, *keys)
                parts, norm = self._update(
                    run, _Update(name, ro, local, streams, count), table, it.forest, update
                )
                seen += parts
                norms.append(norm)
            # its slow copy follows the trained weights, as an EMA does
            if "slow" in role.looks_at:
                done = (run.iteration + 1) * role.updates
                run.weights.lerp(slow(name), role.slow_decay(done), towards=name)
            # of the metrics only those that its loss returned, under its name
            found = reduce_metrics(seen, norms, run.world)
            own = {key for part in seen for key in part.metrics} | {"grad_norm"}
            it.metrics |= {f"{name}/{key}": found[key] for key in sorted(own) if key in found}
            rows = sum(len(part.node) for part in seen)
            calls += rows * calls_of(role)
            backwards += rows
        it.spent.append((calls, backwards))

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Evaluate the batch under the companions that loss or penalty look at."""
        under = dict(data.under)
        for name in run.method.snapshots:
            if name in COMPANIONS:
                under[name] = evaluated(run, rows, name)
        return data._replace(under=under)

    # ------------------------------------------------------------------------------- checkpoints

    def state_dict(self, run: Run) -> PartState:
        """Return copies and optimizers."""
        kept, plain = run.weights.state_dict(), {}
        files: dict[str, Any] = {name: kept[name] for name in copies_of(self.roles)}
        for name, optimizer in self.optimizers.items():
            files[PREFIX + name], plain[name] = optimizer_to_tensors(optimizer)
        return PartState(files, plain)

    def load_state_dict(self, run: Run, state: PartState, where: Path) -> None:
        """Put copies and optimizers back; the learning rates stay those of the config. Raises
        CheckpointError for other companions, or ones trained with other settings."""
        if state.plain.keys() != self.roles.keys():
            raise CheckpointError(
                f"{where}: holds the optimizers of the models {sorted(state.plain)} that learn "
                f"along, this config needs {sorted(self.roles)}; go on with the run's own config"
            )
        for name, optimizer in self.optimizers.items():
            file = where / checkpoint.STATE
            check_optimizer(state.plain[name], file, f"parts.{self.name}.state.{name}")
            settings = {key: optimizer.defaults[key] for key in ("betas", "eps", "weight_decay")}
            check_settings(settings, state.plain[name], f"{where}", name)
            place = f"{where}: companions.{name}"
            tensors = state.files[PREFIX + name]
            optimizer_from_tensors(optimizer, tensors, state.plain[name], place)
            for group in optimizer.param_groups:
                group["lr"] = self.roles[name].adamw["lr"]
        put_copies(run, PartState({name: state.files[name] for name in copies_of(self.roles)}))

    # ---------------------------------------------------------------------------------- an update

    def _update(
        self, run: Run, phase: _Update, table: NodeTable, forest: SharedForest, update: int
    ) -> tuple[list[Trained], float]:
        """Take one optimizer step of one companion over all trained nodes -> what its calls left,
        and the gradient's norm."""
        trains = run.method.likelihood.trains
        # the nodes that it learns from, dealt out alike in all processes
        rng = generator(run.config.seed, phase.name, "order", run.iteration, update)
        role = self.roles[phase.name]
        nodes = role.rows(forest.whole, trained_nodes(forest.whole, trains), rng)
        key = states_of(forest.whole, nodes, trains)
        if table.segment is not None:
            key = table.segment[nodes]
        dealt = deal(forest.whole, nodes, unit=key, updates=1, order="random", generator=rng)
        part = Minibatch(*(torch.cat(rows) for rows in zip(*dealt, strict=True)))
        mine = forest.own_part(part, phase.rollout)
        # the gradient of the copy, and its step
        with run.weights.training(phase.name):
            work = partial(self._differentiate, run, phase, mine, len(part.node), update)
            parts = run.world.together(work)
            sum_gradients(run)
            norm = self._step(run, phase.name)
        return parts, norm

    def _differentiate(
        self, run: Run, phase: _Update, part: Minibatch, total: int, update: int
    ) -> list[Trained]:
        states = states_of(phase.rollout, part.node, run.method.likelihood.trains)
        calls = cut(part, states, run.config.train.micro_batch)
        updates, parts = self.roles[phase.name].updates, []
        with checked_later():
            for number, call in enumerate(calls, 1):
                parts.append(self._backward(run, phase, call, total, update))
                run.progress(update * len(calls) + number, updates * len(calls))
        return parts

    def _backward(
        self, run: Run, phase: _Update, call: NetworkCall, total: int, update: int
    ) -> Trained:
        """Add the gradient of one network call, divided by the `total` nodes of the step."""
        role = self.roles[phase.name]
        likelihood: Any = run.method.likelihood  # it generates, so it has queries
        queries = likelihood.queries
        batch = role.batch(phase.rollout, phase.table.advantage, call.node, phase.streams, queries)
        now = role.evaluate(run.model, batch)
        data = LossInput(batch, now, batch.old_log_prob, under=_others(run, role, batch))
        if phase.table.segment is not None and phase.siblings is not None:
            segment, count = phase.table.segment[batch.node], phase.siblings[batch.node]
            scored = phase.table.facts.get("scored")
            if scored is not None:
                scored = scored[batch.node]
            data = data._replace(segment=segment, siblings=count, scored=scored)
        loss, metrics = role.loss(data)
        (loss.sum() / total).backward()  # type: ignore[no-untyped-call]
        metrics = {**metrics, "loss": loss.detach()}
        return Trained(metrics, batch.node, batch.step, batch.parent, update)

    def _step(self, run: Run, name: str) -> float:
        """Step a companion's optimizer -> the norm of its gradient. Raises RunError."""
        gradients = [p.grad for p in run.params.values() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        size = float(norm)
        if not math.isfinite(size):
            run.optimizer.zero_grad(set_to_none=True)
            raise RunError(
                f"iteration {run.iteration}: the gradient of {name} is not finite; lower {name}.lr"
            )
        most = run.config.train.max_grad_norm
        torch.nn.utils.clip_grads_with_norm_(run.params.values(), most, norm)
        run.state.intact = False
        self.optimizers[name].step()
        self.optimizers[name].zero_grad(set_to_none=True)
        return size

    def node_facts(self, run: Run, ro: Rollout, advantage: Tensor) -> dict[str, Tensor]:
        """Return which nodes were scored, for losses that compare the images of a prompt."""
        scored = run.reward_set.scored
        return {} if scored is None else {"scored": scored}


class _Update(NamedTuple):
    """One update of one companion."""

    name: str
    rollout: Rollout
    table: NodeTable
    streams: NodeStreams
    siblings: Tensor | None  # [v] int64  the leaves of the node's prompt, where there are segments


def _others(run: Run, role: Any, batch: Batch) -> dict[str, Eval]:
    """Evaluate a companion's batch under the other weights that it looks at."""
    under = {}
    for other in role.looks_at:
        with torch.no_grad(), run.policy(slow(role.name) if other == "slow" else other):
            under[other] = role.evaluate(run.model, batch)
    return under


def slow(name: str) -> str:
    """Name the copy that follows a companion."""
    return f"{name}-slow"


def copies_of(companions: dict[str, Any]) -> list[str]:
    """Name the copies of the weights that companions are, and those that follow them."""
    names = [*companions]
    return names + [slow(name) for name, role in companions.items() if "slow" in role.looks_at]


def calls_of(role: Any) -> int:
    """Return the network calls that training one row of a companion counts as."""
    return TRAINED_CALLS + len(role.looks_at)
