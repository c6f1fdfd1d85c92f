#!/bin/bash
# Compares six methods with their published settings and as tuned by tune.sh, on the test prompts:
# runs of 160,000 network evaluations, each judged on 2,176 images.
#
#     bash scripts/research/six/compare.sh                 # seeds 0 to 7, into runs/six-compared
#     SEEDS="0 1" bash scripts/research/six/compare.sh     # two of them; more are added later
#     bash scripts/research/six/compare.sh published       # one of the two arms
#     PROCESSES=15 bash scripts/research/six/compare.sh    # so many runs at a time, as on a GPU
#
# A run takes about seven minutes of one core.
set -euo pipefail
cd "$(dirname "$0")/../../.."

runs="${RUNS:-runs/six-compared}"
configs=()
[ $# -gt 0 ] || set -- published tuned
for arm in "$@"; do
  configs+=(scripts/research/six/"$arm"_*.yaml)
done
read -r -a seeds <<< "${SEEDS:-0 1 2 3 4 5 6 7}"
flowrl compare "${configs[@]}" --seeds "${seeds[@]}" --nfe 160000 --seconds 0 --count calls \
  --points 1 --set prompts.test=assets/shapes/test.jsonl eval.seed=260031 eval.images=16 \
  eval.batch=136 train.threads=1 --processes "${PROCESSES:-1}" --runs "$runs" --out "$runs/result.json"
