"""FSDP: two processes, of which none holds a whole network, against one; and the checkpoints of
either, which the other goes on from. And two processes that compute each sample together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pairkit import command, resume, same_rows, same_weights
from process import commanded
from processkit import FSDP, pair
from safetensors.torch import load_file
from shardkit import write_three
from tiny import tiny_sd3, tiny_wan, tiny_wan22
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from trainkit import same_files

from flowrl.core.errors import CheckpointError
from flowrl.runs.open_run import load_run
from flowrl.training import checkpoint

TUNES = ("lora", "full")
SHARDED = (
    "image={height: 32, width: 32}",
    "kl={fn: transition_kl, beta: 0.1}",
    "optimizer.lr=1e-3",
    "train.prompts=2",
    "train.micro_batch=2",
    "eval={steps: 2, images: 1}",
    "samples.prompts=1",
    "select={fn: fraction, share: 0.5}",
    "train.iterations=2",
    "checkpoint.every=1",
)
WHOLE = {"weight": torch.randn(7, 3), "bias": torch.randn(7)}


def sharded_command(folder: Path, run: str, tune: str) -> list[str]:
    """Train a tiny SD3 with three held-out prompts."""
    options = f"path: {folder}/sd3, t5: false, max_sequence_length: 1, tune: {tune}"
    words = command(folder, run, f"model={{fn: sd3, {options}}}", *SHARDED)
    test = folder / "test.jsonl"
    test.write_text("".join(test.read_text().splitlines(keepends=True)[:3]))
    return words


def groups_command(folder: Path, run: str) -> list[str]:
    """Train a loss that compares the images of a prompt: two steps of one prompt each, so that in
    each step one process of two has nothing to do but to call the network along."""
    axes = (
        "select=[]",
        "kl=null",
        "segment={fn: prompt}",
        "likelihood={fn: forward, draws: 2, times: grid, last: 3, shared: true}",
        "loss={fn: crd}",
        "slow={fn: ramp, slope: 0.1, limit: 0.5}",
        "train.updates=2",
    )
    return [*sharded_command(folder, run, "lora"), *axes]


def experts_command(folder: Path, run: str) -> list[str]:
    """Train both experts of a tiny Wan 2.2, for images."""
    options = f"path: {folder}/wan, frames: 1, max_sequence_length: 8, tune: full, guidance: 2.0"
    small = ("train.micro_batch=1", "train.group=2")
    return command(folder, run, f"model={{fn: wan, {options}}}", *SHARDED, *small)


def context_command(folder: Path, run: str, runtime: str) -> list[str]:
    """Train a tiny Wan on videos of 8 tokens. With a large eps AdamW steps along the gradient
    itself, and does not make much of rounding where it is near 0."""
    options = f"path: {folder}/wan, frames: 5, max_sequence_length: 8, guidance: 2.0"
    model = f"model={{fn: wan, {options}, tune: full, runtime: {runtime}}}"
    more = ("rewards.red.frames=mean", "rewards.strict.frames=mean", "train.group=2")
    return command(folder, run, model, *SHARDED, *more, "optimizer.lr=0.3", "optimizer.eps=1.0")


def stopped(run: Path, name: str) -> Path:
    """Copy a run without its last checkpoint."""
    target = run.with_name(name)
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("000002"))
    return target


class Both(NamedTuple):
    """What two processes answered, by job; runs of one and of two are in `folder`."""

    folder: Path
    two: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Do all there is to do, in this process and in one pair of processes."""
    home = tmp_path_factory.mktemp("both")
    jobs: dict[str, dict[str, Any]] = {}
    for tune in TUNES:
        tiny_sd3(home / tune / "sd3")
        assert commanded(sharded_command(home / tune, "one", tune))["code"] == 0
        jobs[tune] = {"argv": sharded_command(home / tune, "two", tune), "env": FSDP}
    shutil.copytree(home / "lora" / "sd3", home / "groups" / "sd3")
    assert commanded(groups_command(home / "groups", "one"))["code"] == 0
    jobs["groups"] = {"argv": groups_command(home / "groups", "two"), "env": FSDP}
    tiny_wan22(home / "experts" / "wan")
    assert commanded(experts_command(home / "experts", "one"))["code"] == 0
    jobs["experts"] = {"argv": experts_command(home / "experts", "two"), "env": FSDP}
    tiny_wan(home / "context" / "wan")
    for run, runtime in (("one", "{}"), ("two", "{context_parallel: 2, checkpointing: true}")):
        words = context_command(home / "context", run, runtime)
        jobs[f"context {run}"] = {"argv": words}
    assert commanded(jobs.pop("context one")["argv"])["code"] == 0
    # from shares, and from whole tensors
    copy = [str(home / "lora" / "two"), str(home / "lora" / "stopped"), "000002"]
    jobs["shares"] = {"argv": resume(home / "lora" / "stopped"), "copy": copy, "env": FSDP}
    whole = stopped(home / "full" / "one", "one stopped")
    jobs["whole"] = {"argv": resume(whole), "env": FSDP}
    # what is held, and what is read
    jobs["held"] = {"call": "shardkit.held", "args": [str(home / "full" / "sd3")], "env": FSDP}
    (home / "three").mkdir()
    write_three(home / "three", WHOLE)
    jobs["three"] = {"call": "shardkit.from_three", "args": [str(home / "three")], "env": FSDP}
    return Both(home, pair(jobs, home))


@pytest.mark.integration
@pytest.mark.parametrize("tune", TUNES)
def test_fsdp_makes_the_updates_of_one_process(both: Both, tune: str) -> None:
    """A tiny SD3: weights, averages and evaluations of two sharded processes, also after a stop and
    a resume from shares (lora) or from the whole tensors of one process (full).

    AdamW divides by the root of a mean square that starts near 0, so a difference in the last bit
    of a gradient shows at the scale of the rate: weights are compared at a hundredth of it. A KL
    needs the weights from before training, a process of two has a decision less than the other in
    some updates, and of three held-out prompts one has one.
    """
    runs = {"two": tune, **({"one stopped": "whole"} if tune == "full" else {"stopped": "shares"})}
    one = both.folder / tune / "one"
    for name, job in runs.items():
        run = both.folder / tune / name
        assert [answer["said"] for answer in both.two[job] if answer["code"]] == []
        same_weights(one, run, "000002", ["current", "ema", "ref", "optimizer"], 1e-5)
        same_rows(one, run, "eval.jsonl", near=1e-4)
    end = one / "checkpoints" / "000002"
    ref, current = (checkpoint.load(end)[0][name] for name in ("ref", "current"))
    assert max((current[key] - ref[key]).abs().max().item() for key in ref) > 1e-3


@pytest.mark.integration
def test_groups_stay_whole_where_a_process_has_none(both: Both) -> None:
    """Its idle call adds nothing and is refused by no loss; weights as above."""
    assert [answer["said"] for answer in both.two["groups"] if answer["code"]] == []
    one, two = (both.folder / "groups" / name for name in ("one", "two"))
    same_weights(one, two, "000002", ["current", "ema", "optimizer"], 1e-5)
    files, _ = checkpoint.load(two / "checkpoints" / "000002")
    assert max(abs(t - files["slow"][k]).max() for k, t in files["current"].items()) > 1e-4


@pytest.mark.integration
def test_both_experts_are_shared_out(both: Both) -> None:
    """Wan 2.2: a decision above the boundary is the first network's, one below the second's, and
    the two processes have other ones in a call. As above, and both networks have moved."""
    assert [answer["said"] for answer in both.two["experts"] if answer["code"]] == []
    one, two = (both.folder / "experts" / name for name in ("one", "two"))
    same_weights(one, two, "000002", ["current", "ema", "optimizer"], 1e-5)
    same_rows(one, two, "eval.jsonl", near=1e-4)
    files, _ = checkpoint.load(two / "checkpoints" / "000002")
    for name in ("transformer.", "transformer_2."):
        moved = [abs(t - files["ref"][k]).max() for k, t in files["current"].items() if name in k]
        assert max(moved) > 1e-3


@pytest.mark.integration
def test_two_processes_compute_each_sample_together(both: Both) -> None:
    """Each has half of the tokens and of the heads, the same prompts and the same noise; weights,
    metrics and evaluations are those of one process without checkpointing, but for rounding."""
    answers = both.two["context two"]
    assert [answer["said"] for answer in answers if answer["code"]] == []
    one, two = (both.folder / "context" / name for name in ("one", "two"))
    same_weights(one, two, "000002", ["current", "ema", "optimizer"], 1e-5)
    same_rows(one, two, "eval.jsonl", near=1e-4)
    files, _ = checkpoint.load(two / "checkpoints" / "000002")
    assert max(abs(t - files["ref"][k]).max() for k, t in files["current"].items()) > 1e-3


@pytest.mark.integration
def test_no_process_reads_or_holds_the_whole_network(both: Both) -> None:
    """Each holds half of the numbers, but for tensors of an odd number of rows; the weights are
    those of the file."""
    folder = both.folder / "full" / "sd3" / "transformer"
    stored = load_file(folder / "diffusion_pytorch_model.safetensors")
    answers = both.two["held"]
    assert sum(answer["mine"] for answer in answers) == answers[0]["all"]
    assert max(answer["mine"] for answer in answers) < 0.55 * answers[0]["all"]
    want = {name: tensor.double().sum().item() for name, tensor in stored.items()}
    assert answers[0]["sums"] == answers[1]["sums"] == pytest.approx(want)


@pytest.mark.integration
def test_a_run_in_shares_goes_on_and_is_opened_by_one_process(both: Both) -> None:
    """At the end of both ways stand the weights that one process has."""
    home = both.folder / "full"
    alone = stopped(home / "two", "two stopped")
    assert commanded(resume(alone))["code"] == 0
    same_weights(home / "one", alone, "000002", ["current", "ema", "ref", "optimizer"], 1e-5)
    run = load_run(home / "two", weights="ema", iteration=2, plugins=["toykit"])
    want = load_file(home / "one" / "checkpoints" / "000002" / "ema.safetensors")
    for name, tensor in run.model.trainable().items():
        torch.testing.assert_close(tensor.detach(), want[name], rtol=0, atol=1e-5)
    # export and sample
    lora, out = str(both.folder / "lora" / "two"), both.folder / "exported"
    for words in (
        ["export", lora, "--out", str(out)],
        ["sample", lora, "red", "--out", f"{out}.png"],
    ):
        answer = commanded([*words, "--plugin", "toykit"])
        assert answer["code"] == 0, answer["said"]
    assert (out / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.integration
def test_shares_are_what_torch_takes_them_for(both: Both, tmp_path: Path) -> None:
    """torch's own tool joins them to the tensors that we read; and shares that three processes
    would have written, here by hand, are read by two."""
    folder = both.folder / "full" / "two" / "checkpoints" / "000002"
    shares = sorted(folder.glob("current-*.safetensors"))
    assert [file.name[-14:-12] for file in shares] == ["02", "02"]
    for name in ("in", "out"):
        (tmp_path / name).mkdir()
    for file in shares:
        shutil.copy(file, tmp_path / "in")
    want = checkpoint.load(folder)[0]["current"]
    consolidate_safetensors_files(
        str(tmp_path / "in"), str(tmp_path / "out"), fqn_to_index_mapping=dict.fromkeys(want, 1)
    )
    (joined,) = (tmp_path / "out").glob("*.safetensors")
    assert same_files({"current": load_file(joined)}, {"current": want})
    for answer in both.two["three"]:
        rows = {name: torch.tensor(values) for name, values in answer["rows"].items()}
        assert same_files({"": rows}, {"": WHOLE})


@pytest.mark.integration
def test_a_share_that_is_missing_or_torn_is_named(both: Both, tmp_path: Path) -> None:
    folder = both.folder / "full" / "two" / "checkpoints" / "000002"
    for name, damage in {"gone": Path.unlink, "torn": lambda f: f.write_bytes(b"1")}.items():
        copy = shutil.copytree(folder, tmp_path / name / "000002")
        damage(copy / "ema-00002-of-00002.safetensors")
        with pytest.raises(CheckpointError, match="ema-00002-of-00002.safetensors: (torn|cannot)"):
            checkpoint.load(copy)
    # nor does a manifest help that does not know of it
    copy = shutil.copytree(folder, tmp_path / "less" / "000002")
    for file in ("ema-00001-of-00002.safetensors", "manifest.json"):
        (copy / file).unlink()
    checkpoint._seal(copy)
    with pytest.raises(CheckpointError, match="expected shares of .* numbers"):
        checkpoint.load(copy)
