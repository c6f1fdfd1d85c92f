"""Real images of the training prompts, which a penalty trains the velocity on beside the reward: a
record names them under ``image``, one path or a list of them, as seen from its prompt list."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl.algorithms.forest import initial_noise, state_rows
from flowrl.config.load import Config
from flowrl.core.abilities import Guides, discrete_levels
from flowrl.core.devices import on_host
from flowrl.core.errors import ConfigError, DataError
from flowrl.core.needs import needs_of
from flowrl.core.noise_path import interpolate, wide
from flowrl.core.part import Part
from flowrl.core.pixels import from_bytes
from flowrl.core.prompts import PromptSet
from flowrl.core.seeds import NodeStreams, generator
from flowrl.core.types import LossInput, Plan, RealRows, Rollout
from flowrl.evaluation.image_files import read_fitted
from flowrl.evaluation.reward_call import frames_of
from flowrl.evaluation.sources import check_images, place_of
from flowrl.training.guidance import is_guided, teacher_guidance
from flowrl.training.learn import CallRows
from flowrl.training.parts.copies import limits_of
from flowrl.training.parts.stored_images import check_encodes, check_encodes_ahead
from flowrl.training.run import Iteration, Prepared, Run
from flowrl.training.task import Task

IMAGE = "image"
KEPT = 2**30  # bytes of latents that are kept on the host for later iterations
LEVELS = (math.log(4), 1.2)  # mean and std of the logit of noise levels that are drawn anew


def fresh_of(config: Config) -> str:
    """Return what is drawn anew for each noised image, by the function that asks for them: none,
    noise, or all."""
    call = config.loss
    if config.kl and "data" in needs_of(config.kl.function):
        call = config.kl
    return str(call.kwargs.get("fresh", "none"))


class RealImages(Part):
    """The real images of a prompt list, and the latents of those that were used last."""

    name = "real images"
    rank = 25
    when = ("needs.data",)
    context = "training on real images"

    def check(self, task: Task, plan: Plan) -> None:
        """Refuse a penalty on real images that has no rows, or no noise, to go by, or is taken for
        a distance to the base model."""
        config, likelihood = task.config, task.method.likelihood
        check_encodes_ahead(config, "training on real images (data_velocity)")
        if (frames := frames_of(config)) > 1:
            raise ConfigError(
                f"kl: trains on real images, and model {config.model.fn} makes videos of {frames} "
                "frames; leave the section out"
            )
        if likelihood.trains not in ("draws", "leaves"):
            raise ConfigError(
                f"kl: real images are noised to the levels of what is trained, and likelihood "
                f"{config.likelihood.fn} trains {likelihood.trains}; take reverse or forward, or "
                "leave the section out"
            )
        if plan.stored is not None and fresh_of(config) == "none":
            raise ConfigError(
                f"kl.fresh=none: plan {config.plan.fn} samples nothing, so its images have no "
                "initial noise for the real ones; set it to noise or all"
            )
        # its value is an error, which has a floor that is no distance
        wants = [f"{name}.above" for name in limits_of(config)]
        if config.monitors.adaptive_kl:
            wants.append("monitors.adaptive_kl")
        if config.kl is not None and "data" in needs_of(config.kl.function) and wants:
            raise ConfigError(
                f"{wants[0]}: follows a distance to the base model, and kl {config.kl.fn} is an "
                "error on real images, which never comes near 0; leave the one or the other out"
            )

    def begin(self, prepared: Prepared) -> None:
        """Find the images. Raises DataError, with file and line, for a record without an image, and
        an image that is missing, or none."""
        prompts = prepared.train_set
        self.size, self._kept = prepared.size, dict[Path, Tensor]()
        check_images(prompts, IMAGE, _paths)
        self._paths = [_paths(prompts, row) for row in range(len(prompts))]

    def check_model(self, prepared: Prepared, model: Any, frames: int) -> None:
        """Refuse a model whose velocity cannot be compared with real images: it is to be asked
        about noise levels that it does not know, or cannot leave its guidance out."""
        config = prepared.config
        check_encodes(model, "training on real images (data_velocity)")
        if fresh_of(config) == "all" and discrete_levels(model):
            raise ConfigError(
                f"kl.fresh=all: draws noise levels for real images, and model {config.model.fn} "
                "knows those of its training timesteps alone; set it to none or noise, which take "
                "the rows'"
            )
        if is_guided(config) and not isinstance(model, Guides):
            raise ConfigError(
                f"kl: real images are fitted without guidance, and model {config.model.fn} cannot "
                "leave its own out; set model.guidance=1"
            )

    def before_learning(self, run: Run, it: Iteration) -> None:
        """Encode the images before the first network call."""
        assert it.rollout is not None
        places = on_host(it.rollout.group_ids).tolist()
        # a file that one process cannot read ends all of them
        run.world.together(lambda: self.prepare(run, places, it.rows))

    def provide(self, run: Run, rows: CallRows, data: LossInput) -> LossInput:
        """Noise a real image of the prompt of each row, and evaluate the velocity there."""
        return data._replace(data=self._rows(run, rows))

    def latents(self, run: Run, places: Sequence[int], rows: Sequence[int]) -> Tensor:
        """Return the latents of a real image of each prompt [N, *], on the host.

        places [N]: the prompts' in the iteration; rows: the training prompt of each place of the
        iteration. Of several images chance takes one, by the run's seed, iteration and place.
        Raises DataError naming the file.
        """
        taken = [self._draw(run, place, rows[place]) for place in places]
        self._encode(run, taken)
        return torch.stack([self._kept[path] for path in taken])

    def prepare(self, run: Run, places: Sequence[int], rows: Sequence[int]) -> None:
        """Encode the images of an iteration ahead of its network calls, and let go of those that
        were used longest ago, but of none that this iteration uses. As `latents`."""
        if not places:
            return
        used = dict.fromkeys(self._draw(run, place, rows[place]) for place in places)
        self._encode(run, used)
        for path in used:
            self._kept[path] = self._kept.pop(path)
        most = max(len(used), KEPT // max(1, self._kept[path].nbytes))
        for path in [*self._kept][: max(0, len(self._kept) - most)]:
            del self._kept[path]

    def _draw(self, run: Run, place: int, row: int) -> Path:
        paths = self._paths[row]
        if len(paths) == 1:
            return paths[0]
        stream = generator(run.config.seed, IMAGE, run.iteration, place)
        return paths[int(torch.randint(len(paths), (), generator=stream))]

    @torch.no_grad()
    def _encode(self, run: Run, wanted: Iterable[Path]) -> None:
        """Read those images whose latents are not kept yet, a few at a time, and keep them."""
        paths = [path for path in dict.fromkeys(wanted) if path not in self._kept]
        some = run.config.train.rollout_batch
        for first in range(0, len(paths), some):
            part = paths[first : first + some]
            levels = torch.stack([read_fitted(path, *self.size) for path in part])
            model: Any = run.model  # `check_model` has seen that it encodes images
            made = model.latents(from_bytes(levels)).cpu()
            # copies: a row of a batch would keep all of it
            self._kept |= {path: row.clone() for path, row in zip(part, made, strict=True)}

    def _rows(self, run: Run, rows: CallRows) -> RealRows:
        """Return the velocity at noised real images. Rows that share a state share the image's row
        in the network, too. Raises DataError naming a file that cannot be read any more."""
        batch, rollout = rows.batch, rows.local.rollout
        # of each row: the clean image, its noise, its noise level
        host = on_host(batch.node)
        places, place = torch.unique(on_host(rollout.tree.group)[host], return_inverse=True)
        clean = self.latents(run, places.tolist(), rows.local.rows).to(batch.x.device)
        x0 = wide(clean)[place.to(clean.device)]
        fresh = fresh_of(run.config)
        sigma = batch.sigma
        if fresh == "none":
            eps = initial_noise(rollout, batch.node)
        else:
            eps, levels = _drawn(run, rollout, host, tuple(x0.shape[1:]))
            eps = eps.to(x0, non_blocking=True)
            if fresh == "all":
                sigma = levels.to(sigma, non_blocking=True)
        x, target = interpolate(x0, eps, sigma), eps - x0
        # one network row for each state
        first = state = torch.arange(len(x), device=x.device)
        if run.method.likelihood.trains == "draws":
            first, state = batch.rows or state_rows(batch.parent)
        cond = {name: value[first] for name, value in batch.cond.items()}
        # data shows what follows the prompt, not what guidance makes of it
        plain = teacher_guidance(run.model, 1.0) if is_guided(run.config) else nullcontext()
        with plain:
            v = run.model.velocity(x[first], sigma[first], cond)
        return RealRows(v[state], target, sigma)


def _drawn(
    run: Run, rollout: Rollout, nodes: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Draw noise [B, *] and a noise level [B] for the image of each row, whose nodes [B] are on the
    host; rows of one state have the same."""
    tree, likelihood = rollout.tree, run.method.likelihood
    if likelihood.trains == "draws":
        state = on_host(tree.parent)[nodes]
        if rollout.twin is not None:
            state = on_host(rollout.twin)[state]
        nodes, row = torch.unique(state, return_inverse=True)
        each = 1
    else:  # several rows of one image, one after the other
        row, each = torch.arange(len(nodes)), run.method.rows
        nodes = nodes[::each]
    noises, levels = [], []
    mean, std = LEVELS
    for stream in NodeStreams(tree.group, run.config.seed, "data", run.iteration).of(nodes):
        levels.append(torch.sigmoid(mean + std * torch.randn(each, generator=stream)))
        noises.append(torch.randn(each, *shape, generator=stream))
    return torch.cat(noises)[row], torch.cat(levels)[row]


def _paths(prompts: PromptSet, row: int) -> list[Path]:
    """Return the files that a record names. Raises DataError, with file and line, for none."""
    value = prompts.records[row].get(IMAGE)
    names = [value] if isinstance(value, str) else value
    good = isinstance(names, list) and all(isinstance(name, str) and name for name in names)
    if not good or not names:
        raise DataError(
            f"{place_of(prompts, row)}: expected the file of a real image of the prompt, or a list "
            f"of them, as {IMAGE!r}, which the config trains on, got {value!r}"
        )
    return [Path(prompts.path).parent / name for name in names]
