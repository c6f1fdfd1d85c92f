"""Several processes against one: the same prompts, noise, advantages, gradients and updates (gloo,
on the CPU); a process alone; several nodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pairkit import ALL, command, resume, same, same_rows, same_weights
from process import commanded, trained
from processkit import FSDP, pair, run_nodes, run_pair
from tiny import tiny_sd3, tiny_wan
from toykit import toy

from flowrl.core.errors import ConfigError, ModelError, ProcessLost, RunError
from flowrl.core.processes import World, sharded
from flowrl.models.sd3 import sd3
from flowrl.models.wan import wan
from flowrl.runs.folder import read_rows
from flowrl.training.trainer import Trainer

CHAIN = ("plan={fn: full, steps: 4, noise_scale: 0.5, ode_last: 1}", "train.group=4")
TREE = (
    "plan={fn: tree, steps: 4, noise_scale: 0.5, splits: [0, 2], ode_last: 1}",
    "credit={fn: depth_norm}",
)
CHUNKS = "select={fn: chunks, share: 0.5, weighted: l1, corrected: true}"
BLIND = "rewards.red={fn: toykit.blind, prompt: a teal dot}"
CASES: dict[str, tuple[str, ...]] = {
    "global std, two updates": (
        *CHAIN,
        "train.updates=2",
        "credit={fn: group_norm, std: global}",
    ),
    "same noise, fraction": (
        *CHAIN,
        "train.same_noise=true",
        "select={fn: fraction, share: 0.5}",
    ),
    "segments, uneven shares": (
        *CHAIN,
        "segment={fn: fixed, sizes: [1, 2]}",
        "train.prompts=5",
    ),
    "tree, KL, parts": (*TREE, "kl={fn: transition_kl, beta: 0.1}", "train.parts=2"),
    "learned reward": (*CHAIN, "rewards.red={fn: toykit.apprentice}"),
    "chunks by change": (*CHAIN, "plan.steps=6", "segment={fn: adaptive, chunks: 3}", CHUNKS),
    "second draws": (*CHAIN, "rewards.red={fn: toykit.dull}", "train.refill=2"),
    "budgets": (*CHAIN, "sampler={fn: knapsack}", "rewards.red={fn: toykit.reddish}"),
    "single stream": (
        *CHAIN,
        "credit={fn: single_stream, half: 0.01}",
        "rewards.red={fn: toykit.warmth}",
    ),
    # in the first and third iteration a quarter of all images, and half of one process' own
    "unscored": (*CHAIN, BLIND, "train.max_unscored=0.25"),
    "guard": (*CHAIN, "loss={fn: guard, clip_low: 0.002, clip_high: 0.002}", "train.updates=2"),
}
SUITES = ("suite one", "suite two")
# what the second process is told otherwise, and what is said of it
OTHERS = {
    "seed=4": "process 1 of 2 has seed 4, and process 0 has 3: start all processes with the",
    "optimizer.lr=0.5": "process 1 of 2 has optimizer.lr 0.5, and process 0 has 0.01",
    "prompts.train={folder}/more.jsonl": "process 1 of 2 has prompts.train with the hash",
}


def suite_command(folder: Path, out: str) -> list[str]:
    """Run a suite of three prompts on the run that one process made."""
    words = ["eval", str(folder / "one"), "--suite", "shapes", "--out", str(folder / out)]
    words += ["--prompts", str(folder / "test.jsonl"), "--plugin", "toykit"]
    return [*words, "--set", "rewards={red: {fn: toykit.redness}}"]


class Both(NamedTuple):
    """What one process did and what two did: runs in `folder`, answers by name."""

    folder: Path
    one: dict[str, dict[str, Any]]
    two: dict[str, list[dict[str, Any]]]


def stopped_inside(folder: Path) -> list[str]:
    """Train with Ctrl-C in the second process only, in its second batch of the first evaluation.

    Of five held-out prompts, one a batch, it has three, the first process two.
    """
    words = command(folder, "pressed", "eval.batch=2", f"prompts.test={folder}/five.jsonl")
    lines = (folder / "test.jsonl").read_text().splitlines(keepends=True)
    (folder / "five.jsonl").write_text("".join(lines[:5]))
    reward = f"{{fn: toykit.pressed, rank: 1, call: 2, file: {folder}/was pressed}}"
    return [*words[:2], f"rewards={{red: {reward}}}", *words[2:]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Do all there is to do, in this process and in one pair of processes."""
    home = tmp_path_factory.mktemp("both")
    # alone
    one = {name: trained(home / "toy", [*ALL, *more]) for name, more in CASES.items()}
    assert commanded(command(home, "one"))["code"] == 0
    shutil.copytree(home / "one", home / "stopped", ignore=shutil.ignore_patterns("000004"))
    assert commanded(suite_command(home, "suite one"))["code"] == 0
    # in two
    jobs: dict[str, dict[str, Any]] = {
        name: {"overrides": [*ALL, *more]} for name, more in CASES.items()
    }
    jobs["whole"] = {"argv": command(home, "two")}
    jobs["resumed"] = {"argv": resume(home / "stopped")}
    jobs["too many"] = {"argv": command(home, "none", "train.prompts=1")}
    jobs["suite"] = {"argv": suite_command(home, "suite two")}
    for other in OTHERS:
        argvs = [command(home, "other"), command(home, "other", other.format(folder=home))]
        jobs[other] = {"argvs": argvs}
    lines = (home / "train.jsonl").read_text()
    (home / "more.jsonl").write_text(lines.replace("pink", "purple"))
    jobs["failing"] = {"argv": failing(home, "failed", rank=0)}
    few = (*CHAIN, BLIND, "train.max_unscored=0.24")
    jobs["stopped"] = {"argv": stopped_inside(home)}
    again = {"copy": [str(home / "pressed"), str(home / "went on"), ""]}
    jobs["went on"] = {**again, "argv": resume(home / "went on")}
    jobs["too many unscored"] = {"argv": command(home, "unscored", *few)}
    return Both(home, one, pair(jobs, home))


# ------------------------------------------------------------------------------------ two processes


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_two_processes_make_the_updates_of_one(both: Both, case: str) -> None:
    """Noise, advantages and selections are equal; sums run in another order, hence 1e-6 and not
    bits. Both processes hold the same weights, to the bit."""
    one, (first, second) = both.one[case], both.two[case]
    assert first["end"] == second["end"]
    weights = {k: torch.tensor(v) for k, v in one["end"].items()}
    moved = [weights[k] - torch.tensor(v) for k, v in one["start"].items()]
    # if nothing was trained, equality would say nothing
    assert max(change.abs().max() for change in moved) > 1e-3
    for name, value in weights.items():
        torch.testing.assert_close(torch.tensor(first["end"][name]), value, rtol=1e-5, atol=1e-6)
    for answer in (first, second):
        same(one["rows"], answer["rows"], case)
        assert one["rows"][0]["reward"] == answer["rows"][0]["reward"]


@pytest.mark.integration
def test_a_run_of_two_processes_writes_what_one_writes(both: Both) -> None:
    """Also after a stop: two processes go on from a checkpoint of one, and end where one ends."""
    one, two, stopped = (both.folder / name for name in ("one", "two", "stopped"))
    assert [a["code"] for name in ("whole", "resumed") for a in both.two[name]] == [0] * 4
    files = [
        {f.relative_to(run) for f in run.rglob("*") if "tfevents" not in f.name}
        for run in (one, two)
    ]
    assert files[0] == files[1]
    for run in (two, stopped):
        same_rows(one, run, "metrics.jsonl")
        same_rows(one, run, "eval.jsonl")
        same_weights(one, run, "000004", ["current"], 1e-6)
    assert json.loads((two / "environment.json").read_text())["processes"] == 2


def failing(folder: Path, run: str, rank: int) -> list[str]:
    return command(folder, run, f"rewards.red={{fn: toykit.one_sided, rank: {rank}}}")


@pytest.mark.integration
@pytest.mark.parametrize("rank", [0, 1])
def test_a_reward_that_fails_in_one_process_stops_all_with_a_checkpoint(
    both: Both, tmp_path: Path, rank: int
) -> None:
    """The second time as `torchrun` would start it: each process ends with the exit code."""
    if rank == 0:
        run, done = both.folder / "failed", [(a["code"], a["said"]) for a in both.two["failing"]]
    else:
        run, done = tmp_path / "run", run_pair("-m", "flowrl", *failing(tmp_path, "run", rank))
    for code, said in done:
        assert code == 2 and "the server is down" in said and "saved" in said, (code, said)
    assert f"process {rank} of 2" in done[1 - rank][1]
    assert (run / "checkpoints" / "000001" / "manifest.json").exists()


@pytest.mark.integration
def test_a_signal_to_one_process_stops_all_inside_an_evaluation(both: Both) -> None:
    """With a checkpoint, before the evaluation is done; gone on with, it is made as a whole: the
    mean of the two tasks that two processes found in the whole run, which has the sixth prompt,
    too, in one of them."""
    for answer in both.two["stopped"]:
        assert answer["code"] == 130 and "Traceback" not in answer["said"], answer
        said = f"stopped after iteration 0, saved {both.folder}/pressed/checkpoints/000000"
        assert said in answer["said"], answer
    assert not (both.folder / "pressed" / "eval.jsonl").exists()
    assert [answer["code"] for answer in both.two["went on"]] == [0, 0]
    whole, mine = (read_rows(both.folder / n, "eval.jsonl")[0] for n in ("two", "went on"))
    assert mine["images"] == 10 and whole["images"] == 12
    for key in ("mean", "images"):  # the interval looks at the other task, too
        same(mine["tasks"]["even"][key], whole["tasks"]["even"][key], f"even/{key}")


@pytest.mark.integration
def test_the_share_of_unscored_images_is_that_of_all_processes(both: Both) -> None:
    """4 of 16 images are more than 0.24 and not more than 0.25, which the case "unscored" trains
    with; both processes say so, also the one that has scored all of its own."""
    for answer in both.two["too many unscored"]:
        said = answer["said"]
        assert answer["code"] == 2 and "(4 of 16 images have no finite score)" in said, answer
        assert "train.max_unscored=0.24 is the share" in said
    assert not read_rows(both.folder / "unscored", "metrics.jsonl")


@pytest.mark.integration
def test_more_processes_than_prompts_is_an_error_before_anything_is_written(both: Both) -> None:
    for answer in both.two["too many"]:
        assert answer["code"] == 2 and "train.prompts=1" in answer["said"], answer
    assert not (both.folder / "none" / "config.yaml").exists()


@pytest.mark.integration
@pytest.mark.parametrize("other", OTHERS)
def test_processes_of_two_runs_are_told(both: Both, other: str) -> None:
    """Both end with one message, and nothing is written."""
    for answer in both.two[other]:
        assert answer["code"] == 2 and OTHERS[other] in answer["said"], answer
    assert not (both.folder / "other").exists()


@pytest.mark.integration
def test_a_suite_is_drawn_and_scored_in_shares(both: Both) -> None:
    """The scores of one process, in a file of each of two; the first one writes the report."""
    assert [answer["code"] for answer in both.two["suite"]] == [0, 0]
    one, two = (json.loads((both.folder / n / "summary.json").read_text()) for n in SUITES)
    same(one, two, "summary")
    shares = []
    for name in ("scores.jsonl", "scores.1.jsonl"):
        lines = (both.folder / SUITES[1] / name).read_text().splitlines()
        shares.append({json.loads(line)["prompt"] for line in lines})
    assert all(shares) and shares[0].isdisjoint(shares[1])
    assert len(shares[0] | shares[1]) == one["setting"]["count"]


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


def test_the_first_process_works_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two does nothing itself, and gets what the work of the first returned, or its
    failure, by one exchange."""
    failed = (False, "the disk is full"), None
    told: list[list[object]] = [[(None, "kept"), (None, None)], [failed, (None, None)]]

    def gathered(values: list[object], _: object) -> None:
        values[:] = told.pop(0)

    def work() -> str:
        raise AssertionError

    monkeypatch.setattr("torch.distributed.all_gather_object", gathered)
    assert World(1, 2).by_main(work) == "kept"
    with pytest.raises(RunError, match="process 0 of 2: the disk is full"):
        World(1, 2).by_main(work)
    assert World().by_main(lambda: "alone") == "alone"


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


@pytest.mark.integration
def test_two_machines_make_the_run_of_one(tmp_path: Path) -> None:
    """Each in a folder of its own with its own config and prompts, told what torchrun tells it
    (which tests/runs/test_launched.py starts): weights, metrics and evaluations are those of one
    process, and only the first machine writes."""
    for name in ("one", "first", "second"):
        (tmp_path / name).mkdir()
    assert commanded(command(tmp_path / "one", "run"))["code"] == 0
    folders = [tmp_path / "first", tmp_path / "second"]
    first, second = (command(folder, "run") for folder in folders)
    here, there = (
        [word.replace(f"{f}/", "") for word in words]
        for f, words in zip(folders, (first, second), strict=True)
    )
    assert here == there  # names of files are those of the machine that they are read on
    ends = run_nodes(folders, "-m", "flowrl", *here)
    assert [code for code, _ in ends] == [0, 0], ends
    one, run = tmp_path / "one" / "run", folders[0] / "run"
    same_rows(one, run, "metrics.jsonl")
    same_rows(one, run, "eval.jsonl")
    same_weights(one, run, "000004", ["current"], 1e-6)
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
    assert not (folders[1] / "run").exists()
