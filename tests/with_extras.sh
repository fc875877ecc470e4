#!/usr/bin/env bash
# All extras together in a fresh environment, and the tests that need what `dev` cannot hold: flwr
# keeps packaging below 26, and peft makes every process of the tests start later. All servers and
# nodes listen on the loopback address, and tests end their processes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${1:-build/extras/bin/python}  # an existing environment, or one that is made here
if [[ ! -x $python ]]; then
    folder=$(dirname "$(dirname "$python")")
    trap 'rm -rf "$folder"' ERR  # half an environment would be taken for a whole one
    python3 -m venv "$folder"
    "$python" -m pip install --quiet '.[demo,flower,nvflare,hf,privacy,peft,tracking]' \
        'flwr[simulation]' hypothesis pytest pytest-xdist
    "$python" -m pip check
    trap - ERR
fi
# Flower's command line imports what click 9 will take away.
export FLWR_TELEMETRY_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 WANDB_MODE=offline
PYTHONPATH=. timeout 2400 "$python" -m pytest -m "slow or not slow" -W "ignore:'click:DeprecationWarning" \
    lightning_fl/integrations tests/integrations tests/report/test_tracking.py \
    tests/test_docs.py::test_the_code_of_a_page_runs_with_the_extras_that_it_needs
