"""configs/methods.yaml, the only catalogue of methods, and `flowrl methods`."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from shippedkit import shipped

from flowrl.cli.main import main
from flowrl.config.calls import Call
from flowrl.config.schema import functions
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_configs, resource
from flowrl.runs.catalogue import (
    _PAGE,
    AXES,
    describe_method,
    load_methods,
    methods_in_full,
    methods_table,
    parse_methods,
    status_words,
)

METHODS = load_methods()
BY_SLUG = {method.slug: method for method in METHODS}
BASELINES = ("rwr", "best_of_n")
COMBINED = {"tree_window_chunk", "cps_branch", "guard_window"}
COMBINED |= {"nft_win_rate", "awm_tree", "dpo_siblings", "prior_grpo"}
ENTRY = """
- slug: new
  name: New
  paper: {title: A new method, arxiv: "2501.00001", year: 2025}
  status: exact
  summary: It is new.
"""


@functools.cache
def configs() -> list[dict[str, Any]]:
    """Return what the catalogue says of all configs."""
    return [row for method in METHODS for row in describe_method(method)["configs"]]


def test_every_config_belongs_to_one_method() -> None:
    owned = [name for method in METHODS for name in method.configs]
    assert sorted(owned) == list_configs()


@pytest.mark.parametrize("slug", BY_SLUG)
def test_a_method_begins_with_its_config_of_shapes(slug: str) -> None:
    """`shapes/flow_grpo` is the main job, which is Fast's, and SRPO's reward has no words there to
    compare: these two have another name."""
    named = {"flow_grpo": "shapes/flow_grpo_full", "srpo": "shapes/direct_align"}
    assert BY_SLUG[slug].configs[0] == named.get(slug, f"shapes/{slug}")


def test_status_and_papers() -> None:
    """Of some methods a part could not be read, two baselines have values of our own; combinations
    have no paper. The name of a config's paper stands in the config."""
    unsure = {m.slug for m in METHODS if m.status == "reconstruction" and m.paper}
    known = {"vgpo", "dynamic_treerpo", "dense_grpo", "stepwise_flow_grpo"}
    known |= {"diverse_grpo", "dina_lrm", "spo_finished", "spo_latent", "find_narrow"}
    known |= {"slas", "norm_guard", "tdm_r1", "drm", "qwen_recipe", "mind_v", "auto_rubric"}
    assert unsure == {*known, *BASELINES}
    assert "LayerTuning-RL" in BY_SLUG["dynamic_treerpo"].name
    assert {m.slug for m in METHODS if m.paper is None} == COMBINED
    for method in METHODS:
        assert method.summary.endswith(".") and method.summary.count(". ") == 0
        if method.paper:
            for name in method.configs:
                text = resource(f"configs/{name}.yaml").read_text(encoding="utf-8")
                assert f"arXiv {method.paper.arxiv}" in text, name
            assert method.paper.arxiv.startswith(str(method.paper.year % 100))


def test_parts_of_another_status() -> None:
    """Each is a config of the method, a function that a config can name, or said in words; whoever
    reads the table or the page is told."""
    named = {name for axis in AXES for name in functions(axis)}
    for method in METHODS:
        for part, status in method.parts.items():
            known = part in method.configs or " " in part or part in named
            assert known and status != method.status, (method.slug, part)
    adv = BY_SLUG["adv_grpo"]
    said = status_words(adv.status, adv.parts, "`")
    ours = ("adversarial_layers", "shapes/adv_grpo_gated", "shapes/adv_awm")
    assert said == "exact; reconstruction: " + ", ".join(f"`{name}`" for name in ours)
    words = status_words("exact", {"its loss": "reconstruction"}, "`")
    assert words == "exact; reconstruction: its loss"
    assert status_words("exact", {}) == "exact"


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("status: exact", "status: sure", ["0.status", "'exact'", "'sure'"]),
        ("summary: ", "sumary: ", ["0.sumary", "Extra inputs", "Field required"]),
        ('"2501.00001"', '"2501"', ["0.paper.arxiv", "'2501'"]),
        ("year: 2025", "year: early", ["0.paper.year", "'early'"]),
        ("slug: new", "slug: [", ["expected YAML"]),
    ],
)
def test_mistakes_are_named(old: str, new: str, messages: list[str]) -> None:
    """All that are in the file, each with the entry and the key."""
    assert parse_methods(ENTRY, "here")[0].paper is not None
    with pytest.raises(ConfigError) as error:
        parse_methods(ENTRY.replace(old, new), "here")
    assert [text for text in ["here: ", *messages] if text not in str(error.value)] == []


def test_no_two_methods_of_one_name() -> None:
    with pytest.raises(ConfigError, match=r"a slug of its own for each, got \['new'\] twice"):
        parse_methods(ENTRY + ENTRY, "here")
    with pytest.raises(ConfigError, match=r"a name of its own for each, got \['New'\] twice"):
        parse_methods(ENTRY + ENTRY.replace("slug: new", "slug: other"), "here")


@pytest.mark.parametrize("name", list_configs())
def test_the_axes_are_those_of_the_loaded_config(name: str) -> None:
    """The catalogue reads the names from the file; what the file leaves out is a default."""
    (axes,) = (row["axes"] for row in configs() if row["config"] == name)
    config = shipped(name)
    for axis in AXES:
        value = getattr(config, axis)
        many = value.values() if isinstance(value, dict) else value
        calls = [value] if isinstance(value, Call) else list(many or ())
        loaded = [call.fn for call in calls]
        assert axes.get(axis, loaded) == loaded, axis


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """--json has what is known; the table has one short line per method, columns aligned."""
    assert main(["methods", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["slug"] for row in rows] == list(BY_SLUG)
    assert main(["methods"]) == 0
    text = capsys.readouterr().out
    assert text == methods_table(rows) + "\n" and "calls" not in text
    # the table is as wide as its longest cells and two spaces between them, the notes as a page
    table, _, notes = text.partition("\n\n")
    assert max(map(len, notes.splitlines())) <= _PAGE
    head, rule, *lines = table.splitlines()
    cells = [("name", "method", "paper", "status", "verified")]
    for method, line in zip(METHODS, lines, strict=True):
        paper = method.paper.arxiv if method.paper else "combination"
        last = line[head.index("verified") :]
        cells.append((method.slug, method.name, paper, method.status, last))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    assert len(rule) == max(map(len, [head, *lines])) == sum(widths) + 2 * 4
    assert [line[head.index("status") :].split()[0] for line in lines] == [
        method.status for method in METHODS
    ]
    for line, method in zip(lines, METHODS, strict=True):
        assert line.split()[0] == method.slug and f" {method.name} " in line
    (branch,) = (line for line in lines if line.startswith("branch_grpo "))
    assert "2509.06040" in branch and branch.endswith("3 seeds")
    narrow = re.sub(r"\x1b\[\d*m", "", methods_table(rows, width=80))
    assert max(map(len, narrow.splitlines())) <= 80


def test_one_method_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    """By slug or name, once: each config with its axes and how far it was tried."""
    assert main(["methods", "branch_grpo", "BranchGRPO", "crd"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert [line for line in lines if line in ("branch_grpo: BranchGRPO", "crd: CRD")] == [
        "branch_grpo: BranchGRPO",
        "crd: CRD",
    ]
    (first,) = (line for line in lines if line.startswith("shapes/branch_grpo "))
    assert first.split()[1:3] == ["3", "seeds"] and "tree, dance_sde, depth_norm" in first
    for name in BY_SLUG["branch_grpo"].configs:
        assert f"\n{name} " in text
    assert "arXiv 2509.06040, 2025" in " ".join(text.split()) and "calls per image" not in text
    # none of that name
    assert main(["methods", "branchgrp"]) == 2
    said = "expected the name of a method, such as flow_grpo, got 'branchgrp'; did you mean"
    assert said in capsys.readouterr().err


def test_it_says_how_far_the_costs_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal, before the first config is loaded, too."""
    monkeypatch.setattr("flowrl.cli.output.in_terminal", lambda: True)
    assert main(["methods", "crd", "--cost"]) == 0
    out, error = capsys.readouterr()
    assert error == "\r0 of 1 methods\r1 of 1 methods\n"
    assert "calls per image: network calls" in out


def test_what_a_config_costs() -> None:
    row = describe_method(BY_SLUG["mix_grpo"], cost=True)
    assert row["paper"]["arxiv"] == "2507.21802" and row["status"] == "exact"
    (flux,) = (config for config in row["configs"] if config["config"] == "flux/mix_grpo")
    # 32 x 12 images of 25 calls each while sampling, the first once for all 12; 4 trained states
    # of 3 calls, likewise
    sampling, training = 32 * (12 * 25 - 11), 32 * (12 * 4 - 11) * 3
    wanted = {"images": 384, "sampling_calls": sampling, "calls": sampling + training}
    assert {key: flux[key] for key in wanted} == wanted and flux["guided"] is False
    assert flux["calls_per_image"] == 33.333
    assert flux["axes"]["rewards"] == ["hpsv2", "pickscore", "image_reward"]
    assert flux["axes"]["aggregate"] == ["advantage_sum"]
    assert flux["axes"]["plan"] == ["sliding_window"]
    head, _, line, *_ = methods_table([row]).splitlines()
    numbers = [config["calls_per_image"] for config in row["configs"]]
    assert head.endswith("calls per image")
    assert line.endswith(f" {min(numbers):.1f} to {max(numbers):.1f}")
    assert re.search(r"^flux/mix_grpo .* 33\.3$", methods_in_full([row]), re.MULTILINE)
