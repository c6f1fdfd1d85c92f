"""Binding is tested on small namespaces of its own; the shipped configs are bound at the end."""

from __future__ import annotations

import dataclasses
import importlib
import math
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flowrl import config as config_module
from flowrl.config import Call, Config, Range, TrainConfig, convert, load_config, parse_override
from flowrl.errors import ConfigError
from flowrl.resources import list_configs

MODULES = {
    "fakeaxes/__init__.py": "",
    "fakeaxes/models/__init__.py": "",
    "fakeaxes/models/toy.py": """
        def toy(path: str, *, guidance: float = 1.0, tune: Literal["lora", "full"] = "lora",
                lora: dict[str, int] | None = None, hook: "Missing" = None):
            return (path, guidance, tune, lora)
    """,
    "fakeaxes/samplers/__init__.py": "",
    "fakeaxes/samplers/plans.py": """
        def full(iteration: int, *, steps: int, level: float = 0.7):
            return "full"
        def window(iteration: int, *, steps: int, size: int, low: int = 0, level: float = 0.7, high: int = None):
            if low + size > steps:
                raise ConfigError(f"window {low}+{size} does not fit into {steps} steps")
            return "window"
        def cut(iteration: int, /, *, at: tuple[float, ...] = (0.5, 1), level: float = 1, note: str | int = "1"):
            return "cut"
        def steps_of(plan):
            return plan.noise
    """,
    "fakeaxes/transitions.py": """
        def cps(x, v, sigma, sigma_next, level): ...
        def draw(gaussian, noise): ...
        def _private(x, v, sigma, sigma_next, level): ...
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
        def group_norm(reward, leaf, tree, *, std: Literal["group", "global"] = "group", eps: float = 1e-4): ...
        def twice(reward, leaf, tree): ...
    """,
    "fakeaxes/credit/reduce.py": "def helper(a): ...\ndef twice(reward, leaf, tree): ...\n",
    "fakeaxes/credit/transforms.py": """
        def clip(values, batch, *, low: float = 0.0, high: float = 1.0): return values
        def rank(values, batch): return values
    """,
    "fakeaxes/credit/aggregate.py": """
        def weighted_sum(scores, credit): return "sum"
        class duals:
            def __init__(self, *, lr: float = 0.1): self.lr = lr
            def __call__(self, scores, credit): return self.lr
        class lame:
            def __init__(self, *, lr: float = 0.1): self.lr = lr
            def __call__(self, scores): return self.lr
    """,
    "fakeaxes/credit/segments.py": "def fixed(rollout, *, sizes: list[int]): ...\n",
    "fakeaxes/credit/select.py": "def fraction(choice, *, share: float = 0.5): ...\n",
    "fakeaxes/likelihood.py": "def reverse(model, batch, transition): ...\n",
    "fakeaxes/losses/__init__.py": "",
    "fakeaxes/losses/policy.py": """
        def ppo_clip(log_prob, old_log_prob, weight, *, clip_low: float, clip_high: float,
                     segment: Tensor | None = None): ...
    """,
    "fakeaxes/losses/kl.py": "def transition_kl(new, ref, *, cap: float | None = None): ...\n",
    "fakeplugin/__init__.py": "from subprocess import run\ndef toy(path, *, depth: int = 2): ...\n",
}
HEAD = """from __future__ import annotations
from typing import Any, Literal
from torch import Tensor
from flowrl.errors import ConfigError
"""
PACKAGES = {
    "model": "fakeaxes.models",
    "plan": "fakeaxes.samplers",
    "transition": "fakeaxes.transitions",
    "rewards": "fakerewards",
    "transform": "fakeaxes.credit.transforms",
    "aggregate": "fakeaxes.credit.aggregate",
    "credit": "fakeaxes.credit",
    "segment": "fakeaxes.credit.segments",
    "select": "fakeaxes.credit.select",
    "likelihood": "fakeaxes.likelihood",
    "loss": "fakeaxes.losses",
    "kl": "fakeaxes.losses.kl",
}
TEXT = """
name: toy-run
model: {fn: toy, path: assets/toy, lora: {rank: 4}}
prompts: {train: a.jsonl, test: b.jsonl}
image: {height: 64, width: 64}
plan: {fn: window, steps: 10, size: 3, level: 0.8}
transition: {fn: cps}
rewards:
  shapes: {fn: shapes, weight: 2}
credit: {fn: group_norm, std: group}
likelihood: {fn: reverse}
loss: {fn: ppo_clip, clip_low: 1e-4, clip_high: 1.0e-4}
train: {iterations: 3, prompts: 2, group: 4, lr: 3e-4}
"""


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    root = tmp_path_factory.mktemp("namespaces")
    for name, text in MODULES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(HEAD + "\n".join(line.removeprefix("        ") for line in text.split("\n")))
    sys.path.insert(0, str(root))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(root))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fakeaxes", "fakerewards", "fakeplugin")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def axes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real" in request.fixturenames:
        return
    request.getfixturevalue("namespaces")
    replaced = {key: axis._replace(package=PACKAGES[key]) for key, axis in config_module.AXES.items()}
    monkeypatch.setattr(config_module, "AXES", replaced)


@pytest.fixture
def real() -> None:
    """Ask for the namespaces of flowrl itself."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "toy.yaml"
    path.write_text(TEXT)
    return path


def failure(path: Path | str, *overrides: str, plugins: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, plugins)
    return str(caught.value)


def test_everything_is_bound_with_defaults(file: Path) -> None:
    config = load_config(file)
    assert config.plan == Call(
        "plan",
        "window",
        "fakeaxes.samplers.plans.window",
        {"steps": 10, "size": 3, "low": 0, "level": 0.8, "high": None},
    )
    assert config.call("plan")(0) == "window"
    assert config.call("model")() == ("assets/toy", 1.0, "lora", {"rank": 4})
    assert config.loss.kwargs == {"clip_low": 1e-4, "clip_high": 1e-4}  # a tensor is the loop's business
    assert (config.seed, config.train.lr, config.train.betas, config.eval.seed) == (0, 3e-4, (0.9, 0.999), 1234)
    assert config.kl is None and config.kl_beta == 0.0


def test_mixing_weights_stay_out_of_the_call(file: Path) -> None:
    config = load_config(file, ["kl={fn: transition_kl, beta: 1e-2}", "rewards.plain={fn: plain, scale: 3}"])
    assert config.reward_weights == {"shapes": 2.0, "plain": 1.0}
    assert config.kl_beta == 0.01 and config.kl is not None and config.kl.kwargs == {"cap": None}
    assert "kl.beta: missing" in failure(file, "kl={fn: transition_kl}")
    assert "expected a number >= 0" in failure(file, "kl={fn: transition_kl, beta: -1}")
    assert "the parameter 'weight' has another meaning" in failure(file, "rewards.w.fn=weighty")


def test_a_class_is_made_and_a_function_stays_partial(file: Path) -> None:
    config = load_config(file, ["rewards.shapes.strict=true", "rewards.plain.fn=plain"])
    assert config.rewards["shapes"].make()(None) is True
    assert config.rewards["plain"].make()(None) == 1.0


def test_partial_cannot_change_the_config(file: Path) -> None:
    config = load_config(file)
    config.call("model").keywords["lora"]["rank"] = 99
    assert config.model.kwargs["lora"] == {"rank": 4}


@pytest.mark.parametrize("overrides", [[], ["plan={fn: cut}", "kl={fn: transition_kl, beta: 1}", "train.threads=1"]])
def test_dump_loads_again_to_an_equal_config(file: Path, tmp_path: Path, overrides: list[str]) -> None:
    config = load_config(file, overrides)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
    assert load_config(again).dump() == config.dump()
    assert yaml.safe_load(config.dump())["train"]["max_grad_norm"] == 1.0  # the default is written out


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("trian.lr=1", ["has no section 'trian'", "did you mean 'train'", "override 'trian.lr=1'"]),
        ("train.lrr=1", ["train.lrr", "has no argument 'lrr'", "did you mean 'lr'", "weight_decay"]),
        ("plan.sise=1", ["plan.sise", "did you mean 'size'", "fakeaxes.samplers.plans.window", "steps"]),
        ("plan.iteration=1", ["has no argument 'iteration'"]),
        ("plan.size=two", ["override 'plan.size=two': plan.size", "expected a whole number", "'two' (a text)"]),
        ("plan.size=true", ["expected a whole number", "True (true or false)"]),
        ("plan.size=2.0", ["expected a whole number", "2.0 (a number)"]),
        ("credit.std=gruop", ["expected one of 'group', 'global'", "did you mean 'group'"]),
        ("rewards.shapes.names=[a, 1]", ["rewards.shapes.names[1]", "expected a text", "1 (a whole number)"]),
        ("rewards.shapes.strict=1", ["expected true or false", "1 (a whole number)"]),
        ("model.lora=4", ["expected a mapping to a whole number or null", "4 (a whole number)"]),
        ("model.lora.rank=x", ["model.lora.rank", "expected a whole number"]),
        ("model.path=null", ["model.path", "expected a text", "None (null)"]),
        ("loss={fn: ppo_clip}", ["fakeaxes.losses.policy.ppo_clip needs clip_low and clip_high"]),
        ("loss.segment=null", ["has no argument 'segment'"]),
        ("model.tune=lroa", ["expected one of 'lora', 'full'"]),
        ("plan=full", ["expected a call like {fn: name", "'full'"]),
        ("transition.fn=cpps", ["has no function 'cpps'", "did you mean 'cps'"]),
        ("transition.fn=drwa", ["has no function 'drwa' (there is: cps)"]),  # helpers are not offered
        ("plan={fn: steps_of}", ["plan: fakeaxes.samplers.plans.steps_of failed with AttributeError"]),
        ("transition.fn=_private", ["expected the name of a function"]),
        ("transition.fn=draw", ["does not belong here", "5 positional arguments", "draw(gaussian, noise)"]),
        ("transition.fn=ConfigError", ["has no function 'ConfigError'"]),
        ("rewards.shapes.fn=shape", ["has no file 'shape'", "did you mean 'shapes'"]),
        ("rewards.x.fn=broken", ["cannot import fakerewards.broken", "a_package_that_nobody_has"]),
        ("credit.fn=twice", ["ambiguous", "fakeaxes.credit.advantages.twice or fakeaxes.credit.reduce.twice"]),
        ("loss.fn=transition_kl", ["has no function 'transition_kl'"]),
        ("rewards.shapes=null", ["at least one reward"]),
        ("rewards.shapes.weight=0", ["at least one reward"]),
        ("rewards.shapes.weight=.nan", ["rewards.shapes.weight", "expected a number"]),
        ("rewards.sahpes=null", ["has no reward 'sahpes'", "did you mean 'shapes'"]),
        ("rewards=[1]", ["expected names with a call each"]),
        ("model=null", ["missing section: model"]),
        ("train.lr.x=1", ["train.lr is '3e-4' (a text)", "has no keys"]),
        ("train=3", ["train: expected keys and values"]),
        ("name=../up", ["name: expected letters"]),
        ("name=12", ["name: expected a text, got 12"]),
        ("seed=-1", ["seed: expected a number >= 0"]),
        ("train.lr", ["expected key.subkey=value"]),
        ("=1", ["expected key.subkey=value"]),
        ("train.lr=[1", ["not valid YAML"]),
        ("train.lr=!!python/object/apply:os.getcwd []", ["not valid YAML"]),
    ],
)
def test_mistakes_say_what_was_expected_and_where(file: Path, override: str, parts: list[str]) -> None:
    message = failure(file, override)
    assert [part for part in parts if part not in message] == [], message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.iterations=0", ">= 1"),
        ("train.group=0", ">= 1"),
        ("train.lr=0", "> 0"),
        ("train.lr=.inf", "<= 1e+300"),
        ("train.warmup=-1", ">= 0"),
        ("train.betas=[0.9, 1.0]", ">= 0 and < 1"),
        ("train.betas=[0.9]", "2 values"),
        ("train.ema=1", ">= 0 and < 1"),
        ("train.max_grad_norm=0", "> 0"),
        ("train.ema=0", "eval.weights is 'ema'"),
        ("eval.images=0", ">= 1"),
        ("eval.weights=old", "one of 'ema', 'current'"),
        ("checkpoint.keep=0", ">= 1"),
        ("grid.every=-1", ">= 0"),
        ("image.width=0", ">= 1"),
    ],
)
def test_ranges_of_the_sections(file: Path, override: str, expected: str) -> None:
    message = failure(file, override)
    assert expected in message and override.partition("=")[0] in message


def test_sections_check_ranges_when_made_in_python() -> None:
    with pytest.raises(ConfigError, match=r"train\.ema: expected a number >= 0 and < 1, got 1\.5"):
        TrainConfig(iterations=1, prompts=1, group=1, ema=1.5)


def test_impossible_plan_is_found_while_loading(file: Path) -> None:
    assert "plan: window 8+3 does not fit into 10 steps" in failure(file, "plan.low=8")


def test_switching_fn_keeps_what_fits_or_says_how_to_replace(file: Path) -> None:
    message = failure(file, "plan.fn=full")
    command = "plan='{fn: full, steps: 10, level: 0.8}'"
    assert "full does not take size" in message and command in message
    assert load_config(file, [command.replace("'", "")]).plan.kwargs == {"steps": 10, "level": 0.8}
    wide = load_config(file, ["plan={fn: full, steps: 10, level: 0.5}", "plan.fn=window", "plan.size=2"])
    assert wide.plan.kwargs["level"] == 0.5 and wide.plan.fn == "window"


def test_only_allowed_packages_can_be_named(file: Path) -> None:
    assert "allow it with --plugin os" in failure(file, "model={fn: os.system, command: ls}")
    assert "--plugin fakeplugin" in failure(file, "model={fn: fakeplugin.toy, path: x}")
    config = load_config(file, ["model={fn: fakeplugin.toy, path: x}"], ("fakeplugin",))
    assert config.model.path == "fakeplugin.toy" and config.model.kwargs == {"path": "x", "depth": 2}
    # what a plugin merely imports is not its own
    assert "has no public function of its own 'run'" in failure(
        file, "model={fn: fakeplugin.run}", plugins=("fakeplugin",)
    )
    assert load_config(file, ["plan.fn=fakeaxes.samplers.plans.window"]).plan.path == "fakeaxes.samplers.plans.window"


def test_flowrl_itself_is_open_on_the_own_axis_only(real: None) -> None:
    for fn in ("flowrl.checkpoint.prune", "flowrl.log.RunLogger", "flowrl.config.os.system", "flowrl.models_evil.x"):
        with pytest.raises(ConfigError, match=r"is neither in flowrl\.models nor"):
            Call.bind("model", {"fn": fn, "run": "/", "keep": 1})


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "expected sections"),
        ("- 1", "expected sections"),
        ("name: a\nname: b", "duplicate key 'name'"),
        ("name: a\nplan: {steps: 1, steps: 2}", "duplicate key 'steps'"),
        ("1: a", "expected a text as key"),
        ("? [a]\n: b", "expected a text as key"),
        ("name: &x a\nseed: *x", "aliases (*name) are not allowed"),
        ("name: [", "line"),
        ("name: a\n---\nname: b", "not valid YAML"),
        ("a: " + "[" * 5000, "not"),
        ("when: 2024-99-99", "not valid YAML"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    message = failure(path)
    assert part in message and "bad.yaml" in message


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    assert "UTF-8" in failure(tmp_path / "latin.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in failure(tmp_path / "folder.yaml")
    assert "looked for" in failure(tmp_path / "none.yaml")
    monkeypatch.setattr(config_module, "list_configs", lambda: ["shapes/flow_grpo"])
    assert "did you mean 'shapes/flow_grpo'" in failure("shapes/flow_gpro")


def test_windows_file_with_a_byte_order_mark(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert load_config(path) == load_config(file)


def test_unknown_call_key(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no call 'train'; there is model, plan"):
        load_config(file).call("train")


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, 1.0),
        ("1e-4", float, 1e-4),
        ("-12", int, -12),
        ("1", int | str, "1"),  # the exact member of a union comes first
        ("1", float | None, 1.0),
        (1, float | int, 1),
        ([1, "2"], tuple[float, ...], (1.0, 2.0)),
        ({"a": "3"}, dict[str, int] | None, {"a": 3}),
        ("x", Path, Path("x")),
        (math.inf, float, math.inf),
        (object, Any, object),
        (None, Annotated[int, Range(1)] | None, None),
    ],
)
def test_convert(value: Any, hint: Any, expected: Any) -> None:
    got = convert(value, hint, "key")
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (True, int),
        (True, float),
        (1, bool),
        (1, str),
        ("nan", float),
        (math.nan, float),
        ("inf", float),
        ("1_000", float),
        ("1e3", int),
        (10**400, float),
        (True, Literal[1, 2]),
        ("ab", list[str]),
        ([1], tuple[int, int]),
        (0, Annotated[int, Range(1)]),
        ("lambda: 1", Callable[[int], int]),
    ],
)
def test_convert_refuses(value: Any, hint: Any) -> None:
    with pytest.raises(ConfigError, match="key"):
        convert(value, hint, "key")


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(string.printable)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, min_size=1), inner),
    max_leaves=6,
)
keys = st.lists(st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True), min_size=1, max_size=3)


@given(keys, values)
def test_override_round_trip(parts: list[str], value: Any) -> None:
    text = f"{'.'.join(parts)}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}"
    assert parse_override(text) == (parts, value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_python_writing_of_a_number_is_a_number(value: float) -> None:
    assert parse_override(f"x={value!r}")[0] == ["x"]
    assert convert(parse_override(f"x={value!r}")[1], float, "x") == value  # 1e-05 is a text to YAML 1.1


def test_every_field_of_the_config_is_in_the_dump(file: Path) -> None:
    optional = ["kl={fn: transition_kl, beta: 1}", "segment={fn: fixed, sizes: [2]}", "select={fn: fraction}"]
    dumped = yaml.safe_load(load_config(file, optional).dump())
    assert set(dumped) == {f.name for f in dataclasses.fields(Config)} - {"source", "plugins"}


@pytest.mark.parametrize("name", list_configs())
def test_shipped_config_binds(name: str, tmp_path: Path, real: None) -> None:
    config = load_config(name)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
