"""What a pipeline must show before it is trained by its own call, and what is refused with which
words: real classes of diffusers, and such with one thing broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from brokenpipes import broken, unchanged
from tiny import tiny_sd3, tiny_wan22
from tinypipelines import TINY, save, tiny_pipeline
from torch import Tensor

from flowrl.core.errors import ConfigError, ModelError
from flowrl.models.by_call.fence import relative
from flowrl.models.pipeline import fn_for, from_pipeline, pipeline

SIZE = (64, 64)
LUMINA = "Lumina2Pipeline"


@pytest.fixture
def untouched() -> Iterator[Any]:
    """Check that pipelines are as before, also after an error."""
    with ExitStack() as stack:
        yield lambda pipe: stack.enter_context(unchanged(pipe))


def test_what_is_put_in_is_what_the_step_gets(untouched: Any) -> None:
    def prepare(self: Any, *args: Any) -> Tensor:
        made: Tensor = diffusers.Lumina2Pipeline.prepare_latents(self, *args)
        return 2 * made

    pipe = untouched(broken(LUMINA, prepare_latents=prepare))
    with pytest.raises(ModelError, match="does not see the latents that it is given"):
        from_pipeline(pipe).latent_shape(*SIZE)


def test_guidance_with_a_memory_is_refused_with_the_figure(untouched: Any) -> None:
    """The network's output is mixed with that of the step before."""
    pipe = untouched(tiny_pipeline(LUMINA))
    model = from_pipeline(pipe)
    network: Any = model.network  # type: ignore[attr-defined]
    real, before = network.forward, list[Tensor]()

    def forward(*args: Any, **named: Any) -> tuple[Tensor]:
        out = real(*args, **named)[0]
        mixed = out + (0.5 * before[-1] if before and before[-1].shape == out.shape else 0)
        before.append(out.detach())
        return (mixed,)

    real_prepare = type(pipe).prepare_latents

    def prepare(self: Any, *args: Any) -> Tensor:
        before.clear()  # of each call
        made: Tensor = real_prepare(self, *args)
        return made

    inner = model._pipeline  # type: ignore[attr-defined]
    inner.__class__ = type("WithMemory", (type(inner),), {"prepare_latents": prepare})
    model._call = type(inner).__call__.__wrapped__  # type: ignore[attr-defined]
    network.forward = forward
    with pytest.raises(ModelError, match=r"velocity at step \d of 4 differs by .* steps before"):
        model.pass_fence(4, *SIZE)  # type: ignore[attr-defined]


def test_a_number_of_the_step_is_given_where_it_counts(tmp_path: Path) -> None:
    """SD3's skip layers act on some steps; Lumina 2 cuts guidance off: exact with the number."""
    call = {
        "guidance_scale": 3.0,
        "skip_guidance_layers": [0],
        "skip_layer_guidance_start": 0.3,
        "skip_layer_guidance_stop": 0.6,
    }
    sd3 = pipeline(path=str(tiny_sd3(tmp_path / "sd3")), call=call)
    found = sd3.pass_fence(5, *SIZE)
    assert found.indexed and found.rows in ("prompt", "prompts")
    cut = {"guidance_scale": 3.0, "cfg_trunc_ratio": 0.5}
    lumina = from_pipeline(tiny_pipeline(LUMINA), call=cut)
    assert lumina.pass_fence(4, *SIZE).indexed  # type: ignore[attr-defined]
    plain = from_pipeline(tiny_pipeline(LUMINA), call={"guidance_scale": 3.0})
    assert not plain.pass_fence(4, *SIZE).indexed  # type: ignore[attr-defined]


def test_a_detached_network_is_refused(untouched: Any) -> None:
    pipe = untouched(tiny_pipeline(LUMINA))
    model: Any = from_pipeline(pipe)
    real = model.network.forward
    model.network.forward = lambda *a, **k: (real(*a, **k)[0].detach(),)
    with pytest.raises(ModelError, match="its velocity has no gradient"):
        model.pass_fence(4, *SIZE)


def test_a_parameter_that_counts_and_has_no_gradient_is_refused() -> None:
    """One block is detached, so nothing before it learns, while the velocity depends on it."""
    model: Any = from_pipeline(tiny_pipeline(LUMINA), tune="full")
    block = model.network.layers[0]
    real = block.forward
    block.forward = lambda *a, **k: real(*a, **k).detach()
    with pytest.raises(ModelError, match=r"no gradient reaches \d+ of \d+ trained parameters"):
        model.pass_fence(4, *SIZE)


def test_a_scheduler_that_draws_noise_is_refused(untouched: Any) -> None:
    pipe = tiny_pipeline(LUMINA)
    pipe.scheduler = diffusers.FlowMatchLCMScheduler.from_config(pipe.scheduler.config)
    untouched(pipe)
    with pytest.raises(ModelError, match="a scheduler that draws noise"):
        from_pipeline(pipe).pass_fence(4, *SIZE)  # type: ignore[attr-defined]
    stochastic = tiny_pipeline(LUMINA)
    stochastic.scheduler.register_to_config(stochastic_sampling=True)
    with pytest.raises(ModelError, match="stochastic_sampling"):
        from_pipeline(stochastic)


def test_a_flow_map_is_refused_by_name(untouched: Any) -> None:
    pipe = untouched(tiny_pipeline("AnyFlowPipeline"))
    with pytest.raises(ModelError, match="FlowMapEulerDiscreteScheduler.*flow map"):
        from_pipeline(pipe, frames=5)


def test_images_that_differ_are_refused() -> None:
    """An encoder that reads a prompt in another way each time cannot be remembered: the images of
    the pipeline's own run differ from the start."""
    model: Any = from_pipeline(tiny_pipeline(LUMINA))
    real, calls = model._decoded, []

    def decoded(x0: Tensor, layout: Any) -> Tensor:
        calls.append(1)
        found: Tensor = 1 - real(x0, layout)
        return found

    model._decoded = decoded
    with pytest.raises(ModelError, match="decoded images differ by"):
        model.pass_fence(4, *SIZE)
    assert calls


def test_two_prompts_together_are_found_unequal() -> None:
    """A network that mixes the rows of a batch gets one row a call, and the velocity is right."""
    model: Any = from_pipeline(tiny_pipeline(LUMINA))
    real = model.network.forward

    def mixing(*args: Any, **named: Any) -> tuple[Tensor]:
        out = real(*args, **named)[0]
        return (out + 0.1 * (out.mean(0, keepdim=True) if len(out) > 1 else 0),)

    model.network.forward = mixing
    assert model.pass_fence(4, *SIZE).rows == "one"
    x = torch.randn(2, *model.latent_shape(*SIZE))
    sigma = model.sigmas(4, *SIZE)[1].expand(2)
    both = model.velocity(x, sigma, model.encode(["one", "two"]))
    alone = model.velocity(x[1:], sigma[1:], model.encode(["two"]))
    assert relative(both[1:], alone) == 0.0


def test_the_fence_follows_the_steps_of_the_run() -> None:
    """`sigmas` of another length is compared before it is used, once."""
    model: Any = from_pipeline(tiny_pipeline(LUMINA))
    model.sigmas(3, *SIZE)
    model.sigmas(3, *SIZE)
    model.sigmas(5, *SIZE)
    assert [(one["steps"], one["version"]) for one in model.fence_record()] == [
        (3, diffusers.__version__),
        (5, diffusers.__version__),
    ]


# ----------------------------------------------------------------------------- sizes, paths, texts


def test_a_size_that_the_pipeline_rounds_is_refused() -> None:
    model: Any = from_pipeline(tiny_pipeline("ChromaPipeline"))
    with pytest.raises(ModelError, match="sizes that it does not round"):
        model.pass_fence(2, 72, 64)


def test_a_path_without_fn_finds_its_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = str(tiny_sd3(tmp_path / "sd3"))
    capsys.readouterr()
    assert fn_for(made) == "sd3"
    assert capsys.readouterr().err == ""
    folder = save(LUMINA, tmp_path / "lumina")
    assert fn_for(str(folder)) == "pipeline"
    assert f"is a {LUMINA}, which has no adapter" in capsys.readouterr().err
    with pytest.raises(ModelError, match="fn: pipeline"):
        from flowrl.models.sd3 import sd3

        sd3(str(folder))


@pytest.mark.parametrize("name", ["Lumina2Pipeline", "SanaPipeline", "LTXPipeline"])
def test_texts_are_kept_on_disk_and_read_again(name: str, tmp_path: Path) -> None:
    """A second model over the same folder encodes nothing, and its velocity is the same."""
    folder = save(name, tmp_path / "model")
    options = {key: value for key, value in TINY[name].options.items() if key != "adapter"}
    runtime = {"cache": str(tmp_path / "texts")}
    found = []
    for _ in range(2):
        model = pipeline(path=str(folder), runtime=runtime, **options)
        x = torch.randn(1, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
        v = model.velocity(x, torch.tensor([0.5]), model.encode(["a red cube"]))
        found.append(v.detach())
        asked = sum(reader.asked for reader in model._readers.values())
        loaded = model._pipeline.text_encoder is not None
    assert torch.equal(*found)
    assert (asked, loaded) == (0, False)


# ------------------------------------------------------------------- how a pipeline is asked


@pytest.mark.parametrize("name", ["Kandinsky5T2VPipeline", "Kandinsky3Pipeline"])
def test_velocities_are_those_of_the_state_that_is_asked_about(name: str) -> None:
    """One whose latents, where they are given, lack the channels of an image: x stands in for the
    noise that it draws. And one whose tensors of images are in [-1, 1]."""
    model: Any = from_pipeline(tiny_pipeline(name), **TINY[name].options)
    model.pass_fence(4, *SIZE)
    assert (model.layout(*SIZE).draw is not None) == (name == "Kandinsky5T2VPipeline")
    assert model.raw_images == (name == "Kandinsky3Pipeline")
    x = torch.randn(2, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    sigma = model.sigmas(4, *SIZE)[1].expand(2)
    cond = model.encode(["a red cube", "a red cube"])
    with torch.no_grad():
        first, second = model.velocity(x, sigma, cond)
        again = model.velocity(x[1:], sigma[1:], {"text": cond["text"][1:]})[0]
        images = model.decode(x[:1])
    assert relative(first, second) > 1e-2 and relative(again, second) < 1e-5
    assert float(images.min()) >= 0 and float(images.max()) <= 1


def test_what_a_language_model_writes_is_drawn_once_and_leaves_the_stream_alone() -> None:
    model: Any = from_pipeline(
        tiny_pipeline("GlmImagePipeline"), **TINY["GlmImagePipeline"].options
    )
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    x = torch.randn(1, *model.latent_shape(*SIZE), generator=torch.Generator().manual_seed(0))
    sigma = model.sigmas(4, *SIZE)[:1]
    found = [model.velocity(x, sigma, model.encode(["a red cube"])) for _ in range(2)]
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(*found)
    asked = model._readers["generate_prior_tokens"].asked
    model.velocity(x, sigma, model.encode(["a red cube"]))
    assert model._readers["generate_prior_tokens"].asked == asked > 0


def test_a_template_stands_around_every_prompt() -> None:
    from flowrl.models.by_call.options import PipelineCallOptions
    from flowrl.models.options import checked_options

    plain = checked_options(PipelineCallOptions, path="a", template="a photo of {prompt}")
    assert plain.worded("a cat") == "a photo of a cat"
    told = checked_options(PipelineCallOptions, path="a", template='{"edit": "{prompt}"}')
    assert told.worded('a "red" cat') == '{"edit": "a \\"red\\" cat"}'
    with pytest.raises(ConfigError, match="expected a text with {prompt} in it"):
        checked_options(PipelineCallOptions, path="a", template="a photo")


def test_a_decoder_of_tiles_needs_to_be_told() -> None:
    options = {key: v for key, v in TINY["AllegroPipeline"].options.items() if key != "tiles"}
    with pytest.raises(ModelError, match="Decoding without tiling"):
        from_pipeline(tiny_pipeline("AllegroPipeline"), **options).pass_fence(4, *SIZE)  # type: ignore[attr-defined]
    pipe = tiny_pipeline("AllegroPipeline")
    from_pipeline(pipe, **options, tiles=True).pass_fence(4, *SIZE)  # type: ignore[attr-defined]
    assert not pipe.vae.use_tiling  # the user's own
    with pytest.raises(ModelError, match="model.tiles: a OmniGenPipeline|does not decode in tiles"):
        pixels = {key: v for key, v in TINY["PRXPixelPipeline"].options.items()}
        from_pipeline(tiny_pipeline("PRXPixelPipeline"), **pixels, tiles=True)


@pytest.mark.parametrize("name", [LUMINA, "CogVideoXPipeline"])
def test_bfloat16_passes_the_fence(name: str, tmp_path: Path) -> None:
    """Also in a run of 40 short steps, where what rounds the latents is as large as a step."""
    folder = save(name, tmp_path / "model")
    model = pipeline(path=str(folder), dtype="bfloat16", **TINY[name].options)
    found = {check.name: check for check in model.pass_fence(40, *SIZE).checks}
    assert model.network.dtype == torch.bfloat16
    assert found["velocity"].figure <= found["velocity"].limit == 2e-2


def test_offload_keeps_experts_and_holds_what_a_step_needs(tmp_path: Path) -> None:
    """Of Wan 2.2 neither expert is put away by the fence; of an edit the VAE is on the device for a
    step, and away after it; of Ideogram 4 the network without a prompt."""

    def moves(model: Any, name: str, found: list[str]) -> None:
        part = getattr(model._pipeline, name)
        vars(part)["to"] = lambda device: found.append(f"{name} {device}")

    tiny_wan22(tmp_path / "wan22")
    options: dict[str, Any] = {"frames": 5, "call": {"guidance_scale": 3.0}}
    experts = pipeline(path=str(tmp_path / "wan22"), runtime={"offload": True}, **options)
    moved: list[str] = []
    for name in ("transformer", "transformer_2"):
        moves(experts, name, moved)
    assert experts.pass_fence(4, *SIZE).rows in ("prompt", "prompts")
    assert moved == [] and len(experts.trainable()) == 2 * len(
        [name for name in experts.trainable() if name.startswith("transformer.")]
    )
    for name, part in (
        ("BriaFiboEditPipeline", "vae"),
        ("Ideogram4Pipeline", "unconditional_transformer"),
    ):
        folder = save(name, tmp_path / name)
        model: Any = pipeline(path=str(folder), runtime={"offload": True}, **TINY[name].options)
        x, sigma = torch.randn(1, *model.latent_shape(*SIZE)), model.sigmas(4, *SIZE)[:1]
        sources = [(torch.full((3, *SIZE), 0.5),)]
        edits = TINY[name].options.get("sources")
        cond = model.encode_with_sources(["a"], sources) if edits else model.encode(["a"])
        moved.clear()
        moves(model, part, moved)
        model.velocity(x, sigma, cond)
        assert moved == [f"{part} {model.device}", f"{part} cpu"]
