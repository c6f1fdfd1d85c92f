"""A line within a second of every command: seconds that a processor worked until the first byte."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toykit import write_toy

from flowrl.cli.main import GROUPS

pytestmark = pytest.mark.integration
TESTS = Path(__file__).parents[1]
# of each command, arguments with which it has something to do; {toy} is a config, {out} a folder
LINES = {
    "doctor": "{toy} --plugin toykit",
    "train": "{toy} --plugin toykit --run {out}/run",
    "compare": "{toy} --plugin toykit --runs {out}/c --out {out}/c.json --nfe 1",
    "tune": "{toy} --plugin toykit --try train.group=2,3 --out {out}/t --nfe 1",
    "estimate": "shapes/flow_grpo --card 24",
    "bench": "{toy} --plugin toykit --iterations 1",
    "pairs": "{out} --out {out}/pairs",
    "eval": "{toy} --plugin toykit",
    "sweep": "{toy} --plugin toykit --suite shapes --count 1",
    "measure": "{out} --measure vendi",
    "sample": "{toy} --plugin toykit dot --out {out}/s.png",
    "grid": "{out}",
    "report": "{out}",
    "view": "{out} --port 0",
    "export": "{out}",
    "score": "--reward jpeg --selftest",
    "serve-rewards": "{toy} --plugin toykit --port 0",
    "configs": "",
    "methods": "",
    "schema": "",
    "new": "reward mine --folder {out}/new",
    "tiny": "sd3 {out}/tiny",
}
MOST = 1.0  # seconds of a processor; a quiet machine takes no longer by the clock


def spent(pid: int) -> float:
    """Return the processor seconds of a process, in user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_every_command_is_here() -> None:
    assert sorted(LINES) == sorted(name for group in GROUPS.values() for name in group)


@pytest.mark.parametrize("name", sorted(LINES))
def test_a_line_within_a_second(name: str, tmp_path: Path) -> None:
    """Also where it is a mistake that is said."""
    line = LINES[name].format(toy=write_toy(tmp_path), out=tmp_path)
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS / "kits")])
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl", name, *line.split()],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    first = os.read(process.stdout.fileno(), 1)
    seconds = spent(process.pid)
    process.kill()
    process.communicate()
    assert first and seconds < MOST, f"{name}: {seconds} s"


def test_train_says_that_it_loads_before_torch_is_imported(tmp_path: Path) -> None:
    """One line, in the first of several processes alone, and none where nobody is to be told. The
    libraries are played, by modules that say when they are imported."""
    for name in ("torch", "scipy"):
        (tmp_path / f"{name}.py").write_text("import sys\nprint(__name__, file=sys.stderr)\n")
    code = (
        "import sys; from flowrl.cli.start_up import say_when_loading as say; say('loading'); "
        "import json, typing; assert 'torch' not in sys.modules; import torch, scipy"
    )
    paths = os.pathsep.join([str(tmp_path), str(TESTS.parent)])
    for rank, said in (("0", "loading\ntorch\nscipy\n"), ("1", "torch\nscipy\n")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": paths, "RANK": rank},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, said)
