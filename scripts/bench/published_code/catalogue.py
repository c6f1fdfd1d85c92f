"""Which published functions are run beside which of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import credit_cases
import solver_cases
import step_cases
from gaps import Gaps
from sources import Source, load


class Case(NamedTuple):
    """What is compared, and where theirs is."""

    ours: str
    source: Source
    run: Callable[[dict[str, Any]], Gaps]

    def found(self, clones: Path) -> Gaps:
        """Run both."""
        return self.run(load(self.source, clones))


MIX = "Tencent-Hunyuan/MixGRPO"
MIX_COMMIT = "e5cdd6a427778d8c8b2e7a48ce16972141adbe7c"
MIX_FILE = "fastvideo/utils/sampling_utils.py"

CASES = {
    "flow_grpo": Case(
        "transition flow_sde",
        Source(
            "yifan123/flow_grpo",
            "ac4c86e8cae021841f1fde853d340e0db67690dd",
            "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py",
            ("sde_step_with_logprob",),
        ),
        step_cases.flow_grpo_step,
    ),
    "flow_grpo, advantages": Case(
        "credit group_norm",
        Source(
            "yifan123/flow_grpo",
            "ac4c86e8cae021841f1fde853d340e0db67690dd",
            "flow_grpo/stat_tracking.py",
            ("PerPromptStatTracker",),
        ),
        credit_cases.prompt_statistics,
    ),
    "dance_grpo": Case(
        "transition dance_sde",
        Source(
            "XueZeyue/DanceGRPO",
            "15cc71d53cc2e6e18a68ee607d5fb6ba9a99e344",
            "fastvideo/train_grpo_flux.py",
            ("flux_step",),
        ),
        step_cases.dance_grpo_step,
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
        credit_cases.branch_advantages,
    ),
    "flash_grpo": Case(
        "transition linear_sde",
        Source(
            "Shredded-Pork/Flash-GRPO",
            "421101378e8811aa7460ada34a3b76ac7b53c9f7",
            "flow_grpo/diffusers_patch/wan2_1_pipeline_with_logprob_sample.py",
            ("sde_step_with_logprob",),
        ),
        step_cases.flash_grpo_step,
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
        solver_cases.nft_solver,
    ),
    "awm": Case(
        "plan sa_solver, form published",
        Source(
            "scxue/advantage_weighted_matching",
            "be5137232e33a21b449ed65a533211d0deb97ed8",
            "advantage_weighted_matching/flow_grpo/diffusers_patch/sa_solver.py",
            ("SASolver", "NoiseScheduleFlowMatching"),
        ),
        solver_cases.awm_solver,
    ),
    "mix_grpo": Case(
        "transition flow_sde",
        Source(MIX, MIX_COMMIT, MIX_FILE, ("flow_grpo_step",)),
        step_cases.mix_grpo_step,
    ),
    "mix_grpo, solver": Case(
        "plan ode, order 2",
        Source(
            MIX,
            MIX_COMMIT,
            MIX_FILE,
            (
                "dpm_step",
                "DPMState",
                "convert_model_output",
                "dpm_solver_first_order_update",
                "multistep_dpm_solver_second_order_update",
                "_sigma_to_alpha_sigma_t",
            ),
        ),
        solver_cases.mix_grpo_solver,
    ),
    "ddpo": Case(
        "transition ddim",
        Source(
            "kvablack/ddpo-pytorch",
            "1958463f020112c9a7bc85768d296daacc2e1b4b",
            "ddpo_pytorch/diffusers_patch/ddim_with_logprob.py",
            ("ddim_step_with_logprob", "_left_broadcast", "_get_variance"),
        ),
        step_cases.ddpo_step,
    ),
    "ddpo, advantages": Case(
        "credit history_norm",
        Source(
            "kvablack/ddpo-pytorch",
            "1958463f020112c9a7bc85768d296daacc2e1b4b",
            "ddpo_pytorch/stat_tracking.py",
            ("PerPromptStatTracker",),
        ),
        credit_cases.prompt_history,
    ),
    "paco_rl": Case(
        "aggregate advantage_sum",
        Source(
            "X-GenGroup/PaCo-RL",
            "08caac6f22c174e2c71019d2a4481abf9ad313d2",
            "PaCo-GRPO/config/grpo.py",
            ("weighted_advantage_sum_aggregate_fn",),
        ),
        credit_cases.summed_advantages,
    ),
    "dgpo": Case(
        "loss dgpo",
        Source(
            "Luo-Yihong/DGPO",
            "01ceb4b83c0bbc55d96246fe1b6d9a3d4749ebd6",
            "scripts/train_sd3_dgpo.py",
            ("compute_group_dgpo_loss_allreduce",),
        ),
        credit_cases.dgpo_loss,
    ),
}
