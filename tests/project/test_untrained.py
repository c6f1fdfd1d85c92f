"""What costs no training stands beside every gain of a method page, from the file that was judged
as the comparison was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comparisonkit import config, result
from docskit import PAGES, ROOT
from scriptkit import script_module

from flowrl.runs.compare.summary import summarize_result

RESULTS = ROOT / "assets/results"
# which files stand beside which comparison, as the tests of docs/compare.md have it
BESIDE = {
    "families": "families",
    "own-rates": "own-rates",
    **dict.fromkeys(("steps", "gradients", "ram"), "steps"),
    **dict.fromkeys(("opd", "ddpo", "spo"), "opd"),
    **dict.fromkeys(("find", "stepwise"), "find"),
    **dict.fromkeys(("dense", "spo-finished", "draft-lv"), "dense"),
    "own-noise": "own-noise",
    "find-own": "find-own",
    "narrow": "narrow",
    "gardo": "gardo",
    "imitation": "imitation",
    "rwr": "rwr",
    "spo-latent": "spo-latent",
    "spo-latent-fixed": "spo-latent-fixed",
    **dict.fromkeys(("dance", "direct-align"), "dance"),
    "slas": "slas",
    "uni-grpo": "uni-grpo",
    "combinations": "combinations",
    **dict.fromkeys(
        ("stepwise-five", "longer", "gaussian", "dpo-offline", "dina", "crd"), "stepwise-five"
    ),
}
OTHERS = ("paco-rl", "tdm-r1", "tdm-r1-own")


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"compare-{name}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", BESIDE)
def test_each_comparison_has_its_own_files(name: str) -> None:
    """Found by the setting, they are those that were measured for it."""
    module, files = script_module("untrained"), BESIDE[name]
    guided, best = (100 * read(f"{files}-{kind}")["strict"] for kind in ("guided", "best-of-8"))
    assert module.beside(read(name)) == (
        f" Beside it, without training: the base model with guidance 3.5 {guided:.1f} %, the best "
        f"of 8 of its images {best:.1f} %."
    )


def test_every_comparison_of_the_present_base_model_is_listed() -> None:
    later = script_module("measured").LATER
    files = sorted(one.file for one in later)
    # edits and the four-step student have files of their own kind beside them
    assert sorted(f"compare-{name}.json" for name in (*BESIDE, *OTHERS)) == files
    # the noisy-captions control was judged otherwise, and has no such files
    for name in (*OTHERS, "shapes"):
        assert script_module("untrained").beside(read(name)) == ""


def test_the_control_and_edits_have_theirs_on_every_page_of_a_method() -> None:
    """Their files are of other kinds, so they are put beside them by name."""
    module = script_module("untrained")
    for name, said in (("shapes", module.beside_control()), ("paco-rl", module.beside_edits())):
        for one in read(name)["configs"]:
            mark = f"<!-- measured: {one['name'].removeprefix('shapes-').replace('-', '_')} -->"
            (page,) = (text for text in PAGES.values() if f"{mark}\n" in text)
            block = page.partition(mark)[2].partition("\n\n")[0]
            assert said.strip() in " ".join(block.split()), mark
    control = (100 * read(f"shapes-{kind}")["strict"] for kind in ("guided", "best-of-8"))
    assert [f"{share:.1f} %" in module.beside_control() for share in control] == [True, True]


def test_files_of_another_setting_do_not_stand_beside_it(tmp_path: Path) -> None:
    """Another seed, list or number of images, or one file of the two: nothing is said."""
    module = script_module("untrained")
    made = summarize_result(result(config("shapes-vgpo", [0.2, 0.22])))
    made["base"]["images"] = 9
    made["configs"][0]["config"] = {"eval": {"seed": 5}, "prompts": {"test": "lists/few.jsonl"}}
    found = {"strict": 0.5, "images": 9}
    setting = {"seed": 5, "prompts": "few", "guidance": 2.0, "best_of": 4}

    def write(name: str, **other: Any) -> None:
        file = tmp_path / f"compare-x-{name}.json"
        file.write_text(json.dumps({**found, "setting": {**setting, **other}}), encoding="utf-8")

    for other in ({"seed": 6}, {"prompts": "many"}, {}):
        write("guided", **other)
        assert module.beside(made, tmp_path) == ""
    write("best-of-8")
    said = " Beside it, without training: the base model with guidance 2 50.0 %, the best of 4 of "
    assert module.beside(made, tmp_path) == f"{said}its images 50.0 %."
    made["base"]["images"] = 8
    assert module.beside(made, tmp_path) == ""


def test_what_the_demonstration_measured_is_on_its_page() -> None:
    """shapes/awm: five seeds, with the gain that docs/shapes.md and the README have."""
    found = json.loads((RESULTS / "demonstration.json").read_text(encoding="utf-8"))
    said = script_module("untrained").demonstrated()
    assert said.keys() == {"awm"}
    gain, (low, high) = found["rl_minus_base"]["mean"], found["rl_minus_base"]["interval"]
    words = f"{100 * gain:+.1f} points over 5 seeds (95 % {100 * low:+.1f} to {100 * high:+.1f})"
    page = " ".join(PAGES["docs/methods/awm.md"].split())
    assert words in said["awm"] and said["awm"] in page and "not compared yet" not in page
    assert "not compared yet" in " ".join(PAGES["docs/methods/baselines.md"].split())
    assert script_module("untrained").demonstrated(RESULTS / "nowhere.json") == {}
