"""The methods and their configs: everything binds, published numbers are the published ones, each
can be trained."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import pytest
import yaml
from diffusers import UniPCMultistepScheduler
from shippedkit import shipped

from flowrl.algorithms.rollout.plan_steps import counts
from flowrl.config.load import Config
from flowrl.core.shipped_files import list_configs, resource
from flowrl.cost.architecture import released_parts
from flowrl.training.rehearsal import RehearsedIteration, check_plan

PUBLISHED = [name for name in list_configs() if not name.startswith("shapes/")]
# what they train is not in the network
NOISE = {f"shapes/{name}" for name in ("find", "find_own", "find_narrow", "zo_rank_sgd")}
NOISE |= {"shapes/prior_grpo", "sd15/find", "sd15/zo_rank_sgd"}


class Row(NamedTuple):
    """A line of the reference's table of hyper-parameters; None where it has none, or where it does
    not carry over."""

    steps: int
    eval_steps: int | None
    noise_scale: float
    samples: int  # compared with each other, per prompt
    trained: int  # draws per sample
    clip: float | None
    beta: float
    lr: float
    updates: int | None


# Published values, from the authors' code or papers. CPS clip ranges belong to another log-prob, so
# they are None but for Fast, where they are about the same. MixGRPO on SD3.5: level and steps are
# those of its FLUX runs. BranchGRPO: 34 noisy edges in Mix, 218 - 16 else; 36 optimizer steps of 12
# edges each are 2 trees' 218.
TABLE = {
    "sd3/flow_grpo": Row(10, 40, 0.7, 24, 9, 1e-4, 0.01, 3e-4, 2),
    "flux/flow_grpo": Row(6, 28, 0.9, 24, 5, 1e-4, 0, 3e-4, 2),
    "sd3/flow_grpo_geneval": Row(10, 40, 0.7, 24, 9, 1e-4, 0.04, 3e-4, 2),
    "sd3/flow_grpo_ocr": Row(10, 40, 0.7, 24, 9, 1e-4, 0.04, 3e-4, 2),
    "flux/flow_grpo_geneval": Row(6, 28, 0.9, 24, 5, 1e-4, 0, 3e-4, 2),
    "flux/flow_grpo_ocr": Row(6, 28, 0.9, 24, 5, 1e-4, 0, 3e-4, 2),
    "sd3/flow_grpo_fast": Row(10, 40, 0.8, 18, 3, 1e-5, 0, 3e-4, 2),
    "sd3/grpo_guard": Row(10, 40, 0.7, 24, 9, 4e-6, 0, 1e-4, 2),
    "flux/dance_grpo": Row(16, None, 0.3, 12, 9, 1e-4, 0, 1e-5, 3),
    "flux/mix_grpo": Row(25, 50, 0.7, 12, 4, 1e-4, 0, 1e-5, 4),
    "sd15/dance_grpo": Row(50, None, 1.0, 16, 49, None, 0, 1e-5, None),
    "sd3/tempflow_grpo": Row(10, 40, 0.7, 24, 9, 1e-4, 0.001, 3e-4, 2),
    "flux/tempflow_grpo": Row(10, 50, 0.9, 24, 9, 1e-4, 0.004, 3e-4, 2),
    "sd3/tp_grpo": Row(10, 40, 0.7, 24, 9, None, 1e-4, 3e-4, 2),
    "flux/tp_grpo": Row(6, 28, 0.7, 24, 5, None, 1e-4, 3e-4, 2),
    "flux/g2rpo": Row(16, 50, 0.7, 12, 8, 1e-4, 0, 2e-6, 8),
    "flux/flow_grpo_fast": Row(6, 28, 0.8, 24, 3, 1e-5, 0, 3e-4, 2),
    "flux/mix_grpo_flash": Row(25, 50, 0.7, 12, 4, 1e-4, 0, 1e-5, 4),
    "sd3/mix_grpo": Row(25, None, 0.7, 24, 4, 1e-4, 0.001, 3e-4, None),
    "flux/branch_grpo": Row(20, None, 0.3, 1, 218 - 16, 1e-3, 0, 1e-5, 36),
    "flux/branch_grpo_mix": Row(20, None, 0.3, 1, 34, 1e-3, 0, 1e-5, None),
    # two forks of 9 images, two draws each
    "sd3/flow_grpo_fork": Row(10, 40, 0.8, 2, 9 * 2, 1e-5, 0, 3e-4, 2),
}

# Divisor n - ddof of the std, what is added to it, and whose std it is, in the authors' code.
# BranchGRPO's code cuts stds below 1e-6 in place of an eps, and TP-GRPO and TempFlow are built on
# Flow-GRPO's tracker. Fast: global_std in config/grpo.py of yifan123/flow_grpo at 9745241
# (pickscore_sd3_fast_nocfg, pickscore_flux_fast) and at a2832cc (pickscore_sd3_fast).
NORMS = {
    "sd3/flow_grpo_fast": (0, 1e-4, "global"),
    "flux/flow_grpo_fast": (0, 1e-4, "group"),
    "sd3/flow_grpo_fork": (0, 1e-4, "global"),
    "flow_grpo": (0, 1e-4, "global"),
    "flow_grpo_geneval": (0, 1e-4, "global"),
    "flow_grpo_ocr": (0, 1e-4, "global"),
    "flow_grpo_cps": (0, 1e-4, "global"),
    "grpo_guard": (0, 1e-4, "group"),
    "dance_grpo": (1, 1e-8, "group"),
    "mix_grpo": (1, 1e-8, "group"),
    "mix_grpo_flash": (1, 1e-8, "group"),
    "branch_grpo": (1, 1e-8, None),
    "branch_grpo_mix": (1, 1e-8, None),
    "tempflow_grpo": (0, 1e-4, None),
    "tp_grpo": (0, 1e-4, None),
    "g2rpo": (1, 1e-8, None),
    "chunk_grpo": (1, 1e-8, "group"),
}


class Plan(NamedTuple):
    """What a plan must count per initial noise."""

    nfe: int
    leaves: int
    edges: int


# Counted by hand or reported: BranchGRPO's 203 calls and 218 edges; MixGRPO-Flash's 4 + 7 steps;
# TempFlow's 6 x 45 tail calls and 9 of its trunk, with 10 samples' edges; Dynamic-TreeRPO's 15
# calls for 30 edges inside the window.
COUNTS = {
    "flux/branch_grpo": Plan(203, 16, 218),
    "flux/branch_grpo_mix": Plan(203, 16, 218),
    "flux/dance_grpo": Plan(16, 1, 16),
    "flux/mix_grpo": Plan(25, 1, 25),
    "flux/mix_grpo_flash": Plan(11, 1, 11),
    "flux/chunk_grpo": Plan(17, 1, 17),
    "sd3/tempflow_grpo": Plan(9 + 6 * 45, 54, 54),
    # comb: 9 tails of 1 to 9 steps; the trunk's velocities are those of the tails and of the 10
    # baseline steps
    "sd3/tp_grpo": Plan(10 + 45, 10, 10),
    "flux/dynamic_treerpo": Plan(1 + 2 + 4 + 8 + 16 * 21, 16, 30 + 16 * 21),
}


@pytest.fixture(scope="module", params=list_configs())
def forecast(request: pytest.FixtureRequest) -> tuple[str, RehearsedIteration]:
    """Bind a shipped config and rehearse its iterations."""
    return request.param, rehearsed(request.param)


@cache
def rehearsed(name: str) -> RehearsedIteration:
    return check_plan(shipped(name))


def test_every_config_can_be_trained(forecast: tuple[str, RehearsedIteration]) -> None:
    """Its numbers fit together at every iteration, and each optimizer step has a draw that
    counts."""
    name, found = forecast
    assert 0 < found.decisions <= found.work.decisions and found.states >= found.work.updates, name
    # stored images take no velocity
    assert found.calls >= found.work.nfe >= 0 and (found.work.nfe > 0) == ("offline" not in name)
    assert (found.calls == found.work.nfe) == (name in NOISE)


@pytest.mark.parametrize("name", list_configs())
def test_the_header_has_its_four_lines(name: str) -> None:
    """Paper with its arXiv number, code, hardware, result; then the config's own name."""
    text = resource(f"configs/{name}.yaml").read_text(encoding="utf-8")
    head = text[: text.index("\nname: ")]
    lines = dict(re.findall(r"^# (\w+) +(\S.*)$", head, re.MULTILINE))
    assert re.search(r"\d{4}\.\d{5}", lines["paper"]), name
    assert {"hardware", "result"} <= set(lines), name
    if name in PUBLISHED:
        words = " ".join(head.replace("#", " ").split())
        assert {"code", "prompts"} <= set(lines) and "none was reproduced" in words
    if name.startswith(("sd3/", "flux/")):
        assert "sigma" in lines  # "# sigma grid ..."
    assert yaml.safe_load(text)["name"] == name.replace("/", "-").replace("_", "-")


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_value_has_an_origin(name: str) -> None:
    """In a comment at its line, or at the head of its section, or right above that."""
    covered, above, bare = False, False, []
    for line in resource(f"configs/{name}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            above = True
            continue
        if not line.startswith(" "):
            covered = above or " # " in line
        above = False
        if (
            not covered
            and " # " not in line
            and not re.match(r"(name|  fn|  path|model|rewards|optimizer|train|plan)\b", line)
        ):
            bare.append(line)
    assert bare == []


@pytest.mark.parametrize("name", TABLE)
def test_published_numbers(name: str) -> None:
    config, row = shipped(name), TABLE[name]
    found, kwargs = rehearsed(name), config.plan.kwargs
    assert (kwargs["steps"], kwargs["noise_scale"], config.lr) == (
        row.steps,
        row.noise_scale,
        row.lr,
    )
    assert found.decisions == config.train.prompts * row.samples * row.trained
    assert config.kl_beta == row.beta
    clips = {config.loss.kwargs["clip_low"], config.loss.kwargs["clip_high"]}
    assert row.clip is None or clips == {row.clip}
    assert row.updates is None or config.train.updates == row.updates
    assert row.eval_steps is None or config.eval.steps == row.eval_steps


@pytest.mark.parametrize("name", [n for n in PUBLISHED if {n, n.rpartition("/")[2]} & {*NORMS}])
def test_how_advantages_are_normalised(name: str) -> None:
    found, norm = shipped(name).credit.kwargs, NORMS.get(name) or NORMS[name.rpartition("/")[2]]
    assert (found["ddof"], found["eps"], found.get("std")) == norm


def test_pace_of_the_windows_and_of_pruning() -> None:
    """MixGRPO moves every 25 iterations, Flash every 20, the run on SD3.5 every 150; Chunk-GRPO as
    in its script."""
    every = {
        n: shipped(n).plan.kwargs["every"]
        for n in ("flux/mix_grpo", "flux/mix_grpo_flash", "sd3/mix_grpo")
    }
    assert every == {"flux/mix_grpo": 25, "flux/mix_grpo_flash": 20, "sd3/mix_grpo": 150}
    chunk = shipped("flux/chunk_grpo")
    assert (chunk.lr, chunk.plan.kwargs["noise_scale"], chunk.train.updates) == (1e-5, 0.7, 2)
    assert (chunk.eval.steps, chunk.eval.tuned) == (50, 0.6)  # 30 of 50 steps by the tuned model


@pytest.mark.parametrize("name", COUNTS)
def test_calls_and_images_of_the_plans(name: str) -> None:
    plan = shipped(name).call("plan")(0)
    found = counts(plan)
    assert Plan(found.nfe, found.leaves, found.edges) == COUNTS[name]


def test_branches_trained() -> None:
    """Of 218 edges the 16 of the last step are never trained; published: 36 optimizer steps of 2
    trees' edges."""
    found = rehearsed("flux/branch_grpo")
    assert (found.decisions, found.work.updates) == (16 * (218 - 16), 36)
    # noise on steps 0 to 3, 6 and 9 only, a step each 12 edges
    mix = rehearsed("flux/branch_grpo_mix")
    assert (mix.decisions, mix.work.updates) == (16 * (2 + 2 + 2 + 4 + 8 + 16), round(2 * 34 / 12))


def test_chunks_trained() -> None:
    """Four chunks of the 16 steps that are trained; int(4 x 0.5) = 2 of them for each image."""
    config = shipped("flux/chunk_grpo")
    assert config.segment is not None and config.segment.kwargs["sizes"] == [2, 3, 4, 7]
    assert config.select[0].kwargs["share"] == 0.5 and config.train.max_grad_norm == 0.01
    assert config.loss.kwargs["clip_low"] == config.loss.kwargs["clip_high"] == 5e-5
    found = rehearsed("flux/chunk_grpo")
    assert found.work.decisions == 16 * 12 * 16
    assert (2 + 3) * 12 <= found.decisions / 16 <= (4 + 7) * 12


def test_reconstructions_take_what_is_known() -> None:
    """VGPO: 10 and 40 steps, the first 5 anchored. Dynamic-TreeRPO: binary, depth 4, 16 leaves, no
    KL."""
    vgpo, tree = shipped("sd3/vgpo"), shipped("flux/dynamic_treerpo")
    assert (vgpo.plan.kwargs["steps"], vgpo.eval.steps, vgpo.credit.kwargs["anchored_steps"]) == (
        10,
        40,
        5,
    )
    assert vgpo.kl_beta > 0 and tree.kl_beta == 0
    assert (tree.plan.kwargs["size"], tree.plan.kwargs["branch"], tree.train.group) == (4, 2, 16)


def test_the_window_of_mix_grpo() -> None:
    """Published: 300 iterations move it by floor(iteration / 25), so steps 0 to 14 are all that it
    reaches."""
    config = shipped("flux/mix_grpo")
    plans = [
        config.call("plan")(i).noise.nonzero().flatten().tolist()
        for i in range(config.train.iterations)
    ]
    for i, steps in enumerate(plans):
        assert steps == list(range(i // 25, i // 25 + 4))
    assert len(plans) == 300 and max(map(max, plans)) == 14


def first_steps(config: Config, boundary: float) -> int:
    """Count the steps of Wan 2.2's first expert, by the released scheduler."""
    settings = released_parts(config.model.kwargs["path"])["scheduler"].settings
    scheduler = UniPCMultistepScheduler(**settings)
    scheduler.set_timesteps(config.plan.kwargs["steps"])
    return int((scheduler.timesteps >= 1000 * boundary).sum())


@pytest.mark.parametrize(
    ("name", "boundary", "first"),
    [("wan/flow_grpo_fast_22", 0.875, 4), ("wan/flow_grpo_fast_i2v_22", 0.9, 3)],
)
def test_only_the_first_expert_learns(name: str, boundary: float, first: int) -> None:
    """Wan 2.2: by the released schedulers the noisy steps lie above the boundary, as the heads of
    the configs say."""
    config = shipped(name)
    assert first_steps(config, boundary) == first
    noisy = {int(step) for i in range(50) for step in config.call("plan")(i).noise.nonzero()}
    assert noisy and max(noisy) < first
