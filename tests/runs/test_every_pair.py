"""Every method on every model of configs/models: each pair binds and its plan is rehearsed, or it
is refused in one message, and pairs drawn by a seed train one iteration on tiny weights.

``FLOWRL_PAIRS=150`` trains so many pairs instead of `DRAWN`.
"""

from __future__ import annotations

import os
import random

import pytest

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError
from flowrl.core.shipped_files import list_models
from flowrl.runs.catalogue import load_methods
from flowrl.runs.composed import composed
from flowrl.runs.rehearse import rehearse
from flowrl.training.rehearsal import check_plan

pytestmark = pytest.mark.integration
METHODS = [method.slug for method in load_methods()]
DRAWN = 3
VIDEOS = ("wan", "wan22", "hunyuan_video15")
EDITS = ("flux_kontext", "qwen_edit", "qwen_edit_plus", "wan_i2v")
REFUSED = {
    # its rewards are named by their colours of shapes
    "qwen_recipe": (list_models(), "aggregate names the method's own rewards"),
    # rewards of images by their names, which no edit and no video has
    "gardo": ((*EDITS, *VIDEOS), "aggregate names the method's own rewards"),
    "srpo": ((*EDITS, *VIDEOS), "must be two of the rewards"),
    # its student has no guidance, its teacher has
    "crd": (("flux2", "hunyuan_video15"), "no option samples with and without the prompt"),
}
"""Method -> the models that it cannot be on, and what the message says."""


def refusal(method: str, model: str) -> str:
    """Return why a pair cannot be trained, "" where it can."""
    try:
        check_plan(
            load_config(composed(method, model), ["train.iterations=20"], need_rewards=False)
        )
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("model", list_models())
def test_each_method_on_a_model(model: str) -> None:
    """What is refused is listed, each with one message that says why."""
    found = {method: refusal(method, model) for method in METHODS}
    refused = {method: said for method, said in found.items() if said}
    listed = {method: words for method, (on, words) in REFUSED.items() if model in on}
    assert refused.keys() == listed.keys(), refused
    for method, said in refused.items():
        assert listed[method] in said and "\n" not in said


def _drawn() -> list[tuple[str, str]]:
    """Draw pairs that are not refused: each method and each model comes before one comes again."""
    count = int(os.environ.get("FLOWRL_PAIRS", DRAWN))
    chance = random.Random(50)
    models = list_models()
    chance.shuffle(models)
    methods = chance.sample(METHODS, len(METHODS))
    pairs = []
    for turn in range(len(models)):
        for place, method in enumerate(methods):
            model = models[(place + turn) % len(models)]
            if method not in REFUSED or model not in REFUSED[method][0]:
                pairs.append((method, model))
    return pairs[:count]


@pytest.mark.parametrize(("method", "model"), _drawn())
def test_one_iteration_of_a_pair(method: str, model: str) -> None:
    found = rehearse(composed(method, model), [], [], quiet=True)
    assert found.summary["iterations"] == 1 and found.pipeline
