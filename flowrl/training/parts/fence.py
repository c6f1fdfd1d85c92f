"""A pipeline without adapter is compared with its own call before anything is encoded or trained,
and a checkpoint keeps what it showed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from flowrl.core.abilities import PassesFence
from flowrl.core.part import Part, PartState
from flowrl.core.types import FlowModel
from flowrl.training.run import Prepared, Run


class PipelineFence(Part):
    """Compare a pipeline that has no adapter with its own call, for a run of this length and size;
    a resume does so again, with the diffusers that is installed then."""

    name = "fence"
    rank = 10
    when = ("always",)

    def check_model(self, prepared: Prepared, model: FlowModel, frames: int) -> None:
        """Refuse a pipeline that cannot be asked for its velocity, with the figure."""
        if not isinstance(model, PassesFence):
            return
        plan = prepared.method.plan(0)
        steps = plan.sigma_grid.steps if plan.sigma_grid is not None else len(plan.noise)
        fence = model.pass_fence(steps, *prepared.size)
        if prepared.world.main:
            print(
                "\n           ".join(["fence      " + fence.lines[0], *fence.lines[1:]]),
                file=sys.stderr,
            )

    def state_dict(self, run: Run) -> PartState | None:
        """Keep what was compared, and under which version."""
        if not isinstance(run.model, PassesFence):
            return None
        return PartState(plain={"passed": run.model.fence_record()})

    def load_state_dict(self, run: Run, state: PartState, where: Path) -> None:
        """Say that the fence was passed anew under another version of diffusers."""
        before = _versions(state.plain["passed"])
        now = _versions(run.model.fence_record())  # type: ignore[attr-defined]
        if before != now and run.world.main:
            print(
                f"{where}: was trained under diffusers {before}, and the fence is passed under "
                f"{now}, too",
                file=sys.stderr,
            )


def _versions(passed: list[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(one["version"] for one in passed))
