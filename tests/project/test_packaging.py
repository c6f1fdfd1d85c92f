"""What a user without a checkout gets: the wheel, built from the source distribution as on a
package index."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flowrl.config.overrides import parse_yaml
from flowrl.core.installation import COMMAND, DISTRIBUTION
from flowrl.core.shipped_files import list_configs

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
# of assets/: no run needs them
LEFT_OUT = ("training", "results", "figures")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (file,) = out.glob("flowrl_diffusion-*-py3-none-any.whl")
    return file


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, in a folder named as pip would have it."""
    folder = tmp_path_factory.mktemp("env") / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(site: Path, cwd: Path, *arguments: str) -> str:
    """Run Python far from the checkout, with the wheel before anything that is installed."""
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def data(folder: Path, kind: str) -> dict[str, bytes]:
    """Return the files of configs/ or assets/ that are meant to be shipped, by path."""
    files = [file for file in (folder / kind).rglob("*") if file.is_file()]
    parts = {file.relative_to(folder).as_posix(): file for file in files}
    meant = [name for name in parts if not set(name.split("/")) & set(LEFT_OUT)]
    return {name: parts[name].read_bytes() for name in meant}


@pytest.mark.parametrize("kind", ["configs", "assets"])
def test_the_data_is_whole(site: Path, kind: str) -> None:
    expected, shipped = data(ROOT, kind), data(site / "flowrl/_data", kind)
    assert expected, f"{kind}/ of the checkout is empty"
    assert sorted(shipped) == sorted(expected)
    assert [name for name in expected if shipped[name] != expected[name]] == []


def test_the_code_is_whole_and_nothing_else_is_there(site: Path, wheel: Path) -> None:
    modules = {
        f.relative_to(ROOT).as_posix()
        for part in ("flowrl", "rewards")
        for f in (ROOT / part).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.endswith(".py")} == modules
    # templates and styles, which are read beside the code
    kinds = {".html", ".css", ".md", ".mplstyle"}
    beside = [f for f in (ROOT / "flowrl").rglob("*") if f.suffix in kinds]
    assert len(beside) >= 3 and {f.relative_to(ROOT).as_posix() for f in beside} <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "flowrl",
        "rewards",
    }
    shipped = [name for name in names if not name.startswith("flowrl/training/")]  # a room
    parts = {part for name in shipped for part in name.split("/")}
    assert not parts & {"tests", "__pycache__", *LEFT_OUT}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert wheel.stat().st_size < 100e6  # the largest file that the package index takes


def test_the_assets_that_configs_name_are_shipped(site: Path) -> None:
    named = set()
    for file in (site / "flowrl/_data/configs").rglob("*.yaml"):
        if file.parent.name in ("accelerate", "configs"):
            continue  # of the launcher, the catalogue of methods
        raw = parse_yaml(file.read_text(encoding="utf-8"), str(file))
        named |= {raw["model"].get("path", ""), *raw["prompts"].values()}
    named = {name for name in named if name.startswith("assets/")}
    assert named
    assert [name for name in sorted(named) if not (site / "flowrl/_data" / name).exists()] == []


INSTALLED = """
import json, sys
import flowrl
from flowrl.cli.main import main
from flowrl.config.load import load_config
from flowrl.core.shipped_files import list_configs, resource
for name in {name.partition("/")[0]: name for name in list_configs()}.values():
    load_config(name)
places = [flowrl.__file__, *(str(resource(kind)) for kind in ("configs", "assets"))]
print(json.dumps([places, list_configs()]))
sys.exit(main(sys.argv[1:]))
"""


def test_what_is_installed_finds_its_data_binds_configs_and_trains(
    site: Path, tmp_path: Path
) -> None:
    """One process in a folder without a checkout: a shipped config, only made smaller, and one that
    binds of each folder. The others are the checkout's to the byte, and so is what they name."""
    small = [
        *("train.iterations=1", "train.prompts=2", "train.group=2", "plan.branch=2"),
        *("plan.steps=2", "plan.high=1", "eval.steps=1", "eval.images=1", "eval.every=0"),
        *("samples.prompts=1", "prompts.test=assets/shapes/few.jsonl"),
    ]
    said = run(site, tmp_path, "-c", INSTALLED, "train", "shapes/flow_grpo", *small, "--quiet")
    places, configs = json.loads(said.splitlines()[0])
    home = site / "flowrl"
    assert places == [str(home / name) for name in ("__init__.py", "_data/configs", "_data/assets")]
    assert configs == list_configs() != []
    (summary,) = tmp_path.glob("runs/*/summary.json")
    assert {"before", "after", "gain"} <= json.loads(summary.read_text()).keys()
    (scripts,) = site.glob("flowrl_diffusion-*.dist-info/entry_points.txt")
    assert f"flowrl = {COMMAND}" in scripts.read_text()
    (about,) = site.glob("flowrl_diffusion-*.dist-info/METADATA")
    assert f"Name: {DISTRIBUTION}\n" in about.read_text(encoding="utf-8")
