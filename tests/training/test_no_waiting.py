"""Between two network calls of training the host never waits for the device, and work that is left
out changes no number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trainkit import KL, TREE, trainer_for

from flowrl.config.load import load_config
from flowrl.models.adapter import PipelineModel
from flowrl.training import learn
from flowrl.training.trainer import Trainer

# operations whose result the host has to know: a number, or how many rows there are
WAITING = {"_local_scalar_dense", "_unique2", "unique_dim", "unique_consecutive", "nonzero"}
WAITING |= {"masked_select", "equal", "repeat_interleave"}
METHODS = {
    "chains": [],
    "a tree, whose siblings share states": [TREE],
    "a penalty under other weights": [KL],
    "segments": ["segment={fn: fixed, sizes: [3]}"],
    "means of the old policy": ["loss={fn: guard, clip_low: 1e-4, clip_high: 1e-4}"],
    "the best leaf": ["loss={fn: dynamic_clip, clip_min: 0.1, clip_max: 0.2, eta: 1, sft: 0.1}"],
}


class NoWaiting(TorchDispatchMode):
    """Raise an AssertionError for an operation that an accelerator's host would wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masks = isinstance(args[-1], (list, tuple)) and name.startswith("index")
        rows = args[1] if name.startswith("index") and len(args) > 1 else ()
        by_mask = masks and any(isinstance(r, Tensor) and r.dtype == torch.bool for r in rows)
        assert name not in WAITING and not by_mask, f"{name} makes the host wait"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", METHODS)
def test_no_operation_of_a_training_call_makes_the_host_wait(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = learn.backward, []

    def watched(*args: Any, **options: Any) -> Any:
        with NoWaiting():
            calls.append(plain(*args, **options))
        return calls[-1]

    monkeypatch.setattr(learn, "backward", watched)
    trainer_for(tmp_path, *METHODS[name]).step()
    assert len(calls) >= 2


@pytest.mark.parametrize("wait", [torch.unique, Tensor.item, torch.nonzero, lambda x: x[x > 0]])
def test_the_watch_sees_what_waits(wait: Any) -> None:
    with NoWaiting(), pytest.raises(AssertionError, match="makes the host wait"):
        wait(torch.ones(1))


# ---------------------------------------------------------- work that is left out changes no number

SMALL = (
    "model={fn: sd3, path: assets/shapes-sd3, tune: lora, guidance: 4.5, dtype: float32}",
    "kl={fn: transition_kl, beta: 0.04}",
    "plan.branch=2",
    "plan.steps=4",
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
