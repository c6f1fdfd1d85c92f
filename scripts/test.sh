#!/usr/bin/env bash
# Run all tests, on the CPU and without a network once installed; sets everything up first.
# Arguments go to pytest:
#   bash scripts/test.sh -m unit -k credit
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
export HF_HUB_OFFLINE=1
echo "==> pytest $*"
exec "$python" -m pytest -n auto --dist worksteal "$@" # one worker per core
