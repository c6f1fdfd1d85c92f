"""A diffusers pipeline made ready for an adapter: its network tuned, its parts where they belong,
its prompts encoded once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.processes import shard, sharded
from flowrl.core.types import Cond
from flowrl.models.files.loading import Loaded, PipelinePart, fill, load_pipeline
from flowrl.models.files.lora_read import looks_like_lora
from flowrl.models.files.weights import fingerprint
from flowrl.models.prompt_encoding import Encode, TextCache, Texts, readers_of
from flowrl.models.runtime import (
    GraphSteps,
    context_size,
    quantization,
    quiet,
    set_up,
    share_context,
)
from flowrl.models.tuning import (
    Tuning,
    first_values,
    trained_parameters,
    tune_network,
    without_adapters,
)

# settings of a scheduler that say what a network predicts, and at which noise
PATH_KEYS = (
    "prediction_type",
    "num_train_timesteps",
    "beta_start",
    "beta_end",
    "beta_schedule",
    "trained_betas",
    "rescale_betas_zero_snr",
)
# settings of a VAE that say which latents a network sees
LATENT_KEYS = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")


def load_for_tuning(
    pipeline_class: Any,
    path: str,
    parts: dict[str, PipelinePart],
    tuning: Tuning,
    *,
    network: str = "transformer",
    leave_out: tuple[str, ...] = (),
    wide: tuple[str, ...] = (),
    also: tuple[str, ...] = (),
    also_from: tuple[str, ...] = (),
) -> Loaded:
    """Load a pipeline as ``tuning`` needs it; see `load_pipeline`. With a cache of texts, without
    text encoders. The parts in ``wide`` stay in float32, those in ``also`` are
    networks as ``network`` is; a folder may also be of a class in ``also_from``. Under FSDP
    networks have no weights yet. Raise ConfigError for options that were not proven with it."""
    runtime = tuning.runtime
    pipe = _GIVEN.get()
    if pipe is not None:
        return loaded_from(pipe, pipeline_class, parts, tuning, networks=(network, *also))
    # neither was tried on tensors that lie in shares on several devices
    if sharded() and (runtime.quantize != "none" or runtime.compile):
        raise ConfigError(
            "runtime: quantize and compile do not go with FSDP; take configs/accelerate/gpus.yaml"
        )
    # float32: parts that model cards want in it, and with full tuning the networks
    return load_pipeline(
        pipeline_class,
        path,
        parts,
        dtype=tuning.dtype,
        dtypes={
            **dict.fromkeys(wide, torch.float32),
            **dict.fromkeys((network, *also), tuning.network_dtype),
        },
        leave_out=leave_out,
        network=network,
        quantization=quantization(
            runtime.quantize, (network, *also), dtype=tuning.dtype, device=tuning.device
        ),
        with_encoders=runtime.cache is None,
        hollow=sharded(),
        also_from=also_from,
    )


_GIVEN: ContextVar[Any] = ContextVar("given", default=None)


@contextmanager
def given(pipe: Any) -> Iterator[None]:
    """Let adapters take a pipeline's parts, as the user has it in memory, instead of reading a
    folder."""
    token = _GIVEN.set(pipe)
    try:
        yield
    finally:
        _GIVEN.reset(token)


def loaded_from(
    pipe: Any,
    kind: Any,
    parts: Mapping[str, PipelinePart],
    tuning: Tuning,
    *,
    networks: Sequence[str],
) -> Loaded:
    """Return a pipeline of the parts of ``pipe``, which stays as it is: modules are other objects
    over the same weights, and networks whose own weights are trained have a copy. Raise ConfigError
    for options that need a folder, ModelError for a pipeline of another kind."""
    runtime = tuning.runtime
    for name, asked in (("cache", runtime.cache), ("quantize", runtime.quantize != "none")):
        if asked:
            raise ConfigError(
                f"runtime.{name}: is for a model that is read from a folder; this is in memory. "
                f"Leave {name} out, or give the path"
            )
    if sharded():
        raise ConfigError("model: under FSDP each process reads its share; give a path")
    if type(pipe).__name__ != kind.__name__:
        raise ModelError(f"expected a {kind.__name__}, got a {type(pipe).__name__}")
    for name, part in parts.items():
        there = getattr(pipe, name, None)
        if there is None:
            found, fits = "None", part.optional
        else:
            found = type(there).__name__
            fits = found in part.classes
        if not fits:
            raise ModelError(
                f"the pipeline's {name}: expected {' or '.join(part.classes)}, got {found}"
            )
    # parts of its own, over the same weights
    made = copy.copy(pipe)
    vars(made)["_internal_dict"] = copy.copy(pipe._internal_dict)
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module):
            own = name in networks and tuning.tune == "full"
            module = shared_copy(part, own=own)
            if own:
                module = module.to(tuning.network_dtype)
            vars(made)[name] = module
        elif name == "scheduler":
            vars(made)[name] = copy.deepcopy(part)
    encoders = [name for name in pipe.components if name.startswith("text_encoder")]
    there = tuple(name for name in encoders if getattr(pipe, name) is not None)
    return Loaded(made, Path(str(pipe.name_or_path or ".")), there, lambda: made)


def shared_copy(module: nn.Module, *, own: bool = False) -> nn.Module:
    """Return a copy of a module over the same numbers in memory; ``own``: over copies of them."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        data = tensor.data.clone() if own else tensor.data
        if type(tensor) is nn.Parameter:
            memo[id(tensor)] = nn.Parameter(data, requires_grad=False)
        elif type(tensor) is Tensor:
            memo[id(tensor)] = data
        else:
            memo[id(tensor)] = tensor
    return copy.deepcopy(module, memo)


class TunedPipeline:
    """A loaded pipeline with its network tuned and everything on its device."""

    def __init__(
        self,
        loaded: Loaded,
        tuning: Tuning,
        *,
        network: str = "transformer",
        t5_tokens: int | None = None,
        joined: nn.Module | None = None,
        texts: type[Texts] = Texts,
    ) -> None:
        """Tune the part ``network``, or several parts in ``joined``; T5 reads ``t5_tokens`` of a
        prompt; ``texts`` keeps what was encoded. Raise ConfigError, ModelError."""
        self.pipeline, self.tuning = loaded.pipeline, tuning
        self.autocast = tuning.autocast  # float32 master weights, arithmetic in tuning.dtype
        self._steps = GraphSteps() if tuning.runtime.cuda_graphs else None
        self.network: Any = joined
        if joined is None:
            self.network = getattr(loaded.pipeline, network)
        self._loaded = loaded

        # Freeze everything, then make trainable what is trained.
        for part in self._parts():
            part.requires_grad_(False)
        tune_network(self.network, tuning)

        # Put the parts on the device; under offload only the network is there most of the time.
        trained_parts = {self.network, *self.network.children()}
        stays = self._encoders() if tuning.runtime.text_encoders == "cpu" else []
        for part in self._parts():
            # under FSDP the network waits for its share of the weights
            waits = sharded() if part in trained_parts else tuning.runtime.offload
            if not waits and part not in stays:
                part.to(tuning.device)
        self._home: torch.device | None = None  # where the network runs, while it is away
        names = {"": network}
        if joined is not None:
            names = {f"{name}.": name for name, _ in joined.named_children()}
        self._folders = {prefix: loaded.folder / name for prefix, name in names.items()}
        self._set_up_network()
        self.identity = self._identify()  # now: the folder may be gone when a run is saved

        # Text encoders work through a memory of what they encoded.
        tokenizers = self._tokenizers()
        self.texts = texts(
            self.encoders_at_work,
            store=self._text_cache(tokenizers, t5_tokens),
            readers=readers_of([*tokenizers.values()], t5_tokens=t5_tokens),
        )

    @property
    def device(self) -> torch.device:
        """Return where the network runs."""
        return self._home or next(self.network.parameters()).device

    @property
    def text_device(self) -> torch.device:
        """Return where the text encoders work."""
        if self.tuning.runtime.text_encoders == "cpu":
            return torch.device("cpu")
        return self.device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the trained parameters by their name in the network, in module order."""
        return trained_parameters(self.network)

    def from_lora(self, path: Path, alpha: float | None) -> Iterator[tuple[str, Tensor]] | None:
        """Return the trained parameters that a LoRA file changes, as `started` yields them; None
        for what is no LoRA."""
        from flowrl.models.files.lora_start import started  # late: it loads peft

        if path.is_file():
            with safe_open(path, framework="pt") as stored:
                if not looks_like_lora(stored.keys()):
                    return None
        return started(path, self._networks(), self.trainable(), alpha)

    def _networks(self) -> dict[str, Any]:
        """Return the networks by the prefix of their parameters: "" of one alone."""
        found: dict[str, Any] = {}
        for prefix in self._folders:
            found[prefix] = self.network.get_submodule(prefix.removesuffix("."))
        return found

    def _identify(self) -> dict[str, Any]:
        """Return what the trained numbers mean something with, by dotted key, as plain JSON: LoRA's
        alpha, the networks' settings, which path of noise they predict, the scale of the latents,
        and the frozen weights."""
        found: dict[str, Any] = {}
        tuning, scheduler = self.tuning, self.pipeline.scheduler.config
        if tuning.tune == "lora":
            found["model.lora.alpha"] = tuning.lora.alpha
        for prefix, network in self._networks().items():
            for key, value in network.config.items():
                if not key.startswith(("_", "quantization")):
                    found[f"network.{prefix}{key}"] = value
        found |= {f"scheduler.{key}": scheduler[key] for key in PATH_KEYS if key in scheduler}
        vae = getattr(getattr(self.pipeline, "vae", None), "config", {})
        found |= {f"vae.{key}": vae[key] for key in LATENT_KEYS if key in vae}
        there = all(folder.is_dir() for folder in self._folders.values())
        if there and (tuning.tune == "lora" or tuning.layers is not None):
            found["base model"] = fingerprint(self._folders.values())
        return dict(json.loads(json.dumps(found, default=str)))

    def whole(self) -> Any:
        """Return the pipeline with its text encoders, which are loaded now if they were not needed
        so far."""
        missing = []
        for name in self._loaded.encoders:
            if getattr(self.pipeline, name) is None:
                missing.append(name)
        if not missing:
            return self.pipeline
        with quiet():
            source = self._loaded.read_encoders()
        parts, runtime = {}, self.tuning.runtime
        for name in missing:
            parts[name] = getattr(source, name).requires_grad_(False)
            if not runtime.offload and runtime.text_encoders == "device":
                parts[name] = parts[name].to(self.tuning.device)
        self.pipeline.register_modules(**parts)
        return self.pipeline

    def base(self) -> AbstractContextManager[None] | None:
        """Run the network without its adapters, which leave it as it was; None where something
        else is tuned, where a graph was compiled for adapters, or where shares of them are
        gathered."""
        if self.tuning.tune != "lora" or self.tuning.runtime.compile or sharded():
            return None
        return without_adapters(self.network)

    def encode(self, prompts: list[str], encode: Encode, *, negative: str | None) -> Cond:
        """Return {name: [G, ...]} on the device, and ``negative_<name>`` for a negative prompt; see
        `Texts`."""
        return self.texts.cond(prompts, encode, device=self.device, negative=negative)

    @contextmanager
    def computing_in(self, dtype: torch.dtype) -> Iterator[None]:
        """Let the arithmetic of float32 weights be in another dtype for a while."""
        kept = self.tuning, self.autocast
        self.tuning = self.tuning._replace(tune="full", dtype=dtype)
        self.autocast = self.tuning.autocast
        try:
            yield
        finally:
            self.tuning, self.autocast = kept

    def call(self, *inputs: Any, named: dict[str, Any]) -> Tensor:
        """Return what the network makes of its inputs, float32 [B, *]; its arithmetic is in the
        tuning's dtype.

        A compiled network has one graph for calls that need a gradient and one for those that do
        not, and their rounding may differ. So while it is trained it is always called as if a
        gradient were needed.
        """
        wanted, on = torch.is_grad_enabled(), self.autocast
        always = self.tuning.runtime.compile and self.tuning.tune != "none"
        with (
            torch.autocast(self.device.type, self.tuning.dtype if on else None, enabled=on),
            torch.set_grad_enabled(wanted or always),
        ):
            out = self.network(*inputs, **named, return_dict=False)[0]
        if isinstance(out, list):
            out = torch.stack(out)
        if self._steps is not None and wanted and out.requires_grad:
            out = self._steps.watched(out)
        if not wanted:
            out = out.detach()
        return out.float()

    def at_work(self, *names: str) -> AbstractContextManager[None]:
        """Hold parts of the pipeline on the device."""
        return self._on_device([getattr(self.pipeline, name) for name in names])

    def vae_at_work(self) -> AbstractContextManager[None]:
        """Hold the VAE on the device."""
        return self._on_device([self.pipeline.vae])

    @contextmanager
    def whole_at_work(self) -> Iterator[None]:
        """Hold all parts that there are on the device."""
        trained = {self.network, *self.network.children()}
        with self._on_device([part for part in self._parts() if part not in trained]):
            yield

    @contextmanager
    def encoders_at_work(self) -> Iterator[None]:
        """Hold the text encoders where they work; they are loaded if they were not needed so
        far."""
        self.whole()
        with ExitStack() as stack:
            stack.enter_context(quiet())
            if self.tuning.runtime.text_encoders == "device":
                stack.enter_context(self._network_away())
                stack.enter_context(self._on_device(self._encoders()))
            yield

    @contextmanager
    def _network_away(self) -> Iterator[None]:
        """Under offload, hold the network on the CPU, so that large text encoders have the device
        alone. Shares of FSDP stay where they are."""
        if not self.tuning.runtime.offload or sharded():
            yield
            return
        self._home = self.device
        try:
            self.network.to("cpu")
            yield
        finally:
            self.network.to(self.tuning.device)
            self._home = None

    @contextmanager
    def _on_device(self, parts: Sequence[nn.Module]) -> Iterator[None]:
        """Under offload, move parts to the device and afterwards back to the CPU, also on an
        exception."""
        if not self.tuning.runtime.offload:
            yield
            return
        try:
            for part in parts:
                part.to(self.tuning.device)
            yield
        finally:
            for part in parts:
                part.to("cpu")

    def _set_up_network(self) -> None:
        tuning, networks = self.tuning, self._networks().values()
        trains = tuning.tune != "none"
        set_up(
            self.network, tuning.runtime, dtype=tuning.dtype, device=tuning.device, trains=trains
        )
        if self._steps is not None:
            begin = self._steps.begin
            for network in networks:
                network.register_forward_pre_hook(lambda *_: begin())
        if context_size(tuning.runtime) > 1:
            for network in networks:
                share_context(network, tuning.runtime, tuning.device)
        if sharded():
            # of several networks each for itself: a call is one of them
            for network in networks:
                shard(network, network._no_split_modules or ())
            adapters = trained_parameters(self.network) if tuning.tune == "lora" else {}
            first = first_values(adapters, tuning.lora, seed=tuning.seed)
            fill(self.network, self._folders, first, device=tuning.device)

    def _parts(self) -> list[nn.Module]:
        return [part for part in self.pipeline.components.values() if isinstance(part, nn.Module)]

    def _encoders(self) -> list[nn.Module]:
        found = []
        for name in self._loaded.encoders:
            part = getattr(self.pipeline, name)
            if part is not None:
                found.append(part)
        return found

    def _tokenizers(self) -> dict[str, Any]:
        found = {}
        for name, part in self.pipeline.components.items():
            if name.startswith("tokenizer") and part is not None:
                found[name] = part
        return found

    def _text_cache(self, tokenizers: dict[str, Any], t5_tokens: int | None) -> TextCache | None:
        if self.tuning.runtime.cache is None:
            return None
        settings = {
            "pipeline": type(self.pipeline).__name__,
            "t5_tokens": t5_tokens,
            "dtype": str(self.tuning.dtype),
            "device": self.text_device.type,
        }
        parts = [self._loaded.folder / name for name in (*self._loaded.encoders, *tokenizers)]
        folder = Path(self.tuning.runtime.cache).expanduser()
        return TextCache(folder, parts=parts, settings=settings)
