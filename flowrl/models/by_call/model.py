"""A FlowModel over any flow-matching pipeline of diffusers: the pipeline's own ``__call__`` is the
adapter.

It runs without its no-grad decorator, with a `probe` in its scheduler's place and remembered texts
in its encoder's, so packing, positions, time, guidance and what follows guidance are the
pipeline's. x is what the scheduler's ``step`` sees.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowrl.core.devices import on_host
from flowrl.core.errors import ConfigError, DataError, ModelError
from flowrl.core.types import Cond, Source
from flowrl.models.adapter import PipelineModel
from flowrl.models.by_call.layout import Layout, drawn, handed, learn_layout
from flowrl.models.by_call.options import PipelineCallOptions, frames_name, rewriters
from flowrl.models.by_call.probe import Noted, Stop, Stubs, probe, row_times, stopped_at
from flowrl.models.by_call.texts import READERS, RememberedTexts, Unequal
from flowrl.models.prompt_encoding import stacked, to_pil
from flowrl.models.runtime import quiet
from flowrl.models.tuned_pipeline import TunedPipeline

TEXT = "text"  # the name of the conditioning: a number for each prompt
KEPT_GRIDS = 16
STEPS = 4  # of a run that only learns about the pipeline
PROMPTS = ("a red cube", "two green spheres on a wooden table, seen from above")


class Grid(NamedTuple):
    """The noise levels of a run, with what the pipeline calls them."""

    sigmas: list[float]  # [S+1], 1 to 0
    times: Tensor  # [S], on the CPU, in the pipeline's dtype
    own: Tensor  # [S+1], the scheduler's own levels: those of an inverted one run up
    layout: Layout


class Asked(NamedTuple):
    """A prompt, and what it starts from."""

    prompt: str
    source: Source = ()


class PipelineCall(PipelineModel[PipelineCallOptions]):
    """A FlowModel around any pipeline that takes ``latents`` and calls ``scheduler.step``.

    Conditioning is ``text`` [G], a number for each prompt; the embeddings wait in a table. By
    default a call of the pipeline has one prompt and one noise level; `rows` says what the fence
    has found equal to that.
    """

    def __init__(
        self, tuned: TunedPipeline, options: PipelineCallOptions, judge: Callable[..., Any]
    ) -> None:
        """``judge`` is what `pass_fence` asks: `flowrl.models.by_call.fence.fence`."""
        super().__init__(tuned, options)
        self.judge = judge
        pipeline = tuned.pipeline
        self.name = type(pipeline).__name__
        self.scheduler = pipeline.scheduler
        kind: Any = type(pipeline)
        self._call = kind.__call__.__wrapped__  # without torch.no_grad
        self.takes = inspect.signature(self._call).parameters
        self.inverted = bool(self.scheduler.config.get("invert_sigmas", False))
        # what may share a call: "one" row, rows of one "prompt", of several "prompts", of "sigmas"
        self.rows = "one"
        self.indexed = False  # conditions depend on the number of the step, not on its time alone
        self.fences: list[Any] = []  # what was compared, in this order
        self.passes_empty = True  # decodes by a call without steps
        self.raw_images = False  # its tensors of images are in [-1, 1]
        self.networks: dict[str, nn.Module] = {"": self.network}
        self._asked: dict[int, Asked] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._grids: dict[tuple[int, int, int], Grid] = {}
        self._stubs = Stubs()
        # what reads prompts, by the name that the pipeline calls it by
        self._readers: dict[str, RememberedTexts] = {}
        for name in READERS:
            if hasattr(pipeline, name):
                self._readers[name] = RememberedTexts(
                    functools.partial(self._read, name),
                    inspect.signature(getattr(pipeline, name)),
                    tuned.texts,
                    name=name,
                    reads_on=self.text_device,
                )

    # ------------------------------------------------------------------------------ the contract

    @property
    def frames(self) -> int:
        """Return how many frames a video has; 1: the model makes images."""
        return self.options.frames

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        """Return the shape of one sample as the scheduler sees it. Raise ModelError for a size that
        the pipeline cannot make."""
        return self.layout(height, width).inner

    def sigmas(self, steps: int, height: int, width: int) -> Tensor:
        """Return the pipeline's own noise levels [S+1], float32 on the model's device. A run of
        these steps and size is compared with the pipeline's own at the first time. Raise ModelError
        for what does not hold."""
        grid = self.grid(steps, height, width)
        if not any(self._is_of(one, steps, (height, width)) for one in self.fences):
            self.pass_fence(steps, height, width, training=False)
            grid = self.grid(steps, height, width)
        return torch.tensor(grid.sigmas, device=self.device)

    def pass_fence(self, steps: int, height: int, width: int, *, training: bool = True) -> Any:
        """Compare the model with its pipeline for a run -> the `Fence` that it has passed. Raise
        ModelError for what does not hold."""
        found = self.judge(self, steps, height, width, training=training)
        self.fences.append(found)
        return found

    def fence_record(self) -> list[dict[str, Any]]:
        """Return all that was compared so far, as plain data."""
        return [one.to_dict() for one in self.fences]

    def encode(self, prompts: list[str]) -> Cond:
        """Return ``text`` [G]: the numbers of prompts, which are encoded now if they were not."""
        return self._encoded(list(map(Asked, prompts)))

    def encode_ahead(self, prompts: Sequence[str]) -> None:
        """Encode prompts that will be wanted."""
        self._encoded(list(map(Asked, prompts)))

    def velocity(self, x: Tensor, sigma: Tensor, cond: Cond) -> Tensor:
        """Return the guided velocity, float32 [B, *], of x [B, *] at sigma [B]: the pipeline's own.
        Raise ModelError for a size that nobody asked about."""
        numbers = on_host(cond[TEXT]).tolist()
        levels = on_host(sigma).float().tolist()
        groups = self._groups(numbers, levels)
        found: list[Tensor] = []
        for rows in groups:
            asked = [self._asked[numbers[row]] for row in rows]
            part = x
            if len(rows) < len(x):
                part = x[rows]
            found.append(self._ask(part, [levels[row] for row in rows], asked))
        if len(found) == 1:
            return found[0]
        order = torch.tensor(list(chain.from_iterable(groups))).argsort()
        return torch.cat(found)[order.to(found[0].device)]

    def decode(self, x0: Tensor) -> Tensor:
        """Return images [B,3,H,W], or videos [B,T,3,H,W], float32 in [0,1], of x0 [B, *]:
        ``decode_batch`` at a time. Raise ModelError where they have another size than asked for."""
        layout = self._layout_of(x0)
        inner = self.inner_of(x0, [self.final_level()] * len(x0))
        # what takes one row a call, as many that edit do
        count = 1 if self.rows == "one" else self.options.decode_batch
        with self._helping("vae", "movq"):
            parts = [self._decoded(part, layout) for part in inner.split(count)]
        images = torch.cat(parts)
        if self.raw_images:
            images = in_unit(images)
        images = flat(images)
        if tuple(images.shape[-2:]) != (layout.height, layout.width):
            raise ModelError(
                f"{self.name}: expected images of {layout.height} x {layout.width} pixels, makes "
                f"{images.shape[-2]} x {images.shape[-1]}; set image.height and image.width to "
                "sizes that it does not round"
            )
        if images.dim() == 5 and images.shape[1] != self.frames:
            raise ModelError(
                f"{self.name}: expected videos of {self.frames} frames, it makes "
                f"{images.shape[1]}; set model.frames to what it makes"
            )
        if images.dim() == 5 and self.frames == 1:
            return images[:, 0]
        return images

    def latents(self, images: Tensor) -> Tensor:
        """Raise ModelError: a pipeline says how latents become images, not the other way."""
        raise ModelError(
            f"{self.name}: a pipeline without adapter does not say how images become latents; "
            "methods that train on stored or real images need an adapter"
        )

    def _embed(self, prompt: str) -> dict[str, Tensor]:
        raise NotImplementedError  # `encode` does not ask

    def _decode(self, x0: Tensor) -> Tensor:
        raise NotImplementedError  # `decode` does not ask

    # ---------------------------------------------------------------------- what the fence looks at

    def grid(self, steps: int, height: int, width: int) -> Grid:
        """Return the pipeline's levels and times for a run. Raise ConfigError, ModelError."""
        if steps < 1:
            raise ConfigError(f"steps: expected at least 1, got {steps}")
        key = (steps, height, width)
        found = self._grids.pop(key, None)
        if found is None:
            found = self._learned_grid(*key)
        self._grids[key] = found  # the last asked about is the last in order
        while len(self._grids) > KEPT_GRIDS:
            del self._grids[next(iter(self._grids))]
        return found

    def twin(self) -> Any:
        """Return a shallow copy of the pipeline, on the device, whose state is its own."""
        return self._twin(self.device)

    def arguments(self, asked: Sequence[Asked], layout: Layout, steps: int) -> dict[str, Any]:
        """Return what the pipeline is called with for prompts, besides latents."""
        prompts = [self.options.worded(one.prompt) for one in asked]
        given: dict[str, Any] = {
            "prompt": prompts,
            "height": layout.height,
            "width": layout.width,
            "num_inference_steps": steps,
            "output_type": "pt",
            "return_dict": False,
            # what else is drawn, such as the latents of a source, is the same in each call
            "generator": torch.Generator().manual_seed(0),
        }
        if self.options.negative_prompt is not None and "negative_prompt" in self.takes:
            given["negative_prompt"] = [self.options.negative_prompt] * len(prompts)
        given[frames_name(self.takes)] = self.frames
        given |= rewriters(self.takes)
        given |= self.options.arguments
        if asked[0].source:
            given |= self._shown(asked[0].source)
        unset = () if layout.height else ("height", "width")
        known = self.takes.keys() - unset
        return {name: value for name, value in given.items() if name in known}

    @staticmethod
    def _is_of(fence: Any, steps: int, size: tuple[int, int]) -> bool:
        return (fence.steps, fence.size) == (steps, size)

    def asked(self, prompt: str, layout: Layout) -> Asked:
        """Return a prompt with what it needs to start from: grey images."""
        return Asked(prompt, self._blank(layout))

    @contextmanager
    def reading(self, twin: Any) -> Iterator[None]:
        """Let a twin read prompts by its own encoders, or from memory where texts are cached."""
        if self._tuned.tuning.runtime.cache is not None:
            self._remember(twin)
        with self._arithmetic(), self._tuned.whole_at_work(), self._own_stream(self.device):
            yield

    # --------------------------------------------------------------------------------- the work

    def _read(self, name: str, **given: Any) -> Any:
        """Read prompts by the pipeline's own encoders, which are loaded by now."""
        with self._own_stream(self.text_device):
            return getattr(self._twin(self.text_device), name)(**given)

    def _own_stream(self, device: torch.device) -> AbstractContextManager[None]:
        """Leave the global stream as it is where a language model writes tokens, drawn from it."""
        writes = any(name.startswith("generate") for name in self._readers)
        return torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=writes)

    def _remember(self, twin: Any) -> None:
        """Let a twin read prompts from memory."""
        for name, reader in self._readers.items():
            reader.device = self.device
            vars(twin)[name] = reader

    def _helping(self, *names: str) -> AbstractContextManager[None]:
        """Hold parts on the device, of those that the pipeline has."""
        return self._tuned.at_work(*filter(self._has, names))

    def _helpers(self) -> list[str]:
        """Return the parts that work in a step beside what is trained: other networks, connectors
        of texts, and what encodes sources."""
        trained = {self.network, *self.network.children()}
        found = [name for name, part in self.networks.items() if name and part not in trained]
        for name in self._pipeline.components:
            encodes = name == "vae" or name.endswith("encoder") or "siglip" in name
            reads = name.startswith(("text_encoder", "vision_language"))
            if name.startswith("connectors") or (self.options.sources and encodes and not reads):
                found.append(name)
        return found

    def _has(self, name: str) -> bool:
        return isinstance(getattr(self._pipeline, name, None), nn.Module)

    def _shown(self, source: Source) -> dict[str, Any]:
        images = to_pil(source)
        return {"image": images[0] if len(images) == 1 else images}

    def _twin(self, device: torch.device) -> Any:
        made = copy.copy(self._pipeline)
        # diffusers looks through all modules for its device; and the user's class stays as it is
        made.__class__ = _fixed(type(self._pipeline), device)
        vars(made)["_progress_bar_config"] = {"disable": True}
        for name, part in vars(made).items():
            if "Guid" in type(part).__name__:
                vars(made)[name] = copy.deepcopy(part)  # guiders keep a state
        return made

    def _run(self, scheduler: Any, given: dict[str, Any]) -> Any:
        """Call the pipeline with a scheduler in the place of its own."""
        twin = self.twin()
        vars(twin)["scheduler"] = scheduler
        self._remember(twin)
        with self._arithmetic(), self._helping(*self._helpers()):
            return self._call(twin, **given)

    def _from(self, x: Tensor, scheduler: Any, given: dict[str, Any], layout: Layout) -> Any:
        """Call the pipeline from x [B, *inner]."""
        with handed(self._pipeline, layout, x) as entry:
            return self._run(scheduler, given | entry)

    @contextmanager
    def _arithmetic(self) -> Iterator[None]:
        on, dtype = self._tuned.autocast, self.dtype
        with torch.autocast(self.device.type, dtype if on else None, enabled=on), quiet():
            yield

    def _groups(self, numbers: list[int], levels: list[float]) -> list[list[int]]:
        """Return which rows share a call of the pipeline."""
        keys: list[Any] = []
        for row, (number, level) in enumerate(zip(numbers, levels, strict=True)):
            alone = self.rows == "one" or bool(self._asked[number].source)
            prompt = number if self.rows == "prompt" else 0
            time = 0 if self.rows == "sigmas" and not self.indexed else level
            if alone:
                keys.append(row)
            else:
                keys.append((prompt, time))
        groups: dict[Any, list[int]] = {}
        for row, key in enumerate(keys):
            groups.setdefault(key, []).append(row)
        return [*groups.values()]

    def _ask(self, x: Tensor, levels: list[float], asked: Sequence[Asked]) -> Tensor:
        """Return the velocity of rows that share a call, and of each prompt's by itself where their
        embeddings have other lengths."""
        try:
            return self._noted(x, levels, asked)
        except Unequal:
            parts: list[Tensor] = []
            order: list[int] = []
            for prompt in dict.fromkeys(asked):
                rows = [row for row, one in enumerate(asked) if one == prompt]
                order += rows
                own = [levels[row] for row in rows]
                parts.append(self._noted(x[rows], own, [prompt] * len(rows)))
            return torch.cat(parts)[torch.tensor(order).argsort().to(x.device)]

    def _noted(self, x: Tensor, levels: list[float], asked: Sequence[Asked]) -> Tensor:
        noted = self.step_at(self.inner_of(x, levels), levels, asked)
        return self.velocity_of(noted.out, x, levels)

    def inner_of(self, x: Tensor, levels: list[float]) -> Tensor:
        """Return x [B, *] at levels [B] as the scheduler sees it: the same."""
        return x

    def flow_of(self, inner: Tensor, level: float) -> Tensor:
        """Return what the scheduler sees as x: the same, float32."""
        return inner.float()

    def velocity_of(self, out: Tensor, x: Tensor, levels: list[float]) -> Tensor:
        """Return the velocity of what the pipeline hands to its scheduler at x [B, *], float32."""
        if self.inverted:
            out = -out
        return out.float()

    def first_end(self, grid: Grid) -> float:
        """Return the level at which the scheduler's own first step ends."""
        return grid.sigmas[1]

    def final_level(self) -> float:
        """Return where the last step ends."""
        return 0.0

    def step_at(self, x: Tensor, levels: list[float], asked: Sequence[Asked]) -> Noted:
        """Return what the pipeline hands to its scheduler for x [B, *] at levels [B]."""
        layout = self._layout_of(x)
        grid, place = self._place(levels[0], layout)
        if self.indexed and grid is not None:
            times, own = grid.times.to(self.device), grid.own.to(self.device)
            scheduler, steps = probe(self.scheduler, times, own, skip=place), len(times)
        else:
            times = torch.cat([self._time(level, layout) for level in levels]).to(self.device)
            own = torch.tensor([self._own(levels[0]), self._own(0.0)], device=self.device)
            times = times[:1] if len(set(levels)) == 1 else row_times(times)
            scheduler, place, steps = probe(self.scheduler, times, own), 0, STEPS
            if grid is not None:
                steps = len(grid.times)
        given = self.arguments(asked, layout, steps)
        wanted = torch.is_grad_enabled()
        # one graph of a compiled network for calls with and without a gradient
        always = self._tuned.tuning.runtime.compile and self._tuned.tuning.tune != "none"
        try:
            with torch.set_grad_enabled(wanted or always):
                self._before(place, x, scheduler, given, layout)
        except Stop:
            noted: Noted = scheduler.got[-1]
            if not wanted:
                noted = noted._replace(out=noted.out.detach())
            return noted
        raise ModelError(f"{self.name}: the call ended before its scheduler took a step")

    def _before(self, place: int, x: Tensor, scheduler: Any, *call: Any) -> None:
        """Call the pipeline up to step ``place``; the network is passed over before."""
        if not place:
            self._from(x, scheduler, *call)
            return
        with self._stubs.passing(self.networks) as real_again:
            scheduler.at_step = lambda taken: real_again() if taken == place else None
            self._from(x, scheduler, *call)

    def _own(self, level: float) -> float:
        return 1.0 - level if self.inverted else level

    def _place(self, level: float, layout: Layout) -> tuple[Grid | None, int]:
        """Return the run that a level is of, the last that was asked about, and its step."""
        latest = None
        for grid in reversed(self._grids.values()):
            if grid.layout is layout:
                latest = latest or grid
                if level in grid.sigmas[:-1]:
                    return grid, grid.sigmas.index(level)
        if latest is None:
            return None, 0
        above = sum(one >= level for one in latest.sigmas[:-1])
        return latest, max(0, above - 1)

    def _time(self, level: float, layout: Layout) -> Tensor:
        """Return what the pipeline calls a level [1]: of its own grid as it is there, between
        those a thousand times the level."""
        grid, place = self._place(level, layout)
        if grid is not None and grid.sigmas[place] == level:
            return grid.times[place : place + 1]
        kind = torch.float32 if grid is None else grid.times.dtype
        scale = self.scheduler.config.get("num_train_timesteps", 1000)
        return (torch.tensor([self._own(level)]) * scale).to(kind)

    def shown(self, x0: Tensor) -> Tensor:
        """Return the pipeline's images of x0 [1, *] as it makes them for people, in [0, 1]."""
        with self._helping("vae", "movq"):
            found = self._decoded(x0, self._layout_of(x0), output_type="np")
        return found.movedim(-1, -3)

    def _decoded(self, x0: Tensor, layout: Layout, **other: Any) -> Tensor:
        asked = [Asked(PROMPTS[0], self._blank(layout))] * len(x0)
        nothing = torch.zeros(0, device=self.device)
        if self.passes_empty:
            scheduler = probe(self.scheduler, nothing, nothing)
            given = self.arguments(asked, layout, STEPS) | other
            try:
                return _pixels(self._from(x0, scheduler, given, layout))
            except Exception:  # of a pipeline that needs a step
                self.passes_empty = False
        # one step whose result is x0, whatever the network says
        one = self._time(1.0, layout).to(self.device)
        own = torch.tensor([self._own(1.0), self._own(0.0)], device=self.device)
        scheduler = probe(self.scheduler, one, own, end=x0.to(layout.dtype))
        given = self.arguments(asked, layout, STEPS) | other
        with self._stubs.passing(self.networks):
            return _pixels(self._from(x0, scheduler, given, layout))

    def _blank(self, layout: Layout) -> Source:
        """Return grey images, where the pipeline starts from some."""
        if not self.options.sources:
            return ()
        size = (layout.height or 64, layout.width or 64)
        return (torch.full((3, *size), 0.5),)

    def _encoded(self, asked: Sequence[Asked]) -> Cond:
        numbers = []
        for one in asked:
            number = _number(one)
            if number not in self._asked:
                self._asked[number] = one
                self.warm(one)
            numbers.append(number)
        return {TEXT: torch.tensor(numbers, device=self.device)}

    def warm(self, asked: Asked) -> None:
        """Have a prompt encoded, by a call that ends where the network is asked."""
        sizeless = Layout((), (), torch.float32, 0, 0)  # the pipeline's own size
        layout = next(iter(self._layouts.values()), sizeless)
        time = torch.tensor([self._own(1.0) * 1000], device=self.device)
        scheduler = probe(self.scheduler, time, torch.tensor([1.0, 0.0], device=self.device))
        given = self.arguments([asked], layout, STEPS)
        self._until_asked(scheduler, given)

    def _until_asked(self, scheduler: Any, given: dict[str, Any]) -> None:
        """Call the pipeline up to the network."""
        try:
            with torch.no_grad(), stopped_at([*self.networks.values()]):
                self._run(scheduler, given)
        except Stop:
            return
        raise ModelError(f"{self.name}: the call ended without asking the network")

    # ---------------------------------------------------------------------- learning the pipeline

    def _layout_of(self, x: Tensor) -> Layout:
        for layout in reversed(self._layouts.values()):
            if layout.inner == tuple(x.shape[1:]):
                return layout
        raise ModelError(
            f"{self.name}: latents {list(x.shape[1:])} are of no size that was asked about; ask "
            "latent_shape(height, width) first"
        )

    def layout(self, height: int, width: int) -> Layout:
        """Return how latents of a size are handed in. Raise ModelError."""
        key = (height, width)
        if key not in self._layouts:
            learned = self._learned_layout(height, width)
            for other, known in self._layouts.items():
                if known.inner == learned.inner:
                    raise ModelError(
                        f"{self.name}: images of {height} x {width} pixels have the latents of "
                        f"{other[0]} x {other[1]}: the pipeline rounds one of them, or packs both "
                        "into as many tokens; take one size that it makes"
                    )
            self._layouts[key] = learned
        return self._layouts[key]

    def _learned_layout(self, height: int, width: int) -> Layout:
        """Run the pipeline up to its first step, and see what it does with latents."""
        blank = Layout((), (), torch.float32, height, width)
        asked = [Asked(PROMPTS[0], self._blank(blank))]
        # the generator goes on from call to call, so latents that are ignored are drawn anew
        given = self.arguments(asked, blank, STEPS)
        scheduler = _first_step(self.scheduler)
        with torch.no_grad(), drawn(self._pipeline) as draws, self._stubs.passing(self.networks):
            self._stopped(scheduler, given, (height, width))
        sample = scheduler.got[0].x

        def seen(layout: Layout, entry: Tensor) -> Tensor:
            again = _first_step(self.scheduler)
            plain = layout._replace(order=None)
            with (
                torch.no_grad(),
                self._stubs.passing(self.networks),
                handed(self._pipeline, plain, entry.clone()) as way,
            ):
                self._stopped(again, given | way, (height, width))
            found: Tensor = again.got[0].x
            return found

        return learn_layout(self.name, sample, draws, seen, height=height, width=width)

    def _stopped(self, scheduler: Any, given: dict[str, Any], size: tuple[int, int]) -> None:
        try:
            self._run(scheduler, given)
        except Stop:
            return
        except (ConfigError, ModelError):
            raise
        except Exception as error:  # pipelines raise every kind
            raise ModelError(
                f"{self.name}: its __call__ fails at {size[0]} x {size[1]} pixels: "
                f"{type(error).__name__}: {error}"
            ) from error
        raise ModelError(f"{self.name}: the call ended before its scheduler took a step")

    def _learned_grid(self, steps: int, height: int, width: int) -> Grid:
        layout = self.layout(height, width)
        asked = [Asked(PROMPTS[0], self._blank(layout))]
        scheduler = copy.deepcopy(self.scheduler)
        self._until_asked(scheduler, self.arguments(asked, layout, steps))
        own = scheduler.sigmas.detach().cpu().float()
        times = scheduler.timesteps.detach().cpu()
        if len(own) != steps + 1 or len(times) != steps:
            raise ModelError(
                f"{self.name}: asked for {steps} steps, its scheduler has {len(times)} times and "
                f"{len(own)} levels; solvers that ask twice a step are not served"
            )
        levels = 1 - own if self.inverted else own
        if not bool((levels.diff() < 0).all()):
            raise ModelError(
                f"{self.name}: its scheduler's levels of {steps} steps do not fall: "
                f"{levels.tolist()}"
            )
        return Grid(levels.tolist(), times, own, layout)


class EditingPipelineCall(PipelineCall):
    """The same of a pipeline that starts from images; each row has a call of its own."""

    @property
    def most_sources(self) -> int:
        """Return how many images a prompt may start from."""
        return self.options.sources

    def encode(self, prompts: list[str]) -> Cond:
        """Raise DataError: an edit starts from an image."""
        raise DataError(
            f"encode: {self.name} starts from images, but no prompt has a source; name one in each "
            "record"
        )

    def encode_ahead(self, prompts: Sequence[str]) -> None:
        """Do nothing: what a prompt becomes depends on its source."""

    def encode_with_sources(self, prompts: list[str], sources: Sequence[Source]) -> Cond:
        """Return ``text`` [G]: the numbers of prompts with the images that they start from. Raise
        DataError for another number of these."""
        stacked(prompts, sources, self.most_sources)
        pairs = zip(prompts, sources, strict=True)
        return self._encoded([Asked(prompt, source) for prompt, source in pairs])


def _first_step(real: Any) -> Any:
    """Return a scheduler that sets its own times, and ends the call at the first step."""
    made = probe(copy.deepcopy(real), torch.zeros(0), torch.zeros(0))
    kind = type(made)
    own: Callable[..., None] = type(real).set_timesteps
    made.__class__ = type(
        kind.__name__,
        (kind,),
        {
            "set_timesteps": own,
            "init_noise_sigma": getattr(real, "init_noise_sigma", 1.0),
            "order": real.order,
        },
    )
    return made


def in_unit(images: Tensor) -> Tensor:
    """Return images of [-1, 1] in [0, 1]."""
    return (images / 2 + 0.5).clamp(0, 1)


def flat(images: Tensor) -> Tensor:
    """Return images [..., 3, H, W] of images with an alpha, as of Qwen-Image-2.1: on white."""
    if images.shape[-3] != 4:
        return images
    colour, alpha = images.split((3, 1), -3)
    return 1 - alpha * (1 - colour)


def _pixels(found: Any) -> Tensor:
    """Return the images of what a pipeline returned, float32."""
    if isinstance(found, tuple):
        found = found[0]
    return torch.as_tensor(found).float()


def _number(asked: Asked) -> int:
    """Return the number of a prompt: the same in every process and every run."""
    digest = hashlib.blake2b(asked.prompt.encode(), digest_size=7)
    for image in asked.source:
        digest.update(image.detach().cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest())


_KINDS: dict[tuple[type[Any], torch.device], type[Any]] = {}


def _fixed(kind: type[Any], device: torch.device) -> type[Any]:
    """Return a subclass of a pipeline's class that knows its device."""
    key = (kind, device)
    if key not in _KINDS:
        own = {"_execution_device": device, "device": device}
        _KINDS[key] = type(kind.__name__, (kind,), own | {"__module__": kind.__module__})
    return _KINDS[key]
