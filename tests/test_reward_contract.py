"""Every file in rewards/ keeps the contract that configs, the loop and the service rely on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
TESTS = Path(__file__).resolve().parent
FILES = sorted(file.name for file in (TESTS.parent / "rewards").glob("[!_]*.py"))


def inspect(package: str, folder: Path) -> dict[str, list[str]]:
    """Return {file: what is wrong with it}, found out in another process."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [sys.executable, str(TESTS / "contractkit.py"), package, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: list(wrongs) for name, wrongs in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def found() -> dict[str, list[str]]:
    return inspect("rewards", TESTS.parent)


@pytest.mark.parametrize("file", FILES)
def test_contract(found: dict[str, list[str]], file: str) -> None:
    assert not found[file], "\n".join([f"rewards/{file}:", *(f"- {wrong}" for wrong in found[file])])


def test_every_file_is_looked_at(found: dict[str, list[str]]) -> None:
    assert list(found) == FILES and "shapes.py" in FILES


# ------------------------------------------------------------------------------------------------- the battery itself

GOOD = '''"""Score nothing, as in 1234.56789."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from flowrl.types import RewardBatch


class {name}:
    """Score pictures [L, 3, H, W] -> [L]."""

    def __init__(
        self, *, url: str, mode: Literal["a", "b"] = "a", options: dict[str, Any] | None = None,
        sides: list[int] | None = None, device: str = "auto", batch: int = 32,
    ) -> None:
        self.mode = mode

    def __call__(self, batch: RewardBatch) -> Tensor:
        """Score each picture."""
        return torch.zeros(len(batch.images))

    def check_record(self, record: dict[str, Any], where: str) -> None:
        """Accept every record."""
'''
# file -> (what of GOOD is replaced, by what, what the battery says)
BAD = {
    "heavy": ("import torch\n", "import safetensors\nimport torch\n", "importing it imports safetensors: move"),
    "again": ("import torch\n", "import safetensors.torch\nimport torch\n", "imports safetensors: move"),
    "broken": ("import torch\n", "import a_package_that_nobody_has\n", "cannot be imported: ModuleNotFoundError"),
    "misnamed": ("class misnamed", "class other", "has no class misnamed of its own"),
    "borrowed": (
        "class borrowed",
        "from fractions import Fraction as borrowed\nclass it",
        "has no class borrowed of its own",
    ),
    "positional": ("self, *, url", "self, url", "arguments that are not keyword-only: url, mode"),
    "starred": ("batch: int = 32,", "batch: int = 32, **more: int", "arguments that are not keyword-only: **more"),
    "untyped": ("url: str", "url", "cannot hold the type of the argument url: none is given"),
    "tensor": ("url: str", "url: Tensor", "cannot hold the type of the argument url"),
    "unknown": ("url: str", "url: Missing", "annotations of __init__ cannot be evaluated"),
    "reserved": ("url: str", "weight: float", "the parameter 'weight' has another meaning in a config"),
    "mistyped": ('mode: Literal["a", "b"] = "a"', "mode: float = float('nan')", "does not reach the arguments mode"),
    "placed": ('"auto"', '"cuda"', "the default of device is 'cuda', not 'auto'"),
    "silent": ('"""Score each picture."""', "", "__call__ has no docstring"),
    "vague": ("[L, 3, H, W] -> [L]", "", "the class docstring names neither shapes nor a range"),
    "sourceless": ("1234.56789", "said", "no docstring names a source"),
    "loose": ("batch: RewardBatch", "batch: Any", "__call__ is not annotated"),
    "record": ("record: dict[str, Any], where: str", "record: dict[str, Any]", "check_record takes (record), the loop"),
    "learner": (
        "def check_record(self, record: dict[str, Any], where: str)",
        "def update(self, batch: RewardBatch)",
        "needs all of",
    ),
}


def test_the_battery_finds_each_fault_alone(tmp_path: Path) -> None:
    """Files that are right but for one line: one complaint each. A library is found in both files that import it."""
    package = tmp_path / "kept"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_helper.py").write_text("not Python")
    (package / "good.py").write_text(GOOD.format(name="good"))
    for name, (old, new, _) in BAD.items():
        text = GOOD.replace("{name}", name)
        assert old in text, name
        (package / f"{name}.py").write_text(text.replace(old, new))
    found = inspect("kept", tmp_path)
    assert found.pop("good.py") == []
    assert {name for name, wrongs in found.items() if len(wrongs) != 1} == set()
    assert {name for name, (*_, message) in BAD.items() if message not in found[f"{name}.py"][0]} == set()
    assert set(found) == {f"{name}.py" for name in BAD}
