"""References of the shapes benchmark: true scenes as files, and the small DINOv2 that looks at them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from flowrl.errors import DataError
from flowrl.prompts import load_prompts
from flowrl.shapes.checker import check
from flowrl.shapes.prompts import all_records
from flowrl.types import RewardBatch
from rewards.dino import dino

ROOT = Path(__file__).resolve().parent.parent
RECORDS = [record for records in all_records().values() for record in records[::40]]


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_references", ROOT / "scripts" / "make_shapes_references.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a prompt file's references, three per prompt."""
    folder = tmp_path_factory.mktemp("shapes")
    prompts = folder / "few.jsonl"
    prompts.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    out: Path = folder / "out"
    assert SCRIPT.make_references(prompts, out, each=3, seed=0) == out / "few.jsonl"
    return out


def _read(file: Path) -> torch.Tensor:
    with Image.open(file) as picture:
        assert picture.mode == "RGB" and picture.size == (64, 64)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255


def test_every_reference_is_true_to_its_prompt(made: Path) -> None:
    # judged by the benchmark's own checker, which reads nothing but pixels
    prompts = load_prompts(made / "few.jsonl")
    assert prompts.texts == [record["prompt"] for record in RECORDS]
    seen = set()
    for record, old in zip(prompts.records, RECORDS, strict=True):
        assert {key: value for key, value in record.items() if key != "references"} == old
        assert len(record["references"]) == 3
        images = torch.stack([_read(made / name) for name in record["references"]])
        assert bool((check(images, [old] * 3).strict == 1).all())
        seen |= {image.numpy().tobytes() for image in images}
    assert len(seen) == 3 * len(RECORDS) == len(list((made / "few").iterdir()))  # no two are the same


def test_the_same_call_makes_the_same_files(made: Path, tmp_path: Path) -> None:
    again = SCRIPT.make_references(made.parent / "few.jsonl", tmp_path / "a", each=1, seed=0)
    other = SCRIPT.make_references(made.parent / "few.jsonl", tmp_path / "b", each=1, seed=1)
    names = [f"few/{index:05d}-0.png" for index in range(len(RECORDS))]
    assert [json.loads(line)["references"] for line in again.read_text().splitlines()] == [[name] for name in names]
    assert all((again.parent / name).read_bytes() == (made / name).read_bytes() for name in names)
    assert any((other.parent / name).read_bytes() != (made / name).read_bytes() for name in names)


def test_prompts_that_no_scene_can_satisfy_are_refused(tmp_path: Path) -> None:
    circle = {"class": "circle", "count": 1}
    cases = {
        "at most 4": {"prompt": "five circles", "include": [circle | {"count": 5}]},
        "draws is true": {"prompt": "no circle", "include": [circle], "exclude": [circle]},
        "include": {"prompt": "anything"},
    }
    for number, (message, record) in enumerate(cases.items()):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(json.dumps(record) + "\n")
        with pytest.raises(DataError, match=message):
            SCRIPT.make_references(file, tmp_path / "out", each=1, seed=0)


def test_the_shapes_network_is_small_and_tells_scenes_apart(made: Path) -> None:
    folder = ROOT / "assets" / "shapes-dino"
    assert (folder / "model.safetensors").stat().st_size < 2e6 and (folder / "README.md").is_file()
    prompts = load_prompts(made / "few.jsonl")
    images = torch.stack([_read(made / record["references"][0]) for record in prompts.records])
    n = len(images)
    batch = RewardBatch(images, prompts.texts, torch.arange(n), prompts.records, torch.zeros(n))
    for mode in ("cls", "patch"):
        reward = dino(path=str(folder), mode=mode, root=str(made), device="cpu")  # type: ignore[arg-type]
        for record, where in zip(prompts.records, prompts.places, strict=True):
            reward.check_record(record, where)
        own = reward(batch)
        torch.testing.assert_close(own, torch.ones(n), atol=1e-5, rtol=0)  # each is among its own references
        others = [{**record, "references": record["references"][1:]} for record in prompts.records]
        assert bool((reward(batch._replace(meta=others)) < 0.9999).all())
