"""Work that is left out changes no number: a reference without adapters, prompts encoded ahead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flowrl.config.load import load_config
from flowrl.models.adapter import PipelineModel
from flowrl.training.trainer import Trainer

SMALL = (
    "model={fn: sd3, path: assets/shapes-sd3, tune: lora, guidance: 4.5, dtype: float32}",
    "kl={fn: transition_kl, beta: 0.04}",
    "plan.branch=2",
    "train.prompts=2",
    "train.group=2",
    "train.updates=2",
    "rewards={size: {fn: jpeg}}",
    "eval.score=size",
)


def test_the_reference_is_the_base_model_and_prompts_are_encoded_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two iterations under guidance and KL end with the same weights, to the last bit, as with the
    reference's weights in the network's place and prompts encoded as they come."""
    config, ends, encoded = load_config("shapes/flow_grpo", SMALL), [], list[str]()
    for ahead in (True, False):
        trainer = Trainer(config)
        model: Any = trainer.model
        at_work = model._tuned.texts._at_work

        @contextlib.contextmanager
        def watched(inner: Any = at_work) -> Iterator[None]:
            encoded.append("")
            with inner():
                yield

        if ahead:
            trainer.encode_ahead(2)
        else:
            monkeypatch.setattr(PipelineModel, "base", lambda self: None)
        monkeypatch.setattr(model._tuned.texts, "_at_work", watched)
        metrics = [trainer.step() for _ in range(2)]
        assert metrics[1]["kl"] > 0
        assert bool(encoded) != ahead
        ends.append({key: p.detach().clone() for key, p in trainer.params.items()})
    first, second = ends
    assert all(torch.equal(first[key], second[key]) for key in first)
