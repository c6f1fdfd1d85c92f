#!/bin/bash
# Tunes six methods on the validation prompts: eight trials each, of 60,000 network evaluations.
#
#     bash scripts/research/six/tune.sh                     # all, into runs/six
#     bash scripts/research/six/tune.sh awm diffusion_nft   # some of them
#
# Four learning rates and two values of what each method's own papers tune, from the shipped config.
# result-best.yaml beside each result is the best one.
set -euo pipefail
cd "$(dirname "$0")/../../.."

declare -A own=(
  [flow_grpo]="shapes/flow_grpo_full plan.noise_scale=0.4,0.8 optimizer.lr=1e-4,2e-4,5e-4,1e-3"
  [mix_grpo]="shapes/mix_grpo plan.noise_scale=0.4,0.8 optimizer.lr=1e-4,2e-4,5e-4,1e-3"
  [branch_grpo]="shapes/branch_grpo plan.noise_scale=0.3,0.6 optimizer.lr=1e-4,2e-4,5e-4,1e-3"
  [diffusion_nft]="shapes/diffusion_nft loss.beta=0.1,1.0 optimizer.lr=2e-4,5e-4,1e-3,2e-3"
  [awm]="shapes/awm kl.beta=0.3,1.0 optimizer.lr=2e-4,5e-4,1e-3,2e-3"
  [diffusion_dpo]="shapes/diffusion_dpo loss.beta=100,500 optimizer.lr=1e-4,2e-4,5e-4,1e-3"
)

[ $# -gt 0 ] || set -- "${!own[@]}"
for method in "$@"; do
  read -r config first second <<< "${own[$method]}"
  flowrl tune "$config" --try "$first" "$second" --nfe 60000 --count calls --seeds 100 \
    --set train.balance=tag --set train.warmup=2 --set train.threads=1 \
    --set eval.seed=270042 --set eval.images=8 --set eval.batch=136 \
    --runs "${RUNS:-runs/six}/$method" --out "${RUNS:-runs/six}/$method/result.json"
done
