"""What the calls take: each form of each argument means one thing, and a wrong one is one message
before anything is trained or written."""

from __future__ import annotations

import gc
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from comparekit import rehearse_few
from torch import Tensor
from toykit import linear, redness, toy, write_toy

import flowrl
from flowrl.api.arguments import Given, Sections, config_of
from flowrl.config.load import ORDER
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.prompts import load_prompts
from flowrl.runs import trackers
from flowrl.runs.trackers import Open, Place

PLUGIN = ("toykit",)
TEXTS = [f"a {color} dot, number {place}" for place in range(10) for color in ("red", "blue")]


def bright(images: Tensor, prompts: list[str]) -> Tensor:
    return images.mean((1, 2, 3))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse_few(monkeypatch)


class Rows:
    """What is left of datasets.Dataset: it is gone through, and its rows are mappings."""

    column_names = ("caption", "tag")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter({"caption": text, "tag": "dots"} for text in TEXTS)


# ------------------------------------------------------------------------------ config, overrides


def test_every_form_of_a_config_is_the_same_config(tmp_path: Path) -> None:
    file = write_toy(tmp_path)
    named = flowrl.load_config(file, plugins=PLUGIN)
    for form in (file, str(file), named.to_dict(), named):
        assert config_of(form, plugins=PLUGIN) == named
    assert config_of(named) == named  # which knows its plugins
    assert config_of(named, plugins="toykit") == named
    assert flowrl.Trainer(named.to_dict(), plugins=PLUGIN).config == named
    assert config_of("shapes/awm").name == "shapes-awm"


def test_every_form_of_an_override_is_the_same(tmp_path: Path) -> None:
    """Keywords stand above overrides."""
    file, wanted = write_toy(tmp_path), toy(tmp_path, "train.iterations=9", "seed=5")
    forms: list[dict[str, Any]] = [
        {"overrides": ["train.iterations=9", "seed=5"]},
        {"overrides": {"train": {"iterations": 9}, "seed": 5}},
        {"overrides": {"train.iterations": 9, "seed": 5}},
        {"train": {"iterations": 9}, "seed": 5},
        {"overrides": "seed=5", "train": {"iterations": 9}},
        {"overrides": {"train": {"iterations": 2}, "seed": 5}, "train": {"iterations": 9}},
    ]
    for form in forms:
        sections = {key: form.pop(key) for key in [*form] if key != "overrides"}
        assert config_of(file, plugins=PLUGIN, **sections, **form) == wanted


def test_sections_are_those_of_a_config() -> None:
    """What an editor offers is all there is, but for what has an argument of its own."""
    assert {*Sections.__annotations__} == {*ORDER} - {"model", "prompts", "rewards"}


# ------------------------------------------------------------------- the same in each of the calls


def called(name: str, config: Any, folder: Path, **given: Any) -> Any:
    """Call one of the seven, as small as it can be."""
    budgets: dict[str, Any] = {"nfe": 150, "quiet": True}
    if name == "compare":
        out: dict[str, Any] = {
            "runs": folder / "c",
            "out": folder / "c/result.json",
            "seconds": 0,
            "seeds": [0],
        }
        return flowrl.compare([config], points=1, **budgets, **out, **given)
    if name == "tune":
        pytest.importorskip("optuna")
        space = {"optimizer.lr": [0.01, 0.02]}
        return flowrl.tune(config, space, out=folder / "t", **budgets, **given)
    if name == "train":
        return flowrl.train(config, folder / "run", quiet=True, **given)
    if name == "doctor":
        return flowrl.doctor(config, only=["prompts"], **given)
    return getattr(flowrl, name)(config, **given)


SEVEN = ("train", "Trainer", "evaluate", "compare", "tune", "estimate", "doctor")
WRONG: dict[str, tuple[Any, str]] = {
    "model": (3, "model: expected a folder or a hub id, a loaded pipeline of diffusers"),
    "prompts": (3, "prompts: expected a path or the name of a list, a list of texts or of"),
    "test_prompts": (3, "test_prompts: expected a path or the name of a list"),
    "rewards": (3, "rewards: expected a function, the name of a shipped reward, a list"),
    "overrides": (3, "overrides: expected a list of texts like"),
    "plugins": (3, "plugins: expected a list of texts"),
    "callbacks": ([3], r"callbacks\[0\]: expected a part, an instance of a class on"),
    "track": ("wanbd", "track: .*did you mean 'wandb'"),
    "train": ({"iteration": 3}, "no argument 'iteration'; did you mean 'iterations'"),
    "sections": ({}, "the call has no argument 'sections'"),
    "given": ({}, "the call has no argument 'given'"),
}


@pytest.mark.parametrize("argument", WRONG)
@pytest.mark.parametrize("name", SEVEN)
def test_each_call_checks_each_argument_alike(name: str, argument: str, tmp_path: Path) -> None:
    given, said = WRONG[argument]
    file = write_toy(tmp_path)
    before = {*tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=said):
        called(name, file, tmp_path, **{"plugins": PLUGIN, argument: given})
    assert {*tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", SEVEN)
def test_each_call_shows_each_argument(name: str) -> None:
    """By name and with its default, once as notebooks see it and once as editors and mypy do."""
    shared = {**inspect.signature(config_of).parameters}
    del shared["config"], shared["quiet"]
    assert {*shared} == {*Given.__annotations__} - {*Sections.__annotations__} | {"sections"}
    for one in Given.__annotations__:
        assert (
            one not in shared
            or shared[one].annotation == Given.__annotations__[one].__forward_arg__
        )
    seen = inspect.signature(getattr(flowrl, name))
    assert {one: seen.parameters.get(one) for one in shared} == shared
    seen.bind("shapes/awm", **({"space": {}} if name == "tune" else {}), train={}, track=["wandb"])


@pytest.mark.parametrize("name", SEVEN)
def test_what_is_made_is_tracked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs of `train`, `compare` and `tune`, the steps of a Trainer, the scores of an
    evaluation; what makes none of these knows the argument, and tells nothing."""
    told: list[tuple[int, set[str]]] = []
    closed: list[str] = []

    def begin(place: Place, config: Any) -> Open:
        assert config["name"] == "toy"
        return Open(
            lambda values, at: told.append((at, {*values})),
            lambda levels: 0.0,
            lambda: closed.append(place.name),
        )

    monkeypatch.setitem(trackers.TRACKERS, "json", begin)  # a package that is there
    made = called(name, write_toy(tmp_path), tmp_path, plugins=PLUGIN, track=["json"])
    if name == "Trainer":
        made.step()
        del made
        gc.collect()
    seen: dict[int, set[str]] = {}
    for at, keys in told:
        seen[at] = seen.get(at, set()) | keys
    if name in ("estimate", "doctor"):
        assert not told and not closed
        return
    assert len(closed) == (2 if name == "tune" else 1)
    if name != "evaluate":
        assert {"reward", "loss"} <= seen[0]
    if name != "Trainer":
        last = seen[max(seen)]
        assert {"eval/red", "eval/low", "eval/high"} <= last


# --------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    "given",
    [
        TEXTS,
        tuple(TEXTS),
        (text for text in TEXTS),
        dict.fromkeys(TEXTS).keys(),
        [{"prompt": text} for text in TEXTS],
        [{"caption": text} for text in TEXTS],
        [{"text": text} for text in TEXTS],
        Rows(),
    ],
    ids=["list", "tuple", "generator", "view", "prompt", "caption", "text", "dataset"],
)
def test_a_tenth_of_a_list_is_held_out(
    given: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same ones whatever the form, and none of them is trained on."""
    config = config_of(write_toy(tmp_path), False, prompts=given, plugins=PLUGIN)
    train, test = load_prompts(config.prompts.train), load_prompts(config.prompts.test)
    assert sorted([*train.texts, *test.texts]) == sorted(TEXTS) and len(test) == 2
    assert [*test.texts] == [text for text in TEXTS if text in test.texts]
    again = config_of(write_toy(tmp_path), prompts=reversed(TEXTS), plugins=PLUGIN)
    assert {*load_prompts(again.prompts.test).texts} == {*test.texts}
    said = capsys.readouterr().err
    assert "no test_prompts were given: 2 of 20 prompts are held out to judge by" in said


def test_lists_of_both_kinds(tmp_path: Path) -> None:
    file = write_toy(tmp_path)
    (tmp_path / "my.txt").write_text("one\ntwo\nthree\n")

    def lists(**given: Any) -> tuple[list[str], list[str]]:
        config = config_of(file, plugins=PLUGIN, **given)
        return load_prompts(config.prompts.train).texts, load_prompts(config.prompts.test).texts

    own = lists()
    assert lists(prompts=["a", "b"], test_prompts=["c"]) == (["a", "b"], ["c"])
    from_file = lists(prompts={"train": ["a"], "test": tmp_path / "my.txt"})
    assert from_file == (["a"], ["one", "two", "three"])
    # of what is not named the config's own stays, but where a list would be judged by another's
    assert lists(test_prompts=["c"]) == (own[0], ["c"])
    assert lists(prompts={"train": ["a"]}) == (["a"], own[1])
    held = lists(prompts=str(tmp_path / "my.txt"))
    assert sorted(held[0] + held[1]) == ["one", "three", "two"] and len(held[1]) == 1


def test_equal_texts_are_not_parted_and_files_stay_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that comes twice is on one side; what a record names lies where it lay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.png").write_bytes(b"")
    records = [{"prompt": text, "source": ["photo.png"], "n": 1} for text in TEXTS[:4] * 2]
    config = config_of(write_toy(tmp_path), prompts=records, plugins=PLUGIN)
    train, test = load_prompts(config.prompts.train), load_prompts(config.prompts.test)
    assert (len(train), len(test)) == (6, 2) and not {*train.texts} & {*test.texts}
    assert train.records[0]["source"] == [str(tmp_path / "photo.png")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": b"a red dot"}, "prompts: expected a path or the name of a list"),
        ({"prompts": {"prompt": "a"}}, r"prompts: .* a list of one record is \[\{'prompt'"),
        ({"prompts": " "}, "prompts: expected a path or a name, got an empty text"),
        ({"prompts": ["one"]}, "prompts: expected at least two different prompts"),
        ({"prompts": ["one", "One "]}, "prompts: expected at least two different prompts"),
        ({"prompts": []}, r"prompts: expected at least one prompt, got none"),
        ({"prompts": ["a", 3]}, r"prompts\[1\]: expected a text or an object with a prompt"),
        ({"prompts": [{"tag": "a"}]}, r'prompts\[0\]: expected the key "prompt" .*got \'tag\''),
        ({"prompts": [{"prompt": "a", "image": object()}]}, "leave such columns out"),
        ({"prompts": ["a"], "test_prompts": [""]}, r"test_prompts\[0\]: expected a text that is"),
        ({"rewards": []}, "rewards: expected at least one, got none"),
        ({"rewards": {"red": 3}}, "rewards.red: expected a function, the name of a shipped reward"),
        ({"rewards": {"a/b": redness}}, "rewards: expected a name of letters.*got 'a/b'"),
        ({"rewards": [redness, redness]}, "rewards: two of them are called 'redness'; name them"),
        ({"rewards": "pikscore"}, "has no file 'pikscore'; did you mean 'pickscore'"),
        ({"model": ""}, "model: expected a folder or a hub id, got an empty text"),
        ({"overrides": [3]}, "overrides: expected a list of texts, got"),
        ({"overrides": {"train": {"group": {1}}}}, "train.group: expected a value that a config"),
        ({"trian": {"iterations": 3}}, "the call has no argument 'trian'; did you mean 'train'"),
        (
            {"callbacks": 3},
            "callbacks: expected a list of parts, objects of classes on",
        ),
        ({"track": 3}, r"track: expected a list of names, as in \['wandb'\]"),
        ({"reward": bright}, "has no argument 'reward'; did you mean 'rewards'"),
        ({"iterations": 3}, "iterations is a key of train: train={'iterations': ...}"),
        ({"prompts": "a red cube"}, r"there is no file .*prompts=\['a red cube'\]"),
        ({"run": 3}, "run: expected the path of a folder, got 3"),
    ],
)
def test_a_wrong_type_is_one_message_at_the_door(
    given: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_toy(tmp_path / "toy")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ConfigError, DataError), match=said):
        flowrl.train(config, **{"plugins": PLUGIN, "quiet": True, **given})
    assert [path.name for path in tmp_path.iterdir()] == ["toy"]


@pytest.mark.parametrize("takes", [flowrl.train, flowrl.estimate, flowrl.Trainer, flowrl.doctor])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "expected the name of a shipped config, the path of a YAML file, a mapping"),
        ({"name": "toy"}, "config: missing sections: model"),
        ("shapes/flow_grop", "did you mean 'shapes/flow_grpo'"),
        (Path("my.yaml"), "my.yaml"),
    ],
    ids=["none", "dict", "name", "path"],
)
def test_what_is_no_config(
    takes: Callable[[Any], Any],
    given: Any,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=said):
        takes(given)
    assert not any(tmp_path.iterdir())


# --------------------------------------------------------------------------------------- rewards


def test_every_form_of_rewards(tmp_path: Path) -> None:
    file = write_toy(tmp_path)

    def weights(rewards: Any) -> dict[str, float]:
        return config_of(file, rewards=rewards, plugins=PLUGIN).reward_weights

    assert weights(bright) == weights([bright]) == {"bright": 1.0}
    assert weights({"mine": bright}) == weights({"mine": {"fn": bright}}) == {"mine": 1.0}
    assert weights({"mine": {"fn": bright, "weight": 0.5}, "jpeg": "jpeg"}) == {
        "mine": 0.5,
        "jpeg": 1.0,
    }
    assert weights("jpeg") == {"jpeg": 1.0} and [*weights(["jpeg", bright])] == ["jpeg", "bright"]
    assert weights(lambda images: images.mean((1, 2, 3))) == {"reward": 1.0}
    # one of the config's name keeps its weight, and a part of its call may change
    assert weights({"strict": bright, "red": redness}) == {"strict": 0.0, "red": 1.0}
    assert weights({"red": {"weight": 2.0}}) == {"red": 2.0}


def test_the_score_of_evaluations_follows_the_rewards(tmp_path: Path) -> None:
    config = toy(tmp_path, "eval.score=strict", "eval.best_by=strict")
    assert config_of(config, rewards=bright).headline == "bright"
    assert config_of(config, rewards=["jpeg"]).eval.best_by == ""
    assert config_of(config, rewards={"a": bright, "strict": bright}).headline == "strict"


# ----------------------------------------------------------------------------------------- models


def test_a_flow_model_is_as_it_was_for_each_call(tmp_path: Path) -> None:
    """Training changes the object; another call begins with what was handed over."""
    model = linear(scale=0.3)
    start = {name: value.detach().clone() for name, value in model.trainable().items()}
    config = config_of(write_toy(tmp_path), model=model, plugins=PLUGIN)
    trainer = flowrl.Trainer(config)
    assert trainer.model is model
    trainer.step()
    assert any(not value.equal(start[name]) for name, value in model.trainable().items())
    assert config.call("model")() is model
    assert all(value.equal(start[name]) for name, value in model.trainable().items())
    assert config.to_dict()["model"] == {"fn": "python"}


def test_a_folder_brings_the_adapter_of_its_class(tmp_path: Path) -> None:
    config = config_of("flux/flow_grpo_fast", model="assets/shapes-sd3")
    assert (config.model.fn, config.model.kwargs["path"]) == ("sd3", "assets/shapes-sd3")
    assert config.model.kwargs["lora"] == {"rank": 64, "alpha": 128}
    own = config_of("sd3/flow_grpo_fast", model={"path": "assets/shapes-sd3", "guidance": 2.0})
    assert own.model.kwargs["guidance"] == 2.0
    with pytest.raises(ModelError, match="no model at 'assets/shapes-sd4'"):
        flowrl.Trainer("shapes/awm", model="assets/shapes-sd4")


# ------------------------------------------------------------------------------- the other calls


def test_the_other_calls_take_the_same(tmp_path: Path) -> None:
    file: Any = write_toy(tmp_path)
    given: dict[str, Any] = {"plugins": PLUGIN, "rewards": bright, "prompts": TEXTS, "seed": 5}
    assert "bright" in flowrl.evaluate(file, **given)["rewards"]
    assert flowrl.evaluate(file, **given)["setting"]["count"] == len(TEXTS)
    assert flowrl.estimate(file, **given).config.seed == 5
    seen = flowrl.doctor(file, **given, only=["prompts", "rewards"])
    assert [one.name for one in seen.sections] == ["prompts", "start", "rewards"]
    result = flowrl.compare(
        [file, flowrl.load_config(file, ["name=other"], PLUGIN)],
        **{**given, "seed": 0},
        seeds=[0],
        nfe=200,
        seconds=0,
        points=1,
        runs=tmp_path / "compared",
        out=tmp_path / "compared/result.json",
        quiet=True,
    )
    assert {entry["name"] for entry in result["configs"]} == {"toy", "other"}
    kept = (tmp_path / "compared/prompts/train.jsonl").read_text().splitlines()
    assert len(kept) == 18 and json.loads(kept[0])["prompt"] in TEXTS
    with pytest.raises(ConfigError, match="processes: rewards.bright is an object of this program"):
        flowrl.compare([file], **given, processes=2, runs=tmp_path / "b")
    config = flowrl.load_config(file, plugins=PLUGIN)
    with pytest.raises(ConfigError, match="configs: two of them are called 'toy'"):
        flowrl.compare([config, config.replace(optimizer={"lr": 0.5})], runs=tmp_path / "b")
    with pytest.raises(ConfigError, match="configs: expected a list of configs"):
        flowrl.compare(file, plugins=PLUGIN)


class Steps(flowrl.Part):
    """Stop after one iteration, and note in which run."""

    ended: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.seen = 0

    def after_iteration(self, run: Any, it: Any) -> None:
        self.seen += 1
        self.ended.append(self.seen)

    def calls(self, task: Any, made: Any, iteration: int) -> int:
        return 1000


def test_parts_join_in_every_call_that_trains_or_forecasts(tmp_path: Path) -> None:
    """Each run of a comparison has a part of its own, so that none goes on where another ended."""
    file: Any = write_toy(tmp_path)
    given: dict[str, Any] = {"plugins": PLUGIN, "rewards": bright, "prompts": TEXTS}
    part = Steps()
    config = config_of(file, callbacks=[part, Steps()], **given)
    assert config.to_dict()["parts"] == {"Steps": {"fn": "python"}, "Steps-2": {"fn": "python"}}
    made = config.replace(seed=3).parts["Steps"].make()  # also after a change
    assert isinstance(made, Steps) and made is not part
    with pytest.raises(ConfigError, match="Hand it over again: callbacks"):
        flowrl.load_config(config.to_dict(), plugins=PLUGIN, need_rewards=False).parts[
            "Steps"
        ].make()
    plain = flowrl.estimate(file, **given).forecast.calls
    assert flowrl.estimate(file, callbacks=[part], **given).forecast.calls >= plain + 1000
    Steps.ended.clear()
    flowrl.compare(
        [file],
        callbacks=[part],
        **given,
        seeds=[0, 1],
        nfe=150,
        seconds=0,
        points=1,
        runs=tmp_path / "compared",
        out=tmp_path / "compared/result.json",
        quiet=True,
    )
    assert Steps.ended.count(1) == 2 and part.seen == 0
    with pytest.raises(ConfigError, match=r"processes: rewards.bright, parts.Steps are"):
        flowrl.compare([file], callbacks=[part], **given, processes=2, runs=tmp_path / "b")
    wrong: Any
    for wrong in (3, [], "ab", [0.5], [-1]):
        with pytest.raises(ConfigError, match=r"seeds: expected whole numbers, as in seeds=\(0"):
            flowrl.compare([file], **given, seeds=wrong, runs=tmp_path / "c")
    with pytest.raises(ConfigError, match="nfe: expected a number of 0 or more, got 'many'"):
        flowrl.compare([file], **given, nfe="many", runs=tmp_path / "c")  # type: ignore[arg-type]


def test_what_calls_return_fits_a_line(tmp_path: Path) -> None:
    file: Any = write_toy(tmp_path)
    given: dict[str, Any] = {"plugins": PLUGIN, "rewards": bright, "prompts": TEXTS}
    found = repr(flowrl.estimate(file, **given))
    assert found.startswith("Estimate('toy': memory not counted, ") and "images and" in found
    found = repr(flowrl.estimate("shapes/flow_grpo"))
    assert re.search(r"'shapes-flow-grpo': [\d.]+ [GM]iB in \w+; 512 images and 2,816", found)
    seen = flowrl.doctor(file, **given, only=["prompts"])
    assert repr(seen).startswith(f"Checkup('toy': {len(seen.findings) or 'nothing'} to change")
    assert len(repr(seen)) < 300


def test_a_search_takes_the_same(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    result = flowrl.tune(
        write_toy(tmp_path),
        {"optimizer.lr": [0.01, 0.02]},
        rewards=bright,
        prompts=TEXTS,
        plugins=PLUGIN,
        nfe=200,
        out=tmp_path / "tuned",
        quiet=True,
    )
    assert len(result["trials"]) == 2 and (tmp_path / "tuned/best.yaml").is_file()
    with pytest.raises(ConfigError, match="space: expected what each key may be"):
        flowrl.tune("shapes/awm", 3)  # type: ignore[arg-type]
