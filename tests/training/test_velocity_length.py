"""The metric `velocity_length`: by hand, and where a run has it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from toykit import toy

from flowrl.core.types import Eval, LossInput
from flowrl.training.parts.node_facts import VelocityLength
from flowrl.training.trainer import Trainer


def seen(v: torch.Tensor | None) -> Eval:
    zero = torch.zeros(3)
    return Eval(zero, zero, zero, v)


def velocity_length(now: Eval, under: dict[str, Eval]) -> dict[str, torch.Tensor]:
    """Ask the part, in a run whose likelihood has no judge."""
    run: Any = SimpleNamespace(method=SimpleNamespace(likelihood=None))
    data = LossInput(cast(Any, None), now, torch.zeros(3), under=under)
    return VelocityLength().measure(run, data)


def test_lengths_by_hand() -> None:
    """v_ref = (3, 4) has length 5; v: (6, 8), (0, 4.5) and 0 have 10, 4.5 and 0. In bfloat16 4.5
    and 5 are exact, and the quotient .9 is float32's."""
    ref = torch.tensor([[3.0, 4.0]]).repeat(3, 1)
    v = torch.tensor([[6.0, 8.0], [0.0, 4.5], [0.0, 0.0]], requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16):
        found = velocity_length(seen(v.to(dtype)), {"ref": seen(ref.to(dtype))})
        assert not found["velocity_length"].requires_grad
        assert found["velocity_length"].tolist() == pytest.approx([2.0, 0.9, 0.0])
    assert velocity_length(seen(v), {}) == {}
    assert velocity_length(seen(None), {"ref": seen(ref)}) == {}
    assert velocity_length(seen(v), {"ref": seen(None)}) == {}
    still = velocity_length(seen(v[2:] * 0), {"ref": seen(v[2:])})
    assert still["velocity_length"].tolist() == [0.0]


def test_a_run_has_it_where_a_reference_has_a_velocity(tmp_path: Path) -> None:
    """1 before the first step, to rounding; then 2, since the toy's velocity is linear in its
    tensors, which are doubled here, at every state. Without a `kl` there is no such number."""
    run = Trainer(toy(tmp_path, "kl={fn: velocity_kl, beta: 0.01}", "train.updates=1"))
    first = run.step()
    assert first["velocity_length"] == pytest.approx(1.0, abs=1e-6)
    assert first["velocity_length/step0"] == pytest.approx(1.0, abs=1e-6)
    with torch.no_grad():
        for name, p in run.params.items():
            p.copy_(2 * run.weights.state_dict()["ref"][name])
    assert run.step()["velocity_length"] == pytest.approx(2.0, abs=1e-5)
    assert "velocity_length" not in Trainer(toy(tmp_path)).step()
