"""The table of docs/pipelines.md is what was measured, and a drawn handful is measured again."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
from docskit import ROOT
from pipelineruns import SAME_SLOPE, slope_gap, trained
from pipelinetable import (
    EDITS,
    FILE,
    IMAGES,
    MAPPINGS,
    MOVED,
    NAMED,
    UNSERVED,
    VIDEOS,
    classes,
    record,
    row,
    served,
    table,
)
from tinypipelines import TINY

PAGE = (ROOT / "docs/pipelines.md").read_text(encoding="utf-8")
ROWS = record()
# one of noise, one whose latents stand in for a draw, one with a tokenizer of its own, one refused
DRAWN = ["LattePipeline", "Kandinsky5T2VPipeline", "QwenImage21Pipeline", "AnyFlowPipeline"]
DRAWN += ["KolorsPipeline"]  # whose reader diffusers has itself, with a package's stand-in
TRAINED = ["Lumina2Pipeline", "CogVideoXPipeline", "BriaFiboEditPipeline"]


def test_every_class_was_measured_and_the_page_is_what_was_found() -> None:
    names = {name for group in classes().values() for name in group}
    assert len(MAPPINGS) == 4 and len(names) > 100
    assert ROWS.keys() == names
    assert table(ROWS) in PAGE


def test_so_many_are_served() -> None:
    """The aims: 25 classes that make images, 8 that make videos, 6 that edit."""
    counts = {title: len(served(ROWS, title)) for title in MAPPINGS}
    assert counts[IMAGES] >= 25 and counts[EDITS] >= 6
    assert counts[VIDEOS] + counts[MOVED] >= 8
    assert all(found["served"] != "not tried" for found in ROWS.values())


def test_where_awm_was_trained_diffusers_loads_the_weights() -> None:
    """Three iterations, samples, and an export with which the plain pipeline makes the images of
    the run's model, which are not those of the pipeline before."""
    for name, found in ROWS.items():
        if found["served"] in UNSERVED:
            assert found["says"] and "run" not in found, name
            continue
        run = found.get("run")
        if run is None:  # the page says of how many
            continue
        assert run["iterations"] == 3 and run["samples"] >= 1, name
        assert run["images"] < 1e-4 and run.get("velocity", 0) < 1e-4, name
        assert run["moved"] > 1e-4, name
        # before the first update of a reverse method, and the gradient beside finite differences
        assert run.get("ratio", 0) < 1e-5 and run.get("slope", 0) < SAME_SLOPE, name


@pytest.mark.parametrize("name", DRAWN)
def test_what_a_class_shows_is_what_was_measured(name: str) -> None:
    assert row(name) == {key: ROWS[name][key] for key in ("served", "shares", "says")}


def test_what_is_refused_by_its_class_is_what_was_measured() -> None:
    untried = [name for name in ROWS if name not in TINY]
    assert len(untried) > 40 and {*NAMED} <= {*untried}
    for name in untried:
        assert row(name) == ROWS[name]


def test_gradients_pass_through_experts_that_rest_without_them() -> None:
    """HiDream's experts work under no_grad but in training, a tenth of the slope."""
    assert slope_gap("HiDreamImagePipeline") < 1e-2


@pytest.mark.integration
@pytest.mark.parametrize("name", TRAINED)
def test_a_class_is_trained_and_diffusers_loads_the_weights(name: str, tmp_path: Path) -> None:
    run = trained(name, tmp_path)
    assert run["iterations"] == 3 and run["samples"] >= 1
    assert run["images"] < 1e-4 and run["velocity"] < 1e-4 and run["moved"] > 1e-3


def test_it_was_measured_with_a_version_of_diffusers() -> None:
    measured = json.loads(FILE.read_text(encoding="utf-8"))["environment"]["diffusers"]
    assert measured == diffusers.__version__, "run scripts/results/pipelines.py"
