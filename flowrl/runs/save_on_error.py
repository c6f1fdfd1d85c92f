"""What a run saves, also when something stops it, and the message that says how to go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flowrl.config.load import PYTHON
from flowrl.core.errors import FlowRLError, RewardError, RunError
from flowrl.cost.out_of_memory import explain, is_out_of_memory
from flowrl.runs.folder import CONFIG
from flowrl.runs.log import RunLogger, Silence
from flowrl.runs.start import train_command
from flowrl.runs.stop import Interrupted
from flowrl.training import checkpoint
from flowrl.training.trainer import Trainer

Log = RunLogger | Silence


class Checkpoints:
    """The checkpoints of a run that is being trained."""

    def __init__(self, trainer: Trainer, run: Path, resumed_at: int | None) -> None:
        self.trainer, self.run = trainer, run
        self._saved = resumed_at  # the iteration that is on the disk already
        self.best: int | None = None  # the iteration that is never deleted

    @property
    def folder(self) -> Path:
        """Return where the checkpoint of the current iteration belongs."""
        return checkpoint.checkpoint_folder(self.run, self.trainer.iteration)

    def save(self) -> Path:
        """Write the checkpoint of the current iteration unless it is there -> its folder.

        That of iteration 0 follows from the config: it goes as soon as there is another one.
        """
        now = self.trainer.iteration
        if self._saved != now:
            self.trainer.save(self.folder)
            self._saved = now
        if self.trainer.world.main and now > 0:
            keep = self.trainer.config.checkpoint.keep
            checkpoint.prune(self.run, keep, besides=self._kept())
            self._forget_the_first()
        return self.folder

    def _kept(self) -> set[int]:
        """Return the iterations that are never deleted: the best, and the first where a run may go
        back to it."""
        first = {0} if self.trainer.config.monitors.asks_for("rollback") else set()
        return first | ({self.best} if self.best is not None else set())

    def _forget_the_first(self) -> None:
        if 0 in self._kept():
            return
        first = checkpoint.checkpoint_folder(self.run, 0)
        with contextlib.suppress(OSError):
            if first.is_dir():
                checkpoint.discard(first)

    def stopped(self) -> Interrupted:
        """Save, and return the error that ends a run which was asked to stop."""
        folder = self.trainer.world.together(self.save)
        return Interrupted(
            f"stopped after iteration {self.trainer.iteration}, saved {folder}; go on with: "
            f"{self.how_to_go_on()}"
        )

    def how_to_go_on(self) -> str:
        """Return the command that goes on with the run, or the call where rewards are functions
        of a program, which a command does not have."""
        config = self.trainer.config
        if any(call.path == PYTHON for call in config.rewards.values()):
            plugins = f", plugins={list(config.plugins)}" if config.plugins else ""
            load = f"flowrl.load_config({str(self.run / CONFIG)!r}{plugins})"
            rewards = ", ".join(f"{name!r}: ..." for name in config.rewards)
            return f"flowrl.train({load}, {str(self.run)!r}, rewards={{{rewards}}}, resume=True)"
        return train_command("--resume", self.run, config)

    def after(self, error: BaseException) -> str:
        """Save after an error if what is in memory can be gone on from -> what there is to go on
        from, and how."""
        found = self._rescued(error)
        if found is None and not self.trainer.world.main:
            return "process 0 says what there is to go on from"
        if found is None:
            return (
                "there is no whole checkpoint; start again with the same command, or in another "
                "folder"
            )
        return f"{found}; go on with: {self.how_to_go_on()}"

    def _rescued(self, error: BaseException) -> str | None:
        trainer = self.trainer
        # process 0 writes, sharded weights need all, and only a reward's failure is known to all
        main = trainer.world.main
        alone = (trainer.sharded or not main) and not isinstance(error, RewardError)
        problem = ""
        if not alone and trainer.can_be_saved():
            try:
                return f"saved {self.save()}"
            except FlowRLError as failed:
                problem = f"{failed}; "
        newest = checkpoint.latest(self.run)
        return None if newest is None else f"{problem}{newest} is whole"


@contextmanager
def rescued(checkpoints: Checkpoints, log: Log) -> Iterator[None]:
    """Whatever ends the run inside: save what is good, and say in the error how to go on.

    Our own errors and a lack of memory become one message; a fault keeps its traceback, with a
    note. A second Ctrl-C becomes Interrupted.
    """
    trainer = checkpoints.trainer
    # a second Ctrl-C must not wait for a save
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        where = f"stopped at once in iteration {trainer.iteration}"
        raise Interrupted(f"{where}; {checkpoints.after(error)}") from None
    # save first, since the message says what there is to go on from
    except Exception as error:
        where, config = f"stopped in iteration {trainer.iteration}", checkpoints.run / CONFIG
        how = checkpoints.after(error)
        # our own errors say already what is wrong: add where, and how to go on
        if isinstance(error, FlowRLError):
            text = f"{error}\n{where}; settings are in {config}; {how}"
            raise type(error)(text) from error
        if is_out_of_memory(error):
            advice = explain(error, trainer.config, log.current)
            raise RunError(f"{advice}\n{where}; set it in {config}; {how}") from error
        # anything else is a fault of the program, whose traceback is needed
        error.add_note(f"{where}; {how}")
        raise
