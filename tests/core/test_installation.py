"""What is installed: the record of a run, extras, another package of the name, shipped files,
memory that is given back, and what stands for a source."""

from __future__ import annotations

import getpass
import importlib
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flowrl.core import installation as module
from flowrl.core import shipped_files as resources
from flowrl.core.errors import ConfigError, install
from flowrl.core.identity import facts_of_source
from flowrl.core.installation import environment, other_package
from flowrl.core.shipped_files import list_configs, resource
from flowrl.evaluation.preference_pairs import convert_pairs


def test_environment_is_plain_and_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET_TOKEN", "hunter2-hunter2")
    found = environment()
    text = json.dumps(found)
    assert found["python"] == sys.version.split()[0] and found["torch"]
    assert found["cpus"] == os.cpu_count()
    assert "hunter2" not in text and socket.gethostname() not in text
    assert getpass.getuser() not in text.replace(found["platform"], "")


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: `git rev-parse` in a checkout of one commit."""

    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    monkeypatch.setattr(module, "checkout", lambda: tmp_path)
    assert environment()["commit"] is None
    git("init", "-q", ".")
    for name in ("code.py", "assets/results/kept.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    head = git("rev-parse", "HEAD")
    assert environment()["commit"] == head
    # a command may keep what it measured in a file of results, which is no change of the code
    (tmp_path / "assets/results/kept.json").write_text("2")
    assert environment()["commit"] == head
    (tmp_path / "code.py").write_text("2")
    assert environment()["commit"] == f"{head}-dirty"


ROOT = Path(__file__).resolve().parents[2]


def test_it_is_for_a_checkout() -> None:
    assert install("quant") == 'pip install -e ".[quant]" in a checkout of flowrl'


def test_every_extra_that_a_message_names_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [*(ROOT / "flowrl").rglob("*.py"), *(ROOT / "rewards").rglob("*.py")]
    sources = (file.read_text(encoding="utf-8") for file in files)
    named = {name for text in sources for name in re.findall(r"install\(['\"](\w+)['\"]\)", text)}
    assert {"hub", "metrics", "ocr", "pairs", "quant"} <= named
    assert named <= {*project["optional-dependencies"]}


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)  # importing it raises ImportError
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r'read by pyarrow: pip install -e "\.\[pairs\]"'):
        convert_pairs(tmp_path, tmp_path / "out")


SCRIPT = "[console_scripts]\nflowrl = {}\n"


def installed(folder: Path, command: str) -> None:
    """Write what pip leaves of a distribution flowrl 0.2.0."""
    about = folder / "flowrl-0.2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flowrl\nVersion: 0.2.0\n")
    (about / "entry_points.txt").write_text(SCRIPT.format(command))


def test_it_is_named_with_its_place_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "flowrl.train:main")
    monkeypatch.syspath_prepend(tmp_path)
    found = other_package()
    assert found is not None and f"flowrl (0.2.0) is installed in {tmp_path}/flowrl" in found
    assert "`pip uninstall flowrl`" in found and "--no-deps -e .` in a checkout" in found


def test_this_project_under_its_earlier_name_is_not_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path, "flowrl.cli.main:command")
    monkeypatch.syspath_prepend(tmp_path)
    assert other_package() is None


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A working folder, a checkout and a wheel's package folder, each with one file of its own and
    a shared one."""
    out = {
        "cwd": tmp_path / "cwd",
        "checkout": tmp_path / "src",
        "wheel": tmp_path / "src" / "flowrl" / "_data",
    }
    for name, root in out.items():
        for file in (
            f"configs/{name}/one.yaml",
            "configs/shared.yaml",
            f"assets/{name}/prompts.txt",
        ):
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(name)
    monkeypatch.chdir(out["cwd"])
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "src" / "flowrl")
    return out


def test_the_order_is_working_folder_checkout_wheel(places: dict[str, Path]) -> None:
    seen = []
    for name in ("cwd", "checkout", "wheel"):
        found = resource("configs/shared.yaml")
        seen.append(found.read_text())
        (places[name] / "configs/shared.yaml").unlink()
    assert seen == ["cwd", "checkout", "wheel"]


def test_folders_and_absolute_paths(places: dict[str, Path]) -> None:
    assert resource("assets/wheel") == places["wheel"] / "assets/wheel"
    absolute = places["wheel"] / "configs/wheel/one.yaml"
    assert resource(str(absolute)) == absolute == resource(absolute)


def test_missing_lists_where_it_looked_and_near_names(places: dict[str, Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        resource("configs/wheel/onee.yaml")
    message = str(caught.value)
    assert all(str(root / "configs/wheel/onee.yaml") in message for root in places.values())
    assert "did you mean 'configs/wheel/one.yaml'" in message


@pytest.mark.parametrize("path", ["", "  ", "x" * 5000, "configs/\0.yaml", "/nowhere/at/all"])
def test_strange_paths(places: dict[str, Path], path: str) -> None:
    with pytest.raises(ConfigError):
        resource(path)


def test_list_configs_joins_checkout_and_wheel(places: dict[str, Path]) -> None:
    assert list_configs() == ["checkout/one", "shared", "wheel/one"]


def test_site_packages_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site-packages" / "configs").mkdir(parents=True)
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "site-packages" / "flowrl")
    assert resources.checkout() is None
    monkeypatch.setattr(resources, "PACKAGE", tmp_path / "empty" / "flowrl")
    assert resources.checkout() is None


# of 256 MiB in small blocks each 500th stays; prints what the process holds more than before, in
# MiB by the kernel's own count: with the blocks, and once the others are freed
PROGRAM = """
import os
from flowrl.core.devices import free_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

start = resident()
blocks = [bytearray(b"x" * 50_000) for _ in range(5400)]
held = resident() - start
kept = blocks[::500]
del blocks
free_memory()
print(held, resident() - start, len(kept))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's count is read")
def test_freed_blocks_go_back_to_the_system() -> None:
    """In a process of its own: one that has run long takes the blocks from what it holds already.
    Without `free_memory` 239 MiB stay."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    held, left, kept = map(int, run.stdout.split())
    assert held > 200 and left < 60 and kept == 11


# ------------------------------------------------------------------------- what stands for a source


PLAIN = 'def judge(x):\n    text = """# one\n\n    two"""\n    return len(text) * x\n'


def _facts(folder: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """Return what stands for a module with this source."""
    (folder / "judged_here.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    sys.modules.pop("judged_here", None)
    importlib.invalidate_caches()
    found = facts_of_source(importlib.import_module("judged_here").judge)
    return str(found["judged_here"])


@pytest.mark.parametrize(
    ("source", "same"),
    [
        (PLAIN.replace("def", '"""A page."""\ndef', 1), True),
        (PLAIN.replace("    text", '    """Say it."""\n    text', 1), True),
        (PLAIN.replace("    text", "    # as it is\n    text", 1).replace("* x", "* x  # ä"), True),
        (PLAIN.replace("# one", "# 1"), False),
        (PLAIN.replace("\n\n    two", "\n    two"), False),
        (PLAIN.replace("* x", "* x + 1"), False),
        (PLAIN + '\njudge.page = """A text."""\n', False),
    ],
)
def test_comments_and_docstrings_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, same: bool
) -> None:
    before = _facts(tmp_path, monkeypatch, PLAIN)
    assert (_facts(tmp_path, monkeypatch, source) == before) is same


@pytest.mark.parametrize(
    "source",
    [
        'def judge(x):\n    """Ä page."""; return 1\n',
        'def judge(x): "A page."; return 1\n',
        '"""A page."""; judge = lambda x: 1\njudge.__module__ = __name__\n',
    ],
)
def test_code_beside_a_docstring_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    before = _facts(tmp_path, monkeypatch, source)
    assert _facts(tmp_path, monkeypatch, source.replace("1", "2")) != before


def test_a_docstring_that_is_read_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = '"""How good is it?"""\ndef judge(x):\n    return __doc__\n'
    before = _facts(tmp_path, monkeypatch, one)
    assert _facts(tmp_path, monkeypatch, one.replace("good", "bad")) != before
