"""Is the ratio 1 before the first update: by denoising step, batch shape and dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl.algorithms.nodes import trained_nodes
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import CATALOGUE, ReportSection
from flowrl.doctor.replay import replayed
from flowrl.models.adapter import PipelineModel

MOST = 12  # nodes that are replayed in other shapes than training's own


def look_at_ratio(examined: ExaminedRun) -> ReportSection:
    """Replay the draws in several batch shapes and dtypes. Where the network has a fault that
    explains it, a ratio that is off is no finding of its own."""
    section, run = ReportSection("ratio"), examined.trainer
    likelihood = run.method.likelihood
    nodes = trained_nodes(examined.rollout, likelihood.trains)
    if "reward" in run.method.needs:
        section.skipped = "the loss follows the reward's own gradient: there is no ratio"
    elif "old_log_prob" in likelihood.keeps:
        _table(examined, section, nodes)
    else:
        _evaluated_twice(examined, section, nodes)
    if examined.has(*(finding for finding in CATALOGUE if finding.startswith("ratio/"))):
        section.findings = []
    return section


def _table(examined: ExaminedRun, section: ReportSection, nodes: Tensor) -> None:
    """Set |ratio - 1| by step, for training's own calls, other shapes and the other dtype."""
    t, ro, run = examined.config.train, examined.rollout, examined.trainer
    own = max(1, t.micro_batch // run.method.rows)
    old = ro.log_prob[nodes]
    # training's own calls, with a gradient as there
    columns = {f"micro_batch {t.micro_batch}": _gap(replayed(examined, nodes, own).log_prob, old)}
    few = _spread_over(nodes, MOST)
    at = torch.searchsorted(nodes, few).cpu()
    with torch.no_grad():
        for size in sorted({1, 3, t.rollout_batch} - {own}):
            columns[f"in calls of {size}"] = _gap(replayed(examined, few, size).log_prob, old[at])
        for dtype in {torch.float32, torch.bfloat16} - {examined.dtype}:
            columns |= _in_dtype(examined, few, own, dtype)
    # a row for each step
    step = ro.tree.step[ro.tree.parent[nodes].clamp_min(0)].cpu()
    section.table = [["step", *columns]]
    for k in step.unique().tolist():
        cells = []
        for gap in columns.values():
            mine = step == k if len(gap) == len(nodes) else step[at] == k
            cells.append(f"{float(gap[mine].max()):.1e}" if bool(mine.any()) else "-")
        section.table.append([str(k), *cells])
    _judge(examined, section, columns[f"micro_batch {t.micro_batch}"], step)
    section.figures["ratio"] = {name: float(gap.max()) for name, gap in columns.items()}


def _judge(examined: ExaminedRun, section: ReportSection, gap: Tensor, step: Tensor) -> None:
    """Compare training's own gap with the clip range."""
    # a tenth of the clip range: a smaller gap does not decide what is clipped
    clips = [examined.config.loss.kwargs.get(key) for key in ("clip_low", "clip_high")]
    known = [clip for clip in clips if isinstance(clip, float) and clip > 0]
    limit = min(1e-2, max(1e-5, 0.1 * min(known))) if known else 1e-2
    # exact, within rounding, or a fault
    worst = float(gap.max())
    verdict = "1 to the bit" if worst == 0 else "1 but for rounding" if worst <= limit else "not 1"
    section.lines.append(
        f"the ratio before the first update is {verdict}: off by at most {worst:.1e} in training's "
        f"own calls (allowed: {limit:.0e})"
    )
    section.figures["verdict"] = verdict
    if worst <= limit:
        return
    t, k = examined.config.train, int(step[gap.argmax()])
    found = f"|ratio - 1| is up to {worst:.2g} at step {k}, allowed are {limit:.0e}"
    # short dtypes round differently in batches of another size: the likely cause
    shapes = t.micro_batch != t.rollout_batch and examined.dtype != torch.float32
    section.find("ratio/batch-shape" if shapes else "ratio/off", found)


def _evaluated_twice(examined: ExaminedRun, section: ReportSection, nodes: Tensor) -> None:
    """Compare two evaluations under the same weights, where the rollout keeps no log-prob."""
    own = max(1, examined.config.train.micro_batch // examined.trainer.method.rows)
    few = _spread_over(nodes, MOST)
    with torch.no_grad():
        one, two = (replayed(examined, few, own).log_prob for _ in range(2))
    worst = float(_gap(one, two).max())
    section.lines.append(f"two evaluations under the same weights differ by {worst:.1e}")
    section.figures["ratio"] = {"again": worst}
    if worst > 1e-2:
        section.find("ratio/off", f"under the same weights the ratio is off by {worst:.2g}")


def _in_dtype(
    examined: ExaminedRun, nodes: Tensor, size: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Compare training's calls with single rows, both computed in another dtype: what it would
    cost. Only float32 weights can be."""
    model = examined.model
    if not isinstance(model, PipelineModel) or not model.can_compute_in(dtype):
        return {}
    with model.computing_in(dtype):
        one = replayed(examined, nodes, size).log_prob
        two = replayed(examined, nodes, 1).log_prob
    return {f"{str(dtype).removeprefix('torch.')}, calls of 1": _gap(two, one)}


def _spread_over(nodes: Tensor, most: int) -> Tensor:
    return nodes[:: -(-len(nodes) // most)]


def _gap(now: Tensor, old: Tensor) -> Tensor:
    return ((now.double() - old.double().to(now.device)).exp() - 1).abs().cpu()
