#!/usr/bin/env bash
# Train the embedded base model with AWM for a few minutes, from a fresh clone; sets everything up
# first. Arguments go to the command line: bash scripts/quickstart.sh --run runs/another
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export HF_HUB_OFFLINE=1 # everything that it needs is in the checkout
echo "==> flowrl train shapes/awm train.iterations=18 $*"
"$VIRTUAL_ENV/bin/flowrl" train shapes/awm train.iterations=18 "$@"
echo "to the length of the demonstration: the command behind \"train on\" with train.iterations=63"
