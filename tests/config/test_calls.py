"""Values against annotations, as YAML 1.2 and the annotation say; names bound to functions, on
small packages of their own and on rewards of a user; and the schema that editors read."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import warm
import yaml
from annotated_types import Ge, Interval, MinLen
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from torch import Tensor
from typing_extensions import TypedDict

from flowrl.config.calls import Call
from flowrl.config.load import load_config
from flowrl.config.overrides import parse_override
from flowrl.config.schema import ABOUT, config_schema, functions
from flowrl.config.sections import SECTIONS
from flowrl.config.values import convert, schema_of, type_words
from flowrl.core.errors import ConfigError
from flowrl.core.files import json_text
from flowrl.core.shipped_files import list_configs, resource


def failure(path: Path, *overrides: str, plugins: tuple[str, ...] = ()) -> str:
    """Return the message of a config that does not load."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, plugins)
    return str(caught.value)


def test_everything_is_bound_with_defaults(file: Path) -> None:
    config = load_config(file)
    kwargs = {"steps": 10, "size": 3, "low": 0, "noise_scale": 0.8, "high": None}
    assert config.plan == Call("plan", "window", "fakeaxes.plans.plans.window", kwargs)
    assert config.call("plan")(0) == "window"
    assert config.call("model")() == ("assets/toy", 1.0, "lora", {"rank": 4})
    # a tensor is the loop's business
    assert config.loss.kwargs == {"clip_low": 1e-4, "clip_high": 1e-4}
    assert config.optimizer.kwargs == {"lr": 3e-4, "betas": (0.9, 0.999)}
    assert (config.seed, config.lr, config.eval.seed) == (0, 3e-4, 1234)
    assert config.kl is None and config.kl_beta == 0.0


def test_mixing_weights_stay_out_of_the_call(file: Path) -> None:
    more = ["kl={fn: transition_kl, beta: 1e-2}", "rewards.plain={fn: plain, scale: 3}"]
    config = load_config(file, more)
    assert config.reward_weights == {"shapes": 2.0, "plain": 1.0}
    assert config.kl_beta == 0.01 and config.kl is not None and config.kl.kwargs == {"cap": None}


def test_a_class_is_made_and_a_function_stays_partial(file: Path) -> None:
    config = load_config(file, ["rewards.shapes.strict=true", "rewards.plain.fn=plain"])
    assert config.rewards["shapes"].make()(None) is True
    assert config.rewards["plain"].make()(None) == 1.0


def test_partial_cannot_change_the_config(file: Path) -> None:
    config = load_config(file)
    config.call("model").keywords["lora"]["rank"] = 99
    assert config.model.kwargs["lora"] == {"rank": 4}


def test_switching_fn_keeps_what_fits_or_says_how_to_replace(file: Path) -> None:
    message = failure(file, "plan.fn=full")
    command = "plan='{fn: full, steps: 10, noise_scale: 0.8}'"
    assert "full does not take size" in message and command in message
    kept = load_config(file, [command.replace("'", "")]).plan.kwargs
    assert kept == {"steps": 10, "noise_scale": 0.8}
    full = "plan={fn: full, steps: 10, noise_scale: 0.5}"
    wide = load_config(file, [full, "plan.fn=window", "plan.size=2"])
    assert wide.plan.kwargs["noise_scale"] == 0.5 and wide.plan.fn == "window"


def test_only_allowed_packages_can_be_named(file: Path) -> None:
    assert "allow it with --plugin os" in failure(file, "model={fn: os.system, command: ls}")
    assert "--plugin fakeplugin" in failure(file, "model={fn: fakeplugin.toy, path: x}")
    config = load_config(file, ["model={fn: fakeplugin.toy, path: x}"], ("fakeplugin",))
    assert config.model.path == "fakeplugin.toy"
    assert config.model.kwargs == {"path": "x", "depth": 2}
    # what a plugin merely imports is not its own
    message = failure(file, "model={fn: fakeplugin.run}", plugins=("fakeplugin",))
    assert "has no public function of its own 'run'" in message
    # a file of the user's that has the name of our package
    message = failure(file, "rewards={it: {fn: rewards.bright}}", plugins=("rewards",))
    assert "'rewards' is flowrl's own package: give a file of yours another name" in message
    # a file that is named in place of the function in it
    message = failure(file, "plan={fn: fakeaxes.plans.plans}", plugins=("fakeaxes",))
    assert "name what is in it, such as fakeaxes.plans.plans.plans" in message
    own = "fakeaxes.plans.plans.window"
    assert load_config(file, [f"plan.fn={own}"]).plan.path == own


@pytest.mark.parametrize(
    "fn",
    [
        "flowrl.training.checkpoint.prune",
        "flowrl.runs.log.RunLogger",
        "flowrl.config.load.os.system",
        "flowrl.models_evil.x",
    ],
)
def test_flowrl_itself_is_open_on_the_own_axis_only(fn: str) -> None:
    with pytest.raises(ConfigError, match=r"is neither in flowrl\.models nor"):
        Call.bind("model", {"fn": fn, "run": "/", "keep": 1})


def test_unknown_call_key(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"no call 'train'; there is model, plan"):
        load_config(file).call("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora": {"rnk": 4}},
            "model.lora.rnk: model.lora has no option 'rnk'; did you mean 'rank'",
        ),
        ({"lora": {"rank": 0}}, "rank: expected a whole number >= 1 and <= 6144, got 0"),
        # before anything loads, so that a run and its estimate say the same; 48 heads of 128
        ({"lora": {"rank": 10**9}}, "rank: expected a whole number >= 1 and <= 6144, got 10000000"),
        (
            {"lora": {"targets": "to_q"}},
            "model.lora.targets: expected a list that is not empty, each",
        ),
        ({"runtime": {"compil": True}}, "model.runtime has no option 'compil'; did you mean 'comp"),
        ({"runtime": {"quantize": "int4"}}, "expected one of 'none', 'nf4', 'int8', got 'int4'"),
        ({"tune": "lroa"}, "model.tune: expected one of 'lora', 'full', 'none', got 'lroa'"),
        (
            {"dtype": "half"},
            "model.dtype: expected one of 'auto', 'float32', 'bfloat16', 'float16'",
        ),
    ],
)
@pytest.mark.parametrize("fn", ["sd3", "flux", "sd15", "sdxl"])
def test_options_of_the_models_are_typed(fn: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Call.bind("model", {"fn": fn, "path": "x", **options})
    assert message in str(caught.value)


@pytest.mark.parametrize("fn", ["adamw", "adamw8bit"])
def test_arguments_of_the_optimizers(fn: str) -> None:
    raw = {
        "fn": fn,
        "lr": 0,
        "betas": [0.9, 1.0],
        "eps": math.inf,
        "weight_decay": -1,
        "momentum": 1,
    }
    with pytest.raises(ConfigError) as caught:
        Call.bind("optimizer", raw)
    for line in (
        "optimizer.lr: expected a finite number > 0, got 0",
        "optimizer.betas[1]: expected a number >= 0 and < 1, got 1.0",
        "optimizer.eps: expected a finite number > 0, got inf",
        "optimizer.weight_decay: expected a finite number >= 0, got -1",
        f"flowrl.training.optimizer.{fn} has no argument 'momentum'",
    ):
        assert line in str(caught.value)


BEFORE = "import rewards; assert rewards.mine"
CODE = """
import sys
assert "rewards" not in sys.modules
{before}
import flowrl
overrides = ["rewards.best={{fn: win_rate, judge: {{fn: vlm}}}}"]
config = flowrl.load_config("shapes/flow_grpo", overrides)
reward = config.rewards["shapes"].make()
assert type(reward).__module__ == "{package}.shapes", type(reward).__module__
assert config.rewards["best"].make().judge
{after}
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("file", "before", "after", "package"),
    [
        ("rewards.py", BEFORE, BEFORE, "flowrl_rewards"),
        ("rewards/__init__.py", "", BEFORE, "flowrl_rewards"),
        ("other.py", "", "", "rewards"),
    ],
)
def test_a_module_of_our_name(
    tmp_path: Path, file: str, before: str, after: str, package: str
) -> None:
    """Imported before ours, and found after. Without one ours has its own name."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine = True\n")
    (tmp_path / "script.py").write_text(CODE.format(before=before, after=after, package=package))
    code, said = warm.run([f"{tmp_path}/script.py"], tmp_path / "log", folder=tmp_path)
    assert code == 0, said


# ------------------------------------------------------------------------------------------- values


Share = Annotated[float, Interval(ge=0, lt=1)]


class Lora(TypedDict, total=False):
    """Options of a section of their own."""

    rank: Annotated[int, Ge(1)]
    targets: Sequence[str]


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
        ((1,), Sequence[int], [1]),
        ({"a": "3"}, dict[str, int] | None, {"a": 3}),
        ({"rank": "3"}, Lora | None, {"rank": 3}),
        ("x", Path, Path("x")),
        (math.inf, float, math.inf),
        (object, Any, object),
        (None, Annotated[int, Ge(1)] | None, None),
    ],
)
def test_convert(value: Any, hint: Any, expected: Any) -> None:
    got = convert(value, hint, "key")
    assert got == expected and type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "key: expected a whole number, got True (true or false)"),
        (2.0, int, "key: expected a whole number, got 2.0 (a number)"),
        (True, float, "key: expected a number, got True (true or false)"),
        (1, bool, "key: expected true or false, got 1 (a whole number)"),
        (1, str, "key: expected a text, got 1 (a whole number)"),
        ("nan", float, "key: expected a number, got 'nan' (a text)"),
        (math.nan, float, "key: expected a number, got nan (a number)"),
        ("inf", float, "key: expected a number, got 'inf' (a text)"),
        ("1_000", float, "key: expected a number, got '1_000' (a text)"),
        ("1e3", int, "key: expected a whole number, got '1e3' (a text)"),
        (10**400, float, "... (a whole number)"),
        (True, Literal[1, 2], "key: expected one of 1, 2, got True (true or false)"),
        ("ema2", Literal["ema", "old"], "expected one of 'ema', 'old', got 'ema2' (a text); did"),
        ("men", Literal["mean"] | float, "one of 'mean' or a number, got 'men' (a text); did you"),
        ("ab", list[str], "key: expected a list, each a text, got 'ab' (a text)"),
        ([1], tuple[int, int], "key: expected a list of 2 values, each a whole number, got [1]"),
        ([], Annotated[list[int], MinLen(1)], "expected a list that is not empty, each a whole"),
        ("", Annotated[str, MinLen(1)], "key: expected a text that is not empty, got ''"),
        (0, Annotated[int, Ge(1)], "key: expected a whole number >= 1, got 0 (a whole number)"),
        ([0.5, 1], tuple[Share, Share], "key[1]: expected a number >= 0 and < 1, got 1 (a whole"),
        (4, dict[str, int] | None, "key: expected a mapping to a whole number or null, got 4"),
        ({"a": "x"}, float | dict[str, float], "key.a: expected a number, got 'x' (a text)"),
        (4, Lora | None, "key: expected a mapping of rank, targets or null, got 4 (a whole"),
        ({"rnk": 4}, Lora | None, "key.rnk: key has no option 'rnk'; did you mean 'rank'? (there"),
        ({"rank": 0}, Lora, "key.rank: expected a whole number >= 1, got 0 (a whole number)"),
    ],
)
def test_what_is_refused(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(value, hint, "key")
    assert message in str(caught.value)


def test_everything_that_is_wrong_inside_a_value_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        convert({"rnk": 4, "rank": "x", "targets": ["a", 1]}, Lora | None, "model.lora")
    said = str(caught.value)
    assert said.startswith("3 mistakes:\n") and "model.lora.targets[1]: expected a text" in said
    assert "model.lora.rnk: model.lora has no option" in said and "model.lora.rank: exp" in said


@pytest.mark.parametrize("hint", [Tensor | None, Callable[[int], int], dict[str, Tensor]])
def test_what_yaml_cannot_hold_has_no_schema(hint: Any) -> None:
    with pytest.raises(TypeError, match="cannot be written in YAML"):
        schema_of(hint)


def test_schema_and_words() -> None:
    """The schema is JSON schema 2020-12 without references; words are made from it."""
    inner = {"type": "integer", "minimum": 1}
    names = {"type": "array", "items": {"type": "string"}}
    options = {"rank": inner, "targets": names}
    mapping = {"type": "object", "properties": options, "additionalProperties": False}
    assert schema_of(Lora | None) == {"anyOf": [mapping, {"type": "null"}]}
    assert type_words(schema_of(Path)) == "a path" and type_words(schema_of(Any)) == "any value"
    assert (
        type_words(schema_of(list)) == "a list"
        and type_words(schema_of(dict[str, Any])) == "a mapping"
    )


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_python_writing_of_a_number_is_a_number(value: float) -> None:
    parts, read = parse_override(f"x={value!r}")
    assert parts == ["x"]
    assert convert(read, float, "x") == value  # 1e-05 is a text to YAML 1.1


# --------------------------------------------------------------------------------------- the schema


SCHEMA: dict[str, Any] = json.loads(resource("configs/schema.json").read_text(encoding="utf-8"))


def errors(config: Any) -> list[str]:
    """Return what the schema has against a config."""
    found = Draft202012Validator(SCHEMA).iter_errors(config)
    return [f"{error.json_path}: {error.message}" for error in found]


def shipped(name: str) -> dict[str, Any]:
    """Read a shipped config as plain data."""
    found: dict[str, Any] = yaml.safe_load(resource(f"configs/{name}.yaml").read_text("utf-8"))
    return found


def test_the_committed_schema_is_the_one_of_the_code() -> None:
    """If not: `flowrl schema --out configs/schema.json`."""
    made = json_text(config_schema()) + "\n"
    assert made == resource("configs/schema.json").read_text(encoding="utf-8")
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", list_configs())
def test_shipped_configs_fit_and_name_it(name: str) -> None:
    text = resource(f"configs/{name}.yaml").read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=../schema.json"
    assert errors(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("section", "change", "part"),
    [
        ("plan", {"sise": 3}, "$.plan: Additional properties are not allowed ('sise' was unexp"),
        ("plan", {"steps": "ten"}, "$.plan.steps: 'ten' is not of type 'integer'"),
        ("credit", {"std": "all"}, "$.credit.std: 'all' is not one of ['group', 'global']"),
        ("model", {"lora": {"rnk": 4}}, "$.model.lora: {'rnk': 4} is not valid"),
        ("loss", {"fn": "ppo"}, "$.loss.fn: 'ppo' is not valid"),
        ("optimizer", {"lr": 0}, "$.optimizer"),
        ("train", {"lr": 1e-4}, "$.train: Additional properties are not allowed ('lr' was unexp"),
        ("train", {"group": 0}, "$.train.group: 0 is less than the minimum of 1"),
        ("parts", {"mine": {"fn": "Mine"}}, "$.parts.mine.fn: 'Mine' is not valid"),
        ("grid", {}, "$: Additional properties are not allowed ('grid' was unexpected)"),
    ],
)
def test_mistakes_are_marked(section: str, change: dict[str, Any], part: str) -> None:
    config = shipped("shapes/flow_grpo")
    config[section] = {**config.get(section, {}), **change}
    assert any(part in error for error in errors(config)), errors(config)


def test_what_may_be_left_out_or_stand_in_a_list() -> None:
    """Without fn the optimizer is AdamW; null is off; arguments of a plugin are open."""
    config = shipped("shapes/flow_grpo")
    config |= {"optimizer": {"lr": 1e-4}, "kl": None, "select": [{"fn": "fraction", "share": 0.5}]}
    config["plan"] = {"fn": "my_package.plans.mine", "anything": 1}
    config["parts"] = {"mine": {"fn": "my_package.Mine", "anything": 1}}
    config["rewards"]["shapes"]["transform"] = [{"fn": "rank"}, {"fn": "clip", "low": 0}]
    assert errors(config) == []
    config["optimizer"] = {"lr": 1e-4, "momentum": 1}
    assert any("momentum" in error for error in errors(config))


def test_every_key_says_what_it_is_for() -> None:
    assert all(it["description"] for it in SCHEMA["properties"].values()), SCHEMA["properties"]
    for key in SECTIONS:
        keys = SCHEMA["properties"][key]["properties"]
        assert [name for name, it in keys.items() if not it["description"]] == []
    # parts are of plugins alone
    assert all(functions(axis) for axis in ABOUT if axis not in ("name", "seed", "parts"))
