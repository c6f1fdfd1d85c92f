"""What a credit may ask for besides the rewards: log-probs, prompts, what is known of the noise."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.core.devices import on_host
from flowrl.core.errors import ConfigError
from flowrl.core.part import Part
from flowrl.core.types import Plan
from flowrl.evaluation.sources import encode_rows, prompt_keys
from flowrl.training.run import Iteration, Run
from flowrl.training.task import Task


class LogProbOfNodes(Part):
    """The rollout's log-prob of every node [V] (``log_prob``)."""

    name = "log-prob of nodes"
    when = ("credit.log_prob",)

    def credit_input(self, run: Run, it: Iteration) -> dict[str, Tensor]:
        """Hand it over."""
        assert it.forest is not None
        return {"log_prob": it.forest.whole.log_prob}


class PromptKeys(Part):
    """The text of each leaf's prompt [L], of an edit with the files that it starts from
    (``prompts``)."""

    name = "prompt keys"
    when = ("credit.prompts",)

    def credit_input(self, run: Run, it: Iteration) -> dict[str, list[str]]:
        """Hand them over."""
        assert it.batch is not None
        return {"prompts": prompt_keys(it.batch.prompts, it.batch.meta)}


class NoiseState(Part):
    """What a likelihood that learns the initial noise says of each leaf's prompt [L, D]
    (``state``)."""

    name = "noise state"
    when = ("credit.state",)

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a likelihood that has nothing to say."""
        config = task.config
        if not hasattr(task.method.likelihood, "describe"):
            raise ConfigError(
                f"credit {config.credit.fn} judges the initial noise, and likelihood "
                f"{config.likelihood.fn} has none that is learned; take likelihood prior, or "
                "another credit, such as group_norm"
            )

    def credit_input(self, run: Run, it: Iteration) -> dict[str, Tensor]:
        """Ask the likelihood, and keep the answer for the credit's own `update`."""
        assert it.batch is not None
        it.extra["state"] = state_of(run, it.rows)[on_host(it.batch.group)]
        return {"state": it.extra["state"]}


def state_of(run: Run, rows: list[int]) -> Tensor:
    """Return what the likelihood says of the noise of training prompts `rows` -> [R, D] on the
    CPU."""
    describe = getattr(run.method.likelihood, "describe")  # noqa: B009 - not of every likelihood
    with run.sampling_policy(), torch.no_grad():
        found: Tensor = describe(encode_rows(run.model, run.train_set, rows, run.size))
    return found.cpu()
