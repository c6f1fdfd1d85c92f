"""Pipelines and options that cannot be trained by a pipeline's own call: each is refused at load,
in words that say what to do, before a prompt of the run is read, and a user's pipeline stays as it
was."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from brokenpipes import broken, looped, unchanged
from diffusers.hooks import apply_layerwise_casting
from diffusers.utils import is_sentencepiece_available
from peft import LoraConfig
from pipelineruns import FEW, PLUGINS, SMALL
from tinypipelines import save, tiny_pipeline
from torch import Tensor

from flowrl.config.load import load_config
from flowrl.core.errors import ConfigError, FlowRLError, ModelError
from flowrl.models import pipeline as loading
from flowrl.models.by_call.model import PROMPTS
from flowrl.models.files import loading as weights
from flowrl.models.pipeline import from_pipeline, pipeline
from flowrl.runs.composed import composed
from flowrl.runs.train import train

SIZE = (64, 64)
LUMINA = "Lumina2Pipeline"
LCM = diffusers.LCMScheduler
HEUN = diffusers.FlowMatchHeunDiscreteScheduler
OWN = "a prompt of the run's own"


@pytest.fixture
def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a prompt is encoded."""
    monkeypatch.setattr(
        diffusers.Lumina2Pipeline, "encode_prompt", lambda *a, **k: pytest.fail("encoded")
    )


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the prompts that are encoded."""
    real, found = diffusers.Lumina2Pipeline.encode_prompt, list[str]()

    @functools.wraps(real)  # its signature is looked at
    def encode(self: Any, prompt: Any, *args: Any, **named: Any) -> Any:
        found.extend([prompt] if isinstance(prompt, str) else prompt)
        return real(self, prompt, *args, **named)

    monkeypatch.setattr(diffusers.Lumina2Pipeline, "encode_prompt", encode)
    return found


# --------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"call": {"guidance": 3.0}}, "has no argument 'guidance'.*guidance_scale"),
        ({"call": {"height": 64}}, "call.height: set image.height"),
        ({"call": {"num_inference_steps": 8}}, "call.num_inference_steps: set plan.steps"),
        ({"call": {"prompt": "a"}}, "call.prompt: flowrl gives this argument itself"),
        ({"call": {"callback_on_step_end": 1}}, "changes what is sampled beside the prompt"),
        ({"call": {"callback": 1}}, "changes what is sampled"),
        ({"call": {"ip_adapter_image": "a.png"}}, "call.ip_adapter_image: changes what is sampled"),
        ({"call": {"ip_adapter_image_embeds": [1.0]}}, "changes what is sampled"),
        ({"call": {"prompt_embeds": 1}}, "changes what is sampled"),
        ({"call": {"guidance_scale": {"a": 1}}}, "expected a number, a text"),
        ({"frames": 5}, "frames: Lumina2Pipeline makes images"),
        ({"sources": 1}, "sources: Lumina2Pipeline starts from no image"),
        ({"runtime": {"cuda_graphs": True, "compile": True}}, "runtime.cuda_graphs: not with"),
        ({"runtime": {"cache": "texts"}}, "runtime.cache: is for a model that is read"),
        ({"runtime": {"quantize": "int8"}}, "runtime.quantize: is for a model that is read"),
        ({"lora": {"targets": ["nowhere"]}}, "no linear layer is named 'nowhere'"),
    ],
)
def test_wrong_options_are_refused_before_a_prompt_is_read(
    options: dict[str, Any], said: str, reads_nothing: None
) -> None:
    pipe = tiny_pipeline(LUMINA)
    with unchanged(pipe), pytest.raises(FlowRLError, match=said):
        from_pipeline(pipe, **options)


def test_a_rewritten_prompt_is_refused() -> None:
    from flowrl.models.by_call.options import PipelineCallOptions, rewriters
    from flowrl.models.options import checked_options

    with pytest.raises(ConfigError, match="a language model would write each prompt anew"):
        checked_options(PipelineCallOptions, path="a", call={"enable_prompt_rewrite": True})
    takes = ("prompt", "enable_prompt_rewrite", "use_pe", "caption_upsample_temperature")
    off = {"enable_prompt_rewrite": False, "use_pe": False, "caption_upsample_temperature": None}
    assert rewriters(takes) == off


def test_a_class_without_a_velocity_field_is_refused(reads_nothing: None) -> None:
    for takes, said in (
        (lambda self, latents=None: None, "reads no prompt"),
        (lambda self, prompt, image, strength=0.6: None, "starts from a noised image"),
        (lambda self, prompt, control_image=None: None, "is led by a control image"),
        (lambda self, prompt, mask_image=None: None, "fills a masked part"),
        (lambda self, prompt, audio_latents=None: None, "moves its sound with its video"),
    ):
        with pytest.raises(ModelError, match=said):
            from_pipeline(broken(LUMINA, __call__=torch.no_grad()(takes)))
    staged = broken(LUMINA, _load_connected_pipes=True)
    with pytest.raises(ModelError, match="runs other pipelines inside"):
        from_pipeline(staged)


# ------------------------------------------------------------- what a pipeline in memory is


def called(call: Callable[..., Any]) -> Any:
    """Return a Lumina 2 with another call."""
    return broken(LUMINA, __call__=call)


def one_text(self: Any, prompt: str, latents: Any = None) -> None: ...


def no_latents(self: Any, prompt: str | list[str], generator: Any = None) -> None: ...


def scheduled(kind: Any, **settings: Any) -> Any:
    """Return a Lumina 2 with another scheduler."""
    pipe = tiny_pipeline(LUMINA)
    pipe.register_modules(scheduler=kind.from_config(pipe.scheduler.config, **settings))
    return pipe


def with_part(change: Callable[[Any], Any]) -> Any:
    """Return a Lumina 2 whose parts were changed."""
    pipe = tiny_pipeline(LUMINA)
    change(pipe)
    return pipe


def offloads_inside(pipe: Any) -> None:
    add_hook_to_module(pipe.vae.decoder, ModelHook())


def casts_layers(pipe: Any) -> None:
    apply_layerwise_casting(
        pipe.transformer, storage_dtype=torch.bfloat16, compute_dtype=torch.float32
    )


def has_lora(pipe: Any) -> None:
    pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name="mine")


def is_compiled(pipe: Any) -> None:
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a call of its own": (
        lambda: called(lambda self, prompt, latents=None: None),
        "custom pipelines need an adapter",
    ),
    "one text alone": (lambda: called(torch.no_grad()(one_text)), "reads one text alone"),
    "no latents": (lambda: called(torch.no_grad()(no_latents)), "takes no latents"),
    "no flow": (lambda: scheduled(LCM), "LCMScheduler is no scheduler of flow matching, nor of"),
    "two calls a step": (lambda: scheduled(HEUN), "asks the network more than once a step"),
    "noise in its steps": (
        lambda: scheduled(diffusers.FlowMatchEulerDiscreteScheduler, stochastic_sampling=True),
        "stochastic_sampling draws noise in its steps",
    ),
    "no scheduler": (
        lambda: with_part(lambda pipe: setattr(pipe, "scheduler", None)),
        "has no scheduler",
    ),
    "offload": (lambda: with_part(offloads_inside), "offloads its parts.*remove_all_hooks"),
    "a device map": (
        lambda: with_part(lambda pipe: setattr(pipe, "hf_device_map", {"vae": 0})),
        "maps them to devices.*reset_device_map",
    ),
    "a LoRA": (lambda: with_part(has_lora), "has adapters already .mine.; merge them"),
    "a compiled network": (lambda: with_part(is_compiled), "transformer is compiled.*_orig_mod"),
    "hooks of diffusers": (lambda: with_part(casts_layers), "transformer has hooks of diffusers"),
    "several devices": (
        lambda: with_part(lambda pipe: pipe.transformer.to("meta")),
        "on one device, got cpu, meta",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_pipeline_is_refused_before_a_prompt_is_read(what: str, reads_nothing: None) -> None:
    make, said = REFUSED[what]
    pipe = make()
    if what == "no scheduler":  # nothing else of it can be looked at
        with pytest.raises(ModelError, match=said):
            from_pipeline(pipe)
        return
    with unchanged(pipe), pytest.raises(ModelError, match=said):
        from_pipeline(pipe)


def test_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(ModelError, match="expected a pipeline of diffusers, got a Lumina2Transf"):
        from_pipeline(tiny_pipeline(LUMINA).transformer)


# ------------------------------------------------------------------- what the fence finds

LOOPS = {
    "steps by itself": "the call ended before its scheduler took a step",
    "between": r"step 2 of its call sees latents that differ by .* its loop changes them",
    "memory": r"velocity at step \d of 4 differs by .* depends on the steps before",
    "twice": "asked for 4 steps, its scheduler has 8 times",
    "scaled": "does not see the latents that it is given|sees latents that differ by",
    "as it was": "",
}


@pytest.mark.parametrize("change", LOOPS)
def test_a_loop_that_changed_is_found(change: str, texts: list[str]) -> None:
    """As another diffusers may have it; only the fence's own prompts are read for it."""
    pipe = broken(LUMINA, __call__=looped(change))
    with unchanged(pipe):
        model: Any = from_pipeline(pipe)
        if LOOPS[change]:
            with pytest.raises(ModelError, match=LOOPS[change]):
                model.pass_fence(4, *SIZE)
        else:
            model.pass_fence(4, *SIZE)
    assert {*texts} <= {*PROMPTS, "a tan cone"}


def config_of(folder: Path, *more: str) -> Any:
    """Return AWM on a tiny Lumina 2, with a prompt of its own."""
    listed = folder / "prompts.txt"
    listed.write_text(OWN + "\n", encoding="utf-8")
    over = ["rewards={bright: {fn: brightkit.BrightImage}}", *SMALL, *FEW]
    over += ["image={height: 64, width: 64}", "model.call={guidance_scale: 3.0}"]
    over += [f"prompts.{use}={listed}" for use in ("train", "test")]
    model = folder / "model"
    if not model.exists():
        save(LUMINA, model)
    return load_config(composed("awm", str(model)), [*over, *more], PLUGINS)


@pytest.mark.integration
def test_a_run_ends_before_its_prompts_are_read(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline that ignores latents, of a folder. And a resume under a diffusers whose loop
    changed, whose run stays as it was."""

    def prepare(self: Any, *args: Any) -> Tensor:
        return torch.randn_like(real(self, *args))

    real = diffusers.Lumina2Pipeline.prepare_latents
    with monkeypatch.context() as patched:
        patched.setattr(diffusers.Lumina2Pipeline, "prepare_latents", prepare)
        with pytest.raises(ModelError, match="does not see the latents that it is given"):
            train(config_of(tmp_path), tmp_path / "ignoring", quiet=True)
    assert texts and OWN not in texts
    # the same run of a pipeline that takes them
    run = tmp_path / "run"
    train(config_of(tmp_path), run, quiet=True)
    assert OWN in texts
    texts.clear()
    before = {file: file.read_bytes() for file in run.rglob("*.safetensors")}
    monkeypatch.setattr(diffusers.Lumina2Pipeline, "__call__", looped("memory"))
    monkeypatch.setattr(diffusers, "__version__", "99.0")
    with pytest.raises(ModelError, match="depends on the steps before"):
        train(config_of(tmp_path, "train.iterations=4"), run, quiet=True, resume=True)
    assert OWN not in texts
    assert before and before == {file: file.read_bytes() for file in run.rglob("*.safetensors")}


# ---------------------------------------------------------------------- ids and folders


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"_class_name": "MyPipeline"}, "'MyPipeline' is no pipeline of diffusers.*no code of a"),
        ({"_class_name": ["pipeline", "MyPipeline"]}, "is no pipeline of diffusers.*no code of a"),
        ({"vae": ["my_code", "MyVAE"]}, "vae comes from 'my_code'.*never code that a model"),
        ({"scheduler": ["os", "path"]}, "scheduler comes from 'os'"),
        pytest.param(
            {"_class_name": "KolorsPipeline"},
            "only with sentencepiece.*pip install sentencepiece",
            marks=pytest.mark.skipif(is_sentencepiece_available(), reason="it is here"),
        ),
    ],
)
def test_an_id_is_refused_by_its_small_files(
    entries: dict[str, Any],
    said: str,
    tmp_path: Path,
    reads_nothing: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No weight of it is fetched."""
    folder, fetched = save(LUMINA, tmp_path / "own"), list[str]()
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | entries))

    def fetch(repo: str, file: str, subfolder: str = "") -> str:
        assert repo == "somebody/own"
        fetched.append(file)
        return str(folder / subfolder / file)

    for module in (loading, weights):
        monkeypatch.setattr(module, "hf_hub_download", fetch)
    monkeypatch.setattr(
        diffusers.Lumina2Pipeline, "download", lambda *a, **k: pytest.fail("fetched weights")
    )
    with pytest.raises(ModelError, match=said):
        pipeline(path="somebody/own")
    assert {*fetched} <= {"model_index.json", "scheduler_config.json"}
    with pytest.raises(ModelError, match=said):
        pipeline(path=str(folder))
