"""The command line, mostly called in this process: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from tiny import tiny_sd3
from toykit import write_toy

from flowrl import cli
from flowrl.cli import main

pytestmark = pytest.mark.integration
TESTS = Path(__file__).parent
TOY = ["--plugin", "toykit"]
Failing = Callable[..., str]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with prompts, toy.yaml and one finished run of 2 iterations."""
    folder = tmp_path_factory.mktemp("home")
    write_toy(folder)
    assert main(["train", f"{folder}/toy.yaml", "train.iterations=2", "--run", f"{folder}/run", "--quiet", *TOY]) == 0
    return folder


@pytest.fixture
def failing(capsys: pytest.CaptureFixture[str]) -> Failing:
    """Return a function that runs a command, expects exit code 2 and gives back its one message."""

    def check(*argv: str | Path) -> str:
        capsys.readouterr()
        assert main([str(arg) for arg in argv]) == 2
        out, error = capsys.readouterr()
        assert "Traceback" not in error and error.startswith("\nflowrl: ") and error.count("flowrl: ") == 1
        assert len(error.strip()) > 20 and error.endswith("\n") and out == ""
        return error

    return check


def spawn(*argv: str | Path, **options: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    environment.pop("PYTHONUNBUFFERED", None)  # it would hide what is only written when the process ends
    command = [sys.executable, "-m", "flowrl.cli", *map(str, argv)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


# --- what works ------------------------------------------------------------------------------------------------------


def test_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    assert "shapes/flow_grpo" in capsys.readouterr().out.split()


def test_dry_run_prints_the_plan_and_trains_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overrides may stand before and after options; what is printed is a config that loads."""
    monkeypatch.chdir(tmp_path)
    argv = ["train", f"{home}/toy.yaml", "train.lr=1e-4", "--dry-run", "--seed", "9", "train.group=6", *TOY]
    assert main(argv) == 0
    out = capsys.readouterr().out
    text = out[: out.index("\n4 iterations")]
    config = yaml.safe_load(text)
    assert (config["train"]["lr"], config["train"]["group"], config["seed"]) == (1e-4, 6, 9)
    assert "2 prompts x 6 pictures = 12 pictures from 12 initial noises, 4 steps" in out
    assert "36 decisions from 36 states / 2 updates = 18 states per update, in 3 micro-batches of up to 8" in out
    assert list(tmp_path.iterdir()) == []


def test_train_writes_a_run(home: Path) -> None:
    assert json.loads((home / "run" / "summary.json").read_text())["iterations"] == 2
    assert yaml.safe_load((home / "run" / "config.yaml").read_text())["train"]["iterations"] == 2


def test_progress_goes_to_stderr(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", f"{home}/toy.yaml", "--run", f"{tmp_path}/run", "train.iterations=1", "eval.images=1", *TOY]
    assert main(argv) == 0
    out, error = capsys.readouterr()
    assert out == "" and "toy: 1 iterations, 24 trained numbers" in error
    assert "held out after 0 iterations: red " in error and "iteration 1/1" in error
    assert "all (red)" in error and f"{tmp_path}/run/report.html" in error


def test_default_folders_are_numbered(tmp_path: Path) -> None:
    assert cli._free(tmp_path / "toy") == tmp_path / "toy"
    for taken in ("toy", "toy-2"):
        (tmp_path / taken).mkdir()
        (tmp_path / taken / "config.yaml").touch()
    assert cli._free(tmp_path / "toy") == tmp_path / "toy-3"


def test_eval(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run and its checkpoint: its own last evaluation again. Of a config: the base model, the run's first."""
    before, after = (json.loads(line) for line in (home / "run" / "eval.jsonl").read_text().splitlines())
    report = tmp_path / "report.json"
    for target, want, said in (
        (home / "run", after, "run at iteration 2"),
        (home / "run" / "checkpoints" / "000002", after, "000002 at iteration 2"),
        (home / "toy.yaml", before, "the base model"),
    ):
        assert main(["eval", str(target), "--json", str(report), *TOY]) == 0
        got = json.loads(report.read_text())
        assert got.pop("target") == str(target) and {"iteration": want["iteration"], **got} == want
        out = capsys.readouterr().out
        assert said in out and f"{want['red']:.3f}" in out and "mean over tasks" in out
    assert before["red"] != after["red"]


def test_eval_options(home: Path, tmp_path: Path) -> None:
    options = ["--images", "1", "--steps", "2", "--seed", "5", "--weights", "current", "--set", "eval.batch=3"]
    (tmp_path / "p.txt").write_text("a dot\n")
    report, prompts = str(tmp_path / "r.json"), ["--prompts", f"{tmp_path}/p.txt"]
    assert main(["eval", f"{home}/run", *options, *prompts, "--json", report, *TOY]) == 0
    setting = json.loads(Path(report).read_text())["setting"]
    want = {"height": 16, "width": 16, "steps": 2, "images": 1, "batch": 3, "seed": 5, "tuned": 1.0}
    assert setting == {**want, "prompts": "p", "guidance": None}


def test_sample_and_grid(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "s.png"
    assert main(["sample", f"{home}/run", "a red dot", "a dot", "--images", "3", "--out", str(out), *TOY]) == 0
    assert f"6 pictures of {home}/run at iteration 2: {out}" in capsys.readouterr().out
    with Image.open(out) as image:
        assert image.width > 3 * 96 and image.height > 2 * 96  # three columns, two rows of at least 96 pixels
    assert main(["grid", f"{home}/run", "--out", str(tmp_path / "g.png")]) == 0
    assert (tmp_path / "g.png").read_bytes() == (home / "run" / "grid.png").read_bytes()


def test_bench(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "bench.json"
    argv = ["bench", f"{home}/toy.yaml", "--iterations", "1", "--json", str(report), "train.group=2", *TOY]
    assert main(argv) == 0
    assert json.loads(report.read_text())["images"] == 4 and "overhead ratio" in capsys.readouterr().out


# --- one clear message and exit code 2 -------------------------------------------------------------------------------


def test_wrong_configs(home: Path, failing: Failing) -> None:
    assert "did you mean 'shapes/flow_grpo'" in failing("train", "shapes/flow_grpoo")
    assert "expected a config, such as shapes/flow_grpo" in failing("train")
    assert "--plugin toykit" in failing("train", home / "toy.yaml")
    assert "override 'train.lr=fast': train.lr: expected a number" in failing(
        "train", home / "toy.yaml", "train.lr=fast", *TOY
    )
    assert "train.updates=99" in failing("train", home / "toy.yaml", "train.updates=99", "--run", home / "no", *TOY)
    assert "cannot import nosuchkit" in failing(
        "train", home / "toy.yaml", "model.fn=nosuchkit.m", "--plugin", "nosuchkit"
    )
    assert "bench: expected at least 1 iteration, got 0" in failing(
        "bench", home / "toy.yaml", "--iterations", "0", *TOY
    )


def test_resume_takes_nothing_else(home: Path, failing: Failing) -> None:
    for extra in (["train.lr=1"], ["--seed", "1"], ["--dry-run"], ["--run", "x"], ["--quiet", "train.lr=1"]):
        assert "leave out" in failing("train", "--resume", home / "run", *extra, *TOY)


def test_folders_that_do_not_fit(home: Path, tmp_path: Path, failing: Failing) -> None:
    config = home / "toy.yaml"
    assert "holds a run already" in failing("train", config, "--run", home / "run", *TOY)
    (tmp_path / "file").touch()  # a file where a folder is needed fails for root, too
    assert "cannot write to the run folder" in failing("train", config, "--run", tmp_path / "file" / "run", *TOY)
    assert "expected a run folder with config.yaml" in failing("train", "--resume", tmp_path, *TOY)
    shutil.copy(home / "run" / "config.yaml", tmp_path)
    assert "no whole checkpoint to resume from" in failing("train", "--resume", tmp_path, *TOY)
    assert "no whole checkpoint" in failing("eval", tmp_path, *TOY)
    assert "there is no such checkpoint" in failing("eval", home / "run", "--iteration", "7", *TOY)
    assert "holds no samples" in failing("grid", tmp_path)
    assert "no such folder" in failing("grid", tmp_path / "nowhere")
    assert "at least 1" in failing("sample", home / "run", "a dot", "--images", "0", *TOY)
    assert "cannot write" in failing("sample", home / "run", "a dot", "--out", tmp_path / "file" / "s.png", *TOY)


def test_a_checkpoint_of_another_model(home: Path, tmp_path: Path, failing: Failing) -> None:
    run = Path(shutil.copytree(home / "run", tmp_path / "run"))
    text = (run / "config.yaml").read_text()
    assert "channels: 3" in text
    (run / "config.yaml").write_text(text.replace("channels: 3", "channels: 4"))
    assert "trainable parameters do not fit this model" in failing("train", "--resume", run, *TOY)
    assert "trainable parameters do not fit this model" in failing("eval", run, *TOY)


def test_missing_files(home: Path, tmp_path: Path, failing: Failing) -> None:
    message = failing("train", home / "toy.yaml", "prompts.train=no/such.txt", "--run", tmp_path / "r", *TOY)
    assert "cannot find 'no/such.txt'; looked for" in message
    message = failing("eval", home / "run", "--prompts", tmp_path / "gone.txt", *TOY)
    assert f"cannot find '{tmp_path}/gone.txt'" in message


def test_broken_model_folders(home: Path, tmp_path: Path, failing: Failing) -> None:
    model = tiny_sd3(tmp_path / "model", layers=1)
    weights = model / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    train = ["train", home / "toy.yaml", f"model={{fn: sd3, path: {model}}}", "--run", tmp_path / "run", *TOY]
    assert "diffusion_pytorch_model.safetensors: corrupt or truncated" in failing(*train)
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert "corrupt or truncated" in failing("eval", model)  # a bare folder takes its settings from a shipped config
    assert "no model_index.json in it" in failing("sample", tmp_path / "run", "a dot")


def test_what_argparse_refuses(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv, message in (
        (["train", "x.yaml", "--fast"], "unrecognized arguments: --fast"),
        (["train", "x.yaml", "--quiet", "fast"], "unrecognized arguments: fast"),
        (["grid", "run", "a=b"], "unrecognized arguments: a=b"),
        ([], "required"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2 and message in capsys.readouterr().err


# --- as a process ----------------------------------------------------------------------------------------------------


def test_a_failing_process(tmp_path: Path) -> None:
    out, error = (process := spawn("train", tmp_path / "no.yaml")).communicate(timeout=120)
    assert process.returncode == 2 and out == "" and error.strip().startswith("flowrl: cannot find")
    assert "Traceback" not in error


def test_a_reader_that_goes_away() -> None:
    """As in `flowrl configs | head -0`."""
    read, write = os.pipe()
    os.close(read)
    process = spawn("configs", stdout=write)
    os.close(write)
    assert process.communicate(timeout=120)[1] == "" and process.returncode == 0


def test_ctrl_c_and_resume(tmp_path: Path, failing: Failing) -> None:
    """Stopped in the third iteration of five, with the message of how to go on; resumed here, it ends as without.

    The reward waits in its fourth call (the first is the evaluation before training) until it may go on, so that the
    signal always comes in the same iteration.
    """
    config, go = write_toy(tmp_path), tmp_path / "go"
    options = [f"rewards.red={{fn: toykit.gate, file: {go}, call: 4}}", "train.iterations=5", *TOY]
    assert main(["train", str(config), *options, "--run", f"{tmp_path}/whole", "--quiet"]) == 0
    go.touch()
    process = spawn("train", config, *options, "--run", tmp_path / "run")
    until = time.monotonic() + 300
    while not go.with_suffix(".reached").exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    go.unlink()
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    assert f"flowrl: stopped after iteration 3, saved {tmp_path}/run/checkpoints/000003; go on with: " in error
    command = error.rsplit("go on with: ", 1)[1].split()
    assert command == ["flowrl", "train", "--resume", f"{tmp_path}/run", "--plugin", "toykit"]
    assert "Traceback" not in error
    torch.manual_seed(3)
    assert main([*command[1:], "--quiet"]) == 0
    for name in ("metrics.jsonl", "eval.jsonl", "grid.png", "checkpoints/000005/current.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    for name in ("ema", "optimizer"):
        file = Path("checkpoints") / "000005" / f"{name}.safetensors"
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), name
