"""A model is one file, wherever it stands: an adapter outside of flowrl is trained, judged,
counted, examined, exported, drawn tiny and compared, and nothing names a shipped one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

from flowrl.cli.main import main
from flowrl.models.options import ADAPTERS, adapters, fn_of
from flowrl.models.tiny import save_tiny

pytestmark = pytest.mark.integration
PLUGIN = ["--plugin", "aurakit"]
SMALL = [
    "image={height: 64, width: 64}",
    "plan={fn: full, steps: 4, noise_scale: 0.5}",
    "rewards={jpeg: {fn: jpeg}}",
    "eval={score: jpeg, steps: 2, images: 1, every: 0}",
    "train={iterations: 1, prompts: 2, group: 4, updates: 1}",
]


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Iterator[Any]:
    """The plugin, whose adapter no other test is to meet."""
    import aurakit

    ADAPTERS["AuraFlowPipeline"] = aurakit.aura
    yield aurakit
    del ADAPTERS["AuraFlowPipeline"]


@pytest.fixture(scope="module")
def base(plugin: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("aura", tmp_path_factory.mktemp("aura") / "base")


def config_of(base: Path) -> list[str]:
    """Return shapes/flow_grpo on the plugin's model; nothing says which adapter."""
    model = f"model={{path: {base}, lora: {{rank: 2}}, max_sequence_length: 16, guidance: 2.0}}"
    return ["shapes/flow_grpo", model, *SMALL]


def test_the_path_finds_it(base: Path, plugin: Any) -> None:
    assert fn_of("AuraFlowPipeline") == "aurakit.aura"
    assert adapters()["AuraFlowPipeline"] is plugin.aura
    assert diffusers.AuraFlowPipeline.from_pretrained(base).transformer.config.in_channels == 4


def test_it_is_trained_judged_and_exported(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the plain pipeline reads the LoRA."""
    run, out = str(tmp_path / "run"), tmp_path / "lora"
    assert main(["train", *config_of(base), "--run", run, *PLUGIN]) == 0
    assert main(["eval", run, *PLUGIN, "eval.images=1"]) == 0
    assert main(["export", run, "--out", str(out), *PLUGIN]) == 0
    capsys.readouterr()
    file = out / "pytorch_lora_weights.safetensors"
    assert any(value.abs().max() > 0 for name, value in load_file(file).items() if "lora_B" in name)
    pipe = diffusers.AuraFlowPipeline.from_pretrained(base)
    pipe.load_lora_weights(out)
    card = (out / "README.md").read_text()
    assert "AuraFlowPipeline.from_pretrained" in card and "guidance_scale=2.0" in card


def test_it_is_counted(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights are those of the network, and a peak of each phase is worked out."""
    assert main(["estimate", *config_of(base), *PLUGIN, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    network = diffusers.AuraFlowTransformer2DModel.from_pretrained(base / "transformer")
    count = sum(p.numel() for p in network.parameters())
    assert f"{count:,}" in json.dumps(found) or str(count) in json.dumps(found)


def test_the_doctor_compares_it_with_its_pipeline(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "parity", "--json", "-"]
    assert main(["doctor", *config_of(base), *PLUGIN, *only]) == 0
    section = json.loads(capsys.readouterr().out)["sections"]["parity"]
    assert section["figures"]["velocity"] < 1e-5 and section["figures"]["grid"] == 0


def test_it_is_rehearsed_on_its_tiny_pipeline(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *config_of(base), *PLUGIN, "--rehearse", "--json", "-"]) == 0
    assert '"aura"' in capsys.readouterr().out


def test_it_is_compared(base: Path, tmp_path: Path) -> None:
    out = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out.json")]
    budget = ["--seeds", "0", "--nfe", "200", "--seconds", "0", "--points", "1"]
    name, *changes = config_of(base)
    given = [word for change in changes for word in ("--set", change)]
    assert main(["compare", name, *given, *PLUGIN, *budget, *out]) == 0
    assert json.loads((tmp_path / "out.json").read_text())


def test_tiny_makes_it(tmp_path: Path) -> None:
    assert main(["tiny", "aura", f"{tmp_path}/aura", *PLUGIN]) == 0
    one, two = (
        load_file(next((f / "vae").glob("*.safetensors"))) for f in (tmp_path / "aura",) * 2
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_no_file_outside_of_models_names_an_adapter() -> None:
    """As a word; `pipeline` is one of English, too."""
    names = {fn_of(kind) for kind in adapters()} - {"aurakit.aura"}
    root = Path(__file__).parents[2] / "flowrl"
    found = {}
    for file in sorted(root.rglob("*.py")):
        if "models" not in file.relative_to(root).parts:
            words = {*re.findall(r"\w+", file.read_text(encoding="utf-8"))}
            if named := names & words:
                found[file.name] = named
    assert found == {}


def test_an_adapter_stays_where_it_is_measurably_better() -> None:
    """Fewer network calls, or a tenth less time, for four rows that are sampled or trained."""
    file = Path(__file__).parents[2] / "assets" / "results" / "adapters.json"
    found = json.loads(file.read_text(encoding="utf-8"))["adapters"]
    assert found.keys() == {fn_of(kind) for kind in adapters()} - {"aurakit.aura"}
    for name, row in found.items():
        shares = []
        for what in ("sampled", "trained"):
            one, other = row[f"adapter {what}"], row[f"own {what}"]
            shares += [one[key] / other[key] for key in ("calls", "ms") if other[key]]
        assert min(shares) < 0.9, name
