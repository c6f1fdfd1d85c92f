"""The rewards of a run, together: asked, checked, made one advantage per node, logged, and trained
where they learn."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flowrl.algorithms.forest import KINDS, leaf_kinds, subtree_mean
from flowrl.config.load import Config
from flowrl.core.abilities import LearnedReward, judges_singly, sees_latents
from flowrl.core.errors import CheckpointError, ConfigError, RewardError, as_one_message
from flowrl.core.prompts import task_of
from flowrl.core.types import Credit, Mixed, RewardBatch, Scores, Tree
from flowrl.evaluation.reward_call import ask, probe_rewards, rewards_of, unusable
from flowrl.evaluation.reward_guard import watched
from flowrl.evaluation.sources import prompt_keys

Transform = Callable[[Tensor, RewardBatch], Tensor]


@runtime_checkable
class StatefulAggregator(Protocol):
    """An aggregator with a state of its own, such as dual variables; calling it changes nothing."""

    def update(self, scores: Scores) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


@runtime_checkable
class ReadsRecords(Protocol):
    """An aggregator that looks at the prompts' records, and says before training what they lack."""

    def check_records(self, records: Sequence[Mapping[str, Any]]) -> None: ...


@runtime_checkable
class RememberingCredit(Protocol):
    """A credit that compares images with those of earlier iterations; calling it changes
    nothing."""

    # the keys of the training list, as `prompt_keys` makes them
    def start(self, prompts: list[str]) -> None: ...

    def update(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str]
    ) -> None: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state: dict[str, Tensor]) -> None: ...


class RewardSet:
    """All rewards of a config with their transforms, the aggregator, and what they keep between
    iterations.

    Making one calls transforms and aggregator once on made-up images, so that a wrong tag or reward
    name is an error before the first image is made.
    """

    def __init__(
        self,
        config: Config,
        records: list[dict[str, Any]],
        credit: Credit | Any = None,
        *,
        frames: int = 1,
    ) -> None:
        """credit: the method's; one that remembers prompts is kept along. frames: of the model's
        videos; 1: it makes images."""
        # the functions that the config names
        self.rewards = rewards_of(config.rewards, frames)
        self.transforms: dict[str, list[Transform]] = {}
        for name, call in config.rewards.items():
            self.transforms[name] = [step.partial() for step in call.transform]
        self.aggregate: Callable[[Scores, Credit], Mixed] = config.aggregate.make()
        self.weights, self.max_unscored = config.reward_weights, config.train.max_unscored
        # of the last advantages: weighted sum of the rewards [L]; factor of the penalty, and which
        # nodes were judged [V]
        self.total: Tensor | None = None
        self.gate: Tensor | None = None
        self.scored: Tensor | None = None
        self.credit = credit if isinstance(credit, RememberingCredit) else None
        if self.credit is not None:
            texts = [record["prompt"] for record in records]
            self.credit.start(prompt_keys(texts, records))
        # a rehearsal
        if isinstance(self.aggregate, ReadsRecords):
            self.aggregate.check_records(records)
        self._rehearse(records)

    @functools.cached_property
    def judges_singly(self) -> bool:
        """Say whether equal images are shown to the rewards once."""
        return all(map(judges_singly, self.rewards.values()))

    @functools.cached_property
    def sees_latents(self) -> bool:
        """Say whether any reward judges what images are decoded from."""
        return any(map(sees_latents, self.rewards.values()))

    def probe(self) -> None:
        """Ask each reward that can tell whether it is ready. Raises as `probe_rewards` does."""
        probe_rewards(self.rewards)

    @torch.no_grad()
    def score(
        self,
        batch: RewardBatch,
        where: str,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> dict[str, Tensor]:
        """Ask every reward about a batch -> {name: [L] float32 on the CPU}, NaN = not scored.
        `progress` gets (rewards that have answered, all). Raises RewardError."""
        found: dict[str, Tensor] = {}
        for name, reward in self.rewards.items():
            found[name] = ask(name, reward, batch, where)
            progress(len(found), len(self.rewards))
        return found

    def check_unscored(self, values: Mapping[str, Tensor], prompts: list[str], where: str) -> None:
        """Raise RewardError if a reward left more of an iteration's images unscored than
        `train.max_unscored` allows: those of all parts and of all processes together."""
        for name, row in values.items():
            unscored = row.isnan()
            if unscored.double().mean().item() > self.max_unscored:
                rule = (
                    f"NaN means not scored; train.max_unscored={self.max_unscored} is the share "
                    "that may be left out so"
                )
                raise unusable(name, row, prompts, where, int(unscored.nonzero()[0]), rule)

    def advantages(
        self,
        values: Mapping[str, Tensor],
        batch: RewardBatch,
        leaf: Tensor,
        tree: Tree,
        credit: Callable[..., Tensor],
        *,
        distance: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Turn raw rewards {name: [L]} into one advantage per node [V] -> (advantage, metrics).

        credit: called as ``credit(reward, leaf, tree)``. distance: [G] as `finished_distances`
        gives it, needed where another process holds some of the images.
        """
        # transforms, credit and aggregator
        scores = self._scores(values, batch, leaf, tree)
        mixed = self.aggregate(scores, lambda reward: credit(reward, leaf, tree))
        self.gate = mixed.gate
        total = total_reward(scores.values, self.weights)
        self.total = total
        # a credit may have judged by something else, such as labels
        self.scored = ~subtree_mean(total, leaf, tree).isnan() | (mixed.advantage != 0)
        # figures of the raw rewards, and the aggregator's own
        kind = leaf_kinds(tree, leaf)
        if distance is None:
            distance = finished_distances(batch.images, batch.group, kind)
        metrics = reward_metrics(values, self.weights, distance, batch.group, kind)
        metrics |= mixed.metrics
        metrics |= shares(mixed.parts, batch.group) | correlations(values, batch.group)
        return mixed.advantage, metrics

    def update(
        self,
        values: Mapping[str, Tensor],
        batch: RewardBatch,
        leaf: Tensor,
        tree: Tree,
        extra: Mapping[str, Tensor] | None = None,
    ) -> dict[str, float]:
        """Let the aggregator and the rewards that are trained along take their step -> metrics.

        extra: what the credit asked for besides the prompts.
        """
        # the credit first: it remembers the rewards that the advantages were made of
        if self.credit is not None:
            learn: Callable[..., None] = self.credit.update
            keys = prompt_keys(batch.prompts, batch.meta)
            learn = functools.partial(learn, prompts=keys, **(extra or {}))
            self._remember(learn, self._scores(values, batch, leaf, tree))
        if isinstance(self.aggregate, StatefulAggregator):
            self.aggregate.update(self._scores(values, batch, leaf, tree))
        metrics: dict[str, float] = {}
        for name, reward in self.learned_rewards().items():
            with as_one_message(f"the update of reward {name!r}", RewardError), watched(name):
                said = reward.update(batch)
            metrics |= {f"learned/{name}/{key}": value for key, value in said.items()}
        return metrics

    def judged(
        self, values: Mapping[str, Tensor], batch: RewardBatch, leaf: Tensor, tree: Tree
    ) -> Tensor:
        """Return the weighted sum [L] of the rewards after their transforms, NaN = not scored."""
        scores = self._scores(values, batch, leaf, tree)
        return total_reward(scores.values, self.weights)

    def trains_policy(self, iteration: int) -> bool:
        """Say whether the policy is updated in this iteration; a reward may first learn alone."""
        return all(reward.trains_policy(iteration) for reward in self.learned_rewards().values())

    def learned_rewards(self) -> dict[str, LearnedReward]:
        """Return the rewards that are trained along."""
        found = {}
        for name, reward in self.rewards.items():
            if isinstance(reward, LearnedReward):
                found[name] = reward
        return found

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return {file: tensors} for a checkpoint; empty where nothing has a state."""
        files = {f"reward-{n}": reward.state_dict() for n, reward in self.learned_rewards().items()}
        if isinstance(self.aggregate, StatefulAggregator):
            files["aggregate"] = self.aggregate.state_dict()
        if self.credit is not None:
            files["credit"] = self.credit.state_dict()
        return files

    def load_state_dict(self, files: Mapping[str, dict[str, Tensor]], where: Any) -> None:
        """Put back what `state_dict` gave. Raises CheckpointError if the files are others."""
        wanted = sorted(self.state_dict())
        if sorted(files) != wanted:
            raise CheckpointError(
                f"{where}: holds the reward states {sorted(files)}, this config needs {wanted}"
            )
        for name, reward in self.learned_rewards().items():
            reward.load_state_dict(files[f"reward-{name}"])
        if isinstance(self.aggregate, StatefulAggregator):
            self.aggregate.load_state_dict(files["aggregate"])
        if self.credit is not None:
            self.credit.load_state_dict(files["credit"])

    def _remember(self, learn: Callable[..., None], scores: Scores) -> None:
        """Show a credit's `update` what the aggregator makes of an iteration's rewards."""

        def seen(reward: Tensor) -> Tensor:
            learn(reward, scores.leaf, scores.tree)
            return torch.zeros(len(scores.tree.parent), device=reward.device)

        self.aggregate(scores, seen)

    def _scores(
        self, values: Mapping[str, Tensor], batch: RewardBatch, leaf: Tensor, tree: Tree
    ) -> Scores:
        """Transform, and take an image out of every baseline if one reward that counts did not
        score it."""
        done = dict(values)
        for name, steps in self.transforms.items():
            for step in steps:
                done[name] = step(done[name], batch)
        missing = torch.zeros(len(leaf), dtype=torch.bool)
        for name, row in done.items():
            if self.weights[name]:
                missing = missing | row.isnan()
        rows = {}
        for name, row in done.items():
            rows[name] = torch.where(missing, torch.nan, row).to(leaf.device)
        return Scores(rows, self.weights, leaf, tree, batch.meta)

    def _rehearse(self, records: list[dict[str, Any]]) -> None:
        """Run transforms and aggregator on two made-up images of each tag, so that a wrong name
        is found at once."""
        # one record per tag, twice: two images of each group
        by_tag = {task_of(record): record for record in records}
        meta = 2 * list(by_tag.values())
        size = len(meta)
        place = torch.arange(size)
        group = place % (size // 2)
        # roots without steps, with rewards 0 and 1
        tree = Tree(torch.full((size,), -1), torch.zeros_like(place), torch.zeros(size), group)
        batch = RewardBatch(torch.zeros(size, 3, 1, 1), [""] * size, group, meta, torch.zeros(size))
        values = {name: (place * 2 // size).float() for name in self.rewards}
        asked: list[Tensor] = []

        def count(reward: Tensor) -> Tensor:
            asked.append(reward)
            return reward

        self.aggregate(self._scores(values, batch, place, tree), count)
        if self.credit is not None and len(asked) > 1:
            raise ConfigError(
                f"credit: {type(self.credit).__name__} remembers one reward of each prompt, but "
                "the aggregate asks about each reward by itself; take aggregate weighted_sum"
            )


# -------------------------------------------------------- what a run measures of rewards and images


LOOKS = ("saturation", "sharpness", "grid")
BINS = 24  # of histograms
PERIOD = 8  # pixels: of the autoencoders, and half of the networks' patches
MOST = 64  # prompts of a process that are looked at


def histogram(values: Tensor) -> dict[str, Any] | None:
    """Count the finite values [n] in `BINS` equal parts of their range -> {"low", "high",
    "counts"}; None where there is none."""
    known = values.detach().double().cpu()
    known = known[known.isfinite()]
    if not len(known):
        return None
    low, high = known.min().item(), known.max().item()
    if low == high:
        return {"low": low, "high": high, "counts": [len(known)]}
    counts = torch.histc(known, BINS, low, high)
    return {"low": low, "high": high, "counts": counts.long().tolist()}


def distances(images: Tensor, group: Tensor) -> Tensor:
    """Return the root-mean-square distance of a prompt's images [G], by ascending group, on the
    CPU; NaN for one. Images [L, 3, H, W] in [0, 1], or uint8."""
    out = []
    for g in group.unique().tolist():
        pixels = images[(group == g).to(images.device)].flatten(1)
        out.append(_distance(pixels))
    return torch.tensor(out)


def _distance(pixels: Tensor) -> float:
    """Return the root-mean-square distance of rows [n, P]: twice the mean variance over rows.

    From sums of squares, which are exact for uint8, up to 65,000 rows of it.
    """
    count, scale = len(pixels), 255 if pixels.dtype == torch.uint8 else 1
    if count < 2:
        return math.nan
    values = pixels.float() if pixels.dtype == torch.uint8 else pixels.double()
    within = values.square().sum(dtype=torch.float64)
    common = values.sum(0).double().square().sum() / count
    variance = float((within - common).clamp_min(0)) / ((count - 1) * values.shape[1])
    return math.sqrt(2 * variance) / scale


def reward_metrics(
    values: Mapping[str, Tensor],
    weights: Mapping[str, float],
    distance: Tensor,
    group: Tensor,
    kind: Tensor,
) -> dict[str, float]:
    """Measure raw rewards {name: [L]}: the mean of each and of their weighted sum, and the spread.

    They are those of finished images. What else was scored has means under names of its own:
    ``preview/reward``. distance: the finished images' `distances` [G]; kind: the leaves' kinds [L],
    as `leaf_kinds` gives them.
    """
    total, kind = total_reward(values, weights), kind.cpu()
    done = kind == 0
    metrics = {}
    for name, row in values.items():
        metrics[f"reward/{name}"] = row[done].nanmean().item()
    metrics["reward"] = total[done].nanmean().item()
    metrics |= group_metrics(total[done], distance, group.cpu()[done])
    # what is not finished
    for place, name in enumerate(KINDS):
        mine = kind == place
        if place and bool(mine.any()):
            metrics[f"{name}/reward"] = total[mine].nanmean().item()
            metrics[f"{name}/images"] = float(mine.sum())
    return metrics


def finished_distances(images: Tensor, group: Tensor, kind: Tensor) -> Tensor:
    """Return the `distances` [G] of the finished images; kind [L] as `leaf_kinds` gives it."""
    done = kind == 0
    if bool(done.all()):
        return distances(images, group)
    return distances(images[done.to(images.device)], group[done.to(group.device)])


def total_reward(values: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Add rewards {name: [L]} by weight; one of weight 0 is left out, so that NaN
    in it does no harm."""
    total = torch.zeros_like(next(iter(values.values())))
    for name, row in values.items():
        if weights[name]:
            total = total + weights[name] * row
    return total


def group_metrics(reward: Tensor, distance: Tensor, group: Tensor) -> dict[str, float]:
    """Measure the spread within prompts: of rewards [L], and of images by their `distances`
    [G]."""
    stds, apart = [], []
    group = group.cpu()
    # prompts with fewer than two scored images have no spread
    for place, g in enumerate(group.unique().tolist()):
        mine = reward[group == g]
        mine = mine[mine.isfinite()]
        if len(mine) < 2:
            continue
        stds.append(mine.std(correction=0))
        apart.append(distance[place])
    if not stds:
        return {}
    # means over the others
    spread = torch.stack(stds)
    return {
        "reward_std": spread.mean().item(),
        "zero_std": (spread < 1e-8).float().mean().item(),
        "diversity": torch.stack(apart).mean().item(),
    }


def prompt_entropy(advantage: Tensor, group: Tensor) -> float:
    """Say how evenly the prompts teach: the entropy of their shares of the sum of absolute
    advantages [V], over the log of their number.

    1 where all teach alike, 0 where one does, or none; 1 where there is only one.
    """
    ids = torch.unique(group.cpu(), return_inverse=True)[1]
    prompts = int(ids.max()) + 1
    size = torch.zeros(prompts, dtype=torch.float64).index_add(
        0, ids, advantage.cpu().double().abs()
    )
    if prompts == 1 or not float(size.sum()) > 0:
        return float(prompts == 1)
    share = size / size.sum()
    return float(torch.special.entr(share).sum() / math.log(prompts))


def shares(parts: Mapping[str, Tensor], group: Tensor) -> dict[str, float]:
    """Say which reward decides: the share of each in the variance of the advantage within prompts.

    parts: {name: [L]}. Empty with one reward, or where no advantage differs within a prompt.
    """
    if len(parts) < 2:
        return {}
    mine = {}
    for name, part in parts.items():
        mine[name] = _centred(part.cpu(), group)
    total = torch.stack(list(mine.values())).sum(0)
    power = total.square().sum()
    found: dict[str, float] = {}
    for name, part in mine.items():
        if float(power) > 0:
            found[f"share/{name}"] = float((part * total).sum() / power)
    return found


def correlations(values: Mapping[str, Tensor], group: Tensor) -> dict[str, float]:
    """Say how rewards {name: [L]} go together within prompts: Pearson's r of each two."""
    out: dict[str, float] = {}
    for (one, a), (two, b) in combinations(values.items(), 2):
        # images that one of both did not score count for neither
        gone = a.isnan() | b.isnan()
        a = _centred(torch.where(gone, torch.nan, a), group)
        b = _centred(torch.where(gone, torch.nan, b), group)
        size = (a.square().sum() * b.square().sum()).sqrt()
        if float(size) > 0:
            out[f"corr/{one}/{two}"] = float((a * b).sum() / size)
    return out


def _centred(values: Tensor, group: Tensor) -> Tensor:
    """Subtract from each value its prompt's mean; what was not scored becomes 0, which counts in no
    sum."""
    ids = torch.unique(group.cpu(), return_inverse=True)[1]
    known = ~values.isnan()
    clean = values.double().nan_to_num()
    zeros = torch.zeros(int(ids.max()) + 1, dtype=torch.float64)
    mean = zeros.index_add(0, ids, clean) / zeros.index_add(0, ids, known.double()).clamp_min(1)
    return torch.where(known, clean - mean[ids], 0.0)


def looks_of(images: Tensor, group: Tensor, kind: Tensor) -> Tensor:
    """Look at the first finished image of each prompt, of `MOST` prompts -> [G, 3] as `LOOKS`.

    Images uint8 [L, 3, H, W], or videos [L, T, 3, H, W]; kind [L] as `leaf_kinds` gives it, 0 =
    finished.
    """
    done = (kind.cpu() == 0).nonzero().flatten()
    prompt = torch.unique(group.cpu()[done], return_inverse=True)[1]
    first = torch.full((int(prompt.max()) + 1,), len(images))
    first = first.scatter_reduce(0, prompt, done, "amin")[:MOST]
    # one at a time: floats of all of them would be several times what an iteration keeps
    rows = []
    for place in first.tolist():
        one = images[place].cpu().float().reshape(-1, *images.shape[-3:]) / 255
        each = torch.stack([saturation(one), sharpness(one), grid_energy(one)])
        rows.append(each.mean(1))  # over the frames of a video
    return torch.stack(rows)


def saturation(images: Tensor) -> Tensor:
    """Return the mean distance of the strongest and the weakest channel [B], in [0, 1]."""
    return (images.amax(1) - images.amin(1)).mean((1, 2))


def sharpness(images: Tensor) -> Tensor:
    """Return the mean absolute Laplacian of the grey images [B]: 0 for a plane."""
    grey = images.mean(1)
    inside = grey[:, 1:-1, 1:-1]
    around = grey[:, :-2, 1:-1] + grey[:, 2:, 1:-1] + grey[:, 1:-1, :-2] + grey[:, 1:-1, 2:]
    return (around - 4 * inside).abs().mean((1, 2))


def grid_energy(images: Tensor) -> Tensor:
    """Return how much of the edges repeats every `PERIOD` pixels [B], in [0, 1].

    The absolute differences of neighbouring pixels, averaged along the other axis, make a profile
    along each axis. It is the share of that profile's energy without its mean which lies at the
    multiples of 1 / `PERIOD`, averaged over both axes; 0 without edges.
    """
    grey = images.mean(1)
    both = [_periodic(grey), _periodic(grey.transpose(1, 2))]
    return torch.stack(both).mean(0)


def _periodic(grey: Tensor) -> Tensor:
    """Return the share along the last axis [B] of images [B, H, W]."""
    # around the edge, so that the profile has whole periods
    profile = (grey - grey.roll(1, -1)).abs().mean(1)
    length = profile.shape[1] // PERIOD * PERIOD
    if not length:
        return torch.zeros(len(grey))
    power = torch.fft.rfft(profile[:, :length].double()).abs().square()[:, 1:]
    step = length // PERIOD
    total = power.sum(1)
    share = power[:, step - 1 :: step].sum(1) / total.clamp_min(1e-12)
    return torch.where(total > 1e-9, share, 0.0).float()
