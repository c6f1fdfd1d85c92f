"""The command line, called in this process: what it prints, what it writes, and its exit codes.

tests/cli/test_process.py has what needs a process of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tiny import tiny_sd3

from flowrl.cli import output
from flowrl.cli.main import GROUPS, main
from flowrl.config.load import load_config
from flowrl.core.prompts import load_prompts, prompts_hash
from flowrl.core.shipped_files import list_configs, resource
from flowrl.runs.open_run import open_target

pytestmark = pytest.mark.integration
WEIGHTS = ("ema", "current", "base")
TOY = ["--plugin", "toykit"]
Failing = Callable[..., str]


@pytest.fixture
def failing(capsys: pytest.CaptureFixture[str]) -> Failing:
    """Return a function that runs a command, expects exit code 2 and gives back its one message."""

    def check(*argv: str | Path) -> str:
        capsys.readouterr()
        assert main([str(arg) for arg in argv]) == 2
        out, error = capsys.readouterr()
        assert error.startswith("\nflowrl: ") and error.count("flowrl: ") == 1
        assert "Traceback" not in error and out == ""
        assert len(error.strip()) > 20 and error.endswith("\n")
        return error

    return check


# --------------------------------------------------------------------------------------- what works


def test_the_help_lists_every_command_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for group, commands in GROUPS.items():
        assert group in text
        assert [name for name in commands if not re.search(rf"│ {name} ", text)] == []


@pytest.mark.parametrize("name", [name for group in GROUPS.values() for name in group])
def test_every_command_explains_each_of_its_arguments(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"Usage: flowrl {name}" in text
    options = re.findall(r"^│ (?:\* +)?(--[\w-]+)(?: +-h)? +(?:\S+)  (.*)│$", text, re.MULTILINE)
    assert options and all(words.strip() for _, words in options)
    assert "bool" not in text.lower()  # a flag takes no value


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from flowrl.core.version import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"flowrl-diffusion {__version__}\n"


def test_a_shipped_config_is_listed_printed_and_can_be_trained_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From another folder, so that the paths in it are found among the shipped files."""
    assert main(["configs"]) == 0
    assert capsys.readouterr().out.split() == list_configs()
    assert main(["configs", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == list_configs()
    assert main(["configs", "shapes/vgpo"]) == 0
    text = capsys.readouterr().out
    assert text == resource("configs/shapes/vgpo.yaml").read_text(encoding="utf-8")
    (tmp_path / "my.yaml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert load_config("my.yaml").to_dict() == load_config("shapes/vgpo").to_dict()


def test_the_shell_completes_commands_and_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the script does that --install-completion writes for bash; also YAML files that are
    here."""
    (tmp_path / "shapes-mine.yaml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_FLOWRL_COMPLETE", "complete_bash")
    for line, wanted in (
        ("flowrl co", {"compare", "configs"}),
        ("flowrl train shapes/vg", {"shapes/vgpo"}),
        ("flowrl train shapes-", {"shapes-mine.yaml"}),
        ("flowrl train shapes/vgpo --re", {"--resume", "--rehearse"}),
    ):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        with pytest.raises(SystemExit) as done:
            main([])
        assert set(capsys.readouterr().out.split()) == wanted and done.value.code == 0


def test_the_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Printed, or written to a file; tests/config/test_schema.py knows what has to be in it."""
    assert main(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["type"] == "object" and "plan" in printed["required"]
    assert main(["schema", "--out", f"{tmp_path}/s.json"]) == 0
    assert json.loads((tmp_path / "s.json").read_text(encoding="utf-8")) == printed


def test_dry_run_prints_the_plan_and_trains_nothing(
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Overrides may stand before and after options; what is printed is a config that loads."""
    monkeypatch.chdir(tmp_path)
    overrides = ["optimizer.lr=1e-4", "--dry-run", "--seed", "9", "train.group=6"]
    assert main(["train", f"{home}/toy.yaml", *overrides, *TOY]) == 0
    out = capsys.readouterr().out
    config = yaml.safe_load(out[: out.index("\n4 iterations")])
    assert (config["optimizer"]["lr"], config["train"]["group"], config["seed"]) == (1e-4, 6, 9)
    assert "2 prompts x 6 images = 12 images from 12 initial noises, 4 steps" in out
    assert (
        "36 decisions from 36 states / 2 updates = 18 states per update, in 3 micro-batches of up "
        "to 8" in out
    )
    assert list(tmp_path.iterdir()) == []


def test_progress_goes_to_stderr(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--json -`` prints the summary alone, with the folder, and `report` says it again."""
    options = ["--run", f"{tmp_path}/run", "train.iterations=1", "eval.images=1", "--json", "-"]
    assert main(["train", f"{home}/toy.yaml", *options, *TOY]) == 0
    out, error = capsys.readouterr()
    assert "toy: 1 iterations, 24 trained numbers" in error
    assert "held out after 0 iterations: red " in error and "iteration 1/1" in error
    assert "all (red)" in error and f"{tmp_path}/run/report.html" in error
    summary, told = json.loads((tmp_path / "run" / "summary.json").read_text()), json.loads(out)
    assert told == {**summary, "run": f"{tmp_path}/run"}
    assert main(["report", f"{tmp_path}/run", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == {f"{tmp_path}/run": summary}


def test_eval(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run and its checkpoint: its own last evaluation again. Of a config: the base model, the
    run's first."""
    rows = (home / "whole" / "eval.jsonl").read_text().splitlines()
    before, after = map(json.loads, rows)
    for row in (before, after):  # a run's own evaluations say which of its weights they judged
        assert row["setting"].pop("weights") in ("ema", "current")
    report = tmp_path / "report.json"
    for target, want, said in (
        (home / "whole", after, "whole at iteration 4"),
        (home / "whole" / "checkpoints" / "000004", after, "000004 at iteration 4"),
        (home / "toy.yaml", before, "the base model"),
    ):
        assert main(["eval", str(target), "--json", str(report), *TOY]) == 0
        got = json.loads(report.read_text())
        assert got.pop("target") == str(target)
        # only a run knows its base model's velocity
        assert got | {key: want[key] for key in ("iteration", "drift")} == want
        out = capsys.readouterr().out
        assert said in out and f"{want['red']:.3f}" in out and "mean over tasks" in out
        assert "setting: guidance None, steps 4" in out and ", hash " in out
    assert before["red"] != after["red"]


def test_a_suite_folder_knows_which_weights_drew_it(home: Path, tmp_path: Path) -> None:
    made = [open_target(f"{home}/whole", settings="", weights=w, plugins=TOY[1:]) for w in WEIGHTS]
    says = [target.what.removeprefix(f"{home}/whole at iteration ") for target in made]
    assert says == ["4", "4, current weights", "0"]


def test_eval_options_and_json_alone(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--json -`` prints nothing else."""
    options = ["--images", "1", "--steps", "2", "--seed", "5", "--weights", "current"]
    (tmp_path / "p.txt").write_text("a dot\n")
    prompts = ["--set", "eval.batch=3", "--prompts", f"{tmp_path}/p.txt"]
    assert main(["eval", f"{home}/whole", *options, *prompts, "--json", "-", *TOY]) == 0
    setting = json.loads(capsys.readouterr().out)["setting"]
    want = {"height": 16, "width": 16, "steps": 2, "images": 1, "batch": 3, "seed": 5, "tuned": 1.0}
    known = prompts_hash(load_prompts(tmp_path / "p.txt"))
    about = {"prompts": "p", "count": 1, "prompts_hash": known, "guidance": None}
    assert len(setting.pop("judge")) == 16  # of the source of the plugin's reward
    assert setting == {**want, **about}


def test_a_terminal_hears_how_far_a_command_is(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench` counts its iterations; what cannot be counted says what it does."""
    monkeypatch.setattr(output, "in_terminal", lambda: True)
    assert main(["bench", f"{home}/toy.yaml", "--iterations", "2", "train.group=2", *TOY]) == 0
    assert "0 of 2 iterations\r1 of 2 iterations\r2 of 2 it" in capsys.readouterr().err
    with output.working("counting"):
        pass
    assert "counting" in capsys.readouterr().err
    monkeypatch.setattr(output, "in_terminal", lambda: False)
    with output.working("counting"):
        output.count_up(1, 2)
    assert capsys.readouterr().err == ""


def test_a_log_file_hears_every_thirty_seconds_how_far_a_command_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 20 s: a line after 40 s and after 80 s; the next evaluation counts anew."""
    clock = [0.0]
    monkeypatch.setattr(output, "_told", {})
    monkeypatch.setattr("flowrl.cli.output.time.monotonic", lambda: clock[0])
    for _ in range(2):
        for done in range(1, 6):
            output.count_up(done, 5)
            clock[0] += 20.0
        assert capsys.readouterr().err == "3 of 5 prompts\n5 of 5 prompts\n"


def test_bench(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "bench.json"
    options = ["--iterations", "1", "--json", str(report), "train.group=2", *TOY]
    assert main(["bench", f"{home}/toy.yaml", *options]) == 0
    assert json.loads(report.read_text())["images"] == 4
    assert "images/s" in capsys.readouterr().out


# ---------------------------------------------------------------- one clear message and exit code 2

KIT = " --plugin toykit"
MISTAKES = [
    # configs
    ("train shapes/flow_grpoo", "did you mean 'shapes/flow_grpo'"),
    ("configs shapes/flow_grpoo", "did you mean 'shapes/flow_grpo'"),
    ("configs methods", "methods' is no shipped config"),
    ("configs shapes/vgpo --json -", "leave out the name"),
    ("train", "expected a config, such as shapes/flow_grpo"),
    ("train {home}/toy.yaml", "--plugin toykit"),
    ("bench {home}/toy.yaml --iterations 0" + KIT, "bench: expected at least 1 iteration, got 0"),
    # runs: a resume takes nothing else
    ("train --resume {home}/whole train.group=8" + KIT, "train.group differs from the run in"),
    ("train --resume {home}/whole --seed 1" + KIT, "--resume {home}/whole train.iterations=N"),
    ("train --resume {home}/whole --dry-run" + KIT, "leave out"),
    ("train --resume {home}/whole --run x" + KIT, "leave out"),
    ("train --resume {home}/whole --quiet seed=1" + KIT, "seed differs from the run in"),
    ("train --resume {tmp}" + KIT, "expected a run folder with config.yaml"),
    ("eval runs/gone", "runs/gone: expected a run folder, a checkpoint, a model folder or a"),
    ("eval {home}/whole --iteration 7" + KIT, "there is no such checkpoint"),
    ("eval {home}/whole --prompts {tmp}/gone.txt" + KIT, "cannot find '{tmp}/gone.txt'"),
    ("grid {tmp}/nowhere", "no such folder"),
    ("sample {home}/whole dot --images 0" + KIT, "at least 1"),
    # a file where a folder is needed fails for root, too
    ("sample {home}/whole dot --out {home}/toy.yaml/s.png" + KIT, "cannot write"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_a_mistake_is_one_clear_message(
    home: Path, tmp_path: Path, failing: Failing, line: str, message: str
) -> None:
    places = {"home": home, "tmp": tmp_path}
    assert message.format(**places) in failing(*line.format(**places).split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("trian", "No such command 'trian'; did you mean 'train'?"),
        ("gird x", "No such command 'gird'; did you mean 'grid'"),
        ("train x.yaml --quit", "No such option: --quit; did you mean '--quiet'?"),
        ("train x.yaml --quiet fast", "expected KEY=VALUE, got fast"),
        ("train x.yaml --seed one", "Invalid value for '--seed'"),
        ("eval run --weights emma", "Invalid value for '--weights'"),
        ("eval run --set eval.images", "expected KEY=VALUE, got eval.images"),
        ("grid run a=b", "Got unexpected extra argument(s) (a=b)"),
        ("grid", "Missing argument 'RUN'"),
    ],
)
def test_what_no_command_takes(failing: Failing, line: str, message: str) -> None:
    said = failing(*line.split())
    assert message in said and "--help` lists the arguments" in said


def test_folders_of_models_that_are_broken(tmp_path: Path, failing: Failing) -> None:
    """A bare folder of a model takes its settings from a shipped config."""
    weights = tiny_sd3(tmp_path, layers=1) / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"{weights.name}: corrupt or truncated" in failing("eval", tmp_path)
    (tmp_path / "model_index.json").unlink()
    assert "no model_index.json in it" in failing("sample", tmp_path, "a dot")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, error = capsys.readouterr()
    assert "Usage: flowrl" in out + error and "flowrl: " not in error
