"""The doctor names what is wrong with a run, and is silent where nothing is.

Expected: the finding that stands beside each fault in doctorfaults. A fault is put into flowrl's
own code, or into a reward, credit or loss that a config names; the doctor is told nothing of it.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapterkit import PROMPTS, Folders
from doctorfaults import FAULTS
from doctorkit import prompts_with, sound
from modelkit import perturb
from torchvision.transforms.functional import to_pil_image

from flowrl.cli.main import main
from flowrl.core.errors import ConfigError
from flowrl.core.prompts import PromptSet
from flowrl.cost.fit_card import Help
from flowrl.doctor import before_loading
from flowrl.doctor.examine import SECTIONS, examine
from flowrl.doctor.findings import CATALOGUE, Checkup
from flowrl.doctor.parity import look_at_parity


@pytest.fixture(scope="module")
def model() -> Any:
    """Load the shapes model once; the doctor puts its weights back."""
    return sound().call("model")()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leaks between lists are wanted here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def names(checkup: Checkup) -> list[str]:
    return [finding.id for finding in checkup.findings]


def test_it_is_silent_on_a_sound_run_and_leaves_no_trace(model: Any) -> None:
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    checkup = examine(sound(), model=model, only=[name for name in SECTIONS if name != "memory"])
    assert checkup.findings == []
    assert all(torch.equal(p, before[name]) for name, p in model.trainable().items())
    (ratio,) = [s.figures["ratio"] for s in checkup.sections if s.name == "ratio"]
    assert max(gap for column, gap in ratio.items() if "bfloat16" not in column) < 1e-5
    assert [*ratio] == ["micro_batch 8", "in calls of 1", "in calls of 3", "bfloat16, calls of 1"]


@pytest.mark.parametrize("name", FAULTS)
def test_it_names_the_fault(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = FAULTS[name]
    if fault.patch is not None:
        fault.patch(monkeypatch, model)
    checkup = examine(sound(*fault.overrides), model=model, only=fault.sections)
    assert names(checkup) == [fault.finding]
    assert checkup.findings[0].change == CATALOGUE[fault.finding].change


@pytest.mark.parametrize(
    ("change", "finding", "section"),
    [("copies", "prompts/duplicates", "prompts"), ("length", "prompts/cut", "texts")],
)
def test_it_names_faults_of_prompt_lists(
    change: str, finding: str, section: str, model: Any, tmp_path: Path
) -> None:
    config = sound(prompts_with(tmp_path, change))
    assert names(examine(config, model=model, only=[section])) == [finding]


def test_it_is_silent_on_a_credit_that_compares_prompts_until_it_remembers(model: Any) -> None:
    """DDPO's takes the whole batch for a prompt with fewer than 16 rewards, as published."""
    credit = "credit={fn: history_norm, buffer: 32, least: 16}"
    assert names(examine(sound(credit), model=model, only=["credit"])) == []


def test_it_names_faults_of_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old package, another one of the same name, a small card and a full disk."""
    only = ["environment", "memory"]
    monkeypatch.setattr(before_loading, "_requirements", lambda: ["torch>=99", "no-such-package"])
    monkeypatch.setattr(before_loading, "other_package", lambda: "there are two")
    # the profile is worked out by fit_card, which has tests of its own and takes its time
    monkeypatch.setattr(before_loading, "what_helps", lambda found, gigabytes: Help([]))
    full = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    found = names(examine(sound(), only=only, card=1.2))
    assert found == ["env/package", "env/version", "env/version", "memory/card", "env/disk"]


def test_every_finding_was_shown() -> None:
    shown = {fault.finding for fault in FAULTS.values()}
    shown |= {"prompts/duplicates", "prompts/cut"}
    shown |= {"env/package", "env/version", "env/disk", "memory/card"}
    assert shown == set(CATALOGUE)
    assert {section for fault in FAULTS.values() for section in fault.sections} <= set(SECTIONS)


def test_what_is_known_is_not_said_again(model: Any) -> None:
    fault = FAULTS["updates that do not divide"]
    config = sound(*fault.overrides)
    assert names(examine(config, only=["batch"], known=[fault.finding])) == []
    with pytest.raises(ConfigError, match="std/lost.*did you mean"):
        examine(config, known=["std/lost"])
    with pytest.raises(ConfigError, match="ratios.*did you mean"):
        examine(config, only=["ratios"])


# no weights are needed for these sections
QUICK = ["doctor", "shapes/flow_grpo", "--only", "batch", "--only", "prompts"]


def test_a_silent_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """512 images of 64 prompts, 242 and 66 prompts: as docs/shapes.md and the config say."""
    file = tmp_path / "doctor.json"
    assert main([*QUICK, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    assert "64 prompts x 8 images = 512 images" in said and "nothing to change was found" in said
    written = json.loads(file.read_text())
    assert written["findings"] == [] and written["sections"]["batch"]["figures"]["images"] == 512
    figures = written["sections"]["prompts"]["figures"]
    assert (figures["train"], figures["test"], figures["same"]) == (242, 66, 0)


def test_findings_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """64 states in 40 updates are 32 parts of 2."""
    assert main([*QUICK, "train.updates=40"]) == 1
    said = capsys.readouterr().out
    assert "batch/updates" in said and "make only 32" in said and "change  take a" in said
    assert main([*QUICK, "train.updates=40", "--known", "batch/updates"]) == 0
    capsys.readouterr()
    assert main([*QUICK, "train.updates=40", "--json", "-"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["id"] == "batch/updates"
    assert main([*QUICK, "--known", "batch/update"]) == 2
    assert "did you mean 'batch/updates'" in capsys.readouterr().err


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sd3", {"guidance": 4.5, "negative_prompt": "a blue dog"}),
    ("sd3.5", {"tune": "full", "dtype": "bfloat16"}),
    ("flux", {}),
    ("flux", {"true_cfg_scale": 2.0}),
    ("sd15", {"guidance": 5.0}),
    ("sd15 v", {"guidance": 4.0, "guidance_rescale": 0.7}),
    ("sdxl", {"guidance": 5.0}),
    ("z_image", {"guidance": 4.0}),
    ("flux2", {}),
    ("flux2_klein", {"guidance": 4.0}),
    ("qwen_image", {"guidance": 4.0}),
]
# guidance of Qwen-Image is no sum of its branches
PLAIN = [case for case in CASES[:-1] if case[1]]
GUIDED = [case for case in PLAIN if not {"dtype", "guidance_rescale"} & {*case[1]}]


def found(
    model: Any,
    *sources: str,
    folder: str = "",
    size: tuple[int, int] = (32, 48),
    steps: int = 5,
) -> list[str]:
    """Look at a model without a run around it."""
    records = [{"source": name} for name in sources] or [{}, {}]
    examined: Any = SimpleNamespace(
        model=model,
        texts=PROMPTS[:2],
        rollout=SimpleNamespace(sigmas=torch.zeros(steps + 1)),
        trainer=SimpleNamespace(train_set=PromptSet(PROMPTS[:2], records, "", f"{folder}/list")),
        rows=[0, 1],
        config=SimpleNamespace(image=SimpleNamespace(height=size[0], width=size[1])),
        has=lambda *names: False,
    )
    return [finding.id for finding in look_at_parity(examined).findings]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_sound_adapter(
    name: str, options: dict[str, Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.load(name, **options)
    perturb(model, 0.05)
    assert found(model) == []
    right = model.velocity
    monkeypatch.setattr(model, "velocity", lambda *args: -right(*args))
    assert found(model) == ["parity/sign"]


def test_trailing_steps_that_do_not_divide_the_timesteps(folders: Folders) -> None:
    """Diffusers' DDIM goes from 999 to 833 with six steps, and then asks at 832."""
    model = folders.load("sdxl", guidance=5.0, spacing="trailing")
    perturb(model, 0.05)
    assert found(model, steps=6) == found(model, steps=5) == []


@pytest.mark.parametrize(("name", "options"), GUIDED)
def test_swapped_guidance(
    name: str, options: dict[str, Any], folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = folders.load(name, **options)
    perturb(model, 0.05)
    module = "unet" if name.startswith("sd15") or name == "sdxl" else "adapter"
    place = f"flowrl.models.{module}.guided"

    def swapped(network: Any, scale: float, *rest: Any, **more: Any) -> Any:
        return right(network, 1 - scale, *rest, **more)

    from flowrl.models.adapter import guided as right

    monkeypatch.setattr(place, swapped)
    assert found(model) == ["parity/guidance-swapped"]


def test_prompts_with_references(folders: Folders, tmp_path: Path) -> None:
    """Each prompt's references go to both sides; of a model that sees none the velocity differs."""
    for name in ("0.png", "1.png"):
        pixels = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8)
        to_pil_image(pixels).save(tmp_path / name)
    model = folders.load("flux2")
    perturb(model, 0.05)
    files: dict[str, Any] = {"folder": str(tmp_path), "size": (64, 64)}
    assert found(model, "0.png", "1.png", **files) == []
    model.encode_with_sources = lambda prompts, sources: model.encode(prompts)
    assert found(model, "0.png", "1.png", **files) == ["parity/velocity"]
