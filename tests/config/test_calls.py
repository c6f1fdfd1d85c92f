"""Binding names to functions, on small packages of their own and on rewards of a user."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import warm

from flowrl.config.calls import Call
from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError


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
