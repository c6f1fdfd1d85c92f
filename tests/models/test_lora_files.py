"""Runs that begin with LoRA files of other programs: what arrives is what the file adds, or the
file is refused."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from adapterkit import Folders, adapter_of
from diffusers import DiffusionPipeline
from lorakit import LAYOUTS, added, changed, kohya_layout
from modelkit import perturb
from safetensors.torch import load_file, save_file
from torch import Tensor
from toykit import toy

from flowrl.core.errors import FlowRLError, ModelError, RunError
from flowrl.models.files.lora_read import read_lora
from flowrl.runs.export.export import TrainedPart, trained_part
from flowrl.runs.export.merge import merge_lora
from flowrl.training.start_weights import start_from
from flowrl.training.trainer import Trainer

NAMES = ["sd3.5", "flux", "sd15", "sdxl", "wan", "qwen_image", "z_image", "flux2", "flux2_klein"]
# not kohya's of SD3, which diffusers does not read, nor of FLUX, whose real sizes are in its code
READ_BY_DIFFUSERS = [(name, "diffusers") for name in NAMES]
READ_BY_DIFFUSERS += [("sd15", "kohya"), ("sdxl", "kohya"), ("wan", "kohya"), ("wan", "comfy")]
READ_BY_DIFFUSERS += [("qwen_image", "kohya"), ("z_image", "kohya")]
READ_BY_DIFFUSERS += [("flux2", "kohya"), ("flux2_klein", "kohya")]


class Case(NamedTuple):
    """A model with LoRA of scale 3, and what it adds."""

    name: str
    trained: TrainedPart
    want: dict[str, Tensor]


@pytest.fixture(scope="module")
def cases(folders: Folders) -> Callable[[str], Case]:
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            model = folders.load(name, lora={"rank": 2, "alpha": 6.0})
            perturb(model, 0.3)
            made[name] = Case(name, trained_part(model, name="mine"), added(model))
        return made[name]

    return case


def begin(model: Any, path: Path) -> None:
    start_from(str(path), model.trainable(), model=model)


def close(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys() and any(float(w.abs().max()) > 0.1 for w in want.values())
    for name, rows in want.items():
        torch.testing.assert_close(found[name], rows, rtol=1e-5, atol=1e-5)


# a layout with names of its own is written for each network, the others for two of them
OWN_NAMES = ("diffusers", "kohya", "comfy", "onetrainer")
WRITTEN = [(name, layout) for name in NAMES[:-1] for layout in OWN_NAMES]  # klein is as FLUX.2
WRITTEN += [(name, layout) for name in ("sd3.5", "sd15") for layout in {*LAYOUTS} - {*OWN_NAMES}]


@pytest.mark.parametrize(("name", "layout"), sorted(WRITTEN))
def test_what_a_file_adds_arrives(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path, name: str, layout: str
) -> None:
    """In adapters of another rank and alpha, and in weights that are trained in full: W + 3 B A,
    which peft itself computes of the model that the file was written from."""
    case = cases(name)
    path = LAYOUTS[layout](case.trained, tmp_path / "mine")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # alpha is known
        model = folders.load(name, lora={"rank": 3, "alpha": 1.5})
        begin(model, path)
        close(added(model), case.want)
        model = folders.load(name, tune="full")
        before = {key: p.detach().clone() for key, p in model.trainable().items()}
        begin(model, path)
    moved = {key: p.detach() - before[key] for key, p in model.trainable().items()}
    close({key: moved.pop(f"{key}.weight") for key in case.want}, case.want)
    assert not any(bool(rows.any()) for rows in moved.values())


@pytest.mark.parametrize(("name", "layout"), READ_BY_DIFFUSERS)
def test_diffusers_takes_the_same_from_it(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path, name: str, layout: str
) -> None:
    """`load_lora_weights` and `fuse_lora` move the real pipeline's weights by as much."""
    case = cases(name)
    path = LAYOUTS[layout](case.trained, tmp_path / "mine")
    given = {"safety_checker": None} if adapter_of(name) == "sd15" else {}
    pipeline = DiffusionPipeline.from_pretrained(folders[name], **given)
    network = getattr(pipeline, case.trained.network)
    before = {key: p.clone() for key, p in network.state_dict().items()}
    pipeline.load_lora_weights(str(path.parent), weight_name=path.name)
    pipeline.fuse_lora(lora_scale=1.0)
    pipeline.unload_lora_weights()
    now = network.state_dict()
    close({key: now[f"{key}.weight"] - before[f"{key}.weight"] for key in case.want}, case.want)


def test_one_matrix_for_layers_that_are_held_as_one(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    """Closed form: kohya trains one A [r, in] and one B [3 out, r] for q, k and v."""
    case = cases("flux")
    draw = torch.Generator().manual_seed(3)
    down, up = torch.randn(2, 32, generator=draw), torch.randn(96, 2, generator=draw)
    stem = "lora_unet_double_blocks_1_txt_attn_qkv"
    tensors = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
    file = tmp_path / "a.safetensors"
    save_file(tensors | {f"{stem}.alpha": torch.tensor(1.0)}, file)
    model = folders.load("flux", lora={"rank": 2, "alpha": 7.0})
    begin(model, file)
    found = added(model)
    for part, rows in zip(("q", "k", "v"), (0.5 * up @ down).chunk(3), strict=True):
        layer = f"transformer_blocks.1.attn.add_{part}_proj"
        torch.testing.assert_close(found.pop(layer), rows, rtol=1e-5, atol=1e-5)
    assert found.keys() < case.want.keys() and not any(bool(r.any()) for r in found.values())


def test_no_alpha_is_the_rank_and_said(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    case = cases("sd3.5")
    file = changed(LAYOUTS["diffusers"](case.trained, tmp_path / "mine"), lambda tensors: None)
    model = folders.load("sd3.5", lora={"rank": 2, "alpha": 5.0})
    with pytest.warns(UserWarning, match="states no alpha, so it is taken as the rank"):
        begin(model, file)
    close(added(model), {name: rows / 3 for name, rows in case.want.items()})


def test_patterns_and_the_other_scale_of_peft(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    """alpha / sqrt(r) with use_rslora, and the alpha of a layer that a pattern names."""
    case = cases("sd3.5")
    folder = LAYOUTS["peft"](case.trained, tmp_path / "mine")
    settings = json.loads((folder / "adapter_config.json").read_text())
    settings |= {"use_rslora": True, "alpha_pattern": {"attn.to_q": 12.0}}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    model = folders.load("sd3.5", lora={"rank": 2, "alpha": 5.0})
    begin(model, folder)
    want = {}
    for name, rows in case.want.items():
        want[name] = rows * 2**0.5 * (2 if name.endswith("attn.to_q") else 1)
    close(added(model), want)
    settings["alpha_pattern"] = {"attn.nowhere": 12.0}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"alpha_pattern names 'attn\.nowhere'"):
        begin(model, folder)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_16", "olora", "corda", "loftq"])
def test_a_start_that_moves_the_base_is_refused(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path, start: str
) -> None:
    """peft trains what it has taken out of the base: A and B alone add it a second time."""
    folder = LAYOUTS["peft"](cases("sd3.5").trained, tmp_path / "mine")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"init_lora_weights": start}))
    with pytest.raises(ModelError, match="init_lora_weights is .* moves the base"):
        begin(folders.load("sd3.5", lora={"rank": 2}), folder)


def test_settings_in_a_file_need_no_prefix(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    """Scripts that write `lora_adapter_metadata` themselves name peft's settings alone."""
    case = cases("sd3.5")
    file = LAYOUTS["diffusers"](case.trained, tmp_path / "mine")
    about = {"lora_adapter_metadata": json.dumps({"r": 2, "lora_alpha": 6.0})}
    save_file(load_file(file), file, metadata=about)
    model = folders.load("sd3.5", lora={"rank": 2})
    begin(model, file)
    close(added(model), case.want)


def test_a_smaller_rank_holds_it_only_if_nothing_is_lost(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    path = LAYOUTS["diffusers"](cases("sd3.5").trained, tmp_path / "mine")
    model = folders.load("sd3.5", lora={"rank": 1})
    with pytest.raises(ModelError, match="has rank 2, and the run's adapters have 1: set model"):
        begin(model, path)

    def doubled(tensors: dict[str, Tensor]) -> None:
        for name, rows in tensors.items():
            tensors[name] = rows[:1].repeat(2, 1) if "lora_A" in name else rows

    file = changed(path, doubled)  # both rows of A are one: the product has rank 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin(model, file)
    want = {}
    tensors = load_file(file)
    for name in cases("sd3.5").want:
        down, up = (tensors[f"transformer.{name}.lora_{k}.weight"] for k in "AB")
        want[name] = up @ down
    close(added(model), want)


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    """Return what renames the first of a file's tensors."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = min(key for key in tensors if old in key)
        tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def plus(name: str, shape: tuple[int, ...] = (4,)) -> Callable[[dict[str, Tensor]], None]:
    """Return what adds a tensor of ones."""
    return lambda tensors: tensors.update({name: torch.ones(shape)})


def times(factor: float) -> Callable[[dict[str, Tensor]], None]:
    """Return what multiplies all matrices B."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [key for key in tensors if "lora_B" in key]:
            tensors[name] = tensors[name] * factor

    return change


LAYER = "transformer.transformer_blocks.0.attn.to_q"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "a layer of another model": (renamed("to_q", "to_p"), "1 of its 30 keys fit no layer"),
    "a tensor of no kind": (plus("transformer.proj_out.weight"), "1 of its 31 keys fit no layer"),
    "half a pair": (
        lambda tensors: tensors.pop(f"{LAYER}.lora_A.weight"),
        r"expected a matrix down \(A\) and a matrix up \(B\), got up only",
    ),
    "twice": (
        plus("transformer.transformer_blocks.0.attn.to_q.lora_up.weight", (16, 2)),
        "there are two tensors of this kind for one layer",
    ),
    "another width": (
        lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.ones(2, 17)}),
        r"expected matrices \[r, 16\] and \[16, r\].*got \[2, 17\] and \[16, 2\]",
    ),
    "no rank": (
        lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.ones(0, 16)}),
        r"expected matrices, got \[0, 16\]",
    ),
    "vectors": (
        lambda tensors: tensors.update({f"{LAYER}.lora_A.weight": torch.ones(16)}),
        r"expected matrices, got \[16\]",
    ),
    "whole numbers": (
        lambda tensors: tensors.update(
            {f"{LAYER}.lora_A.weight": torch.ones(2, 16).to(torch.int8)}
        ),
        "lora_A.weight holds numbers of kind int8: weights that were quantised",
    ),
    "8 bits": (
        lambda tensors: tensors.update(
            {f"{LAYER}.lora_A.weight": torch.ones(2, 16).to(torch.float8_e4m3fn)}
        ),
        "lora_A.weight holds numbers of kind float8_e4m3fn: weights that were quantised",
    ),
    "nothing": (times(0.0), "all of its updates are zero"),
    "no numbers": (times(float("nan")), "expected finite numbers"),
    "dora": (plus(f"{LAYER}.lora_magnitude_vector"), "is DoRA"),
    "kohya's dora": (plus("lora_unet_x.dora_scale"), "is DoRA"),
    "loha": (plus("lora_unet_x.hada_w1_a"), "is LoHa"),
    "lokr": (plus("lora_unet_x.lokr_w1"), "is LoKr"),
    "oft": (plus("lora_unet_x.oft_blocks"), "is OFT"),
    "bias": (plus(f"{LAYER}.lora_B.bias"), "a change of a bias"),
    "comfy's bias": (plus("diffusion_model.x.diff_b"), "a change of a bias"),
    "whole weights": (plus("diffusion_model.x.diff"), "a change of a whole weight"),
    "text encoder": (
        plus("text_encoder.text_model.encoder.layers.0.self_attn.q_proj.lora_A.weight"),
        "LoRA of a text encoder; flowrl trains the network alone: take a file",
    ),
    "kohya's text encoder": (
        plus("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"),
        "LoRA of a text encoder",
    ),
    "a strange alpha": (plus(f"{LAYER}.alpha"), "alpha: expected one finite number"),
}


@pytest.fixture(scope="module")
def both(folders: Folders) -> list[Any]:
    """Two models that no refused file may change."""
    return [folders.load("sd3.5", lora={"rank": 2}), folders.load("sd3.5", tune="full")]


@pytest.mark.filterwarnings("ignore:.*states no alpha")
@pytest.mark.parametrize("label", WRONG)
def test_what_is_refused(
    both: list[Any], cases: Callable[[str], Case], tmp_path: Path, label: str
) -> None:
    change, said = WRONG[label]
    file = changed(LAYOUTS["diffusers"](cases("sd3.5").trained, tmp_path / "mine"), change)
    for model in both:
        before = {name: p.detach().clone() for name, p in model.trainable().items()}
        with pytest.raises(FlowRLError, match=said):
            begin(model, file)
        assert all(torch.equal(p, before[name]) for name, p in model.trainable().items())


def test_layers_that_the_run_does_not_train(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    path = LAYOUTS["diffusers"](cases("sd3.5").trained, tmp_path / "mine")
    model = folders.load("sd3.5", lora={"rank": 2, "targets": ["attn.to_q"]})
    wanted = r"13 of its 15 layers .*lora\.targets to \[attn\.to_q, attn\.add_k_proj, .*attn\.to_v"
    with pytest.raises(ModelError, match=wanted):
        begin(model, path)
    model = folders.load("sd3.5", tune="full", layers=["attn.to_q"])
    with pytest.raises(ModelError, match=r"13 of its 15 layers .*leave model\.layers out"):
        begin(model, path)


def test_convolutions_are_added_to_weights_that_are_trained_in_full(
    folders: Folders, tmp_path: Path
) -> None:
    """Closed form, of a projection 1 x 1 as kohya's files of SD 1.x have it."""
    layer = "down_blocks.0.attentions.0.proj_in"
    draw = torch.Generator().manual_seed(4)
    down = torch.randn(2, 16, 1, 1, generator=draw)
    up = torch.randn(16, 2, 1, 1, generator=draw)
    stem = "lora_unet_" + layer.replace(".", "_")
    tensors = {f"{stem}.lora_down.weight": down, f"{stem}.lora_up.weight": up}
    save_file(tensors | {f"{stem}.alpha": torch.tensor(1.0)}, tmp_path / "a.safetensors")
    model = folders.load("sd15", tune="full")
    weight = model.trainable()[f"{layer}.weight"]
    before = weight.detach().clone()
    begin(model, tmp_path / "a.safetensors")
    moved = (0.5 * up.flatten(1) @ down.flatten(1))[:, :, None, None]
    torch.testing.assert_close(weight.detach() - before, moved, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match=r"LoRA of convolutions needs model\.tune full"):
        begin(folders.load("sd15", lora={"rank": 2}), tmp_path / "a.safetensors")


def broken_files(folder: Path) -> Iterator[Path]:
    """Yield files that are no LoRA."""
    for number, content in enumerate([b"", b"{}", b"\x08\0\0\0\0\0\0\0{}      ", b"\xff" * 64]):
        file = folder / f"{number}.safetensors"
        file.write_bytes(content)
        yield file


def test_damaged_files(folders: Folders, tmp_path: Path) -> None:
    model = folders.load("sd3.5", lora={"rank": 2})
    for file in broken_files(tmp_path):
        with pytest.raises(FlowRLError):
            read_lora(file, {"": model.network})
        with pytest.raises(FlowRLError):
            begin(model, file)


def test_a_run_begins_with_it(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    """By `train.start`, alone and as one of two whose mean is taken; what the run keeps is its own,
    and a copy `ref` is the base model without the file."""
    case = cases("sd3.5")
    path = LAYOUTS["kohya"](case.trained, tmp_path / "mine")
    model = {"fn": "sd3", "path": str(folders["sd3.5"]), "lora": {"rank": 2, "alpha": 5}}
    given = [f"model={json.dumps(model)}", "image={height: 32, width: 32}", "train.group=2"]
    given += ["kl={fn: velocity_kl, beta: 0.1}"]
    for start in (f"train.start={path}", f"train.start=[{path}, {path}]"):
        run = Trainer(toy(tmp_path, *given, start))
        close(added(run.model), case.want)
        assert run.weights.adds_nothing("ref")
    run.save(tmp_path / "kept")
    again = Trainer(toy(tmp_path, *given))
    again.load(tmp_path / "kept")
    close(added(again.model), case.want)


@pytest.mark.parametrize("name", ["sd3.5", "sdxl", "flux2"])
def test_a_folder_with_the_lora_in_it(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path, name: str
) -> None:
    """Its tensors are W + 3 B A, all others as they were."""
    path = LAYOUTS["comfy"](cases(name).trained, tmp_path / "mine")
    merge_lora(str(folders[name]), str(path), str(tmp_path / "new"))
    part = f"{cases(name).trained.network}/diffusion_pytorch_model.safetensors"
    before, now = load_file(folders[name] / part), load_file(tmp_path / "new" / part)
    moved = {key: now.pop(f"{key}.weight") - before[f"{key}.weight"] for key in cases(name).want}
    close(moved, cases(name).want)
    assert all(torch.equal(rows, before[key]) for key, rows in now.items())
    with pytest.raises(RunError, match="is there already"):
        merge_lora(str(folders[name]), str(path), str(tmp_path / "new"))


def test_files_that_chance_has_damaged(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    """150 files, each with a few tensors or names changed: taken, or refused by one of our errors;
    never half taken."""
    path = LAYOUTS["diffusers"](cases("sd3.5").trained, tmp_path / "mine")
    model = folders.load("sd3.5", lora={"rank": 2})
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    clean, draw = load_file(path), random.Random(4)
    words = ["", ".weight", ".alpha", "lora_A", "lora_up", "transformer.", ".diff", "x", "1", "é"]
    refused = 0
    for number in range(150):
        tensors = dict(clean)
        for _ in range(draw.randint(1, 3)):
            name = draw.choice([*tensors])
            rows = tensors.pop(name)
            kinds = [rows[:1], rows.half(), rows.flatten(), rows * 1e30, rows[:0], rows]
            kinds.append(rows.transpose(0, -1))
            cut = draw.randint(0, len(name))
            end = draw.choice([name, name[:cut] + draw.choice(words) + name[cut:]])
            tensors[end] = draw.choice(kinds).contiguous()
        file = tmp_path / f"{number}.safetensors"
        save_file(tensors, file)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                begin(model, file)
        except FlowRLError:
            refused += 1
            now = model.trainable()
            assert all(torch.equal(now[name], rows) for name, rows in before.items()), number
        for name, p in model.trainable().items():
            assert bool(p.isfinite().all())
            p.data.copy_(before[name])
    assert 30 < refused < 150


def test_kohya_s_file_keeps_its_rank(
    folders: Folders, cases: Callable[[str], Case], tmp_path: Path
) -> None:
    """Our own export holds q, k and v as one adapter of three times the rank; what adds nothing is
    left out again."""
    path = kohya_layout(cases("flux").trained, tmp_path / "mine")
    model = folders.load("flux", lora={"rank": 2, "alpha": 6.0})
    begin(model, path)
    close(added(model), cases("flux").want)


def test_whole_weights_that_were_quantised(folders: Folders, tmp_path: Path) -> None:
    """To begin with them would be to begin with noise."""
    model = folders.load("sd3.5", tune="full")
    stored = {name: p.detach().char() for name, p in model.trainable().items()}
    save_file(stored, tmp_path / "start.safetensors")
    with pytest.raises(FlowRLError, match="holds numbers of kind int8: weights that were quant"):
        begin(model, tmp_path / "start.safetensors")
