"""Every method on every model that has an adapter: each pair binds and its plan is rehearsed, or it
is refused in one message, and pairs drawn by a seed train one iteration on tiny weights.

``FLOWRL_PAIRS=150`` trains so many pairs instead of `DRAWN`.
"""

from __future__ import annotations

import os
from itertools import chain

import pytest
from scriptkit import module_of

from flowrl.runs.catalogue import load_methods

pytestmark = pytest.mark.integration
DRAWN = 3
pairs = module_of("results", "pairs")


@pytest.mark.parametrize("model", pairs.models())
def test_each_method_on_a_model(model: str) -> None:
    """What came of each pair is what the matrix of docs/methods.md says; what is refused says so in
    one line. `python scripts/results/pairs.py` writes it anew."""
    found = pairs.outcomes(model)
    assert found == pairs.read()[model] and "\n" not in "".join(found.values())


def test_nearly_all_pairs_can_be_trained() -> None:
    """Some methods are made of the rewards of shapes, and go on no other model."""
    fits = {}
    for model, one in pairs.read().items():
        fits[model] = [method for method, said in one.items() if not said.startswith("refused")]
    assert min(map(len, fits.values())) >= 50
    somewhere = {*chain(*fits.values())}
    assert {method.slug for method in load_methods()} - somewhere == {
        "drm",
        "refl",
        "spo_latent",
        "qwen_recipe",
    }


@pytest.mark.parametrize(
    ("method", "model"),
    [
        *pairs.drawn(pairs.read(), int(os.environ.get("FLOWRL_PAIRS", DRAWN))),
        ("flow_opd", "sd3"),  # its teacher is rehearsed before it
    ],
)
def test_one_iteration_of_a_pair(method: str, model: str) -> None:
    assert pairs.trained(method, model)["said"].endswith(" trained")


@pytest.mark.parametrize(
    ("method", "model", "says"),
    [
        ("drm", "sd3", "credit compares unfinished images"),
        ("ddrl", "wan_ti2v", "makes videos of 5 frames"),
        ("ddrl", "wan", "makes videos"),
        ("tdm_r1", "sdxl", "those of its training timesteps alone"),
        ("ddrl", "lumina2", "needs a model that encodes images"),
        ("sd15/diffusion_dpo_offline", "lumina2", "needs a model that encodes images"),
    ],
)
def test_what_is_known_before_loading_is_refused_when_it_is_bound(
    method: str, model: str, says: str
) -> None:
    assert says in pairs.bind(method, model)
