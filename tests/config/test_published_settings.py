"""Settings of published scripts that the table in test_method_configs has no column for: windows,
adapters, whose std, batches. Each was read in the file and at the commit that its test names."""

from __future__ import annotations

from inspect import signature

import pytest
from diffusers import WanImageToVideoPipeline, WanPipeline
from shippedkit import shipped

from flowrl.core.shipped_files import list_configs


def test_the_windows_of_fast() -> None:
    """Published: CPS on steps drawn from range(0, steps // 2), three at a time: on FLUX always the
    first three. The first form forks at one of steps 0 to 5 and has noise on that and the next."""
    steps: dict[str, set[int]] = {}
    for name in ("sd3/flow_grpo_fast", "flux/flow_grpo_fast", "sd3/flow_grpo_fork"):
        plan = shipped(name).call("plan")
        steps[name] = {int(plan(i).noise.nonzero().min()) for i in range(200)}
    assert steps["sd3/flow_grpo_fast"] == {0, 1, 2}
    assert steps["flux/flow_grpo_fast"] == {0}
    assert steps["sd3/flow_grpo_fork"] == set(range(6))


# Rank and alpha in the authors' train_flux.py, train_flux_fast.py (yifan123/flow_grpo at 9745241),
# train_flux_pr.py (TempFlow-GRPO at 28a9b9be), my_train_flux_fast_with_op3.py (TurningPoint-GRPO at
# 994d26a), train_flux.py and train_flux_kontext.py of X-GenGroup/PaCo-RL (08caac6), and the default
# of Flow-Factory's flux1.py and flux1_kontext.py, read there.
FLUX = ["flow_grpo", "flow_grpo_cps", "flow_grpo_fast", "flow_grpo_geneval", "flow_grpo_ocr"]
FLUX += ["grpo_guard", "tp_grpo", "awm", "diffusion_nft", "paco_rl"]
KONTEXT = [name for name in list_configs() if name.startswith("flux_kontext/")]
ADAPTERS = dict.fromkeys([*(f"flux/{name}" for name in FLUX), *KONTEXT], (64, 128))
ADAPTERS["flux/tempflow_grpo"] = (32, 64)
LAYERS = {
    *(f"attn.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0", "to_add_out")),
    *(f"attn.add_{name}_proj" for name in "qkv"),
    *(f"{mlp}.net.{layer}" for mlp in ("ff", "ff_context") for layer in ("0.proj", "2")),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_on_flux(name: str) -> None:
    """On attention and feed-forward; SD3's are of rank 32 and alpha 64, on attention alone."""
    lora = shipped(name).model.kwargs["lora"]
    assert (lora["rank"], lora["alpha"]) == ADAPTERS[name]
    assert set(lora["targets"]) == LAYERS and len(lora["targets"]) == 12


def test_ddpo_and_dance_grpo_on_sd14() -> None:
    """kvablack/ddpo-pytorch at 1958463, config/dgx.py:aesthetic: 256 images an epoch, (8 * 4) /
    (4 * 4) = 2 updates, diffusers' LoRAAttnProcessor of rank 4. XueZeyue/DanceGRPO at 15cc71d,
    config_sd/dgx.py:hpsv2: 4 prompts on each of 8 GPUs, no averaged weights."""
    ddpo, dance = shipped("sd15/ddpo"), shipped("sd15/dance_grpo")
    for config in (ddpo, dance):
        assert config.model.kwargs["path"] == "CompVis/stable-diffusion-v1-4"
    assert (ddpo.train.prompts, ddpo.train.group, ddpo.train.updates) == (256, 1, 2)
    assert ddpo.model.kwargs["lora"] == {"rank": 4, "alpha": 4}
    assert (dance.train.prompts, dance.train.group, dance.train.ema) == (32, 16, 0)


def test_align_prop_on_sd15() -> None:
    """mihirp1998/AlignProp at b22918a, aesthetic.sh: 4 GPUs * 8 images * 4 accumulated, 20 epochs;
    config/alignprop_config.py: 42 and 5 of 50 steps, guidance, rates, the loss's factor and aim."""
    c = shipped("sd15/align_prop")
    assert (c.train.prompts * c.train.group, c.train.iterations, c.train.updates) == (128, 20, 1)
    steps, law = c.plan.kwargs["steps"], c.likelihood.kwargs
    assert (steps, law["draw"]) == (50, "gaussian")
    assert (law["mean"] * steps, law["std"] * steps) == (42, 5)
    assert (c.model.kwargs["guidance"], c.lr, c.train.max_grad_norm) == (5.0, 1e-3, 1.0)
    assert c.loss.kwargs == {"scale": 0.01, "enough": 10.0}
    assert c.optimizer.kwargs["weight_decay"] == 1e-4


def test_pref_grpo_on_flux() -> None:
    """CodeGoat24/Pref-GRPO at 3e787f6, ur_think_prefgrpo_flux.sh and _common_finetune.sh: 8 nodes
    of 8 GPUs with a prompt each; 8 images, 4 accumulated, are 2 updates."""
    c = shipped("flux/pref_grpo")
    assert (c.plan.kwargs["steps"], c.plan.kwargs["noise_scale"], c.lr) == (25, 0.7, 1e-5)
    assert c.reward_weights == {"wins": 0.4, "clip": 0.6} and c.train.same_noise
    assert (c.train.prompts, c.train.group, c.train.updates, c.train.ema) == (64, 8, 2, 0)
    assert (c.loss.fn, c.aggregate.fn, c.loss.kwargs["clip_high"]) == ("guard", "gdpo", 1e-4)
    assert [call.kwargs["share"] for call in c.select] == [0.6]


def test_spo_on_both_models() -> None:
    """RockeyCoss/SPO at 27a8642, configs/basic_config.py and the configs of SD1.5 and SDXL: samples
    of each step, the first that is compared, threshold, rank and rate; and a pair needs what
    candidates of a step give, 4 * 15 estimates and 2 * 15."""
    found = {}
    for name in ("sd15/spo", "sdxl/spo"):
        c = shipped(name)
        plan, lora = c.plan.kwargs, c.model.kwargs["lora"]
        assert (plan["steps"], plan["noise_scale"], plan["first"]) == (20, 1.0, 4)
        assert (c.loss.kwargs["beta"], c.loss.kwargs["clip"]) == (10.0, 0.1)
        assert c.model.kwargs["guidance"] == 5.0 and lora["rank"] == lora["alpha"]
        assert c.train.group == plan["branch"] * 15 + 1
        found[name] = (plan["branch"], c.credit.kwargs["least"], lora["rank"], c.lr)
    assert found == {"sd15/spo": (4, 0.3, 4, 6e-5), "sdxl/spo": (2, 0.4, 64, 1e-5)}


def test_find_on_sd15() -> None:
    """vpx-ecnu/FIND at 0939c3f: the README's command, and the defaults of dist_train2.py and of its
    pipeline; one image of one prompt, a std that is learned, no gradient clipping."""
    c = shipped("sd15/find")
    assert (c.train.iterations, c.lr, c.loss.kwargs["scale"], c.kl_beta) == (150, 1e-3, 10.0, 0.01)
    assert (c.plan.kwargs["steps"], c.plan.kwargs["noise_scale"]) == (50, 1.0)
    assert c.model.kwargs["guidance"] == 7.5 and c.model.kwargs["tune"] == "none"
    assert (c.train.prompts, c.train.group, c.train.max_grad_norm) == (1, 1, float("inf"))
    credit = {"buffer": 1000, "rounds": 5, "lr": 1e-4, "layers": 3, "seed": 0}
    assert c.credit.kwargs == credit
    assert c.likelihood.kwargs["learn_spread"] and c.likelihood.kwargs["own"]


def test_when_gardo_refreshes_its_reference() -> None:
    """tinnerhrhe/GARDO at 1cc77fb, config/gardo.py: reset_freq 15, which its loop takes as more
    than 15 epochs, each of 2 optimizer steps, and kl_thres 3e-4."""
    config = shipped("sd3/gardo")
    assert config.slow is not None and config.train.updates == 2
    assert config.slow.kwargs == {"every": 16 * 2, "above": 3e-4}


def test_settings_that_only_some_scripts_have() -> None:
    """No script of DanceGRPO for video averages weights (15cc71d). Flow-OPD's config of several
    domains has 1e-4 (434ab16). DenseGRPO's coefficient is Flow-GRPO's, of its later code."""
    assert shipped("wan/dance_grpo").train.ema == 0
    opd, dense = shipped("sd3/flow_opd"), shipped("sd3/dense_grpo")
    assert (opd.lr, opd.train.prompts, opd.train.group) == (1e-4, 16, 16)
    assert dense.kl is not None and dense.kl.kwargs["divide_by"] == "g"
    assert dense.kl_beta == 0.01


def test_wans_configs_have_the_pipelines_number_of_text_tokens() -> None:
    """The pipelines' own default, as zeros that fill a prompt up are seen by the network."""
    kinds = (WanPipeline, WanImageToVideoPipeline)
    calls = [signature(kind.__call__).parameters for kind in kinds]
    (default,) = {call["max_sequence_length"].default for call in calls}
    names = [name for name in list_configs() if name.startswith("wan/")]
    found = {name: shipped(name).model.kwargs["max_sequence_length"] for name in names}
    assert found == dict.fromkeys(names, default)
