"""Advantages against what was expected: of a prompt's earlier images, or by a small network. Groups
of one image will do.

Each is a class that is made once and called once an iteration. A call changes nothing; `update`
takes the iteration's rewards in, and checkpoints keep what is remembered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowrl.algorithms.credit._groups import Groups
from flowrl.algorithms.forest import subtree_mean
from flowrl.algorithms.prompt_memory import PromptMemory
from flowrl.core.errors import ConfigError
from flowrl.core.seeds import generator
from flowrl.core.types import Tree


class history_norm(PromptMemory):
    """Normalise a reward [L] by the last rewards of its prompt, from all iterations -> advantage
    per node [V] float32.

    ``(r - mean) / (std + eps)`` over the prompt's last `buffer` rewards, this iteration's among
    them; a prompt that has fewer than `least` takes mean and std of the whole batch. std is biased.
    Images of a prompt need not come together, so `train.group` may be 1. NaN = not scored: never
    remembered, advantage 0.

    Source: DDPO (2305.13301), per-prompt statistics; its code: buffer 16 or 32, least 16, eps 1e-6.
    **Differs:** the code keeps the reward's dtype, in which whole numbers are cut off.

    Raises: ConfigError for buffer < 1, least < 1 or above buffer, or eps not above 0.
    """

    def __init__(self, *, buffer: int = 32, least: int = 16, eps: float = 1e-6) -> None:
        if not (1 <= least <= buffer and eps > 0):
            raise ConfigError(
                "history_norm: expected 1 <= least <= buffer and eps > 0, got "
                f"{buffer=}, {least=}, {eps=}"
            )
        super().__init__({"rewards": buffer})
        self.buffer, self.least, self.eps = buffer, least, eps

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str] = ()
    ) -> Tensor:
        """Normalise each reward; prompts [L]: the text of each leaf."""
        value, place = reward.double(), self.places(prompts).to(reward.device)
        scored = ~value.isnan()
        if not bool(scored.any()):
            return torch.zeros(len(tree.parent), device=reward.device)
        batch = value[scored]
        advantage = torch.full_like(value, torch.nan)
        for prompt in place.unique().tolist():
            mine = place == prompt
            seen = self._seen(prompt, value[mine & scored])
            seen = batch if len(seen) < self.least else seen
            spread = seen.std(correction=0)
            advantage[mine] = (value[mine] - seen.mean()) / (spread + self.eps)
        return subtree_mean(advantage, leaf, tree).nan_to_num().float()

    def update(self, reward: Tensor, leaf: Tensor, tree: Tree, *, prompts: Sequence[str]) -> None:
        """Remember the rewards [L] of an iteration."""
        value, place = reward.double().cpu(), self.places(prompts)
        for prompt in place.unique().tolist():
            new = value[place == prompt]
            seen = self._seen(prompt, new[~new.isnan()])
            self.kept["rewards"][prompt, : len(seen)] = seen

    def _seen(self, prompt: int, new: Tensor) -> Tensor:
        """Return the last rewards of a prompt with the new ones [n], oldest first -> [m]."""
        old = self.kept["rewards"][prompt].to(new)
        return torch.cat([old[~old.isnan()], new])[-self.buffer :]


WIDTH, BATCH = 256, 256


class value_baseline:
    """Subtract from a reward [L] what a network expects of the noise it came from -> advantage per
    node [V] float32.

    FIND's dynamic reward calibration (2407.19453): the network reads mean and std of the initial
    noise and the prompt's vector (likelihood `prior` describes them), has `layers` hidden layers of
    256 and learns the mean reward of each prompt and iteration by squared error, `rounds` Adam
    steps of rate `lr` an iteration on up to 256 entries of the last `buffer`. So `train.group` may
    be 1. NaN = not scored: advantage 0.

    **Differs:** the published network has three hidden layers, where 2 is the default here; its
    last one starts by Xavier's rule, and AdamW trains it; here PyTorch's own start, and Adam
    without weight decay. The published code pairs the oldest reward of its buffer with the newest
    noise, and trains its network on copies of one entry; here entries are whole, drawn at random.

    Raises: ConfigError for a number that is not above 0.
    """

    needs = frozenset({"state"})

    def __init__(
        self,
        *,
        buffer: int = 1000,
        rounds: int = 5,
        lr: float = 1e-4,
        layers: int = 2,
        seed: int = 0,
    ) -> None:
        if min(buffer, rounds, layers) < 1 or not lr > 0:
            raise ConfigError(
                "value_baseline: expected buffer, rounds, layers and lr above 0, got "
                f"{buffer=}, {rounds=}, {layers=}, {lr=}"
            )
        self.layers = layers
        self.buffer, self.rounds, self.lr, self.seed = buffer, rounds, lr, seed
        self.seen: Tensor = torch.zeros(0, 0)  # [n, D]  oldest first
        self.worth: Tensor = torch.zeros(0)  # [n]
        self.updates = 0
        self.network: nn.Sequential | None = None
        self.optimizer: torch.optim.Adam | None = None

    def start(self, prompts: list[str]) -> None:
        """Nothing is kept of the list of prompts."""

    def __call__(
        self, reward: Tensor, leaf: Tensor, tree: Tree, *, state: Tensor | None = None
    ) -> Tensor:
        """Compare each reward with what is expected; state [L, D]: what the policy of each leaf
        was."""
        expected = torch.zeros_like(reward, dtype=torch.float64)
        if state is not None:
            with torch.no_grad():
                found = self._ready(state.shape[1])(state)[:, 0]
            expected = found.double().to(reward.device)
        return subtree_mean(reward.double() - expected, leaf, tree).nan_to_num().float()

    def update(
        self,
        reward: Tensor,
        leaf: Tensor,
        tree: Tree,
        *,
        prompts: Sequence[str],
        state: Tensor | None = None,
    ) -> None:
        """Remember the mean of each prompt's rewards [L] beside its `state` [L, D], and train the
        network on what is remembered. Raises ConfigError without states."""
        if state is None:
            raise ConfigError(
                "value_baseline: needs the state of the policy; take likelihood prior"
            )
        groups = Groups(reward.cpu(), leaf.cpu(), Tree(*(part.cpu() for part in tree)))
        mean = groups.mean()
        first = torch.full_like(mean, len(state), dtype=torch.int64)
        first.scatter_reduce_(0, groups.group, torch.arange(len(state)), "amin")
        known = ~mean.isnan()
        seen = torch.cat([self.seen.view(-1, state.shape[1]), state[first[known]]])
        self.seen = seen[-self.buffer :]
        self.worth = torch.cat([self.worth, mean[known].float()])[-self.buffer :]
        if len(self.worth):
            self._train(self._ready(state.shape[1]))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the memory, states [n, D] and their mean rewards [n], with network and moments."""
        kept = {"seen": self.seen, "worth": self.worth, "updates": torch.tensor(self.updates)}
        if self.network is None or self.optimizer is None:
            return kept
        for name, p in self.network.named_parameters():
            kept[f"network.{name}"] = p.detach().clone()
            for key, value in self.optimizer.state.get(p, {}).items():
                kept[f"adam.{key}.{name}"] = value.clone()
        return kept

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Put back what `state_dict` returned: states [n, D], mean rewards [n], and the rest."""
        self.seen, self.worth = state["seen"].clone(), state["worth"].clone()
        self.updates = int(state["updates"])
        if not any(name.startswith("network.") for name in state):
            return
        network = self._ready(state["network.0.weight"].shape[1])
        assert self.optimizer is not None  # made with the network
        for name, p in network.named_parameters():
            p.data.copy_(state[f"network.{name}"])
            moments = {}
            for key in ("step", "exp_avg", "exp_avg_sq"):
                if f"adam.{key}.{name}" in state:
                    moments[key] = state[f"adam.{key}.{name}"].clone()
            if moments:
                self.optimizer.state[p] = moments

    def _ready(self, width: int) -> nn.Sequential:
        """Return the network, made at first for D = `width` numbers."""
        if self.network is None:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(generator(self.seed, "value").get_state())
                hidden: list[nn.Module] = []
                for number in range(self.layers):
                    hidden += [nn.Linear(WIDTH if number else width, WIDTH), nn.ReLU()]
                self.network = nn.Sequential(*hidden, nn.Linear(WIDTH, 1))
            self.optimizer = torch.optim.Adam(self.network.parameters(), lr=self.lr)
        return self.network

    @torch.enable_grad()  # type: ignore[no-untyped-call,untyped-decorator]
    def _train(self, network: nn.Sequential) -> None:
        """Take the Adam steps of an iteration."""
        assert self.optimizer is not None  # made with the network
        for _ in range(self.rounds):
            rng = generator(self.seed, "replay", self.updates)
            rows = torch.randperm(len(self.worth), generator=rng)[:BATCH]
            miss = network(self.seen[rows])[:, 0] - self.worth[rows]
            self.optimizer.zero_grad()
            miss.square().mean().backward()
            self.optimizer.step()
            self.updates += 1
