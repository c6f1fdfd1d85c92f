"""Does learning go the right way: credit, the gradient by step, one optimizer step, copies of the
weights.

Better images must make the draws that led to them worth more, and those of other prompts not.
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import leaf_kinds, states_of, trained_nodes
from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.files import without
from flowrl.core.needs import needs_of
from flowrl.core.seeds import NodeStreams, generator
from flowrl.doctor.examined_run import ExaminedRun, copied
from flowrl.doctor.findings import ReportSection
from flowrl.doctor.network import cosine
from flowrl.evaluation.sources import prompt_keys
from flowrl.training.batches import Minibatch, NetworkCall, SharedForest, cut
from flowrl.training.learn import LocalData, backward, learn, node_table
from flowrl.training.parts.copies import decay_of, kept_copies
from flowrl.training.run import Iteration

OUTLIER = 1000.0  # times the median of the steps' gradient norms

LIKE = 0.95  # cosine; a spread of all prompts' images may bend advantages a little, as in RWR
ROUNDS = 16  # iterations of two images each that fill any shipped credit's memory


def look_at_credit(examined: ExaminedRun) -> ReportSection:
    """Give made-up rewards, and look whose advantages move when some of them change."""
    section, ro = ReportSection("credit"), examined.rollout
    _look_at_words(examined, section)
    reward = made_up(examined)
    base = advantages_of(examined, reward)
    nodes = trained_nodes(ro, examined.trainer.method.likelihood.trains)
    # one prompt's images become better; the other's must be as before, but for a factor
    group, leaf_group = ro.tree.group, ro.tree.group[ro.leaf].cpu()
    if len(ro.group_ids) > 1:
        first, second = ro.group_ids[:2].tolist()
        moved = advantages_of(examined, reward + 0.3 * (leaf_group == first))
        mine = nodes[group[nodes] == second]
        like = cosine(base[mine], moved[mine])
        section.figures["other_prompt"] = like
        if like < LIKE:
            section.find(
                "credit/groups",
                f"better images of one prompt change the advantages of another (cosine {like:.3f})",
            )
    # a middling image becomes the best of its prompt
    gains = [_gain(examined, reward, base, place) for place in _middling(examined, reward)]
    section.figures["gains"] = gains
    if gains and sum(gain < 0 for gain in gains) > len(gains) / 2:
        section.find(
            "credit/sign", f"an image made the best moves its advantages by {gains[0]:.3g}"
        )
    spread = base[nodes]
    section.lines.append(
        f"{len(nodes)} trained nodes, advantages from {float(spread.min()):.3g} to "
        f"{float(spread.max()):.3g}, {int((spread == 0).sum())} of them 0 (made-up rewards)"
    )
    return section


def made_up(examined: ExaminedRun) -> Tensor:
    """Return rewards [L] from 0.2 to 0.6, all different within a prompt, in mixed order."""
    group = examined.rollout.tree.group[examined.rollout.leaf].cpu()
    ranks = torch.zeros(len(group))
    for number in group.unique().tolist():
        mine = (group == number).nonzero().flatten()
        order = torch.randperm(len(mine), generator=generator(0, "doctor", number))
        ranks[mine] = order.float() / max(1, len(mine) - 1)
    return 0.2 + 0.4 * ranks


def advantages_of(examined: ExaminedRun, reward: Tensor) -> Tensor:
    """Return the advantages [V] that the run gives for rewards [L], the same from all rewards."""
    run, batch, ro = examined.trainer, examined.found.batch, examined.rollout
    values = {}
    for name, weight in run.reward_set.weights.items():
        values[name] = reward.float() if weight >= 0 else 1 - reward.float()
    fn = _experienced(examined, run.method.credit)
    if "log_prob" in needs_of(fn):
        fn = partial(fn, log_prob=ro.log_prob)
    if "prompts" in needs_of(fn):
        fn = partial(fn, prompts=prompt_keys(batch.prompts, batch.meta))
    nothing = torch.zeros(len(ro.group_ids))
    return run.reward_set.advantages(values, batch, ro.leaf, ro.tree, fn, distance=nothing)[0]


def _experienced(examined: ExaminedRun, fn: Any) -> Any:
    """Return a copy of a credit that remembers prompts, with a full memory: before that it may
    compare images of all prompts, as DDPO's does."""
    if not isinstance(fn, PromptMemory):
        return fn
    ro, batch = examined.rollout, examined.found.batch
    keys = prompt_keys(batch.prompts, batch.meta)
    full: Any = deepcopy(fn)
    for _ in range(ROUNDS):
        full.update(made_up(examined), ro.leaf, ro.tree, prompts=keys)
    return full


def _look_at_words(examined: ExaminedRun, section: ReportSection) -> None:
    """Every image must have been shown to the rewards with the prompt that it was sampled with."""
    batch, ro = examined.found.batch, examined.rollout
    group = ro.tree.group[ro.leaf].tolist()
    wrong = [i for i, g in enumerate(group) if batch.prompts[i] != examined.texts[g]]
    if wrong or batch.group.tolist() != group:
        section.find("credit/groups", f"{len(wrong)} images are scored with another's prompt")


def _middling(examined: ExaminedRun, reward: Tensor) -> list[int]:
    """Pick finished leaves in the middle of their prompt, one for each prompt -> places."""
    ro = examined.rollout
    finished, group = leaf_kinds(ro.tree, ro.leaf).cpu() == 0, ro.tree.group[ro.leaf].cpu()
    picked = []
    for number in group.unique().tolist():
        mine = ((group == number) & finished).nonzero().flatten()
        picked += mine[torch.argsort(reward[mine])][len(mine) // 2 : len(mine) // 2 + 1].tolist()
    return picked


def _gain(examined: ExaminedRun, reward: Tensor, base: Tensor, place: int) -> float:
    """Return how the advantages above a leaf move when it becomes the best of its prompt."""
    ro = examined.rollout
    better = reward.clone()
    better[place] = 1.0
    node, path = int(ro.leaf[place]), []
    while node >= 0:
        path.append(node)
        node = int(ro.tree.parent[node])
    likelihood = examined.trainer.method.likelihood
    mine = set(trained_nodes(ro, likelihood.trains).tolist()) & set(path)
    rows = torch.tensor(sorted(mine), dtype=torch.int64)
    return float((advantages_of(examined, better) - base)[rows].sum())


Gradient = list[Tensor]


def look_at_gradient(examined: ExaminedRun) -> ReportSection:
    """Differentiate by denoising step; see whether the sum makes better images more likely."""
    section, run, ro = ReportSection("gradient"), examined.trainer, examined.rollout
    advantage = advantages_of(examined, made_up(examined))
    nodes = trained_nodes(ro, run.method.likelihood.trains)
    if "old" in run.method.snapshots and "old" not in run.method.copies:
        run.weights.snapshot("old")
    table = node_table(run, ro, advantage)
    streams = NodeStreams(ro.tree.group, run.config.seed, "fresh", run.iteration)
    local = LocalData(ro, table, streams, tuple(examined.rows))
    kept = nodes[(table.factor[nodes] > 0) & (advantage[nodes] != 0)]
    # segments are one unit: with them all steps are differentiated together
    step = ro.tree.step[ro.tree.parent[kept].clamp_min(0)]
    parts = {"all": kept}
    if run.method.likelihood.trains == "draws" and run.method.segment is None:
        parts = {str(k): kept[step == k] for k in step.unique().tolist()}
    section.table, total = [["step", "rows", "norm"]], list[Tensor]()
    norms: dict[str, float] = {}
    for name, mine in parts.items():
        grads = _gradient(examined, local, mine, len(kept))
        norms[name] = float(torch.stack([g.norm() for g in grads]).norm())
        section.table.append([name, str(len(mine)), f"{norms[name]:.3g}"])
        if total:
            grads = [a + b for a, b in zip(total, grads, strict=True)]
        total = grads
    section.figures["norms"] = norms
    section.figures["tensors_without"] = sum(not bool(g.any()) for g in total)
    _judge_norms(section, norms)
    if not section.findings and "reward" not in run.method.needs:
        _direction(examined, section, local, kept, total)
    return section


def _gradient(examined: ExaminedRun, local: LocalData, nodes: Tensor, total: int) -> Gradient:
    """Differentiate nodes [N] as training does -> the gradient of each trained tensor."""
    run = examined.trainer
    for call in _calls(examined, nodes):
        try:
            backward(run, local, call, total, 0)
        except RuntimeError as error:  # torch has no type for it
            if "does not require grad" not in str(error):
                raise
    return _taken(examined)


def _calls(examined: ExaminedRun, nodes: Tensor) -> list[NetworkCall]:
    run, ro = examined.trainer, examined.rollout
    state = states_of(ro, nodes, run.method.likelihood.trains)
    order = torch.argsort(state, stable=True)
    size = max(1, examined.config.train.micro_batch // run.method.rows)
    place = torch.arange(len(nodes))
    if run.method.segment is not None:
        place, order = torch.sort(run.method.segment(ro)[nodes], stable=True)
    return cut(Minibatch(nodes[order], place), state[order], size)


def _taken(examined: ExaminedRun) -> Gradient:
    grads = []
    for p in examined.trainer.params.values():
        grads.append(torch.zeros_like(p) if p.grad is None else p.grad)
        p.grad = None
    return grads


def _judge_norms(section: ReportSection, norms: dict[str, float]) -> None:
    values = torch.tensor(list(norms.values()))
    broken = [name for name, norm in norms.items() if not norm < float("inf")]
    if broken:
        section.find("gradient/broken", f"step {broken[0]}: the norm is {norms[broken[0]]}")
    elif not bool((values > 0).any()):
        section.find("gradient/zero", "all gradients are 0, though the advantages are not")
    elif len(norms) > 2 and float(values.max()) > OUTLIER * float(values.median()):
        worst, norm = max(norms.items(), key=itemgetter(1))
        section.find(
            "gradient/outlier",
            f"step {worst} has the norm {norm:.3g}, the median step {float(values.median()):.3g}",
        )


def _direction(
    examined: ExaminedRun, section: ReportSection, local: LocalData, nodes: Tensor, loss: Gradient
) -> None:
    """Compare minus the loss's gradient with that of the advantage-weighted log-prob."""
    run = examined.trainer
    # the gradient of sum A log p: along it, better images become more likely
    for call in _calls(examined, nodes):
        batch = run.method.likelihood.batch(
            local.rollout, local.table.advantage, call.node, local.streams
        )
        if run.method.likelihood.trains == "draws":
            batch = batch._replace(rows=call.rows)
        seen = run.method.likelihood.evaluate(run.model, batch, run.method.transition)
        (batch.advantage.to(seen.log_prob) * seen.log_prob).sum().backward()
    # the optimizer steps along minus the loss's gradient
    better = _taken(examined)
    down = torch.cat([g.flatten().double() for g in loss])
    up = torch.cat([g.flatten().double() for g in better])
    like = cosine(-down, up)
    section.figures["cosine"] = like
    section.lines.append(f"cosine between the step and the ascent of A log p: {like:.3f}")
    if like < 0:
        section.find(
            "gradient/direction",
            f"the step has a cosine of {like:.3f} with the ascent of A log p",
        )


def look_at_update(examined: ExaminedRun) -> ReportSection:
    """Make one iteration's optimizer steps, and look at what moved; the weights are put back."""
    section, run = ReportSection("update"), examined.trainer
    if examined.has("gradient/zero", "gradient/broken"):
        section.skipped = "there is no gradient to follow"
        return section
    kept = {name: copied(rows) for name, rows in run.weights.state_dict().items()}
    start = copied(run.params)
    advantage = advantages_of(examined, made_up(examined))
    decays = {name: decay_of(run, name) for name in kept_copies(run)}
    it = Iteration(examined.rows, range(len(examined.rows)), None)
    it.forest, it.rollout = SharedForest(examined.rollout), examined.rollout
    it.advantage, metrics = advantage, it.metrics
    with run.phase("train"):
        learn(run, it)
    moved = {n: float((p.detach() - start[n]).norm()) for n, p in run.params.items()}
    # how far
    size = torch.stack([rows.norm() for rows in start.values()]).norm()
    far = float(torch.tensor(list(moved.values())).norm() / size.clamp_min(1e-12))
    still = sum(gap == 0 for gap in moved.values())
    section.lines.append(
        f"{still} of {len(moved)} trained tensors did not move, all together by {far:.2g} of their "
        f"norm; gradient norm {metrics.get('grad_norm', 0.0):.3g}"
    )
    section.figures = {"moved": far, "still": still, "tensors": len(moved)}
    section.figures["metrics"] = without(metrics, "nfe")
    if metrics.get("lr") == 0:
        section.find("update/lr", f"optimizer.lr is {run.config.lr:g}, the optimizer has 0")
    elif still == len(moved) and metrics.get("grad_norm"):
        section.find(
            "update/nothing",
            f"the gradient norm is {metrics['grad_norm']:.3g}, the learning rate "
            f"{metrics['lr']:.2g}, and none of {len(moved)} tensors moved",
        )
    else:
        _copies(examined, section, kept, decays)
    return section


def _copies(
    examined: ExaminedRun,
    section: ReportSection,
    before: dict[str, dict[str, Tensor]],
    decays: dict[str, float],
) -> None:
    """Hold reference, average and other copies to how they are meant to follow; decays: what share
    of itself each keeps in an update."""
    run, now = examined.trainer, examined.trainer.weights.state_dict()
    for name in decays:
        # squared: how far the copy is from where it should be, and how far the weights have moved
        gap, way = 0.0, 0.0
        for key, p in run.params.items():
            wanted = before[name][key].lerp(p.detach(), 1 - decays[name])
            gap += float((now[name][key] - wanted).double().square().sum())
            way += float((p.detach() - before[name][key]).double().square().sum())
        section.figures[name] = gap**0.5
        # 1 % of the way, which no rounding explains
        if gap > 1e-4 * way:
            known = {"ref": "weights/reference", "ema": "weights/ema"}
            share = (gap / max(way, 1e-30)) ** 0.5
            section.find(
                known.get(name, "weights/copies"),
                f"`{name}` with a decay of {decays[name]:.3g} is off by {share:.2g} of the way to "
                "the current weights",
            )
