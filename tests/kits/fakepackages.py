"""Small packages in place of the axes of flowrl: binding is tested on functions made for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.config.axes import AXES

MODULES = {
    "fakeaxes/__init__.py": "",
    "fakeaxes/models/__init__.py": "",
    "fakeaxes/models/toy.py": """
        def toy(path: str, *, guidance: float = 1.0, tune: Literal["lora", "full"] = "lora",
                lora: Lora | None = None, sizes: dict[str, int] | None = None,
                hook: "Missing" = None):
            return (path, guidance, tune, lora)

        class Lora(TypedDict, total=False):
            rank: int
            targets: list[str]
    """,
    "fakeaxes/plans/__init__.py": "",
    "fakeaxes/plans/plans.py": """
        def full(iteration: int, *, steps: int, noise_scale: float = 0.7):
            return "full"
        def window(iteration: int, *, steps: int, size: int, low: int = 0,
                   noise_scale: float = 0.7, high: int = None):
            if low + size > steps:
                raise ConfigError(f"window {low}+{size} does not fit into {steps} steps")
            return "window"
        def cut(iteration: int, /, *, at: tuple[float, ...] = (0.5, 1), noise_scale: float = 1,
                note: str | int = "1", strides: Sequence[int] = (1,)):
            return "cut"
        def steps_of(plan):
            return plan.noise
    """,
    "fakeaxes/transitions.py": """
        def cps(x, v, sigma, sigma_next, noise_scale): ...
        def euler(x, v, sigma, sigma_next, g): ...
        def draw(gaussian, noise): ...
        def _private(x, v, sigma, sigma_next, noise_scale): ...
    """,
    "fakerewards/__init__.py": "",
    "fakerewards/shapes.py": """
        class shapes:
            def __init__(self, strict: bool = False, names: list[str] | None = None):
                self.strict = strict
            def __call__(self, batch): return self.strict
    """,
    "fakerewards/plain.py": "def plain(batch, *, scale: float = 1.0): return scale\n",
    "fakerewards/broken.py": "import a_package_that_nobody_has\n",
    "fakerewards/weighty.py": "def weighty(batch, *, weight: float = 1.0): ...\n",
    "fakeaxes/credit/__init__.py": "",
    "fakeaxes/credit/advantages.py": """
        from fakeaxes.credit.reduce import helper
        def group_norm(reward, leaf, tree, *, std: Literal["group", "global"] = "group",
                       eps: float = 1e-4): ...
        def twice(reward, leaf, tree): ...
    """,
    "fakeaxes/credit/reduce.py": "def helper(a): ...\ndef twice(reward, leaf, tree): ...\n",
    "fakeaxes/reward_mix/transforms.py": """
        def clip(values, batch, *, low: float = 0.0, high: float = 1.0): return values
        def rank(values, batch): return values
    """,
    "fakeaxes/reward_mix/aggregate.py": """
        def weighted_sum(scores, credit): return "sum"
        class duals:
            def __init__(self, *, lr: float = 0.1): self.lr = lr
            def __call__(self, scores, credit): return self.lr
        class lame:
            def __init__(self, *, lr: float = 0.1): self.lr = lr
            def __call__(self, scores): return self.lr
    """,
    "fakeaxes/selection/segments.py": "def fixed(rollout, *, sizes: list[int]): ...\n",
    "fakeaxes/selection/select.py": "def fraction(choice, *, share: float = 0.5): ...\n",
    "fakeaxes/likelihoods/reverse.py": "def reverse(model, batch, transition): ...\n",
    "fakeaxes/losses/__init__.py": "",
    "fakeaxes/losses/policy.py": """
        def ppo_clip(log_prob, old_log_prob, weight, *, clip_low: float, clip_high: float,
                     segment: Tensor | None = None): ...
    """,
    "fakeaxes/optimizer.py": """
        def adamw(params, *, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.999)): ...
        def blind(params): ...
    """,
    "fakeaxes/penalties.py": "def transition_kl(eval, *, cap: float | None = None): ...\n",
    "fakeplugin/__init__.py": "from subprocess import run\ndef toy(path, *, depth: int = 2): ...\n",
}
HEAD = """from __future__ import annotations
from collections.abc import Sequence
from typing import Any, Literal
from torch import Tensor
from typing_extensions import TypedDict
from flowrl.core.errors import ConfigError
"""
PACKAGES = {
    "model": "fakeaxes.models",
    "plan": "fakeaxes.plans",
    "transition": "fakeaxes.transitions",
    "rewards": "fakerewards",
    "transform": "fakeaxes.reward_mix.transforms",
    "aggregate": "fakeaxes.reward_mix",
    "credit": "fakeaxes.credit",
    "segment": "fakeaxes.selection.segments",
    "select": "fakeaxes.selection",
    "likelihood": "fakeaxes.likelihoods",
    "loss": "fakeaxes.losses",
    "kl": "fakeaxes.penalties",
    "optimizer": "fakeaxes.optimizer",
}
TEXT = """
name: toy-run
model: {fn: toy, path: assets/toy, lora: {rank: 4}}
prompts: {train: a.jsonl, test: b.jsonl}
image: {height: 64, width: 64}
plan: {fn: window, steps: 10, size: 3, noise_scale: 0.8}
transition: {fn: cps}
rewards:
  shapes: {fn: shapes, weight: 2}
credit: {fn: group_norm, std: group}
likelihood: {fn: reverse}
loss: {fn: ppo_clip, clip_low: 1e-4, clip_high: 1.0e-4}
optimizer: {fn: adamw, lr: 3e-4}
train: {iterations: 3, prompts: 2, group: 4}
"""


@pytest.fixture(scope="session")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write the packages and make them importable."""
    root = tmp_path_factory.mktemp("namespaces")
    for name, text in MODULES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        lines = [line.removeprefix("        ") for line in text.split("\n")]
        (root / name).write_text(HEAD + "\n".join(lines))
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(root))
    for name in list(sys.modules):
        if name.partition(".")[0] in ("fakeaxes", "fakerewards", "fakeplugin"):
            del sys.modules[name]


@pytest.fixture
def axes(namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look functions up in these packages."""
    for key, package in PACKAGES.items():
        monkeypatch.setitem(AXES, key, AXES[key]._replace(package=package, techniques=()))


@pytest.fixture
def file(axes: None, tmp_path: Path) -> Path:
    """Return a config of these packages' functions."""
    path = tmp_path / "toy.yaml"
    path.write_text(TEXT)
    return path
