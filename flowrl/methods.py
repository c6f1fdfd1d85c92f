"""The methods that ship with flowrl: what each is, how faithful, and what its configs cost."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from flowrl.config import Call, Config, load_config
from flowrl.feasible import check_plan
from flowrl.resources import list_configs

Status = Literal["exact", "reconstruction"]
MEANING: dict[Status, str] = {
    "exact": "formulas from the paper and its code",
    "reconstruction": "partly ours: no code is public, or not all formulas are",
}
AXES = ("plan", "transition", "rewards", "aggregate", "credit", "segment", "select", "likelihood", "loss", "kl")
SHOWN = ("plan", "transition", "credit", "segment", "select", "loss", "kl")  # in the table; the others hardly differ


class Paper(NamedTuple):
    """Where a method was published."""

    title: str
    arxiv: str
    year: int


class Method(NamedTuple):
    """One method; its configs are all that are named after it or a variant of it, but for those that another names."""

    slug: str
    name: str
    paper: Paper | None  # None: a combination of methods above it
    status: Status
    summary: str
    variants: tuple[str, ...] = ()  # configs of its that have another name; with a slash: of this folder alone

    @property
    def configs(self) -> list[str]:
        """Return the names of its configs, the smallest model first."""
        named = {name for method in METHODS if method is not self for name in method.variants if "/" in name}
        tails = (self.slug, *self.variants)
        mine = [name for name in list_configs() if name in tails or name.rpartition("/")[2] in tails]
        return sorted(
            set(mine) - named,
            key=lambda name: (_PLACES.get(name.partition("/")[0], 9), not name.endswith(f"/{self.slug}"), name),
        )


_PLACES = {place: number for number, place in enumerate(("shapes", "sd3", "flux"))}
_FLOW = Paper("Flow-GRPO: Training Flow Matching Models via Online RL", "2505.05470", 2025)
_MIX = Paper("MixGRPO: Unlocking Flow-based GRPO Efficiency with Mixed ODE-SDE", "2507.21802", 2025)
_BRANCH = Paper(
    "BranchGRPO: Stable and Efficient GRPO with Structured Branching in Diffusion Models", "2509.06040", 2025
)

METHODS = (
    Method(
        "flow_grpo",
        "Flow-GRPO",
        _FLOW,
        "exact",
        "Every step is a Gaussian draw; one group-relative advantage.",
        ("flow_grpo_full",),
    ),
    Method(
        "flow_grpo_fast",
        "Flow-GRPO-Fast",
        _FLOW,
        "exact",
        "Noise in a short random window only, behind a fork or not; only that is trained.",
        ("shapes/flow_grpo", "flow_grpo_fork"),
    ),
    Method(
        "flow_grpo_cps",
        "CPS",
        Paper("Coefficients-Preserving Sampling for Reinforcement Learning with Flow Matching", "2509.05952", 2025),
        "exact",
        "Part of the predicted noise is drawn anew, so that no extra noise stays in the picture.",
    ),
    Method(
        "grpo_guard",
        "GRPO-Guard",
        Paper(
            "GRPO-Guard: Mitigating Implicit Over-Optimization in Flow Matching via Regulated Clipping",
            "2510.22319",
            2025,
        ),
        "exact",
        "A ratio without drift and on one scale at every noise level, so that clipping works on both sides.",
    ),
    Method(
        "dance_grpo",
        "DanceGRPO",
        Paper("DanceGRPO: Unleashing GRPO on Visual Generation", "2505.07818", 2025),
        "exact",
        "A constant diffusion coefficient, one initial noise per prompt, a random part of the steps trained.",
    ),
    Method("mix_grpo", "MixGRPO", _MIX, "exact", "Noise in a window that slides from noisy to clean; ODE elsewhere."),
    Method("mix_grpo_flash", "MixGRPO-Flash", _MIX, "exact", "MixGRPO with a faster solver after the window."),
    Method(
        "branch_grpo",
        "BranchGRPO",
        _BRANCH,
        "exact",
        "A tree of samples: prefixes are shared, advantages are per depth.",
    ),
    Method("branch_grpo_mix", "BranchGRPO-Mix", _BRANCH, "exact", "BranchGRPO's tree, noise in a block of steps only."),
    Method(
        "tempflow_grpo",
        "TempFlow-GRPO",
        Paper("TempFlow-GRPO: When Timing Matters for GRPO in Flow Models", "2508.04324", 2025),
        "exact",
        "Forks at every step of a noise-free trunk give each draw its own reward; weights follow the noise level.",
    ),
    Method(
        "tp_grpo",
        "TP-GRPO",
        Paper(
            "Alleviating Sparse Rewards by Modeling Step-Wise and Long-Term Sampling Effects in Flow-Based GRPO",
            "2602.06422",
            2026,
        ),
        "exact",
        "Each step is paid what it adds to the reward; steps that turn the trend, all that follows from them.",
    ),
    Method(
        "g2rpo",
        "G2RPO",
        Paper("Fine-Grained GRPO for Precise Preference Alignment in Flow Models", "2510.01982", 2025),
        "exact",
        "One draw at a time from a shared anchor, judged at several denoising granularities.",
    ),
    Method(
        "chunk_grpo",
        "Chunk-GRPO",
        Paper("Sample By Step, Optimize By Chunk: Chunk-Level GRPO For Text-to-Image Generation", "2510.21583", 2025),
        "exact",
        "Consecutive steps of like dynamics move as one action with one ratio.",
    ),
    Method(
        "vgpo",
        "VGPO",
        Paper(
            "Anchoring Values in Temporal and Group Dimensions for Flow Matching Model Alignment", "2512.12387", 2025
        ),
        "reconstruction",
        "Rewards of x0 estimates, accumulated over the steps, with an absolute term that outlives equal rewards.",
    ),
    Method(
        "dynamic_treerpo",
        "Dynamic-TreeRPO",
        Paper(
            "Dynamic-TreeRPO: Breaking the Independent Trajectory Bottleneck with Structured Sampling",
            "2509.23352",
            2025,
        ),
        "reconstruction",
        "A tree inside the sliding window, noise that grows with depth, clip bounds that follow the advantage.",
    ),
    Method(
        "adv_grpo",
        "Adv-GRPO",
        Paper(
            "The Image as Its Own Reward: Reinforcement Learning with Adversarial Reward for Image Generation",
            "2511.20256",
            2025,
        ),
        "exact",
        "The reward is a discriminator that is trained along.",
    ),
    Method(
        "tree_window_chunk",
        "tree, window and chunks",
        None,
        "reconstruction",
        "BranchGRPO's tree inside MixGRPO's window, with Chunk-GRPO's ratios.",
    ),
    Method("cps_branch", "CPS and branches", None, "exact", "BranchGRPO's tree with CPS as its noise."),
    Method("guard_window", "Guard and window", None, "exact", "Flow-GRPO-Fast's window with GRPO-Guard's ratio."),
)


def describe(method: Method) -> dict[str, Any]:
    """Return all that is known of a method, its configs' axes and cost included, as JSON would hold it.

    Raises: ConfigError for a config that cannot be trained.
    """
    paper = method.paper._asdict() if method.paper else None
    known = dict(slug=method.slug, name=method.name, paper=paper, status=method.status, meaning=MEANING[method.status])
    return {**known, "summary": method.summary, "configs": [_config(name) for name in method.configs]}


def table(rows: list[dict[str, Any]]) -> str:
    """Write descriptions as an aligned table: one line per method, then what the columns mean."""
    head = ("method", "paper", "status", "axes", "calls per picture", "configs")
    cells = [head, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines += ["", *(f"{status}: {meaning}" for status, meaning in MEANING.items())]
    lines.append(
        "calls per picture: network calls of an iteration, sampling and 3 (with a KL 4) per trained state, over the "
        "pictures that are scored; of each config in turn; guidance doubles them"
    )
    return "\n".join(lines)


def _config(name: str) -> dict[str, Any]:
    config = load_config(name)
    forecast = check_plan(config)
    work = forecast.work
    return {
        "config": name,
        "axes": {axis: _names(config, axis) for axis in AXES if _names(config, axis)},
        "pictures": work.images,
        "decisions": forecast.decisions,
        "states": forecast.states,
        "updates": work.updates,
        "sampling_calls": work.evaluations,
        "calls": forecast.calls,
        "calls_per_picture": round(forecast.calls / work.images, 3),
        "guided": work.guided,
    }


def _names(config: Config, axis: str) -> list[str]:
    value = getattr(config, axis)
    found = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    return [call.fn for call in found if isinstance(call, Call)]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    configs = row["configs"]
    axes = configs[0]["axes"] if configs else {}
    numbers = " / ".join(f"{config['calls_per_picture']:.1f}" for config in configs)
    return (
        row["name"],
        f"arXiv {row['paper']['arxiv']}" if row["paper"] else "combination",
        row["status"],
        ", ".join(name for axis in SHOWN for name in axes.get(axis, [])),
        numbers,
        _short([config["config"] for config in configs]),
    )


def _short(names: list[str]) -> str:
    """Write configs as a shell would expand them: {sd3,flux}/g2rpo."""
    places: dict[str, list[str]] = {}
    for place, _, name in (name.rpartition("/") for name in names):
        places.setdefault(name, []).append(place)
    parts = [f"{{{','.join(p)}}}/{name}" if len(p) > 1 else f"{p[0]}/{name}" for name, p in places.items()]
    return " ".join(parts) or "none"
