"""The training loop: the only file that knows plan, reward, credit, likelihood and loss together."""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from flowrl import checkpoint
from flowrl.batches import best_below, decision_nodes, decisions, states_of
from flowrl.budget import Budget
from flowrl.config import Config
from flowrl.dist import sharded, shared_as, whole, world
from flowrl.errors import CheckpointError, ConfigError, RunError
from flowrl.evaluate import as_uint8
from flowrl.feasible import budget_of, check_plan, trained_calls
from flowrl.log import RunLogger, Silence
from flowrl.optimizer import make_optimizer
from flowrl.panel import Panel, distances
from flowrl.prompts import batch_for, check_records, load_prompts
from flowrl.samplers.grids import read_grid
from flowrl.samplers.rollout import merge, rollout
from flowrl.seeds import generator
from flowrl.spread import Facts, Held, join, join_pictures
from flowrl.types import Batch, Choice, Eval, FlowModel, Plan, RewardBatch, Rollout
from flowrl.updates import Share, cut, deal
from flowrl.weights import Weights

Metrics = dict[str, Tensor]


class Interrupted(RunError):
    """The user asked to stop; a checkpoint was written first."""


class Trainer:
    """Train one config in one run folder. Everything random follows from (seed, iteration), so that a resume is exact.

    Example::

        trainer = Trainer(load_config("shapes/flow_grpo"))
        for iteration in range(trainer.iteration, 10):
            metrics = trainer.step()
    """

    def __init__(
        self, config: Config, *, model: FlowModel | None = None, log: RunLogger | Silence | None = None
    ) -> None:
        if config.train.threads:
            torch.set_num_threads(config.train.threads)
        self.config, self.log, self.iteration = config, log, 0
        self.world, self.sharded = world(), sharded()
        if config.train.prompts < self.world.size:
            raise ConfigError(
                f"train.prompts={config.train.prompts}: {self.world.size} processes need at least one prompt each, "
                "since the pictures of a prompt stay together; start fewer of them"
            )
        if self.sharded and config.train.prompts % self.world.size:
            raise ConfigError(
                f"train.prompts={config.train.prompts}: under FSDP all processes call the network in step, so each "
                f"needs equally many prompts; take a multiple of {self.world.size}"
            )
        self.train_set, self.test_set = load_prompts(config.prompts.train), load_prompts(config.prompts.test)
        self.plan: Callable[..., Any] = config.call("plan")
        self.transition, self.credit = config.call("transition"), config.call("credit")
        self.likelihood, self.loss = config.call("likelihood"), config.call("loss")
        self.asks = asks(self.loss)
        self.kl = config.call("kl") if config.kl_beta else None
        self.segment = config.call("segment") if config.segment else None
        self.select = [call.partial() for call in config.select]
        check_plan(config)  # impossible numbers are found before any weight is loaded
        self.panel = Panel(config, self.train_set.records)
        self.rewards = self.panel.rewards
        for prompts in (self.train_set, self.test_set):
            check_records(prompts, self.rewards)
        self.panel.probe()
        self.model: FlowModel = model if model is not None else config.call("model")()
        self.params = self.model.trainable()
        if not self.params:
            raise ConfigError(f"model: {config.model.fn} has nothing to train; choose a `tune` other than none")
        self.weights = Weights(self.params)
        if self.kl is not None or config.eval.tuned < 1:
            self.weights.snapshot("ref")
        if config.train.ema:
            self.weights.snapshot("ema")
        self.optimizer = make_optimizer(config.train, list(self.params.values()), sharded=self.sharded)

    @property
    def budget(self) -> Budget:
        """Return what the current iteration costs."""
        return budget_of(self.config, self.iteration)

    # ------------------------------------------------------------------------------------------------- one iteration

    def step(self) -> dict[str, float]:
        """Run one iteration: sample, score, give credit, update. Returns its metrics. Raises RunError on a NaN."""
        rows = batch_for(
            self.train_set, seed=self.config.seed, iteration=self.iteration, count=self.config.train.prompts
        )
        places = self.world.share(len(rows))
        ro, batch, values = self.world.together(lambda: self.gather(rows, places))
        with self._phase("reward"):
            held = join(self.world, ro)
            weight, metrics = self._weigh(held, batch, values, rows)
        if self.panel.trains_policy(self.iteration):
            with self._phase("train"):
                metrics |= self.learn(ro, weight, rows, held)
            if self.config.train.ema:
                self.weights.lerp("ema", min(self.config.train.ema, (1 + self.iteration) / (10 + self.iteration)))
        metrics = {"cost": float(self.budget.evaluations), **metrics}  # before the next iteration's plan counts
        self.iteration += 1
        return metrics

    def gather(self, rows: list[int], places: range | None = None) -> tuple[Rollout, RewardBatch, dict[str, Tensor]]:
        """Sample and score the training prompts `rows` -> forest, pictures, raw values [L] of each reward.

        Only those at `places` in the iteration, if they are given; what is drawn for a prompt follows from its place.
        With ``train.parts`` above 1 the prompts are sampled in so many turns, and with ``train.overlap`` each turn's
        pictures are scored in a thread while the next are sampled. Turns and their order are the same either way.
        """
        t = self.config.train
        places = range(len(rows)) if places is None else places
        size = -(-len(places) // t.parts)
        turns = [places[first : first + size] for first in range(0, len(places), size)]
        threads = torch.get_num_threads()  # a thread starts with torch's default
        rollouts, batches, answers = [], [], []
        pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
        try:
            for turn in turns:
                with self._phase("rollout"):
                    ro = self.sample([rows[place] for place in turn], first=turn.start)
                with self._phase("decode"), torch.no_grad():
                    images = as_uint8(self.model.decode(ro.x[ro.leaf].float()))
                batch = self.reward_batch(ro, images, rows)
                rollouts.append(ro)
                batches.append(batch)
                if t.overlap and len(turns) > 1:
                    answers.append(pool.submit(self.panel.score, batch, f"iteration {self.iteration}"))
                else:
                    with self._phase("reward"):
                        answers.append(_done(self.panel.score(batch, f"iteration {self.iteration}")))
            with self._phase("reward"):
                values = [answer.result() for answer in answers]
        finally:  # after Ctrl-C nobody waits for a reward that hangs
            pool.shutdown(wait=False, cancel_futures=True)
        ro, _, order = merge(rollouts)
        images = torch.cat([batch.images for batch in batches])
        batch = batches[0] if len(turns) == 1 else self._labelled(ro, images[order.to(images.device)], rows)
        return ro, batch, {name: torch.cat([row[name] for row in values])[order.cpu()] for name in values[0]}

    def sample(self, rows: list[int], *, first: int = 0) -> Rollout:
        """Sample the forest of the training prompts `rows`, which stand from place `first` on in the iteration."""
        c, t, work = self.config, self.config.train, self.budget
        plan = self.plan(self.iteration)
        places = range(first, first + len(rows))
        return rollout(
            self.model,
            self.model.encode([self.train_set.texts[i] for i in rows]),
            plan,
            self.transition,
            sigmas=self.grid(plan),
            shape=self.model.latent_shape(c.image.height, c.image.width),
            group_size=work.roots,
            generators=[generator(c.seed, "rollout", self.iteration, place) for place in places],
            group_ids=torch.tensor(places),
            same_noise=t.same_noise,
            micro_batch=t.rollout_batch,
            keep_mean="old_mean" in self.asks,
        )

    def grid(self, plan: Plan) -> Tensor:
        """Return the sigmas [S+1] that a plan is run on: the model's own, or what the plan reads off them."""
        size = (self.config.image.height, self.config.image.width)
        if plan.grid is None:
            return self.model.sigmas(len(plan.noise), *size)
        return read_grid(self.model.sigmas(plan.grid.steps, *size), plan.grid)

    def reward_batch(self, ro: Rollout, images: Tensor, rows: list[int]) -> RewardBatch:
        """Put pictures [L, 3, H, W] together with their prompts. Raises RunError if one is not finite."""
        self._check_pictures(ro, images, rows)
        return self._labelled(ro, images, rows)

    def _labelled(self, ro: Rollout, images: Tensor, rows: list[int]) -> RewardBatch:
        group = ro.tree.group[ro.leaf]
        records = [self.train_set.records[rows[g]] for g in group.tolist()]
        return RewardBatch(images, [r["prompt"] for r in records], group, records, torch.zeros(len(records)))

    def _weigh(
        self, held: Held, batch: RewardBatch, values: dict[str, Tensor], rows: list[int]
    ) -> tuple[Tensor, dict[str, float]]:
        """Give every decision of the whole forest its weight, the same in all processes -> (weight [V], metrics)."""
        whole, apart = held.whole, None
        if held.leaf is not None:
            apart = torch.cat(self.world.gather(distances(batch.images, batch.group)))
            answers = self.world.gather(values)
            values = {name: torch.cat([answer[name] for answer in answers])[held.leaf] for name in values}
            images = torch.zeros(len(whole.leaf), 0)
            if self.panel.learned():  # every process trains them on all pictures, so that they stay the same
                images = join_pictures(self.world, batch)
                images = images[held.leaf.to(images.device)]
            batch = self._labelled(whole, images, rows)
        credit = partial(self.credit, log_prob=whole.log_prob) if "log_prob" in asks(self.credit) else self.credit
        weight, metrics = self.panel.weigh(values, batch, whole.leaf, whole.tree, credit, distance=apart)
        return weight, metrics | self.panel.learn(values, batch, whole.leaf, whole.tree)  # the weights are given by now

    def learn(self, ro: Rollout, weight: Tensor, rows: list[int], held: Held | None = None) -> dict[str, float]:
        """Make the iteration's optimizer steps from the decisions of a rollout and the weights [V] of the whole forest.

        Every process deals out all decisions alike and differentiates its own; gradients are summed over processes.
        """
        t, held = self.config.train, held or Held(ro)
        seen: list[Metrics] = []
        norms: list[Tensor] = []
        facts = self._facts(held.whole, weight)
        mine = facts.own(held, ro)
        for update, share in enumerate(self._updates(held.whole, facts)):
            self._set_lr(self.iteration * t.updates + update)
            live = self._live(share, facts)
            if not len(live.node):
                continue
            own = held.own_share(live, ro)
            parts = self.world.together(partial(self._differentiate, ro, mine, own, len(share.node)))
            self._sum_gradients()
            norm = whole(torch.nn.utils.get_total_norm([p.grad for p in self.params.values() if p.grad is not None]))
            if not bool(norm.isfinite()):
                found = self.world.gather(self._what_broke(parts, ro, rows))
                where = f"iteration {self.iteration}, optimizer step {update + 1}"
                message = next((text for text in found if text), self._what_gradient())
                self.optimizer.zero_grad(set_to_none=True)
                raise RunError(f"{where}: {message}")
            torch.nn.utils.clip_grads_with_norm_(self.params.values(), t.max_grad_norm, norm)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            norms.append(norm)
            seen += [{**row, "update": torch.full_like(row["ratio"], update)} for row in parts]
        states = sum(self.world.gather(sum(len(torch.unique(states_of(ro, row["node"]))) for row in seen)))
        cost = {"cost": float(self.budget.evaluations + trained_calls(self.config) * states)}
        return _learn_metrics(self._rows(seen), norms) | cost | {"lr": float(self.optimizer.param_groups[0]["lr"])}

    def _sum_gradients(self) -> None:
        """Add up the gradients of all processes; what none of them reached has none, as in one process."""
        if self.world.size == 1 or self.sharded:  # FSDP has added them up
            return
        reached = self.world.gather([p.grad is not None for p in self.params.values()])
        params = [p for p, *found in zip(self.params.values(), *reached, strict=True) if any(found)]
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.world.sum_([p.grad for p in params if p.grad is not None])

    def _rows(self, seen: list[Metrics]) -> Metrics:
        """Join the metrics [B] of all micro-batches, and of all processes."""
        rows = {k: torch.cat([row[k] for row in seen]) for k in seen[0]} if seen else {}
        if self.world.size == 1:
            return rows
        found = [row for row in self.world.gather({k: v.cpu() for k, v in rows.items()}) if row]
        return {k: torch.cat([row[k] for row in found]) for k in found[0]} if found else {}

    def _facts(self, ro: Rollout, weight: Tensor) -> Facts:
        """Say of each node [V] what training needs besides the rollout. Raises RunError if nothing is left to train."""
        segment = self.segment(ro) if self.segment else None
        factor = torch.ones_like(weight)
        choice = Choice(ro, weight, segment, self.iteration, generator(self.config.seed, "select", self.iteration))
        for select in self.select:
            factor = factor * select(choice).to(factor)
        nodes = decision_nodes(ro)
        if not bool((factor[nodes] > 0).any()):
            raise RunError(f"iteration {self.iteration}: `select` left none of {len(nodes)} decisions to train")
        best = best_below(ro, weight) if "best_x0" in self.asks or "best_weight" in self.asks else None
        return Facts(weight, factor, segment, best)

    def _updates(self, ro: Rollout, facts: Facts) -> list[Share]:
        nodes = decision_nodes(ro)
        if self.select:
            nodes = nodes[facts.factor[nodes] > 0]
        t, rng = self.config.train, generator(self.config.seed, "order", self.iteration)
        return deal(ro, nodes, segment=facts.segment, updates=t.updates, order=t.order, generator=rng)

    def _live(self, share: Share, facts: Facts) -> Share:
        """Leave out units of weight 0: without a KL or a term of its own they have no gradient; they are counted."""
        if self.kl is not None or "v" in self.asks:
            return share
        kept = facts.weight[share.node] != 0
        if facts.segment is not None and bool(kept.any()):
            kept = torch.isin(share.place, share.place[kept])
        return Share(share.node[kept], share.place[kept])

    def _differentiate(self, ro: Rollout, facts: Facts, share: Share, total: int) -> list[Metrics]:
        """Add the gradients of this process' decisions of an optimizer step that has `total` in all."""
        cuts = cut(ro, share, self.config.train.micro_batch)
        calls = max(self.world.gather(len(cuts))) if self.sharded else 0
        parts = [self._backward(ro, facts, nodes, total) for nodes in cuts]
        for _ in range(len(cuts), calls):
            self._backward(ro, facts, decision_nodes(ro)[:1], total, idle=True)
        return parts

    def _backward(self, ro: Rollout, facts: Facts, nodes: Tensor, total: int, *, idle: bool = False) -> Metrics:
        """Add the gradient of one micro-batch, divided by the `total` decisions of its optimizer step.

        An `idle` one adds 0: under FSDP every process has to call the network as often as the others.
        """
        batch = decisions(ro, facts.weight, nodes=nodes)
        now: Eval = self.likelihood(self.model, batch, self.transition)
        loss, metrics = self.loss(now.log_prob, batch.old_log_prob, batch.weight, **self._asked(ro, facts, batch, now))
        if self.select:
            loss = loss * facts.factor[nodes]
        if self.kl is not None:
            with torch.no_grad(), self.weights.using("ref"):
                ref = self.likelihood(self.model, batch, self.transition)
            penalty = self.kl(now, ref, delta=batch.sigma - batch.sigma_next)
            loss = loss + self.config.kl_beta * penalty
            metrics["kl"] = penalty.detach()
        (loss.sum() * (0 if idle else 1 / total)).backward()
        return {**metrics, "loss": loss.detach(), "node": nodes, "step": batch.step}

    def _asked(self, ro: Rollout, facts: Facts, batch: Batch, now: Eval) -> dict[str, Tensor | None]:
        """Return the run-time keywords that the loss has in its signature."""
        best = None if facts.best is None else facts.best[ro.tree.parent[batch.node]]
        offers: dict[str, Callable[[], Tensor | None]] = {
            "segment": lambda: None if facts.segment is None else facts.segment[batch.node],
            "mean": lambda: now.mean,
            "old_mean": lambda: None if ro.mean is None else ro.mean[batch.node],
            "std": lambda: now.std,
            "sigma": lambda: batch.sigma,
            "sigma_next": lambda: batch.sigma_next,
            "x": lambda: batch.x,
            "v": lambda: now.v,
            "best_x0": lambda: None if best is None else ro.x[best],
            "best_weight": lambda: None if best is None else facts.weight[best],
        }
        return {name: make() for name, make in offers.items() if name in self.asks}

    def _set_lr(self, update: int) -> None:
        warm = self.config.train.warmup
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.train.lr * min(1.0, (update + 1) / (warm + 1))

    # ---------------------------------------------------------------------------------------------------------- checks

    def _check_pictures(self, ro: Rollout, images: Tensor, rows: list[int]) -> None:
        """Raise RunError if the model made a latent or a picture that is not finite."""
        broken = (~ro.x.isfinite().flatten(1).all(1)).nonzero()
        where = f"iteration {self.iteration}: the model made"
        if len(broken):
            node = int(broken[0])  # nodes are stored step by step, so this is an earliest one
            prompt = self.train_set.texts[rows[int(ro.tree.group[node])]]
            raise RunError(
                f"{where} a latent that is not finite by denoising step {int(ro.tree.step[node]) - 1} (of "
                f"{len(ro.sigmas) - 1}, counted from 0) of prompt {prompt!r}; go on from an earlier checkpoint with a "
                "lower train.lr, or use a wider model.dtype"
            )
        broken = (~images.isfinite().flatten(1).all(1)).nonzero()
        if len(broken):
            prompt = self.train_set.texts[rows[int(ro.tree.group[ro.leaf[int(broken[0])]])]]
            raise RunError(f"{where} a picture of {prompt!r} that is not finite, although its latent is")

    def _what_broke(self, parts: list[Metrics], ro: Rollout, rows: list[int]) -> str | None:
        """Name this process' first decision and tensor that is not finite, if there is one."""
        for row in parts:
            for name in ("ratio", "kl", "loss"):
                if name in row and not bool(row[name].isfinite().all()):
                    at = int((~row[name].isfinite()).nonzero()[0])
                    prompt = self.train_set.texts[rows[int(ro.tree.group[row["node"][at]])]]
                    return (
                        f"{name} is not finite at denoising step {int(row['step'][at])} of prompt {prompt!r}; "
                        "no weight was changed by it. Lower train.lr or train.max_grad_norm, and resume"
                    )
        return None

    def _what_gradient(self) -> str:
        names = [name for name, p in self.params.items() if p.grad is not None and not bool(p.grad.isfinite().all())]
        return f"the gradient of {names[:3]} is not finite although the loss is; lower train.lr, and resume"

    def _phase(self, name: str) -> Any:
        return self.log.phase(name) if self.log is not None else nullcontext()

    # ----------------------------------------------------------------------------------------------------- checkpoints

    def save(self, folder: Path) -> None:
        """Write all that a bit-for-bit resume needs; the random streams follow from the iteration.

        All processes call it and the first one writes.
        """
        tensors, state = checkpoint.optimizer_to_tensors(self.optimizer)
        files = {"current": {k: p.detach() for k, p in self.params.items()}, "optimizer": tensors}
        files |= {**self.weights.state_dict(), **self.panel.state_dict()}
        if self.sharded:
            files = {name: self._whole(rows) for name, rows in files.items()}
        if self.world.main:
            config = self.config.dump()
            checkpoint.save(folder, files, {"iteration": self.iteration, "optimizer": state, "config": config})

    def _whole(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Join the shares of all processes, one tensor after the other, for the first process to keep."""
        joined = ((name, whole(tensor)) for name, tensor in tensors.items())
        return {name: tensor.cpu() if self.world.main else tensor.new_empty(0) for name, tensor in joined}

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint. Raises CheckpointError if it is torn or belongs to another model."""
        files, state = checkpoint.load(folder)
        current, optimizer = files.pop("current"), files.pop("optimizer")
        rewards = {name: files.pop(name) for name in [*files] if name.startswith("reward-") or name == "aggregate"}
        put_weights(self.params, current, folder)
        self.panel.load_state_dict(rewards, folder)
        if set(files) != set(self.weights.names()):
            raise CheckpointError(
                f"{folder}: holds the weights {sorted(files)}, this config needs {sorted(self.weights.names())}; "
                "train.ema, kl and an eval.tuned below 1 must be on or off as in the run that is resumed"
            )
        shared = {name: {k: shared_as(v, self.params[k]) for k, v in rows.items()} for name, rows in files.items()}
        self.weights.load_state_dict(shared)
        checkpoint.optimizer_from_tensors(self.optimizer, optimizer, state["optimizer"])
        self.iteration = int(state["iteration"])


def asks(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's keyword-only parameters: those that the loop knows are handed over."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


@torch.no_grad()
def put_weights(params: dict[str, torch.nn.Parameter], tensors: dict[str, Tensor], where: Path) -> None:
    """Copy tensors into the parameters of the same names. Raises CheckpointError if names or shapes differ."""
    wrong = [k for k, p in params.items() if k not in tensors or tensors[k].shape != p.shape]
    wrong += [k for k in tensors if k not in params]
    if wrong:
        raise CheckpointError(
            f"{where}: {len(wrong)} of {len(params)} trainable parameters do not fit this model (first: {wrong[0]}); "
            "it was saved with another model, `tune` or LoRA setting"
        )
    for name, p in params.items():
        p.copy_(shared_as(tensors[name], p))


def _done(values: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
    future: Future[dict[str, Tensor]] = Future()
    future.set_result(values)
    return future


def _learn_metrics(rows: Metrics, norms: list[Tensor]) -> dict[str, float]:
    """Reduce the metrics [B] of an iteration; per denoising step where health shows step by step."""
    if not rows:
        return {"trained": 0.0}
    step, update = rows.pop("step"), rows.pop("update")
    rows.pop("node")
    out = {name: values.mean().item() for name, values in rows.items()}
    out["ratio_std"] = rows["ratio"].std(correction=0).item()
    first = rows["ratio"][update == 0]
    out["on_policy_gap"] = (first - 1).abs().max().item() if len(first) else 0.0
    for k in step.unique().tolist():
        out[f"ratio_std/step{k}"] = rows["ratio"][step == k].std(correction=0).item()
        out[f"clip_frac/step{k}"] = rows["clip_frac"][step == k].mean().item()
    out["grad_norm"] = torch.stack(norms).mean().item()
    out["trained"] = float(len(step))
    return out


class StopSignal:
    """Turn the first Ctrl-C or SIGTERM into a wish that the loop sees between iterations; a second one is immediate."""

    def __init__(self) -> None:
        self.asked = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        try:
            self._old = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the host program keeps its own handlers
            self._old = {}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def write_text(path: Path, text: str) -> None:
    """Write a text by rename, so that no half file is ever read. Raises RunError."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON as `write_text` does. Raises RunError."""
    write_text(path, json.dumps(value, indent=2) + "\n")


__all__ = ["Batch", "Interrupted", "StopSignal", "Trainer", "put_weights", "write_json", "write_text"]
