"""Embeddings of prompts on disk: the same bits, no encoder on a hit, and a name that knows all they
depend on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapterkit import ADAPTERS, GUIDED, PROMPTS, Folders, load_folder
from modelkit import edit
from safetensors.torch import load_file, save_file

from flowrl.core.errors import ConfigError, ModelError
from flowrl.models import prompt_encoding
from flowrl.models.prompt_encoding import TextCache

ENCODERS = (
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "T5EncoderModel",
    "UMT5EncoderModel",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Mistral3ForConditionalGeneration",
)


def cached(folders: Folders, fn: str, cache: Path, **options: Any) -> Any:
    return folders.load(name_of(fn), runtime={"cache": str(cache)}, **options)


def name_of(fn: str) -> str:
    return "sd3.5" if fn == "sd3" else fn  # which has T5


def files(cache: Path) -> set[Path]:
    return set(cache.glob("??/*.safetensors"))


def encoders(model: Any) -> dict[str, Any]:
    """Return the text encoders of a model, without having those loaded that are not."""
    parts = model._tuned.pipeline.components
    return {name: part for name, part in parts.items() if name.startswith("text_encoder")}


# ------------------------------------------------------------ the same bits, without the encoders


@pytest.mark.parametrize("fn", ADAPTERS)
def test_a_hit_is_bit_for_bit_and_needs_no_encoder(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: str
) -> None:
    """Encoders are loaded at the first miss, frozen, and are those of a model without a cache."""
    options: dict[str, Any] = GUIDED[fn] | {"dtype": "bfloat16"}
    plain, model = folders.load(name_of(fn), **options), cached(folders, fn, tmp_path, **options)
    assert encoders(model) and set(encoders(model).values()) == {None}
    expected, first = plain.encode(PROMPTS), model.encode(PROMPTS)
    assert len(files(tmp_path)) == (3 if fn in ("sdxl", "flux2") else 4)  # no negative text
    for name, part in encoders(model).items():
        own, twin = list(part.parameters()), list(encoders(plain)[name].parameters())
        assert not part.training and not any(param.requires_grad for param in own)
        assert all(torch.equal(a, b) for a, b in zip(own, twin, strict=True))
    for kind in ENCODERS:
        for method in ("from_pretrained", "forward"):
            monkeypatch.setattr(getattr(transformers, kind), method, lambda *_, **__: 1 / 0)
    again = cached(folders, fn, tmp_path, **options)
    found = again.encode(PROMPTS[::-1])
    assert set(expected) == set(first) == set(found)
    for name, rows in expected.items():
        assert rows.dtype == torch.bfloat16 or name.endswith(("mask", "length"))
        assert torch.equal(rows, first[name])
        assert torch.equal(rows, found[name].flip(0))
    with pytest.raises(ModelError, match="could not be loaded: ZeroDivisionError"):
        again.encode(["a prompt that nobody has asked for"])


def test_the_pipeline_that_is_handed_out_is_whole(folders: Folders, tmp_path: Path) -> None:
    pipeline = cached(folders, "sd3", tmp_path, tune="none").pipeline()
    pipeline.set_progress_bar_config(disable=True)
    how = {"height": 32, "width": 32, "num_inference_steps": 1, "output_type": "pt"}
    assert pipeline("a cat", **how).images.shape == (1, 3, 32, 32)


# ---------------------------------------------------------------------------- what the name knows


def change_weights(folder: Path) -> None:
    file = next((folder / "text_encoder").glob("*.safetensors"))
    tensors = load_file(file)
    name = sorted(tensors)[-1]
    tensors[name].view(-1)[-1] += 1e-3  # one number of one tensor; the file keeps its size
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("options", "damage", "hit"),
    [
        ({}, None, True),
        ({"lora": {"rank": 4}, "seed": 3}, None, True),
        ({"tune": "none"}, None, True),
        ({}, edit("scheduler/scheduler_config.json", shift=2.0), True),
        ({"max_sequence_length": 23}, None, False),
        ({"t5": False}, None, False),
        ({"dtype": "bfloat16"}, None, False),
        ({}, change_weights, False),
        ({}, edit("tokenizer_2/tokenizer_config.json", note="another"), False),
        ({}, edit("text_encoder_3/config.json", layer_norm_epsilon=1e-3), False),
    ],
)
def test_what_the_embeddings_depend_on(
    folders: Folders,
    tmp_path: Path,
    options: dict[str, Any],
    damage: Callable[[Path], None] | None,
    hit: bool,
) -> None:
    cache, copy = tmp_path / "cache", Path(shutil.copytree(folders["sd3.5"], tmp_path / "sd3"))
    cached(folders, "sd3", cache).encode(PROMPTS[:1])
    if damage:
        damage(copy)
    before = files(cache)
    load_folder("sd3", copy, runtime={"cache": str(cache)}, **options).encode(PROMPTS[:1])
    assert (files(cache) == before) == hit and len(before) == 1


def test_versions_of_the_libraries_count(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cache() -> TextCache:
        return TextCache(tmp_path, parts=[folders["sd15"] / "tokenizer"], settings={})

    cache().put("x", {"embeds": torch.ones(2)})
    assert cache().get("x") is not None and cache().get("y") is None
    monkeypatch.setattr("flowrl.models.prompt_encoding.transformers.__version__", "0.0.0")
    assert cache().get("x") is None


# ------------------------------------------------------------------------------------------ files


@pytest.fixture
def store(tmp_path: Path) -> TextCache:
    return TextCache(tmp_path / "cache", parts=[], settings={"dtype": "bfloat16"})


def test_every_dtype_and_shape_comes_back(store: TextCache) -> None:
    tensors = {
        "embeds": torch.randn(5, 3).bfloat16(),
        "pooled": torch.randn(4),
        "half": torch.randn(2, 2).half().t(),
        "mask": torch.tensor([True, False]),
        "none": torch.empty(0, 3),
    }
    store.put("a prompt", tensors)
    found = store.get("a prompt")
    assert found is not None and set(found) == set(tensors)
    for name, rows in tensors.items():
        assert found[name].dtype == rows.dtype and torch.equal(found[name], rows)


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: data[:-3],
    lambda data: b"",
    lambda data: b"x" * len(data),
    lambda data: data[:-1] + bytes([data[-1] ^ 1]),
]


def test_a_damaged_file_is_encoded_again_with_a_warning(folders: Folders, tmp_path: Path) -> None:
    first = cached(folders, "sd15", tmp_path).encode(PROMPTS[:1])
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    said = rf"{file.name} is damaged \(.*; the prompt 'a red square' is encoded again"
    for damage in DAMAGES:
        file.write_bytes(damage(whole))
        with pytest.warns(UserWarning, match=said):
            again = cached(folders, "sd15", tmp_path).encode(PROMPTS[:1])
        assert torch.equal(first["embeds"], again["embeds"])
        assert torch.equal(load_file(file)["embeds"], first["embeds"][0])
        assert file.stat().st_size == len(whole)


def test_no_half_file_has_the_final_name(store: TextCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(tensors: Any, file: Path, metadata: Any) -> None:
        file.write_bytes(b"half")
        assert not store._file("x").exists() and store.get("x") is None
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prompt_encoding, "save_file", torn)
    with pytest.warns(UserWarning, match="cannot be kept .*No space left") as caught:
        store.put("x", {"embeds": torch.ones(1)})
        store.put("y", {"embeds": torch.ones(1)})
    assert len(caught) == 1  # the run goes on, and says so once
    assert [file for file in store.folder.rglob("*") if file.is_file()] == []


def test_writers_and_readers_at_once(tmp_path: Path) -> None:
    """Eight threads put and get the same prompts; each get is nothing or the whole."""
    rows = {str(i): torch.full((2000,), float(i)) for i in range(5)}
    wrong: list[str] = []

    def work() -> None:
        store = TextCache(tmp_path, parts=[], settings={})
        for prompt, row in [*rows.items()] * 5:
            store.put(prompt, {"embeds": row})
            found = store.get(prompt)
            if found is None or not torch.equal(found["embeds"], row):
                wrong.append(prompt)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(files(tmp_path)) == len(rows)
    assert [file for file in tmp_path.rglob("*.tmp")] == []


def test_a_folder_that_cannot_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    message = r"runtime.cache: .*file/cache cannot be a folder: Not a directory"
    with pytest.raises(ConfigError, match=message):
        TextCache(tmp_path / "file/cache", parts=[], settings={})


def test_an_embedding_under_the_name_of_another_prompt(folders: Folders, tmp_path: Path) -> None:
    """A whole file that was renamed, or copied over another one, is not that prompt's."""
    model = cached(folders, "sd3", tmp_path)
    expected = model.encode(["a cat"])
    (cat,) = files(tmp_path)
    model.encode(["a dog"])
    (dog,) = files(tmp_path) - {cat}
    shutil.copy(dog, cat)
    with pytest.warns(UserWarning, match="does not fit this name.*'a cat' is encoded again"):
        found = cached(folders, "sd3", tmp_path).encode(["a cat"])
    assert all(torch.equal(rows, found[name]) for name, rows in expected.items())


def test_what_another_version_encoded_is_not_taken(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its code may have encoded otherwise."""
    cached(folders, "sd3", tmp_path).encode(["a cat"])
    monkeypatch.setattr(prompt_encoding, "__version__", "0.0.0")
    cached(folders, "sd3", tmp_path).encode(["a cat"])
    assert len(files(tmp_path)) == 2
