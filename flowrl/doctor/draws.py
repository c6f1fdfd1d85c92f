"""The noise, and the ratio of new over old: grid, std of every step, log-prob of every draw, seeds.

The ratio must be 1 before the first update, by denoising step, batch shape and dtype: `replayed`
evaluates what a rollout left behind once more, in calls of any size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowrl.algorithms.forest import cond_of, decision_nodes, states_of, trained_nodes
from flowrl.algorithms.rollout.plan_steps import steps_of
from flowrl.algorithms.transitions import euler
from flowrl.core.noise_path import per_sample
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import Eval, Gaussian, Plan, Rollout
from flowrl.doctor.examined_run import ExaminedRun
from flowrl.doctor.findings import CATALOGUE, ReportSection
from flowrl.models.adapter import PipelineModel
from flowrl.training.batches import Minibatch, cut
from flowrl.training.rollout import sample_forest

MOST = 12  # nodes that are replayed in other shapes than training's own

HUGE = 2.0  # of a std: pure noise has 1
LEAST = 1e-6  # rounding makes sin(pi) 1e-7
SIGMAS = 6.0  # standard errors between the draws' own std and the one that they are scored with
HEAD = ["step", "sigma", "next", "scale", "std", "draws", "log-prob", "expected", "z^2"]


def look_at_draws(examined: ExaminedRun) -> ReportSection:
    """Hold grid, transition, stds, log-probs and seeds to their definitions."""
    section = ReportSection("noise")
    plan = examined.trainer.method.plan(examined.trainer.iteration)
    sigmas = examined.rollout.sigmas.cpu()
    section.figures["sigmas"] = sigmas.tolist()
    # pure functions first
    _transition_at_zero(examined, section, sigmas)
    stds = _stds(examined, section, plan, sigmas)
    # what was drawn
    if examined.trainer.method.likelihood.trains == "draws":
        _scores(examined, section, stds)
    else:
        section.lines.append("no draw is trained: noise scales and log-probs play no part")
    _seeds(examined, section)
    return section


def _transition_at_zero(examined: ExaminedRun, section: ReportSection, sigmas: Tensor) -> None:
    rows = len(sigmas) - 1
    x, v = torch.randn(2, rows, 8, generator=generator(0, "doctor")).unbind(0)
    here, there = sigmas[:-1], sigmas[1:]
    step = examined.trainer.method.transition(x, v, here, there, torch.zeros(rows))
    gap = float((step.mean - euler(x, v, here, there)).abs().max())
    section.figures["euler_gap"] = gap
    if gap > 1e-4 or bool((step.std != 0).any()):
        section.find(
            "transition/euler",
            f"{examined.config.transition.fn} at noise scale 0 is up to {gap:.3g} away from the "
            f"Euler step, with a std of up to {float(step.std.max()):.3g}",
        )


def _stds(examined: ExaminedRun, section: ReportSection, plan: Plan, sigmas: Tensor) -> list[float]:
    """Ask the transition for each step's std -> [S]."""
    scales = torch.tensor([step.noise_scale for step in steps_of(plan)])
    x = torch.zeros(len(scales), 1)
    made = examined.trainer.method.transition(x, x, sigmas[:-1], sigmas[1:], scales)
    stds: list[float] = torch.where(scales > 0, made.std, 0.0).tolist()
    first = float(sigmas[0])
    exploded = 0.99 < first < 1 and stds[0] > HUGE
    if exploded and not examined.has("grid/first-sigma"):
        section.find(
            "grid/first-sigma",
            f"the first sigma is {first:.7g}, not 1: the first draw has a std of {stds[0]:.3g}",
        )
    # the other steps
    trains_draws = examined.trainer.method.likelihood.trains == "draws"
    wide = [k for k, std in enumerate(stds[:-1]) if std > HUGE and not (exploded and k == 0)]
    if wide:
        worst = max(wide, key=stds.__getitem__)
        section.find(
            "std/huge",
            f"{len(wide)} steps, the worst is {worst} from sigma {float(sigmas[worst]):.4g}: std "
            f"{stds[worst]:.3g}",
        )
    if trains_draws and plan.adams is None and stds[-1] > LEAST:
        section.find(
            "std/last",
            f"step {len(stds) - 1}, the last one, adds noise of std {stds[-1]:.3g} to the image",
        )
    return stds


def _scores(examined: ExaminedRun, section: ReportSection, stds: list[float]) -> None:
    """Hold the draws, and what they were scored with, to a Gaussian of torch.distributions."""
    ro, section.table = examined.rollout, [HEAD]
    nodes = decision_nodes(ro)
    made = _gaussians(examined, nodes)
    step = ro.tree.step[ro.tree.parent[nodes]].cpu()
    # the draws' own std, and the density that they should have been given
    std = per_sample(ro.tree.std[nodes].double(), made.mean.double())
    gap = ro.x[nodes].double() - made.mean.double()
    z2 = (gap / std).square().flatten(1).mean(1).cpu()
    normal = torch.distributions.Normal(made.mean.double(), std.expand_as(gap))
    exact = normal.log_prob(ro.x[nodes].double()).flatten(1).mean(1).cpu()
    stored, drawn = ro.log_prob[nodes].cpu(), ro.tree.std[nodes].cpu()
    for k in step.unique().tolist():
        mine = step == k
        s = float(drawn[mine].mean())
        expected = -math.log(s) - 0.5 * math.log(2 * math.pi) - 0.5
        scale = float(ro.noise_scale[nodes].cpu()[mine].mean())
        row = [str(k), f"{float(ro.sigmas[k]):.4f}", f"{float(ro.sigmas[k + 1]):.4f}"]
        row += [f"{scale:.3g}", f"{s:.4g}", str(int(mine.sum()))]
        row += [f"{float(stored[mine].mean()):.4f}", f"{expected:.4f}"]
        section.table.append([*row, f"{float(z2[mine].mean()):.4f}"])
    off = (stored - exact).abs()
    section.figures |= {"log_prob_gap": float(off.max()), "z2": float(z2.mean()), "stds": stds}
    # rounding of short dtypes moves the mean of sharp steps
    if bool(off.median() > examined.rounding):
        worst = int(off.argmax())
        section.find(
            "logprob/std",
            f"a draw of step {int(step[worst])} has the log-prob {float(exact[worst]):.5g} under "
            f"N(mean, {float(drawn[worst]):.4g}^2), but was given {float(stored[worst]):.5g}",
        )
    numbers = len(torch.unique(ro.tree.parent[nodes])) * ro.x[0].numel()
    if abs(float(z2.mean()) - 1) > max(0.02, SIGMAS * math.sqrt(2 / numbers)):
        section.find(
            "std/draws",
            f"draws have {math.sqrt(float(z2.mean())):.4g} times the std that they are scored with",
        )


@torch.no_grad()
def _gaussians(examined: ExaminedRun, nodes: Tensor) -> Gaussian:
    """Return the transition that each draw [N] was made by, in calls as large as the sampler's."""
    run, ro, found = examined.trainer, examined.rollout, list[Gaussian]()
    for some in nodes.split(examined.config.train.rollout_batch):
        above = ro.tree.parent[some]
        x, step = ro.x[above].float(), ro.tree.step[above]
        here, there = ro.sigmas[step], ro.sigmas[step + 1]
        v = run.model.velocity(x, here, cond_of(ro, some))
        found.append(run.method.transition(x, v, here, there, ro.noise_scale[some]))
    means, stds = zip(*found, strict=True)
    return Gaussian(torch.cat(means), torch.cat(stds))


def _seeds(examined: ExaminedRun, section: ReportSection) -> None:
    """Sample the first prompt again; and draw for other prompts, iterations and seeds."""
    run, ro = examined.trainer, examined.rollout
    # a run that is repeated, or resumed, must draw the same noise
    again = sample_forest(run, examined.rows[:1])
    before, after = _roots(ro, 0), _roots(again, 0)
    if not torch.equal(before, after):
        gap = float((before - after).abs().max())
        section.find(
            "seeds/random",
            f"sampled again with the same seed, initial noise differs by up to {gap:.3g}",
        )
        return
    # the streams of the next iteration and of the next seed, beside this run's own
    seed, iteration, same = run.config.seed, run.iteration, []
    mine = _first_noise(seed, iteration)
    if _first_noise(seed, iteration + 1).equal(mine):
        same.append("iterations")
    if _first_noise(seed + 1, iteration).equal(mine):
        same.append("seeds")
    # and in the rollout itself: between prompts, and within one unless it is meant so
    if any(torch.equal(before, _roots(ro, int(g))) for g in ro.group_ids[1:]):
        same.insert(0, "prompts")
    if len(before) > 1 and not run.config.train.same_noise and before[0].equal(before[1]):
        same.insert(0, "images of a prompt")
    if same:
        section.find("seeds/same", f"the same initial noise for different {', '.join(same)}")


def _first_noise(seed: int, iteration: int) -> Tensor:
    return torch.randn(8, generator=generator(seed, "rollout", iteration, 0))


def _roots(ro: Rollout, group: int) -> Tensor:
    mine = ((ro.tree.parent < 0) & (ro.tree.group == group)).nonzero().flatten()
    return ro.x[mine].cpu()


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
            here = step == k
            if len(gap) < len(nodes):
                here = here[at]
            cell = "-"
            if bool(here.any()):
                cell = f"{float(gap[here].max()):.1e}"
            cells.append(cell)
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
    verdict = "not 1"
    if worst == 0:
        verdict = "1 to the bit"
    elif worst <= limit:
        verdict = "1 but for rounding"
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
    cause = "ratio/off"
    if t.micro_batch != t.rollout_batch and examined.dtype != torch.float32:
        cause = "ratio/batch-shape"
    section.find(cause, found)


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


def replayed(examined: ExaminedRun, nodes: Tensor, size: int) -> Eval:
    """Evaluate trained nodes [N] as training does, in calls of at most `size` states -> Eval in
    their order."""
    run, ro = examined.trainer, examined.rollout
    likelihood, found = run.method.likelihood, []
    state = states_of(ro, nodes, likelihood.trains)
    # states stand together, as `cut` asks for
    order = torch.argsort(state, stable=True)
    part = Minibatch(nodes[order], torch.arange(len(nodes)))
    zero = torch.zeros(len(ro.tree.parent), device=ro.x.device)
    for call in cut(part, state[order], max(1, size)):
        streams = NodeStreams(ro.tree.group, run.config.seed, "fresh", run.iteration)
        batch = likelihood.batch(ro, zero, call.node, streams)
        if likelihood.trains == "draws":
            batch = batch._replace(rows=call.rows)
        seen = likelihood.evaluate(run.model, batch, run.method.transition)
        found.append((batch.node, seen.log_prob.detach(), seen.mean.detach(), seen.std.detach()))
    node, log_prob, mean, std = (torch.cat(rows) for rows in zip(*found, strict=True))
    # back in the order that was asked for; likelihoods with several rows a node keep theirs
    if len(node) == len(nodes):
        place = torch.argsort(node)[torch.argsort(torch.argsort(nodes))]
        log_prob, mean, std = log_prob[place], mean[place], std[place]
    return Eval(log_prob, mean, std)
