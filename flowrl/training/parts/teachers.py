"""Other runs that a student learns from: their weights, and which rows are whose (`distill`)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.config.load import Config
from flowrl.core.errors import CheckpointError, ConfigError, near
from flowrl.core.needs import needs_of
from flowrl.core.part import Part
from flowrl.core.processes import sharded
from flowrl.core.teacher_runs import TeacherRun, runs_of
from flowrl.core.types import Batch, Eval, LossInput, Plan
from flowrl.training import checkpoint
from flowrl.training.checkpoint_state import check_meaning, identity_of
from flowrl.training.guidance import check_guides, guiding, is_guided, teacher_guidance
from flowrl.training.learn import CallRows
from flowrl.training.run import Prepared, Run
from flowrl.training.task import IterationCost, Task

PREFIX = "teacher-"


class Teachers(Part):
    """The teachers of a config, as snapshots of the trained weights, one for each run."""

    name = "teachers"
    rank = 30
    when = ("needs.teacher",)

    def begin(self, prepared: Prepared) -> None:
        """Find the teachers' checkpoints, and who teaches each prompt. Raises ConfigError for a
        teacher that is not there, or a record that names none of them."""
        config, prompts = prepared.config, prepared.train_set
        self.runs = teachers_of(config)
        self.by: str = config.loss.kwargs.get("by", "tag")
        # whose guidance doubles the calls
        self.cost: dict[TeacherRun, int] = {}
        self.paths: dict[str, str] = {}
        for one in chain.from_iterable(self.runs.values()):
            self.cost[one] = calls_of_teacher(config, one)
            self.paths.setdefault(one.run, f"{PREFIX}{len(self.paths)}")
        for value, runs in self.runs.items():
            for one in runs:
                _found(value, one.run)
        # who teaches each training prompt
        self._of = [record.get(self.by) for record in prompts.records]
        for record, where in zip(prompts.records, prompts.places, strict=True):
            _check_record(record, self.by, self.runs, where)

    def work(self, task: Task, plan: Plan, cost: IterationCost) -> IterationCost:
        """Say whether a teacher is guided where the model is not."""
        if not guides_teachers(task.config):
            return cost
        return replace(cost, twice=cost.twice | {"teachers"})

    def row_calls(self, task: Task) -> int:
        """Count the calls of the domain that has most of them."""
        return teacher_calls(task.config)

    def check_model(self, prepared: Prepared, model: Any, frames: int) -> None:
        """Refuse a model that cannot have a teacher's guidance."""
        for value, runs in self.runs.items():
            for one in runs:
                if one.guidance is not None:
                    where = f"loss.teachers.{value}, {one.run}: guidance"
                    check_guides(prepared.config, model, where, one.guidance, off=True)

    def weights_ready(self, run: Run) -> None:
        """Add the teachers' weights. Raises CheckpointError if they do not fit the model."""
        for path, name in self.paths.items():
            like = run.weights.shared_as if sharded() else None
            folder = _found("", path)
            files, state = checkpoint.open_checkpoint(folder, like=like)
            check_meaning(state, identity_of(run.model), folder)
            run.weights.add(name, files[files.averaged])

    def encoding(self, run: Run) -> AbstractContextManager[None]:
        """Encode the negative prompt, too, where a teacher is guided and the model is not."""
        return guiding(run.model, guides_teachers(run.config))

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Evaluate each row under the teachers of its prompt.

        A network call for each teacher that has rows here. Under FSDP, where all processes call the
        network in step, one of all rows for each teacher of the config.
        """
        batch, prompts = rows.batch, rows.local.rows
        group = rows.local.rollout.tree.group[batch.node]
        mine = [self.runs[str(self._of[prompts[g]])] for g in group.tolist()]
        layers, everyone = [], dict[TeacherRun, Eval]()
        if run.sharded:
            for one, calls in self.cost.items():
                everyone[one] = self._ask(run, one, batch)
                rows.asked.append((batch.parent, calls))
        # in layer k every row has the k-th teacher of its domain, or none
        for theirs in zip_longest(*mine):
            whole: Eval | None = None
            for one in dict.fromkeys(filter(None, theirs)):
                rows_of_one = [other == one for other in theirs]
                here = torch.tensor(rows_of_one, device=group.device)
                found = everyone.get(one)
                if found is None:
                    some = batch if all(rows_of_one) else _taken(batch, here)
                    rows.asked.append((some.parent, self.cost[one]))
                    found = self._ask(run, one, some)
                    if some is not batch:
                        found = _spread(found, here)
                whole = found if whole is None else _chosen(here, found, whole)
            assert whole is not None  # a batch has rows
            weight = [0.0 if one is None else one.weight for one in theirs]
            layers.append((whole, torch.tensor(weight, device=group.device).double()))
        return data._replace(teachers=tuple(layers))

    def _ask(self, run: Run, one: TeacherRun, batch: Batch) -> Eval:
        """Evaluate a batch under a teacher, at its own guidance."""
        likelihood, guided = run.method.likelihood, teacher_guidance(run.model, one.guidance)
        with guided, torch.no_grad(), run.weights.using(self.paths[one.run]):
            found: Eval = likelihood.evaluate(run.model, batch, run.method.transition)
        return found


def teachers_of(config: Config) -> dict[str, list[TeacherRun]]:
    """Return the teachers of the loss by the value of the records' key; {} if it has none. Raises
    ConfigError."""
    if "teacher" not in needs_of(config.loss.function):
        return {}
    return runs_of(config.loss.kwargs.get("teachers", {}))


def guides_teachers(config: Config) -> float:
    """Return a scale at which a teacher is asked with and without the prompt, where the model has
    but one branch; 0: there is none."""
    if is_guided(config):
        return 0.0
    for one in chain.from_iterable(teachers_of(config).values()):
        if _is_guided_at(config, one):
            return one.guidance or 0.0
    return 0.0


def teacher_calls(config: Config) -> int:
    """Return the network calls that a row's teachers take: of the domain that has most, two for a
    teacher that is guided where the model is not."""
    most = 0
    for runs in teachers_of(config).values():
        most = max(most, sum(calls_of_teacher(config, one) for one in runs))
    return most


def calls_of_teacher(config: Config, teacher: TeacherRun) -> int:
    """Return the network calls that a row takes under a teacher, each of its own guidance."""
    return 2 if not is_guided(config) and _is_guided_at(config, teacher) else 1


def _is_guided_at(config: Config, teacher: TeacherRun) -> bool:
    """Say whether the model evaluates the network twice under a teacher. Raises ConfigError for a
    model that has no guidance but its own."""
    scale, options = teacher.guidance, getattr(config.model.function, "options", None)
    if scale is None:
        return is_guided(config)
    if options is None:
        return scale > 1
    try:
        return bool(options(**config.model.kwargs).guided_by(scale, off=True).guided)
    except ConfigError as error:
        raise ConfigError(f"loss.teachers, {teacher.run}: {error}") from error


def _check_record(
    record: Mapping[str, Any], by: str, runs: Mapping[str, list[TeacherRun]], where: str
) -> None:
    """Raise ConfigError for a prompt that no teacher teaches."""
    if by not in record:
        raise ConfigError(
            f"{where}: expected the key {by!r} (loss.by), which says whose run the prompt learns "
            f"from; the record has {', '.join(record)}{near(by, record)}"
        )
    value = record[by]
    if value not in runs:
        raise ConfigError(
            f"{where}: its {by!r} is {value!r}, and loss.teachers has no run for it (it has "
            f"{', '.join(runs)})"
        )


def _taken(batch: Batch, here: Tensor) -> Batch:
    """Take rows `here` [B] bool of a batch; those of one state still share a network row."""
    fields = {}
    for name in ("x", "sigma", "sigma_next", "noise_scale", "target", "old_log_prob", "advantage"):
        fields[name] = getattr(batch, name)[here]
    for name in ("node", "parent", "step"):
        fields[name] = getattr(batch, name)[here]
    cond = {name: rows[here] for name, rows in batch.cond.items()}
    return Batch(**fields, cond=cond)


def _spread(found: Eval, here: Tensor) -> Eval:
    """Put an evaluation of rows `here` [B] bool at their places; the others are 0."""
    fields = {}
    for name in ("log_prob", "mean", "std", "v"):
        rows = getattr(found, name)
        if rows is not None:
            fields[name] = rows.new_zeros(len(here), *rows.shape[1:])
            fields[name][here] = rows
    return Eval(**fields)


def _chosen(here: Tensor, one: Eval, other: Eval) -> Eval:
    """Take rows `here` [B] of one evaluation and the rest of another."""
    fields = {}
    for name in ("log_prob", "mean", "std", "v"):
        first, second = getattr(one, name), getattr(other, name)
        if first is not None:
            fields[name] = torch.where(here.view(-1, *[1] * (first.dim() - 1)), first, second)
    return Eval(**fields)


def _found(name: str, path: str) -> Path:
    """Return the checkpoint of a teacher. Raises ConfigError."""
    folder = Path(path)
    if (folder / checkpoint.MANIFEST).is_file():
        return folder
    try:
        newest = checkpoint.latest(folder)
    except CheckpointError:
        newest = None
    if newest is None:
        raise ConfigError(
            f"loss.teachers.{name}: there is no run with a whole checkpoint at {path}; train the "
            "teacher first, with the same model and layers"
        )
    return newest
