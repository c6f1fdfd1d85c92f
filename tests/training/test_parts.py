"""Parts join the training loop through one door: a part written outside of the package does all
that a shipped one does, and a run executes no code of a part that it does not have."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from processkit import pair
from steadykit import FACTOR, OFF, PLUGIN, Steady, steadied
from torch import Tensor
from toykit import toy, write_toy

import flowrl
from flowrl.cli.main import main
from flowrl.core.errors import CheckpointError, ConfigError
from flowrl.core.needs import needs
from flowrl.core.part import Part, PartState
from flowrl.core.types import LossInput
from flowrl.runs.folder import read_metrics
from flowrl.training.parts import PACKAGES, Parts, shipped

ROOT = Path(flowrl.__file__).parent
MOST_FILES = 41  # of flowrl and rewards in one step of shapes/flow_grpo


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Train the toy with the part as a callback, in one process and in one go."""
    return steadied(str(tmp_path_factory.mktemp("once")), "callbacks")


def test_it_skips_outliers_and_nothing_else(once: dict[str, Any], tmp_path: Path) -> None:
    """Oracle: the running mean by hand, of the norms that a run without the part does not change
    before the first skipped step."""
    skipped = [row["steady/skipped"] for row in once["rows"]]
    assert 0 < skipped[-1] < 8  # some of four iterations' eight steps
    assert [row["grad_outliers"] for row in once["rows"]] == [
        now - before for now, before in zip(skipped, [0.0, *skipped], strict=False)
    ]
    plain = flowrl.Trainer(toy(tmp_path, OFF))
    first = plain.step()
    same = skipped[0] == 0 and first["grad_norm"] == once["rows"][0]["grad_norm"]
    assert same or skipped[0] > 0
    assert "steady/mean" not in first


class Never(Part):
    """Refuse every step."""

    def gradient(self, run: Any, norm: float, update: int) -> bool:
        """Say no."""
        return False


def test_outliers_that_are_refused_move_no_weight(tmp_path: Path) -> None:
    """Refused throughout, the weights stay to the bit; without the part they move."""
    for callbacks in ([Never()], []):
        trainer = flowrl.Trainer(toy(tmp_path, OFF), callbacks=callbacks)
        start = {name: p.detach().clone() for name, p in trainer.params.items()}
        trainer.step()
        still = [torch.equal(p, start[name]) for name, p in trainer.params.items()]
        assert all(still) == bool(callbacks)


@pytest.mark.parametrize(("way", "stop"), [("callbacks", 2), ("config", 0), ("config", 3)])
def test_both_doors_and_a_resume_give_the_same_bits(
    once: dict[str, Any], tmp_path: Path, way: str, stop: int
) -> None:
    """In the config with --plugin, as a callback, stopped and gone on with: one run."""
    assert steadied(str(tmp_path), way, stop) == once


@pytest.mark.integration
@pytest.mark.parametrize("way", ["callbacks", "config"])
def test_two_processes_skip_the_same_steps(once: dict[str, Any], tmp_path: Path, way: str) -> None:
    """Sums run in another order, hence 1e-6 and not bits; both processes hold the same weights."""
    job = {"call": "steadykit.steadied", "args": [str(tmp_path / "toy"), way, 2]}
    first, second = pair({"job": job}, tmp_path)["job"]
    assert first["end"] == second["end"]
    for name, value in once["end"].items():
        ours = torch.tensor(first["end"][name])
        torch.testing.assert_close(ours, torch.tensor(value), rtol=1e-5, atol=1e-6)
    for row, other in zip(once["rows"], first["rows"], strict=True):
        assert row["steady/skipped"] == other["steady/skipped"]


@pytest.mark.integration
def test_the_command_line_takes_a_part_of_a_plugin(once: dict[str, Any], tmp_path: Path) -> None:
    """`flowrl train --plugin`, and a run that goes on with another four iterations."""
    run = tmp_path / "run"
    given = [str(write_toy(tmp_path)), OFF, PLUGIN, "--plugin", "toykit", "--plugin", "steadykit"]
    assert main(["train", *given, "train.iterations=3", "--run", str(run), "--quiet"]) == 0
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("iterations: 3", "iterations: 4"))
    again = ["train", "--resume", str(run), "--plugin", "toykit", "--plugin", "steadykit"]
    assert main([*again, "--quiet"]) == 0
    found = list(read_metrics(run))
    for row, other in zip(once["rows"], found, strict=True):
        assert {key: row[key] for key in ("steady/mean", "steady/skipped", "loss")} == {
            key: other[key] for key in ("steady/mean", "steady/skipped", "loss")
        }


def test_it_refuses_another_part(tmp_path: Path) -> None:
    """Before anything is loaded, by its own check."""
    with pytest.raises(ConfigError, match="steady: skips steps as monitors.gradients does"):
        flowrl.Trainer(toy(tmp_path), callbacks=[Steady(factor=FACTOR)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("parts.steady={fn: steadykit.Steady, factor: much}", "parts.steady.factor"),
        ("parts.steady={fn: steadykit.Steady, factors: 2}", "unknown|factors"),
        ("parts.steady={fn: steadykit.Steady, factor: -1}", "expected factor > 0"),
        ("parts.steady={fn: Steady}", "expected a class of your own"),
        ("parts.steady={fn: steadykit.steadied}", "expected a part"),
    ],
)
def test_its_section_is_checked(tmp_path: Path, changes: str, message: str) -> None:
    """Names and types by the config, values by the part, and what is no part at the door."""
    with pytest.raises(ConfigError, match=message):
        flowrl.Trainer(
            flowrl.load_config(write_toy(tmp_path), [OFF, changes], ["toykit", "steadykit"])
        )


def test_a_plugin_that_was_not_allowed_runs_no_code(tmp_path: Path) -> None:
    """A config from a stranger names a class of a package that the user did not allow."""
    with pytest.raises(ConfigError, match="allow it with --plugin steadykit"):
        flowrl.load_config(write_toy(tmp_path), [PLUGIN], ["toykit"])


@pytest.mark.parametrize("wrong", [print, "steady", Steady])
def test_a_callback_that_is_no_part_is_one_message(tmp_path: Path, wrong: Any) -> None:
    """Also the class in place of an instance."""
    with pytest.raises(ConfigError, match=r"callbacks\[0\]: expected a part"):
        flowrl.Trainer(toy(tmp_path), callbacks=[wrong])


def test_a_checkpoint_goes_on_with_its_own_parts_alone(tmp_path: Path) -> None:
    """Lost or new parts are refused, before a weight is changed."""
    config, saved = toy(tmp_path, OFF), tmp_path / "saved"
    flowrl.Trainer(config, callbacks=[Steady(factor=FACTOR)]).save(saved)
    bare = flowrl.Trainer(config)
    start = {name: p.detach().clone() for name, p in bare.params.items()}
    with pytest.raises(CheckpointError, match="steady.*this run has .*callbacks"):
        bare.load(saved)
    assert all(torch.equal(p, start[name]) for name, p in bare.params.items())
    bare.save(tmp_path / "bare")
    with pytest.raises(CheckpointError, match="this run has .*steady"):
        flowrl.Trainer(config, callbacks=[Steady(factor=FACTOR)]).load(tmp_path / "bare")


class Order(Part):
    """Write down where it is asked."""

    def __init__(self) -> None:
        self.seen: list[str] = []


def _remember(place: str) -> Any:
    usual = getattr(Part, place)

    def asked(self: Order, *given: Any) -> Any:
        self.seen.append(place)
        return usual(self, *given)

    return asked


PLACES = [
    *("check", "begin", "check_model", "model_ready", "weights_ready"),
    *("rows", "encoding", "sampling", "noise", "rollout", "sampled", "scored", "joined"),
    *("credit_input", "credit_sees", "credited", "learns", "node_facts", "before_learning"),
    *("trains_policy", "before_steps", "provide", "measure", "gradient", "after_step", "learned"),
    *("after_iteration",),
]
for _place in PLACES:
    setattr(Order, _place, _remember(_place))


def test_places_are_asked_in_the_documented_order(tmp_path: Path) -> None:
    """The order in which `flowrl.core.part` names them; `rollout` comes before what it replaces."""
    order = Order()
    trainer = flowrl.Trainer(toy(tmp_path, "train.updates=1"), callbacks=[order])
    before = list(dict.fromkeys(order.seen))
    assert before == ["check", "begin", "check_model", "model_ready", "weights_ready"]
    order.seen.clear()
    trainer.step()
    assert list(dict.fromkeys(order.seen)) == [
        *("rows", "rollout", "encoding", "sampling", "noise", "sampled", "scored", "joined"),
        *("credit_input", "credit_sees", "credited", "learns", "node_facts", "before_learning"),
        *("trains_policy", "before_steps", "provide", "measure", "gradient", "after_step"),
        *("learned", "after_iteration"),
    ]
    written = (ROOT / "core" / "part.py").read_text().partition('"""')[2].partition('"""')[0]
    assert [place for place in PLACES if f"`{place}`" not in written] == []


@needs("twice")
def with_twice(data: LossInput) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of a user that asks for what a part of the user provides."""
    loss = -data.extra["twice"] * data.now.log_prob
    return loss, {"twice": data.extra["twice"].detach()}


class Twice(Part):
    """Provide twice the advantage."""

    provides = ("twice",)

    def provide(self, run: Any, rows: Any, data: LossInput) -> LossInput:
        """Look it up."""
        return data._replace(extra={**data.extra, "twice": 2 * data.batch.advantage})


def test_a_loss_asks_by_name_and_a_part_provides(tmp_path: Path) -> None:
    """A name that nobody provides is refused before anything is loaded."""
    config = toy(tmp_path)
    ours = config.loss.__class__("loss", "with_twice", "mine.with_twice", {}, function=with_twice)
    config.__dict__["loss"] = ours
    with pytest.raises(ConfigError, match="needs 'twice', which nothing in this run provides"):
        flowrl.Trainer(config)
    metrics = flowrl.Trainer(config, callbacks=[Twice()]).step()
    assert metrics["twice"] == metrics["twice"]  # a number


class Once(Part):
    """Keep a file of a name that another part has."""

    def state_dict(self, run: Any) -> PartState:
        """Return a file."""
        return PartState({"ema": {"x": torch.zeros(1)}})


def test_two_parts_cannot_share_a_name_or_a_file(tmp_path: Path) -> None:
    """Either would lose the state of one of them."""
    with pytest.raises(ConfigError, match="two parts are called 'steady'"):
        Parts([Steady(), Steady()])
    trainer = flowrl.Trainer(toy(tmp_path), callbacks=[Once()])
    with pytest.raises(CheckpointError, match="copies and Once both keep a file 'ema'"):
        trainer.save(tmp_path / "saved")


def executed(work: Any, packages: tuple[str, ...] = PACKAGES) -> set[str]:
    """Return the files of packages of which functions run during a call."""
    files: set[str] = set()
    folders = tuple(str(ROOT.parent / package.replace(".", "/")) + os.sep for package in packages)

    def see(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(folders) and frame.f_code.co_name != "<module>":
            files.add(Path(name).relative_to(ROOT.parent).as_posix())

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return files


@pytest.mark.integration
def test_a_run_executes_no_code_of_parts_that_it_does_not_have() -> None:
    """From the config to two iterations of shapes/flow_grpo; the parts' modules are imported
    before, as any first run does."""
    small = ["train.prompts=2", "train.group=8", "train.threads=1", "eval.images=1"]
    assert len(shipped()) >= 15

    trainers = []

    def work() -> None:
        trainer = flowrl.Trainer(flowrl.load_config("shapes/flow_grpo", small))
        trainer.step()
        trainer.step()
        trainers.append(trainer)

    own = ("__init__", "statistics", "copies", "gradient_monitor", "fence")
    assert executed(work) == {f"flowrl/training/parts/{name}.py" for name in own}
    # of the whole package: who reads a step reads so many files
    assert len(executed(trainers[0].step, ("flowrl", "rewards"))) <= MOST_FILES


class Enough(Part):
    """Stop after two iterations, and make the rate small before."""

    def after_iteration(self, run: Any, it: Any) -> None:
        """Say why; the learning rate's factor holds from the next step on."""
        run.state.lr_factor = 0.5
        if run.iteration == 1:
            run.state.stop = "two are enough"


def test_a_callback_of_train_stops_the_run_and_changes_the_rate(tmp_path: Path) -> None:
    """The run ends as if it were done, its summary says why, and a resume goes on."""
    config, run = toy(tmp_path), tmp_path / "run"
    summary = flowrl.train(config, run, quiet=True, callbacks=[Enough()]).summary
    assert summary["iterations"] == 2
    assert summary["stopped"] == {"monitor": "callback", "iteration": 2, "why": "two are enough"}
    rates = [row["lr"] for row in read_metrics(run)]
    assert rates == [config.lr, config.lr / 2]
    done = flowrl.train(config, run, quiet=True, resume=True)
    assert done.summary["iterations"] == 4
