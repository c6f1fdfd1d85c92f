"""What held-out prompts share with training prompts, by hand."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from toykit import toy

from flowrl.config.load import load_config
from flowrl.core.prompts import OPPOSITE, Overlap, PromptSet, load_prompts, overlap
from flowrl.doctor.before_loading import look_at_prompts
from flowrl.runs.suite import run_suite
from flowrl.training.run import OverlapWarning, warn_of_overlap
from flowrl.training.trainer import Trainer

ONE = ("train.prompts=1",)


def prompts(*texts: str) -> PromptSet:
    return PromptSet([*texts], [{"prompt": text} for text in texts], "some", "some.txt")


# held out, trained, and in which list the pair is
CASES = [
    ("a red square", "a red square", "same"),
    ("A red  square.", "a red square", "same"),
    ("a photo of a red square", "a red square", "paraphrased"),
    ("there is one red square", "a red square", "paraphrased"),
    ("a circle to the left of a square", "a circle left of a square", "paraphrased"),
    ("a circle left of a square", "a square right of a circle", "mirrored"),
    ("a photo of a cross above a square", "a square below a cross", "mirrored"),
    ("a circle left of a square", "a square left of a circle", None),
    ("a circle left of a square", "a circle right of a square", None),
    ("a red square", "a blue square", None),
    ("two squares", "a square", None),
]


@pytest.mark.parametrize(("held", "trained", "kind"), CASES)
def test_pairs_of_texts(held: str, trained: str, kind: str | None) -> None:
    found = overlap(prompts(held, "a dog"), prompts("a cat", trained))
    wanted = Overlap([], [], [])
    if kind is not None:
        getattr(wanted, kind).append((held, trained))
    assert found == wanted


def test_the_shipped_lists_by_a_second_count() -> None:
    """Pairs compared one by one, from the records' own fields."""
    test, train = (load_prompts(f"assets/shapes/{name}.jsonl") for name in ("test", "train"))

    def mirror(record: dict[str, Any]) -> list[Any]:
        first, second = record["include"]
        relation = OPPOSITE[second["position"][0]]
        turned = {**first, "position": [relation, 0]}
        return [{k: v for k, v in second.items() if k != "position"}, turned]

    def same_things(one: list[dict[str, Any]], two: list[dict[str, Any]]) -> bool:
        return (
            one in ([*p] for p in itertools.permutations(two))
            if "position" not in str(one)
            else one == two
        )

    mirrored, paraphrased = 0, 0
    for held in test.records:
        if any(same_things(held["include"], other["include"]) for other in train.records):
            paraphrased += 1
        elif held["tag"] == "position":
            mirrored += mirror(held) in [other["include"] for other in train.records]
    found = overlap(test, train)
    assert not found.same
    assert (len(found.mirrored), len(found.paraphrased)) == (mirrored, paraphrased)
    page = Path(__file__).resolve().parents[2] / "docs" / "shapes.md"
    said = f"{paraphrased} of its {len(test)} prompts ask for what a training prompt asks for"
    assert said in " ".join(page.read_text(encoding="utf-8").split())
    assert f"{mirrored} mirror" in " ".join(page.read_text(encoding="utf-8").split())


def test_a_run_says_so(tmp_path: Path) -> None:
    """One file for both lists: every prompt is known, and a warning says it once."""
    config = toy(tmp_path)
    same = toy(tmp_path, f"prompts.test={config.prompts.train}")
    count = len(load_prompts(config.prompts.train))
    with pytest.warns(UserWarning, match=f"{count} of {count} are training prompts too"):
        Trainer(same)


def written(file: Path, *rows: dict[str, Any]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


TRAINED = {"prompt": "a circle left of a square"}
KINDS = [
    (
        {"prompt": "a circle to the left of a square"},
        "1 of 1 ask for what a training prompt asks for in other words",
    ),
    ({"prompt": "a square right of a circle"}, "1 of 1 mirror a training prompt's relation"),
    ({"prompt": "A circle left of a square."}, "1 of 1 are training prompts too"),
    ({**TRAINED, "held_out": False}, "1 of 1 are training prompts too"),
]


@pytest.mark.parametrize(("held", "said"), KINDS)
def test_a_run_names_each_kind_by_itself(tmp_path: Path, held: dict[str, Any], said: str) -> None:
    """Also where no text is in both lists."""
    train = written(tmp_path / "known.jsonl", TRAINED)
    test = written(tmp_path / "held.jsonl", held)
    with pytest.warns(OverlapWarning, match=f"of the held-out prompts, {said}: "):
        Trainer(toy(tmp_path, f"prompts.train={train}", f"prompts.test={test}", *ONE))


@pytest.mark.parametrize("text", ["a circle to the left of a square", "a square right of a circle"])
def test_a_list_may_say_that_training_knows_what_it_asks_for(tmp_path: Path, text: str) -> None:
    """As the shapes lists do: of their four single shapes all wordings are known."""
    train = written(tmp_path / "known.jsonl", TRAINED)
    test = written(tmp_path / "held.jsonl", {"prompt": text, "held_out": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error", OverlapWarning)
        Trainer(toy(tmp_path, f"prompts.train={train}", f"prompts.test={test}", *ONE))
        config = load_config("shapes/flow_grpo")
        warn_of_overlap(load_prompts(config.prompts.train), load_prompts(config.prompts.test))


def test_prompts_that_start_from_other_things_are_others() -> None:
    """One of two equal texts has the same start in both lists, and one reworded text."""
    trained = prompts("make it red", "make it blue", "make the one blue")
    held = prompts("make it red", "make it blue", "make the one a blue")
    found = overlap(held, trained, (["a", "b", "c"], ["a", "c", "c"]))
    assert found.same == [("make it red", "make it red")]
    assert found.paraphrased == [("make the one a blue", "make the one blue")]


def test_a_column_of_a_csv_file_may_be_named_include(tmp_path: Path) -> None:
    """It is a text: prompts are compared by their words, in a run, the doctor and a suite."""
    (tmp_path / "known.csv").write_text("prompt,include,exclude\na red dot,circle,\na cat,x,y\n")
    (tmp_path / "held.csv").write_text("prompt,include\na photo of a red dot,square\na dog,x\n")
    lists = [f"prompts.train={tmp_path}/known.csv", f"prompts.test={tmp_path}/held.csv"]
    found = overlap(load_prompts(tmp_path / "held.csv"), load_prompts(tmp_path / "known.csv"))
    assert found == Overlap([], [], [("a photo of a red dot", "a red dot")])
    config = toy(tmp_path, *lists)
    said = "1 of 2 ask for what a training prompt asks for in other words"
    assert any(said in line for line in look_at_prompts(config).lines)
    with pytest.warns(OverlapWarning, match=said):
        Trainer(config).step()
    report = run_suite(config.call("model")(), config, "toy", tmp_path / "suite", target="toy")
    assert report["tasks"]["all"]["images"] == 4
