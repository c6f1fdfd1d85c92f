"""The direction of imports, read from the source: every edge that is not in the tables below is a failure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import flowrl

ROOT = Path(__file__).resolve().parent.parent

# part (a file or folder of flowrl/) -> the parts that it may import. Upper parts come later in the table.
# A row may stand here before its file does.
ALLOWED = {
    part: set(names.split())
    for part, names in {
        "errors": "",
        "types": "",
        "seeds": "",
        "devices": "errors",
        # the path and the samplers
        "flow": "errors types",
        "transitions": "errors types flow",
        "solvers": "errors types flow transitions",
        "samplers": "errors types flow transitions solvers",
        "likelihood": "errors types flow transitions",
        "batches": "errors types flow",
        "updates": "types batches",
        "budget": "errors types samplers",
        # models, rewards' benchmark, credit and losses know nothing of each other
        "resources": "errors",
        "dist": "errors",
        "models": "errors types flow resources devices dist",
        "shapes": "errors",
        "credit": "errors types",
        "losses": "errors types",
        # files and processes
        "prompts": "errors resources",
        "config": "errors resources",
        "weights": "errors",
        "checkpoint": "errors dist",
        "log": "errors resources",
        "figures": "errors",
        "curves": "errors",
        "report": "errors types figures curves",
        # what puts them together; the methods' functions come by name through config, so none of them is named here
        "panel": "errors types config",
        "evaluate": "errors types prompts samplers seeds dist panel",
        "feasible": "errors types flow seeds batches budget samplers config",
        "spread": "types samplers updates credit dist",
        "optimizer": "errors config",
        "loop": "errors types seeds batches updates budget feasible samplers dist spread optimizer prompts config "
        "weights checkpoint log panel evaluate",
        # what a config takes, and the message when that was too much
        "released": "",
        "tracing": "",
        "blueprint": "errors config models released",
        "memory": "errors budget models config feasible blueprint",
        "shadow": "models config evaluate feasible blueprint tracing",
        "estimate": "errors prompts config feasible blueprint memory shadow",
        "advice": "errors config feasible memory estimate",
        "estimate_report": "feasible memory estimate advice",
        "estimate_table": "resources config memory estimate estimate_report",
        "oom": "errors config feasible memory estimate advice",
        "runs": "errors types seeds dist prompts config weights checkpoint log figures curves report evaluate loop oom",
        # configs on equal budgets
        "comparison": "errors",
        "comparison_tables": "comparison",
        "comparison_panels": "curves comparison comparison_tables",
        "comparison_figures": "curves comparison comparison_tables comparison_panels",
        "ledger": "errors config log curves loop",
        "budgeted": "errors config checkpoint log figures curves loop runs ledger",
        "comparison_file": "errors config loop comparison ledger",
        "compare": "errors config feasible loop comparison ledger budgeted comparison_file",
        "compare_command": "errors figures loop comparison comparison_tables comparison_figures ledger budgeted "
        "comparison_file compare",
        "bench": "errors types seeds batches budget samplers dist prompts config log evaluate loop runs",
        "random_model": "errors types devices models config blueprint",
        "performance": "errors types prompts config log feasible loop blueprint memory estimate advice bench "
        "random_model",
        "estimate_command": "errors config loop estimate advice estimate_report",
        "dryrun": "errors prompts config estimate estimate_report",
        "methods": "resources config feasible",
        # what was trained, for other programs
        "export_keys": "errors",
        "export_merge": "errors",
        "model_usage": "config",
        "model_card": "errors models prompts config log curves methods model_usage",
        "export": "errors types devices checkpoint runs export_keys export_merge model_usage model_card",
        "export_command": "export",
        # rewards as a service
        "batching": "errors types panel",
        "wire": "errors batching",
        "service": "errors types batching wire",
        "serve": "errors types config batching wire service",
        "pictures": "errors prompts",
        "damage": "seeds",
        "scoring": "errors types prompts config panel pictures",
        "checks": "errors types seeds evaluate damage scoring",
        "selftest": "errors types shapes prompts scoring checks",
        "scorecard": "errors report scoring",
        "score": "errors prompts report loop pictures scoring selftest scorecard",
        "cli": "errors resources config log report evaluate loop runs bench dryrun methods serve score compare_command "
        "export_command estimate_command oom",
    }.items()
}

# what flowrl/__init__.py hands out, imported when it is asked for
FACE = {"config", "evaluate", "loop", "runs"}

# file of rewards/ -> what it may import besides REWARD
REWARD = {"errors", "types"}
REWARD_EXTRA = {"shapes": {"shapes"}, "_scorer": {"resources", "devices"}}

# part -> the third-party packages that it may import; a part without a row may import any
ONLY = {
    "errors": set(),
    "resources": set(),
    **dict.fromkeys(
        ["types", "flow", "transitions", "solvers", "samplers", "likelihood", "batches", "updates"], {"torch"}
    ),
    **dict.fromkeys(["seeds", "devices", "budget", "credit", "losses", "weights", "tracing"], {"torch"}),
    "dist": {"torch", "accelerate"},
    "prompts": set(),
    "comparison": {"numpy", "scipy"},
    **dict.fromkeys(["comparison_tables", "comparison_file", "compare", "compare_command", "ledger"], set()),
    "config": {"yaml"},
    "checkpoint": {"torch", "safetensors"},
    "shapes": {"torch", "numpy", "scipy"},
    "batching": {"torch"},
    "wire": {"torch", "numpy", "PIL"},
    "service": {"starlette"},
    "serve": {"starlette", "uvicorn"},
}
LIGHT = {"torch", "numpy", "PIL"}  # what a reward may import before it is made


class Edge(NamedTuple):
    """One import statement."""

    source: str  # module that imports: "flowrl.credit.advantages"
    target: str  # what it imports: "flowrl.types", "torch.nn.functional"
    line: int
    late: bool  # not run when the module is imported: inside a function or under TYPE_CHECKING


def modules(package: str) -> dict[str, Path]:
    """Return {dotted name: file} of a package of this repository."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


KNOWN = {**modules("flowrl"), **modules("rewards")}


def edges(module: str, text: str) -> Iterator[Edge]:
    """Yield every import in the source `text`, also those in functions and under TYPE_CHECKING."""

    def visit(node: ast.AST, late: bool) -> Iterator[Edge]:
        for child in ast.iter_child_nodes(node):
            yield from (Edge(module, name, child.lineno, late) for name in _targets(child))  # type: ignore[attr-defined]
            yield from visit(child, late or _runs_later(child))

    yield from visit(ast.parse(text), False)


def _runs_later(node: ast.AST) -> bool:
    if isinstance(node, ast.If) and not node.orelse:
        return ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _targets(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        inside = [f"{base}.{alias.name}" for alias in node.names]  # may name a module: from flowrl import checkpoint
        whole = [*KNOWN, "torch.distributed", "flowrl.__version__"]
        return [name if name in whole else base for name in inside]
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
        return ["torch.distributed"]
    return []


def part(module: str) -> str:
    """Return "credit" for "flowrl.credit.reduce", "" for "flowrl"."""
    return module.split(".")[1] if "." in module else ""


def problem(edge: Edge) -> str | None:
    """Say what is wrong with an import, or return None."""
    top, own = edge.target.partition(".")[0], part(edge.source)
    package = edge.source.partition(".")[0]
    if edge.target.startswith("."):
        return "relative; write the whole name"
    if edge.target.startswith("torch.distributed") and edge.source != "flowrl.dist":
        return "only flowrl/dist.py imports torch.distributed"
    if top == "rewards":
        shared = package == "rewards" and part(edge.target).startswith("_")
        return None if shared else "rewards come by name, through the config; only rewards share rewards/_*.py"
    if edge.target == "flowrl.__version__":
        return None
    if top == "flowrl":
        if edge.source == "flowrl":
            return None if edge.late and part(edge.target) in FACE else f"flowrl itself hands out {FACE}, late, only"
        return _problem_inside(package, own, part(edge.target))
    if top in sys.stdlib_module_names:
        return None
    if package == "rewards" and top not in LIGHT and not edge.late:
        return "a heavy import of a reward belongs into its class, in the method that needs it"
    if package == "flowrl" and top not in ONLY.get(own, {top}):
        return f"flowrl/{own} may import {', '.join(sorted(ONLY[own])) or 'the standard library'} only"
    return None


def _problem_inside(package: str, own: str, target: str) -> str | None:
    if package == "rewards":
        allowed = REWARD | REWARD_EXTRA.get(own, set())
    elif own not in ALLOWED:
        return f"flowrl/{own} has no row in ALLOWED"
    else:
        allowed = ALLOWED[own] | {own}
    return None if target in allowed else f"{own} may import {', '.join(sorted(allowed - {own})) or 'nothing'} only"


@pytest.mark.parametrize("module", sorted(KNOWN))
def test_every_import_is_allowed(module: str) -> None:
    found = [(edge, problem(edge)) for edge in edges(module, KNOWN[module].read_text(encoding="utf-8"))]
    assert not [f"line {edge.line}: imports {edge.target}: {wrong}" for edge, wrong in found if wrong]


def test_every_part_has_a_row() -> None:
    assert {part(module) for module in KNOWN if module.startswith("flowrl.")} <= set(ALLOWED)
    assert set(ONLY) <= set(ALLOWED)


def test_the_table_goes_one_way() -> None:
    above: set[str] = set()
    for row, names in ALLOWED.items():
        assert names <= above, f"{row} comes before {names - above}"
        above.add(row)


def test_no_cycle_between_modules() -> None:
    graph = {
        name: {edge.target for edge in edges(name, file.read_text(encoding="utf-8")) if edge.target in KNOWN}
        for name, file in KNOWN.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(KNOWN)  # a cycle raises CycleError


def test_only_the_config_and_the_face_import_by_name() -> None:
    texts = {name: file.read_text(encoding="utf-8") for name, file in KNOWN.items()}
    named = [name for name, text in texts.items() if "import_module" in text or "__import__" in text]
    assert named == ["flowrl", "flowrl.config", "rewards.win_rate"]  # the last one: its judge is another reward
    handed_out = {name: getattr(flowrl, name) for name in flowrl.__all__}
    assert {getattr(thing, "__module__", None) for thing in handed_out.values()} <= {f"flowrl.{part}" for part in FACE}
    # a name that is also a module's turns into the module as soon as anything imports that
    assert {f"flowrl.{name}" for name in handed_out} & set(KNOWN) == set()


def test_importing_flowrl_is_light() -> None:
    code = "import sys, flowrl; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize("file", sorted((ROOT / "scripts").glob("*.py")), ids=lambda file: file.name)
def test_scripts_leave_processes_to_flowrl(file: Path) -> None:
    assert not [edge for edge in edges("scripts", file.read_text()) if edge.target.startswith("torch.distributed")]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("flowrl.types", "from flowrl.errors import ConfigError"),
        ("flowrl.flow", "from flowrl import loop"),
        ("flowrl.flow", "import flowrl.loop as later"),
        ("flowrl.flow", "def f():\n    from flowrl.config import Config"),
        ("flowrl.flow", "if TYPE_CHECKING:\n    from flowrl.config import Config"),
        ("flowrl.credit.reduce", "from ..types import Tree"),
        ("flowrl.losses.kl", "import numpy as np"),
        ("flowrl.losses.kl", "from flowrl.flow import wide"),
        ("flowrl.loop", "import flowrl"),
        ("flowrl.loop", "from flowrl.losses.policy import ppo_clip"),
        ("flowrl.loop", "from flowrl import Trainer"),
        ("flowrl", "from flowrl.loop import Trainer"),
        ("flowrl", "if TYPE_CHECKING:\n    from flowrl.types import Tree"),
        ("flowrl.loop", "from rewards.shapes import shapes"),
        ("rewards.new", "from rewards.shapes import shapes"),
        ("flowrl.loop", "from rewards._scorer import to_pil"),
        ("flowrl.loop", "import torch.distributed as dist"),
        ("flowrl.loop", "from torch import distributed"),
        ("flowrl.loop", "from torch.distributed import all_reduce"),
        ("flowrl.loop", "import torch\ntorch.distributed.barrier()"),
        ("flowrl.brand_new", "from flowrl.types import Tree"),
        ("rewards.new", "from flowrl.shapes.checker import check"),
        ("rewards.new", "from flowrl.config import Range"),
        ("rewards.new", "import open_clip"),
        ("rewards.new", "class new:\n    import transformers"),
        ("rewards.new", "try:\n    from transformers import CLIPModel\nexcept ImportError: pass"),
    ],
)
def test_a_wrong_import_is_found(module: str, text: str) -> None:
    assert [edge for edge in edges(module, text) if problem(edge)]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("flowrl.dist", "import torch.distributed as dist\nfrom torch import distributed"),
        ("flowrl.credit.advantages", "from flowrl.credit.reduce import subtree_mean\nfrom flowrl import types"),
        ("flowrl.losses.kl", "import math\nfrom torch.nn.functional import mse_loss\nfrom flowrl.types import Eval"),
        ("flowrl", "if TYPE_CHECKING:\n    from flowrl.loop import Trainer"),
        ("flowrl.log", "from flowrl import __version__"),
        ("rewards.shapes", "from flowrl.shapes.checker import check"),
        ("rewards.new", "from rewards._scorer import to_pil"),
        ("rewards.new", "import torch\nclass new:\n    def __init__(self):\n        import open_clip"),
    ],
)
def test_a_right_import_passes(module: str, text: str) -> None:
    assert [problem(edge) for edge in edges(module, text)] == [None] * len(list(edges(module, text)))
