"""What several processes share and gather, without starting any."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processkit import FSDP
from tiny import tiny_sd3
from tinywan import tiny_wan
from toykit import toy

from flowrl.core.errors import ConfigError, ModelError, ProcessLost
from flowrl.core.processes import World, sharded
from flowrl.models.sd3 import sd3
from flowrl.models.wan import wan
from flowrl.training.trainer import Trainer

# ------------------------------------------------------------------------------- without a launcher


def test_shares_cover_all_places_once_and_differ_by_one_at_most() -> None:
    for count in range(12):
        for size in range(1, 6):
            shares = [World(rank, size).share(count) for rank in range(size)]
            assert [place for share in shares for place in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_processes_that_compute_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four processes in groups of two: a prompt is a group's, a value its first one's."""
    four = [World(rank, 4).in_groups(2) for rank in range(4)]
    assert [each.share(6) for each in four] == [range(3)] * 2 + [range(3, 6)] * 2
    assert [each.main for each in four] == [True, False, False, False]

    def told(values: list[object], _: object) -> None:
        values[:] = ["a", "b", "c", "d"]

    monkeypatch.setattr("torch.distributed.all_gather_object", told)
    assert four[3].gather("d") == ["a", "c"]
    with pytest.raises(ConfigError, match=r"context_parallel=3: .* multiple of it, got 4"):
        World(0, 4).in_groups(3)
    assert World().in_groups(3) == World()


def test_one_process_gathers_and_sums_nothing() -> None:
    alone, tensor = World(), torch.ones(3)
    alone.sum_([tensor])
    assert alone.gather(7) == [7] and tensor.tolist() == [1, 1, 1]
    assert alone.main and not alone.any(False)
    with pytest.raises(ZeroDivisionError):
        alone.together(lambda: 1 // 0)


@pytest.mark.parametrize("name", ["gpus", "nodes", "fsdp"])
def test_launcher_configs_are_what_accelerate_reads(name: str) -> None:
    """Its own parser refuses keys that it does not know."""
    from accelerate.commands.config.config_args import load_config_from_file

    read = load_config_from_file(
        str(Path(__file__).parents[2] / "configs/accelerate" / f"{name}.yaml")
    )
    assert read.distributed_type == ("FSDP" if name == "fsdp" else "MULTI_GPU")
    assert read.num_processes % (8 * read.num_machines) == 0
    assert read.mixed_precision == "no"


def test_what_fsdp_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**FSDP, "FSDP_VERSION": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("flowrl.core.processes.world", lambda: World(0, 2))
    with pytest.raises(ConfigError, match="fsdp_version: expected 2"):
        sharded()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert sharded()
    monkeypatch.setattr("flowrl.training.run.world", lambda: World(0, 2))
    with pytest.raises(ConfigError, match=r"train.prompts=3: under FSDP.* multiple of 2"):
        Trainer(toy(tmp_path, "train.prompts=3"))
    folder = str(tiny_sd3(tmp_path / "sd3"))
    with pytest.raises(ConfigError, match="do not go with FSDP"):
        sd3(folder, t5=False, max_sequence_length=1, device="cpu", runtime={"compile": True})


def test_what_cannot_compute_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("models.runtime", "training.run"):
        monkeypatch.setattr(f"flowrl.{module}.world", lambda: World(0, 2))
    runtime = {"context_parallel": 2}
    with pytest.raises(ConfigError, match="context_parallel=2: is for Wan's videos, got a SD3"):
        folder = str(tiny_sd3(tmp_path / "sd3"))
        sd3(folder, t5=False, max_sequence_length=1, device="cpu", runtime=runtime)
    folder = str(tiny_wan(tmp_path / "wan"))
    with pytest.raises(ConfigError, match="does not go with compile"):
        wan(folder, device="cpu", runtime={**runtime, "compile": True})
    with pytest.raises(ModelError, match="expected a divisor of the network's 2 heads"):
        wan(folder, device="cpu", runtime={"context_parallel": 4})
    model = f"model={{fn: wan, path: {folder}, frames: 1, runtime: {{context_parallel: 2}}}}"
    ascent = ["loss={fn: reward_ascent}", "plan={fn: ode, steps: 4, order: 1}"]
    ascent += ["likelihood={fn: draft, last: 1}", "rewards={red: {fn: toykit.redness}}"]
    with pytest.raises(ConfigError, match="context_parallel=2: does not go with a loss that"):
        Trainer(toy(tmp_path, model, *ascent))


def test_a_process_that_is_gone_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed here is told rather than that the others are gone; no memory stays what it is."""

    def broken(*_: object) -> None:
        raise RuntimeError("gloo: Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather_object", broken)
    monkeypatch.setattr("torch.distributed.all_reduce", broken)
    here, said = World(0, 2), r"process 0 of 2: another process .* gone.*Connection closed by peer"
    for call in (lambda: here.gather(1), lambda: here.sum_([torch.ones(1)])):
        with pytest.raises(ProcessLost, match=said):
            call()
    with pytest.raises(ProcessLost):
        here.together(lambda: 1)
    with pytest.raises(ZeroDivisionError):
        here.together(lambda: 1 // 0)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("torch.distributed.all_gather_object", full)
    with pytest.raises(torch.OutOfMemoryError):
        here.gather(1)
