"""Several processes with a pretend device each: gloo behaves as NCCL, which knows the device only.

Collectives on tensors of the host are refused (`tensor.compute`). Objects travel as bytes on the
device, and a tensor of the device among them cannot be pickled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed
from toykit import axes, linear, toy
from toyscale import SETTING, TOY_SCALE

from flowrl.core.processes import world
from flowrl.runs.evaluate import evaluate
from flowrl.training.trainer import Trainer
from pretendkit.device import pretend_cuda
from pretendkit.tensor import Seen


@contextmanager
def pretend_nccl() -> Iterator[Seen]:
    """Let the processes of this one's group talk as with NCCL -> what is seen of the device."""
    where = "torch.distributed.distributed_c10d._get_object_coll_device"
    with (
        mock.patch(where, lambda group=None: "cuda"),
        mock.patch("torch.cuda.current_device", lambda: 0),
        pretend_cuda() as seen,
    ):
        yield seen


def trained(folder: str, methods: Sequence[str]) -> dict[str, Any]:
    """Train two iterations of each method, evaluate and save -> {method: reward}; under "refused"
    what a sum over tensors of the host said, under "calls" how many collectives there were."""
    found: dict[str, Any] = {}
    with pretend_nccl() as seen:
        for method in methods:
            name = f"shapes/{method}"
            changes = [*SETTING, "train.micro_batch=16", *axes(name), *TOY_SCALE.get(name, [])]
            own = Path(folder) / f"{method}-{world().rank}"
            own.mkdir()
            run = Trainer(toy(own, *changes), model=linear(channels=2).to("cuda"))
            run.step()
            found[method] = run.step()["reward"]
            evaluate(run.model, run.config, trainer=run)
            run.save(own / "checkpoint")
        found["calls"] = seen.collectives
        try:
            torch.distributed.all_reduce(torch.ones(1))
        except RuntimeError as error:
            found["refused"] = str(error)
    return found
