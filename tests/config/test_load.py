"""Whole configs: what mistakes say, that all are told, and what is written loads again."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from flowrl.config import load
from flowrl.config.load import Config, load_config
from flowrl.config.sections import TrainConfig
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs


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
    beside += ["sampler={fn: variance_weighted}"]
    overrides = [kl, segment, "select={fn: fraction}", *copies, *beside]
    dumped = yaml.safe_load(load_config(file, overrides).dump())
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
    words = "is no shipped config; did you mean 'sd3/flow_grpo'? `flowrl configs` lists all"
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config("sd3/flow_gpro")


def test_windows_file_with_a_byte_order_mark(tmp_path: Path, file: Path) -> None:
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + file.read_text().replace("\n", "\r\n").encode())
    assert load_config(path) == load_config(file)


@pytest.mark.parametrize("name", list_configs())
def test_shipped_config_binds(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    again = tmp_path / "again.yaml"
    again.write_text(config.dump())
    assert load_config(again) == config
