"""The options of a pipeline without adapter, and what of a pipeline can be served at all: found out
from its class and the JSON files of its folder, before a weight is read."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Self

import diffusers
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from flowrl.core.errors import ConfigError, ModelError, unknown
from flowrl.models.options import CALL, NEUTRAL, STRICT, Facts, PipelineOptions
from flowrl.models.unet import COGVIDEO, SCHEDULERS

Frames = Annotated[int, Field(ge=1)]
Sources = Annotated[int, Field(ge=0, le=10)]
GUIDES = (
    "true_cfg_scale",
    "guidance_scale",
)  # arguments that scale guidance, the first that is there
# arguments that flowrl gives itself
OURS = (
    *("prompt", "height", "width", "num_inference_steps", "latents", "generator", "output_type"),
    *("return_dict", "num_images_per_prompt", "num_videos_per_prompt"),
)
FRAMES = ("num_frames", "video_length", "frames")  # what pipelines call the length of a video
# where the run's own keys say it
INSTEAD = {
    "negative_prompt": "model.negative_prompt",
    **dict.fromkeys(FRAMES, "model.frames"),
    "height": "image.height",
    "width": "image.width",
    "num_inference_steps": "plan.steps",
}
# arguments under which images are no samples of one velocity field that the run could train
POLICY = ("callback", "ip_adapter", "latents", "_embeds", "_mask", "attention_kwargs")
POLICY_NAMES = ("timesteps", "sigmas", "eta", "strength", "image", "video", "mask_image")
# arguments that have a language model write the prompt anew, in other words each time
REWRITERS = (
    "enable_prompt_rewrite",
    "use_pe",
    "enhance_prompt",
    "caption_upsample_temperature",
    "prompt_upsampling",
    "upsample_prompt",
    "use_prompt_rewrite",
    "enable_prompt_enhancement",
)
# schedulers whose step is x + (sigma' - sigma) v, if their settings say so
FLOWS = (
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "UniPCMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DEISMultistepScheduler",
    "SASolverScheduler",
    "DPMSolverSinglestepScheduler",
)
FLOW_MAP = (
    "the network is told the time of the next step, too, so its output is that of a flow map, and "
    "no velocity at a state; train the model that it was made of"
)
# an argument that only such a class has -> what it makes in place of one sample from noise
SEVERAL = {
    "layers": "makes the layers of an image, not one image",
    "chunk_partition": "makes a video in chunks, each from those before",
    "intermediate_timesteps": "draws noise anew between its steps, as consistency models do",
}
SEVERAL_TEXTS = ("list", "sequence", "tuple", "iterable")  # in the type of an argument
PLACE = "{prompt}"  # of the prompt in a template
EULER = ("FlowMatchEulerDiscreteScheduler",)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PipelineCallOptions(PipelineOptions):
    """The options of `pipeline`."""

    # arguments of the pipeline's __call__, by the names that diffusers gives them: guidance_scale,
    # max_sequence_length and so on; what is left out is as the pipeline has it
    call: dict[str, Any] | None = None
    # None: what the pipeline has by default
    negative_prompt: str | None = None
    frames: Frames = 1  # of a video pipeline
    sources: Sources = 0  # images that each prompt starts from, at most; 0: none
    # what stands around every prompt, with {prompt} in its place, such as the JSON of FIBO
    template: str | None = None
    # decode in tiles: less memory, faint seams; Allegro's decoder has no other way
    tiles: bool = False
    branches: ClassVar[tuple[str, float]] = ("call", 1.0)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return ``call``, {} where there is none."""
        return self.call or {}

    def worded(self, prompt: str) -> str:
        """Return a prompt as the pipeline reads it; in JSON its quotes are escaped."""
        if self.template is None:
            return prompt
        if self.template.lstrip().startswith("{"):
            prompt = json.dumps(prompt)[1:-1]
        return self.template.replace(PLACE, prompt)

    @property
    def cfg_scale(self) -> float:
        """Return the scale of guidance in ``call``; 1 where there is none."""
        for name in GUIDES:
            value = self.arguments.get(name)
            if isinstance(value, int | float):
                return float(value)
        return 1.0

    def guided_by(self, scale: float, *, off: bool = False) -> Self:
        """Return the same options with another scale of guidance. Raise ConfigError where ``call``
        sets none: the pipeline's own argument is not known here."""
        name = next((one for one in GUIDES if one in self.arguments), "")
        if not name:
            raise ConfigError(
                f"guidance: set the pipeline's own argument in model.call, such as {GUIDES[1]}, so "
                "that another scale can take its place"
            )
        if scale < 1 or (scale == 1 and not off):
            raise ConfigError(f"guidance: expected a scale above 1, got {scale:g}")
        return replace(self, call=self.arguments | {name: scale})

    @model_validator(mode="after")
    def _check_negative_prompt(self) -> Self:
        return self  # whether it has an effect is the pipeline's matter

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.template is not None and PLACE not in self.template:
            raise ValueError(f"template: expected a text with {PLACE} in it, got {self.template!r}")
        return self

    @model_validator(mode="after")
    def _check_call(self) -> Self:
        for name, value in self.arguments.items():
            if name in INSTEAD:
                raise ValueError(f"call.{name}: set {INSTEAD[name]}")
            if name in OURS:
                raise ValueError(f"call.{name}: flowrl gives this argument itself; leave it out")
            if name in POLICY_NAMES or any(part in name for part in POLICY):
                raise ValueError(
                    f"call.{name}: changes what is sampled beside the prompt, no run can train "
                    "it; leave it out"
                )
            if name in REWRITERS and value:
                raise ValueError(
                    f"call.{name}: a language model would write each prompt anew, in other words "
                    "in each call; rewrite the prompts of the list once, and leave it out"
                )
            if not _plain(value):
                raise ValueError(
                    f"call.{name}: expected a number, a text, true or false, or a list of these, "
                    f"got {value!r}"
                )
        return self


class CallFacts(Facts):
    """What is known of any pipeline that is asked by its own call."""

    call = CALL | {"frames": "num_frames"}
    neutral = NEUTRAL | {"negative_prompt": None, "frames": 1}

    def arguments(self, given: Mapping[str, Any], height: int, width: int) -> dict[str, Any]:
        """Return what the pipeline is called with: also what the config says of its call."""
        return super().arguments(given, height, width) | (given.get("call") or {})


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(one, int | float | str) for one in value)
    return value is None or isinstance(value, bool | int | float | str)


def frames_name(takes: Iterable[str]) -> str:
    """Return the argument that says how many frames a pipeline makes; "" of one for images."""
    return next((name for name in FRAMES if name in takes), "")


def rewriters(takes: Iterable[str]) -> dict[str, Any]:
    """Return the arguments that keep a language model from writing prompts anew."""
    return {
        name: None if name.endswith("temperature") else False for name in REWRITERS if name in takes
    }


def pipeline_class(name: Any, where: str) -> Any:
    """Return diffusers' class of that name. Raise ModelError for one that it does not have."""
    found = getattr(diffusers, str(name), None)
    if not isinstance(found, type):
        raise ModelError(
            f"{where}: {name!r} is no pipeline of diffusers {diffusers.__version__}; no code "
            "of a model is run. A newer diffusers may have it"
        )
    # a class that only says what it lacks stands in for each that cannot be had here
    lacks = [one for one in getattr(found, "_backends", ()) if find_spec(one) is None]
    if lacks:
        raise ModelError(
            f"{where}: diffusers makes a {name} only with {' and '.join(lacks)}, which is not "
            f"installed: pip install {' '.join(lacks)}"
        )
    return found


def check_class(kind: Any, where: str, options: PipelineCallOptions) -> None:
    """Raise ModelError or ConfigError for a pipeline whose class says that it cannot be asked for a
    velocity, and for arguments that its ``__call__`` does not take."""
    call = getattr(kind, "__call__", None)  # noqa: B004 - the function itself is wanted
    inner = getattr(call, "__wrapped__", None)
    if inner is None:
        raise ModelError(
            f"{where}: {kind.__name__}.__call__ is not diffusers' own under torch.no_grad, so it "
            "cannot run with a gradient; custom pipelines need an adapter"
        )
    takes = inspect.signature(inner).parameters
    reason = _no_field(kind, takes)
    if reason:
        raise ModelError(
            f"{where}: {kind.__name__} {reason}, so it cannot be asked for the velocity at a state "
            "that a prompt alone leads to; it needs an adapter"
        )
    for name in options.arguments:
        if name not in takes:
            known = [one for one in takes if one not in ("self", *OURS)]
            raise ConfigError(f"call {unknown(name, known, 'argument')}")
    if options.negative_prompt is not None and "negative_prompt" not in takes:
        raise ConfigError(f"negative_prompt: {kind.__name__} takes none; leave it out")
    if options.frames > 1 and not frames_name(takes):
        raise ConfigError(f"frames: {kind.__name__} makes images; leave it out")
    if options.sources and "image" not in takes:
        raise ConfigError(f"sources: {kind.__name__} starts from no image; leave it out")
    needed = "image" in takes and takes["image"].default is inspect.Parameter.empty
    if needed and not options.sources:
        raise ConfigError(
            f"sources: {kind.__name__} starts from an image; set how many a prompt has, and name "
            "them in the prompts' records"
        )


def _no_field(kind: Any, takes: Mapping[str, inspect.Parameter]) -> str:
    """Say why a class has no velocity field that prompts lead through; "": nothing speaks
    against it."""
    if "prompt" not in takes:
        return "reads no prompt"
    said = str(takes["prompt"].annotation).lower()
    if "str" in said and not any(word in said for word in SEVERAL_TEXTS):
        return "reads one text alone, no list of prompts"
    # classes of several stages, each a pipeline under torch.no_grad
    if getattr(kind, "_load_connected_pipes", False):
        return "runs other pipelines inside, which switch gradients off"
    parts = inspect.signature(kind.__init__).parameters
    if "controlnet" in parts or "control_image" in takes:
        return "is led by a control image"
    if "mask_image" in takes:
        return "fills a masked part of an image"
    if "strength" in takes:
        strength = takes["strength"].default
        if isinstance(strength, int | float) and strength < 1:
            return "starts from a noised image, not from noise"
    if "audio_latents" in takes:
        return "moves its sound with its video in each step, and each depends on the other"
    for name, why in SEVERAL.items():
        if name in takes:
            return why
    return "" if "latents" in takes else "takes no latents"


def check_scheduler(kind: str, settings: Mapping[str, Any], where: str) -> bool:
    """Tell whether a scheduler's network predicts noise or v, no velocity. Raise ModelError for one
    under which it predicts neither."""
    if "FlowMap" in kind:
        raise ModelError(f"{where}: {kind}: {FLOW_MAP}")
    predicts = settings.get("prediction_type", "epsilon")
    flow = settings.get("use_flow_sigmas") or predicts == "flow_prediction"
    if kind in (*SCHEDULERS, *COGVIDEO) and not flow and predicts in ("epsilon", "v_prediction"):
        return True
    if kind not in FLOWS:
        raise ModelError(
            f"{where}: {kind} is no scheduler of flow matching, nor of noise or v (it predicts "
            f"{settings.get('prediction_type', 'no velocity')}); expected one of "
            f"{', '.join(dict.fromkeys((*FLOWS, *SCHEDULERS, *COGVIDEO)))}"
        )
    if settings.get("stochastic_sampling"):
        raise ModelError(
            f"{where}: a scheduler with stochastic_sampling draws noise in its steps; set it to "
            "false in scheduler_config.json, and take the noise from the plan"
        )
    if kind not in EULER and "FlowMatch" not in kind and not flow:
        raise ModelError(
            f"{where}: {kind} predicts {settings.get('prediction_type')!r}; expected "
            "prediction_type 'flow_prediction' with use_flow_sigmas"
        )
    if "Heun" in kind or "Singlestep" in kind:
        raise ModelError(
            f"{where}: {kind} asks the network more than once a step; take "
            "FlowMatchEulerDiscreteScheduler in scheduler_config.json"
        )
    return False
