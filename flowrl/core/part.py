"""A part: one feature that joins the training loop, in one file.

The loop (`flowrl.training.trainer`) knows no feature by name. It asks the parts of a run at the
places below, in this order, and a run without a part executes none of its code. A user's callback
is a part, too: give it as ``callbacks=[...]``, or name its class in the config's section ``parts``.

before anything is loaded
    `check`            the config, against this part and the others
    `begin`            prompts and rewards are there
once
    `check_model`      the model is there
    `model_ready`      what is trained is known, with the weights that the model came with
    `weights_ready`    the weights that training begins with are in it
every iteration
    `rows`             which prompts
    `rollout`          a rollout from elsewhere, in place of one that is sampled
    `encoding`, `sampling`, `noise`
                       contexts in which prompts are encoded and images sampled, and their initial
                       noises
    `sampled`          a rollout is there; the part may return another
    `scored`           images and rewards are there; the part may ask for some prompts again
    `joined`           the forests of all processes are one
    `credit_input`, `credit_sees`
                       keywords that the credit asked for, and what it sees in place of rewards
    `credited`         advantages are there
    `learns`, `trains_policy`
                       whether more than rewards learns, and whether the policy does
    `node_facts`       what a loss wants to know of each node
    `before_learning`  before the first optimizer step
    `before_steps`     which nodes each optimizer step will have is known
    `provide`          what a loss or penalty asked for by `flowrl.core.needs.needs`
    `measure`          metrics of the rows of a network call
    `gradient`         the gradient of an optimizer step is there; the part may refuse the step
    `after_step`       the step was made
    `learned`          all steps were made
    `after_iteration`  the iteration is done, and its metrics may be added to
whenever a checkpoint is written or read
    `state_dict`, `load_state_dict`
before a run, by `flowrl estimate`, the dry run and the doctor
    `work`             what an iteration costs with the part
    `row_calls`        network calls that the part adds to the training of a row
    `calls`            and those that it adds to an iteration
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from flowrl.core.types import LossInput, Rollout

Files = Mapping[str, Mapping[str, Tensor]]
"""Tensors by file and name, as a checkpoint keeps them."""


class PartState(NamedTuple):
    """What a checkpoint keeps of a part."""

    files: Files = {}  # file without ending -> {name: tensor}; no other part has a file of the name
    plain: Mapping[str, Any] = {}  # plain JSON


class Part:
    """A feature that joins the training loop; each method is a place where it is asked, and does
    nothing unless a part says otherwise.

    Arguments that all have in common: ``run`` is the `flowrl.training.run.Run`; before the model is
    loaded the `flowrl.training.run.Task`. ``it`` is the `flowrl.training.run.Iteration`.

    Example, a callback that stops training where the reward is high enough::

        class Enough(Part):
            def after_iteration(self, run, it):
                if it.metrics["reward"] > 0.9:
                    run.state.stop = "the reward is above 0.9"

        flowrl.train(config, callbacks=[Enough()])
    """

    name: ClassVar[str] = ""
    """Of its state in checkpoints, and in messages; empty: the class's own name."""
    when: ClassVar[tuple[str, ...]] = ()
    """What brings a part of flowrl into a run, any of: ``config.KEY`` that is set, such as
    ``config.train.refill``; ``plan.FIELD`` of the first plan; ``needs.NAME`` and ``credit.NAME``
    that a loss, penalty or credit asks for; ``learns``: a reward, aggregator or credit that learns;
    ``always``."""
    provides: ClassVar[tuple[str, ...]] = ()
    """Names that functions ask for with `flowrl.core.needs.needs`, beside those of `when`."""
    rank: ClassVar[int] = 50
    """Parts are asked in the order of their ranks; a callback comes after flowrl's own."""
    fsdp: ClassVar[str] = ""
    """Why it does not go with weights that are sharded; empty: it does."""
    context: ClassVar[str] = ""
    """What it is called where it does not go with processes that compute a sample together."""

    # ---------------------------------------------------------------------- before anything loads

    def check(self, task: Any, plan: Any) -> None:
        """Refuse a config, for each plan that the run will have. ``task.parts`` has the others.
        Raises ConfigError."""

    def begin(self, task: Any) -> None:
        """Read what the part needs of prompts and rewards. Raises ConfigError, DataError."""

    def work(self, task: Any, plan: Any, cost: Any) -> Any:
        """Return what an iteration of a plan costs with the part: an
        `flowrl.training.task.IterationCost`."""
        return cost

    def row_calls(self, task: Any) -> int:
        """Count the network calls that the part adds to the training of a row, at most."""
        return 0

    def calls(self, task: Any, made: Rollout, iteration: int) -> int:
        """Count the network calls that the part adds to an iteration for one prompt, whose forest
        is `made`."""
        return 0

    # -------------------------------------------------------------------------------------- once

    def check_model(self, prepared: Any, model: Any, frames: int) -> None:
        """Refuse a model that cannot do the part's work; frames: of its videos. Raises
        ConfigError."""

    def model_ready(self, run: Any) -> None:
        """Keep what the part wants of the model, with the weights that it came with."""

    def weights_ready(self, run: Any) -> None:
        """Look at the weights that training begins with."""

    # --------------------------------------------------------------------------- every iteration

    def learns(self, iteration: int) -> bool:
        """Say whether anything but rewards learns in an iteration."""
        return True

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy moves in an iteration in which models learn."""
        return True

    def rows(self, run: Any, iteration: int) -> list[int] | None:
        """Choose the training prompts of an iteration; None leaves it to others."""
        return None

    def texts(self, run: Any) -> list[str]:
        """Return texts that are encoded ahead besides the prompts."""
        return []

    def encoding(self, run: Any) -> AbstractContextManager[None]:
        """Return a context in which prompts are encoded."""
        return nullcontext()

    def sampling(self, run: Any) -> AbstractContextManager[None]:
        """Return a context in which images are sampled."""
        return nullcontext()

    def noise(
        self, run: Any, rows: list[int], places: Sequence[int], attempt: int
    ) -> Tensor | None:
        """Choose the initial noises of training prompts, of std 1 [R * roots, *]; None: drawn."""
        return None

    def rollout(self, run: Any, rows: list[int], first: int) -> tuple[Rollout, Tensor] | None:
        """Return a rollout of training prompts that stand from place `first` on, and its images
        uint8 [L, 3, H, W], where these are not sampled; None: they are."""
        return None

    def under(self, run: Any, name: str) -> AbstractContextManager[None]:
        """Return a context in which rows are evaluated under the weights `name`."""
        return nullcontext()

    def sampled(self, run: Any, ro: Rollout, rows: list[int], attempt: int) -> Rollout:
        """Return the rollout that is trained on; rows: of the whole iteration."""
        return ro

    def scored(self, run: Any, it: Any) -> None:
        """Look at images and rewards, ``it.found``; the part may put others in their place, with
        ``run.collect``."""

    def joined(self, run: Any, it: Any) -> None:
        """Look at the forest of all processes, ``it.forest``; the part may put another ``it.tree``
        in its place."""

    def credit_input(self, run: Any, it: Any) -> dict[str, Any]:
        """Return keywords that the credit asked for."""
        return {}

    def credit_sees(
        self, run: Any, it: Any, credit: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        """Return the credit, or one that sees something else than the rewards."""
        return credit

    def credited(self, run: Any, it: Any) -> None:
        """Learn from rewards and advantages, and add to ``it.metrics``."""

    def node_facts(self, run: Any, ro: Rollout, advantage: Tensor) -> dict[str, Tensor]:
        """Return {name: rows [V]} about the nodes of the whole forest, for `provide`."""
        return {}

    def before_learning(self, run: Any, it: Any) -> None:
        """Prepare for the optimizer steps; ``it.table`` knows which nodes are trained."""

    def before_steps(self, run: Any, advantages: list[Tensor]) -> None:
        """Look at the advantages [n] of each optimizer step to come, of all processes' nodes."""

    def provide(self, run: Any, rows: Any, data: LossInput) -> LossInput:
        """Return the input of loss and penalty with what they asked for; rows: the
        `flowrl.training.learn.CallRows` of the network call."""
        return data

    def measure(self, run: Any, data: LossInput) -> dict[str, Tensor]:
        """Return metrics {name: [B]} of the rows of a network call."""
        return {}

    def gradient(self, run: Any, norm: float, update: int) -> bool | None:
        """Look at the norm of an optimizer step's gradient. False refuses the step; None lets it be
        made, and counts it as an outlier in the metric ``grad_outliers``, as False does."""
        return True

    def after_step(self, run: Any, update: int) -> None:
        """Do what follows an optimizer step that was made."""

    def learned(self, run: Any, it: Any, seen: Sequence[Any]) -> None:
        """Look at what the network calls of all optimizer steps left, and add to
        ``it.metrics``."""

    def after_iteration(self, run: Any, it: Any) -> None:
        """Do what follows an iteration, and add to ``it.metrics``."""

    # -------------------------------------------------------------------------------- checkpoints

    def state_dict(self, run: Any) -> PartState | None:
        """Return all that a bit-for-bit resume needs; None: nothing."""
        return None

    def load_state_dict(self, run: Any, state: PartState, where: Path) -> None:
        """Put back what `state_dict` gave, from the checkpoint `where`. Raises CheckpointError."""

    # ----------------------------------------------------------------------------------- its name

    def asked_by(self, config: Any) -> str:
        """Say what of a config brings the part in, for messages."""
        for when in self.when:
            kind, _, rest = when.partition(".")
            if kind == "credit":
                return f"credit {config.credit.fn}"
            if kind == "needs":
                return f"loss {config.loss.fn}"
            if kind == "config" and _set(config, rest):
                return rest
        return self.title()

    @classmethod
    def title(cls) -> str:
        """Return the name of the part."""
        return cls.name or cls.__name__


def asked_at(part: Part, place: str) -> bool:
    """Say whether a part does something at a place."""
    return getattr(type(part), place) is not getattr(Part, place)


def _set(config: Any, key: str) -> bool:
    """Say whether a dotted key of a config has a value."""
    value = config
    for name in key.partition("<")[0].split("."):
        value = getattr(value, name, None)
    return bool(value)
