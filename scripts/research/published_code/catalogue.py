"""Which published functions are run beside which of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cases
from sources import Source, load


class Case(NamedTuple):
    """What is compared, and where theirs is."""

    ours: str
    source: Source
    run: Callable[[dict[str, Any]], cases.Gaps]

    def found(self, clones: Path) -> cases.Gaps:
        """Run both."""
        return self.run(load(self.source, clones))


CASES = {
    "flow_grpo": Case(
        "transition flow_sde",
        Source(
            "yifan123/flow_grpo",
            "ac4c86e8cae021841f1fde853d340e0db67690dd",
            "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py",
            ("sde_step_with_logprob",),
        ),
        cases.flow_grpo_step,
    ),
    "flow_grpo, advantages": Case(
        "credit group_norm",
        Source(
            "yifan123/flow_grpo",
            "ac4c86e8cae021841f1fde853d340e0db67690dd",
            "flow_grpo/stat_tracking.py",
            ("PerPromptStatTracker",),
        ),
        cases.prompt_statistics,
    ),
    "dance_grpo": Case(
        "transition dance_sde",
        Source(
            "XueZeyue/DanceGRPO",
            "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344",
            "fastvideo/train_grpo_flux.py",
            ("flux_step",),
        ),
        cases.dance_grpo_step,
    ),
    "branch_grpo": Case(
        "credit depth_norm",
        Source(
            "Fredreic1849/BranchGRPO",
            "19fbb9fc92ad1857212f3b664d6e9ff80c8b3804",
            "fastvideo/train_branchgrpo_flux.py",
            (
                "compute_hierarchical_advantages_by_depth",
                "compute_node_rewards_from_leaves",
                "TreeNode",
            ),
        ),
        cases.branch_advantages,
    ),
    "flash_grpo": Case(
        "transition linear_sde",
        Source(
            "Shredded-Pork/Flash-GRPO",
            "421101378e8811aa7460ada34a3b76ac7b53c9f7",
            "flow_grpo/diffusers_patch/wan2_1_pipeline_with_logprob_sample.py",
            ("sde_step_with_logprob",),
        ),
        cases.flash_grpo_step,
    ),
    "diffusion_nft": Case(
        "plan ode, last_order 2",
        Source(
            "NVlabs/DiffusionNFT",
            "24af5554898d85e93efa492f42b5e9cdf4156e9b",
            "flow_grpo/diffusers_patch/solver.py",
            (
                "run_sampling",
                "DPMState",
                "dpm_step",
                "convert_model_output",
                "ddim_update",
                "dpm_solver_first_order_update",
                "multistep_dpm_solver_second_order_update",
                "_sigma_to_alpha_sigma_t",
            ),
        ),
        cases.nft_solver,
    ),
    "awm": Case(
        "plan sa_solver, form published",
        Source(
            "scxue/advantage_weighted_matching",
            "be5137232e33a21b449ed65a533211d0deb97ed8",
            "advantage_weighted_matching/flow_grpo/diffusers_patch/sa_solver.py",
            ("SASolver", "NoiseScheduleFlowMatching"),
        ),
        cases.awm_solver,
    ),
}
