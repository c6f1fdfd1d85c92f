#!/usr/bin/env bash
# Train the embedded base model with AWM, from a fresh clone; sets everything up first. Arguments go to the
# command line: bash scripts/quickstart.sh train.iterations=9 --run runs/short
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export HF_HUB_OFFLINE=1 # everything that it needs is in the checkout
echo "==> flowrl train shapes/awm train.iterations=18 $*"
"$VIRTUAL_ENV/bin/flowrl" train shapes/awm train.iterations=18 "$@"
cat <<'END'

To train on, to the figures of the README: flowrl train shapes/awm --run runs/long
END
