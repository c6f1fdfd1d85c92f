"""Whole configs: what mistakes say, that all are told, what is written loads again; overrides,
seeds, and what a program hands over."""

from __future__ import annotations

import dataclasses
import re
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from shippedkit import shipped
from tiny import tiny_sd3
from toykit import redness, toy, write_toy

import flowrl
from flowrl.algorithms.plans.windows import random_window
from flowrl.api.arguments import config_of
from flowrl.config import load
from flowrl.config.calls import as_handed
from flowrl.config.load import Config, load_config
from flowrl.config.overrides import Source, apply_override, parse_override
from flowrl.config.sections import TrainConfig
from flowrl.core.errors import ConfigError
from flowrl.core.seeds import generator
from flowrl.core.shipped_files import list_configs
from flowrl.runs.train import train


def failure(path: Path | str, *overrides: str) -> str:
    """Return the message of a config that does not load."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


MISTAKES = [
    ("trian.group=1", ["override 'trian.group=1'", "has no section 'trian'", "mean 'train'"]),
    ("lr=1", ["the config has no section 'lr'; did you mean optimizer.lr?"]),
    ("steps=1", ["did you mean plan.steps or "]),
    ("train.updats=1", ["train.updats: train has no argument 'updats'", "did you mean 'updates'"]),
    ("optimizer.lrr=1", ["fakeaxes.optimizer.adamw has no argument 'lrr'", "mean 'lr'", "betas"]),
    ("optimizer.fn=blind", ["blind does not take lr of the call that it replaces"]),
    ("optimizer={fn: blind}", ["fakeaxes.optimizer.blind has no argument 'lr'"]),
    ("plan.sise=1", ["plan.sise", "did you mean 'size'", "fakeaxes.plans.plans.window", "steps"]),
    ("plan.iteration=1", ["has no argument 'iteration'"]),
    ("plan.size=two", ["override 'plan.size=two': plan.size: expected a whole number, got 'two'"]),
    ("credit.std=gruop", ["expected one of 'group', 'global'", "did you mean 'group'"]),
    ("rewards.shapes.names=[a, 1]", ["rewards.shapes.names[1]: expected a text, got 1 (a whole"]),
    ("model.sizes.rank=x", ["override 'model.sizes.rank=x': model.sizes.rank", "a whole number"]),
    ("model.path=null", ["model.path: expected a text, got None (null)"]),
    ("loss={fn: ppo_clip}", ["fakeaxes.losses.policy.ppo_clip needs clip_low and clip_high"]),
    ("loss.segment=null", ["has no argument 'segment'"]),
    ("plan=full", ["expected a call like {fn: name", "'full'"]),
    ("transition.fn=cpps", ["has no function 'cpps'", "did you mean 'cps'"]),
    ("transition.fn=drwa", ["has no function 'drwa' (there is: cps)"]),  # helpers are not offered
    ("plan={fn: steps_of}", ["plan: fakeaxes.plans.plans.steps_of failed with AttributeError"]),
    ("transition.fn=_private", ["expected the name of a function"]),
    ("transition.fn=draw", ["does not belong here", "5 positional", "draw(gaussian, noise)"]),
    ("transition.fn=ConfigError", ["has no function 'ConfigError'"]),
    ("rewards.shapes.fn=shape", ["has no file 'shape'", "did you mean 'shapes'"]),
    ("rewards.x.fn=bright", ["for one of your own, fn: my_file.bright with --plugin my_file"]),
    ("loss.fn=mine", ["for one of your own, fn: my_file.mine with --plugin my_file"]),
    ("rewards.x.fn=a/mine.py", ["'a/mine.py' is a file: name a function in it", "--plugin mine"]),
    ("rewards.x.fn=broken", ["cannot import fakerewards.broken", "a_package_that_nobody_has"]),
    ("rewards.w.fn=weighty", ["the parameter 'weight' has another meaning"]),
    (
        "credit.fn=twice",
        ["ambiguous", "fakeaxes.credit.advantages.twice or fakeaxes.credit.reduce"],
    ),
    ("loss.fn=transition_kl", ["has no function 'transition_kl'"]),
    ("kl={fn: transition_kl}", ["kl.beta: missing"]),
    ("kl={fn: transition_kl, beta: -1}", ["kl.beta: expected a finite number >= 0"]),
    ("rewards.shapes=null", ["at least one reward"]),
    ("rewards.shapes.weight=0", ["at least one reward"]),
    ("rewards.shapes.weight=.nan", ["rewards.shapes.weight: expected a finite number, got nan"]),
    ("rewards=[1]", ["expected names with a call each"]),
    ("rewards={a b: {fn: plain}}", ["expected a name of letters, digits, - and _, got 'a b'"]),
    ("model=null", ["missing section: model"]),
    ("train=3", ["train: expected keys and values"]),
    ("name=../up", ["name: expected letters"]),
    ("name=12", ["name: expected a text, got 12"]),
    ("seed=-1", ["seed: expected a whole number >= 0 and < 2**63"]),
    ("plan.low=8", ["plan: window 8+3 does not fit into 10 steps"]),
    ("train.ema=0", ["eval.weights is 'ema', but train.ema is 0 (off)"]),
    ("rewards.shapes.wieght=2", ["'wieght'; did you mean 'weight'", "frames, names, offload"]),
    ("eval.score=shpaes", ["eval.score", "has no reward 'shpaes'; did you mean 'shapes'"]),
    ("train.iterations=0", ["train.iterations: expected a whole number >= 1"]),
    ("train.group=0", ["train.group: expected a whole number >= 1"]),
    ("train.warmup=-1", ["train.warmup: expected a whole number >= 0"]),
    ("train.ema=1", ["train.ema: expected a number >= 0 and < 1"]),
    ("train.max_grad_norm=0", ["train.max_grad_norm: expected a number > 0"]),
    ("train.max_unscored=1.1", ["train.max_unscored: expected a number >= 0 and <= 1"]),
    ("eval.images=0", ["eval.images: expected a whole number >= 1"]),
    ("eval.images=1000000000", ["eval.images: expected a whole number >= 1 and <= 10000"]),
    ("eval.best_of=1000000000", ["eval.best_of: expected a whole number >= 1 and <= 10000"]),
    ("eval={images: 10000, best_of: 11}", ["eval.images: expected at most 100,000 images drawn"]),
    ("eval.steps=1001", ["eval.steps: expected a whole number >= 1 and <= 1000"]),
    ("eval.batch=2147483648", ["eval.batch: expected a whole number >= 1 and < 2**31"]),
    ("train.rollout_batch=2147483648", ["train.rollout_batch: expected a whole number >= 1 and <"]),
    ("eval.weights=old", ["eval.weights: expected one of 'ema', 'current'"]),
    ("checkpoint.keep=0", ["checkpoint.keep: expected a whole number >= 1"]),
    ("samples.every=-1", ["samples.every: expected a whole number >= 0"]),
    ("image.width=0", ["image.width: expected a whole number >= 1"]),
]


@pytest.mark.parametrize(("override", "parts"), MISTAKES)
def test_mistakes_say_what_was_expected_and_where(
    file: Path, override: str, parts: list[str]
) -> None:
    message = failure(file, override)
    assert [part for part in parts if part not in message] == [], message
    assert "mistakes:" not in message


def test_rules_between_sections_and_the_plan_come_with_the_others(file: Path) -> None:
    """One message, whatever is wrong where, and each line names the override that did it."""
    overrides = ["name=a b", "loss.clip_lo=1", "plan.steps=0", "eval.score=foo", "train.ema=0"]
    with pytest.raises(ConfigError) as caught:
        load_config(file, overrides)
    lines = str(caught.value).splitlines()
    assert lines[0] == "5 mistakes:"
    for override in overrides:
        assert sum(f"override {override!r}" in line for line in lines) == 1, override
    # where nothing else is wrong they name it, too
    for override in ("eval.score=foo", "train.ema=0", "name=a b"):
        with pytest.raises(ConfigError, match=f"override '{override}'"):
            load_config(file, [override])


def test_a_wrong_section_is_compared_with_nothing(file: Path) -> None:
    """A kl section with a mistake is no missing one."""
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["kl={fn: no_such}", "monitors.adaptive_kl={target: 0.1}"])
    assert "needs a kl section" not in str(caught.value) and "no_such" in str(caught.value)


def test_all_mistakes_are_in_one_message(file: Path) -> None:
    """Of overrides, of the file, of several sections, of one section, of a reward's transform."""
    text = file.read_text().replace("size: 3", "sise: 3, steps: ten").replace("group: 4", "")
    file.write_text(text.replace("steps: 10, ", ""))
    transform = "rewards.shapes.transform=[{fn: clip, lo: 1}, {fn: rnak}]"
    message = failure(file, "train.prompts=0", "no override", transform, "kl={fn: transition_kl}")
    said = message.splitlines()
    assert said[0] == f"{len(said) - 1} mistakes:"
    for part in (
        "override 'no override': expected key.subkey=value",
        f"{file}: plan.sise: fakeaxes.plans.plans.window has no argument 'sise'; did you mean 's",
        f"{file}: plan.steps: expected a whole number, got 'ten' (a text)",
        f"{file}: plan: fakeaxes.plans.plans.window needs size; it takes steps, size, low",
        "rewards.shapes.transform[0].lo: fakeaxes.reward_mix.transforms.clip has no argument 'lo'",
        "rewards.shapes.transform[1].fn: fakeaxes.reward_mix.transforms has no function 'rnak'",
        "kl.beta: missing",
        f"{file}: train: train needs group; it takes iterations, prompts, group",
        "override 'train.prompts=0': train.prompts: expected a whole number >= 1 and < 2**31, got",
    ):
        assert sum(part in line for line in said) == 1, (part, message)
    assert len(said) == 10


def test_checks_across_sections_are_told_together(file: Path) -> None:
    message = failure(file, "train.ema=0", "eval.score=x", "rewards.shapes.weight=0", "name=../up")
    assert message.startswith("4 mistakes:")


def test_sections_check_their_values_when_made_in_python() -> None:
    wrong = r"2 mistakes:\n  train\.group: .* got 0 .*\n  train\.ema: .* >= 0 and < 1, got 1\.5"
    with pytest.raises(ConfigError, match=wrong):
        TrainConfig(iterations=1, prompts=1, group=0, ema=1.5)


@pytest.mark.parametrize(
    "overrides", [[], ["plan={fn: cut}", "kl={fn: transition_kl, beta: 1}", "train.threads=1"]]
)
def test_dump_loads_again_to_an_equal_config(
    file: Path, tmp_path: Path, overrides: list[str]
) -> None:
    config = load_config(file, overrides)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
    assert load_config(again).dump() == config.dump()
    # the default is written out
    assert yaml.safe_load(config.dump())["train"]["max_grad_norm"] == 1.0


def test_every_field_of_the_config_is_in_the_dump(file: Path) -> None:
    kl, segment = "kl={fn: transition_kl, beta: 1}", "segment={fn: fixed, sizes: [2]}"
    copies = [f"{name}={{fn: ramp, slope: 0, limit: 0}}" for name in ("old", "slow")]
    beside = ["fake={fn: score, lr: 0.1}", "surrogate={fn: preference, lr: 0.1, beta: 1}"]
    beside += ["sampler={fn: variance_weighted}", "parts.steady={fn: steadykit.Steady, factor: 2}"]
    overrides = [kl, segment, "select={fn: fraction}", *copies, *beside]
    config = load_config(file, overrides, plugins=["steadykit"])
    dumped = yaml.safe_load(config.dump())
    fields = {f.name for f in dataclasses.fields(Config)} - {"source", "overrides", "plugins"}
    assert set(dumped) == fields == set(load.ORDER)


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


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    assert "UTF-8" in failure(tmp_path / "latin.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "cannot be read" in failure(tmp_path / "folder.yaml")
    assert "looked for" in failure(tmp_path / "none.yaml")


def test_a_shipped_config_that_is_not_there() -> None:
    """A hundred names would hide the one that was meant."""
    words = "is no shipped config; did you mean 'sd3/flow_grpo' or '"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config("sd3/flow_gpro")


def test_windows_file_with_a_byte_order_mark(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + file.read_text().replace("\n", "\r\n").encode())
    assert load_config(path) == load_config(file)


@pytest.mark.parametrize("name", list_configs())
def test_shipped_config_binds(name: str, tmp_path: Path) -> None:
    config = shipped(name)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config


ITERATIONS = range(30)


def test_only_plans_of_recorded_runs_have_a_seed_of_their_own() -> None:
    pinned = [n for n in list_configs() if shipped(n).plan.kwargs.get("seed") is not None]
    recorded = ("adv_grpo", "adv_grpo_gated", "flow_dppo", "flow_grpo", "flow_grpo_fast")
    assert pinned == [f"shapes/{name}" for name in recorded]


def test_windows_follow_the_run() -> None:
    """Where nothing is said, and after the config was written and read."""
    window = "plan={fn: random_window, steps: 9, size: 1, noise_scale: 0.4}"
    kwargs = {"steps": 9, "size": 1, "noise_scale": 0.4}
    starts = []
    for seed in (0, 5):
        config = load_config("shapes/flow_grpo_fast", [window, f"seed={seed}"])
        assert config.plan.kwargs["seed"] is None
        plan = config.call("plan")
        starts.append([int(plan(i).noise.argmax()) for i in ITERATIONS])
        want = [random_window(i, seed=seed, **kwargs) for i in ITERATIONS]  # type: ignore[arg-type]
        assert starts[-1] == [int(one.noise.argmax()) for one in want]
    assert starts[0] != starts[1]


def test_lora_follows_the_run(tmp_path: Path) -> None:
    """A is drawn in float32 from the seed, over the rank; the first layer's comes first."""
    folder = tiny_sd3(tmp_path / "sd3")
    model = f"model={{fn: sd3, path: {folder}, tune: lora, lora: {{rank: 2}}, device: cpu}}"
    for more, seed in (((), 5), (("model.seed=7",), 7)):
        config = load_config("shapes/flow_grpo", [model, "seed=5", *more])
        params = config.call("model")().trainable()
        first = next(value for name, value in params.items() if ".lora_A." in name)
        want = torch.randn(first.shape, generator=generator(seed, "lora")) / 2
        assert torch.equal(first.detach(), want)


text = st.text(string.printable)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text
names = st.text(string.ascii_letters, min_size=1)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
    max_leaves=6,
)
keys = st.lists(st.from_regex(r"[a-z_][a-z0-9_-]{0,8}", fullmatch=True), min_size=1, max_size=3)


@given(keys, values)
def test_override_round_trip(parts: list[str], value: Any) -> None:
    text = f"{'.'.join(parts)}={yaml.safe_dump(value, default_flow_style=True, width=10**6)}"
    assert parse_override(text) == (parts, value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.group", "expected key.subkey=value, for example optimizer.lr=1e-4"),
        ("=1", "expected key.subkey=value"),
        ("train.group=[1", "not valid YAML"),
        ("train.group=!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("train.group.x=1", "train.group is '8' (a text) and has no keys of its own"),
        ("rewards.sahpes=null", "rewards has no reward 'sahpes'; did you mean 'shapes'?"),
    ],
)
def test_what_is_no_override(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_override({"train": {"group": "8"}, "rewards": {"shapes": {}}}, override)
    assert message in str(caught.value) and repr(override) in str(caught.value)


def test_the_last_override_of_a_key_is_named() -> None:
    source = Source("a.yaml", ("plan.size=1", "plan={fn: full}", "rewards.x.weight=2"))
    assert source.at("plan.size") == "override 'plan={fn: full}': plan.size"
    assert source.at("train.ema") == "a.yaml: train.ema"
    assert source.at("rewards.x") == "a.yaml: rewards.x"
    assert source.below("rewards") == "override 'rewards.x.weight=2': rewards"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"run": ""}, "run: expected the path of a folder, got ''"),
        ({"run": 3}, "run: expected the path of a folder, got 3"),
        ({"resume": "yes"}, "resume: expected True, False, .* or \"changed\", got 'yes'"),
        ({"rewards": redness}, r"rewards: expected \{name: function\}, got <function redness"),
        ({"rewards": [redness]}, r"rewards: expected \{name: function\}, got \["),
        ({"rewards": {3: redness}}, "rewards: expected a name of letters, digits, - and _, got 3"),
        ({"rewards": {"a/b": redness}}, "rewards: expected a name of letters.*got 'a/b'"),
    ],
)
def test_what_training_is_told(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy(tmp_path / "toy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        train(config, quiet=True, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            (None,),
            "expected the name of a shipped config, .*got None",
        ),
        (({"name": "toy"},), "config: missing sections: model, prompts, image"),
        (
            ({"name": print},),
            "config: .* cannot be written in YAML; expected the name",
        ),
        (("{file}", "seed=1"), r"overrides: expected a list of texts, got 'seed=1' .*\['seed=1'\]"),
        (("{file}", {"seed": 1}), "overrides: expected a list of texts, got {'seed': 1}"),
        (("{file}", [3]), r"overrides: expected a list of texts, got \[3\]"),
        (("{file}", [], "toykit"), r"plugins: expected a list .*write \['toykit'\]"),
    ],
)
def test_what_a_config_is_loaded_from(given: Any, said: str, tmp_path: Path) -> None:
    first = str(write_toy(tmp_path)) if given[0] == "{file}" else given[0]
    with pytest.raises(ConfigError, match=said):
        flowrl.load_config(first, *given[1:])


def test_a_config_is_changed_and_stays_checked(tmp_path: Path) -> None:
    """Sections merge, a section with its `fn` is another one, and the file is still named."""
    config = toy(tmp_path)
    changed = config.replace("seed=5", train={"iterations": 20}, **{"optimizer.lr": 1e-5})
    assert (changed.seed, changed.train.iterations, changed.lr) == (5, 20, 1e-5)
    assert (config.train.iterations, changed.train.group) == (4, config.train.group)
    assert changed.replace() == changed and changed.plugins == config.plugins
    plan = {"fn": "random_window", "steps": 4, "size": 1, "low": 0, "high": 2, "noise_scale": 0.5}
    assert config.replace(plan=plan).plan.kwargs["size"] == 1
    assert config.replace(kl={"fn": "transition_kl", "beta": 0.1}).replace(kl=None).kl is None
    with pytest.raises(ConfigError, match=r"override 'train.iterations=0': .* got 0"):
        changed.replace(train={"iterations": 0})
    with pytest.raises(ConfigError, match="train.group: expected a value that a config can hold"):
        changed.replace(train={"group": print})
    with pytest.raises(ConfigError, match=r"did you mean 'iterations'"):
        changed.replace(train={"iteration": 1})
    shown = repr(changed)
    assert shown.startswith("Config('toy': model toykit.linear, rewards red, strict, 20 iterations")


def test_python_objects_of_a_config_stay_when_it_is_changed(tmp_path: Path) -> None:
    config = config_of(toy(tmp_path, "eval.score=red"), rewards={"red": redness, "new": redness})
    changed = config.replace(rewards={"new": {"weight": 0.5}}, seed=1)
    assert changed.reward_weights == {"red": 1.0, "new": 0.5}
    assert {call.function for call in changed.rewards.values()} == {redness}
    # from a file nobody knows them
    again = load_config(changed.to_dict(), plugins=("toykit",))
    with pytest.raises(ConfigError, match=r"flowrl.open\(run, rewards=\{'red': function\}\)"):
        again.rewards["red"].make()
    model = replace(changed, model=as_handed("model", dict)).replace(seed=2)
    assert model.call("model")() == {} and model.to_dict()["model"] == {"fn": "python"}
    with pytest.raises(ConfigError, match=r"flowrl.open\(run, model=model\)"):
        load_config(model.to_dict(), plugins=("toykit",)).call("model")()
    with pytest.raises(ConfigError, match="model.scale: the model is an object of the program"):
        model.replace(model={"scale": 2.0})
