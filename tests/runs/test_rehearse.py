"""`flowrl train --rehearse` and `flowrl tiny`: every adapter, nothing kept, nothing downloaded.
Every method on every model that has an adapter binds and is rehearsed, or is refused in one
message; pairs drawn by a seed train one iteration on tiny weights.

``FLOWRL_PAIRS=150`` trains so many pairs instead of `DRAWN`."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from scriptkit import module_of

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.models.options import adapters
from flowrl.models.tiny import save_tiny, tinies
from flowrl.runs.catalogue import load_methods
from flowrl.runs.rehearse import rehearse

pytestmark = pytest.mark.integration
CONFIGS = {
    "sd3/flow_grpo": "sd3.5",
    "flux_kontext/flow_grpo_fast": "flux_kontext",
    "wan/flow_grpo_fast": "wan",
}


def test_every_adapter_has_a_tiny_pipeline() -> None:
    assert [name for name, make in adapters().items() if not make.facts.tiny] == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", tinies())
def test_a_tiny_pipeline_is_the_same_for_the_same_seed(name: str, tmp_path: Path) -> None:
    """Byte for byte in its network; the first of them is another one for another seed."""
    seeds = (3, 3, 4) if name == next(iter(tinies())) else (3, 3)
    made = [save_tiny(name, tmp_path / f"{n}", seed=seed) for n, seed in enumerate(seeds)]
    part = "unet" if (made[0] / "unet").exists() else "transformer"
    first, again, *others = (load_file(next((at / part).glob("*.safetensors"))) for at in made)
    assert all(torch.equal(first[key], again[key]) for key in first)
    for other in others:
        assert not all(torch.equal(first[key], other[key]) for key in first)
    assert [path.name for path in tmp_path.iterdir() if ".tmp-" in path.name] == []


def test_tiny_says_how_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tiny", "sd3", f"{tmp_path}/t"]) == 0
    assert f"use it: model.path={tmp_path}/t image.height=64" in capsys.readouterr().out
    assert main(["tiny", "sd3", f"{tmp_path}/t"]) == 2
    assert "expected a new or empty folder" in capsys.readouterr().err
    assert main(["tiny", "sdx", f"{tmp_path}/u"]) == 2
    assert "no tiny pipeline 'sdx'; did you mean 'sdxl'" in capsys.readouterr().err


@pytest.mark.parametrize("config", CONFIGS)
def test_a_rehearsal_of_a_shipped_config(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pipeline is of the config's own class; the working folder stays empty. All is the
    config's own but the steps of an evaluation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert main(["train", config, "--rehearse", "eval.steps=2", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pipeline"] == CONFIGS[config] and found["summary"]["iterations"] == 1
    assert list(tmp_path.iterdir()) == []


def test_rewards_with_networks_are_stood_in_for(home: Path) -> None:
    """Of three: one with a network, one without, one of a plugin. A toy model is taken as it is."""
    more = ["rewards.pick={fn: pickscore}", "rewards.jpeg={fn: jpeg}"]
    found = rehearse(f"{home}/toy.yaml", more, ["toykit"], quiet=True)
    assert found.stood_in == ("pick",) and found.pipeline == ""
    assert {"red", "pick", "jpeg"} <= found.summary["after"]["rewards"].keys()


def test_what_a_rehearsal_refuses(home: Path, tmp_path: Path) -> None:
    """A mistake of the config is said as training says it; a folder has no place."""
    with pytest.raises(ConfigError, match="train has no argument 'gruop'"):
        rehearse(f"{home}/toy.yaml", ["train.gruop=3"], ["toykit"])
    assert main(["train", f"{home}/toy.yaml", "--rehearse", "--run", f"{tmp_path}/r"]) == 2


# --------------------------------------------------------------------------------------- every pair


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
