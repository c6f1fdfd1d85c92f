"""What an estimate counts of the images that prompts start from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flowrl.config.load import load_config
from flowrl.cost.architecture import source_shape
from flowrl.cost.meta_run import workload_of
from flowrl.cost.network_inputs import network_inputs


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
