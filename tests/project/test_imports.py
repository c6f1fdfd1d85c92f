"""The direction of imports, read from the source: a room may use those below it, never one
above."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import flowrl

ROOT = Path(__file__).resolve().parents[2]

BELOW = {
    "core": "",
    "config": "core",
    "algorithms": "core",
    "models": "core",
    "techniques": "core algorithms",
    "evaluation": "core config algorithms models",
    "training": "core config algorithms models evaluation",
    "cost": "core config algorithms models evaluation training",
    "doctor": "core config algorithms models evaluation training cost",
    "runs": "core config algorithms models evaluation training cost",
    "api": "core config algorithms models evaluation training cost doctor runs",
    "cli": "core config algorithms models evaluation training cost doctor runs",
}
"""Room of flowrl/ -> the rooms that it may import."""

REWARDS = {
    "geneval": "flowrl.evaluation.suites",
    "t2i_compbench": "flowrl.evaluation.suites.geneval",
    "_detectors": "flowrl.evaluation.suites",
    "shapes": "flowrl.evaluation.suites.shapes",
    "moving_shapes": "flowrl.evaluation.suites.moving_shapes",
    "shapes_edit": "flowrl.evaluation.suites.shapes",
    "soft_shapes": "flowrl.evaluation.suites.shapes",
    "votes": "flowrl.evaluation.votes",
    "remote": "flowrl.config flowrl.evaluation.reward_call",
}
"""File or folder of rewards/ -> what it may import of flowrl besides flowrl.core."""

TORCH_ONLY = (
    "flowrl.algorithms",
    "flowrl.techniques",
    "flowrl.core.types",
    "flowrl.core.noise_path",
)
LIGHT = {"torch", "numpy", "PIL"}  # what a reward may import before it is made
BY_NAME = {"flowrl", "flowrl.config.axes", "flowrl.core.shipped_files"}
BY_NAME |= {"flowrl.training.parts", "flowrl.models.options", "rewards.win_rate"}
"""Who imports by name: the parts that a config brings in are of two rooms, adapters are known by
the class of their pipeline, and the last one's judge is a reward."""


class Edge(NamedTuple):
    """One import statement."""

    source: str  # module that imports: "flowrl.algorithms.credit.advantages"
    target: str  # what it imports: "flowrl.core.types", "torch.nn.functional"
    line: int
    late: bool  # not run when the module is imported: inside a function or under TYPE_CHECKING


def modules(package: str) -> dict[str, Path]:
    """Return {dotted name: file} of a package of this repository."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return {n.removesuffix(".__init__"): f for n, f in zip(names, files, strict=True)}


KNOWN = {**modules("flowrl"), **modules("rewards")}
WHOLE = {*KNOWN, "torch.distributed"}
DISTRIBUTED = ("flowrl.core.processes", "flowrl.core.shards")


def edges(module: str, text: str) -> Iterator[Edge]:
    """Yield every import in the source `text`, also those in functions and under TYPE_CHECKING."""

    def visit(node: ast.AST, late: bool) -> Iterator[Edge]:
        for child in ast.iter_child_nodes(node):
            for name in _targets(child):
                whole = _whole(module, name)
                yield Edge(module, whole, child.lineno, late)  # type: ignore[attr-defined]
            yield from visit(child, late or _runs_later(child))

    yield from visit(ast.parse(text), False)


@cache
def edges_of(module: str) -> tuple[Edge, ...]:
    """Return the imports of a module of this repository."""
    return tuple(edges(module, KNOWN[module].read_text(encoding="utf-8")))


def _whole(module: str, name: str) -> str:
    """Write a relative import inside rewards/ with its whole name, and mark an absolute one: a user
    may have a module of that name, and ours then goes by another."""
    if not module.startswith("rewards"):
        return name
    if not name.startswith("."):
        return f".{name}" if name.partition(".")[0] == "rewards" else name
    file = KNOWN.get(module)
    package = module.split(".")[: None if file and file.name == "__init__.py" else -1]
    rest = name.lstrip(".")
    up = len(name) - len(rest) - 1
    return ".".join([*package[: len(package) - up], rest])


def _runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and not node.orelse:
        return ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        # an imported name may be a module: from flowrl.training import checkpoint
        inside = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in WHOLE else base for name in inside]
    if isinstance(node, ast.Attribute) and node.attr == "distributed":
        return ["torch.distributed"] if ast.unparse(node) == "torch.distributed" else []
    return []


def room(module: str) -> str:
    """Return "algorithms" for "flowrl.algorithms.credit.advantages", "" for "flowrl"."""
    return module.split(".")[1] if "." in module else ""


def problem(edge: Edge) -> str | None:
    """Say what is wrong with an import, or return None."""
    top = edge.target.partition(".")[0]
    if edge.target.startswith("."):
        return "relative inside rewards/, with the whole name elsewhere"
    if edge.target.startswith("torch.distributed") and edge.source not in DISTRIBUTED:
        return "only processes.py and shards.py of flowrl/core import torch.distributed"
    if top == "flowrl":
        return _problem_with_flowrl(edge)
    if top == "rewards":
        return _problem_with_rewards(edge)
    if top in sys.stdlib_module_names:
        return None
    if edge.source.startswith("rewards") and top not in LIGHT and not edge.late:
        return "a heavy import of a reward belongs into its class, in the method that needs it"
    if edge.source.startswith(TORCH_ONLY) and top != "torch":
        return "torch only"
    return None


def _problem_with_flowrl(edge: Edge) -> str | None:
    own, target = room(edge.source), room(edge.target)
    if edge.source == "flowrl":
        return None if edge.late or edge.target == "flowrl.core.version" else "late only"
    if edge.source == "flowrl.__main__":  # python -m flowrl
        return None if edge.target.startswith("flowrl.cli.") else "only the command line"
    if edge.source.startswith("rewards"):
        extra = REWARDS.get(own, "").split()
        fine = target == "core" or any(edge.target.startswith(name) for name in extra)
        return None if fine else f"rewards/{own} may use flowrl.core {' '.join(extra)}"
    if own not in BELOW:
        return f"flowrl/{own} is no room"
    return None if target in (own, *BELOW[own].split()) else f"{own} may use {BELOW[own] or 'none'}"


def _problem_with_rewards(edge: Edge) -> str | None:
    own, target = room(edge.source), room(edge.target)
    if edge.source.startswith("rewards") and (target == own or target.startswith("_")):
        return None
    return "rewards come by name, through the config; only rewards share rewards/_*"


@pytest.mark.parametrize("module", sorted(KNOWN))
def test_every_import_is_allowed(module: str) -> None:
    found = [(edge, problem(edge)) for edge in edges_of(module)]
    assert not [f"line {edge.line}: {edge.target}: {wrong}" for edge, wrong in found if wrong]


def test_the_rooms_are_these_and_go_one_way() -> None:
    folders = {path.name for path in (ROOT / "flowrl").iterdir() if path.is_dir()}
    assert folders - {"__pycache__", "_data"} == set(BELOW)
    above: set[str] = set()
    for row, names in BELOW.items():
        assert set(names.split()) <= above, f"{row} comes before {set(names.split()) - above}"
        above.add(row)


def test_no_circle_between_modules() -> None:
    graph: dict[str, set[str]] = {}
    for name in KNOWN:
        found = {edge.target for edge in edges_of(name)}
        graph[name] = found & set(KNOWN) - {name}
    # a circle raises CycleError
    assert len(list(TopologicalSorter(graph).static_order())) == len(KNOWN)


def test_only_six_files_import_by_name() -> None:
    texts = {name: file.read_text(encoding="utf-8") for name, file in KNOWN.items()}
    named = {n for n, text in texts.items() if "import_module" in text or "__import__" in text}
    assert named == BY_NAME


def test_the_face_hands_out_what_it_lists() -> None:
    handed_out = {name: getattr(flowrl, name) for name in flowrl.__all__}
    homes = {name: thing.__module__ for name, thing in handed_out.items() if callable(thing)}
    assert all(home.startswith("flowrl.") for home in homes.values())
    assert set(flowrl.__all__) <= set(dir(flowrl))
    # a name that is also a room's stays a function whatever is imported
    rooms = set(handed_out) & set(BELOW)
    for name in rooms:
        importlib.import_module(f"flowrl.{name}")
        assert getattr(flowrl, name) is handed_out[name] and callable(handed_out[name])
    assert rooms == {"doctor"}


def test_importing_flowrl_is_light() -> None:
    code = "import sys, flowrl; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_scripts_leave_processes_to_flowrl() -> None:
    for file in (ROOT / "scripts").rglob("*.py"):
        found = [edge.target for edge in edges("scripts", file.read_text(encoding="utf-8"))]
        assert [t for t in found if t.startswith("torch.distributed")] == [], file.name


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("flowrl.core.types", "from flowrl.config.load import Config"),
        ("flowrl.core.noise_path", "def f():\n    from flowrl.config.load import Config"),
        ("flowrl.core.noise_path", "if TYPE_CHECKING:\n    from flowrl.models import toy"),
        ("flowrl.models.toy", "from flowrl.algorithms import transitions"),
        ("flowrl.algorithms.credit.advantages", "from ..core.types import Tree"),
        ("flowrl.algorithms.penalties", "import numpy as np"),
        ("flowrl.algorithms.penalties", "from flowrl.config.load import Config"),
        ("flowrl.algorithms.penalties", "from flowrl.techniques import selections"),
        ("flowrl.training.trainer", "from flowrl.techniques.selections import spread"),
        ("flowrl.techniques.selections", "from flowrl.models import toy"),
        ("flowrl.training.trainer", "import flowrl"),
        ("flowrl.training.trainer", "from flowrl.runs.log import RunLogger"),
        ("flowrl.training.trainer", "from flowrl import Trainer"),
        ("flowrl", "from flowrl.training.trainer import Trainer"),
        ("flowrl.training.trainer", "from rewards.shapes import shapes"),
        ("rewards.new", "from .shapes import shapes"),
        ("rewards.remote.client", "from ..vlm.client import api_key"),
        ("rewards.new", "from rewards._common.scorer import to_pil"),
        ("flowrl.training.trainer", "from rewards._common.scorer import to_pil"),
        ("flowrl.training.trainer", "import torch.distributed as dist"),
        ("flowrl.training.trainer", "from torch import distributed"),
        ("flowrl.training.trainer", "import torch\ntorch.distributed.barrier()"),
        ("flowrl.brand_new", "from flowrl.core.types import Tree"),
        ("rewards.new", "from flowrl.evaluation.suites.shapes.checker import check"),
        ("rewards.new", "from flowrl.config.sections import Share"),
        ("rewards.new", "import open_clip"),
        ("rewards.new", "class new:\n    import transformers"),
    ],
)
def test_a_wrong_import_is_found(module: str, text: str) -> None:
    assert [edge for edge in edges(module, text) if problem(edge)]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("flowrl.core.processes", "import torch.distributed as dist"),
        ("flowrl.algorithms.credit.new", "from flowrl.algorithms.forest import subtree_mean"),
        ("flowrl.algorithms.penalties", "import math\nfrom torch.nn.functional import mse_loss"),
        ("flowrl", "def f():\n    from flowrl.training.trainer import Trainer"),
        ("rewards.new", "from ._common.scorer import to_pil"),
        ("rewards.vlm.judge", "from ..vlm.client import api_key"),
        ("rewards.new", "from flowrl.core.errors import ConfigError\nimport numpy"),
        ("rewards.new", "class new:\n    def __init__(self):\n        import open_clip"),
        ("rewards.remote.server", "from flowrl.config.load import Config"),
    ],
)
def test_a_good_import_passes(module: str, text: str) -> None:
    assert not [edge for edge in edges(module, text) if problem(edge)]
