"""What an estimate counts of the images that prompts start from, and of models that take them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.config.load import load_config
from flowrl.core.errors import ModelError
from flowrl.cost.architecture import source_shape
from flowrl.cost.dry_run import prompt_lines
from flowrl.cost.meta_run import network_inputs, workload_of


@pytest.mark.parametrize("count", [0, 1, 3])
def test_references_of_flux2_are_tokens_of_their_own(tmp_path: Path, count: int) -> None:
    """By hand: at 384 pixels an image has 24 x 24 tokens, and so has each reference."""
    record = {"prompt": "p"} | ({"source": ["a.png"] * count} if count else {})
    list_ = tmp_path / "list.jsonl"
    list_.write_text(json.dumps(record))
    config = load_config("flux2_klein/flow_grpo_fast_edit", [f"prompts.train={list_}"])
    work = workload_of(config)
    assert work.source == ((24 * count, 24) if count else None)
    given = network_inputs(
        work.fn, 2, work.latent, work.text, work.architecture, torch.bfloat16, work.source
    )
    assert given["hidden_states"].shape == (2, 576 * (1 + count), 128)
    assert given["img_ids"].shape == (576 * (1 + count), 4)
    gone = load_config("flux2_klein/flow_grpo_fast_edit", [f"prompts.train={tmp_path}/no.jsonl"])
    assert source_shape(gone, work.latent) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [("model.frames=6", "got 6; take 5 or 9"), ("image={height: 240, width: 240}", "multiple")],
)
def test_what_the_adapter_of_ti2v_refuses_an_estimate_refuses(change: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        workload_of(load_config("wan/flow_grpo_fast_ti2v", [change]))


def test_tokens_of_ti2v_have_times_of_their_own() -> None:
    """By hand: 256 pixels are 16 x 16 latents, 8 x 8 tokens, at two moments; 2.1 has one time."""
    work = workload_of(load_config("wan/flow_grpo_fast_ti2v"))
    given = network_inputs(
        work.fn, 2, work.latent, work.text, work.architecture, torch.bfloat16, work.source
    )
    assert given["hidden_states"].shape == (2, 48, 2, 16, 16)
    assert given["timestep"].shape == (2, 128)
    work = workload_of(load_config("wan/flow_grpo_fast_i2v"))
    given = network_inputs(
        work.fn, 2, work.latent, work.text, work.architecture, torch.bfloat16, work.source
    )
    assert given["hidden_states"].shape == (2, 36, 2, 30, 30)
    assert given["timestep"].shape == (2,)
    assert given["encoder_hidden_states_image"].shape == (2, 257, 1280)


def test_lists_of_the_hub_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run names them; nothing asks the hub."""

    def asked(*_: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("flowrl.core.prompt_files.read_hub", asked)
    config = load_config("flux/awm")
    assert prompt_lines(config) == [
        f"prompts    pickscore/{name} is read from the hub when the run starts"
        for name in ("train", "test")
    ]
