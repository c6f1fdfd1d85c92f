"""The rewards of a run, together: asked, checked, made one weight per node, logged, and trained where they learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.config import Config
from flowrl.errors import CheckpointError, FlowRLError, RewardError
from flowrl.types import Credit, LearnedReward, Mixed, Probed, Reward, RewardBatch, Scores, Tree

Transform = Callable[[Tensor, RewardBatch], Tensor]


@runtime_checkable
class Adaptive(Protocol):
    """An aggregator with a state of its own, such as dual variables; calling it changes nothing."""

    def update(self, scores: Scores) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class Panel:
    """All rewards of a config with their transforms, the aggregator, and what they keep between iterations."""

    def __init__(self, config: Config, records: list[dict[str, Any]]) -> None:
        self.rewards: dict[str, Reward] = {name: call.make() for name, call in config.rewards.items()}
        self.transforms: dict[str, list[Transform]] = {
            name: [step.partial() for step in call.transform] for name, call in config.rewards.items()
        }
        self.aggregate: Callable[[Scores, Credit], Mixed] = config.aggregate.make()
        self.weights, self.max_unscored = config.reward_weights, config.train.max_unscored
        self._rehearse(records)

    def probe(self) -> None:
        """Ask each reward that can tell whether it is ready. Raises what it raises."""
        for reward in self.rewards.values():
            if isinstance(reward, Probed):
                reward.probe()

    @torch.no_grad()
    def score(self, batch: RewardBatch, where: str) -> dict[str, Tensor]:
        """Ask every reward about a batch -> {name: [L] float32 on the CPU}, NaN = not scored. Raises RewardError."""
        values = {name: ask(name, reward, batch, where) for name, reward in self.rewards.items()}
        for name, row in values.items():
            self._check(name, row, batch, where)
        return values

    def weigh(
        self,
        values: Mapping[str, Tensor],
        batch: RewardBatch,
        leaf: Tensor,
        tree: Tree,
        credit: Callable[..., Tensor],
        *,
        distance: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Make raw values [L] one weight per node [V] -> (weight, metrics).

        distance [G] as `distances` gives it, where another process holds some of the pictures.
        """
        scores = self._scores(values, batch, leaf, tree)
        mixed = self.aggregate(scores, lambda reward: credit(reward, leaf, tree))
        means = {f"reward/{name}": row.nanmean().item() for name, row in values.items()}
        total = _weighted(values, self.weights)
        apart = distances(batch.images, batch.group) if distance is None else distance
        metrics = {**means, "reward": total.nanmean().item(), **group_metrics(total, apart, batch.group)}
        return mixed.weight, {**metrics, **mixed.metrics, **_relations(values, mixed.parts, batch.group)}

    def learn(self, values: Mapping[str, Tensor], batch: RewardBatch, leaf: Tensor, tree: Tree) -> dict[str, float]:
        """Let the aggregator and the rewards that are trained along take their step -> metrics."""
        if isinstance(self.aggregate, Adaptive):
            self.aggregate.update(self._scores(values, batch, leaf, tree))
        metrics: dict[str, float] = {}
        for name, reward in self.learned().items():
            metrics |= {f"learned/{name}/{key}": value for key, value in reward.update(batch).items()}
        return metrics

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy is updated in this iteration; a reward may first learn alone."""
        return all(reward.trains_policy(iteration) for reward in self.learned().values())

    def learned(self) -> dict[str, LearnedReward]:
        """Return the rewards that are trained along."""
        return {name: reward for name, reward in self.rewards.items() if isinstance(reward, LearnedReward)}

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return {file: tensors} for a checkpoint; empty where nothing has a state."""
        files = {f"reward-{name}": reward.state_dict() for name, reward in self.learned().items()}
        return files | ({"aggregate": self.aggregate.state_dict()} if isinstance(self.aggregate, Adaptive) else {})

    def load_state_dict(self, files: Mapping[str, dict[str, Tensor]], where: Any) -> None:
        """Put back what `state_dict` gave. Raises CheckpointError if the files are others."""
        wanted = sorted(self.state_dict())
        if sorted(files) != wanted:
            raise CheckpointError(f"{where}: holds the reward states {sorted(files)}, this config needs {wanted}")
        for name, reward in self.learned().items():
            reward.load_state_dict(files[f"reward-{name}"])
        if isinstance(self.aggregate, Adaptive):
            self.aggregate.load_state_dict(files["aggregate"])

    def _scores(self, values: Mapping[str, Tensor], batch: RewardBatch, leaf: Tensor, tree: Tree) -> Scores:
        """Transform, and take a picture out of every baseline if one reward that counts did not score it."""
        done = dict(values)
        for name, steps in self.transforms.items():
            for step in steps:
                done[name] = step(done[name], batch)
        missing = torch.stack([done[name].isnan() for name in done if self.weights[name]]).any(0)
        if bool(missing.any()):
            done = {name: torch.where(missing, torch.nan, row) for name, row in done.items()}
        return Scores({name: row.to(leaf.device) for name, row in done.items()}, self.weights, leaf, tree)

    def _rehearse(self, records: list[dict[str, Any]]) -> None:
        """Run transforms and aggregator on two made-up pictures of each tag, so that a wrong name is found at once."""
        meta = 2 * list({str(record.get("tag", "all")): record for record in records}.values())
        size = len(meta)
        group = torch.arange(size) % (size // 2)
        tree = Tree(torch.full((size,), -1), torch.zeros(size, dtype=torch.int64), torch.zeros(size), group)
        batch = RewardBatch(torch.zeros(size, 3, 1, 1), [""] * size, group, meta, torch.zeros(size))
        values = {name: (torch.arange(size) * 2 // size).float() for name in self.rewards}
        self.aggregate(self._scores(values, batch, torch.arange(size), tree), lambda reward: reward)

    def _check(self, name: str, values: Tensor, batch: RewardBatch, where: str) -> None:
        bad = values.isnan()
        if bad.float().mean().item() > self.max_unscored:
            rule = f"NaN means not scored; train.max_unscored={self.max_unscored} is the share that may be left out so"
            raise _unusable(name, values, batch, where, int(bad.nonzero()[0]), rule)


def ask(name: str, reward: Reward, batch: RewardBatch, where: str) -> Tensor:
    """Call one reward -> `checked` values [L]. Raises RewardError that names it, whatever it failed with."""
    try:
        values = reward(batch)
    except FlowRLError as error:
        raise RewardError(f"{where}: reward {name!r}: {error}") from error
    except Exception as error:  # rewards are users' code and servers: they fail in any way
        raise RewardError(f"{where}: reward {name!r} failed with {type(error).__name__}: {error}") from error
    return checked(name, values, batch, where)


def checked(name: str, values: Tensor, batch: RewardBatch, where: str) -> Tensor:
    """Return what a reward gave as [L] float32 on the CPU, NaN = not scored. Raises RewardError for anything else."""
    count = len(batch.images)
    if values.shape != (count,):
        raise RewardError(
            f"{where}: reward {name!r}: expected {count} numbers, one per picture, got shape {list(values.shape)}"
        )
    values = values.float().cpu()
    infinite = values.isinf().nonzero()
    if len(infinite):
        raise _unusable(name, values, batch, where, int(infinite[0]), "NaN means not scored; infinity is never allowed")
    return values


def _unusable(name: str, values: Tensor, batch: RewardBatch, where: str, first: int, rule: str) -> RewardError:
    return RewardError(
        f"{where}: reward {name!r} gave {values[first].item()} for picture {first}, of {batch.prompts[first]!r} "
        f"({int((~values.isfinite()).sum())} of {len(values)} pictures have no finite score). {rule}"
    )


def distances(images: Tensor, group: Tensor) -> Tensor:
    """Return the root-mean-square distance of a prompt's pictures [G], by ascending group, on the CPU; NaN for one."""
    out = []
    for g in group.unique().tolist():
        pixels = images[(group == g).to(images.device)].flatten(1)
        out.append((2 * pixels.var(0, correction=1).mean()).sqrt() if len(pixels) > 1 else pixels.new_tensor(torch.nan))
    return torch.stack(out).cpu()


def group_metrics(reward: Tensor, distance: Tensor, group: Tensor) -> dict[str, float]:
    """Measure the spread within prompts: of rewards [L], and of pictures by their `distances` [G]."""
    stds, apart = [], []
    group = group.cpu()
    for place, g in enumerate(group.unique().tolist()):
        mine = reward[group == g]
        mine = mine[mine.isfinite()]
        if len(mine) < 2:
            continue
        stds.append(mine.std(correction=0))
        apart.append(distance[place])
    if not stds:
        return {}
    spread = torch.stack(stds)
    return {
        "reward_std": spread.mean().item(),
        "zero_std": (spread < 1e-8).float().mean().item(),
        "diversity": torch.stack(apart).mean().item(),
    }


def _weighted(values: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    total = torch.zeros_like(next(iter(values.values())))
    for name, row in values.items():
        if weights[name]:
            total = total + weights[name] * row
    return total


def _relations(values: Mapping[str, Tensor], parts: Mapping[str, Tensor], group: Tensor) -> dict[str, float]:
    """Say which reward decides (shares of the advantage's variance) and how rewards go together within prompts."""
    out: dict[str, float] = {}
    if len(parts) > 1:
        mine = {name: _centred(part.cpu(), group) for name, part in parts.items()}
        total = torch.stack(list(mine.values())).sum(0)
        power = total.square().sum()
        if float(power) > 0:
            out |= {f"share/{name}": float((part * total).sum() / power) for name, part in mine.items()}
    for (one, a), (two, b) in combinations(values.items(), 2):
        gone = a.isnan() | b.isnan()
        a, b = (_centred(torch.where(gone, torch.nan, row), group) for row in (a, b))
        size = (a.square().sum() * b.square().sum()).sqrt()
        if float(size) > 0:
            out[f"corr/{one}/{two}"] = float((a * b).sum() / size)
    return out


def _centred(values: Tensor, group: Tensor) -> Tensor:
    """Subtract from each value its prompt's mean; what was not scored becomes 0, which counts in no sum."""
    ids = torch.unique(group.cpu(), return_inverse=True)[1]
    known = ~values.isnan()
    clean = values.double().nan_to_num()
    zeros = torch.zeros(int(ids.max()) + 1, dtype=torch.float64)
    mean = zeros.index_add(0, ids, clean) / zeros.index_add(0, ids, known.double()).clamp_min(1)
    return torch.where(known, clean - mean[ids], 0.0)
